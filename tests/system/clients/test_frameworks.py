"""Frameworks, stores and programs that embed through a client library: LangChain, LlamaIndex, Haystack, LiteLLM,
Chroma, Open WebUI, mteb and the SDK of Vercel; each against the real server and the real model. The simplest call of
each, and of agno, DSPy, txtai, pydantic-ai, mem0, semantic-kernel and Milvus, is in docs/clients.md (`test_docs.py`).
"""

import base64
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.clients.corpus import KEY, NUM_TOKENS, PLACES, TEXTS, numbers
from tests.support.clients.driving import Client
from tests.support.shared_servers import shared_server
from tests.system.clients.conftest import Counting
from vecd.gateway.tokenization import cl100k


class Case(NamedTuple):
    environment: str
    script: str
    function: str
    texts: list[str]
    arguments: dict[str, Any] = {}  # noqa: RUF012 (nobody changes it)
    path: str = ""
    """Of the address that is given, below the server's."""


NOT_EMPTY = [text for text in TEXTS if text]
"""With Ollama, an empty text has no vector in some libraries."""
ALL = list(PLACES)
ELEVEN = [*numbers(11), "what is this?"]
"""OpenAILikeEmbedding sends ten at a time."""
FRAMEWORKS = ("frameworks", "frameworks_client")
LITELLM = ("litellm", "litellm_client")
OPEN_WEBUI = ("open-webui", "open_webui_client", "embed")
STORES = ("stores", "stores_client")
LANGCHAIN = ("openai-3", "langchain_client")
LANGCHAIN_JS = ("node-24", "langchain_client")
LLAMAINDEX_TS = ("node-24", "llamaindex_client")
AI_SDK = ("node", "ai_sdk_client")
KINDS = ("openai_like", "openai", "text_embeddings_inference", "ollama")
AS_TEXT = {"check_embedding_ctx_length": False}
CASES = {
    **{f"LlamaIndex, {kind}": Case(*FRAMEWORKS, "llama_index", ELEVEN, {"kind": kind}) for kind in KINDS},
    **{
        f"LlamaIndex, {kind}, later": Case(*FRAMEWORKS, "llama_index_later", numbers(30), {"kind": kind})
        for kind in KINDS
    },
    "Haystack, documents": Case(*FRAMEWORKS, "haystack_documents", TEXTS),
    "Voyage": Case(*FRAMEWORKS, "voyage", TEXTS, {"input_type": "document"}),
    "Voyage, dimensions": Case(*FRAMEWORKS, "voyage", TEXTS, {"output_dimension": 384}),
    **{
        f"LiteLLM, {provider}": Case(*LITELLM, "embed", TEXTS, {"provider": provider})
        for provider in ("openai", "hosted_vllm", "infinity", "jina_ai", "cohere", "ollama")
    },
    "Open WebUI": Case(*OPEN_WEBUI, TEXTS, {"engine": "openai", "batch_size": 32}, "/v1"),
    "Open WebUI, all at once": Case(*OPEN_WEBUI, numbers(200), {"engine": "openai"}, "/v1"),
    "Open WebUI, Ollama": Case(*OPEN_WEBUI, NOT_EMPTY, {"engine": "ollama", "batch_size": 32}),
    "Open WebUI, Ollama, all at once": Case(*OPEN_WEBUI, numbers(200), {"engine": "ollama"}),
    "infinity's client, which sends 0 dimensions": Case("rankers", "rankers_client", "infinity_embed", TEXTS),
    # By default LangChain sends ids of OpenAI's vocabulary.
    "LangChain, ids": Case(*LANGCHAIN, "embed_documents", ALL, path="/v1"),
    "LangChain, texts": Case(*LANGCHAIN, "embed_documents", ALL, AS_TEXT, "/v1"),
    "LangChain, texts, later": Case(*LANGCHAIN, "embed_documents_later", ALL, AS_TEXT, "/v1"),
    "LangChain, queries, ids": Case(*LANGCHAIN, "embed_queries", ["what is this?", ""], path="/v1"),
    "LangChain, queries, texts": Case(*LANGCHAIN, "embed_queries", ["what is this?", ""], AS_TEXT, "/v1"),
    "LangChain, 1,001": Case(*LANGCHAIN, "embed_documents", numbers(1001), AS_TEXT, "/v1"),
    "LangChain, floats": Case(
        *LANGCHAIN,
        "embed_documents",
        ALL,
        {**AS_TEXT, "model_kwargs": {"encoding_format": "float"}, "dimensions": 384},
        "/v1",
    ),
    "LangChain.js 6, 513": Case("node", "langchain_client", "embedDocuments", numbers(513), path="/v1"),
    "LangChain.js, a query": Case(*LANGCHAIN_JS, "embedQueries", ["what is this?"], path="/v1"),
    "LangChain.js, 513": Case(*LANGCHAIN_JS, "embedDocuments", numbers(513), path="/v1"),
    **{
        f"LangChain.js, {api} {options}, {function}": Case(
            *LANGCHAIN_JS, function, texts, {"api": api, "options": options}
        )
        for api, options in (("ollama", {"truncate": True}), ("cohere", {}), ("cohere", {"embeddingTypes": ["float"]}))
        for function, texts in (("embedDocuments", ALL), ("embedQueries", ["what is this?"]))
    },
    **{
        f"LlamaIndex.TS, {api}, {function}": Case(*LLAMAINDEX_TS, function, texts, {"api": api})
        for api in ("openai", "ollama")
        for function, texts in (("embedTexts", [*NOT_EMPTY, *numbers(11)]), ("embedQueries", ["what is this?"]))
    },
    "LlamaIndex.TS, dimensions": Case(
        *LLAMAINDEX_TS, "embedTexts", TEXTS, {"api": "openai", "options": {"dimensions": 384}}
    ),
    "AI SDK, 3,000 in two requests": Case(*AI_SDK, "embedMany", numbers(3000), path="/v1"),
}


