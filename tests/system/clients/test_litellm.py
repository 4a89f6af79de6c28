"""LiteLLM, mem0 and semantic-kernel against the real server and the real model.

LiteLLM tells errors by words: "invalid_request_error" anywhere in the body makes a bad request of every status.
"""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.clients.corpus import LONG, NUM_TOKENS, QUERY, RANKED, TEXTS
from tests.support.clients.driving import Client, ClientError, running_client
from tests.support.clients.keys import KEY
from tests.support.serving import Server

RERANKERS = {
    "cohere": "", "jina_ai": "", "together_ai": "/v1", "hosted_vllm": "", "infinity": "", "huggingface": "",
    "voyage": "/voyage", "nvidia_nim": "",
}  # fmt: skip
"""Providers of `rerank`, and the path of their `api_base`."""
_MODELS = {"nvidia_nim": {"model": "ranking/m"}}
"""Without `ranking/` it posts to a path of NVIDIA's own."""
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


def rerank(litellm: Client, server: Server, provider: str, **options: Any) -> dict[str, Any]:
    options = {"texts": RANKED, **_MODELS.get(provider, {}), **options}
    return litellm.call("rerank", provider=provider, url=server.url + RERANKERS[provider], query=QUERY, **options)


def check_ranked(provider: str, given: list[list[Any]], expected: list[tuple[int, float]]) -> None:
    assert [place for place, _ in given] == [place for place, _ in expected]
    scores = [sigmoid(score) if provider == "nvidia_nim" else score for _, score in given]
    assert scores == pytest.approx([score for _, score in expected], rel=1e-6)


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


@pytest.mark.parametrize("num", [None, 2])
@pytest.mark.parametrize("provider", RERANKERS)
def test_rerank(litellm, reranker, ranked, provider, num):
    answer = rerank(litellm, reranker, provider, top_n=num, return_documents=False)
    check_ranked(provider, answer["ranked"], ranked[:num])


@pytest.mark.parametrize("provider", [name for name in RERANKERS if name != "infinity"])
def test_rerank_with_documents(litellm, reranker, ranked, provider):
    """LiteLLM requests them by default."""
    answer = rerank(litellm, reranker, provider)
    check_ranked(provider, answer["ranked"], ranked)
    assert answer["texts"] == [RANKED[place] for place, _ in ranked]


def test_infinity_s_documents_are_not_what_litellm_expects(litellm, reranker):
    """It makes an object of the document, which is one already."""
    with pytest.raises(ClientError) as caught:
        rerank(litellm, reranker, "infinity")
    assert "validation errors for RerankResponse" in caught.value.message


@pytest.mark.parametrize("provider", [name for name in RERANKERS if name != "huggingface"])
def test_rerank_with_a_long_document(litellm, reranker, provider):
    answer = rerank(litellm, reranker, provider, texts=[*RANKED, LONG], return_documents=False)
    assert sorted(place for place, _ in answer["ranked"]) == list(range(len(RANKED) + 1))


def test_huggingface_allows_no_long_document(litellm, reranker):
    """LiteLLM sends `truncate: false`."""
    with pytest.raises(ClientError) as caught:
        rerank(litellm, reranker, "huggingface", texts=[RANKED[0], LONG])
    assert "maximum context length is 60 tokens" in caught.value.message


@pytest.mark.parametrize("provider", RERANKERS)
def test_a_model_that_cannot_rank_is_named_as_the_reason(litellm, float32_server, provider):
    with pytest.raises(ClientError) as caught:
        rerank(litellm, float32_server, provider)
    assert ("APIError" if provider == "huggingface" else "BadRequestError") in caught.value.classes
    assert "it cannot rerank texts" in caught.value.message


@pytest.mark.parametrize("provider", RERANKERS)
def test_rerank_with_a_wrong_key(litellm, strict_server, provider):
    with pytest.raises(ClientError) as caught:
        rerank(litellm, strict_server, provider, key="wrong")
    assert "AuthenticationError" in caught.value.classes


def test_mem0(litellm, float32_server, is_right):
    assert is_right(litellm.call("mem0", url=float32_server.url, text="hello"), ["hello"])


def test_semantic_kernel(litellm, float32_server, is_right):
    assert is_right(litellm.call("semantic_kernel", url=float32_server.url, texts=TEXTS), TEXTS)
