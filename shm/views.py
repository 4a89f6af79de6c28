"""Numpy views of an arena's slots.

Owns the mapping: the worker's is writable, a gateway's read-only. It is never closed explicitly, because numpy views
keep it open; it is unmapped with the last view.
"""

import mmap
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vecd.shm.arena import ArenaSpec

Rows: TypeAlias = NDArray[np.float32]
"""float32, shape [rows_per_slot, dim]. Borrows the arena's memory: valid only while the holder owns the slot."""

BatchNumbers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SlotViews:
    """One gateway's slots, counted from 0 as on the wire."""

    rows: list[Rows]
    begun: BatchNumbers
    num_done: BatchNumbers
    """One number, the same for all gateways."""


def map_arena(fd: int, spec: ArenaSpec, *, writable: bool) -> list[SlotViews]:
    """The slots of each gateway. The caller may close `fd` afterwards. Raises ValueError when the file is smaller than
    `spec` says, OSError when it cannot be mapped."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    memory = mmap.mmap(fd, spec.nbytes, flags=mmap.MAP_SHARED, prot=access)
    floats = np.frombuffer(memory, dtype="<f4", count=spec.num_all_slots * spec.rows_per_slot * spec.dim)
    rows = floats.reshape(spec.num_gateways, spec.num_slots, spec.rows_per_slot, spec.dim)
    numbers = np.frombuffer(memory, dtype="<i8", count=spec.num_all_slots + 1, offset=spec.begun_offset)
    begun = numbers[:-1].reshape(spec.num_gateways, spec.num_slots)
    return [SlotViews(list(rows[gateway]), begun[gateway], numbers[-1:]) for gateway in range(spec.num_gateways)]
