"""OpenAI's and Cohere's dialects: vectors in each form against those of the plain one, and Azure's client."""

import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AzureOpenAI, NotFoundError

from tests.support.serving import RunningServer
from tests.system.dialects.conftest import KEY

TEXTS = ["Hello, world", "a", ""]


def post(server: RunningServer, **fields: Any) -> httpx.Response:
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": TEXTS, **fields}, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer


def items(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = post(server, **fields).json()["data"]
    assert [(item["object"], item["index"]) for item in data] == [("embedding", n) for n in range(len(data))]
    return data


def vectors(server: RunningServer, **fields: Any) -> np.ndarray:
    return np.array([item["embedding"] for item in items(server, **fields)], np.float32)


def decoded(server: RunningServer, dtype: str, **fields: Any) -> np.ndarray:
    data = items(server, encoding_format="base64", **fields)
    return np.array([np.frombuffer(base64.b64decode(item["embedding"], validate=True), dtype) for item in data])


def test_azure_s_client(strict):
    """It sends both a deployment, in the path, which wins, and whatever model its user has named. Without a deployment
    it puts the model into the path."""

    def create(model: str, deployment: str | None = None) -> str:
        with AzureOpenAI(
            azure_endpoint=strict.url, azure_deployment=deployment, api_version="2024-02-01", api_key=KEY, max_retries=0
        ) as client:
            return client.embeddings.create(model=model, input="a").model

    served = create("text-embedding-ada-002", "text-embedding-3-small")
    assert served == create("org/alias") == "all-MiniLM-L6-v2"
    for model in ("text-embedding-ada-002", "text-embedding-3-small"):
        with pytest.raises(NotFoundError, match="The model `elsewhere` does not exist") as caught:
            create(model, "elsewhere")
        assert caught.value.code == "model_not_found"


def test_all_forms_hold_the_same_vectors(dummy):
    plain = vectors(dummy)
    assert np.allclose(np.linalg.norm(plain, axis=1), 1, atol=1e-6)
    assert np.array_equal(decoded(dummy, "<f4"), plain)
    assert np.array_equal(decoded(dummy, ">f4", endianness="big"), plain)
    assert np.array_equal(decoded(dummy, "<f2", output_dtype="float16"), plain.astype("<f2"))
    signs = np.packbits(plain > 0, axis=1)
    assert np.array_equal(decoded(dummy, "u1", output_dtype="ubinary"), signs)
    assert np.array_equal(vectors(dummy, embedding_type="ubinary"), signs)
    for encoding in ("bytes", "bytes_only"):
        rows = post(dummy, encoding_format=encoding)
        assert np.array_equal(np.frombuffer(rows.content, "<f4").reshape(plain.shape), plain)
    metadata = json.loads(post(dummy, encoding_format="bytes").headers["metadata"])
    assert [item["end"] for item in metadata["data"]] == [1536, 3072, 4608]


def test_vectors_of_other_lengths(dummy):
    plain, raw = vectors(dummy), vectors(dummy, normalize=False)
    lengths = np.linalg.norm(raw, axis=1, keepdims=True)
    assert (np.abs(lengths - 1) > 1e-3).any()
    assert np.allclose(raw / lengths, plain, atol=1e-6)
    for name in ("normalize", "normalized", "use_activation"):
        assert np.allclose(vectors(dummy, **{name: True}), plain, atol=1e-6)
        assert np.array_equal(vectors(dummy, **{name: False}), raw)


def test_a_prompt_is_part_of_the_text(dummy):
    prompted = vectors(dummy, prompt="search for this: ")
    assert np.array_equal(prompted, vectors(dummy, input=["search for this: " + text for text in TEXTS]))
    assert np.array_equal(vectors(dummy, prompt=""), vectors(dummy))


def test_a_long_text_is_what_the_request_makes_of_it(dummy):
    text = " ".join(f"word{n % 97}" for n in range(600))
    [beginning] = items(dummy, input=text, report=True)
    for fields in ({"overflow": "truncate"}, {"truncate": True}, {"truncate": "END"}, {"truncate_prompt_tokens": -1}):
        assert items(dummy, input=text, report=True, **fields) == [beginning]
    ends = [
        items(dummy, input=text, report=True, **fields)
        for fields in ({"overflow": "truncate_left"}, {"truncate": "START"}, {"truncation_side": "left"})
    ]
    [end] = ends[0]
    assert ends == [[end]] * 3
    assert end["embedding"] != beginning["embedding"]
    assert beginning["report"] == end["report"] == {"tokens": 256, "truncated": True, "chunks": 1, "source": "text"}
    chunked = post(dummy, input=[text, "a"], overflow="chunk", report=True)
    assert chunked.headers["x-vecd-chunked"] == "1"
    assert "x-vecd-truncated" not in chunked.headers
    reports = [item["report"] for item in chunked.json()["data"]]
    assert reports[0]["chunks"] > 1
    assert reports[1] == {"tokens": 3, "truncated": False, "chunks": 1, "source": "text"}
    assert chunked.json()["usage"]["total_tokens"] == reports[0]["tokens"] + 3
    assert post(dummy, input=text).headers["x-vecd-truncated"] == "1"


def test_a_large_body_is_answered_as_a_small_one(dummy):
    fields: dict[str, Any] = {"input": [{"text": text} for text in TEXTS], "prompt": "p: ", "output_dtype": "int8"}
    assert items(dummy, **fields, user="x" * 70_000) == items(dummy, **fields)


def test_cohere_s_large_body(dummy):
    """It is parsed in a thread and in pieces; so is a large list of objects."""
    texts = [f"text number {i}: " + "word " * 20 for i in range(1000)]
    body = dummy.post("/v2/embed", texts=texts, embedding_types=["float", "ubinary"])
    assert body["texts"] == texts
    floats = np.array(body["embeddings"]["float"], dtype=np.float32)
    assert floats.shape == (1000, 384)
    assert np.array_equal(np.packbits(floats > 0, axis=1), body["embeddings"]["ubinary"])
    other = dummy.post("/v2/embed", inputs=[{"content": [{"type": "text", "text": text}]} for text in texts])
    assert other["texts"] == texts
    assert np.array_equal(np.array(other["embeddings"]["float"], dtype=np.float32), floats)


def test_ids_of_openai_s_vocabulary_are_the_text_s(strict):
    with httpx.Client(base_url=strict.url, headers={"authorization": f"Bearer {KEY}"}) as client:
        by_ids = client.post("/v1/embeddings", json={"input": [15339, 1917], "report": True})
        text = client.post("/v1/embeddings", json={"input": "hello world"})
    assert by_ids.headers["x-vecd-token-ids"] == "cl100k"
    assert "x-vecd-token-ids" not in text.headers
    assert by_ids.json()["data"][0]["embedding"] == text.json()["data"][0]["embedding"]
