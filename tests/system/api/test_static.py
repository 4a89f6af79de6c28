"""A folder of sentence-transformers' StaticEmbedding, served: its vectors, and processes without torch."""

from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

from tests.support.every_kind import folders, served

TEXTS = ["A text of some words.", "Ünïcödé 日本 🙂", "", "[SEP] in the middle [MASK]", "words " * 3000]


def test_static_embeddings_are_served_without_torch() -> None:
    expected = SentenceTransformer(str(folders()["static"]), device="cpu").double().encode(TEXTS)
    server = served("static")
    np.testing.assert_allclose(server.embed(TEXTS), expected, atol=1e-6, rtol=0)
    assert not np.any(server.embed("")), "an empty text has the zero vector"
    assert {worker["path"] for worker in server.info()["workers"]} == {"static"}
    for process in server.processes():
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in mapped, process.cmdline()
