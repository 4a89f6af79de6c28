"""LiteLLM, mem0 and semantic-kernel against the real server and the real model.

LiteLLM tells errors by words: "invalid_request_error" anywhere in the body makes a bad request of every status.
"""

from collections.abc import Iterator

import pytest

from tests.support.clients.corpus import NUM_TOKENS, TEXTS
from tests.support.clients.driving import Client, ClientError, running_client
from tests.support.clients.keys import KEY

PROVIDERS = ["openai", "hosted_vllm", "infinity", "jina_ai", "cohere", "ollama"]


@pytest.fixture(scope="module")
def litellm() -> Iterator[Client]:
    with running_client("litellm", "litellm_client") as client:
        yield client


@pytest.mark.parametrize("provider", PROVIDERS)
def test_embed(litellm, float32_server, is_right, provider):
    answer = litellm.call("embed", provider=provider, url=float32_server.url, texts=TEXTS)
    assert is_right(answer["vectors"], TEXTS)
    assert answer["tokens"] == sum(NUM_TOKENS)


@pytest.mark.parametrize("fields", [{"encoding_format": None}, {"encoding_format": "float"}, {"user": "u"}])
def test_fields(litellm, float32_server, is_right, fields):
    answer = litellm.call("embed", provider="openai", url=float32_server.url, texts=TEXTS, **fields)
    assert is_right(answer["vectors"], TEXTS)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ({"key": "wrong"}, "AuthenticationError"),
        ({"model": "other"}, "NotFoundError"),
        ({"texts": ["word " * 1000]}, "ContextWindowExceededError"),
        ({"texts": []}, "BadRequestError"),
        (
            {"texts": ["word " * 200] * 2048, "extra_headers": {"x-vecd-timeout-ms": "1"}},
            "ServiceUnavailableError",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_are_the_right_exceptions(litellm, strict_server, provider, call, kind):
    arguments = {"provider": provider, "url": strict_server.url, "key": KEY, "texts": ["a"], **call}
    with pytest.raises(ClientError) as caught:
        litellm.call("embed", **arguments)
    assert kind in caught.value.classes


def test_mem0(litellm, float32_server, is_right):
    assert is_right(litellm.call("mem0", url=float32_server.url, text="hello"), ["hello"])


def test_semantic_kernel(litellm, float32_server, is_right):
    assert is_right(litellm.call("semantic_kernel", url=float32_server.url, texts=TEXTS), TEXTS)
