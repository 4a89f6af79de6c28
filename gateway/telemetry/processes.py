"""Processor time and memory of the server's processes, as the kernel counts them.

Owns the reading of /proc. Changes nothing. Reading takes about a millisecond for each process, so it is done in a
thread, and its result is kept for a second. Called by `vecd.gateway.api.system_routes` for `/metrics` and `/stats`.
"""

import asyncio
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_KEEP_S = 1.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


class Usage(NamedTuple):
    """What one process uses."""

    pid: int
    cpu_s: float
    """Processor time since its start."""
    resident_bytes: int
    """Resident memory, shared memory included."""
    proportional_bytes: int
    """Resident memory, where memory that n processes share counts as an n-th: the sum over all processes is right. 0
    where the kernel does not report it."""


class Processes:
    """Reads the usage of processes, and keeps it for a second."""

    def __init__(self) -> None:
        self._read_at = float("-inf")
        self._usages: dict[str, Usage] = {}
        self._reading = asyncio.Lock()

    async def usages(self, pids: Mapping[str, int]) -> dict[str, Usage]:
        """The usage of each process, by its name in `pids`, at most a second old. Ended processes are left out."""
        async with self._reading:
            if time.monotonic() - self._read_at > _KEEP_S or not pids.keys() <= self._usages.keys():
                self._usages = await asyncio.to_thread(_read_all, dict(pids))
                self._read_at = time.monotonic()
            return self._usages


def _read_all(pids: Mapping[str, int]) -> dict[str, Usage]:
    found = {}
    for name, pid in pids.items():
        with suppress(OSError, ValueError, IndexError):  # it has ended, or belongs to another user
            found[name] = read_usage(pid)
    return found


def read_usage(pid: int) -> Usage:
    """The usage of a process. Raises OSError when there is no such process."""
    folder = Path("/proc", str(pid))
    # The fields behind the name, which may contain blanks and parentheses.
    fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    resident = int((folder / "statm").read_bytes().split()[1]) * _PAGE_BYTES
    proportional = 0
    with suppress(OSError):
        if pss := _PSS.search((folder / "smaps_rollup").read_bytes()):
            proportional = int(pss[1]) * 1024
    return Usage(pid, ticks / _TICKS_PER_S, resident, proportional)
