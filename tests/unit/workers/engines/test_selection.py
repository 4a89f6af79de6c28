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
from vecd.workers.engines.load import expected_path, load_engine
from vecd.workers.engines.parity import vectors_of
from vecd.workers.engines.selection import select
from vecd.workers.engines.selection_cache import remember
from vecd.workers.engines.timing import speed_beside
from vecd.workers.engines.torch.padded import rectangles
from vecd.workers.layout import arrange
from vecd.workers.processor import Processor

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


NATIVE = Processor(frozenset({"avx512_bf16"}), "GenuineIntel")


@pytest.mark.parametrize(("bfloat16_ms", "dtype"), [(1.0, "bfloat16"), (2.8, "float32")])
def test_a_format_is_taken_by_its_speed_and_remembered(
    bfloat16_ms: float, dtype: str, checkpoint: Callable[..., Path], worker_config: Config, tmp_path: Path
) -> None:
    """With native bfloat16, which this processor may have to emulate: its speed is given here. Then a start imports
    torch only for bfloat16."""
    config = worker_config(checkpoint("bert"), dtype="auto", cache_folder=str(tmp_path))
    measured: list[Any] = []

    def measure(engines: Any, card: Any) -> Any:
        measured.append({name: (engine.facts["path"], engine.facts["dtype"]) for name, engine in engines.items()})
        return {"1 x 12": {"bfloat16": bfloat16_ms, "float32": 3.0}}

    selection, engine = select(config, lambda stage: None, processor=NATIVE, measure=measure)
    assert measured[0]["float32"] == ("lean", "float32")
    assert measured[0]["bfloat16"][1] == "bfloat16"
    assert (selection.dtype, engine.facts["dtype"], selection.warnings) == (dtype, dtype, [])
    assert selection.times == {"1 x 12": {"bfloat16": bfloat16_ms, "float32": 3.0}}
    assert selection.parity["compared_with"] == "float32"
    remember(config, selection)
    assert expected_path(config) == selection.path
    engine = load(config)
    assert (engine.facts["dtype"], engine.facts["times_ms"]) == (dtype, selection.times)


def test_real_times_decide_too(checkpoint: Callable[..., Path], worker_config: Config) -> None:
    selection, _ = select(worker_config(checkpoint("bert"), dtype="auto"), lambda stage: None, processor=NATIVE)
    is_faster = speed_beside(selection.times, "bfloat16", "float32") >= 1.1
    assert selection.dtype == ("bfloat16" if is_faster else "float32")


def test_a_format_with_other_vectors_is_not_measured(
    checkpoint: Callable[..., Path], worker_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vecd.workers.engines.parity._MIN_COSINE", {"bfloat16": 1.1})

    def measure(engines: Any, card: Any) -> Any:
        pytest.fail("one format is left")

    config = worker_config(checkpoint("bert"), dtype="auto")
    selection, _ = select(config, lambda stage: None, processor=NATIVE, measure=measure)
    assert (selection.path, selection.dtype) == ("lean", "float32")
    assert all(" bfloat16 is not used: its vectors are not" in warning for warning in selection.warnings)
    assert selection.warnings


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_a_model_stored_in_16_bits_is_compared_with_float32(
    stored: torch.dtype, checkpoint: Callable[..., Path], worker_config: Config, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("bert"), tmp_path / "short")
    weights = {name: weight.to(stored) for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    found = load(worker_config(folder, dtype="bfloat16")).facts["agreement"]
    assert found["compared_with"] == "float32"
    assert found["max_abs_diff"] > 1e-5, "bfloat16 was compared with itself"


def test_where_float32_does_not_fit_the_format_that_was_compared_with_is_named(
    checkpoint: Callable[..., Path], worker_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vecd.workers.engines.formats._fits", lambda card, share: False)
    found = load(worker_config(checkpoint("albert"), dtype="bfloat16")).facts["agreement"]
    assert found["compared_with"] == "bfloat16"


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
