"""How many cores programs other than the server use.

Owns the readings of /proc/stat, and of the processor time of the server's own processes. Changes nothing. Called once a
second by `vecd.gateway.main`; takes some 50 µs, and 15 for each process.

In a container /proc/stat counts the programs of the whole machine, which use the same cores.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE, _IOWAIT, _GUEST = 3, 4, 8
"""Fields of a processor's line in /proc/stat; from _GUEST on, time that others include. Source: proc_stat(5)."""

_EVERY_S = 1.0
"""The readings count in hundredths of a second: after a shorter time they say little."""


class OtherPrograms:
    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._cpus = frozenset(b"cpu%d" % cpu for cpu in os.sched_getaffinity(0))
        self._before: tuple[float, float, dict[int, float]] | None = None
        self.cores = 0.0
        """Cores that other programs used between the last two readings, on those that this process may use."""

    @property
    def num_cpus(self) -> int:
        """Cores that this process may use, whatever its share of them."""
        return len(self._cpus)

    def read(self, now: float, pids: Iterable[int]) -> float:
        """Read again if the last reading is a second old at the time `now`; returns `cores`. `pids`: the server's
        processes. One that has begun since the last reading counts from then on."""
        if self._before is not None and now - self._before[0] < _EVERY_S:
            return self.cores
        try:
            busy_s = self._busy_s()
        except (OSError, ValueError, IndexError):
            return self.cores  # a kernel that does not say: the machine counts as ours
        ours = {pid: spent_s for pid in pids if (spent_s := self._spent_s(pid)) is not None}
        if self._before is not None:
            then, busy_then_s, ours_then = self._before
            ours_s = sum(spent_s - ours_then.get(pid, spent_s) for pid, spent_s in ours.items())
            self.cores = max(0.0, (busy_s - busy_then_s - ours_s) / (now - then))
        self._before = now, busy_s, ours
        return self.cores

    def _busy_s(self) -> float:
        ticks = 0
        for line in (self._proc / "stat").read_bytes().splitlines():
            name, *fields = line.split()
            if name in self._cpus:
                spent = [int(field) for field in fields[:_GUEST]]
                ticks += sum(spent) - spent[_IDLE] - spent[_IOWAIT]
            elif not name.startswith(b"cpu"):
                break  # interrupts: kilobytes on a large machine
        return ticks / _TICKS_PER_S

    def _spent_s(self, pid: int) -> float | None:
        with suppress(OSError, ValueError, IndexError):
            fields = (self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
            return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        return None
