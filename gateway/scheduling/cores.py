"""Cores: how many this gateway's batches compute on, how many are lent to one, and how many other programs use.

Owns the numbers of one gateway process with all its models, what it tells the supervisor about them, and the readings
of /proc/stat. Sends no batch and asks nothing per batch.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from vecd.gateway.scheduling.model_shares import ModelShares
from vecd.gateway.telemetry.prometheus import TICKS_PER_S, cpu_s
from vecd.shm.control import CoresHeld, CoresWanted, Message

# Every batch has a core of its own, and needs no grant for it. A batch gets more than one core only while others would
# be idle: a worker waits then until the lease ends, because two threads that share a core with a third one, and spin
# while they wait for each other, are slower than one (measured: 68 ms instead of 11). Of several models, a batch waits
# for a core that is free.

_MAX_OTHERS_USE = 0.5
"""Cores that other programs may use while all of ours are lent: what a client on the same machine needs."""

CONTENDED_BATCHES, _MAX_CONTENDED_S = 8, 2.0
"""After a batch has waited for lent cores, others are expected for as long as this number of equal ones take, and no
longer than this. Without it, two clients whose batches have met once would wait for each other for ever."""

QUIET_AFTER_S = 1.0
"""A moment is quiet if so long no two batches have met: with several clients they do within some requests."""


class Cores:
    def __init__(self, num_cores: int) -> None:
        """`num_cores`: those that the server may use, at least 1; all of them are granted at first."""
        self.num_cores = num_cores
        self.granted = num_cores
        """Those of which this gateway may lease more than one to a batch."""
        self.leased = 0
        """A batch alone on a core counts as well."""
        self.num_lent = 0
        """Of these, the cores beyond the first of each batch."""
        self.others_use = 0.0
        """Cores that programs other than the server used in the last second."""
        self.on_change: Callable[[], None] | None = None
        """Called when a lease has begun or ended."""
        self._contended_until = -math.inf
        self._quiet_from = -math.inf
        self.models = ModelShares(lambda: self.num_open)

    @property
    def num_batches(self) -> int:
        """Those that have a core of their own or more."""
        return self.leased - self.num_lent

    @property
    def free(self) -> int:
        """Cores that no batch has; below 0 when there are more workers than cores."""
        return self.granted - self.leased

    @property
    def num_open(self) -> int:
        """Cores that batches of several models may begin on now; below 0 after a smaller grant. One needs no grant."""
        return max(1, self.granted) - self.leased

    @property
    def spare(self) -> int:
        """Free cores that may be lent beside the first one of a batch: none that another program needs."""
        taken = max(0, math.ceil(self.others_use - _MAX_OTHERS_USE))
        return min(self.free, self.num_cores - taken - self.leased) - 1

    def places(self, num_idle_workers: int) -> int:
        """How many idle workers may get a batch now. The others get theirs at the end of a lease of several cores."""
        return num_idle_workers if self.num_lent == 0 else max(0, min(num_idle_workers, self.free))

    def lease(self, num: int) -> None:
        """Lease `num` cores, at least 1, to one batch."""
        self.leased += num
        self.num_lent += num - 1
        if self.on_change is not None:
            self.on_change()

    def give_back(self, num: int, num_kept: int = 0) -> None:
        """Give a batch's lease of `num` back, but for `num_kept`, 0 or 1."""
        self.leased -= num - num_kept
        self.num_lent -= max(0, num - 1)
        if self.on_change is not None:
            self.on_change()

    def note_meeting(self, now: float) -> None:
        """A batch has been sent, or waits, while another one is computed."""
        self._quiet_from = now + QUIET_AFTER_S

    def is_quiet(self, now: float) -> bool:
        """No batch has cores now, at no gateway, and none has met another one for a while."""
        return self.leased == 0 and self.granted == self.num_cores and now >= self._quiet_from

    def note_contention(self, now: float, batch_s: float) -> None:
        """A batch, which one thread needs `batch_s` for, waits for cores that are lent to another one."""
        self.note_meeting(now)
        self._contended_until = now + min(_MAX_CONTENDED_S, CONTENDED_BATCHES * batch_s)

    def describe(self) -> dict[str, float]:
        return {
            "usable": self.num_cores,
            "granted": self.granted,
            "leased": self.leased,
            "used_by_others": round(self.others_use, 2),
        }

    def is_contended(self, now: float) -> bool:
        """Another batch is expected to come while one has all cores."""
        return now < self._contended_until


# What one of several gateways tells the supervisor about cores: how many it wants, and when it holds no more of them
# than a smaller grant allows. No batch waits for an answer: without a grant it gets one core.

_LOOK_S = 0.05
"""Between two looks while there is work, and so the least time between two CoresWanted."""

_NUM_LOOKS = 10
"""What is wanted is the most of this number of looks: a gateway without work for half a second wants no cores."""

_SMALL = 8
"""A change by less than this part of what was wanted before is not worth a message."""


class CoreClaim:
    def __init__(
        self,
        cores: Cores,
        *,
        num_waiting: Callable[[], int],
        send: Callable[[Message], None],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """`num_waiting`: the sequences that wait for a worker. `send` takes the messages for the supervisor. Side
        effect: `cores` has no cores to lend until a grant comes, and reports its leases here."""
        self._cores = cores
        self._num_waiting = num_waiting
        self._send = send
        self._call_later = call_later
        self._most_batches = 0
        """In flight at a time since the last look."""
        self._looks: deque[int] = deque(maxlen=_NUM_LOOKS)
        self._wanted = 0
        """As the supervisor knows it."""
        self._is_looking = False
        self._must_confirm = False
        cores.granted = 0
        cores.on_change = self._on_change

    def grant(self, num: int) -> None:
        self._must_confirm = num < self._cores.granted
        self._cores.granted = num
        self._confirm()

    def _on_change(self) -> None:
        self._confirm()
        self._most_batches = max(self._most_batches, self._cores.num_batches)
        if not self._is_looking:
            self._is_looking = True
            self._call_later(0, self._look)

    def _confirm(self) -> None:
        is_within_grant = self._cores.num_lent == 0 or self._cores.free >= 0
        if self._must_confirm and is_within_grant:
            self._must_confirm = False
            self._send(CoresHeld(self._cores.granted))

    def _look(self) -> None:
        """Each sequence that waits could have a core of its own."""
        self._looks.append(max(self._most_batches, self._cores.num_batches + self._num_waiting()))
        self._most_batches = self._cores.num_batches
        wanted = min(self._cores.num_cores, max(self._looks))
        if wanted != self._wanted and (not wanted or abs(wanted - self._wanted) * _SMALL >= self._wanted):
            self._wanted = wanted
            self._send(CoresWanted(wanted))
        self._is_looking = wanted > 0
        if self._is_looking:
            self._call_later(_LOOK_S, self._look)


# How many cores programs other than the server use. In a container /proc/stat counts those of the whole machine, which
# use the same cores.

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
        """Used between the last two readings, of those that this process may use."""

    @property
    def num_cpus(self) -> int:
        """Those that this process may use, whatever its share of them."""
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
        return ticks / TICKS_PER_S

    def _spent_s(self, pid: int) -> float | None:
        with suppress(OSError, ValueError, IndexError):
            return cpu_s(self._proc / str(pid))
        return None
