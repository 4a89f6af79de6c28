"""text-embeddings-inference's API: vectors that sentence-transformers gives, and the probe at the root."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.texts import make_texts

TEXTS = [*make_texts(14), "", "word " * 400]
"""The last one is longer than the model takes."""
MAX_DIFFERENCE = 1e-5


@pytest.fixture(scope="module")
def model(minilm_folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(minilm_folder), device="cpu")


def ask(url: str, path: str, **body: Any) -> Any:
    answer = httpx.post(url + path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


# --- vectors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/embed", "/", "/invocations"])
def test_vectors_are_sentence_transformers_own(float32_server, reference, path):
    vectors = np.array(ask(float32_server.url, path, inputs=TEXTS), dtype=np.float32)
    assert np.abs(vectors - reference(TEXTS)).max() < MAX_DIFFERENCE
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-6)
    [alone] = ask(float32_server.url, path, inputs=TEXTS[3])
    assert np.abs(np.array(alone) - vectors[3]).max() < MAX_DIFFERENCE


def test_vectors_that_are_not_normalized(float32_server, model):
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(modules=[model[0], model[1]], device="cpu").encode(TEXTS)
    given = ask(float32_server.url, "/embed", inputs=TEXTS, normalize=False)
    assert np.abs(np.array(given, dtype=np.float32) - expected).max() < MAX_DIFFERENCE
    assert not np.allclose(np.linalg.norm(expected, axis=1), 1, atol=0.05), "or it would prove nothing"


def test_a_vector_for_every_token(float32_server, model):
    expected = model.encode(TEXTS, output_value="token_embeddings")
    given = ask(float32_server.url, "/embed_all", inputs=TEXTS)
    assert [np.shape(rows) for rows in given] == [tuple(rows.shape) for rows in expected]
    for ours, theirs in zip(given, expected, strict=True):
        assert np.abs(np.array(ours, dtype=np.float32) - theirs.numpy()).max() < 2 * MAX_DIFFERENCE


# --- the root -----------------------------------------------------------------------------------------------------
