"""Models with a Router, from texts to vectors, against `encode_query` and `encode_document`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from tests.support.checkpoints import assert_same_vectors, batch_of
from tests.support.published import routers
from tests.support.tokenizing import ids_of, tokenize
from vecd.gateway.request import Tokenizing
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.card import ModelError, card_of
from vecd.model.folder import ModelFolder
from vecd.shm.arena import ArenaSpec
from vecd.workers.check.vectors import rows_of_texts
from vecd.workers.config import WorkerConfig
from vecd.workers.load import load_engine
from vecd.workers.parity import vectors_of

TEXTS = ["the quick brown fox", "快 😀 [SEP] dog", "lazy " * 200]


@pytest.mark.parametrize("save", [routers.save_leaf, routers.save_static, routers.save_shared])
def test_each_role_has_its_modules_and_its_prompt(save: Callable[[Path], None], tmp_path: Path) -> None:
    save(tmp_path)
    library: Any = SentenceTransformer(str(tmp_path), device="cpu", local_files_only=True)
    expected = {"query": library.encode_query(TEXTS), "document": library.encode_document(TEXTS)}
    assert np.abs(expected["query"] - expected["document"]).max() > 0.1
    for task, vectors in expected.items():
        folder = ModelFolder(tmp_path, task=task)
        card = card_of(folder)
        assert folder.role == task
        tokenizer = Tokenizer(card, card.max_tokens, "model")
        items = tokenize(tokenizer, TEXTS, Tokenizing(card.prompt))
        batch = batch_of([np.array(ids_of(item), dtype=np.int32) for item in items])
        config = WorkerConfig(
            card=card,
            arena=ArenaSpec(num_slots=2, rows_per_slot=16, dim=card.row_dim),
            engine="auto",
            device="cpu",
            dtype="float32",
            num_threads=1,
            log_level="info",
            cache_dir=None,
        )
        with torch.inference_mode():
            found = vectors_of(load_engine(config, lambda stage: None), batch, card.dim)
        assert_same_vectors(found[:, : card.default_dim], vectors)
        if not card.truncate_dim:  # else the check has vectors of another length
            in_check = rows_of_texts(replace(card, task=task), card.max_tokens, TEXTS)
            assert_same_vectors(np.concatenate([each.rows for each in in_check]), vectors)


def test_a_text_without_a_role_goes_by_the_default_route(tmp_path: Path) -> None:
    routers.save_leaf(tmp_path)
    folder = ModelFolder(tmp_path)
    assert card_of(folder) == replace(card_of(ModelFolder(tmp_path, task="document")), prompt="")
    assert folder.role == "document"


def test_a_router_without_a_default_route_needs_a_role(tmp_path: Path) -> None:
    routers.save_shared(tmp_path)
    with pytest.raises(ModelError, match=r"there is no route where the model's name has none behind it, as in NAME/q"):
        card_of(ModelFolder(tmp_path))
