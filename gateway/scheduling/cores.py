"""The budget of cores: how many of them this gateway's batches may compute on, and how many may be lent to one.

Owns the numbers, for one gateway process, all its models and generations. Pure. `vecd.gateway.dispatch.dispatcher`
leases cores for a batch and gives them back with its answer; `vecd.gateway.telemetry.other_programs` says how much of
the machine is not ours.

Every batch has a core of its own, and needs no grant for it. A batch gets more than one core only while others would be
idle: a worker waits then until the lease ends, because two threads that share a core with a third one, and spin while
they wait for each other, are slower than one (measured: 68 ms instead of 11).

Several models have more workers than there are cores. A batch then waits for a core that is free, and
`vecd.gateway.scheduling.model_shares` says whose turn it is.
"""

import math
from collections.abc import Callable

from vecd.gateway.scheduling.model_shares import ModelShares

_MAX_OTHERS_USE = 0.5
"""Cores that other programs may use while all of ours are lent: what a client on the same machine needs."""

_CONTENDED_BATCHES, _MAX_CONTENDED_S = 8, 2.0
"""After a batch has waited for lent cores, others are expected to come for as long as so many like it take, and no
longer than this. Without it, two clients whose batches have met once would wait for each other for ever."""

_QUIET_AFTER_S = 1.0
"""A moment is quiet if so long no two batches have met: with several clients they do within some requests."""


class Cores:
    def __init__(self, num_cores: int) -> None:
        """`num_cores`: those that the server may use, at least 1; all of them are granted to this gateway at first.
        Several gateways are granted parts, see `vecd.gateway.scheduling.core_claim`."""
        self.num_cores = num_cores
        self.granted = num_cores
        """Those of which this gateway may lease more than one to a batch."""
        self.leased = 0
        """To batches that workers compute for this gateway; a batch alone on a core counts as well."""
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
    def is_within_grant(self) -> bool:
        """Whether no core is lent that is not granted. A batch needs no grant for its first one."""
        return self.num_lent == 0 or self.leased <= self.granted

    @property
    def free(self) -> int:
        """Cores that no batch has; below 0 when there are more workers than cores."""
        return self.granted - self.leased

    @property
    def num_open(self) -> int:
        """Cores that batches of several models may begin on now; below 0 after a smaller grant. One needs no grant, so
        that no batch waits for a message."""
        return max(1, self.granted) - self.leased

    @property
    def spare(self) -> int:
        """Free cores that may be lent beside the first one of a batch: none that another program needs."""
        taken = max(0, math.ceil(self.others_use - _MAX_OTHERS_USE))
        return min(self.free, self.num_cores - taken - self.leased) - 1

    def places(self, num_idle_workers: int) -> int:
        """How many idle workers may get a batch now. The others get theirs at the end of a lease of several cores."""
        return num_idle_workers if self.num_lent == 0 else max(0, min(num_idle_workers, self.free))

    def grant(self, num: int) -> None:
        """Allow leases of `num` cores from now on. Leases that have begun stay as they are."""
        self.granted = num

    def lease(self, num: int) -> None:
        """To a batch that leaves for an idle worker, `num` at least 1."""
        self.leased += num
        self.num_lent += num - 1
        if self.on_change is not None:
            self.on_change()

    def give_back(self, num: int, num_kept: int = 0) -> None:
        """All of a batch's lease of `num`, but for `num_kept`, 0 or 1, if the worker has another batch."""
        self.leased -= num - num_kept
        self.num_lent -= max(0, num - 1)
        if self.on_change is not None:
            self.on_change()

    def note_meeting(self, now: float) -> None:
        """A batch has been sent, or waits, while another one is computed."""
        self._quiet_from = now + _QUIET_AFTER_S

    def is_quiet(self, now: float) -> bool:
        """Whether no batch has cores now, at no gateway, and none has met another one for a while."""
        return self.leased == 0 and self.granted == self.num_cores and now >= self._quiet_from

    def note_contention(self, now: float, batch_s: float) -> None:
        """A batch, which one thread needs `batch_s` for, waits for cores that are lent to another one."""
        self.note_meeting(now)
        self._contended_until = now + min(_MAX_CONTENDED_S, _CONTENDED_BATCHES * batch_s)

    def describe(self) -> dict[str, float]:
        """For `/info`."""
        return {
            "usable": self.num_cores,
            "granted": self.granted,
            "leased": self.leased,
            "used_by_others": round(self.others_use, 2),
        }

    def is_contended(self, now: float) -> bool:
        """Whether another batch may be expected to come while one has all cores."""
        return now < self._contended_until
