"""openai-node against the real server and the real model: the newest, the newest for node 20, and the 4.x that
AnythingLLM carries.

Up to 6.x it takes a list of numbers for base64 without a word, and makes a quarter of the numbers of it, all zero.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.support.clients.corpus import KEY, NUM_TOKENS, SLOW_KEY, TEXTS
from tests.support.clients.driving import ClientError, running_client

MODEL = "all-MiniLM-L6-v2"


@pytest.fixture(scope="module", params=[(7, "node-24"), (6, "node"), (4, "node")], ids=["7", "6", "4"])
def openai(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Calls a function of the script with one major version."""
    major, environment = request.param
    with running_client(environment, "openai_client") as client:
        yield partial(client.call, major=major)


@pytest.fixture
def create(openai, float32_server):
    def call(**body):
        return openai("create", url=f"{float32_server.url}/v1", body={"model": MODEL, **body})

    return call


@pytest.fixture
def refusal(openai, strict_server):
    def call(key: str = KEY, **body) -> ClientError:
        with pytest.raises(ClientError) as caught:
            openai("create", url=f"{strict_server.url}/v1", key=key, body={"model": MODEL, **body})
        return caught.value

    return call


def test_default_settings(create, is_right):
    answer = create(input=TEXTS)
    assert is_right(answer["vectors"], TEXTS)
    assert answer["model"] == MODEL
    assert answer["usage"] == {"prompt_tokens": sum(NUM_TOKENS), "total_tokens": sum(NUM_TOKENS)}


def test_nulls_are_absent(create, is_right):
    # AnythingLLM sends such where nothing is set.
    nulls = {"model": None, "dimensions": None, "user": None, "encoding_format": None}
    assert is_right(create(input=TEXTS, **nulls)["vectors"], TEXTS)


@pytest.mark.parametrize("value", [[], [None], {}, [1.5]])
def test_of_bad_input_the_caller_reads_our_message(refusal, value):
    error = refusal(input=value)
    assert error.fields["status"] == 400
    assert error.fields["param"] == "input"
    assert "input" in error.message
    assert "status code (no body)" not in error.message


def test_a_wrong_key(refusal):
    error = refusal(key="null", input="a")
    assert (error.fields["status"], error.fields["code"]) == (401, "invalid_api_key")


def test_who_is_over_a_limit_waits_as_told_and_is_served(openai, strict_server):
    """A request of 32 tokens is more than the key may spend at once, so that the next one has to wait."""
    arguments = {"url": f"{strict_server.url}/v1", "key": SLOW_KEY, "maxRetries": 5}
    for text in ("word " * 30, "a"):
        answer = openai("create", **arguments, body={"model": MODEL, "input": text})
        assert len(answer["vectors"][0]) == 384


def test_models(openai, float32_server):
    assert openai("models", url=f"{float32_server.url}/v1") == [MODEL]
