"""LlamaIndex.TS against the real server and the real model. It sends ten texts at a time, or one with Ollama's API."""

from collections.abc import Iterator

import pytest

from tests.support.clients.corpus import TEXTS, numbers
from tests.support.clients.driving import Client, ClientError, running_client
from tests.support.clients.keys import KEY, num_answers


@pytest.fixture(scope="module")
def llamaindex() -> Iterator[Client]:
    with running_client("node-24", "llamaindex_client") as client:
        yield client


@pytest.mark.parametrize("api", ["openai", "ollama"])
def test_texts(llamaindex, float32_server, is_right, api):
    texts = [text for text in TEXTS if text] + numbers(11)  # an empty prompt has no vector with Ollama
    assert is_right(llamaindex.call("embedTexts", api=api, url=float32_server.url, texts=texts), texts)


@pytest.mark.parametrize("api", ["openai", "ollama"])
def test_a_query(llamaindex, float32_server, is_right, api):
    vectors = llamaindex.call("embedQuery", api=api, url=float32_server.url, text="what is this?")
    assert is_right(vectors, ["what is this?"])


def test_dimensions_that_the_model_has(llamaindex, float32_server, is_right):
    arguments = {"url": float32_server.url, "texts": TEXTS, "options": {"dimensions": 384}}
    assert is_right(llamaindex.call("embedTexts", api="openai", **arguments), TEXTS)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ({"key": "wrong"}, "Incorrect API key provided"),
        ({"key": KEY, "texts": ["word " * 1000]}, "maximum context length is 256 tokens"),
        ({"key": KEY, "options": {"dimensions": 1536}}, "leave it out, or set 384"),
    ],
)
def test_a_refusal_is_read_and_not_tried_again(llamaindex, strict_server, refused, message):
    before = num_answers(strict_server, "4xx", KEY)
    arguments = {"url": strict_server.url, "texts": ["a"], **refused}
    arguments["options"] = {"maxRetries": 3, **arguments.get("options", {})}
    with pytest.raises(ClientError) as caught:
        llamaindex.call("embedTexts", api="openai", **arguments)
    assert message in caught.value.message
    assert num_answers(strict_server, "4xx", KEY) - before == 1
