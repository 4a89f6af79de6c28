"""Vercel's AI SDK, which checks every answer against a schema of its own."""

from collections.abc import Iterator

import pytest

from tests.support.clients.corpus import numbers
from tests.support.clients.driving import Client, ClientError, running_client
from tests.support.clients.keys import KEY


@pytest.fixture(scope="module")
def sdk() -> Iterator[Client]:
    with running_client("node", "ai_sdk_client") as client:
        yield client


def test_embed_without_a_key(sdk, float32_server, is_right):
    answer = sdk.call("embed", url=f"{float32_server.url}/v1", value="Hello, world")
    assert is_right(answer["vectors"], ["Hello, world"])
    assert answer["usage"]["tokens"] == 5


def test_three_thousand_are_sent_in_two_requests(sdk, float32_server, is_right):
    texts = numbers(3000)
    answer = sdk.call("embedMany", url=f"{float32_server.url}/v1", values=texts)
    assert is_right(answer["vectors"], texts)


def test_an_error_is_read(sdk, strict_server):
    with pytest.raises(ClientError) as caught:
        sdk.call("embed", url=f"{strict_server.url}/v1", key=KEY, value="word " * 1000)
    assert caught.value.fields["statusCode"] == 400
    assert "maximum context length is 256 tokens" in caught.value.message
