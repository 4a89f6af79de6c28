"""The lean engine beside its vectors, which tests/system/vectors compare: passes, forks, threads, memory, files."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from vecd.shm.card import ModelError, read_card
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.lean import engine as lean_engine
from vecd.workers.engines.lean.arrays import Arrays
from vecd.workers.engines.lean.engine import LeanEngine
from vecd.workers.engines.lean.graph import pieces_of
from vecd.workers.engines.parity import vectors_of
from vecd.workers.families.description import NotDescribed
from vecd.workers.layout import Run, arrange, passes

LENGTHS = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 700))
def test_passes_cover_a_layout_in_parts_of_equal_size(lengths: list[int], limit: int) -> None:
    ids = np.arange(sum(lengths), dtype=np.int32)
    whole = arrange(PackedBatch(np.array(lengths, dtype=np.int32), ids))
    parts = list(passes(whole, limit))
    assert np.concatenate([part.order for part in parts]).tolist() == whole.order.tolist()
    assert np.concatenate([part.token_ids for part in parts]).tolist() == whole.token_ids.tolist()
    for part in parts:
        assert part.starts[0] == 0
        assert part.runs[-1].stop == part.token_ids.size == part.lengths.sum()
        assert part.token_ids.size <= limit or part.lengths.size == 1
    if len(parts) > 1:
        fewest = -(-sum(lengths) // limit)
        assert len(parts) <= 2 * fewest + 1 or max(lengths) > limit / 2


def test_a_batch_of_several_passes_has_the_vectors_of_one(
    checkpoint: Callable[..., Path], random_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, batch = LeanEngine(read_card(checkpoint("bert"))), random_batch(LENGTHS)
    together = vectors_of(engine, batch, 32)
    monkeypatch.setattr(lean_engine, "TOKENS_OF_A_PASS", 40)
    np.testing.assert_allclose(vectors_of(engine, batch, 32), together, atol=1e-6, rtol=0)


def test_several_threads_give_the_same_vectors(checkpoint: Callable[..., Path], random_batch: Any) -> None:
    engine, batch = LeanEngine(read_card(checkpoint("roberta"))), random_batch(LENGTHS)
    expected = vectors_of(engine, batch, 32)
    engine.use_threads(2)
    np.testing.assert_allclose(vectors_of(engine, batch, 32), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_activations_are_the_reference_s(
    activation: str, checkpoint: Callable[..., Path], reference: Any, random_batch: Any
) -> None:
    folder, batch = checkpoint("bert", hidden_act=activation), random_batch(LENGTHS)
    engine = LeanEngine(read_card(folder))
    np.testing.assert_allclose(vectors_of(engine, batch, 32), reference(folder, batch), atol=1e-5, rtol=0)


def test_out_of_memory_is_tried_again_in_halves(
    checkpoint: Callable[..., Path], random_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, batch = LeanEngine(read_card(checkpoint("bert"))), random_batch(LENGTHS)
    expected = vectors_of(engine, batch, 32)
    forward = engine._forward

    def starved(layout: Any) -> Any:
        if layout.token_ids.size > 120:
            raise RuntimeError("Failed to allocate memory for requested buffer of size 1024")
        return forward(layout)

    monkeypatch.setattr(engine, "_forward", starved)
    np.testing.assert_allclose(vectors_of(engine, batch, 32), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 0, 3, 300])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("attended", [(), (700, 5, 400)])
def test_pieces_have_all_queries_and_the_keys_that_they_see(
    window: int | None, is_causal: bool, attended: tuple[int, ...]
) -> None:
    run = Run(start=10, count=3, length=700, attended=attended)
    keys_of: dict[int, range] = {}
    for query, key, count, num_queries, num_keys in pieces_of([run], window, is_causal).T.tolist():
        for index in range(count):
            for place in range(num_queries):
                first_key = key + index * num_keys
                keys_of[query + index * num_queries + place] = range(first_key, first_key + num_keys)
    assert sorted(keys_of) == list(range(10, 2110))
    for query, keys in keys_of.items():
        index, place = divmod(query - 10, 700)
        seen = {
            10 + index * 700 + key
            for key in range(attended[index] if attended else 700)
            if (not is_causal or key <= place) and (window is None or abs(place - key) <= window)
        }
        assert seen <= set(keys)
        assert bool(seen) is bool(keys), "a query without keys is computed without any"


# --- files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_arrays_are_the_tensors(stored: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5).to(stored), "scalar": torch.tensor(2.5).to(stored), "none": torch.zeros(0, 4)}
    save_file({**tensors, "ids": torch.arange(4)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    arrays = Arrays([tmp_path / "model.safetensors"])
    assert arrays.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert np.array_equal(arrays[name], tensor.float().numpy())


def test_a_file_that_is_cut_off_is_said_to_be(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("bert"), tmp_path / "cut")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cut off"):
        Arrays([path])
    with pytest.raises(NotDescribed, match="cut off"):
        LeanEngine(read_card(folder))


def test_a_missing_tensor_is_no_bug(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("bert"), tmp_path / "missing")
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.output.dense.bias"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NotDescribed, match=r"encoder\.layer\.1\.output\.dense\.bias"):
        LeanEngine(read_card(folder))
