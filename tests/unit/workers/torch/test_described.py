"""Models whose published code is no class of transformers: what they are compared with, and which are refused."""

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import assert_same_vectors, change_weights, engine_of, sequences_of, worker_config
from tests.support.published import encoders
from vecd.model.card import ModelError
from vecd.workers.description import alibi_slopes
from vecd.workers.load import load_engine
from vecd.workers.parity import random_batch, vectors_of
from vecd.workers.select import build
from vecd.workers.torch.loading import load_model

FAMILIES = {layout.family: layout for layout in reversed(encoders.LAYOUTS)}
"""The first layout of each."""
LENGTHS = (5, 300, 590)
"""On both sides of the 256 and 512 queries that are computed at a time."""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def save(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        FAMILIES[family].save(folder)
        return folder

    return save


@pytest.mark.parametrize(("path", "dtype"), [("lean", "float32"), ("padded", "float32"), ("fused", "float32")])
def test_a_text_that_is_computed_in_pieces(saved: Callable[[str], Path], path: str, dtype: str) -> None:
    config = worker_config(saved("jina_bert"))
    batch = random_batch(config.card, LENGTHS)
    reference = FAMILIES["jina_bert"].reference(saved("jina_bert"))
    expected = np.stack([reference(ids.astype(np.int64), 0) for ids in sequences_of(batch)])
    found = vectors_of(engine_of(saved("jina_bert"), path, dtype), batch, config.card.row_dim)
    assert_same_vectors(found, expected, dtype)


@pytest.mark.parametrize("family", ["jina_bert", "jina_bert_code", "nomic_bert_moe", "xlm_roberta_flash"])
def test_what_it_was_compared_with_is_said(saved: Callable[[str], Path], family: str, tmp_path: Path) -> None:
    engine = load_engine(worker_config(saved(family), cache_dir=tmp_path), lambda stage: None)
    assert (engine.facts["path"], engine.facts["compared_with"]) == ("lean", "vecd's own padded path")
    assert engine.facts["agreement"]["max_abs_diff"] < 1e-5
    assert engine.warnings == []


def test_a_class_of_transformers_is_said_too(checkpoint: Callable[..., Path]) -> None:
    engine = load_engine(worker_config(checkpoint("bert")), lambda stage: None)
    assert engine.facts["compared_with"] == "transformers"


def test_int8_where_experts_have_no_token(saved: Callable[[str], Path]) -> None:
    config = worker_config(saved("nomic_bert_moe"))
    batch = random_batch(config.card, (1,))
    expected = FAMILIES["nomic_bert_moe"].reference(saved("nomic_bert_moe"))(batch.token_ids.astype(np.int64), 0)
    found = vectors_of(build(config, "lean", "int8"), batch, config.card.row_dim)
    assert float((found * expected).sum()) > 0.99


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 6, 8, 12, 16, 20])
def test_slopes(num_heads: int) -> None:
    assert alibi_slopes(num_heads) == pytest.approx(encoders.alibi_slopes_as_published(num_heads), rel=1e-12)


# --- weights that are not those of the settings -----------------------------------------------------------------


def _lack(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda weights: weights.pop(name)


def _cut(name: str, num_rows: int) -> Callable[[dict[str, Tensor]], Any]:
    return lambda weights: weights.update({name: weights[name][:num_rows].contiguous()})


def _copy(name: str, new: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda weights: weights.update({new: weights[name].clone()})


_EXPERTS, _GATED = "encoder.layers.1.mlp.experts", "encoder.layer.1.mlp.gated_layers.weight"


@pytest.mark.parametrize(
    ("family", "change", "why"),
    [
        (
            "nomic_bert_moe",
            _cut(f"{_EXPERTS}.mlp.w1", 7 * 96),
            r"mlp\.w1 is \[672, 64\] in the weights and \[768, 64\] in",
        ),
        (
            "nomic_bert_moe",
            _lack(f"{_EXPERTS}.bias"),
            r"the weights lack encoder\.layers\.1\.mlp\.experts\.bias, which",
        ),
        ("nomic_bert_moe", _lack("encoder.layers.0.attn.Wqkv.bias"), r"the weights lack .*Wqkv\.bias"),
        ("jina_bert", _cut(_GATED, 200), r"gated_layers\.weight is \[200, 72\] in the weights and \[288, 72\]"),
        ("jina_bert", _lack("embeddings.token_type_embeddings.weight"), "the weights lack embeddings.token_type"),
        ("jina_bert", _lack("embeddings.word_embeddings.weight"), "cannot be loaded: the weights have no embeddings"),
        ("jina_bert", _copy(_GATED, _GATED.replace("layer.1", "layer.9")), "the weights have .* no place for"),
        ("xlm_roberta_flash", _lack("roberta.encoder.layers.2.norm2.bias"), r"the weights lack roberta\..*norm2\.bias"),
    ],
)
def test_other_weights_than_the_settings_call_for(
    saved: Callable[[str], Path], tmp_path: Path, family: str, change: Callable[[dict[str, Tensor]], Any], why: str
) -> None:
    folder = change_weights(shutil.copytree(saved(family), tmp_path / family), change)
    with pytest.raises(ModelError) as error:
        load_model(worker_config(folder).card, "float32", CPU)
    assert re.search(why, str(error.value)), error.value
    assert "\n" not in str(error.value)


def test_the_code_of_another_variant(saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saved("jina_bert_code"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["_name_or_path"] = "jinaai/jina-bert-implementation"
    config["auto_map"] = {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"the weights lack encoder\.layer\.0\.mlp\.layernorm\.weight"):
        load_model(worker_config(folder).card, "float32", CPU)
