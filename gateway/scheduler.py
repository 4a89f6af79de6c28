"""Decides which sequences go into the next batch. Pure: told the time, never asks for it; no socket, no task.

Owns what waits: a `Flow` for each request, in lanes. Called by `gateway.dispatch` whenever a worker can take a batch,
and by `gateway.app` as requests come and go. There is no timer and no batching window: batches grow with the load, and
a lone sequence leaves at once.

Deficit round robin over requests, counted in tokens (Shreedhar and Varghese, SIGCOMM 1995), in two lanes for each
priority, as fq_codel has them for packets (RFC 8290):

    INTERACTIVE   fresh  backlog     a lower priority is served with what the higher ones leave of a batch;
    NORMAL        fresh  backlog     one that has got nothing for AGING_S is served first, once
    BULK          fresh  backlog

    fresh         a request has its first turn here, before the backlog: most are short, and end with it
    backlog       what one turn was not enough for; a quarter of what its priority has is kept for it

A turn is worth `quantum` tokens, at least the longest sequence: whoever has one sends something, and picking is O(1).
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.request import Flow, Gathering, Lane, Priority, Sequence

MIN_QUANTUM_TOKENS = 256
AGING_S = 2.0

_KEPT_PART = 4
"""One part in so many of a batch is kept for a backlog, and for whoever has been passed over."""

_SHORT_EXPECTED_S = 2.0
"""So long after a short request, others like it are expected."""


@dataclass(slots=True)
class _Level:
    """The flows of one priority."""

    fresh: Lane = field(default_factory=Lane)
    backlog: Lane = field(default_factory=Lane)
    served_at: float = -math.inf

    @property
    def num_flows(self) -> int:
        return self.fresh.num_flows + self.backlog.num_flows

    @property
    def num_tokens(self) -> int:
        return self.fresh.num_tokens + self.backlog.num_tokens


class Scheduler:
    def __init__(self, max_batch_tokens: int, max_batch_sequences: int, max_sequence_tokens: int) -> None:
        """A batch holds at most so many tokens (one longer sequence makes a batch of its own) and sequences."""
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_sequences = max_batch_sequences
        self.quantum = max(MIN_QUANTUM_TOKENS, max_sequence_tokens)
        """Tokens of one turn."""
        self._levels = [_Level() for _ in Priority]
        self._passed_over: dict[Lane, None] = {}
        """Whose next sequence was too long for what a batch had left, in the order in which that happened."""
        self._aside: deque[list[Sequence]] = deque()
        self._is_asides_turn = True
        self._is_freshs_turn = True
        self._short_seen_at = -math.inf
        self._done_by = -math.inf
        self.hopeless: list[Flow] = []
        """Requests that have been passed by because no batch would be done before their deadline: for the caller of
        `next_batch` to fail, and to forget."""
        self.queued_tokens = 0
        self.queued_sequences = 0

    # --- requests come and go -------------------------------------------------------------------------------

    def open(self, gathering: Gathering, priority: Priority, deadline: float = math.inf) -> Flow:
        """A request whose sequences will come, all at once or in pieces. To be closed when it is over."""
        return Flow(gathering, priority, deadline)

    def add(self, flow: Flow, sequences: Iterable[Sequence], now: float) -> None:
        """Queue sequences of an open flow behind those that it has."""
        level = self._levels[flow.priority]
        num_tokens = self._enqueue(flow, sequences)
        lane = level.fresh if flow.is_new else level.backlog
        if flow.is_new and num_tokens <= self.quantum and len(flow.queue) == flow.gathering.num_missing:
            self._short_seen_at = now
        flow.is_new = False
        if flow.lane is None and flow.queue:
            if not level.num_flows:
                level.served_at = now  # nobody has been kept waiting
            flow.credit += self.quantum
            self._list(flow, lane)

    def put_back(self, sequences: list[Sequence]) -> None:
        """Queue sequences of a lost batch again, before all others of their priority and in their old order.

        None of a closed flow may be among them.
        """
        self._count(sequences, 1)
        by_flow: dict[Flow, list[Sequence]] = {}
        for sequence in sequences:
            by_flow.setdefault(sequence.flow, []).append(sequence)
        for flow, lost in reversed(by_flow.items()):
            if flow.lane is not None:
                flow.lane.flows.remove(flow)
                self._forget(flow)
            flow.queue.extendleft(reversed(lost))
            num_tokens = sum(sequence.num_tokens for sequence in lost)
            flow.num_tokens += num_tokens
            flow.credit += num_tokens
            self._list(flow, self._levels[flow.priority].fresh, at_front=True)

    def set_aside(self, batch: list[Sequence]) -> None:
        """Queue sequences as a batch of their own, taking turns with all others: suspects of what befell the last.

        The newest goes first, so that a search by halves comes to its end. None of a closed flow may be among them.
        """
        if batch:
            self._count(batch, 1)
            self._aside.appendleft(batch)

    def close(self, flow: Flow) -> None:
        """The request is over: what of it still waits is dropped at once."""
        self.queued_tokens -= flow.num_tokens
        self.queued_sequences -= len(flow.queue)
        if flow.lane is not None:
            lane = flow.lane
            self._forget(flow)
            if len(lane.flows) > 2 * lane.num_flows:  # looked through no more often than flows are closed
                lane.flows = deque(other for other in lane.flows if other.lane is lane)
        flow.queue.clear()
        flow.num_tokens = 0
        if self._aside:
            self._drop_aside(flow)

    # --- what others ask ------------------------------------------------------------------------------------

    def tokens_ahead(self, num_tokens: int, priority: Priority, tokens_per_s: float) -> int:
        """About how many of the queued tokens are served before a new request of `num_tokens` has been."""
        ahead = 0
        for higher in range(priority):
            ahead += self._levels[higher].num_tokens
        level = self._levels[priority]
        first_turns = min(level.fresh.num_tokens, level.fresh.num_flows * self.quantum)
        later_turns = level.num_tokens - first_turns
        is_short = num_tokens <= self.quantum
        if is_short:  # it is in the first turns that its priority gets by aging, or in one of the next
            num_turns = 1 + first_turns * _KEPT_PART // self._max_batch_tokens
            ahead = min(ahead, int(num_turns * AGING_S * tokens_per_s))
        meanwhile = first_turns // (_KEPT_PART - 1) if is_short else level.num_flows * num_tokens
        return ahead + first_turns + min(later_turns, meanwhile)

    def wants_short_batches(self, now: float) -> bool:
        """Whether short requests come while a backlog is worked on: each of its batches is one that they wait for."""
        return now - self._short_seen_at < _SHORT_EXPECTED_S and any(level.backlog.num_flows for level in self._levels)

    def fills(self, max_tokens: int) -> bool:
        """Whether what waits is enough for a whole batch of `max_tokens`."""
        return self.queued_tokens >= max_tokens or self.queued_sequences >= self._max_batch_sequences

    # --- batches --------------------------------------------------------------------------------------------

    def next_batch(
        self,
        now: float,
        *,
        max_tokens: int,
        num_idle_workers: int = 1,
        done_by: float = -math.inf,
        is_short: bool = False,
    ) -> list[Sequence]:
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
        batch = _Batch(budget, self._max_batch_tokens, self._max_batch_sequences)
        if is_short and self._is_freshs_turn and self._serve_fresh_alone(batch):
            return batch.sequences
        self._is_freshs_turn = True
        self._serve_overdue(batch, now)
        for level in self._levels:
            num_before = batch.num_tokens
            self._serve_level(level, batch, batch.whole)
            if batch.num_tokens > num_before:
                level.served_at = now
        self._count(batch.sequences, -1)
        return batch.sequences

    def _serve_fresh_alone(self, batch: "_Batch") -> bool:
        """Whether there was anything; the backlog comes next."""
        for level in self._levels:
            self._serve(level.fresh, batch, batch.whole)
        self._count(batch.sequences, -1)
        self._is_freshs_turn = not batch.sequences
        return bool(batch.sequences)

    def _serve_overdue(self, batch: "_Batch", now: float) -> None:
        """Begin with whoever has been passed over, and with priorities that have got nothing for long."""
        passed_over, self._passed_over = self._passed_over, {}
        for lane in passed_over:
            self._serve(lane, batch, batch.part())
        for level in self._levels:
            if now - level.served_at >= AGING_S:
                level.served_at = now
                self._serve_level(level, batch, batch.part())

    def _serve_level(self, level: _Level, batch: "_Batch", limit: "_Limit") -> None:
        self._serve(level.fresh, batch, batch.less_kept(limit) if level.backlog.num_flows else limit)
        self._serve(level.backlog, batch, limit)
        self._serve(level.fresh, batch, limit)

    def _serve(self, lane: Lane, batch: "_Batch", limit: "_Limit") -> None:
        """Give the lane's flows their turns until the batch takes no more within the limit."""
        num_before = len(batch.sequences)
        while (flow := self._head(lane)) is not None:
            queue = flow.queue
            while queue and (num_tokens := queue[0].num_tokens) <= flow.credit:
                if not batch.takes(num_tokens, limit):
                    if len(batch.sequences) == num_before and batch.has_room(limit):
                        self._passed_over[lane] = None
                    return
                batch.add(queue.popleft())
                flow.credit -= num_tokens
                flow.num_tokens -= num_tokens
                lane.num_tokens -= num_tokens
                self._passed_over.pop(lane, None)
            self._end_turn(flow, lane)

    def _head(self, lane: Lane) -> Flow | None:
        """The flow whose turn it is; drops those that are over, or can only be late."""
        while lane.flows:
            flow = lane.flows[0]
            is_last = self.queued_sequences == len(flow.queue)  # served all the same: a guess must not idle a worker
            if flow.lane is lane and (flow.deadline >= self._done_by or is_last):
                return flow
            lane.flows.popleft()
            if flow.lane is lane:
                self.hopeless.append(flow)
                self.close(flow)
        return None

    def _end_turn(self, flow: Flow, lane: Lane) -> None:
        """Take the flow from the front of its lane; if it has more to send, it waits for its next turn."""
        lane.flows.popleft()
        self._forget(flow)
        if flow.queue:
            flow.credit += self.quantum
            self._list(flow, self._levels[flow.priority].backlog)
        else:
            flow.credit = 0

    # --- books ----------------------------------------------------------------------------------------------

    def _count(self, sequences: Iterable[Sequence], sign: int) -> None:
        for sequence in sequences:
            self.queued_tokens += sign * sequence.num_tokens
            self.queued_sequences += sign

    def _enqueue(self, flow: Flow, sequences: Iterable[Sequence]) -> int:
        num_tokens, num_before = 0, len(flow.queue)
        for sequence in sequences:
            flow.queue.append(sequence)
            num_tokens += sequence.num_tokens
        flow.num_tokens += num_tokens
        self.queued_tokens += num_tokens
        self.queued_sequences += len(flow.queue) - num_before
        if flow.lane is not None:
            flow.lane.num_tokens += num_tokens
        return num_tokens

    def _list(self, flow: Flow, lane: Lane, *, at_front: bool = False) -> None:
        flow.lane = lane
        lane.num_flows += 1
        lane.num_tokens += flow.num_tokens
        if at_front:
            lane.flows.appendleft(flow)
        else:
            lane.flows.append(flow)

    def _forget(self, flow: Flow) -> None:
        """Take the flow off its lane's books."""
        assert flow.lane is not None
        flow.lane.num_flows -= 1
        flow.lane.num_tokens -= flow.num_tokens
        flow.lane = None

    def _drop_aside(self, flow: Flow) -> None:
        kept: deque[list[Sequence]] = deque()
        for batch in self._aside:
            others = [sequence for sequence in batch if sequence.flow is not flow]
            self._count((sequence for sequence in batch if sequence.flow is flow), -1)
            if others:
                kept.append(others)
        self._aside = kept