@pytest.fixture(scope="module")
def tiktoken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What tiktoken would fetch, of what the server has of it: in each line an id's bytes, as base64, and the id.
    tiktoken checks that the table is OpenAI's own, by its SHA-256: so what the server ships is checked, too."""
    lengths, starts, tokens = cl100k.load()
    folder = tmp_path_factory.mktemp("tiktoken")
    # SHA-1 of the table's address: so tiktoken names the file.
    with open(folder / "9b5ad71b2ce5302211f9c61530b329a4922fc6a4", "wb") as file:
        for index in np.flatnonzero(lengths[: cl100k.FIRST_UNKNOWN_ID]):
            token = tokens[starts[index] : starts[index] + lengths[index]].tobytes()
            file.write(base64.b64encode(token) + b" %d\n" % index)
    return {"TIKTOKEN_CACHE_DIR": str(folder)}


@pytest.fixture(scope="module")
def of(library: Callable[..., Client], tiktoken: dict[str, str]) -> Callable[..., Client]:
    """By the names of its environment and script."""
    return lambda *names: library(*names, tiktoken if names == LANGCHAIN else None)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_vectors_are_the_model_s(of, float32_server, is_right, case):
    client = of(case.environment, case.script)
    given = client.call(case.function, url=float32_server.url + case.path, texts=case.texts, **case.arguments)
    assert is_right(given["vectors"] if isinstance(given, dict) else given, case.texts)
    if isinstance(given, dict) and case.texts is TEXTS:
        assert given["tokens"] == sum(NUM_TOKENS)


TOO_LONG = ["word " * 1000]
_LITELLM_ERRORS: dict[str, dict[str, Any]] = {
    "AuthenticationError": {"key": "wrong"},
    "NotFoundError": {"model": "other"},
    "ContextWindowExceededError": {"texts": TOO_LONG},
    "BadRequestError": {"texts": []},
    "ServiceUnavailableError": {
        "texts": ["word " * 200] * 2048,
        "extra_headers": {"x-vecd-timeout-ms": "1"},
    },
}
REFUSALS = {
    "Haystack": (
        Case(*FRAMEWORKS, "haystack_documents", TOO_LONG, {"key": KEY}),
        "strict_server",
        "maximum context length is 256 tokens",
    ),
    "Voyage": (Case(*FRAMEWORKS, "voyage", TOO_LONG, {"truncation": False}), "float32_server", "InvalidRequestError"),
    "Voyage, a wrong key": (
        Case(*FRAMEWORKS, "voyage", ["a"], {"key": "wrong"}),
        "strict_server",
        "AuthenticationError",
    ),
    "Open WebUI, a wrong key": (
        Case(*OPEN_WEBUI, ["a"], {"engine": "openai", "key": "wrong"}, "/v1"),
        "strict_server",
        "401",
    ),
    "Open WebUI, Ollama, a wrong key": (
        Case(*OPEN_WEBUI, ["a"], {"engine": "ollama", "key": "wrong"}),
        "strict_server",
        "API key",
    ),
    "Chroma, 5,000 in one request": (
        Case(*STORES, "chroma_collection", numbers(5000), {"query": "number 5"}),
        "float32_server",
        "at most 2048 in one request",
    ),
    # It sends `truncate: false`, unless it is told otherwise.
    "LangChain.js, Ollama": (
        Case(*LANGCHAIN_JS, "embedQueries", TOO_LONG, {"api": "ollama"}),
        "float32_server",
        "the input length exceeds the context length",
    ),
    "AI SDK": (
        Case(*AI_SDK, "embed", TOO_LONG, {"key": KEY}, "/v1"),
        "strict_server",
        "maximum context length is 256 tokens",
    ),
    # LiteLLM tells errors by words: "invalid_request_error" anywhere in the body makes a bad request of every status.
    **{
        f"LiteLLM, {kind}": (
            Case(*LITELLM, "embed", ["a"], {"provider": "openai", "key": KEY, **call}),
            "strict_server",
            kind,
        )
        for kind, call in _LITELLM_ERRORS.items()
    },
}


