"""agno, pydantic-ai, DSPy, txtai and LiteLLM's proxy against the real server and the real model."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.support.clients.corpus import NUM_TOKENS, TEXTS, numbers
from tests.support.clients.driving import Client, ClientError, running_client

_PROXIED = """\
model_list:
- {{model_name: complete, litellm_params: {{model: openai/all-MiniLM-L6-v2, api_base: {url}/v1, api_key: unused,
    drop_params: true}}, model_info: {{mode: embedding}}}}
- {{model_name: bare, litellm_params: {{model: openai/unheard-of, api_base: {url}/v1, api_key: unused}}}}
- {{model_name: huggingface, litellm_params: {{model: huggingface/all-MiniLM-L6-v2, api_base: {url}/embed,
    api_key: unused, drop_params: true, input_type: feature-extraction}}, model_info: {{mode: embedding}}}}
"""


class Proxy(NamedTuple):
    client: Client
    url: str


@pytest.fixture(scope="module")
def agents() -> Iterator[Client]:
    with running_client("agents", "agents_client") as client:
        yield client


@pytest.fixture(scope="module")
def proxy(float32_server) -> Iterator[Proxy]:
    with running_client("agents", "proxy_client") as client:
        yield Proxy(client, client.call("start", config=_PROXIED.format(url=float32_server.url)))


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        ("agno_openai", TEXTS),
        ("agno_openai_batch", TEXTS),
        ("agno_ollama", ["hello", "what is this?"]),  # with Ollama, an empty text has no vector
        ("pydantic_ai", TEXTS),
        ("dspy", numbers(201)),  # 200 a request
        ("txtai", TEXTS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_embed(agents, float32_server, is_right, function, texts):
    assert is_right(agents.call(function, url=float32_server.url, texts=texts), texts)


def test_agno_is_told_which_dimensions_to_set(agents, float32_server):
    with pytest.raises(ClientError, match="leave it out, or set 384"):
        agents.call("agno_openai", url=float32_server.url, texts=["hello"], dimensions=None)


def test_txtai_finds_what_it_has_indexed(agents, float32_server):
    texts = ["what is this?", "Hello, world", "number 5", "hello world"]
    assert agents.call("txtai_search", url=float32_server.url, texts=texts, query="hello world") == [3, 1]


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("complete", {}),
        ("complete", {"encoding_format": "float", "user": "u"}),
        ("complete", {"dimensions": 384}),
        ("bare", {}),
        ("huggingface", {"encoding_format": "float"}),
    ],
)
def test_proxy(proxy, is_right, model, fields):
    answer = proxy.client.call("embed", proxy=proxy.url, texts=TEXTS, model=model, **fields)
    assert is_right(answer["vectors"], TEXTS)
    if model != "huggingface":  # it counts tokens of its own
        assert answer["tokens"] == sum(NUM_TOKENS)


def test_proxy_refuses_dimensions_unless_it_may_drop_them(proxy):
    with pytest.raises(ClientError, match="Setting dimensions is not supported"):
        proxy.client.call("embed", proxy=proxy.url, texts=TEXTS, model="bare", dimensions=384)


def test_proxy_finds_models_healthy_whose_mode_it_knows(proxy):
    health = proxy.client.call("health", proxy=proxy.url)
    assert health["healthy"] == ["huggingface/all-MiniLM-L6-v2", "openai/all-MiniLM-L6-v2"]
    assert health["unhealthy"] == ["openai/unheard-of"]  # it was sent a chat request
