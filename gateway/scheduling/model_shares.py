"""Which model's batch leaves next, where the models of a gateway share its cores.

Owns the clocks of the models. Pure: it is given the time and never asks for it. Dispatchers call it in place of their
own loop while there are several models.

A batch needs a free core to leave, so workers of all models together never compute more batches than there are cores.
Workers on a GPU need none. When a core is free:

    priority   the model goes first that has a request of the highest priority that waits anywhere. One that has waited
               for AGING_S counts as equal, until it has got a batch: as within a model, priorities starve no other
               (`vecd.gateway.scheduling.policy`)
    clock      among equals, the model goes first that has had the least core time for its weight: start-time fair
               queueing (Goyal, Vin and Cheng, 1996). Its clock advances by a batch's predicted seconds × cores /
               weight when the batch leaves, and is corrected by what was measured

Priorities come before models, because a client that waits for an answer must not wait for the bulk of another model.

A model that comes back is not owed the time in which nothing of it waited: its clock is at least that of the batch that
left last. One that was passed over for a higher priority is owed _MAX_LAG_S at most, or it would have all cores for as
long as the other one had them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vecd.gateway.scheduling.policy import AGING_S, BatchingPolicy

_MAX_LAG_S = 1.0
"""Of a clock, so of one core at a weight of 1."""

_MAX_TIMES_PREDICTED = 8.0
"""A batch counts for at most this many times the predicted time, because a worker may have been stopped for a while."""


@dataclass
class _Clock:
    """Of one model: what its generations have in common while it is reloaded."""

    weight: float
    virtual_s: float = 0.0
    """Seconds × cores of its batches / weight, and what it was not owed."""


class CoreTurn(NamedTuple):
    num_places: int
    """Workers among which what waits is divided, 1 or more."""
    num_beside: int
    """Batches that other models could send now: free cores are left for them."""
    is_short: bool | None
    """Others wait for the batch; None: the dispatcher's own policy decides."""


class CoreUser(Protocol):
    """A dispatcher, as the others see it."""

    in_flight_tokens: int

    def find_idle(self) -> int:
        """Workers that could get a batch now; 0 if nothing waits."""

    def send_in_turn(self, now: float, turn: CoreTurn) -> int:
        """Send one batch. Returns how many workers could get the next one; 0 if nothing could be sent, or nothing is
        left."""

    def send_ahead(self, now: float, *, is_short: bool | None) -> None:
        """Send busy workers their next batches."""

    def note_waiting(self, now: float) -> None:
        """Something waits for cores: none is lent for a while."""

    def schedule_dispatch(self) -> None: ...


class ModelShare:
    """What one dispatcher has of the cores. Owned by `ModelShares` from `join` to `leave`."""

    def __init__(self, model: int, weight: float | None, policy: BatchingPolicy, user: CoreUser) -> None:
        """`model`: its index, the same in each of its generations. `weight`: above 0; None: its workers need no
        core."""
        self.model = model
        self.user = user
        self.needs_cores = weight is not None
        self.policy = policy
        self.clock = _Clock(weight or 1.0)
        self.num_idle = 0
        """Workers that could get a batch now, if they had a core each; 0 while nothing waits."""
        self.is_waiting = False
        """There were any when it was looked at last."""
        self.served_at = 0.0
        """When it got its last batch, or has begun to wait."""


def worker_order(num_workers: int, gateway: int, num_gateways: int) -> list[int]:
    """The places of idle workers in the order in which a gateway takes them: each gateway begins with others, because
    two that send to one worker leave a core idle. Pairs of gateways come from opposite ends, so that two never meet
    while they have no more cores than there are workers."""
    if gateway % 2:
        end = (gateway + 1) * num_workers // num_gateways
        return [(end - 1 - place) % num_workers for place in range(num_workers)]
    start = gateway * num_workers // num_gateways
    return [(start + place) % num_workers for place in range(num_workers)]