@pytest.mark.parametrize(("case", "server", "words"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_refusal_is_read(of, request, case, server, words):
    """`words`: of the message, or the class of the exception."""
    url = request.getfixturevalue(server).url + case.path
    arguments = {"texts": case.texts, **case.arguments}
    error = of(case.environment, case.script).refusal(case.function, url=url, **arguments)
    assert words in error.message or words in error.classes, error


@pytest.mark.parametrize(
    ("case", "words"),
    [
        *[
            (Case(environment, "langchain_client", "embedQueries", ["a"], {"url": "/v1", **refused}), words)
            for environment in ("node", "node-24")
            for words, refused in (
                ("", {"key": "wrong"}),
                ("", {"model": "other", "key": KEY}),
                ("", {"key": KEY, "texts": TOO_LONG}),
            )
        ],
        *[
            (Case(*LLAMAINDEX_TS, "embedTexts", ["a"], {"api": "openai", **refused}), words)
            for words, refused in (
                ("Incorrect API key provided", {"key": "wrong", "options": {"maxRetries": 3}}),
                ("maximum context length", {"key": KEY, "texts": TOO_LONG, "options": {"maxRetries": 3}}),
                ("leave it out, or set 384", {"key": KEY, "options": {"dimensions": 1536, "maxRetries": 3}}),
            )
        ],
    ],
    ids=lambda value: value.environment if isinstance(value, Case) else value,
)
def test_a_refusal_is_not_tried_again(of, strict_server, case, words):
    """LangChain.js would try six times more, and for minutes, for a status that it does not take for the caller's
    mistake."""
    with Counting(strict_server) as counted:
        arguments = {"texts": case.texts, **case.arguments}
        arguments["url"] = counted.url + arguments.get("url", "")
        error = of(case.environment, case.script).refusal(case.function, **arguments)
    assert words in error.message
    assert "status code (no body)" not in error.message
    assert len(counted.statuses) == 1


@pytest.mark.parametrize("environment", ["node", "node-24"])
def test_langchain_js_cuts_513_documents_into_two_requests(of, strict_server, environment):
    with Counting(strict_server) as counted:
        of(environment, "langchain_client").call("embedDocuments", url=f"{counted.url}/v1", key=KEY, texts=numbers(513))
    assert counted.statuses == [200, 200]


def test_a_text_that_langchain_cuts_in_two(of, float32_server, is_right):
    """Above 8,191 ids it sends parts, and takes their mean. Of each, the server reads the first 254 words: the same."""
    vectors = of(*LANGCHAIN).call("embed_documents", url=f"{float32_server.url}/v1", texts=["word " * 9000])
    assert is_right(vectors, ["word " * 600])


def test_haystack_embeds_documents_of_which_one_has_no_content(of, float32_server, is_right):
    texts: list[str | None] = [*numbers(40), None]
    answer = of(*FRAMEWORKS).call("haystack_documents", url=float32_server.url, texts=texts)
    assert is_right(answer["vectors"], [*numbers(40), ""])
    assert answer["tokens"] == 40 * 4 + 2


def test_chroma_adds_five_thousand_in_one_request(of, is_right):
    stores, texts = of(*STORES), numbers(5000)  # nothing is started for a client that is not there
    url = shared_server("--dtype", "float32", "--max-inputs", "6000").url
    answer = stores.call("chroma_collection", url=url, texts=texts, query="number 5")
    assert is_right(answer["vectors"], texts)
    assert answer["found"] == "number 5"


# --- mteb ----------------------------------------------------------------------------------------------------------


def test_a_task_of_mteb(of, float32_server, is_right, expected):
    answer = of("mteb", "mteb_client").call("evaluate", url=float32_server.url)
    assert is_right(answer["vectors"], answer["texts"])
    assert answer["max_length"] == 256  # read from /v1/models, and sent as truncate_prompt_tokens
    first, second = np.split(expected(answer["texts"]), 2)
    similarity = np.corrcoef((first * second).sum(axis=1), answer["human_scores"])[0, 1]
    assert answer["scores"]["cosine_pearson"] == pytest.approx(similarity, abs=1e-5)


def test_mteb_gives_up_a_server_with_keys(of, strict_server):
    """mteb lists the models without its key."""
    error = of("mteb", "mteb_client").refusal("evaluate", url=strict_server.url)
    assert "401" in error.message
    assert "ConnectionError" in error.classes


# --- LiteLLM's proxy -----------------------------------------------------------------------------------------------

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
def proxy(of, float32_server) -> Proxy:
    client = of("agents", "proxy_client")
    return Proxy(client, client.call("start", config=_PROXIED.format(url=float32_server.url)))


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("complete", {"encoding_format": "float", "user": "u", "dimensions": 384}),
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
    error = proxy.client.refusal("embed", proxy=proxy.url, texts=TEXTS, model="bare", dimensions=384)
    assert "Setting dimensions is not supported" in error.message


def test_proxy_finds_models_healthy_whose_mode_it_knows(proxy):
    health = proxy.client.call("health", proxy=proxy.url)
    assert health["healthy"] == ["huggingface/all-MiniLM-L6-v2", "openai/all-MiniLM-L6-v2"]
    assert health["unhealthy"] == ["openai/unheard-of"]  # it was sent a chat request
