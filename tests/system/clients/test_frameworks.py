"""LlamaIndex, Haystack and Voyage's client against the real server and the real model."""

from collections.abc import Iterator

import pytest

from tests.support.clients.corpus import NUM_TOKENS, TEXTS, numbers
from tests.support.clients.driving import Client, ClientError, running_client
from tests.support.clients.keys import KEY

ELEVEN = numbers(11)
"""OpenAILikeEmbedding sends ten at a time."""
KINDS = ["openai_like", "openai", "text_embeddings_inference", "ollama"]


@pytest.fixture(scope="module")
def frameworks() -> Iterator[Client]:
    with running_client("frameworks", "frameworks_client") as client:
        yield client


@pytest.mark.parametrize("kind", KINDS)
def test_llama_index(frameworks, float32_server, is_right, kind):
    answer = frameworks.call("llama_index", kind=kind, url=float32_server.url, texts=ELEVEN, query="what is this?")
    assert is_right(answer["texts"], ELEVEN)
    assert is_right([answer["query"]], ["what is this?"])


@pytest.mark.parametrize("kind", KINDS)
def test_llama_index_asynchronously(frameworks, float32_server, is_right, kind):
    texts = numbers(30)
    assert is_right(frameworks.call("llama_index_later", kind=kind, url=float32_server.url, texts=texts), texts)


def test_haystack_embeds_a_text(frameworks, float32_server, is_right):
    answer = frameworks.call("haystack_text", url=float32_server.url, text="hello world")
    assert is_right(answer["vectors"], ["hello world"])
    assert answer["meta"]["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


def test_haystack_embeds_documents_of_which_one_has_no_content(frameworks, float32_server, is_right):
    texts: list[str | None] = [*numbers(40), None]
    answer = frameworks.call("haystack_documents", url=float32_server.url, texts=texts)
    assert is_right(answer["vectors"], [*numbers(40), ""])
    assert answer["meta"]["usage"]["total_tokens"] == 40 * 4 + 2


def test_haystack_says_why_documents_have_no_embedding(frameworks, strict_server):
    with pytest.raises(ClientError) as caught:
        frameworks.call("haystack_documents", url=strict_server.url, key=KEY, texts=["word " * 1000])
    assert "maximum context length is 256 tokens" in caught.value.message


def test_voyage(frameworks, float32_server, is_right):
    answer = frameworks.call("voyage", url=float32_server.url, texts=TEXTS, options={"input_type": "document"})
    assert is_right(answer["vectors"], TEXTS)
    assert answer["tokens"] == sum(NUM_TOKENS)
    answer = frameworks.call("voyage", url=float32_server.url, texts=TEXTS, options={"output_dimension": 384})
    assert is_right(answer["vectors"], TEXTS)


def test_voyage_refuses_what_is_too_long_where_it_may_not_be_cut(frameworks, float32_server):
    with pytest.raises(ClientError) as caught:
        frameworks.call("voyage", url=float32_server.url, texts=["word " * 1000], options={"truncation": False})
    assert "InvalidRequestError" in caught.value.classes


def test_voyage_with_a_wrong_key(frameworks, strict_server):
    with pytest.raises(ClientError) as caught:
        frameworks.call("voyage", url=strict_server.url, key="wrong", texts=["a"], options={})
    assert "AuthenticationError" in caught.value.classes
