"""Vectors of late chunks are the means of sentence-transformers' token embeddings, over the tokens of each chunk."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from tests.support.every_kind import folders, served
from tests.support.serving import RunningServer

DOCUMENT = (
    "Berlin is the capital of Germany. It has 3.8 million inhabitants, more than any other city there.\n"
    "The city is one of the sixteen federal states! Was it ever small? Yes: “very small”, in 1237. "
    "Naïve visitors from 東京。come 😀 anyway,   and stay for unaffable reasons"
)


@pytest.fixture(scope="module")
def minilm() -> RunningServer:
    return served("prompted")


@pytest.fixture(scope="module")
def model(minilm_folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(minilm_folder), device="cpu", local_files_only=True)


def items(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.post("/v1/embeddings", **body)["data"]
    return found


def vectors(chunks: list[dict[str, Any]]) -> NDArray[np.float64]:
    return np.array([chunk["embedding"] for chunk in chunks])


def pooled(
    model: SentenceTransformer, text: str, ranges: list[tuple[int, int]], prompt: str = ""
) -> NDArray[np.float64]:
    """By hand: the mean of each range's tokens, [CLS] with the first and [SEP] with the last, brought to length 1."""
    states = np.asarray(model.encode(prompt + text, output_value="token_embeddings"), np.float64)
    encoding = model.tokenizer(prompt + text, return_offsets_mapping=True)
    ends = [end - len(prompt) for _, end in encoding["offset_mapping"]]
    rows = [row for row in range(1, len(ends) - 1) if ends[row] > 0]
    expected = []
    for start, end in ranges:
        own = [row for row in rows if start < ends[row] <= end]
        own = [0] * (own[0] == rows[0]) + own + [len(ends) - 1] * (own[-1] == rows[-1])
        mean = states[own].mean(axis=0)
        expected.append(mean / np.linalg.norm(mean))
    return np.array(expected)


def ranges_of(chunks: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(chunk["start"], chunk["end"]) for chunk in chunks]


@pytest.mark.parametrize("prompt", ["", "passage: "])
@pytest.mark.parametrize("max_tokens", [1, 9, 30, 256])
def test_chunks_by_tokens_are_means_of_token_embeddings(minilm, model, max_tokens, prompt):
    chunks = items(minilm, input=DOCUMENT, late_chunking={"max_tokens": max_tokens}, prompt=prompt)
    ranges = ranges_of(chunks)
    assert "".join(DOCUMENT[start:end] for start, end in ranges) == DOCUMENT
    assert np.abs(vectors(chunks) - pooled(model, DOCUMENT, ranges, prompt)).max() < 1e-5


def test_every_way_to_say_the_same_chunks_has_the_same_vectors(minilm, model):
    chunks = items(minilm, input=[DOCUMENT, "Another."], late_chunking={"max_tokens": 20})
    assert [chunk["input"] for chunk in chunks] == [*[0] * (len(chunks) - 1), 1]
    ranges = ranges_of(chunks)[:-1]
    expected = vectors(chunks)[:-1]
    by_ranges = items(minilm, input=DOCUMENT, late_chunking={"ranges": ranges})
    as_inputs = items(minilm, input=[DOCUMENT[start:end] for start, end in ranges], late_chunking=True)
    assert np.abs(vectors(by_ranges) - expected).max() < 1e-6
    assert np.abs(vectors(as_inputs) - expected).max() < 1e-6
    # They are not the vectors of the same texts without the others.
    alone = items(minilm, input=[DOCUMENT[start:end] for start, end in ranges])
    assert np.abs(vectors(alone) - expected).max(axis=1).min() > 1e-2
    overlapping = [(0, 60), (34, len(DOCUMENT)), (34, 60)]
    found = vectors(items(minilm, input=DOCUMENT, late_chunking={"ranges": overlapping}))
    assert np.abs(found - pooled(model, DOCUMENT, overlapping)).max() < 1e-5


def test_a_chunk_of_all_of_a_text_has_its_vector(minilm):
    texts = [DOCUMENT, "a", "Two words"]
    for more in ({}, {"dimensions": 100}, {"normalize": False}, {"add_special_tokens": False}):
        expected = vectors(items(minilm, input=texts, **more))
        whole = items(minilm, input=texts, late_chunking={"max_tokens": 256}, **more)
        assert np.abs(vectors(whole) - expected).max() < 1e-6
    [alone] = items(minilm, input=DOCUMENT, late_chunking=True)
    assert np.abs(np.array(alone["embedding"]) - vectors(items(minilm, input=DOCUMENT))).max() < 1e-6


def test_of_a_text_that_is_cut_the_rest_is_reported(minilm, model):
    words = "word " * 300
    ranges = [(0, 50), (1000, 1300), (1300, 1500)]
    chunks = items(minilm, input=words, late_chunking={"ranges": ranges}, truncate=True)
    assert [chunk.get("truncated", False) for chunk in chunks] == [False, True, True]
    assert chunks[2]["embedding"] is None
    states = np.asarray(model.encode(words, output_value="token_embeddings"), np.float64)
    assert len(states) == 256
    for chunk, rows in zip(chunks, (states[:11], states[201:]), strict=False):
        assert np.abs(chunk["embedding"] - rows.mean(0) / np.linalg.norm(rows.mean(0))).max() < 1e-5


def test_vectors_that_are_no_means_have_no_chunks() -> None:
    url = f"{served('cls').url}/v1/embeddings"
    response = httpx.post(url, json={"input": "w2", "late_chunking": True}, timeout=60)
    assert response.status_code == 400
    assert "this one has the pooling cls" in response.json()["error"]["message"]


def test_a_long_text_has_chunks() -> None:
    """More of its tokens than other models have rows for in a slot, in parts over several turns of the gateway."""
    server, words = served("long"), " ".join(f"w{2 + n % 90}" for n in range(2900))
    [whole] = vectors(items(server, input=words))
    [chunk] = vectors(items(server, input=words, late_chunking=True))
    assert np.abs(chunk - whole).max() < 1e-6
    chunks = items(server, input=words, late_chunking={"max_tokens": 7})
    assert len(chunks) == -(-2900 // 7)
    encoder = SentenceTransformer(str(folders()["long"]), device="cpu", local_files_only=True)
    expected = pooled(encoder, words, ranges_of(chunks))
    assert np.abs(vectors(chunks) - expected).max() < 1e-5
