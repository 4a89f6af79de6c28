"""`import vecd` with real models: vectors are sentence-transformers', and other results those of a direct request, also
when a call is cut into several requests."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import vecd
from tests.support.multi_vector_checkpoints import save_bge_m3
from tests.support.score_checkpoints import save_classifier
from tests.support.sparse_checkpoints import save_splade

TEXTS = [" ".join(f"w{4 + (7 * row + 3 * place) % 110}" for place in range(1 + row % 9)) for row in range(30)]
SENTENCES = [
    "Hello, world",
    "",
    "The quick brown fox jumps over the lazy dog. " * 20,
    "Grüße 你好 🙂",
    "second text",
] * 3


@contextmanager
def serving(folder: Path) -> Iterator[vecd.Server]:
    """Thirty texts are three requests."""
    with vecd.Server(folder, workers=1, dtype="float32", max_inputs=12, timeout=120) as server:
        yield server


def post(server: vecd.Server, path: str, **fields: Any) -> Any:
    transport = httpx.HTTPTransport(uds=server.url.removeprefix("unix:"))
    with httpx.Client(transport=transport, base_url="http://vecd", timeout=60) as client:
        return client.post(path, json=fields).raise_for_status().json()


def test_encode_is_sentence_transformers(minilm_folder: Path) -> None:
    model = SentenceTransformer(str(minilm_folder), device="cpu", local_files_only=True)
    expected = model.encode(SENTENCES)
    with vecd.Server(dtype="float32", timeout=120) as server:
        for found in (server.encode(SENTENCES), server.embed(SENTENCES), asyncio.run(of_coroutine(server.url))):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            assert np.abs(found - expected).max() <= 1e-5
        assert np.abs(server.encode(SENTENCES[0]) - expected[0]).max() <= 1e-5
        assert np.abs(server.encode_query(SENTENCES) - model.encode_query(SENTENCES)).max() <= 1e-5
        assert np.abs(server.encode(SENTENCES, prompt="p: ") - model.encode(SENTENCES, prompt="p: ")).max() <= 1e-5
        cosines = model.similarity(expected, expected).numpy()
        assert np.abs(server.similarity(server.encode(SENTENCES), expected) - cosines).max() <= 1e-5
        assert server.info()["model"]["dimensions"] == 384


async def of_coroutine(url: str) -> Any:
    async with vecd.AsyncClient(url, timeout=120) as client:
        return await client.encode(SENTENCES)


def test_sparse_vectors(tmp_path: Path) -> None:
    with serving(save_splade(tmp_path / "model")) as server:
        vectors = server.sparse(TEXTS)
        assert max(len(one.indices) for one in vectors) > 2
        for text, found in zip(TEXTS, vectors, strict=True):
            [expected] = post(server, "/v1/embeddings", input=[text], output="sparse")["data"]
            weights = dict(zip(expected["sparse"]["indices"], expected["sparse"]["values"], strict=True))
            assert dict(zip(found.indices.tolist(), found.values.tolist(), strict=True)) == pytest.approx(
                weights, abs=1e-4
            )
        assert max(len(one.indices) for one in server.sparse(TEXTS, top_k=2)) == 2


def test_vectors_of_tokens(tmp_path: Path) -> None:
    save_bge_m3(tmp_path / "model")
    with serving(tmp_path / "model") as server:
        for text, rows in zip(TEXTS, server.multi_vector(TEXTS), strict=True):
            [expected] = post(server, "/v1/embeddings", input=[text], output="multi-vector")["data"]
            assert rows.dtype == np.float32
            assert np.allclose(rows, expected["embeddings"], atol=1e-5)


def test_scores(tmp_path: Path) -> None:
    save_classifier(tmp_path / "model")
    with serving(tmp_path / "model") as server:
        expected = [post(server, "/score", queries="w5 w9", documents=[text])["data"][0]["score"] for text in TEXTS]
        assert np.allclose(server.score([("w5 w9", text) for text in TEXTS]), expected, rtol=1e-4)
        logits = [
            post(server, "/v1/rerank", query="w5 w9", documents=[text], raw_scores=True)["results"][0][
                "relevance_score"
            ]
            for text in TEXTS
        ]
        ranked = server.rerank("w5 w9", TEXTS, raw_scores=True)
        assert sorted(document.index for document in ranked) == list(range(len(TEXTS)))
        assert np.allclose([document.score for document in ranked], sorted(logits, reverse=True), atol=1e-4)
        assert np.allclose([document.score for document in ranked], [logits[each.index] for each in ranked], atol=1e-4)
        best = server.rerank("w5 w9", TEXTS, top_n=3)
        assert [document.index for document in best] == [document.index for document in ranked[:3]]
        assert np.allclose([d.score for d in best], [1 / (1 + np.exp(-d.score)) for d in ranked[:3]], atol=1e-4)
        with pytest.raises(vecd.BadRequest, match="dense"):
            server.embed("w5")


def test_labels(tmp_path: Path) -> None:
    save_classifier(tmp_path / "model", labels=["no", "maybe", "yes"])
    with serving(tmp_path / "model") as server:
        for items in (TEXTS, list(zip(TEXTS, reversed(TEXTS), strict=True))):
            found = server.classify(items)
            assert len(found) == len(TEXTS)
            for item, labels in zip(items, found, strict=True):
                [expected] = post(server, "/predict", inputs=[[item] if isinstance(item, str) else item])
                assert [each.label for each in labels] == [each["label"] for each in expected]
                assert np.allclose([each.score for each in labels], [each["score"] for each in expected], atol=1e-5)
        assert [len(labels) for labels in server.classify(TEXTS[0], top_k=1)] == [1]


def test_labels_of_the_call(minilm_folder: Path) -> None:
    with serving(minilm_folder) as server:
        [labels] = server.classify("My card was charged twice", labels=["spam", "billing", "shipping"])
        assert [labels[0].label, len(labels)] == ["billing", 3]
        assert sum(label.score for label in labels) == pytest.approx(1)


def test_entities(tmp_path: Path) -> None:
    save_classifier(tmp_path / "model", labels=["O", "B-PER", "I-PER", "B-LOC"], is_of_tokens=True)
    with serving(tmp_path / "model") as server:
        for text, found in zip(TEXTS, server.entities(TEXTS), strict=True):
            [expected] = post(server, "/predict", inputs=[text])
            assert [(each.label, each.text, each.start, each.end) for each in found] == [
                (each["entity_group"], each["word"], each["start"], each["end"]) for each in expected
            ]
            assert all(each.text == text[each.start : each.end] for each in found)