class _Limit(NamedTuple):
    """How far a batch may be filled for now."""

    tokens: int
    sequences: int


class _Batch:
    __slots__ = ("_max_tokens", "num_tokens", "sequences", "whole")

    def __init__(self, budget: int, max_tokens: int, max_sequences: int) -> None:
        """`budget`: the tokens that it should have; more where it comes nearer to that with a sequence than without."""
        self.whole = _Limit(budget, max_sequences)
        self._max_tokens = max_tokens
        self.sequences: list[Sequence] = []
        self.num_tokens = 0

    def part(self) -> _Limit:
        """The kept part of the whole, beyond what is in it."""
        tokens, sequences = self.whole
        return _Limit(
            min(tokens, self.num_tokens + tokens // _KEPT_PART),
            min(sequences, len(self.sequences) + max(1, sequences // _KEPT_PART)),
        )

    def less_kept(self, limit: _Limit) -> _Limit:
        """The limit without the kept part of what is left of it."""
        tokens, sequences = limit.tokens - self.num_tokens, limit.sequences - len(self.sequences)
        return _Limit(limit.tokens - tokens // _KEPT_PART, limit.sequences - sequences // _KEPT_PART)

    def has_room(self, limit: _Limit) -> bool:
        return self.num_tokens < limit.tokens and len(self.sequences) < limit.sequences

    def takes(self, num_tokens: int, limit: _Limit) -> bool:
        if not self.sequences:
            return True
        if len(self.sequences) >= limit.sequences:
            return False
        total = self.num_tokens + num_tokens
        return total <= self._max_tokens and total - num_tokens // 2 <= limit.tokens

    def add(self, sequence: Sequence) -> None:
        self.sequences.append(sequence)
        self.num_tokens += sequence.num_tokens
