"""vLLM's dialect: every exchange to the byte, and its vectors beside those of /v1/embeddings."""

import base64
from typing import Any

import httpx
import numpy as np

from tests.support import goldens
from tests.support.serving import Server


def test_golden(weightless):
    goldens.check("vllm", weightless.url, {"id", "created", "version"})


def post(server: Server, path: str, **fields: Any) -> Any:
    response = httpx.post(f"{server.url}{path}", json=fields, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


def test_pooling_is_embedding_in_another_shape(weightless):
    for fields in ({}, {"encoding_format": "base64"}, {"use_activation": False}, {"task": "embed", "prompt": "p: "}):
        pooled = post(weightless, "/pooling", input=["a b", "c"], **fields)
        fields.pop("task", None)
        embedded = post(weightless, "/v1/embeddings", input=["a b", "c"], **fields)
        assert [item["data"] for item in pooled["data"]] == [item["embedding"] for item in embedded["data"]]
        assert {item["object"] for item in pooled["data"]} == {"pooling"}
        assert pooled["usage"] == embedded["usage"]


def test_each_token_has_a_vector(weightless):
    raw = post(weightless, "/pooling", input=["a b c", "d"], task="token_embed", use_activation=False)
    rows = [np.array(item["data"], np.float32) for item in raw["data"]]
    assert [array.shape for array in rows] == [(5, 384), (3, 384)]
    normalized = post(weightless, "/pooling", input=["a b c", "d"], task="token_embed")
    for item, expected in zip(normalized["data"], rows, strict=True):
        lengths = np.linalg.norm(expected, axis=1, keepdims=True)
        assert np.allclose(item["data"], expected / lengths, atol=1e-6)
    encoded = post(
        weightless, "/pooling", input="d", task="token_embed", use_activation=False, encoding_format="base64"
    )
    assert base64.b64decode(encoded["data"][0]["data"]) == rows[1].astype("<f4").tobytes()


def test_tokens_and_back_again(weightless):
    text = "Hello, wörld 漢字 👍"
    tokenized = post(weightless, "/tokenize", prompt=text, return_token_strs=True)
    assert tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"])
    embedded = post(weightless, "/v1/embeddings", input=text)
    assert tokenized["count"] == embedded["usage"]["prompt_tokens"]
    by_ids = post(weightless, "/v1/embeddings", input=tokenized["tokens"])
    assert by_ids["data"] == embedded["data"]
    back = post(weightless, "/detokenize", tokens=tokenized["tokens"][1:-1])["prompt"]
    assert post(weightless, "/v1/embeddings", input=back)["data"] == embedded["data"]


def test_a_long_text_is_counted_whole(weightless):
    for num_words in (1000, 40_000):
        tokenized = post(weightless, "/tokenize", prompt="word " * num_words)
        assert tokenized["count"] == len(tokenized["tokens"]) == num_words + 2


def test_sagemaker_is_answered_as_v1_embeddings(weightless):
    invoked = post(weightless, "/invocations", input=["a", "b"], encoding_format="base64")
    assert invoked["data"] == post(weightless, "/v1/embeddings", input=["a", "b"], encoding_format="base64")["data"]
    for method in ("GET", "POST"):
        assert httpx.request(method, f"{weightless.url}/ping").status_code == 200
