"""The way to a device and back, with an accelerator that exists only here: everything but the calls into CUDA."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from vecd.model.card import ModelError
from vecd.shm.arena import ArenaSpec, create_arena
from vecd.shm.views import Rows, map_arena
from vecd.workers.batch import COMPLETE
from vecd.workers.torch import cuda
from vecd.workers.torch.device import Accelerator, Device, span, to_device

DIM = 6
SPEC = ArenaSpec(num_slots=2, rows_per_slot=5, dim=DIM)


class Copy:
    """An event: the copy takes place when it is waited for, as late as it can."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self.target, self.source = target, source
        self.is_done = False
        self.error: Exception | None = None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_done

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error
        with torch.inference_mode():  # it may have been begun in one
            self.target.copy_(self.source)
        self.is_done = True


class Calls(cuda.Cuda):
    """On the processor."""

    def __init__(self, refusal: Exception | None = None) -> None:
        """`refusal`: what happens to who wants to pin memory."""
        self.pinned_addresses: list[tuple[int, int]] = []
        self.copies: list[Copy] = []
        self.num_buffers = 0
        self.refusal = refusal

    def name(self) -> str:
        return "Imaginary 9000"

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def pin(self, address: int, nbytes: int) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.pinned_addresses.append((address, nbytes))

    def pinned(self, shape: tuple[int, ...]) -> Tensor:
        self.num_buffers += 1
        return torch.full(shape, torch.nan)

    def start_copy(self, target: Tensor, source: Tensor) -> Copy:  # type: ignore[override]
        assert target.shape == source.shape
        assert source.is_contiguous()
        self.copies.append(Copy(target, source))
        return self.copies[-1]

    def free_memory(self) -> None:
        pass


def arena() -> list[Rows]:
    return map_arena(create_arena(SPEC), SPEC, writable=True)[0].rows


def vectors(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, DIM), dtype=np.float32)


@pytest.mark.parametrize("is_adopted", [True, False])
@given(order=st.integers(1, 5).flatmap(lambda count: st.permutations(range(count))))
def test_vectors_come_into_the_rows_of_their_sequences_and_no_others(is_adopted: bool, order: Sequence[int]) -> None:
    calls, slots = Calls(), arena()
    accelerator = Accelerator(calls)
    if is_adopted:
        assert accelerator.adopt(slots) is None
    made, places = vectors(len(order)), np.array(order, dtype=np.int64)
    finish = accelerator.write(torch.from_numpy(made), places, slots[1])
    assert not finish.is_ready()
    assert not slots[1].any()
    finish()
    assert finish.is_ready()
    assert np.array_equal(slots[1][places], made)
    assert not slots[1][len(order) :].any()
    assert not slots[0].any()
    assert accelerator.facts()["gpu"] == "Imaginary 9000"
    assert calls.num_buffers == (0 if is_adopted else 1)

    plain = np.zeros_like(slots[1])
    assert Device().write(torch.from_numpy(made), places, plain) is COMPLETE
    assert np.array_equal(plain, slots[1])


@pytest.mark.parametrize("why", ["rows outside", "refused"])
def test_what_is_not_pinned_is_written_through_a_buffer(why: str) -> None:
    calls, slots = Calls(), arena()
    if why == "refused":
        calls.refusal = RuntimeError("cudaHostRegister returned 801\nand a trace")
    accelerator = Accelerator(calls)
    warning = accelerator.adopt(slots)
    if why == "refused":
        assert warning is not None
        assert warning.endswith("cudaHostRegister returned 801")
    else:
        ((address, nbytes),) = calls.pinned_addresses
        assert address == slots[0].ctypes.data
        assert address % 4096 == 0
        assert nbytes == SPEC.num_slots * SPEC.rows_per_slot * SPEC.dim * 4, "the arena in one piece"
    rows = slots[0] if why == "refused" else np.zeros((4, DIM), dtype=np.float32)
    accelerator.write(torch.from_numpy(vectors(3)), np.arange(3), rows)()
    assert np.array_equal(rows[:3], vectors(3))
    assert calls.num_buffers == 1


def test_a_lost_device_is_told_by_the_call_and_not_by_the_question() -> None:
    calls, slots = Calls(), arena()
    finish = Accelerator(calls).write(torch.from_numpy(vectors(2)), np.arange(2), slots[0])
    calls.copies[0].error = torch.AcceleratorError("unspecified launch failure")
    assert finish.is_ready()
    with pytest.raises(torch.AcceleratorError):
        finish()


def test_span() -> None:
    memory = np.zeros((3, 4), dtype=np.float32)
    assert len(span([memory[1], memory[2]])) == 32
    assert span([memory[1]]).start == memory.ctypes.data + 16


def test_a_processor_borrows_what_it_is_given() -> None:
    values = np.arange(4)
    assert to_device(values, torch.device("cpu")).data_ptr() == values.ctypes.data


def test_without_a_gpu_there_is_no_attention_for_variable_lengths(torch_without_gpu: str) -> None:
    cuda.varlen_attention.cache_clear()
    assert cuda.varlen_attention(torch.device("cuda:0")) is None
    cuda.varlen_attention.cache_clear()


def test_a_gpu_that_cannot_be_used_is_said_in_one_line(torch_without_gpu: str) -> None:
    with pytest.raises(ModelError, match=f"^cuda:0 cannot be used: .*{torch_without_gpu}") as raised:
        cuda.describe("cuda:0")
    assert "\n" not in str(raised.value)
    assert "--device cpu" in str(raised.value)
