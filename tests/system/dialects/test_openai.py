"""OpenAI's dialect: every exchange to the byte, and vectors in each form against those of the plain one."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AzureOpenAI, NotFoundError
from openai.types import CreateEmbeddingResponse

from tests.support import goldens
from tests.support.serving import Server, running_server

VOLATILE = {"id", "created"}
KEY = "right-0123456789"
TEXTS = ["Hello, world", "a", ""]


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    """One that makes all the exceptions."""
    with running_server(
        "--engine", "weightless", "--workers", "1", "--strict-model", "--matryoshka", "--overflow", "error",
        "--model-aliases", "text-embedding-3-small,org/alias", "--api-key", KEY, "--max-request-tokens", "300",
        "--token-ids", "cl100k",
    ) as server:  # fmt: skip
        yield server


def test_golden(weightless):
    goldens.check("openai", weightless.url, VOLATILE)


def test_golden_of_a_strict_server(strict):
    goldens.check("openai_strict", strict.url, VOLATILE)


def test_golden_models(strict):
    """Whose `id` is their name."""
    goldens.check("openai_models", strict.url, {"created"})


def post(server: Server, **fields: Any) -> httpx.Response:
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": TEXTS, **fields}, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer


def items(server: Server, **fields: Any) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = post(server, **fields).json()["data"]
    assert [(item["object"], item["index"]) for item in data] == [("embedding", n) for n in range(len(data))]
    return data


def test_the_deployment_in_azure_s_path_wins_over_the_model_in_the_body(strict):
    """Its client sends both, and whatever model its user has named."""

    def create(deployment: str, model: str) -> CreateEmbeddingResponse:
        with AzureOpenAI(
            azure_endpoint=strict.url, azure_deployment=deployment, api_version="2024-02-01", api_key=KEY, max_retries=0
        ) as client:
            return client.embeddings.create(model=model, input="a")

    assert create("text-embedding-3-small", "text-embedding-ada-002").model == "all-MiniLM-L6-v2"
    for model in ("text-embedding-ada-002", "text-embedding-3-small"):
        with pytest.raises(NotFoundError, match="The model `elsewhere` does not exist") as caught:
            create("elsewhere", model)
        assert caught.value.code == "model_not_found"


def test_azure_s_client_without_a_deployment_puts_the_model_into_the_path(strict):
    with AzureOpenAI(azure_endpoint=strict.url, api_version="2024-02-01", api_key=KEY, max_retries=0) as client:
        assert len(client.embeddings.create(model="org/alias", input="a").data) == 1


def vectors(server: Server, **fields: Any) -> np.ndarray:
    return np.array([item["embedding"] for item in items(server, **fields)], np.float32)


def decoded(server: Server, dtype: str, **fields: Any) -> np.ndarray:
    data = items(server, encoding_format="base64", **fields)
    return np.array([np.frombuffer(base64.b64decode(item["embedding"], validate=True), dtype) for item in data])


def test_all_forms_hold_the_same_vectors(weightless):
    plain = vectors(weightless)
    assert np.allclose(np.linalg.norm(plain, axis=1), 1, atol=1e-6)
    assert np.array_equal(decoded(weightless, "<f4"), plain)
    assert np.array_equal(decoded(weightless, ">f4", endianness="big"), plain)
    assert np.array_equal(decoded(weightless, "<f2", output_dtype="float16"), plain.astype("<f2"))
    signs = np.packbits(plain > 0, axis=1)
    assert np.array_equal(decoded(weightless, "u1", output_dtype="ubinary"), signs)
    assert np.array_equal(vectors(weightless, embedding_type="ubinary"), signs)
    for encoding in ("bytes", "bytes_only"):
        rows = post(weightless, encoding_format=encoding)
        assert np.array_equal(np.frombuffer(rows.content, "<f4").reshape(plain.shape), plain)
    metadata = json.loads(post(weightless, encoding_format="bytes").headers["metadata"])
    assert [item["end"] for item in metadata["data"]] == [1536, 3072, 4608]


def test_vectors_of_other_lengths(weightless):
    plain, raw = vectors(weightless), vectors(weightless, normalize=False)
    lengths = np.linalg.norm(raw, axis=1, keepdims=True)
    assert (np.abs(lengths - 1) > 1e-3).any()
    assert np.allclose(raw / lengths, plain, atol=1e-6)
    for name in ("normalize", "normalized", "use_activation"):
        assert np.allclose(vectors(weightless, **{name: True}), plain, atol=1e-6)
        assert np.array_equal(vectors(weightless, **{name: False}), raw)


def test_a_prompt_is_part_of_the_text(weightless):
    prompted = vectors(weightless, prompt="search for this: ")
    assert np.array_equal(prompted, vectors(weightless, input=["search for this: " + text for text in TEXTS]))
    assert np.array_equal(vectors(weightless, prompt=""), vectors(weightless))


def test_a_long_text_is_what_the_request_makes_of_it(weightless):
    words = [f"word{n % 97}" for n in range(600)]
    text = " ".join(words)
    [beginning] = items(weightless, input=text, report=True)
    end: dict[str, Any] = {}
    for fields in ({"overflow": "truncate"}, {"truncate": True}, {"truncate": "END"}, {"truncate_prompt_tokens": -1}):
        assert items(weightless, input=text, report=True, **fields)[0] == beginning
    for fields in ({"overflow": "truncate_left"}, {"truncate": "START"}, {"truncation_side": "left"}):
        [item] = items(weightless, input=text, report=True, **fields)
        assert end in ({}, item)
        end = item
    assert end["embedding"] != beginning["embedding"]
    assert beginning["report"] == end["report"] == {"tokens": 256, "truncated": True, "chunks": 1, "source": "text"}
    chunked = post(weightless, input=[text, "a"], overflow="chunk", report=True)
    assert chunked.headers["x-vecd-chunked"] == "1"
    assert "x-vecd-truncated" not in chunked.headers
    reports = [item["report"] for item in chunked.json()["data"]]
    assert reports[0]["chunks"] > 1
    assert reports[1] == {"tokens": 3, "truncated": False, "chunks": 1, "source": "text"}
    assert chunked.json()["usage"]["total_tokens"] == reports[0]["tokens"] + 3
    assert post(weightless, input=text).headers["x-vecd-truncated"] == "1"


@pytest.mark.parametrize("fields", [{"overflow": "error"}, {"truncate": False}, {"truncation": False}])
def test_too_long_is_told_in_openais_words(weightless, fields):
    answer = httpx.post(f"{weightless.url}/v1/embeddings", json={"input": "word " * 300, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(
        "This model's maximum context length is 256 tokens, however you requested 302 tokens"
    )


def test_a_large_body_is_answered_as_a_small_one(weightless):
    padding = {"user": "x" * 70_000}
    fields: dict[str, Any] = {"input": [{"text": text} for text in TEXTS], "prompt": "p: ", "output_dtype": "int8"}
    small, large = items(weightless, **fields), items(weightless, **fields, **padding)
    assert small == large


def test_token_ids_are_said_to_be_whose_they_are(weightless, strict):
    answer = post(weightless, input=[[101, 7592, 102]], report=True)
    assert answer.headers["x-vecd-token-ids"] == "model"
    assert answer.json()["data"][0]["report"]["source"] == "model"
    with httpx.Client(base_url=strict.url, headers={"authorization": f"Bearer {KEY}"}) as client:
        answer = client.post("/v1/embeddings", json={"input": [15339, 1917], "report": True})
        assert answer.headers["x-vecd-token-ids"] == "cl100k"
        text = client.post("/v1/embeddings", json={"input": "hello world"})
        assert "x-vecd-token-ids" not in text.headers
        assert answer.json()["data"][0]["embedding"] == text.json()["data"][0]["embedding"]


def test_the_answer_has_the_requests_id(weightless):
    answer = httpx.post(
        f"{weightless.url}/v1/embeddings", json={"input": "a"}, headers={"x-request-id": "my-request.1"}
    )
    assert (answer.json()["id"], answer.headers["x-request-id"]) == ("embd-my-request.1", "my-request.1")
