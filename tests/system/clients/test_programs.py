"""Requests of programs that cannot be installed here, as their sources send them, and what these need of the answer.

Shapes of requests, but for those that another one has: read in the sources of Weaviate's `text2vec-openai`, Vespa's
embedders, Milvus' functions, Open WebUI 0.12, Dify's plugin, Continue, AnythingLLM's LocalAI provider, and
langchain-ollama, in November 2026. Elasticsearch's inference service `openai`, Spring AI 2 and pgai's vectorizer send
no others.
"""

import base64
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from tests.support.clients.corpus import KEY, NUM_TOKENS, TEXTS

MODEL = "all-MiniLM-L6-v2"
_PLAIN = {"model": MODEL, "input": TEXTS}
_OLLAMA_OPTIONS = (
    "mirostat", "mirostat_eta", "mirostat_tau", "num_ctx", "num_gpu", "num_thread", "repeat_last_n", "repeat_penalty",
    "temperature", "stop", "tfs_z", "top_k", "top_p",
)  # fmt: skip


class Request(NamedTuple):
    body: dict[str, Any]
    headers: dict[str, str] = {}  # noqa: RUF012 (nobody changes it)
    path: str = "/v1/embeddings"


OPENAI = {
    "Weaviate": Request(
        _PLAIN, {"authorization": "Bearer x", "openai-organization": "o", "accept-encoding": "gzip"}
    ),
    "Vespa": Request(
        {**_PLAIN, "dimensions": 384, "encoding_format": "base64"},
        {"authorization": "Bearer x", "content-type": "application/json; charset=utf-8"},
    ),
    "Dify": Request({**_PLAIN, "encoding_format": "float"}, {"authorization": ""}),
    "Continue": Request(_PLAIN, {"authorization": "Bearer undefined", "api-key": ""}),
    "AnythingLLM": Request(
        {**_PLAIN, "dimensions": None, "encoding_format": "float"}, {"authorization": "Bearer null"}
    ),
}  # fmt: skip
OTHERS = {
    "Milvus, TEI": Request({"inputs": TEXTS, "truncate": True, "truncation_direction": "Right"}, path="/embed"),
    "Vespa, TEI": Request(
        {"inputs": TEXTS, "normalize": True, "truncate": True, "truncation_direction": "right", "dimensions": 384},
        path="/embed",
    ),
    "Continue, TEI": Request({"inputs": TEXTS}, path="/embed"),
    "Open WebUI, Ollama": Request({**_PLAIN, "truncate": True}, path="/api/embed"),
    "langchain-ollama": Request(
        {**_PLAIN, "truncate": True, "options": dict.fromkeys(_OLLAMA_OPTIONS), "keep_alive": None}, path="/api/embed"
    ),
}


def send(url: str, request: Request) -> httpx.Response:
    return httpx.post(url + request.path, json=request.body, headers=request.headers, timeout=60)


@pytest.mark.parametrize("program", OPENAI)
def test_openai(float32_server, is_right, program):
    answer = send(float32_server.url, OPENAI[program])
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body["usage"] == {"prompt_tokens": sum(NUM_TOKENS), "total_tokens": sum(NUM_TOKENS)}
    assert (body["object"], body["model"]) == ("list", MODEL)
    assert [item["index"] for item in body["data"]] == list(range(len(TEXTS)))
    vectors = [item["embedding"] for item in body["data"]]
    if OPENAI[program].body.get("encoding_format") == "base64":
        vectors = [np.frombuffer(base64.b64decode(text, validate=True), dtype="<f4").tolist() for text in vectors]
    assert is_right(vectors, TEXTS)


@pytest.mark.parametrize("program", OTHERS)
def test_other_dialects(float32_server, is_right, program):
    answer = send(float32_server.url, OTHERS[program])
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert is_right(body if isinstance(body, list) else body["embeddings"], TEXTS)


def test_continue_reads_limits(float32_server):
    info = httpx.get(f"{float32_server.url}/info", timeout=30).json()
    assert isinstance(info["model_id"], str)
    assert info["max_client_batch_size"] == 2048


def test_elasticsearch_cuts_and_tries_again_where_it_reads_that_a_text_is_too_long(strict_server):
    request = Request({"model": MODEL, "input": ["word " * 1000]}, {"authorization": f"Bearer {KEY}"})
    answer = send(strict_server.url, request)
    assert answer.status_code == 400
    assert "Please reduce your prompt; or completion length." in answer.json()["error"]["message"]


@pytest.mark.parametrize("key", [KEY, "wrong"])
def test_weaviate_reads_errors(strict_server, key):
    """`param` a string or null; `code` a string, a number or null."""
    answer = send(strict_server.url, Request({"model": "other", "input": ["a"]}, {"authorization": f"Bearer {key}"}))
    error = answer.json()["error"]
    assert answer.status_code == (404 if key == KEY else 401)
    assert isinstance(error["message"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)


def test_n8n_lists_models_first(float32_server):
    [model] = httpx.get(f"{float32_server.url}/v1/models", timeout=30).json()["data"]
    assert (model["id"], model["object"]) == (MODEL, "model")
    assert isinstance(model["created"], int)
