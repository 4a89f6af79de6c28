"""A folder of sentence-transformers' StaticEmbedding, served: its vectors, and processes without torch."""

from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer

from tests.support.serving import running_server

TEXTS = ["A text of some words.", "Ünïcödé 日本 🙂", "", "[SEP] in the middle [MASK]", "words " * 3000]


def test_static_embeddings_are_served_without_torch(minilm_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    tokenizer.no_truncation()
    table = StaticEmbedding(tokenizer, torch.randn(30522, 64))
    SentenceTransformer(modules=[table, Normalize()], device="cpu").save(str(tmp_path))
    expected = SentenceTransformer(str(tmp_path), device="cpu").double().encode(TEXTS)
    with running_server(str(tmp_path), "--workers", "1") as server:
        np.testing.assert_allclose(server.embed(TEXTS), expected, atol=1e-6, rtol=0)
        assert not np.any(server.embed("")), "an empty text has the zero vector"
        assert {worker["path"] for worker in server.info()["workers"]} == {"static"}
        for process in server.processes():
            mapped = Path(f"/proc/{process.pid}/maps").read_text()
            assert "libtorch" not in mapped, process.cmdline()
