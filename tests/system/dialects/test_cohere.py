"""Cohere's dialect: every exchange to the byte, and what one server cannot show: prompts, names, large bodies."""

import httpx
import numpy as np

from tests.support import goldens
from vecd.gateway.api.dialects.cohere import DIALECT


def test_golden(weightless):
    goldens.check("cohere", weightless.url, {"id"})


def test_a_large_body(weightless):
    """It is parsed in a thread and in pieces; so is a large list of objects."""
    texts = [f"text number {i}: " + "word " * 20 for i in range(1000)]
    answer = httpx.post(f"{weightless.url}/v2/embed", json={"texts": texts, "embedding_types": ["float", "ubinary"]})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["texts"] == texts
    floats = np.array(body["embeddings"]["float"], dtype=np.float32)
    assert floats.shape == (1000, 384)
    assert np.array_equal(np.packbits(floats > 0, axis=1), body["embeddings"]["ubinary"])
    inputs = [{"content": [{"type": "text", "text": text}]} for text in texts]
    other = httpx.post(f"{weightless.url}/v2/embed", json={"inputs": inputs}, timeout=30).json()
    assert other["texts"] == texts
    assert np.array_equal(np.array(other["embeddings"]["float"], dtype=np.float32), floats)


def test_answers_are_as_documented(weightless):
    goldens.check_document(weightless.url, DIALECT)
