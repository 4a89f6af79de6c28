"""Rerankers of LangChain, LlamaIndex and Haystack, and the clients of Voyage and infinity, against a real cross-encoder
with random weights."""

from collections.abc import Iterator

import httpx
import pytest

from tests.support.clients.corpus import LONG, QUERY, RANKED, TEXTS
from tests.support.clients.driving import Client, ClientError, running_client

RERANKERS = [
    "voyage", "infinity",
    "langchain_cohere", "langchain_voyage", "langchain_jina", "langchain_infinity",
    "llama_index_tei", "llama_index_cohere", "llama_index_jina", "llama_index_voyage", "llama_index_xinference",
    "haystack_tei", "haystack_cohere", "haystack_jina", "haystack_vllm",
]  # fmt: skip

HIDING = {"infinity": "AttributeError", "langchain_infinity": "TypeError", "llama_index_tei": "AssertionError"}
"""Those that do not look at the status of a response, and what they raise where there are no results in it."""


@pytest.fixture(scope="module")
def rankers() -> Iterator[Client]:
    with running_client("rankers", "rankers_client") as client:
        yield client


@pytest.mark.parametrize("num", [None, 2])
@pytest.mark.parametrize("name", RERANKERS)
def test_the_best_come_first(rankers, reranker, is_ranked, name, num):
    assert is_ranked(rankers.call(name, url=reranker.url, query=QUERY, texts=RANKED, num=num), num)


@pytest.mark.parametrize("name", RERANKERS)
def test_a_long_document_fails_no_request(rankers, reranker, name):
    given = rankers.call(name, url=reranker.url, query=QUERY, texts=[*RANKED, LONG], num=None)
    assert sorted(place for place, _ in given) == list(range(len(RANKED) + 1))


@pytest.mark.parametrize("name", [name for name in RERANKERS if name not in HIDING])
def test_a_model_that_cannot_rank_is_named_as_the_reason(rankers, float32_server, name):
    with pytest.raises(ClientError) as caught:
        rankers.call(name, url=float32_server.url, query=QUERY, texts=RANKED, num=None)
    assert "it cannot rerank texts" in caught.value.message


@pytest.mark.parametrize("name", HIDING)
def test_clients_that_do_not_read_errors_raise_something_else(rankers, float32_server, name):
    with pytest.raises(ClientError) as caught:
        rankers.call(name, url=float32_server.url, query=QUERY, texts=RANKED, num=None)
    assert HIDING[name] in caught.value.classes
    assert "rerank" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "options"), [("voyage", {"truncation": False}), ("haystack_vllm", {"overflow": "error"})]
)
def test_a_document_that_may_not_be_cut_is_named(rankers, reranker, name, options):
    with pytest.raises(ClientError) as caught:
        rankers.call(name, url=reranker.url, query=QUERY, texts=[RANKED[0], LONG], num=None, **options)
    assert "maximum context length is 60 tokens" in caught.value.message
    assert "documents[1]" in caught.value.message


def test_infinity_embeds(rankers, float32_server, is_right):
    """Its client always sends `dimensions` 0, for all of them."""
    assert is_right(rankers.call("infinity_embed", url=float32_server.url, texts=TEXTS), TEXTS)


def test_infinity_classifies(rankers, classifier):
    given = rankers.call("infinity_classify", url=classifier.url, texts=RANKED)
    body = {"inputs": [[text] for text in RANKED]}
    expected = httpx.post(f"{classifier.url}/predict", json=body, timeout=30).raise_for_status().json()
    assert given == [[[item["label"], pytest.approx(item["score"])] for item in labels] for labels in expected]
