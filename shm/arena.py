"""The arena: one anonymous shared-memory file per worker incarnation, divided into batch slots.

Owns the geometry (`ArenaSpec`), and makes the file. Never maps it: `vecd.shm.views` does, which needs numpy. The
supervisor calls this module; it must stay small and must never touch the memory, so that a crashing worker cannot end
the supervisor.

Memory map, little-endian float32 except for the last parts, which are int64; each of G gateways has slots of its own::

    offset 0            slot_nbytes                                  num_slots × G × slot_nbytes
    ├── gateway 0 ──────┼─────────────────────┼── gateway 1 ───── … ─┤
    │ slot 0            │ slot 1, … num_slots │ slot 0, …            │ begun: num_slots × G     │ num_done: 1
    │ row 0 │ row 1 │ … rows_per_slot         │                      │ the batch that the       │ batches that it
    │ dim × float32 │                         │                      │ worker has begun, else 0 │ has computed

The arena has no lock, no free list, and no flag that a process waits for. A gateway never sees the slots of another: on
the wire it counts its own from 0, and the worker identifies the gateway by the socket that a batch arrives on. These
are the states of a slot:

    state of a slot   who may write its rows   how it leaves the state
    free              no process               its gateway sends a batch that names the slot
    in flight         the worker               the worker replies with the batch's number
    read              no process               the gateway has encoded every row, and frees the slot

Order: the worker stores the rows, then makes the system call that sends the reply; the gateway makes the system
call that receives it, then loads the rows. The kernel's locking of the socket queue orders the two on every
architecture. No process polls a flag in shared memory.

The numbers of begun batches are read only when the incarnation is dead, to learn which batches it died on: the worker
stores a number before it computes a batch and 0 before it replies. All its stores are visible once the supervisor has
seen it end, and has notified the gateway. The number of computed batches is for `/info` alone.

The arena of a dead incarnation is dropped, and its successor gets a new file: a worker that wakes up late writes into
memory that is not read any more.
"""

import fcntl
import os
import shutil
from dataclasses import dataclass

from vecd.base.files import open_regular

# Make the anonymous files that processes share: of a fixed size, and without a name that could be left behind.

# Linux UAPI include/uapi/linux/fcntl.h; Python 3.11's fcntl names F_ADD_SEALS but not on every libc.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_WRITE = 0x1, 0x2, 0x4, 0x8
_MAX_NAME_BYTES = 249
"""Source: memfd_create(2)."""


def create_sealed(name: str, nbytes: int) -> int:
    """Make a file of zeros and return its descriptor, which the caller owns. `name` appears in /proc only.

    The pages are allocated here (`posix_fallocate`), so that a machine without enough memory fails now, and not later
    with a SIGBUS; the file is sealed, so that no process can truncate it. Measured: 0.2 ms per MB. Raises OSError.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def copy_sealed(path: str) -> str:
    """A path to the copy, which every process of this user can open while this one holds it, and whose content never
    changes. Side effect: a descriptor is open until `close_copy`. Raises OSError."""
    with open_regular(path) as file:
        name = os.fsencode(os.path.abspath(path))[-_MAX_NAME_BYTES:]
        fd = os.memfd_create(os.fsdecode(name), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(fd, "wb", closefd=False) as copy:
                shutil.copyfileobj(file, copy)
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_WRITE | _F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
    return path_of(fd)


def path_of(fd: int) -> str:
    """The path by which other processes can open what this one has open."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def close_copy(path: str | None) -> None:
    """Any path but one of `path_of` in this process has no effect."""
    owner, _, fd = (path or "").rpartition("/fd/")
    if owner == f"/proc/{os.getpid()}":
        os.close(int(fd))


def original_of(path: str) -> str:
    """The path of the file that a copy was made of, for messages; any other path is returned as it is."""
    try:
        target = os.readlink(path)
    except OSError:
        return path
    return target.removeprefix("/memfd:").removesuffix(" (deleted)") if target.startswith("/memfd:") else path


_BYTES_PER_FLOAT, _BYTES_PER_NUMBER = 4, 8


@dataclass(frozen=True, slots=True)
class ArenaSpec:
    num_slots: int
    """Batches in flight per worker, of each gateway."""
    rows_per_slot: int
    """The most rows of a batch: one for each sequence, or one for each of its tokens."""
    dim: int
    num_gateways: int = 1

    @property
    def num_all_slots(self) -> int:
        return self.num_slots * self.num_gateways

    @property
    def begun_offset(self) -> int:
        """Where the numbers begin: the first multiple of their size behind the rows."""
        rows_nbytes = self.num_all_slots * self.rows_per_slot * self.dim * _BYTES_PER_FLOAT
        return -(-rows_nbytes // _BYTES_PER_NUMBER) * _BYTES_PER_NUMBER

    @property
    def nbytes(self) -> int:
        return self.begun_offset + (self.num_all_slots + 1) * _BYTES_PER_NUMBER


def create_arena(spec: ArenaSpec) -> int:
    return create_sealed("vecd-arena", spec.nbytes)
