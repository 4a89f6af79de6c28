"""What the server's processes take of the machine, as the kernel counts it.

Owns the reading of /proc: of this process, its supervisor, and those whose ids it is told. Changes nothing. Reading
takes about a millisecond for each process, so it is done in a thread, and not again for a while. Called by
`vecd.gateway.api.system_routes` for `/metrics` and `/stats`.
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
    """Of one process."""

    pid: int
    cpu_s: float
    """Of processor time, since it began."""
    resident_bytes: int
    """In memory, whoever else has it, too."""
    proportional_bytes: int
    """The same, but of what n processes share an n-th: over all processes these add up. 0 where the kernel does not
    say."""


class Processes:
    """Remembers what was read last."""

    def __init__(self) -> None:
        self._read_at = float("-inf")
        self._usages: dict[str, Usage] = {}
        self._reading = asyncio.Lock()

    async def usages(self, pids: Mapping[str, int]) -> dict[str, Usage]:
        """By the name that `pids` has for a process; those that are gone are left out. At most a second old."""
        async with self._reading:
            if time.monotonic() - self._read_at > _KEEP_S or not pids.keys() <= self._usages.keys():
                self._usages = await asyncio.to_thread(_read_all, dict(pids))
                self._read_at = time.monotonic()
            return self._usages


def _read_all(pids: Mapping[str, int]) -> dict[str, Usage]:
    found = {}
    for name, pid in pids.items():
        with suppress(OSError, ValueError, IndexError):  # it has gone, or is not ours to look at
            found[name] = read_usage(pid)
    return found


def read_usage(pid: int) -> Usage:
    """Raises OSError when there is no such process."""
    folder = Path("/proc", str(pid))
    # Behind the name, which may have blanks and parentheses in it.
    fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    resident = int((folder / "statm").read_bytes().split()[1]) * _PAGE_BYTES
    proportional = 0
    with suppress(OSError):
        if pss := _PSS.search((folder / "smaps_rollup").read_bytes()):
            proportional = int(pss[1]) * 1024
    return Usage(pid, ticks / _TICKS_PER_S, resident, proportional)
