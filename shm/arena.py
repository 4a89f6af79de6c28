"""The arena: one anonymous shared-memory file per worker incarnation, cut into batch slots.

Owns the geometry (`ArenaSpec`) and the making of the file. Never maps it: that is `shm.view`, which needs numpy,
and the supervisor, who calls this module, must stay small and must never touch the memory (a crashing worker
cannot then take the supervisor along).

Memory map, little-endian float32 throughout::

    offset 0          slot_nbytes                2 × slot_nbytes
    ├── slot 0 ───────┼── slot 1 ────────────────┤   …  num_slots
    │ row 0 │ row 1 │ … rows_per_slot            │
    │ dim × float32 │                            │

The arena holds rows and nothing else: no lock, no free list, no flag. Who may write is decided elsewhere:

    state of a slot   who may write its rows   how it leaves the state
    free              nobody                   the gateway sends a batch that names the slot
    in flight         the worker               the worker replies with the batch's number
    read              nobody                   the gateway has encoded every row, and frees the slot

Order: the worker stores the rows, then makes the system call that sends the reply; the gateway makes the system
call that receives it, then loads the rows. The kernel's locking of the socket queue orders the two on every
architecture. Nothing polls a flag in shared memory.

A dead or killed incarnation's arena is dropped and its successor gets a new file, so a worker that wakes up late
writes into memory that nobody reads any more.
"""

import fcntl
import os
from dataclasses import dataclass

_BYTES_PER_FLOAT = 4

# Linux UAPI include/uapi/linux/fcntl.h; Python 3.11's fcntl names F_ADD_SEALS but not on every libc.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 0x1, 0x2, 0x4


@dataclass(frozen=True, slots=True)
class ArenaSpec:
    """The geometry of an arena, the same for every incarnation of every worker of a server."""

    num_slots: int
    """Batches in flight per worker."""
    rows_per_slot: int
    """The most sequences a batch may hold."""
    dim: int
    """Floats per row."""

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.rows_per_slot * self.dim * _BYTES_PER_FLOAT


def create_arena(spec: ArenaSpec) -> int:
    """Make an arena and return its file descriptor, which the caller owns.

    The pages are allocated here (`posix_fallocate`), so that a machine without memory for them fails now, with
    OSError, and not later with a SIGBUS; and the file is sealed, so that no worker can truncate it under the
    gateway. Measured: 0.2 ms per MB.

    Raises OSError when the memory cannot be had.
    """
    fd = os.memfd_create("vecd-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, spec.nbytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd
