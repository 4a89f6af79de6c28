"""Scores of causal language models by one or two tokens, on every path, against sentence-transformers on the same
files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder

from tests.support.checkpoints import engine_of, sequences_of
from tests.support.llm_checkpoints import save_causal, save_reranker
from vecd.shm.card import ModelError, read_card
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.parity import random_batch, vectors_of
from vecd.workers.engines.torch.heads import load_heads
from vecd.workers.engines.torch.logit_reference import logit_reference

LENGTHS = (5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny reranker, once for each set of arguments."""
    made: dict[Any, Path] = {}

    def make(family: str, no: str | None = "no", **settings: Any) -> Path:
        key = (family, no, *settings.items())
        if key not in made:
            plain = save_causal(tmp_path_factory.mktemp("causal"), family, **settings)
            made[key] = save_reranker(tmp_path_factory.mktemp("reranker"), plain, no=no)
        return made[key]

    return make


def scores_of_sentence_transformers(folder: Path, batch: PackedBatch) -> NDArray[np.float32]:
    model = CrossEncoder(str(folder), device="cpu", local_files_only=True).eval()
    scores = []
    with torch.inference_mode():
        for ids in sequences_of(batch):
            token_ids = torch.from_numpy(ids.astype(np.int64))[None]
            features = {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids), "logits_to_keep": 1}
            for module in model:
                features = module(features)
            scores.append(features["scores"][0].numpy())
    return np.array(scores, dtype=np.float32)


@pytest.mark.parametrize(
    ("family", "no", "path"),
    [
        ("qwen3", "no", "fused"),
        ("qwen3", "no", "packed"),
        ("qwen3", None, "padded"),
        ("qwen2", "no", "fused"),
        ("mistral", "no", "packed"),
        ("gemma", None, "packed"),
        ("gemma2", "no", "padded"),
        ("gemma2", None, "padded"),
    ],
)
def test_scores_are_sentence_transformers_own(
    family: str, no: str | None, path: str, reranker: Callable[..., Path]
) -> None:
    folder = reranker(family, no)
    card = read_card(folder)
    batch = random_batch(card, LENGTHS)
    found = vectors_of(engine_of(folder, path), batch, card.row_dim)
    expected = scores_of_sentence_transformers(folder, batch)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(logit_reference(card, "float32", torch.device("cpu"), batch), expected, atol=1e-6)


def test_a_soft_cap_shows_in_the_scores(reranker: Callable[..., Path]) -> None:
    capped, plain = reranker("gemma2"), reranker("gemma2", final_logit_softcapping=None)
    batch = random_batch(read_card(capped), LENGTHS)
    one, other = (vectors_of(engine_of(folder, "padded"), batch, 1) for folder in (capped, plain))
    assert np.abs(one).max() <= 1
    assert np.abs(one - other).max() > 0.1


def test_a_tied_output_layer_need_not_be_in_the_file(reranker: Callable[..., Path]) -> None:
    folder = reranker("qwen3", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    card = read_card(folder)
    batch = random_batch(card, LENGTHS)
    found = vectors_of(engine_of(folder, "fused"), batch, 1)
    np.testing.assert_allclose(found, scores_of_sentence_transformers(folder, batch), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("lm_head.weight"), "the weights lack lm_head.weight"),
        (lambda weights: weights.update({"lm_head.weight": torch.zeros(100, 32)}), r"lm_head.weight is \[100, 32\]"),
        (lambda weights: weights.update({"lm_head.weight": torch.zeros(264, 8)}), r"lm_head.weight is \[264, 8\]"),
    ],
)
def test_an_output_layer_without_the_rows_is_refused(
    change: Callable[[dict[str, torch.Tensor]], Any], message: str, tmp_path: Path, reranker: Callable[..., Path]
) -> None:
    card = read_card(reranker("qwen3"))
    for file in Path(card.folder).glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "1_LogitScore").mkdir()
    (tmp_path / "1_LogitScore/config.json").write_bytes((Path(card.folder) / "1_LogitScore/config.json").read_bytes())
    weights = load_file(Path(card.folder) / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load_heads(read_card(tmp_path), torch.device("cpu"))
