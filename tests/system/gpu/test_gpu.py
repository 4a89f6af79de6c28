"""What only a GPU can show. Skipped where there is none, as in this repository's CI: run it first on a machine that has
one (`make test TESTS="-m gpu tests/system/gpu"`)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from tests.support.checkpoints import random_batch, reference, worker_config
from vecd.model.card import read_card
from vecd.shm.arena import ArenaSpec, create_arena
from vecd.shm.output import Output
from vecd.shm.views import Rows, map_arena
from vecd.workers.batch import Layout, Run
from vecd.workers.load import load_engine
from vecd.workers.parity import vectors_of
from vecd.workers.torch import cuda
from vecd.workers.torch import packed as packing
from vecd.workers.torch.device import Accelerator, open_device
from vecd.workers.torch.heads import load_heads
from vecd.workers.torch.loading import load_model
from vecd.workers.torch.packed import PackedForward, packed_attention, running, sequence_mask
from vecd.workers.torch.padded import PaddedForward
from vecd.workers.torch.transformer import Forward, TransformerEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]

GPU = torch.device("cuda:0")
DIM = 32
LENGTHS = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]
RUNS = [Run(0, 3, 1), Run(3, 2, 4), Run(11, 2, 9), Run(29, 1, 300)]
NUM_TOKENS = 329


def slots_of_an_arena(rows_per_slot: int = 16) -> list[Rows]:
    spec = ArenaSpec(num_slots=2, rows_per_slot=rows_per_slot, dim=DIM)
    return map_arena(create_arena(spec), spec, writable=True)[0].rows


def tiny_engine(folder: Path, dtype: str = "float32", path: Any = PackedForward, wrap: Any = None) -> TransformerEngine:
    card = read_card(folder)
    forward = path(load_model(card, dtype, GPU), GPU)
    return TransformerEngine(wrap(forward) if wrap else forward, load_heads(card, GPU), dtype, GPU)


def assert_close(found: Any, expected: Any, dtype: str) -> None:
    if dtype == "float32":
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    else:
        assert (found * expected).sum(axis=1).min() >= 0.998


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("key_heads", "head_dim"), [(4, 64), (2, 64), (1, 128), (4, 8)])
@pytest.mark.parametrize(
    "rule",
    [
        bidirectional_mask_function,
        causal_mask_function,
        sliding_window_causal_mask_function(3),
        sliding_window_causal_mask_function(128),
        sliding_window_bidirectional_mask_function(5),
    ],
)
def test_one_kernel_for_all_lengths_gives_what_sdpa_gives(
    rule: Any, key_heads: int, head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cuda.varlen_attention(GPU) is None:
        pytest.skip("this torch or this GPU has no attention for variable lengths")
    generator = torch.Generator().manual_seed(0)

    def states(heads: int) -> Tensor:
        made = torch.randn(1, NUM_TOKENS, heads, head_dim, generator=generator)
        return made.to(GPU, dtype).transpose(1, 2)

    query, key, value = states(4), states(key_heads), states(key_heads)

    def attend() -> Tensor:
        with torch.inference_mode(), running(RUNS):
            return packed_attention(
                torch.nn.Identity(),
                query,
                key,
                value,
                sequence_mask(mask_function=rule),
                scaling=0.2,
            )[0]

    with monkeypatch.context() as patched:
        patched.setattr(packing, "_attend_by_runs", lambda *arguments: pytest.fail("the kernel was not used"))
        at_once = attend()
    monkeypatch.setattr(packing, "suits_varlen", lambda *arguments: False)
    torch.testing.assert_close(at_once, attend(), atol=0.01, rtol=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("path", [PackedForward, PaddedForward])
@pytest.mark.parametrize("family", ["bert", "qwen3", "mistral", "modernbert", "gemma3_text"])
def test_vectors_are_the_reference_s(family: str, path: Any, dtype: str, checkpoint: Callable[..., Path]) -> None:
    folder, batch = checkpoint(family), random_batch(LENGTHS)
    engine = tiny_engine(folder, dtype, path)
    assert_close(vectors_of(engine, batch, DIM), reference(folder, batch), dtype)


@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("path", [PackedForward, PaddedForward])
def test_rows_of_mixed_outputs_are_the_reference_s(path: Any, is_pinned: bool, checkpoint: Callable[..., Path]) -> None:
    folder, slots = checkpoint("bert"), slots_of_an_arena(rows_per_slot=128)
    batch = random_batch(LENGTHS)
    batch = replace(batch, outputs=(np.arange(len(LENGTHS)) % len(Output)).astype(np.uint8))
    engine = tiny_engine(folder, path=path)
    if is_pinned:
        engine.adopt(slots)
    engine.embed(batch, slots[0])
    np.testing.assert_allclose(slots[0][: batch.num_rows], reference(folder, batch), atol=1e-5, rtol=0)
    assert not slots[0][batch.num_rows :].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_worker_s_engine_is_chosen_and_agrees(dtype: str, checkpoint: Callable[..., Path]) -> None:
    folder, batch = checkpoint("bert"), random_batch(LENGTHS)
    engine = load_engine(worker_config(folder, device="cuda:0", dtype=dtype), lambda stage: None)
    assert (engine.facts["path"], engine.facts["dtype"]) == ("packed", dtype)
    assert engine.facts["gpu"] == torch.cuda.get_device_name(GPU)
    assert_close(vectors_of(engine, batch, DIM), reference(folder, batch), dtype)


def test_float32_is_float32() -> None:
    torch.set_float32_matmul_precision("medium")
    open_device(GPU)
    states = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    expected = states.double() @ states.double()
    found = (states.to(GPU) @ states.to(GPU)).cpu().double()
    assert (found - expected).abs().max() < 1e-3  # TensorFloat-32: 0.05


def test_rows_are_written_into_pinned_slots(checkpoint: Callable[..., Path]) -> None:
    folder, slots = checkpoint("bert"), slots_of_an_arena()
    engine = tiny_engine(folder)
    engine.adopt(slots)
    assert engine.warnings == []
    assert all(torch.from_numpy(slot).is_pinned() for slot in slots)
    for slot, seed in zip(slots, (1, 2), strict=True):
        batch = random_batch(LENGTHS, seed=seed)
        engine.embed(batch, slot)
        np.testing.assert_allclose(slot[: len(LENGTHS)], reference(folder, batch), atol=1e-5, rtol=0)
        assert not slot[len(LENGTHS) :].any()


def test_memory_that_cannot_be_pinned_is_a_warning_and_harms_nothing(checkpoint: Callable[..., Path]) -> None:
    folder, slots, batch = checkpoint("bert"), slots_of_an_arena(), random_batch(LENGTHS)
    first, second = tiny_engine(folder), tiny_engine(folder)
    first.adopt(slots)
    second.adopt(slots)  # pinned already
    (warning,) = second.warnings
    assert "cudaHostRegister returned 712" in warning
    second.embed(batch, slots[0])
    np.testing.assert_allclose(slots[0][: len(LENGTHS)], reference(folder, batch), atol=1e-5, rtol=0)


class Wrapped:
    path = "wrapped"

    def __init__(self, forward: Forward) -> None:
        self._forward = forward


class Hungry(Wrapped):
    """Takes more memory than there is for more than 120 tokens."""

    def __call__(self, layout: Layout) -> Tensor:
        hidden = self._forward(layout)
        if layout.token_ids.size > 120:
            torch.empty(1 << 50, dtype=torch.uint8, device=GPU)
        return hidden


def test_a_batch_too_large_for_memory_is_computed_in_two_halves(checkpoint: Callable[..., Path]) -> None:
    folder, batch = checkpoint("bert"), random_batch(LENGTHS)
    engine = tiny_engine(folder, wrap=Hungry)
    np.testing.assert_allclose(vectors_of(engine, batch, DIM), reference(folder, batch), atol=1e-5, rtol=0)
    with pytest.raises(torch.OutOfMemoryError):
        vectors_of(engine, random_batch([60] * 5), DIM)


class Slow(Wrapped):
    """Keeps the GPU busy for about a second before it computes."""

    def __call__(self, layout: Layout) -> Tensor:
        torch.cuda._sleep(2_000_000_000)  # cycles
        return self._forward(layout)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_batch_is_begun_while_another_is_under_way(is_pinned: bool, checkpoint: Callable[..., Path]) -> None:
    folder, slots = checkpoint("bert"), slots_of_an_arena()
    engine = tiny_engine(folder, wrap=Slow)
    if is_pinned:
        engine.adopt(slots)
    batches: Sequence[Any] = [random_batch(LENGTHS, seed=seed) for seed in (1, 2)]
    vectors_of(engine, batches[0], DIM)  # warm: what is allocated for the first time may wait for the GPU
    finishes = [engine.begin(batch, slot) for batch, slot in zip(batches, slots, strict=True)]
    assert not finishes[0].is_ready()
    finishes[0]()
    assert finishes[0].is_ready()
    assert not finishes[1].is_ready()  # the copy of the first did not wait for the second's computing
    finishes[1]()
    for batch, slot in zip(batches, slots, strict=True):
        np.testing.assert_allclose(slot[: len(LENGTHS)], reference(folder, batch), atol=1e-5, rtol=0)


def test_the_device_is_an_accelerator() -> None:
    assert isinstance(open_device(GPU), Accelerator)
    assert torch.cuda.current_device() == 0
