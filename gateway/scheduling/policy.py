"""The batching policy: how large the next batch is, when it is sent, which sequences it has, and in what turn.

Owns what waits, in request queues (`vecd.gateway.scheduling.queue`), and the estimate of how long a new request would
wait for its turn. Pure: it is given the time and never asks for it.

When: every idle worker gets a batch at once, without a timer or a batching window. A busy worker gets a second batch
only when what waits fills it: to send ahead regardless only splits batches (measured: 546 instead of 695 requests/s,
float32, 64 clients).

How large: what waits is divided among the idle workers, up to the tokens that the worker computes in FULL_BATCH_S; in
SHORT_BATCH_S while short requests come that would wait for the batches of a backlog, of whichever model.

Which, in what turn: deficit round robin, counted in tokens (Shreedhar and Varghese, SIGCOMM 1995), first among tenants
and then among the requests of each, with newcomers before the rest, as fq_codel has them for packets (RFC 8290):

    INTERACTIVE   new  old     a lower priority is served with what the higher ones leave of a batch;
    NORMAL        new  old     one that has got nothing for AGING_S is served first, once
    BULK          new  old

    new      a tenant that comes with nothing waiting has its first turn here, before the old ones
    old      what one turn was not enough for; a quarter of what its priority has is kept for it

    fresh    in a tenant's turn, requests have their first one here, before its backlog: most are short, and end with it
    backlog  what that was not enough for has every fourth turn; of a tenant that is alone, a quarter of each batch

A turn is worth `quantum` tokens, at least the longest sequence: each turn sends something, and picking is O(1). Two
tenants that both have something waiting at a priority never differ by more than three turns in what they have got of
it. Lost batches are not counted twice, nor are isolated ones.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from vecd.gateway.config import GatewayConfig
from vecd.gateway.request import Priority
from vecd.gateway.scheduling.cost import CostModel
from vecd.gateway.scheduling.queue import (
    PriorityClass,
    QueuedSequence,
    RequestQueue,
    RequestRotation,
    TenantQueue,
    TenantRotation,
    kept,
    num_rows_of,
)
from vecd.shm.output import FULL_BATCH_S

MIN_QUANTUM_TOKENS = 256
AGING_S = 2.0

SHORT_BATCH_S = 0.06
"""Seconds of a batch that others wait for. A batch of 400 tokens (bfloat16, MiniLM, one core) has 0.93 of the full
speed."""

_SHORT_EXPECTED_S = 2.0
"""So long after a short request, others are expected."""


class Workers(Protocol):
    @property
    def tokens_per_s(self) -> float:
        """Of all workers together with full batches, above 0; beside other models, with the cores that these leave."""

    in_flight_tokens: int


class BatchingPolicy:
    def __init__(self, config: GatewayConfig, queued_elsewhere: Callable[[], Sequence[int]] = tuple) -> None:
        """A batch holds at most `config.max_batch_tokens` (a longer sequence makes a batch of its own), and the rows of
        a slot, of which no sequence has more. Gateways take turns at the same workers; `queued_elsewhere` returns the
        tokens that wait at each other one."""
        self._max_batch_tokens = config.max_batch_tokens
        self._max_batch_rows = config.arena.rows_per_slot
        self._num_gateways = config.gateways
        self._queued_elsewhere = queued_elsewhere
        self.quantum = max(MIN_QUANTUM_TOKENS, config.max_tokens)
        """Tokens of one turn. A request of no more is a short one."""
        self.classes = [PriorityClass(self.quantum) for _ in Priority]
        self._passed_over: dict[RequestRotation, None] = {}
        """Those whose next sequence was too long for the rest of a batch, in the order in which that happened."""
        self._isolated: deque[list[QueuedSequence]] = deque()
        self._kinds = (self._isolated_batch, self._fresh_batch, self._mixed_batch)
        self._next_kind = 0
        self._short_seen_at = -math.inf
        self._newcomer: TenantQueue | None = None
        self._newcomer_seen_at = -math.inf
        self.queued_tokens = 0
        self.queued_sequences = 0
        self.queued_rows = 0
        self.on_dropped: Callable[[list[QueuedSequence]], None] | None = None
        """Called with the sequences of a request that is over, if any still waited. May queue nothing."""

    # --- requests come and go -------------------------------------------------------------------------------

    def add(self, request_queue: RequestQueue, sequences: list[QueuedSequence], now: float) -> None:
        """Queue sequences of an open request behind those that it has; each that `must_run_alone` is isolated."""
        waiting, num_tokens = request_queue.sequences, 0
        num_before = len(waiting)
        for sequence in sequences:
            if sequence.deaths is not None and sequence.must_run_alone:
                self.isolate([sequence])
            else:
                waiting.append(sequence)
                num_tokens += sequence.num_tokens
        num_sequences = len(waiting) - num_before
        self._count(num_tokens, num_sequences, num_rows_of(waiting, num_sequences, num_tokens))
        request_queue.num_tokens += num_tokens
        is_short = request_queue.is_new and num_tokens <= self.quantum and request_queue.is_complete
        if is_short:
            self._short_seen_at = now
        if request_queue.rotation is not None:
            request_queue.rotation.count(num_tokens)
        else:
            request_queue.waits_since = now
            if waiting:
                self._enter(request_queue, now, is_short=is_short)
        request_queue.is_new = False

    def _enter(self, request_queue: RequestQueue, now: float, *, is_short: bool) -> None:
        priority_class = self.classes[request_queue.priority]
        tenant_queue = priority_class.tenant_queue(request_queue.tenant)
        if not priority_class.num_tokens:
            priority_class.served_at = now  # it has not been kept waiting
        elif is_short and not tenant_queue.num_tokens:
            self._newcomer, self._newcomer_seen_at = tenant_queue, now
        request_queue.deficit += self.quantum
        (tenant_queue.fresh if request_queue.is_new else tenant_queue.backlog).append(request_queue)

    def put_back(self, sequences: list[QueuedSequence]) -> None:
        """Queue sequences of a lost batch again, all of open requests, before all others of their priority and in their
        old order; each that `must_run_alone` is isolated."""
        by_request: dict[RequestQueue, list[QueuedSequence]] = {}
        for sequence in sequences:
            if sequence.must_run_alone:
                self.isolate([sequence])
            else:
                by_request.setdefault(sequence.request_queue, []).append(sequence)
        for request_queue, lost in reversed(by_request.items()):
            if request_queue.rotation is not None:
                request_queue.rotation.remove(request_queue)
            num_tokens = sum(sequence.num_tokens for sequence in lost)
            self._count(num_tokens, len(lost), num_rows_of(lost, len(lost), num_tokens))
            request_queue.sequences.extendleft(reversed(lost))
            request_queue.num_tokens += num_tokens
            request_queue.deficit += num_tokens
            priority_class = self.classes[request_queue.priority]
            tenant_queue = priority_class.tenant_queue(request_queue.tenant)
            tenant_queue.fresh.append(request_queue, at_front=True)
            priority_class.owed[tenant_queue] = priority_class.owed.get(tenant_queue, 0) + num_tokens

    def isolate(self, batch: list[QueuedSequence]) -> None:
        """Queue sequences of open requests as a batch of their own. The newest such batch goes first, so that a search
        by halves comes to its end."""
        if batch:
            self._count_isolated(batch, 1)
            self._isolated.appendleft(batch)

    def close(self, request_queue: RequestQueue) -> None:
        """The request is over: drop its sequences that still wait."""
        if request_queue.sequences:
            self._count(-request_queue.num_tokens, -len(request_queue.sequences), -request_queue.num_rows)
            if self.on_dropped is not None:
                self.on_dropped(list(request_queue.sequences))
        if request_queue.rotation is not None:
            request_queue.rotation.remove(request_queue)
        request_queue.sequences.clear()
        request_queue.num_tokens = 0
        if self._isolated:
            isolated = [each for batch in self._isolated for each in batch if each.request_queue is request_queue]
            self._drop_isolated(set(isolated))
            if self.on_dropped is not None:
                self.on_dropped(isolated)

    def withdraw(self, sequences: list[QueuedSequence]) -> None:
        """Drop sequences of one row each that need no batch any more; those that do not wait are ignored."""
        dropped = set(sequences)
        for request_queue in dict.fromkeys([sequence.request_queue for sequence in sequences]):
            left = [sequence for sequence in request_queue.sequences if sequence not in dropped]
            num_dropped = len(request_queue.sequences) - len(left)
            if not num_dropped:
                continue
            assert request_queue.rotation is not None
            num_tokens = request_queue.num_tokens - sum([sequence.num_tokens for sequence in left])
            self._count(-num_tokens, -num_dropped, -num_dropped)
            request_queue.sequences = deque(left)
            request_queue.num_tokens -= num_tokens
            request_queue.rotation.count(-num_tokens)
            if not left:
                request_queue.rotation.remove(request_queue)
                request_queue.deficit = 0
        if self._isolated:
            self._drop_isolated(dropped)

    def _drop_isolated(self, dropped: set[QueuedSequence]) -> None:
        batches, self._isolated = self._isolated, deque()
        for batch in batches:
            self._count_isolated(batch, -1)
            others = [sequence for sequence in batch if sequence not in dropped]
            self._count_isolated(others, 1)
            if others:
                self._isolated.append(others)

    def _count(self, num_tokens: int, num_sequences: int, num_rows: int) -> None:
        self.queued_tokens += num_tokens
        self.queued_sequences += num_sequences
        self.queued_rows += num_rows

    def _count_isolated(self, sequences: list[QueuedSequence], sign: int) -> None:
        for sequence in sequences:
            self._count(sign * sequence.num_tokens, sign, sign * sequence.num_rows)

    # --- what waits, and for how long -----------------------------------------------------------------------

    @property
    def waiting_priority(self) -> int:
        """The highest that something waits at; else the lowest."""
        isolated = [batch[0].request_queue.priority for batch in self._isolated]
        classes = [priority for priority in Priority if self.classes[priority].num_tokens]
        return min((*isolated, *classes), default=max(Priority))

    def queued_tokens_of(self, tenant: str) -> int:
        queues = (priority_class.tenant_queues.get(tenant) for priority_class in self.classes)
        return sum(queue.num_tokens for queue in queues if queue is not None)

    def oldest_wait_s(self, now: float) -> float:
        """Seconds that the oldest queued sequence has waited; 0 if nothing waits. Looks at every waiting request."""
        since = [
            request_queue.waits_since
            for priority_class in self.classes
            for tenant_queue in priority_class.tenant_queues.values()
            for rotation in (tenant_queue.fresh, tenant_queue.backlog)
            for request_queue in rotation.queues
        ]
        since += [batch[0].request_queue.waits_since for batch in self._isolated]
        return max(0.0, now - min(since, default=now))

    def tokens_before(self, num_tokens: int, priority: Priority, tenant: str, workers: Workers) -> int:
        """Estimated tokens that are computed before a new request of `num_tokens` would have had its turn, if it were
        queued now."""
        before = self.tokens_ahead(num_tokens, priority, workers.tokens_per_s, tenant) + workers.in_flight_tokens
        return before + sum([min(before, tokens) for tokens in self._queued_elsewhere()])  # gateways take turns

    def place_s(self, num_requests: int, least_tokens: int, num_unqueued_tokens: int, workers: Workers) -> float:
        """Estimated seconds until one of `num_requests` is over, of which the shortest has `least_tokens` left that no
        worker has got. They take turns, so each of the others is served as much before. `num_unqueued_tokens`: as in
        `max_wait_s`."""
        before = (num_requests * least_tokens + workers.in_flight_tokens) * self._num_gateways
        return min(before / workers.tokens_per_s, self.max_wait_s(num_unqueued_tokens, workers))

    def max_wait_s(self, num_unqueued_tokens: int, workers: Workers) -> float:
        """Seconds that no `Admission.wait_s` is above, for a tenth of its price. `num_unqueued_tokens`: of all requests
        that were admitted and have not been queued yet."""
        waiting = (self.queued_tokens + workers.in_flight_tokens) * self._num_gateways
        return (waiting + num_unqueued_tokens) / workers.tokens_per_s

    def tokens_ahead(self, num_tokens: int, priority: Priority, tokens_per_s: float, tenant: str = "") -> int:
        """Estimated tokens of those queued that are served before a new request of `num_tokens` has been. A priority
        gets what the higher ones leave, and one part each AGING_S, as the lower ones do beside it."""
        ahead = self.classes[priority].tokens_ahead(tenant, num_tokens)
        higher = sum([priority_class.num_tokens for priority_class in self.classes[:priority]])
        lower = [priority_class.num_tokens for priority_class in self.classes[priority + 1 :]]
        if not higher and not any(lower):
            return ahead
        between_parts = max(int(AGING_S * tokens_per_s), 1)
        part = max(kept(self._max_batch_tokens), self.queued_tokens // self.queued_sequences, 1)
        num_parts = -(-(ahead + num_tokens) // part)
        ahead += min(higher, num_parts * between_parts)
        return ahead + sum([min(tokens, ahead * part // between_parts) for tokens in lower])

    # --- when and how large ---------------------------------------------------------------------------------

    def next_batch(
        self, now: float, cost_model: CostModel, num_idle_workers: int, is_short: bool | None = None
    ) -> "PlannedBatch":
        """Take the next batch for a worker that is as fast as `cost_model` says. `num_idle_workers`: this one included;
        0 if it is busy, and the batch is to be sent ahead. `is_short`: whether others wait for it; None: as
        `wants_short_batches` says."""
        if not self.queued_sequences:
            return PlannedBatch(0, 0, 0)
        if is_short is None:
            is_short = self.wants_short_batches(now)
        budget = cost_model.budget_tokens(SHORT_BATCH_S if is_short else FULL_BATCH_S)
        if not num_idle_workers and (is_short or not self.fills(budget)):
            return PlannedBatch(0, 0, 0)
        num_tokens = self.share(budget, num_idle_workers)
        batch = self.take(now, num_tokens, done_by=now + cost_model.batch_s(num_tokens), is_short=is_short)
        batch.budget_tokens = budget
        return batch

    def share(self, budget_tokens: int, num_idle_workers: int) -> int:
        """The tokens of a worker's next batch: what waits is divided among the idle workers, so that a small queue
        keeps all of them busy."""
        return min(budget_tokens, self._max_batch_tokens, -(-self.queued_tokens // max(1, num_idle_workers)))

    def fills(self, max_tokens: int) -> bool:
        """Whether what waits is enough for a whole batch of `max_tokens`."""
        return self.queued_tokens >= max_tokens or self.queued_rows >= self._max_batch_rows

    def expects_short(self, now: float) -> bool:
        return now - self._short_seen_at < _SHORT_EXPECTED_S

    @property
    def has_backlog(self) -> bool:
        """A request waits that one turn was not enough for."""
        return any(priority_class.num_backlog_tokens for priority_class in self.classes)

    @property
    def has_many_turns(self) -> bool:
        """Tenants have more than a turn waiting, on average, at any priority."""
        return any(priority_class.has_many_turns for priority_class in self.classes)

    def wants_short_batches(self, now: float) -> bool:
        """Whether others wait for each batch: short requests come while a backlog is worked on, or a tenant with little
        comes with them beside others that have much."""
        if self.expects_short(now) and self.has_backlog:
            return True
        if self._newcomer is None:
            return False
        if now - self._newcomer_seen_at >= _SHORT_EXPECTED_S or self._newcomer.num_tokens > self.quantum:
            self._newcomer = None  # gone, or one of those that have much
            return False
        return self.has_many_turns

    # --- which, and in what turn ----------------------------------------------------------------------------

    def take(
        self, now: float, max_tokens: int, *, done_by: float = -math.inf, is_short: bool = False
    ) -> "PlannedBatch":
        """Take a batch of about `max_tokens`: isolated sequences, fresh requests alone, or all by their turns. These
        kinds take turns; one that would be empty is skipped.

        `done_by`: when the batch will be done; requests whose deadline is earlier are passed over. `is_short`: others
        wait for it. Only such batches have fresh requests alone, which need not wait for a part of the backlog.
        """
        batch = PlannedBatch(max_tokens, self._max_batch_tokens, self._max_batch_rows, done_by, is_short=is_short)
        for _ in self._kinds:
            self._kinds[self._next_kind](batch, now)
            self._next_kind = (self._next_kind + 1) % len(self._kinds)
            if batch.sequences:
                self._count(-batch.num_tokens, -len(batch.sequences), -batch.num_rows)
                break
        return batch

    def _isolated_batch(self, batch: "PlannedBatch", now: float) -> None:
        if self._isolated:
            batch.sequences = self._isolated.popleft()
            batch.num_tokens = sum(sequence.num_tokens for sequence in batch.sequences)
            batch.num_rows = sum(sequence.num_rows for sequence in batch.sequences)

    def _fresh_batch(self, batch: "PlannedBatch", now: float) -> None:
        if not batch.is_short:
            return
        for priority_class in self.classes:
            self._serve_owed(priority_class, batch, batch.whole)
            for tenant_queue in (*priority_class.new.tenant_queues, *priority_class.old.tenant_queues):
                if tenant_queue.fresh.num_tokens and self._serve_turn(tenant_queue.fresh, batch, batch.whole):
                    break

    def _mixed_batch(self, batch: "PlannedBatch", now: float) -> None:
        """Begin with those that have been passed over, and with priorities that have got nothing for long."""
        passed_over, self._passed_over = self._passed_over, {}
        for rotation in passed_over:
            self._serve_turn(rotation, batch, batch.part())
        waiting = [priority_class for priority_class in self.classes if priority_class.num_tokens]
        for priority_class in waiting:
            if now - priority_class.served_at >= AGING_S:
                priority_class.served_at = now
                self._serve_class(priority_class, batch, batch.part())
        for priority_class in waiting:
            num_before = batch.num_tokens
            self._serve_class(priority_class, batch, batch.whole)
            if batch.num_tokens > num_before:
                priority_class.served_at = now

    def _serve_class(self, priority_class: PriorityClass, batch: "PlannedBatch", limit: "_Limit") -> None:
        if priority_class.owed:
            self._serve_owed(priority_class, batch, limit)
        if (tenant_queue := priority_class.only_tenant) is not None:  # a turn without an end
            fresh, backlog = tenant_queue.fresh, tenant_queue.backlog
            self._serve(fresh, batch, batch.less_kept(limit) if backlog.num_tokens else limit)
            if backlog.num_tokens:
                self._serve(backlog, batch, limit)
            if fresh.num_tokens:
                self._serve(fresh, batch, limit)
            priority_class.end_first_turn(tenant_queue)
        else:
            first = batch.less_kept(limit) if priority_class.old.num_tokens else limit
            self._serve_tenants(priority_class, priority_class.new, batch, first)
            self._serve_tenants(priority_class, priority_class.old, batch, limit)
            self._serve_tenants(priority_class, priority_class.new, batch, limit)

    def _serve_owed(self, priority_class: PriorityClass, batch: "PlannedBatch", limit: "_Limit") -> None:
        """What was lost has had its turns."""
        for tenant_queue, owed in tuple(priority_class.owed.items()):
            num_before = batch.num_tokens
            if self._serve(tenant_queue.fresh, batch, limit, owed):
                priority_class.owed[tenant_queue] = owed - (batch.num_tokens - num_before)
                return
            del priority_class.owed[tenant_queue]

    def _serve_tenants(
        self, priority_class: PriorityClass, rotation: TenantRotation, batch: "PlannedBatch", limit: "_Limit"
    ) -> None:
        """Give tenants their turns until the batch takes no more within the limit."""
        while (tenant_queue := priority_class.next_tenant(rotation)) is not None:
            for requests in tenant_queue.rotations_by_turn:
                if self._serve_on_deficit(requests, batch, limit):
                    return
                if requests.num_tokens:
                    break  # the rest of the turn is less than its next sequence
            priority_class.end_turn(tenant_queue)

    def _serve_turn(self, rotation: RequestRotation, batch: "PlannedBatch", limit: "_Limit") -> bool:
        """As `_serve`, in the turn of its tenant, which has no end while the tenant is alone."""
        if rotation.tenant_queue.priority_class.only_tenant is not None:
            return self._serve(rotation, batch, limit)
        return self._serve_on_deficit(rotation, batch, limit)

    def _serve_on_deficit(self, rotation: RequestRotation, batch: "PlannedBatch", limit: "_Limit") -> bool:
        num_before = batch.num_tokens
        is_full = self._serve(rotation, batch, limit, rotation.tenant_queue.deficit)
        rotation.tenant_queue.deficit -= batch.num_tokens - num_before
        return is_full

    def _serve(
        self, rotation: RequestRotation, batch: "PlannedBatch", limit: "_Limit", max_tokens: float = math.inf
    ) -> bool:
        """Give request queues their turns, of `max_tokens` in all. Returns whether the limit ended it."""
        num_before, is_full = len(batch.sequences), False
        while not is_full and rotation.queues and (request_queue := self._next_request(rotation, batch)) is not None:
            sent, is_full = batch.fill(request_queue.sequences, min(request_queue.deficit, max_tokens), limit)
            max_tokens -= sent
            request_queue.deficit -= sent
            request_queue.num_tokens -= sent
            rotation.count(-sent)
            if request_queue.sequences and request_queue.sequences[0].num_tokens <= request_queue.deficit:
                break  # its turn is not over
            rotation.remove(request_queue)
            request_queue.deficit = request_queue.deficit + self.quantum if request_queue.sequences else 0
            if request_queue.sequences:
                rotation.tenant_queue.backlog.append(request_queue)
        if len(batch.sequences) > num_before:
            self._passed_over.pop(rotation, None)
        elif is_full and batch.has_room(limit):
            self._passed_over[rotation] = None
        return is_full

    def _next_request(self, rotation: RequestRotation, batch: "PlannedBatch") -> RequestQueue | None:
        """The request queue whose turn it is; closes those that can only be late."""
        while rotation.queues:
            request_queue = next(iter(rotation.queues))
            # The last one is served all the same: an estimate must not idle a worker.
            if request_queue.deadline >= batch.done_by or self.queued_sequences == len(request_queue.sequences):
                return request_queue
            batch.too_late.append(request_queue)
            self.close(request_queue)
        return None


class _Limit(NamedTuple):
    """How far a batch may be filled for now."""

    tokens: int
    rows: int


class PlannedBatch:
    def __init__(
        self, tokens: int, max_tokens: int, max_rows: int, done_by: float = -math.inf, *, is_short: bool = False
    ) -> None:
        """`tokens`: how many it should have; up to `max_tokens` if one sequence more comes nearer to that."""
        self.whole = _Limit(tokens, max_rows)
        self.done_by = done_by
        self.is_short = is_short
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self.sequences: list[QueuedSequence] = []
        self.num_tokens = 0
        self.num_rows = 0
        self.too_late: list[RequestQueue] = []
        """Requests that were closed because no batch would be done before their deadline; the caller fails them."""
        self.budget_tokens = 0

    def part(self) -> _Limit:
        """The kept part of the whole, beyond what is in it."""
        tokens, rows = self.whole
        return _Limit(min(tokens, self.num_tokens + kept(tokens)), min(rows, self.num_rows + max(1, kept(rows))))

    def less_kept(self, limit: _Limit) -> _Limit:
        """The limit without the kept part of what is left of it."""
        return _Limit(
            limit.tokens - kept(limit.tokens - self.num_tokens), limit.rows - kept(limit.rows - self.num_rows)
        )

    def has_room(self, limit: _Limit) -> bool:
        return self.num_tokens < limit.tokens and self.num_rows < limit.rows

    def takes(self, num_tokens: int, num_rows: int, limit: _Limit) -> bool:
        """Whether a sequence may be added: with it, the batch comes nearer to the limit than without."""
        if not self.sequences:
            return True
        total_rows = self.num_rows + num_rows
        if total_rows > self._max_rows or total_rows - num_rows // 2 > limit.rows:
            return False
        total = self.num_tokens + num_tokens
        return total <= self._max_tokens and total - num_tokens // 2 <= limit.tokens

    def fill(self, waiting: deque[QueuedSequence], max_tokens: float, limit: _Limit) -> tuple[int, bool]:
        """Take sequences of at most `max_tokens`. Returns their tokens, and whether the limit ended it."""
        sent = 0
        while waiting and (num_tokens := waiting[0].num_tokens) <= max_tokens - sent:
            num_rows = waiting[0].num_rows
            if not self.takes(num_tokens, num_rows, limit):
                return sent, True
            self.sequences.append(waiting.popleft())
            self.num_tokens += num_tokens
            self.num_rows += num_rows
            sent += num_tokens
        return sent, False
