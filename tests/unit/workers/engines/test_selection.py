"""Engines with a model, and the choice between the paths. Their vectors are tested in tests/system/vectors."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import skip_without
from vecd.shm.card import ModelError
from vecd.workers.engine import Engine, PackedBatch
from vecd.workers.engines.load import load_engine
from vecd.workers.engines.parity import vectors_of
from vecd.workers.engines.torch import selection as torch_selection
from vecd.workers.engines.torch.linear import has_native_int8
from vecd.workers.engines.torch.packed import PackedForward
from vecd.workers.engines.torch.padded import rectangles
from vecd.workers.layout import arrange

Config = Callable[..., Any]
LENGTHS = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]


def load(config: Any) -> Engine:
    return load_engine(config, lambda stage: None)


def vectors(engine: Engine, batch: PackedBatch, dim: int = 32) -> NDArray[np.float32]:
    return vectors_of(engine, batch, dim)


@pytest.mark.parametrize("cache_folder", ["", "/proc/no/such/folder"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_gpu_that_cannot_be_used_is_no_bug(
    dtype: str, cache_folder: str, torch_without_gpu: str, checkpoint: Callable[..., Path], worker_config: Config
) -> None:
    config = worker_config(checkpoint("bert"), device="cuda:0", dtype=dtype, cache_folder=cache_folder)
    with pytest.raises(ModelError, match=torch_without_gpu):
        load(config)


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.booleans())
def test_rectangles_cover_every_sequence_once_and_stay_small(lengths: list[int], may_pad: bool) -> None:
    batch = PackedBatch(np.array(lengths, dtype=np.int32), np.zeros(sum(lengths), dtype=np.int32))
    layout = arrange(batch)
    cut = list(rectangles(layout, may_pad=may_pad))
    assert [index for part in cut for index in range(part.start, part.stop)] == list(range(len(lengths)))
    for part in cut:
        longest, count = layout.lengths[part].max(), part.stop - part.start
        assert count == 1 or (count <= 16 and count * longest <= 4096)
        assert may_pad or layout.lengths[part].min() == longest
        num_tokens = layout.lengths[part].sum()
        assert count * longest - num_tokens <= 64 + num_tokens / 4


# --- the choice -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "paths"), [("bert", {"lean", "fused"}), ("nomic_bert", {"lean"})])
def test_engines_race_and_a_rival_that_is_refused_is_no_warning(
    family: str,
    paths: set[str],
    checkpoint: Callable[..., Path],
    worker_config: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_selection, "_SMALLEST", 0)
    monkeypatch.setitem(torch_selection._RIVALS, "float32", ("lean", "fused", "packed"))
    monkeypatch.setattr(PackedForward, "__init__", None)  # raises TypeError
    engine = load(worker_config(checkpoint(family)))
    assert engine.facts["path"] in paths
    assert set(next(iter(engine.facts["times_ms"].values()), {})) == (paths if len(paths) > 1 else set())
    assert engine.warnings == []


@pytest.mark.parametrize(
    ("family", "settings", "path"), [("albert", {}, "packed"), ("bert", {"is_decoder": True}, "packed")]
)
def test_what_cannot_be_fused_is_run_in_the_next_way_without_a_warning(
    family: str, settings: dict[str, Any], path: str, checkpoint: Callable[..., Path], worker_config: Config
) -> None:
    folder = checkpoint(family, **settings)
    engine = load(worker_config(folder))
    assert (engine.facts["path"], engine.warnings) == (path, [])
    with pytest.raises(ModelError, match="fused float32 is not used"):
        load(worker_config(folder, engine="fused"))


def test_a_family_that_cannot_be_packed_says_so(checkpoint: Callable[..., Path], worker_config: Config) -> None:
    (warning,) = load(worker_config(checkpoint("deberta-v2"))).warnings
    assert warning.startswith("packed float32 is not used: PackingError: ")


@pytest.mark.parametrize(("dtype", "path"), [("bfloat16", "fused"), ("float16", "packed")])
def test_sixteen_bits_are_compared_with_float32(
    dtype: str, path: str, checkpoint: Callable[..., Path], worker_config: Config, reference: Any, random_batch: Any
) -> None:
    if path == "fused":
        skip_without(dtype)
    folder = checkpoint("bert")
    engine = load(worker_config(folder, dtype=dtype))
    assert (engine.facts["dtype"], engine.facts["path"]) == (dtype, path)
    assert 0.998 <= engine.facts["agreement"]["min_cosine"] < 0.9999999
    batch = random_batch(LENGTHS)
    cosines = (vectors(engine, batch) * reference(folder, batch)).sum(axis=1)
    assert cosines.min() > 0.998


@pytest.mark.skipif(not has_native_int8(), reason="this processor has no int8 products (VNNI)")
@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "distilbert", "mpnet"])
def test_int8_is_compared_with_float32(
    family: str, checkpoint: Callable[..., Path], worker_config: Config, reference: Any, random_batch: Any
) -> None:
    folder = checkpoint(family)
    engine = load(worker_config(folder, dtype="int8", engine="fused"))
    assert (engine.facts["dtype"], engine.facts["path"], engine.warnings) == ("int8", "fused", [])
    batch = random_batch(LENGTHS)
    cosines = (vectors(engine, batch) * reference(folder, batch)).sum(axis=1)
    assert 0.99 < cosines.min() < 0.99999


def test_int8_without_a_path_for_it_is_given_up_with_warnings(
    checkpoint: Callable[..., Path], worker_config: Config
) -> None:
    engine = load(worker_config(checkpoint("albert"), dtype="int8"))
    assert engine.facts["path"] == "packed"
    assert engine.facts["dtype"] in ("bfloat16", "float32")
    assert sorted(engine.warnings[:2]) == [
        "fused int8 is not used: NotDescribed: albert is no family of the fused path",
        "lean int8 is not used: NotDescribed: albert has no table of its layers",
    ]


def test_a_type_that_cannot_hold_the_model_is_given_up_for_float32(
    checkpoint: Callable[..., Path], worker_config: Config, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("bert"), tmp_path / "large")
    path = folder / "model.safetensors"
    weights = load_file(path)
    # Beyond float16's 65,504, and harmless in float32: a layer norm follows.
    weights["embeddings.word_embeddings.weight"] *= 1e6
    save_file(weights, path, metadata={"format": "pt"})
    engine = load(worker_config(folder, dtype="float16"))
    assert (engine.facts["dtype"], engine.facts["path"]) == ("float32", "lean")
    assert [warning.split()[:2] for warning in engine.warnings] == [
        ["packed", "float16"],
        ["padded", "float16"],
        ["unpadded", "float16"],
    ]


def test_a_model_that_gives_nan_is_refused(
    checkpoint: Callable[..., Path], worker_config: Config, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("bert"), tmp_path / "nan")
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["encoder.layer.1.output.dense.bias"][3] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="the reference model's vectors in float32 contain nan"):
        load(worker_config(folder))


def test_the_stages_of_loading_are_reported(checkpoint: Callable[..., Path], worker_config: Config) -> None:
    stages: list[str] = []
    engine = load_engine(worker_config(checkpoint("bert")), stages.append)
    assert stages == [
        "loading the reference model",
        "embedding probes of up to 60 tokens with the reference model",
        "comparing lean float32 with the reference model",
    ]
    assert engine.facts["agreement"]["max_abs_diff"] < 1e-5


def test_the_dummy_engine_is_loaded_without_a_model(checkpoint: Callable[..., Path], worker_config: Config) -> None:
    engine = load(worker_config(checkpoint("bert"), engine="dummy"))
    assert engine.facts == {"dtype": "float32", "path": "dummy"}
