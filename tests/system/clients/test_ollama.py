"""Ollama's SDKs, in Python and in JavaScript, against the real server and the real model."""

from collections.abc import Iterator

import pytest

from tests.support.clients.corpus import NUM_TOKENS, TEXTS
from tests.support.clients.driving import Client, running_client

MODEL = "all-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def python() -> Iterator[Client]:
    with running_client("openai-2", "ollama_client") as client:
        yield client


@pytest.fixture(scope="module")
def javascript() -> Iterator[Client]:
    with running_client("node", "ollama_client") as client:
        yield client


def test_embed(python, float32_server, is_right):
    answer = python.call("embed", url=float32_server.url, body={"model": MODEL, "input": TEXTS})
    assert is_right(answer["vectors"], TEXTS)
    assert (answer["model"], answer["tokens"]) == (MODEL, sum(NUM_TOKENS))


def test_embed_asynchronously(python, float32_server, is_right):
    assert is_right(python.call("embed_later", url=float32_server.url, body={"model": MODEL, "input": TEXTS}), TEXTS)


def test_the_endpoint_of_before(python, float32_server, is_right):
    vectors = python.call("embeddings", url=float32_server.url, body={"model": MODEL, "prompt": "hello"})
    assert is_right(vectors, ["hello"])


def test_what_is_told_of_the_model(python, float32_server):
    answer = python.call("describe", url=float32_server.url, model=MODEL)
    assert [name.removesuffix(":latest") for name in answer["listed"]] == [MODEL]
    assert [name.removesuffix(":latest") for name in answer["running"]] == [MODEL]
    assert "embedding" in answer["capabilities"]
    assert answer["pulled"] == "success"


def test_a_text_that_is_too_long_where_it_may_not_be_cut(python, float32_server):
    body = {"model": MODEL, "input": "word " * 1000, "truncate": False}
    error = python.refusal("embed", url=float32_server.url, body=body)
    assert "ResponseError" in error.classes
    assert error.fields["status_code"] == 400
    assert "256" in error.message


def test_javascript(javascript, float32_server, is_right):
    assert is_right(javascript.call("embed", url=float32_server.url, body={"model": MODEL, "input": TEXTS}), TEXTS)
    body = {"model": MODEL, "prompt": "hello"}
    assert is_right(javascript.call("embeddings", url=float32_server.url, body=body), ["hello"])
    [listed] = javascript.call("list", url=float32_server.url)
    assert listed.removesuffix(":latest") == MODEL


def test_javascript_reads_our_message(javascript, float32_server):
    error = javascript.refusal("embed", url=float32_server.url, body={"model": MODEL, "input": 5})
    assert "input" in error.message
    assert "[object Object]" not in error.message
