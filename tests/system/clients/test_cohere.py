"""Cohere's SDKs, in Python and in JavaScript, against the real server and the real model."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.clients.corpus import KEY, LONG, QUERY, RANKED, TEXTS, numbers
from tests.support.clients.driving import Client, running_client

MODEL = "all-MiniLM-L6-v2"
BODY = {"model": MODEL, "texts": TEXTS, "input_type": "search_document", "embedding_types": ["float"]}
A_HUNDRED = numbers(100)
JS_BODY = {"model": MODEL, "texts": TEXTS, "inputType": "search_document", "embeddingTypes": ["float"]}


@pytest.fixture(scope="module")
def python() -> Iterator[Client]:
    with running_client("openai-2", "cohere_client") as client:
        yield client


@pytest.fixture(scope="module")
def javascript() -> Iterator[Client]:
    with running_client("node", "cohere_client") as client:
        yield client


def test_second_api(python, float32_server, is_right):
    answer = python.call("embed", url=float32_server.url, body=BODY)
    assert is_right(answer["embeddings"]["float"], TEXTS)
    assert answer["texts"] == TEXTS
    assert answer["meta"]


def test_types_of_numbers(python, float32_server, is_right):
    body = {**BODY, "embedding_types": ["float", "int8", "uint8", "binary", "ubinary"]}
    given = python.call("embed", url=float32_server.url, body=body)["embeddings"]
    assert is_right(given["float"], TEXTS)
    floats = np.array(given["float"], dtype=np.float32)
    bits = np.packbits(floats > 0, axis=1)
    assert np.array_equal(np.array(given["ubinary"]), bits)
    assert np.array_equal(np.array(given["binary"]), bits.astype(np.int16) - 128)
    int8s = np.array(given["int8"])
    assert int8s.shape == floats.shape
    assert ((int8s >= -128) & (int8s <= 127)).all()
    cosines = (int8s * floats).sum(axis=1) / np.linalg.norm(int8s, axis=1)
    assert cosines.min() > 0.99
    assert np.array_equal(np.array(given["uint8"]), int8s + 128)


def test_first_api_in_several_batches(python, float32_server, is_right):
    body = {"model": MODEL, "texts": A_HUNDRED, "input_type": "search_document"}
    answer = python.call("embed_first_api", url=float32_server.url, body=body)
    assert answer["kind"] == "embeddings_floats"
    assert is_right(answer["vectors"], A_HUNDRED)
    assert answer["texts"] == A_HUNDRED


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"key": "wrong"}, "UnauthorizedError"),
        ({"model": "embed-v4.0"}, "NotFoundError"),
        ({"texts": ["word " * 1000], "truncate": "NONE"}, "BadRequestError"),
        ({"texts": []}, "BadRequestError"),
    ],
)
def test_errors(python, strict_server, changes, kind):
    key = changes.get("key", KEY)
    body = BODY | {name: value for name, value in changes.items() if name != "key"}
    error = python.refusal("embed", url=strict_server.url, key=key, body=body)
    assert kind in error.classes
    assert isinstance(error.fields["body"]["message"], str)


@pytest.mark.parametrize("num", [None, 2])
def test_rerank(python, reranker, is_ranked, num):
    body = {"query": QUERY, "documents": RANKED, **({} if num is None else {"top_n": num}), "max_tokens_per_doc": 4096}
    answer = python.call("rerank", url=reranker.url, body=body)
    assert is_ranked(answer["ranked"], num)
    assert answer["search_units"] == 1
    assert answer["id"].startswith("req_")


@pytest.mark.parametrize(
    "documents", [RANKED, [{"text": text, "id": "x"} for text in RANKED]], ids=["texts", "objects"]
)
def test_rerank_by_the_first_api(python, reranker, ranked, is_ranked, documents):
    body = {"model": MODEL, "query": QUERY, "documents": documents, "top_n": 3, "return_documents": True}
    answer = python.call("rerank_first_api", url=reranker.url, body=body)
    assert is_ranked(answer["ranked"], 3)
    assert answer["texts"] == [RANKED[place] for place, _ in ranked[:3]]
    answer = python.call("rerank_first_api", url=reranker.url, body={"query": QUERY, "documents": documents})
    assert is_ranked(answer["ranked"])
    assert answer["texts"] == [None] * len(RANKED)


def test_rerank_by_fields_of_documents(python, reranker, ranked, is_ranked):
    documents = [{"title": text.split()[0], "rest": "\n".join(text.split()[1:]), "id": "w5 w6"} for text in RANKED]
    body = {"query": QUERY, "documents": documents, "rank_fields": ["title", "rest"]}
    assert is_ranked(python.call("rerank_first_api", url=reranker.url, body=body)["ranked"])


def test_rerank_errors(python, reranker, strict_server, float32_server):
    body = {"query": QUERY, "documents": [RANKED[0], LONG]}
    calls: list[tuple[dict, str, str]] = [
        ({"url": strict_server.url, "key": "wrong"}, "UnauthorizedError", "key"),
        ({"url": float32_server.url}, "BadRequestError", "it cannot rerank texts"),
        ({"url": reranker.url, "overflow": "error"}, "BadRequestError", "maximum context length is 60 tokens"),
    ]
    for call, kind, message in calls:
        error = python.refusal("rerank", body=body, **call)
        assert kind in error.classes
        assert message in error.fields["body"]["message"]
    error = python.refusal("rerank", url=reranker.url, body={"query": QUERY, "documents": []})
    assert "BadRequestError" in error.classes


def test_javascript(javascript, float32_server, is_right):
    assert is_right(javascript.call("embed", url=float32_server.url, body=JS_BODY)["float"], TEXTS)


def test_javascript_first_api(javascript, float32_server, is_right):
    body = {"model": MODEL, "texts": TEXTS, "inputType": "search_query"}
    answer = javascript.call("embedFirstApi", url=float32_server.url, body=body)
    assert is_right(answer["vectors"], TEXTS)


@pytest.mark.parametrize("num", [None, 2])
def test_javascript_rerank(javascript, reranker, is_ranked, num):
    body = {"query": QUERY, "documents": RANKED, **({} if num is None else {"topN": num})}
    assert is_ranked(javascript.call("rerank", url=reranker.url, body=body), num)


def test_javascript_errors(javascript, strict_server):
    error = javascript.refusal("embed", url=strict_server.url, key="wrong", body=JS_BODY)
    assert "UnauthorizedError" in error.classes
