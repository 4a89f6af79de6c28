"""Decides which sequences go into the next batch. Pure: told the time, never asks for it; no socket, no task.

Owns what waits: a `RequestQueue` for each request, in its tenant's lanes (`vecd.gateway.scheduling.fair_queue`). Called
by `vecd.gateway.dispatch.dispatcher` whenever a worker can take a batch, and by `vecd.gateway.pipeline` as requests
come and go. There is no timer and no batching window: batches grow with the load, and a lone sequence leaves at once.

Deficit round robin, counted in tokens (Shreedhar and Varghese, SIGCOMM 1995), first over tenants and then over the
requests of each, with newcomers before the rest, as fq_codel has them for packets (RFC 8290):

    INTERACTIVE   new  old     a lower priority is served with what the higher ones leave of a batch;
    NORMAL        new  old     one that has got nothing for AGING_S is served first, once
    BULK          new  old

    new      a tenant who comes with nothing waiting has its first turn here, before the old ones
    old      what one turn was not enough for; a quarter of what its priority has is kept for it

    fresh    in a tenant's turn, requests have their first one here, before its backlog: most are short, and end with it
    backlog  what that was not enough for has every fourth turn; of a tenant who is alone, a quarter of each batch

A turn is worth `quantum` tokens, at least the longest sequence: whoever has one sends something, and picking is O(1).
Two tenants who both have something waiting at a priority never differ by more than three turns in what they have got
of it. What the workers lost is not counted twice, and what is set aside, suspected of a failure, is nobody's turn.
"""

import math
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from vecd.gateway.encoding.pending import PendingResult
from vecd.gateway.scheduling.fair_queue import PriorityClass, Ring, TenantQueue
from vecd.gateway.scheduling.queue import Lane, QueuedSequence, RequestQueue
from vecd.gateway.types.request import Priority

MIN_QUANTUM_TOKENS = 256
AGING_S = 2.0

_KEPT_PART = 4
"""One part in so many of a batch is kept for a backlog, and for whoever has been passed over."""

_MAX_SHARES_LOOKED_AT = 64
"""Of so many other tenants each is looked at for an estimate of what is ahead; of more together, as many thousands may
wait at once and all ask. Those looked at have had something waiting for the longest, and so most often the most."""


_SHORT_EXPECTED_S = 2.0
"""So long after a short request, others like it are expected."""