class ModelShares:
    def __init__(self, num_open: Callable[[], int]) -> None:
        """`num_open`: the cores that batches may begin on now."""
        self._num_open = num_open
        self._members: list[ModelShare] = []
        self._virtual_s = 0.0
        """The clock of the batch that left last, before it was charged; never runs back."""
        self.are_several = False
        """The generations of one model are not."""

    # --- who shares -----------------------------------------------------------------------------------------

    def join(self, share: ModelShare) -> None:
        """A generation of a model that is there shares its clock, and sets its weight."""
        for other in self._members:
            if other.model == share.model:
                other.clock.weight = share.clock.weight
                share.clock = other.clock
        self._members.append(share)
        self._count_models()

    def leave(self, share: ModelShare) -> None:
        """`share` need not have joined."""
        if share in self._members:
            self._members.remove(share)
            self._count_models()
            for other in self._members:
                other.user.schedule_dispatch()

    def _count_models(self) -> None:
        self.are_several = len({share.model for share in self._members}) > 1

    # --- whose turn it is -----------------------------------------------------------------------------------

    def dispatch(self, now: float) -> None:
        """Send what can be sent, each batch when it is its model's turn. Batches are sent ahead only while none waits
        for a core, and no more cores are leased than granted, because a worker keeps its core for them."""
        for share in self._members:
            self._look(share, now)
        is_short = self.wants_short_batches(now)
        while equals := self._first(now):
            share = min(equals, key=lambda share: (share.clock.virtual_s, share.served_at))
            turn = self._turn(share, len(equals), is_short=is_short)
            share.num_idle = share.user.send_in_turn(now, turn)
        waiting = [share for share in self._members if share.num_idle]
        for share in waiting:
            share.user.note_waiting(now)
        keeps_cores = not waiting and self._num_open() >= 0
        for share in self._members:
            if share.policy.queued_sequences and (keeps_cores or not share.needs_cores):
                share.user.send_ahead(now, is_short=is_short if share.needs_cores else None)

    def _look(self, share: ModelShare, now: float) -> None:
        share.num_idle = share.user.find_idle()
        if share.num_idle:
            if not share.is_waiting:
                share.served_at = now  # it has not been kept waiting
            owed_s = _MAX_LAG_S if share.is_waiting else 0.0
            share.clock.virtual_s = max(share.clock.virtual_s, self._virtual_s - owed_s)
        share.is_waiting = share.num_idle > 0

    def _first(self, now: float) -> list[ModelShare]:
        """Those that are equal in priority, of which one sends the next batch."""
        waiting = [share for share in self._members if share.num_idle]
        needing_none = [share for share in waiting if not share.needs_cores]
        if needing_none or not waiting or self._num_open() <= 0:
            return needing_none
        highest = min([share.policy.waiting_priority for share in waiting])
        return [
            share for share in waiting if share.policy.waiting_priority == highest or now - share.served_at >= AGING_S
        ]

    def _turn(self, share: ModelShare, num_equal: int, *, is_short: bool) -> CoreTurn:
        if not share.needs_cores:
            return CoreTurn(share.num_idle, 0, None)
        num_places = max(1, min(share.num_idle, self._num_open() // num_equal))
        others = [other for other in self._members if other.needs_cores and other is not share]
        num_beside = sum([min(other.num_idle, other.policy.queued_sequences) for other in others])
        return CoreTurn(num_places, num_beside, is_short)

    # --- clocks ---------------------------------------------------------------------------------------------

    def charge(self, share: ModelShare, core_s: float, now: float) -> None:
        """A batch leaves, which is predicted to take `core_s` seconds × cores."""
        clock = share.clock
        self._virtual_s = max(self._virtual_s, clock.virtual_s)
        clock.virtual_s += core_s / clock.weight
        share.served_at = now

    def correct(self, share: ModelShare, charged_s: float, core_s: float) -> None:
        """A batch that was charged for `charged_s` seconds × cores has taken `core_s`."""
        core_s = min(core_s, _MAX_TIMES_PREDICTED * charged_s)
        share.clock.virtual_s += (core_s - charged_s) / share.clock.weight

    # --- what the others mean for one -----------------------------------------------------------------------

    def wants_short_batches(self, now: float) -> bool:
        """Whether others wait for each batch: a model wants short ones; or short requests come for one while another
        has a backlog, or has many turns waiting and the first has not."""
        # What waits without a worker, because its model loads or its workers are dead, waits for no batch.
        policies = [
            share.policy
            for share in self._members
            if share.needs_cores
            and (share.is_waiting or share.user.in_flight_tokens or not share.policy.queued_sequences)
        ]
        expecting = [policy for policy in policies if policy.expects_short(now)]
        if expecting and any(policy.has_backlog for policy in policies):
            return True
        if any(policy.has_many_turns for policy in policies) and not all(policy.has_many_turns for policy in expecting):
            return True
        return any(policy.wants_short_batches(now) for policy in policies)

    def part(self, share: ModelShare) -> float:
        """The part of the cores that a model can count on, above 0 … 1: by the weights of those whose workers have
        work, as if it had some."""
        if not share.needs_cores:
            return 1.0
        weights = {
            other.model: other.clock.weight
            for other in self._members
            if other.needs_cores and (other.is_waiting or other.user.in_flight_tokens)
        }
        weights[share.model] = share.clock.weight
        return share.clock.weight / sum(weights.values())
