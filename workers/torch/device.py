"""Devices: moves token ids to a model and vectors from it into a slot.

Owns the two kinds of device. On a processor everything is complete on return. On an accelerator, vectors are copied
back while the next batch is computed::

    compute stream   … batch N ─┬─ in the batch's order ─┬─ batch N+1 …
    copy stream                 │                        └─ copy ─ event
    Finish                      └── is_ready, wait ─────────────────┘

The copy goes into the slot itself if the driver has pinned the arena's pages (`adopt`), else through a pinned buffer of
torch's. Knows no model. The calls into CUDA are in `vecd.workers.torch.cuda`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vecd.shm.views import Rows
from vecd.workers.batch import COMPLETE, Finish, Ints
from vecd.workers.torch import cuda


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of `values` on `device`. On a processor it borrows their memory. On a GPU the copy may still be in
    progress, but computations that use it wait for it."""
    tensor = torch.from_numpy(values)
    return cuda.upload(tensor, device) if device.type == "cuda" else tensor.to(device)


class Device:
    """Where a model computes. This one is a processor."""

    def adopt(self, slots: Sequence[Rows]) -> str | None:
        """See `Engine.adopt`. Returns a warning, or None."""
        return None

    def write(self, vectors: Tensor, order: Ints, rows: Rows) -> Finish:
        """Begin to write vector i of `vectors`, float32 [R, D] on this device, into row order[i]; `order`, shape [R],
        has each number below R once."""
        rows[order] = vectors.cpu().numpy()
        return COMPLETE

    def free_memory(self) -> None:
        """Return the memory that the allocator keeps for later. On a processor, torch keeps none."""

    def facts(self) -> dict[str, Any]:
        return {"cpu_capability": torch.backends.cpu.get_cpu_capability()}


def open_device(device: torch.device) -> Device:
    return Accelerator(cuda.Cuda(device)) if device.type == "cuda" else Device()


class Accelerator(Device):
    def __init__(self, calls: cuda.Cuda) -> None:
        self._calls = calls
        self._pinned = range(0)

    def adopt(self, slots: Sequence[Rows]) -> str | None:
        # Never unpinned: the end of the process does that, as it unmaps the memory.
        addresses = span(slots)
        try:
            self._calls.pin(addresses.start, len(addresses))
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            return f"the arena's memory cannot be pinned, so vectors are copied twice: {why}"
        self._pinned = addresses
        return None

    def write(self, vectors: Tensor, order: Ints, rows: Rows) -> Finish:
        # Ordered on the device, so that one block is copied.
        ordered = vectors.index_select(0, self._calls.upload(torch.from_numpy(np.argsort(order))))
        target = rows[: order.size]
        if self._holds(target):
            return _Copied(self._calls.start_copy(torch.from_numpy(target), ordered))
        staged = self._calls.pinned(tuple(target.shape))
        return _Copied(self._calls.start_copy(staged, ordered), staged, target)

    def _holds(self, rows: Rows) -> bool:
        addresses = span([rows])
        return addresses.start in self._pinned and addresses.stop <= self._pinned.stop

    def free_memory(self) -> None:
        self._calls.free_memory()

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "gpu": self._calls.name()}


class _Copied(Finish):
    def __init__(self, copied: torch.cuda.Event, staged: Tensor | None = None, rows: Rows | None = None) -> None:
        """`staged`: the copy's target, in place of `rows`."""
        self._copied, self._staged, self._rows = copied, staged, rows

    def is_ready(self) -> bool:
        try:
            return self._copied.query()  # type: ignore[no-any-return, no-untyped-call]
        except RuntimeError:  # the device is lost; the call raises the same
            return True

    def __call__(self) -> None:
        self._copied.synchronize()
        if self._staged is not None and self._rows is not None:
            self._rows[:] = self._staged.numpy()


def span(slots: Sequence[Rows]) -> range:
    starts = [rows.ctypes.data for rows in slots]
    stops = [rows.ctypes.data + rows.nbytes for rows in slots]
    return range(min(starts), max(stops))
