"""Numpy views of an arena's slots.

Owns the mapping. The worker maps its arena writable, the gateway maps every worker's arena read-only. A mapping
is never closed by hand: numpy views pin it (`mmap.close()` raises BufferError while one lives), and it goes when
the last view goes.
"""

import mmap
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shm.arena import ArenaSpec

Rows: TypeAlias = NDArray[np.float32]
"""float32, shape [rows_per_slot, dim]. Borrows the arena's memory: valid only while the holder owns the slot."""


def map_slots(fd: int, spec: ArenaSpec, *, writable: bool) -> list[Rows]:
    """Map the arena behind `fd` and return one view per slot. The caller may close `fd` afterwards.

    Raises ValueError when the file is smaller than `spec` says, OSError when it cannot be mapped.
    """
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    memory = mmap.mmap(fd, spec.nbytes, flags=mmap.MAP_SHARED, prot=access)
    floats = np.frombuffer(memory, dtype="<f4").reshape(spec.num_slots, spec.rows_per_slot, spec.dim)
    return [floats[slot] for slot in range(spec.num_slots)]
