"""`import vecd` with real models: vectors are sentence-transformers', and other results those of a direct request, also
when a call is cut into several requests."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import vecd
from tests.support.every_kind import served
from tests.support.serving import RunningServer

TEXTS = [" ".join(f"w{4 + (7 * row + 3 * place) % 110}" for place in range(1 + row % 9)) for row in range(30)]
TIMES = 18
MANY = TEXTS * TIMES
"""Two requests."""
SENTENCES = [
    "Hello, world",
    "",
    "The quick brown fox jumps over the lazy dog. " * 20,
    "Grüße 你好 🙂",
    "second text",
] * 3


def client_of(name: str) -> tuple[vecd.Client, RunningServer]:
    server = served(name)
    return vecd.Client(server.url, timeout=120), server


def test_encode_is_sentence_transformers(float32_server: RunningServer, minilm_folder: Path) -> None:
    model = SentenceTransformer(str(minilm_folder), device="cpu", local_files_only=True)
    expected = model.encode(SENTENCES)
    with vecd.Client(float32_server.url, timeout=120) as client:
        for found in (client.encode(SENTENCES), client.embed(SENTENCES), asyncio.run(of_coroutine(client.url))):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            assert np.abs(found - expected).max() <= 1e-5
        assert np.abs(client.encode(SENTENCES[0]) - expected[0]).max() <= 1e-5
        assert np.abs(client.encode_query(SENTENCES) - model.encode_query(SENTENCES)).max() <= 1e-5
        assert np.abs(client.encode(SENTENCES, prompt="p: ") - model.encode(SENTENCES, prompt="p: ")).max() <= 1e-5
        cosines = model.similarity(expected, expected).numpy()
        assert np.abs(client.similarity(client.encode(SENTENCES), expected) - cosines).max() <= 1e-5
        assert client.info()["model"]["dimensions"] == 384
        [labels] = client.classify("My card was charged twice", labels=["spam", "billing", "shipping"])
        assert [labels[0].label, len(labels)] == ["billing", 3]
        assert sum(label.score for label in labels) == pytest.approx(1)


async def of_coroutine(url: str) -> Any:
    async with vecd.AsyncClient(url, timeout=120) as client:
        return await client.encode(SENTENCES)


def test_sparse_vectors() -> None:
    client, server = client_of("splade")
    with client:
        expected = server.post("/v1/embeddings", input=TEXTS, output="sparse")["data"]
        vectors = client.sparse(MANY)
        assert max(len(one.indices) for one in vectors) > 2
        for found, item in zip(vectors, expected * TIMES, strict=True):
            weights = dict(zip(item["sparse"]["indices"], item["sparse"]["values"], strict=True))
            assert dict(zip(found.indices.tolist(), found.values.tolist(), strict=True)) == pytest.approx(
                weights, abs=1e-4
            )
        assert max(len(one.indices) for one in client.sparse(TEXTS, top_k=2)) == 2


def test_vectors_of_tokens() -> None:
    client, server = client_of("m3")
    with client:
        expected = server.post("/v1/embeddings", input=TEXTS, output="multi-vector")["data"]
        for rows, item in zip(client.multi_vector(MANY), expected * TIMES, strict=True):
            assert rows.dtype == np.float32
            assert np.allclose(rows, item["embeddings"], atol=1e-5)


def test_scores() -> None:
    client, server = client_of("scores")
    with client:
        data = server.post("/score", queries="w5 w9", documents=TEXTS)["data"]
        assert np.allclose(
            client.score([("w5 w9", text) for text in MANY]), [d["score"] for d in data] * TIMES, rtol=1e-4
        )
        results = server.post("/v1/rerank", query="w5 w9", documents=TEXTS, raw_scores=True)["results"]
        logits = [item["relevance_score"] for item in sorted(results, key=lambda item: item["index"])] * TIMES
        ranked = client.rerank("w5 w9", MANY, raw_scores=True)
        assert sorted(document.index for document in ranked) == list(range(len(MANY)))
        assert np.allclose([document.score for document in ranked], sorted(logits, reverse=True), atol=1e-4)
        assert np.allclose([document.score for document in ranked], [logits[each.index] for each in ranked], atol=1e-4)
        best = client.rerank("w5 w9", MANY, top_n=3)
        # Copies of one text are equal but for the last bit, so which of them come first is open.
        assert [each.index % len(TEXTS) for each in best] == [each.index % len(TEXTS) for each in ranked[:3]]
        assert np.allclose([d.score for d in best], [1 / (1 + np.exp(-d.score)) for d in ranked[:3]], atol=1e-4)
        with pytest.raises(vecd.BadRequest, match="dense"):
            client.embed("w5")


def test_labels() -> None:
    client, server = client_of("labels")
    with client:
        for items in (TEXTS, list(zip(TEXTS, reversed(TEXTS), strict=True))):
            rows = server.post("/predict", inputs=[[item] if isinstance(item, str) else item for item in items])
            for labels, expected in zip(client.classify(items * TIMES), rows * TIMES, strict=True):
                assert [each.label for each in labels] == [each["label"] for each in expected]
                assert np.allclose([each.score for each in labels], [each["score"] for each in expected], atol=1e-5)
        assert [len(labels) for labels in client.classify(TEXTS[0], top_k=1)] == [1]


def test_entities() -> None:
    client, server = client_of("entities")
    with client:
        rows = server.post("/predict", inputs=TEXTS)
        for text, found, expected in zip(MANY, client.entities(MANY), rows * TIMES, strict=True):
            assert [(each.label, each.text, each.start, each.end) for each in found] == [
                (each["entity_group"], each["word"], each["start"], each["end"]) for each in expected
            ]
            assert all(each.text == text[each.start : each.end] for each in found)
