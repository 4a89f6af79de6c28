"""The engine around a forward pass: a batch that memory does not suffice for, a device that is not done, and the kernel
for variable lengths under real families' masks."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import Checkpoints, random_batch, reference
from tests.support.workers import varlen_by_hand
from tests.unit.workers.torch.test_device import Calls
from vecd.model.card import read_card
from vecd.shm.arena import ArenaSpec, create_arena
from vecd.shm.views import map_arena
from vecd.workers.batch import Layout, PackedBatch, means_out_of_memory
from vecd.workers.parity import vectors_of
from vecd.workers.torch import cuda
from vecd.workers.torch import device as devices
from vecd.workers.torch import packed as packing
from vecd.workers.torch.checkpoint import PrefixStates
from vecd.workers.torch.heads import load_heads
from vecd.workers.torch.loading import load_model
from vecd.workers.torch.packed import PackedForward
from vecd.workers.torch.padded import PaddedForward
from vecd.workers.torch.transformer import Forward, TransformerEngine

CPU = torch.device("cpu")
DIM = 32
LENGTHS = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]


class Starved:
    """A real forward pass that has memory for `max_tokens` tokens at once."""

    path = "starved"
    num_padding_tokens = 0
    can_share = False

    def __init__(self, forward: Forward, max_tokens: int, error: Callable[[], Any]) -> None:
        self._forward = forward
        self._max_tokens = max_tokens
        self._error = error
        self.num_tokens: list[int] = []
        self.left_behind: list[weakref.ref[Tensor]] = []

    def __call__(self, layout: Layout, prefix: PrefixStates | None = None) -> Tensor:
        self.num_tokens.append(layout.token_ids.size)
        gc.collect()
        assert all(tensor() is None for tensor in self.left_behind), "the first try still holds memory"
        hidden = self._forward(layout)
        self.left_behind.append(weakref.ref(hidden))
        if layout.token_ids.size > self._max_tokens:
            self._error()
        return hidden


def raise_python_s() -> None:
    raise MemoryError


def raise_the_gpu_s() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def raise_the_processor_s() -> None:
    torch.empty(1 << 58)


def raise_another() -> None:
    raise RuntimeError("shapes")


@pytest.fixture
def starved(checkpoint: Checkpoints) -> Callable[..., tuple[TransformerEngine, Starved]]:
    def make(max_tokens: int, error: Callable[[], Any] = raise_the_gpu_s, path: Any = PackedForward) -> Any:
        card = read_card(checkpoint("bert"))
        forward = Starved(path(load_model(card, "float32", CPU), CPU), max_tokens, error)
        return TransformerEngine(forward, load_heads(card, CPU), "float32"), forward

    return make


@pytest.mark.parametrize("error", [raise_python_s, raise_the_gpu_s, raise_the_processor_s])
@pytest.mark.parametrize("path", [PackedForward, PaddedForward])
def test_a_batch_too_large_for_memory_is_computed_in_two_halves(error, path, starved, checkpoint):
    engine, forward = starved(120, error, path)
    batch = random_batch(LENGTHS)  # 194 tokens
    np.testing.assert_allclose(vectors_of(engine, batch, DIM), reference(checkpoint("bert"), batch), atol=1e-5, rtol=0)
    assert forward.num_tokens == [194, 96, 98]


def mixed(batch: PackedBatch) -> PackedBatch:
    """The same sequences, each of which asks for another thing than those beside it."""
    return replace(batch, outputs=(np.arange(batch.lengths.size) % 3).astype(np.uint8))


def test_halves_of_mixed_outputs_have_their_own_rows_and_no_others(starved, checkpoint):
    engine, forward = starved(120)
    batch = mixed(random_batch(LENGTHS))
    expected = reference(checkpoint("bert"), batch)
    rows = np.full((len(expected) + 3, DIM), 7, dtype=np.float32)
    engine.embed(batch, rows)
    assert forward.num_tokens == [194, 96, 98]
    np.testing.assert_allclose(rows[: len(expected)], expected, atol=1e-5, rtol=0)
    assert (rows[len(expected) :] == 7).all()


def test_memory_is_given_back_between_the_tries(starved, monkeypatch):
    engine, forward = starved(120)
    freed_after: list[int] = []
    monkeypatch.setattr(devices.Device, "free_memory", lambda self: freed_after.append(len(forward.num_tokens)))
    vectors_of(engine, random_batch(LENGTHS), DIM)
    assert freed_after == [1]


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "passes"),
    [
        ([60], 50, [60]),  # one sequence
        (LENGTHS, 97, [194, 96, 98]),  # the second half is too much as well
        (LENGTHS, 50, [194, 96]),
    ],
)
def test_what_does_not_fit_in_halves_is_out_of_memory(lengths, max_tokens, passes, starved):
    engine, forward = starved(max_tokens)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        vectors_of(engine, random_batch(lengths), DIM)
    assert means_out_of_memory(raised.value)
    assert forward.num_tokens == passes


def test_other_errors_are_not_tried_again(starved):
    engine, forward = starved(50, raise_another)
    with pytest.raises(RuntimeError, match="shapes"):
        vectors_of(engine, random_batch(LENGTHS), DIM)
    assert forward.num_tokens == [194]


# --- a device that is not done when it returns ------------------------------------------------------------------


@pytest.fixture
def late_engine(starved: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TransformerEngine]:
    def make(calls: Calls, max_tokens: int = 1000) -> TransformerEngine:
        with monkeypatch.context() as patched:
            patched.setattr("vecd.workers.torch.transformer.open_device", lambda device: devices.Accelerator(calls))
            engine: TransformerEngine = starved(max_tokens)[0]
        return engine

    return make


def test_two_batches_under_way_end_up_in_their_slots(late_engine, starved):
    engine = late_engine(Calls())
    assert engine.facts["gpu"] == "Imaginary 9000"
    spec = ArenaSpec(num_slots=2, rows_per_slot=16, dim=DIM)
    slots = map_arena(create_arena(spec), spec, writable=True)[0].rows
    engine.adopt(slots)
    assert engine.warnings == []
    batches = [random_batch(LENGTHS, seed=1), random_batch([9, 3, 40], seed=2)]
    finishes = [engine.begin(batch, slot) for batch, slot in zip(batches, slots, strict=True)]
    assert not any(finish.is_ready() for finish in finishes)
    assert not any(slot.any() for slot in slots)
    plain, _ = starved(1000)
    for finish, batch, slot in zip(finishes, batches, slots, strict=True):
        finish()
        count = batch.lengths.size
        np.testing.assert_allclose(slot[:count], vectors_of(plain, batch, DIM), atol=1e-5, rtol=0)
        assert not slot[count:].any()


def test_halves_come_late_as_well_and_the_first_is_waited_for(late_engine, starved):
    engine = late_engine(Calls(), max_tokens=120)
    batch = random_batch(LENGTHS)
    rows = np.zeros((len(LENGTHS), DIM), dtype=np.float32)
    finish = engine.begin(batch, rows)
    assert rows.any(axis=1).tolist() == [True] * 4 + [False] * 7
    finish()
    np.testing.assert_allclose(rows, vectors_of(starved(1000)[0], batch, DIM), atol=1e-5, rtol=0)


@pytest.mark.parametrize("is_adopted", [True, False])
def test_rows_of_mixed_outputs_come_late_to_their_places(is_adopted, late_engine, checkpoint):
    engine, batch = late_engine(Calls()), mixed(random_batch(LENGTHS))
    spec = ArenaSpec(num_slots=2, rows_per_slot=128, dim=DIM)
    slots = map_arena(create_arena(spec), spec, writable=True)[0].rows
    if is_adopted:
        engine.adopt(slots)
    finish = engine.begin(batch, slots[1])
    assert not slots[1].any()
    finish()
    np.testing.assert_allclose(slots[1][: batch.num_rows], reference(checkpoint("bert"), batch), atol=1e-5, rtol=0)
    assert not slots[1][batch.num_rows :].any()
    assert not slots[0].any()


def test_slots_that_cannot_be_pinned_are_a_warning(late_engine):
    engine = late_engine(Calls(RuntimeError("cudaHostRegister returned 801")))
    engine.adopt([np.zeros((4, DIM), dtype=np.float32)])
    (warning,) = engine.warnings
    assert "cannot be pinned" in warning


# --- the kernel for variable lengths ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "pooling", "windows"),
    [
        ("bert", "mean", {(-1, -1)}),
        pytest.param("qwen3", "lasttoken", {(-1, 0)}, marks=pytest.mark.full),
        ("mistral", "weightedmean", {(4, 0)}),
        ("gemma3_text", "mean", {(2, 2)}),
        ("modernbert", "mean", {(4, 4), (-1, -1)}),
        ("gpt2", "lasttoken", {(-1, 0)}),
    ],
)
def test_families_give_the_reference_s_vectors_with_one_kernel_for_all_lengths(
    family, pooling, windows, checkpoint, monkeypatch
):
    asked_for: set[tuple[int, int]] = set()

    def varlen(*arguments: Any, **options: Any) -> Tensor:
        asked_for.add(options["window_size"])
        return varlen_by_hand(*arguments, **options)

    folder = checkpoint(family, pooling=pooling)
    card, batch = read_card(folder), random_batch(LENGTHS)
    engine = TransformerEngine(PackedForward(load_model(card, "float32", CPU), CPU), load_heads(card, CPU), "float32")
    monkeypatch.setattr(packing, "suits_varlen", lambda *tensors: True)
    monkeypatch.setattr(cuda, "varlen_attention", lambda device: varlen)
    monkeypatch.setattr(packing.SequenceMask, "of_run", lambda *arguments: pytest.fail("not with one kernel"))
    for _ in range(2):
        np.testing.assert_allclose(vectors_of(engine, batch, DIM), reference(folder, batch), atol=1e-5, rtol=0)
    assert asked_for == windows
