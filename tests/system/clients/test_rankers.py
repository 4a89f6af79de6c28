"""Rerankers of LangChain, LlamaIndex, Haystack and LiteLLM, and the clients of Voyage and infinity, against a real
cross-encoder with random weights."""

import math
from typing import Any

import pytest

from tests.support.clients.corpus import LONG, QUERY, RANKED
from tests.support.clients.driving import Client
from tests.support.serving import RunningServer

RERANKERS = [
    "voyage", "infinity",
    "langchain_cohere", "langchain_jina", "langchain_infinity", "llama_index_tei", "llama_index_xinference",
    "haystack_tei", "haystack_jina", "haystack_vllm",
]  # fmt: skip
"""Of each API one or two: libraries that call Cohere's or Voyage's own client beneath add nothing to the wire."""
HIDING = {"infinity": "AttributeError", "langchain_infinity": "TypeError", "llama_index_tei": "AssertionError"}
"""Those that do not look at the status of a response, and what they raise where there are no results in it."""


@pytest.fixture(scope="module")
def rankers(library) -> Client:
    client: Client = library("rankers", "rankers_client")
    return client


@pytest.mark.parametrize("num", [None, 2])
@pytest.mark.parametrize("name", RERANKERS)
def test_the_best_come_first(rankers, reranker, is_ranked, name, num):
    assert is_ranked(rankers.call(name, url=reranker.url, query=QUERY, texts=RANKED, num=num), num)


@pytest.mark.parametrize("name", RERANKERS)
def test_a_model_that_cannot_rank_is_named_as_the_reason(rankers, float32_server, name):
    error = rankers.refusal(name, url=float32_server.url, query=QUERY, texts=RANKED, num=None)
    if name in HIDING:
        assert HIDING[name] in error.classes
    else:
        assert "it cannot rerank texts" in error.message


@pytest.mark.parametrize(
    ("name", "options"), [("voyage", {"truncation": False}), ("haystack_vllm", {"overflow": "error"})]
)
def test_a_document_that_may_not_be_cut_is_named(rankers, reranker, name, options):
    error = rankers.refusal(name, url=reranker.url, query=QUERY, texts=[RANKED[0], LONG], num=None, **options)
    assert "maximum context length is 60 tokens" in error.message
    assert "documents[1]" in error.message


def test_infinity_classifies(rankers, classifier):
    given = rankers.call("infinity_classify", url=classifier.url, texts=RANKED)
    expected = classifier.post("/predict", inputs=[[text] for text in RANKED])
    assert given == [[[item["label"], pytest.approx(item["score"])] for item in labels] for labels in expected]


# --- LiteLLM ----------------------------------------------------------------------------------------------------

PROVIDERS = {
    "cohere": "", "jina_ai": "", "together_ai": "/v1", "hosted_vllm": "", "infinity": "", "huggingface": "",
    "voyage": "/voyage", "nvidia_nim": "",
}  # fmt: skip
"""Providers of `rerank`, and the path of their `api_base`."""


@pytest.fixture(scope="module")
def litellm(library) -> Client:
    client: Client = library("litellm", "litellm_client")
    return client


def options_of(server: RunningServer, provider: str, **options: Any) -> dict[str, Any]:
    # Without `ranking/` it posts to a path of NVIDIA's own.
    named = {"model": "ranking/m"} if provider == "nvidia_nim" else {}
    url = server.url + PROVIDERS[provider]
    return {"provider": provider, "url": url, "query": QUERY, "texts": RANKED, **named, **options}


def check_ranked(provider: str, given: list[list[Any]], expected: list[tuple[int, float]]) -> None:
    assert [place for place, _ in given] == [place for place, _ in expected]
    scores = [1 / (1 + math.exp(-score)) if provider == "nvidia_nim" else score for _, score in given]
    assert scores == pytest.approx([score for _, score in expected], rel=1e-6)


@pytest.mark.parametrize("num", [None, 2])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm(litellm, reranker, ranked, provider, num):
    answer = litellm.call("rerank", **options_of(reranker, provider, top_n=num, return_documents=False))
    check_ranked(provider, answer["ranked"], ranked[:num])


@pytest.mark.parametrize("provider", [name for name in PROVIDERS if name != "infinity"])
def test_litellm_with_documents(litellm, reranker, ranked, provider):
    """LiteLLM requests them by default."""
    answer = litellm.call("rerank", **options_of(reranker, provider))
    check_ranked(provider, answer["ranked"], ranked)
    assert answer["texts"] == [RANKED[place] for place, _ in ranked]


@pytest.mark.parametrize(
    ("provider", "server", "options", "kind", "words"),
    [
        # It makes an object of the document, which is one already.
        ("infinity", "reranker", {}, "", "validation errors for RerankResponse"),
        # LiteLLM sends `truncate: false`.
        ("huggingface", "reranker", {"texts": [RANKED[0], LONG]}, "", "maximum context length is 60 tokens"),
        *[
            (
                name,
                "float32_server",
                {},
                "APIError" if name == "huggingface" else "BadRequestError",
                "it cannot rerank texts",
            )
            for name in PROVIDERS
        ],
        *[(name, "strict_server", {"key": "wrong"}, "AuthenticationError", "") for name in PROVIDERS],
    ],
)
def test_litellm_reads_refusals(litellm, request, provider, server, options, kind, words):
    error = litellm.refusal("rerank", **options_of(request.getfixturevalue(server), provider, **options))
    assert words in error.message
    assert not kind or kind in error.classes