class Scheduler:
    def __init__(self, max_batch_tokens: int, max_batch_rows: int, max_sequence_tokens: int) -> None:
        """A batch holds at most so many tokens (one longer sequence makes a batch of its own), and asks for at most so
        many rows, of which no sequence has more."""
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_rows = max_batch_rows
        self.quantum = max(MIN_QUANTUM_TOKENS, max_sequence_tokens)
        """Tokens of one turn."""
        self._levels = [PriorityClass(self.quantum) for _ in Priority]
        self._passed_over: dict[Lane, None] = {}
        """Whose next sequence was too long for what a batch had left, in the order in which that happened."""
        self._aside: deque[list[QueuedSequence]] = deque()
        self._is_asides_turn = True
        self._is_freshs_turn = True
        self._short_seen_at = -math.inf
        self._newcomer: TenantQueue | None = None
        self._newcomer_seen_at = -math.inf
        self._done_by = -math.inf
        self.hopeless: list[RequestQueue] = []
        """Requests that have been passed by because no batch would be done before their deadline: for the caller of
        `next_batch` to fail, and to forget."""
        self.queued_tokens = 0
        self.queued_sequences = 0
        self.queued_rows = 0
        """What these take of slots."""

    # --- requests come and go -------------------------------------------------------------------------------

    def open(
        self, pending: PendingResult, priority: Priority, deadline: float = math.inf, tenant: str = ""
    ) -> RequestQueue:
        """A request of a tenant whose sequences will come, all at once or in pieces. To be closed when it is over."""
        return RequestQueue(pending, priority, deadline, tenant)

    def add(self, request_queue: RequestQueue, sequences: Iterable[QueuedSequence], now: float) -> None:
        """Queue sequences of an open flow behind those that it has."""
        level = self._levels[request_queue.priority]
        num_tokens = self._enqueue(request_queue, sequences)
        is_short = request_queue.is_new and num_tokens <= self.quantum and _is_complete(request_queue)
        if is_short:
            self._short_seen_at = now
        if request_queue.lane is None and request_queue.queue:
            request_queue.waits_since = now
            share = level.share_of(request_queue.tenant)
            if not level.num_flows:
                level.served_at = now  # nobody has been kept waiting
            elif is_short and not share.num_flows:
                self._newcomer, self._newcomer_seen_at = share, now
            request_queue.credit += self.quantum
            level.enter(request_queue, share.fresh if request_queue.is_new else share.backlog)
        request_queue.is_new = False

    def put_back(self, sequences: list[QueuedSequence]) -> None:
        """Queue sequences of a lost batch again, before all others of their priority and in their old order.

        None of a closed flow may be among them.
        """
        self._count(sequences, 1)
        by_flow: dict[RequestQueue, list[QueuedSequence]] = {}
        for sequence in sequences:
            by_flow.setdefault(sequence.request_queue, []).append(sequence)
        for request_queue, lost in reversed(by_flow.items()):
            level = self._levels[request_queue.priority]
            if request_queue.lane is not None:
                request_queue.lane.request_queues.remove(request_queue)
                level.leave(request_queue, request_queue.lane)
            request_queue.queue.extendleft(reversed(lost))
            num_tokens = sum(sequence.num_tokens for sequence in lost)
            request_queue.num_tokens += num_tokens
            request_queue.credit += num_tokens
            share = level.share_of(request_queue.tenant)
            level.enter(request_queue, share.fresh, at_front=True)
            level.owed[share] = level.owed.get(share, 0) + num_tokens

    def set_aside(self, batch: list[QueuedSequence]) -> None:
        """Queue sequences as a batch of their own, taking turns with all others: suspects of what befell the last.

        The newest goes first, so that a search by halves comes to its end. None of a closed flow may be among them.
        """
        if batch:
            self._count(batch, 1)
            self._aside.appendleft(batch)

    def close(self, request_queue: RequestQueue) -> None:
        """The request is over: what of it still waits is dropped at once."""
        self.queued_tokens -= request_queue.num_tokens
        self.queued_sequences -= len(request_queue.queue)
        self.queued_rows -= _rows_waiting(request_queue)
        if request_queue.lane is not None:
            lane = request_queue.lane
            self._levels[request_queue.priority].leave(request_queue, lane)
            if len(lane.request_queues) > 2 * lane.num_flows:  # looked through no more often than flows are closed
                lane.request_queues = deque(other for other in lane.request_queues if other.lane is lane)
        request_queue.queue.clear()
        request_queue.num_tokens = 0
        if self._aside:
            self._drop_aside(request_queue)

    # --- what others ask ------------------------------------------------------------------------------------

    def tokens_ahead(self, num_tokens: int, priority: Priority, tokens_per_s: float, tenant: str = "") -> int:
        """About how many of the queued tokens are served before a new request of `num_tokens` has been."""
        ahead = 0
        for higher in range(priority):
            ahead += self._levels[higher].num_tokens
        level = self._levels[priority]
        share = level.shares.get(tenant)
        is_short = num_tokens <= self.quantum
        first_turns, own = self._own_ahead(share, num_tokens) if share is not None else (0, 0)
        first_of_others, others = self._others_ahead(level, share, own + num_tokens)
        if is_short:  # it is in the first turns that its priority gets by aging, or in one of the next
            num_turns = 1 + (first_turns + first_of_others) * _KEPT_PART // self._max_batch_tokens
            ahead = min(ahead, int(num_turns * AGING_S * tokens_per_s))
        return ahead + own + others

    def _own_ahead(self, share: TenantQueue, num_tokens: int) -> tuple[int, int]:
        """Of what the tenant of a new request has waiting already: first turns, and all that is served before it."""
        first_turns = min(share.fresh.num_tokens, share.fresh.num_flows * self.quantum)
        later_turns = share.num_tokens - first_turns
        is_short = num_tokens <= self.quantum
        meanwhile = first_turns // (_KEPT_PART - 1) if is_short else share.num_flows * num_tokens
        return first_turns, first_turns + min(later_turns, meanwhile)

    def _others_ahead(self, level: PriorityClass, share: TenantQueue | None, num_tokens: int) -> tuple[int, int]:
        """The same of other tenants, whatever they have waiting, until this one has had `num_tokens`."""
        num_others = len(level.shares) - (share is not None)
        if not num_others:
            return 0, 0
        if num_tokens <= self.quantum and (share is None or share.ring is level.new):
            own_tokens = share.num_tokens if share is not None else 0
            first_turns = min(level.new.num_tokens - own_tokens, len(level.new.shares) * self.quantum)
            rest = level.num_tokens - own_tokens - first_turns
            return first_turns, first_turns + min(rest, first_turns // (_KEPT_PART - 1))
        # Each gets as much as this one does meanwhile.
        turns = -(-num_tokens // self.quantum) * self.quantum
        looked_at = [
            other.num_tokens for other in islice(level.shares.values(), _MAX_SHARES_LOOKED_AT) if other is not share
        ]
        ahead = sum([min(waiting, turns) for waiting in looked_at])
        if (num_rest := num_others - len(looked_at)) > 0:
            own_tokens = share.num_tokens if share is not None else 0
            ahead += min(level.num_tokens - own_tokens - sum(looked_at), num_rest * turns)
        return ahead, ahead

    def queued_tokens_of(self, tenant: str) -> int:
        """What waits of a tenant, at all priorities, in its turns."""
        shares = (level.shares.get(tenant) for level in self._levels)
        return sum(share.num_tokens for share in shares if share is not None)

    def oldest_wait_s(self, now: float) -> float:
        """How long the oldest of what is queued has waited; 0 when nothing is. Looks at every request that waits."""
        since = [
            request_queue.waits_since
            for level in self._levels
            for share in level.shares.values()
            for lane in (share.fresh, share.backlog)
            for request_queue in lane.request_queues
            if request_queue.lane is lane
        ]
        since += [batch[0].request_queue.waits_since for batch in self._aside]
        return max(0.0, now - min(since, default=now))

    def wants_short_batches(self, now: float) -> bool:
        """Whether short requests come while a backlog is worked on, or a tenant with little comes with them beside
        others who have much: each batch is one that they wait for."""
        if now - self._short_seen_at < _SHORT_EXPECTED_S and any(level.num_backlog_flows for level in self._levels):
            return True
        if self._newcomer is not None and (
            now - self._newcomer_seen_at >= _SHORT_EXPECTED_S or self._newcomer.num_tokens > self.quantum
        ):
            self._newcomer = None  # gone, or one of those who have much
        return self._newcomer is not None and any(level.has_many_turns for level in self._levels)

    def fills(self, max_tokens: int) -> bool:
        """Whether what waits is enough for a whole batch of `max_tokens`."""
        return self.queued_tokens >= max_tokens or self.queued_rows >= self._max_batch_rows

    # --- batches --------------------------------------------------------------------------------------------

    def next_batch(
        self,
        now: float,
        *,
        max_tokens: int,
        num_idle_workers: int = 1,
        done_by: float = -math.inf,
        is_short: bool = False,
    ) -> list[QueuedSequence]:
        """Take the sequences of one batch of about `max_tokens`; empty when nothing waits.

        What waits is divided among the idle workers, so that a small queue keeps all of them busy instead of
        filling one. `done_by`: when the batch will be; see `hopeless`. `is_short`: see
        `wants_short_batches`; every other batch then has fresh requests alone, if there are any: they need not wait for
        the part of the backlog that goes with them.
        """
        self._done_by = done_by
        if self._aside and (self._is_asides_turn or self.queued_sequences == sum(map(len, self._aside))):
            self._is_asides_turn = False
            suspects = self._aside.popleft()
            self._count(suspects, -1)
            return suspects
        self._is_asides_turn = True
        share = -(-self.queued_tokens // max(1, num_idle_workers))
        budget = min(max_tokens, share, self._max_batch_tokens)
        batch = _Batch(budget, self._max_batch_tokens, self._max_batch_rows)
        if is_short and self._is_freshs_turn and self._serve_fresh_alone(batch):
            return batch.sequences
        self._is_freshs_turn = True
        self._serve_overdue(batch, now)
        for level in self._levels:
            num_before = batch.num_tokens
            self._serve_level(level, batch, batch.whole)
            if batch.num_tokens > num_before:
                level.served_at = now
        self._count_taken(batch)
        return batch.sequences

    def _serve_fresh_alone(self, batch: "_Batch") -> bool:
        """Whether there was anything; the backlog comes next."""
        for level in self._levels:
            if (share := level.only_share) is not None:
                self._serve(share.fresh, batch, batch.whole)
                continue
            self._serve_owed(level, batch, batch.whole)
            for share in level.with_fresh():
                if self._serve_on_credit(share.fresh, batch, batch.whole):
                    break
                level.leave_out(share)
        self._count_taken(batch)
        self._is_freshs_turn = not batch.sequences
        return bool(batch.sequences)

    def _serve_overdue(self, batch: "_Batch", now: float) -> None:
        """Begin with whoever has been passed over, and with priorities that have got nothing for long."""
        passed_over, self._passed_over = self._passed_over, {}
        for lane in passed_over:
            if lane.share.level.only_share is not None:
                self._serve(lane, batch, batch.part())
            else:
                self._serve_on_credit(lane, batch, batch.part())
        for level in self._levels:
            if now - level.served_at >= AGING_S:
                level.served_at = now
                self._serve_level(level, batch, batch.part())

    def _serve_level(self, level: PriorityClass, batch: "_Batch", limit: "_Limit") -> None:
        if (share := level.only_share) is not None:
            level.owed.clear()
            self._serve(share.fresh, batch, batch.less_kept(limit) if share.backlog.num_flows else limit)
            self._serve(share.backlog, batch, limit)
            self._serve(share.fresh, batch, limit)
            level.end_first_turn(share)
        elif level.num_flows:
            self._serve_owed(level, batch, limit)
            self._serve_ring(level, level.new, batch, batch.less_kept(limit) if level.old.num_tokens else limit)
            self._serve_ring(level, level.old, batch, limit)
            self._serve_ring(level, level.new, batch, limit)

    def _serve_owed(self, level: PriorityClass, batch: "_Batch", limit: "_Limit") -> None:
        """Send again what was lost, out of turn: it has been paid for."""
        for share, owed in tuple(level.owed.items()):
            num_before = batch.num_tokens
            if self._serve(share.fresh, batch, limit, owed):
                level.owed[share] = owed - (batch.num_tokens - num_before)
                return
            del level.owed[share]

    def _serve_ring(self, level: PriorityClass, ring: Ring, batch: "_Batch", limit: "_Limit") -> None:
        """Give the ring's shares their turns until the batch takes no more within the limit."""
        while (share := level.next_share(ring)) is not None and not self._take_turn(share, batch, limit):
            level.end_turn(share)

    def _take_turn(self, share: TenantQueue, batch: "_Batch", limit: "_Limit") -> bool:
        """Send what the share's credit allows, of the backlog in one turn of so many, else of fresh requests first.

        Whether the batch was full before that.
        """
        lanes = (share.fresh, share.backlog)
        if share.num_turns % _KEPT_PART == _KEPT_PART - 1:
            lanes = (share.backlog, share.fresh)
        for lane in lanes:
            if self._serve_on_credit(lane, batch, limit):
                return True
            if lane.num_flows:
                break
        return False

    def _serve_on_credit(self, lane: Lane, batch: "_Batch", limit: "_Limit") -> bool:
        """The same as `_serve`, as far as the tenant's turn goes."""
        num_before = batch.num_tokens
        is_full = self._serve(lane, batch, limit, lane.share.credit)
        lane.share.credit -= batch.num_tokens - num_before
        return is_full

    def _serve(self, lane: Lane, batch: "_Batch", limit: "_Limit", credit: float = math.inf) -> bool:
        """Give the lane's flows their turns, of `credit` tokens in all.

        Whether it was the batch that took no more within the limit.
        """
        num_before, is_full = len(batch.sequences), False
        while not is_full and (request_queue := self._head(lane)) is not None:
            sent, is_full = batch.fill(request_queue.queue, min(request_queue.credit, credit), limit)
            credit -= sent
            request_queue.credit -= sent
            request_queue.num_tokens -= sent
            lane.num_tokens -= sent
            lane.share.ring.num_tokens -= sent
            if request_queue.queue and request_queue.queue[0].num_tokens <= request_queue.credit:
                break  # its turn is not over
            self._end_turn(request_queue, lane)
        if len(batch.sequences) > num_before:
            self._passed_over.pop(lane, None)
        elif is_full and batch.has_room(limit):
            self._passed_over[lane] = None
        return is_full

    def _head(self, lane: Lane) -> RequestQueue | None:
        """The flow whose turn it is; drops those that are over, or can only be late."""
        while lane.request_queues:
            request_queue = lane.request_queues[0]
            is_last = self.queued_sequences == len(
                request_queue.queue
            )  # served all the same: a guess must not idle a worker
            if request_queue.lane is lane and (request_queue.deadline >= self._done_by or is_last):
                return request_queue
            lane.request_queues.popleft()
            if request_queue.lane is lane:
                self.hopeless.append(request_queue)
                self.close(request_queue)
        return None

    def _end_turn(self, request_queue: RequestQueue, lane: Lane) -> None:
        """Take the flow from the front of its lane; if it has more to send, it waits for its next turn."""
        lane.request_queues.popleft()
        share = lane.share
        share.level.leave(request_queue, lane)
        if request_queue.queue:
            request_queue.credit += self.quantum
            share.level.enter(request_queue, share.backlog)
        else:
            request_queue.credit = 0

    # --- books ----------------------------------------------------------------------------------------------

    def _count_taken(self, batch: "_Batch") -> None:
        self.queued_tokens -= batch.num_tokens
        self.queued_sequences -= len(batch.sequences)
        self.queued_rows -= batch.num_rows

    def _count(self, sequences: Iterable[QueuedSequence], sign: int) -> None:
        for sequence in sequences:
            self.queued_tokens += sign * sequence.num_tokens
            self.queued_sequences += sign
            self.queued_rows += sign * sequence.num_rows

    def _enqueue(self, request_queue: RequestQueue, sequences: Iterable[QueuedSequence]) -> int:
        num_tokens, num_before, rows_before = 0, len(request_queue.queue), _rows_waiting(request_queue)
        for sequence in sequences:
            request_queue.queue.append(sequence)
            num_tokens += sequence.num_tokens
        request_queue.num_tokens += num_tokens
        self.queued_tokens += num_tokens
        self.queued_sequences += len(request_queue.queue) - num_before
        self.queued_rows += _rows_waiting(request_queue) - rows_before
        if request_queue.lane is not None:
            request_queue.lane.num_tokens += num_tokens
            request_queue.lane.share.ring.num_tokens += num_tokens
        return num_tokens

    def _drop_aside(self, request_queue: RequestQueue) -> None:
        kept: deque[list[QueuedSequence]] = deque()
        for batch in self._aside:
            others = [sequence for sequence in batch if sequence.request_queue is not request_queue]
            self._count((sequence for sequence in batch if sequence.request_queue is request_queue), -1)
            if others:
                kept.append(others)
        self._aside = kept


def _is_complete(request_queue: RequestQueue) -> bool:
    """Whether a flow, of which nothing has been sent yet, has a sequence of the request's last input."""
    return bool(request_queue.queue) and request_queue.queue[-1].index == request_queue.pending.num_missing - 1


def _rows_waiting(request_queue: RequestQueue) -> int:
    """Of the flow's sequences, which all ask for the same."""
    if request_queue.queue and request_queue.queue[0].output.is_per_token:
        return request_queue.num_tokens
    return len(request_queue.queue)


class _Limit(NamedTuple):
    """How far a batch may be filled for now."""

    tokens: int
    rows: int


class _Batch:
    __slots__ = ("_max_rows", "_max_tokens", "num_rows", "num_tokens", "sequences", "whole")

    def __init__(self, budget: int, max_tokens: int, max_rows: int) -> None:
        """`budget`: the tokens that it should have; more where it comes nearer to that with a sequence than without."""
        self.whole = _Limit(budget, max_rows)
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self.sequences: list[QueuedSequence] = []
        self.num_tokens = 0
        self.num_rows = 0

    def part(self) -> _Limit:
        """The kept part of the whole, beyond what is in it."""
        tokens, rows = self.whole
        return _Limit(
            min(tokens, self.num_tokens + tokens // _KEPT_PART),
            min(rows, self.num_rows + max(1, rows // _KEPT_PART)),
        )

    def less_kept(self, limit: _Limit) -> _Limit:
        """The limit without the kept part of what is left of it."""
        tokens, rows = limit.tokens - self.num_tokens, limit.rows - self.num_rows
        return _Limit(limit.tokens - tokens // _KEPT_PART, limit.rows - rows // _KEPT_PART)

    def has_room(self, limit: _Limit) -> bool:
        return self.num_tokens < limit.tokens and self.num_rows < limit.rows

    def takes(self, num_tokens: int, num_rows: int, limit: _Limit) -> bool:
        if not self.sequences:
            return True
        total_rows = self.num_rows + num_rows
        if total_rows > self._max_rows or total_rows - num_rows // 2 > limit.rows:
            return False
        total = self.num_tokens + num_tokens
        return total <= self._max_tokens and total - num_tokens // 2 <= limit.tokens

    def fill(self, queue: deque[QueuedSequence], credit: float, limit: _Limit) -> tuple[int, bool]:
        """Take sequences of a flow, of at most `credit` tokens. How many tokens, and whether the limit ended it."""
        sent = 0
        of_tokens = bool(queue) and queue[0].output.is_per_token
        while queue and (num_tokens := queue[0].num_tokens) <= credit - sent:
            num_rows = num_tokens if of_tokens else 1
            if not self.takes(num_tokens, num_rows, limit):
                return sent, True
            self.sequences.append(queue.popleft())
            self.num_tokens += num_tokens
            self.num_rows += num_rows
            sent += num_tokens
        return sent, False
