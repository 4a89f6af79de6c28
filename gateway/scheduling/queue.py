"""What waits for a batch, and whose turn it is.

Owns the sequences of every request until a batch takes them, the order of turns among requests and among tenants, and
all totals of what waits. Pure. `vecd.gateway.scheduling.policy` decides what one turn sends, and into which batch.

    PriorityClass
      new   a tenant that comes with nothing waiting has its first turn here, before the others, ──┐
      old   and all later turns here, for as long as it has something waiting                   ◄──┘
        TenantQueue (one tenant in that class)
          fresh    a request has its first turn here
          backlog  and all later turns here
            RequestQueue (the waiting sequences of one request)

Both levels follow fq_codel (RFC 8290), and a turn is worth the same quantum of tokens in both. A tenant that runs out
keeps its place until its turn comes round again: otherwise a tenant that always runs out would always be new.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice

from vecd.gateway.encoding.result import Result
from vecd.gateway.request import BatchShare, Priority, TokenizedInput
from vecd.shm.output import Output

_KEPT_PART = 4
"""One part in four is kept for what has waited longer, wherever newcomers go first."""

_ALONE_FROM = 2
"""Deaths of an input from which on it shares no batch."""

_MIN_TENANTS_LOOKED_THROUGH = 64

_MAX_TENANTS_ESTIMATED = 64
"""Other tenants that are looked at one by one for an estimate, those that have waited for the longest. The rest are
estimated together: thousands may wait at once, and each of their requests asks."""


def kept(amount: int) -> int:
    """The part of `amount` that is kept for what has waited longer."""
    return amount // _KEPT_PART


def kept_beside(amount: int) -> int:
    """What the kept part comes to while newcomers get `amount`."""
    return amount // (_KEPT_PART - 1)


@dataclass(slots=True)
class Deaths:
    """The deaths of workers while they computed one input. Counted by `vecd.gateway.dispatch.known`."""

    num: int = 0
    num_alone: int = 0
    """Of these, in a batch of this input alone."""
    num_in_a_row: int = 0
    """Of those alone, the newest, between which no other worker has died."""
    last_worker_death: int = 0
    """The number of the newest, among the deaths of all workers."""
    is_rejected: bool = False

    @property
    def must_run_alone(self) -> bool:
        return self.num >= _ALONE_FROM


class Flight:
    """Identical sequences, of which one is computed for all. Owned by `vecd.gateway.dispatch.known`."""

    __slots__ = ("followers", "key", "leader", "waiting")

    def __init__(self, key: "tuple[str | None, Output, bytes, int]", first: "QueuedSequence") -> None:
        self.key = key
        """The tenant, None where tenants share; the output; the token ids; the border."""
        self.leader: QueuedSequence | None = None
        """The one that a worker has."""
        self.waiting: dict[QueuedSequence, None] = {first: None}
        """For a batch, each in its own request; empty while there is a leader."""
        self.followers: list[QueuedSequence] = []
        """They wait for the row of another."""


class QueuedSequence:
    """One tokenized input: the unit of scheduling. Owned by the batching policy while queued, then by one batch."""

    __slots__ = (
        "border", "deaths", "digest", "flight", "index", "num_rows", "num_tokens", "output", "request_queue",
        "token_ids", "weight",
    )  # fmt: skip

    def __init__(
        self,
        request_queue: "RequestQueue",
        index: int,
        tokenized: TokenizedInput,
        output: Output = Output.VECTORS,
        span: int = 1,
    ) -> None:
        """`index`: of its input in the request. `span`: rows of an output that spans several
        (`vecd.shm.output.span_of`)."""
        self.request_queue = request_queue
        self.index = index
        self.token_ids = tokenized.token_ids
        self.num_tokens = tokenized.num_tokens
        self.output = output
        self.weight, self.border = tokenized.weight, tokenized.border
        self.num_rows = output.num_rows(tokenized.num_tokens, span)
        self.deaths: Deaths | None = None
        self.flight: Flight | None = None
        """It and those that are identical."""
        self.digest: bytes | None = None
        """What its row is to be kept under in the vector cache; None: it is not."""

    @property
    def must_run_alone(self) -> bool:
        """It may not share a batch, because of workers that died of it."""
        return self.deaths is not None and self.deaths.must_run_alone

    @property
    def result(self) -> Result:
        return self.request_queue.result

    @property
    def is_abandoned(self) -> bool:
        return self.request_queue.result.is_over


@dataclass(slots=True, eq=False)
class RequestQueue:
    """The sequences of one request that wait for a batch, in the order of its inputs. Given to `BatchingPolicy.close`
    when the request is over."""

    result: Result
    priority: Priority
    deadline: float = math.inf
    """By the clock that the policy is given."""
    tenant: str = ""
    sequences: deque[QueuedSequence] = field(default_factory=deque)
    num_tokens: int = 0
    rotation: "RequestRotation | None" = None
    """Where it waits for its turn; None while `sequences` is empty."""
    deficit: int = 0
    """Tokens that it may still send in this turn."""
    is_new: bool = True
    waits_since: float = 0.0
    # Written by the dispatcher.
    num_sent_tokens: int = 0
    """Tokens that workers have or have embedded, without those of lost batches."""
    first_sent_at: float | None = None
    last_done_at: float = 0.0
    """When its newest batch was answered."""
    batches: list[BatchShare] | None = None
    """If the request is traced."""

    @property
    def num_rows(self) -> int:
        return num_rows_of(self.sequences, len(self.sequences), self.num_tokens)

    @property
    def is_complete(self) -> bool:
        """Whether all inputs that have no rows yet wait here. Those that the vector cache knew have theirs."""
        num_missing = self.result.num_missing
        if len(self.sequences) <= 1:
            return len(self.sequences) == num_missing == 1
        return (
            len(self.sequences) >= num_missing and len({sequence.index for sequence in self.sequences}) == num_missing
        )


def num_rows_of(sequences: "deque[QueuedSequence] | list[QueuedSequence]", num_sequences: int, num_tokens: int) -> int:
    """Rows of `num_sequences` sequences of one request, which have `num_tokens` together. `sequences`: any of that
    request, which all have the same output."""
    if not sequences:
        return 0
    return num_tokens if sequences[0].output.is_per_token else num_sequences * sequences[0].num_rows


@dataclass(slots=True, eq=False)
class RequestRotation:
    """Request queues of one tenant that take turns."""

    tenant_queue: "TenantQueue"
    queues: OrderedDict[RequestQueue, None] = field(default_factory=OrderedDict)
    """The next one first. None is empty."""
    num_tokens: int = 0

    def append(self, request_queue: RequestQueue, *, at_front: bool = False) -> None:
        request_queue.rotation = self
        self.queues[request_queue] = None
        if at_front:
            self.queues.move_to_end(request_queue, last=False)
        self.count(request_queue.num_tokens)

    def remove(self, request_queue: RequestQueue) -> None:
        request_queue.rotation = None
        del self.queues[request_queue]
        if request_queue.num_tokens:
            self.count(-request_queue.num_tokens)

    def count(self, num_tokens: int) -> None:
        """Add tokens to all totals that this rotation is part of; below 0: take them away."""
        tenant_queue = self.tenant_queue
        self.num_tokens += num_tokens
        tenant_queue.rotation.num_tokens += num_tokens
        if self is tenant_queue.backlog:
            tenant_queue.priority_class.num_backlog_tokens += num_tokens


@dataclass(slots=True, eq=False)
class TenantRotation:
    """Tenant queues of one priority class that take turns."""

    tenant_queues: "deque[TenantQueue]" = field(default_factory=deque)
    """The next one first; some may have nothing waiting."""
    num_tokens: int = 0


class TenantQueue:
    __slots__ = ("backlog", "deficit", "fresh", "num_turns", "priority_class", "rotation", "tenant")

    def __init__(self, tenant: str, priority_class: "PriorityClass") -> None:
        self.tenant = tenant
        self.priority_class = priority_class
        self.rotation = priority_class.new
        self.deficit = priority_class.quantum
        """Tokens that it may still send in this turn; counts only beside other tenants."""
        self.num_turns = 0
        self.fresh = RequestRotation(self)
        self.backlog = RequestRotation(self)

    @property
    def num_tokens(self) -> int:
        return self.fresh.num_tokens + self.backlog.num_tokens

    @property
    def rotations_by_turn(self) -> tuple[RequestRotation, RequestRotation]:
        """The backlog is first in each fourth turn. Whole turns, because a part of one may be less than a sequence."""
        if self.num_turns % _KEPT_PART == _KEPT_PART - 1:
            return self.backlog, self.fresh
        return self.fresh, self.backlog

    def tokens_ahead(self, num_tokens: int) -> int:
        """Estimated tokens that are served before a new request of this tenant, of `num_tokens`, has been."""
        quantum = self.priority_class.quantum
        first_turns = min(self.fresh.num_tokens, len(self.fresh.queues) * quantum)
        if num_tokens <= quantum:
            later_turns = kept_beside(first_turns)
        else:  # each of its requests gets as much
            later_turns = (len(self.fresh.queues) + len(self.backlog.queues)) * num_tokens
        return first_turns + min(self.num_tokens - first_turns, later_turns)


class PriorityClass:
    def __init__(self, quantum: int) -> None:
        self.quantum = quantum
        self.tenant_queues: dict[str, TenantQueue] = {}
        """All that have something waiting, and some that had."""
        self.new = TenantRotation()
        self.old = TenantRotation()
        self.owed: dict[TenantQueue, int] = {}
        """Tokens of lost batches, which go before all others and out of turn."""
        self.num_backlog_tokens = 0
        self.served_at = -math.inf
        self._max_tenants = _MIN_TENANTS_LOOKED_THROUGH

    @property
    def num_tokens(self) -> int:
        return self.new.num_tokens + self.old.num_tokens

    @property
    def only_tenant(self) -> TenantQueue | None:
        return next(iter(self.tenant_queues.values())) if len(self.tenant_queues) == 1 else None

    @property
    def has_many_turns(self) -> bool:
        return self.num_tokens > len(self.tenant_queues) * self.quantum

    # --- tenants --------------------------------------------------------------------------------------------

    def tenant_queue(self, tenant: str) -> TenantQueue:
        """The tenant's queue; a new one is the last of those that have their first turn."""
        tenant_queue = self.tenant_queues.get(tenant)
        if tenant_queue is None:
            if not self.num_tokens:  # so no tenant is behind another
                for tenants in (self.tenant_queues, self.new.tenant_queues, self.old.tenant_queues, self.owed):
                    tenants.clear()
            elif len(self.tenant_queues) >= self._max_tenants:
                self._drop_idle()
            tenant_queue = self.tenant_queues[tenant] = TenantQueue(tenant, self)
            self.new.tenant_queues.append(tenant_queue)
        return tenant_queue

    def _drop_idle(self) -> None:
        """Looks through all tenants, but only after as many have come."""
        self.tenant_queues = {queue.tenant: queue for queue in self.tenant_queues.values() if queue.num_tokens}
        for rotation in (self.new, self.old):
            rotation.tenant_queues = deque(queue for queue in rotation.tenant_queues if queue.num_tokens)
        self._max_tenants = 2 * len(self.tenant_queues) + _MIN_TENANTS_LOOKED_THROUGH

    # --- turns ----------------------------------------------------------------------------------------------

    def next_tenant(self, rotation: TenantRotation) -> TenantQueue | None:
        """None if nothing waits in the rotation."""
        while rotation.tenant_queues:
            tenant_queue = rotation.tenant_queues[0]
            if tenant_queue.num_tokens:
                return tenant_queue
            if rotation is self.new:
                self.end_turn(tenant_queue)
            else:
                rotation.tenant_queues.popleft()
                del self.tenant_queues[tenant_queue.tenant]
        return None

    def end_turn(self, tenant_queue: TenantQueue) -> None:
        """Give the tenant queue at the front of its rotation its next turn after all others."""
        tenant_queue.rotation.tenant_queues.popleft()
        self._append_to_old(tenant_queue)
        tenant_queue.num_turns += 1
        # What an idle tenant could not use is not saved for when it has something again.
        tenant_queue.deficit = self.quantum + (tenant_queue.deficit if tenant_queue.num_tokens else 0)

    def end_first_turn(self, tenant_queue: TenantQueue) -> None:
        """The only tenant has been served, so each that comes now is newer."""
        if tenant_queue.rotation is self.new:
            self.new.tenant_queues.remove(tenant_queue)
            self._append_to_old(tenant_queue)

    def _append_to_old(self, tenant_queue: TenantQueue) -> None:
        tenant_queue.rotation.num_tokens -= tenant_queue.num_tokens
        tenant_queue.rotation = self.old
        self.old.num_tokens += tenant_queue.num_tokens
        self.old.tenant_queues.append(tenant_queue)

    # --- estimates ------------------------------------------------------------------------------------------

    def tokens_ahead(self, tenant: str, num_tokens: int) -> int:
        """Estimated tokens of this class that are served before a tenant's new request of `num_tokens` has been."""
        own = self.tenant_queues.get(tenant)
        ahead = own.tokens_ahead(num_tokens) if own is not None else 0
        return ahead + self._others_ahead(own, ahead + num_tokens)

    def _others_ahead(self, own: TenantQueue | None, num_tokens: int) -> int:
        """Estimated tokens that others send until the tenant with the queue `own` has sent `num_tokens`."""
        num_others = len(self.tenant_queues) - (own is not None)
        if not num_others:
            return 0
        own_tokens = own.num_tokens if own is not None else 0
        waiting = self.num_tokens - own_tokens
        if num_tokens <= self.quantum and (own is None or own.rotation is self.new):
            first_turns = min(self.new.num_tokens - own_tokens, len(self.new.tenant_queues) * self.quantum)
            return first_turns + min(waiting - first_turns, kept_beside(first_turns))
        # Each gets as much as this one does meanwhile, in whole turns.
        turns = -(-num_tokens // self.quantum) * self.quantum
        looked_at = [
            other.num_tokens
            for other in islice(self.tenant_queues.values(), _MAX_TENANTS_ESTIMATED)
            if other is not own
        ]
        ahead = sum([min(tokens, turns) for tokens in looked_at])
        if (num_rest := num_others - len(looked_at)) > 0:
            ahead += min(waiting - sum(looked_at), num_rest * turns)
        return ahead
