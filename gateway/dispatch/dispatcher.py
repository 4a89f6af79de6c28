"""Decides when a batch goes to which worker, and what becomes of batches that are answered, failed or lost.

Owns the record of each incarnation (`vecd.gateway.dispatch.workers`) and the deadlines of batches. That a worker lives
is known from the supervisor alone, that a batch arrived from its reply alone. A reply is checked against the record
before a row is read; a worker that breaks the protocol, or says nothing for too long, is ignored and reported.

Life of a slot: free → `_send` → in flight → `Done` → being encoded → free. While several models share the cores,
`vecd.gateway.scheduling.model_shares` says which dispatcher sends next.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import Callable
from copy import copy
from enum import Enum
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import Any

from vecd.gateway.config import GatewayConfig
from vecd.gateway.dispatch.delivery import Delivery
from vecd.gateway.dispatch.known import KnownInputs, RetryBudget, SingleFlight, poisonous
from vecd.gateway.dispatch.vector_cache import VectorCache
from vecd.gateway.dispatch.workers import InFlight, Transport, WorkerLink
from vecd.gateway.errors import INPUT, ApiError, DeadlinePassed, EngineFailed, Unavailable
from vecd.gateway.request import BatchShare
from vecd.gateway.scheduling.cores import Cores
from vecd.gateway.scheduling.cost import CostModel, ThreadModel
from vecd.gateway.scheduling.model_shares import CoreTurn, ModelShare, worker_order
from vecd.gateway.scheduling.policy import BatchingPolicy, PlannedBatch
from vecd.gateway.scheduling.queue import QueuedSequence, RequestQueue
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.shm.control import (
    LOAD_TOKENS_PER_S,
    THREAD_CHOICES,
    GatewayStart,
    Message,
    ModelDrained,
    ModelState,
    WorkerConnected,
    WorkerStuck,
)
from vecd.shm.output import NOT_PLAIN, Output
from vecd.shm.shared_metrics import Counter
from vecd.shm.vector_cache import VectorCacheMemory
from vecd.shm.views import SlotViews
from vecd.shm.wire import (
    NO_SCOPE,
    SCOPE_BYTES,
    SCOPE_OF_ALL,
    Alive,
    Batch,
    Done,
    Failed,
    FailureCode,
    Incarnation,
    ToGateway,
    WireError,
)

log = logging.getLogger("vecd.dispatch")

_SWEEP_INTERVAL_S = 0.25

_LATE_S = 1.0
"""A sweep that is later than this shows that this process has stood still; the time does not count against workers."""

_BROKEN_RETRY_AFTER_S, _KEEP_DYING_RETRY_AFTER_S = 30, 5

_LONG_BATCH_S = 2.0
"""A batch that one thread needs this long for leaves a core free for the next one."""

_VECTORS = Output.VECTORS  # Python 3.11 takes 0.2 µs to find a member of an enumeration

_MAX_BATCHES_NOTED = 64

_MAX_FAILURES = 10
"""Failures in a row, each on a batch of one sequence, after which the worker is replaced."""


class _Flow(Enum):
    OPEN = 0
    HELD = 1
    """What waits is sent when a worker is connected."""
    DRAINING = 2
    """Nothing is sent, and it is reported when the workers have nothing any more."""
    DRAINED = 3


class Dispatcher:
    def __init__(
        self,
        config: GatewayConfig,
        generation: int,
        policy: BatchingPolicy,
        *,
        start: GatewayStart,
        report: Callable[[Message], None],
        shared_metrics: SharedMetrics,
        cores: Cores,
        vector_memory: VectorCacheMemory | None,
    ) -> None:
        """`report` gets, on the event loop, the messages for the supervisor."""
        # The same token ids may end the workers of one model and be harmless to another.
        key = bytes.fromhex(start.quarantine_key)
        key = blake2b(config.model.encode(), key=key, digest_size=len(key)).digest()
        is_shared = config.share_computed == "all"
        self._config = config
        self._policy = policy
        self._epoch = start.epoch
        self._generation = generation
        self._is_active = False
        self._num_gateways = config.gateways
        self._report = report
        self.transport = Transport(start.epoch, self._on_message)
        self.vector_cache: VectorCache | None = None
        if vector_memory is not None and "dense" in config.card.capabilities:
            self.vector_cache = VectorCache(config, generation, vector_memory, shared_metrics)
        self._delivery = Delivery(
            widths={output: output.width_of(config.card) for output in Output},
            on_delivered=self._on_delivered,
            keep=None if self.vector_cache is None else self.vector_cache.keep,
        )
        self.known = KnownInputs(key, config.model, report)
        self._scope_key = None if is_shared else key
        self._flights = SingleFlight(is_shared_by_tenants=is_shared)
        policy.on_dropped = self._on_dropped
        self.retries = RetryBudget(config.max_batch_tokens)
        self._newest_cost_model = CostModel(config.max_batch_tokens)
        """Of the worker that has answered last; a new worker begins with a copy."""
        self._shared_metrics = shared_metrics
        self._cores = cores
        self._models = cores.models
        self._share = ModelShare(
            config.model_index, None if config.compute_type == "gpu" else config.weight, policy, self
        )
        self._idle: list[WorkerLink] = []
        """The workers that may get a batch, while batches are being sent; the last one is next."""
        self.thread_model = ThreadModel()
        self._links: dict[bytes, WorkerLink] = {}
        self._is_dispatch_due = False
        self._is_stopped = False
        self._flow = _Flow.OPEN
        self.core_s = 0.0
        """Seconds × cores of all batches that were computed."""
        self.on_sweep: Callable[[], None] | None = None
        """Called four times a second."""
        self.broken: str | None = None
        """Why no worker stays alive; None again as soon as one is up."""
        self._tokens_per_s = self._newest_cost_model.tokens_per_s
        """Of all workers together, with full batches and a core each. While there is none, as before."""
        self.in_flight_tokens = 0
        self._last_death = "workers are loading"
        self.start_stage: str | None = None
        """What the server's start is doing. None once a worker is connected, and for a server that has been ready."""

    # --- life -----------------------------------------------------------------------------------------------

    def start(self, listening_fd: int) -> None:
        """As `Transport.start`."""
        self._loop = asyncio.get_running_loop()
        self.transport.start(listening_fd)
        self._sweep_soon()
        self._models.join(self._share)

    def stop(self) -> None:
        """Forget all workers and close the socket. What is still queued or being encoded stays unanswered."""
        self._is_stopped = True
        for link in self._links.values():
            link.in_flight.clear()
            self._end_lease(link)
        self._links.clear()
        self._idle.clear()
        self._models.leave(self._share)
        self._policy.on_dropped = None
        self._delivery.clear()
        self._sweeper.cancel()
        self.transport.stop()

    def activate(self) -> None:
        """New requests for its model are for this generation from now on. Call after `start`."""
        self._is_active = True
        for link in self._links.values():
            self._shared_metrics.note_life(link.incarnation)
        if self.vector_cache is not None:
            self.vector_cache.activate()

    def retire(self) -> None:
        """New requests are for another generation."""
        self._is_active = False
        if self.vector_cache is not None:
            self.vector_cache.is_active = False

    # --- a model that is not ready --------------------------------------------------------------------------

    def follow(self, state: ModelState) -> None:
        """Send what waits if the model is ready, once a worker is connected; else nothing, and what waits does not
        count among the models that share the cores. While it is draining, report when no worker has anything any more.
        """
        if state is ModelState.READY:
            self._resume()
            return
        self._flow = _Flow.DRAINING if state is ModelState.DRAINING else _Flow.HELD
        self.broken = self.start_stage = None
        self._models.leave(self._share)
        self._report_if_drained()

    @property
    def num_usable_workers(self) -> int:
        return sum(link.is_usable for link in self._links.values())

    @property
    def is_sending(self) -> bool:
        return self._flow is _Flow.OPEN and self.num_usable_workers > 0

    @property
    def awaits_workers(self) -> bool:
        """The model has been loaded, and none of its workers is connected yet."""
        return self._flow is _Flow.HELD and self.broken is None

    def _resume(self) -> None:
        if self._flow is _Flow.OPEN:
            return
        self._flow = _Flow.HELD
        if self.num_usable_workers:
            self._flow = _Flow.OPEN
            self._models.join(self._share)
            self.schedule_dispatch()

    def _report_if_drained(self) -> None:
        """A worker that has not answered its first probe has something still."""
        if self._flow is _Flow.DRAINING and all(
            link.is_connected and not link.in_flight for link in self._links.values()
        ):
            self._flow = _Flow.DRAINED
            self._report(ModelDrained(self._generation))

    # --- what others ask ------------------------------------------------------------------------------------

    @property
    def tokens_per_s(self) -> float:
        """Of all workers together, with full batches and the cores that other models leave; as before while there is no
        worker."""
        if not self._models.are_several or not self._links or not self._share.needs_cores:
            return self._tokens_per_s
        num_cores = self._models.part(self._share) * self._cores.num_cores
        return self._tokens_per_s * min(1.0, num_cores / len(self._links))

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for link in self._links.values() for rows in link.slots.rows)

    @property
    def num_rows_in_use(self) -> int:
        in_flight = sum(batch.num_rows for link in self._links.values() for batch in link.in_flight.values())
        return in_flight + self._delivery.num_rows

    @property
    def links(self) -> list[WorkerLink]:
        return list(self._links.values())

    def why_unavailable(self) -> str | None:
        """None when some worker can serve; else the reason, for `/health`."""
        if self.broken is not None:
            return self.broken
        if self.num_usable_workers:
            return None
        if not self._links:
            return self.start_stage or self._last_death
        return "; ".join(
            f"{link.incarnation} {'is stuck' if link.is_stuck else 'does not answer yet'}" for link in self.links
        )

    def raise_if_broken(self) -> None:
        """Raises Unavailable while no worker stays alive, so that no request waits for one."""
        if self.broken is not None:
            raise self.broken_error()

    def broken_error(self) -> Unavailable:
        return Unavailable(
            f"The model cannot be served: {self.broken}", retry_after_s=_BROKEN_RETRY_AFTER_S, code="model_broken"
        )

    def submit(self, request_queue: RequestQueue, sequences: list[QueuedSequence]) -> None:
        """Queue sequences of an open request, with the deaths of workers that their inputs are known for, and send what
        can be sent soon. Raises PoisonInput, and queues nothing, when one of them is refused."""
        if rejected := self.known.rejected(sequences):
            raise poisonous(rejected[0].index)
        now = time.monotonic()
        queued, followers = self._flights.join(request_queue.tenant, sequences)
        if followers:
            _note_sent(followers, now)
        self._policy.add(request_queue, queued, now)
        self.schedule_dispatch()

    def _on_dropped(self, sequences: list[QueuedSequence]) -> None:
        self._flights.drop(sequences)
        if self._flights.unseated:
            self.schedule_dispatch()

    def schedule_dispatch(self) -> None:
        """Send what can be sent, once the requests that have arrived in this turn of the loop are all queued."""
        if not self._is_dispatch_due:
            self._is_dispatch_due = True
            self._loop.call_soon(self._dispatch)

    # --- what the supervisor says ---------------------------------------------------------------------------

    def worker_up(self, incarnation: Incarnation, slots: SlotViews, facts: dict[str, Any]) -> None:
        """An incarnation is ready. It gets batches once it has answered a probe."""
        if self._is_stopped:
            return
        self.broken = None
        if not self._newest_cost_model.is_learned and LOAD_TOKENS_PER_S in facts:
            self._newest_cost_model = CostModel(self._config.max_batch_tokens, facts[LOAD_TOKENS_PER_S])
        link = WorkerLink(
            incarnation,
            slots,
            facts,
            copy(self._newest_cost_model),
            free_slots=list(range(len(slots.rows))),
            thread_choices=tuple(facts.get(THREAD_CHOICES, ())),
        )
        self._links[incarnation.identity] = link
        if self._is_active:
            self._shared_metrics.note_life(incarnation)
        self.retries.make_room_for(len(self._links))
        self.transport.probe(
            incarnation.identity, lambda: not link.is_connected and self._links.get(incarnation.identity) is link
        )

    def set_broken(self, reason: str) -> None:
        """Fail new requests until a worker is up. The caller fails those there are."""
        log.error("no worker stays alive, requests fail until one is up: %s", reason)
        self.broken = reason

    def worker_down(
        self, incarnation: Incarnation, reason: str, *, has_crashed: bool | None = False, is_planned: bool = False
    ) -> None:
        """Queue the batches of a dead incarnation again. `has_crashed`: by a signal that a process brings upon itself;
        None: it had been stopped. `is_planned`: the supervisor has ended it, which counts as no death."""
        link = self._links.pop(incarnation.identity, None)
        if link is None:
            return  # it is another dispatcher's
        self._idle.clear()  # which may keep its arena
        if not is_planned:
            self._last_death = f"{incarnation} {reason}"
            self.known.num_worker_deaths += 1
        # Answered batches are still encoded: their rows are complete, and the view keeps the arena. A death counts for
        # inputs that were being computed, and not for a batch that was sent ahead, or waited for another gateway's.
        lost = list(link.in_flight.values())
        link.in_flight.clear()
        self._end_lease(link)
        self.in_flight_tokens -= sum(batch.num_tokens for batch in lost)
        for batch in lost:
            self._note_lost(batch)
            if link.slots.begun[batch.slot] == batch.number and not is_planned:
                self._count_deaths(batch, has_crashed=has_crashed)
        self._put_back([sequence for batch in lost for sequence in batch.sequences], is_free=is_planned)
        self._report_if_drained()

    # --- sending --------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        self._is_dispatch_due = False
        if self._is_stopped:
            return
        if self._flights.unseated:
            self._policy.put_back(self._flights.seat_unseated())
        now = time.monotonic()
        if self._models.are_several:
            self._models.dispatch(now)
            return
        if self._flow is not _Flow.OPEN:
            return
        self._idle = [link for link in self._links.values() if link.is_idle]
        if len(self._idle) > 1:
            self._idle.sort(key=_num_thread_choices)  # a batch that is alone goes to the worker that can use most cores
        while self._policy.queued_sequences and (num_places := self._cores.places(len(self._idle))):
            if not self._send_to_idle(now, CoreTurn(num_places, 0, None)):
                return
        if not self._policy.queued_sequences:
            return
        if self._idle:
            self._cores.note_contention(now, self._idle[-1].cost_model.batch_s(self._policy.queued_tokens))
        else:
            self.send_ahead(now, is_short=None)

    def _send_to_idle(self, now: float, turn: CoreTurn) -> bool:
        """Send one batch to the last of the idle workers. Returns False if nothing could be sent."""
        link, num_places = self._idle[-1], turn.num_places
        if not turn.num_beside and self._is_one_batch_better(link, num_places, now):
            num_places = 1
        planned = self._next_batch(now, link.cost_model, num_places, turn.is_short)
        if not planned.sequences:
            return False
        self._idle.pop()
        num_threads = self._num_threads(link, planned.num_tokens, num_places - 1, now, turn.num_beside)
        if not self._models.are_several:
            link.leased = max(1, num_threads)
        elif self._share.needs_cores:
            link.leased = max(1, num_threads, *link.thread_choices[:1])
        if link.leased:
            self._cores.lease(link.leased)
        self._send(link, planned, now, num_threads)
        return True

    def _is_one_batch_better(self, link: WorkerLink, num_places: int, now: float) -> bool:
        """Whether all cores compute what waits sooner in one batch than in several, each with its part of the cores."""
        num_batches = min(num_places, self._policy.queued_sequences)
        if num_batches < 2 or len(link.thread_choices) < 2:
            return False
        num_tokens = self._policy.queued_tokens
        part_tokens = num_tokens // num_batches
        whole = self._num_threads(link, num_tokens, 0, now)
        part = self._num_threads(link, part_tokens, num_batches - 1, now)
        speedup = partial(self.thread_model.speedup, is_quiet=self._cores.is_quiet(now))
        return speedup(num_tokens, whole) > num_batches * speedup(part_tokens, part)

    # --- sending beside other models ------------------------------------------------------------------------

    def find_idle(self) -> int:
        self._idle = []
        if self._policy.queued_sequences:
            links = sorted(self._links.values(), key=lambda link: link.incarnation.worker)
            order = worker_order(len(links), self._shared_metrics.gateway, self._num_gateways)
            self._idle = [links[place] for place in reversed(order) if links[place].is_idle]
            if self._cores.spare > 0:
                self._idle.sort(key=_num_thread_choices)
        return len(self._idle)

    def send_in_turn(self, now: float, turn: CoreTurn) -> int:
        is_sent = self._send_to_idle(now, turn)
        return len(self._idle) if is_sent and self._policy.queued_sequences else 0

    def send_ahead(self, now: float, *, is_short: bool | None) -> None:
        for link in self._links.values():
            if link.is_usable and link.free_slots:
                planned = self._next_batch(now, link.cost_model, 0, is_short)
                if planned.sequences:
                    self._send(link, planned, now, link.fewest_threads)

    def note_waiting(self, now: float) -> None:
        if self._cores.num_lent:
            self._cores.note_contention(now, self._idle[-1].cost_model.batch_s(self._policy.queued_tokens))

    # --- one batch ------------------------------------------------------------------------------------------

    def _num_threads(self, link: WorkerLink, num_tokens: int, num_places: int, now: float, num_beside: int = 0) -> int:
        """Threads for a batch that leaves `num_places` other workers idle, while other models have `num_beside`
        batches; 0 where the worker's are fixed. Free cores are divided among the batches that can be sent now."""
        choices = link.thread_choices
        if len(choices) < 2:
            return link.fewest_threads
        spare = self._cores.spare
        if spare > 0 and (num_places or num_beside):
            spare = (spare + 1) // (1 + min(num_places, self._policy.queued_sequences) + num_beside) - 1
        if spare <= 0 or self._cores.is_contended(now):
            return choices[0]
        if link.cost_model.batch_s(num_tokens) > _LONG_BATCH_S:
            spare = min(spare, self._cores.free - 2)
        possible = [choice for choice in choices if choice <= spare + 1]
        return self.thread_model.choose(num_tokens, possible, is_quiet=self._cores.is_quiet(now))

    def _next_batch(
        self, now: float, cost_model: CostModel, num_idle_workers: int, is_short: bool | None = None
    ) -> PlannedBatch:
        """The policy's next batch, without inputs that were quarantined after they had been queued. Requests that can
        only be late are failed."""
        while True:
            batch = self._policy.next_batch(now, cost_model, num_idle_workers, is_short)
            for request_queue in batch.too_late:
                self._shared_metrics.add(Counter.EXPIRED)
                request_queue.result.fail(DeadlinePassed(None))
            rejected = self.known.rejected(batch.sequences)
            if not rejected:
                return batch
            for sequence in rejected:
                self._fail_identical(sequence, poisonous)
            over = [sequence for sequence in batch.sequences if sequence.is_abandoned]
            self._policy.put_back(self._seat(over))  # others may follow these
            batch.sequences = [sequence for sequence in batch.sequences if not sequence.is_abandoned]
            if batch.sequences:
                return batch

    def _send(self, link: WorkerLink, planned: PlannedBatch, now: float, num_threads: int) -> None:
        sequences, followers = self._flights.depart(planned.sequences)
        if followers:
            self._policy.withdraw(followers)
            _note_sent(followers, now)
        lengths = [sequence.num_tokens for sequence in sequences]
        num_tokens = sum(lengths)
        outputs = [sequence.output for sequence in sequences]
        outputs_bytes = b"" if outputs.count(_VECTORS) == len(outputs) else bytes(outputs)
        borders = [sequence.border for sequence in sequences]
        row_ends: list[int] | range = range(1, len(sequences) + 1)
        if any(code in outputs_bytes for code in NOT_PLAIN):
            row_ends = list(accumulate([sequence.num_rows for sequence in sequences]))
        batch = InFlight(
            number=self._shared_metrics.next_batch_number(),
            slot=link.free_slots.pop(),
            sequences=sequences,
            num_tokens=num_tokens,
            row_ends=row_ends,
            started_at=now,
            sent_at=now,
            num_threads=num_threads,
        )
        if link.in_flight or self._cores.num_batches > 1:
            self._cores.note_meeting(now)
        link.in_flight[batch.number] = batch
        self.in_flight_tokens += num_tokens
        _note_sent(sequences, now)
        self._shared_metrics.batch_sent(
            batch.number, link.incarnation.worker, len(sequences), num_tokens, planned.budget_tokens
        )
        message = Batch(
            epoch=self._epoch,
            number=batch.number,
            slot=batch.slot,
            num_sequences=len(sequences),
            num_tokens=num_tokens,
            lengths_bytes=array("i", lengths).tobytes(),
            token_ids_bytes=b"".join([sequence.token_ids for sequence in sequences]),
            outputs_bytes=outputs_bytes,
            num_threads=num_threads,
            borders_bytes=array("i", borders).tobytes() if any(borders) else b"",
            scope=_scope_of(sequences, self._scope_key),
        )
        if not self.transport.send(link.incarnation.identity, message):
            # Not evidence of death; but a worker that cannot be reached must not keep a batch.
            log.warning("%s cannot be reached; its batch goes to another", link.incarnation)
            self._report_stuck(link)
        if self._share.needs_cores and self._models.are_several:
            batch.charged_s = link.cost_model.batch_s(num_tokens)
            self._models.charge(self._share, batch.charged_s, now)

    # --- receiving ------------------------------------------------------------------------------------------

    def _on_message(self, identity: bytes, message: ToGateway | WireError) -> None:
        link = self._links.get(identity)
        if link is None or link.is_stuck:
            return  # sent by a dead incarnation, or by one that is being killed
        match message:
            case Alive():
                self._on_alive(link)
            case Done():
                self._on_done(link, message)
            case Failed():
                self._on_failed(link, message)
            case WireError():
                log.error("%s sent what cannot be read: %s", link.incarnation, message)
                self._report_stuck(link)

    def _on_alive(self, link: WorkerLink) -> None:
        is_first, link.is_connected = not link.is_connected, True
        if is_first:
            self.start_stage = None
            self._sum_speeds()
            self._report(WorkerConnected(link.incarnation))
        if self._flow is _Flow.HELD:
            self._resume()
        self._report_if_drained()
        self.schedule_dispatch()

    def _on_done(self, link: WorkerLink, done: Done) -> None:
        batch = self._take_answered(link, done.number, done.slot)
        if batch is None:
            return
        if done.num_rows != batch.num_rows:
            log.error("%s wrote %d rows instead of %d", link.incarnation, done.num_rows, batch.num_rows)
            self._report_stuck(link)
            self._note_lost(batch)
            self._count_deaths(batch, has_crashed=True)  # it costs a worker as well: no batch may do so for ever
            self._put_back(batch.sequences)
            return
        link.has_answered = True
        compute_s = done.compute_us / 1e6
        if batch.num_threads:
            is_quiet = self._cores.is_quiet(batch.answered_at)
            self.thread_model.observe(
                batch.num_tokens, batch.num_threads, done.num_threads, compute_s, is_quiet=is_quiet
            )
        if done.num_threads <= 1:
            link.cost_model.observe(batch.num_tokens, compute_s)
        core_s = compute_s * max(1, done.num_threads)
        self.core_s += core_s
        if batch.charged_s:
            self._models.correct(self._share, batch.charged_s, core_s)
        self._newest_cost_model = link.cost_model
        self._sum_speeds()
        self.retries.earn(batch.num_tokens)
        worker = link.incarnation.worker
        self._shared_metrics.batch_done(worker, len(batch.sequences), batch.num_tokens, done)
        batch.copies = self._flights.copies(batch.sequences)
        if batch.copies:
            self._shared_metrics.add(Counter.COALESCED, len(batch.copies))
        _note_done(batch, worker, done.compute_us)
        link.num_failures = 0
        self.known.clear(batch.sequences)
        self._dispatch()  # the worker computes its next batch while this one's rows are encoded
        self._delivery.add(link, batch)

    def _sum_speeds(self) -> None:
        self._tokens_per_s = sum(link.cost_model.tokens_per_s for link in self._links.values() if link.is_usable)

    def _on_failed(self, link: WorkerLink, failed: Failed) -> None:
        batch = self._take_answered(link, failed.number, failed.slot)
        if batch is None:
            return
        log.error("%s failed on a batch of %d: %s", link.incarnation, len(batch.sequences), failed.code.name)
        link.free_slots.append(batch.slot)
        self._note_lost(batch)
        if len(batch.sequences) == 1:
            self._fail_identical(batch.sequences[0], partial(_engine_failed, failed.code))
            link.num_failures += 1
            if link.num_failures >= _MAX_FAILURES:  # it would always be idle, and get every batch
                log.error("%s has failed %d times in a row", link.incarnation, link.num_failures)
                self._report_stuck(link)
        else:
            # Most often one sequence is the cause: halves find it in a few batches, and the others are computed.
            middle = len(batch.sequences) // 2
            for half in (batch.sequences[:middle], batch.sequences[middle:]):
                self._policy.isolate(self._seat(half))
        self.schedule_dispatch()

    def _on_delivered(self, link: WorkerLink, batch: InFlight) -> None:
        link.free_slots.append(batch.slot)
        if self._policy.queued_sequences:
            self.schedule_dispatch()

    def _take_answered(self, link: WorkerLink, number: int, slot: int) -> InFlight | None:
        """The record of the batch that a worker answers; None if there is none, and the worker is reported as stuck."""
        batch = link.in_flight.get(number)
        if batch is None or batch.slot != slot:
            log.error("%s answered batch %d in slot %d, which it does not have", link.incarnation, number, slot)
            self._report_stuck(link)
            return None
        del link.in_flight[number]
        self._end_lease(link)
        batch.answered_at = time.monotonic()
        self.in_flight_tokens -= batch.num_tokens
        for waiting in link.in_flight.values():
            waiting.started_at = batch.answered_at
        self._report_if_drained()
        return batch

    def _end_lease(self, link: WorkerLink) -> None:
        num_kept = 1 if link.in_flight and link.leased else 0  # beside other models, a GPU's worker has no core
        self._cores.give_back(link.leased, num_kept)
        link.leased = num_kept

    # --- when things go wrong -------------------------------------------------------------------------------

    def _note_lost(self, batch: InFlight) -> None:
        self._shared_metrics.end_batch(batch.number)
        for sequence in batch.sequences:
            for lost in (sequence, *self._flights.followers(sequence)):
                lost.request_queue.num_sent_tokens -= lost.num_tokens

    def _fail_identical(self, sequence: QueuedSequence, make_error: Callable[[int], ApiError]) -> None:
        """Fail the requests of all identical sequences, each with an error for the index of its input."""
        for each in self._flights.end(sequence):
            each.result.fail(make_error(each.index))

    def _seat(self, sequences: list[QueuedSequence]) -> list[QueuedSequence]:
        """The sequences that are to be queued again for lost ones, whose rows are still wanted."""
        return [seated for sequence in sequences if (seated := self._flights.seat(sequence)) is not None]

    def _count_deaths(self, batch: InFlight, *, has_crashed: bool | None) -> None:
        for sequence in self.known.count_deaths(batch.sequences, has_crashed=has_crashed):
            if not self.known.changed_files:
                self._shared_metrics.add(Counter.POISONED)
            self._fail_identical(sequence, self.known.rejection)

    def _put_back(self, sequences: list[QueuedSequence], *, is_free: bool = False) -> None:
        """Queue lost sequences again, as far as the retry budget pays for those that may share a batch. `is_free`: it
        need not."""
        seated = self._seat(sequences)
        for sequence in seated:
            needs_none = is_free or sequence.is_abandoned or sequence.must_run_alone
            if not needs_none and not self.retries.pay(sequence.num_tokens):
                self._fail_identical(sequence, _keep_dying)
        # A failed request may have had other sequences among them, which others follow.
        alive = [sequence for sequence in seated if not sequence.is_abandoned]
        alive += self._seat([sequence for sequence in seated if sequence.is_abandoned])
        self._shared_metrics.add(Counter.RETRIED, len(alive))
        self._policy.put_back(alive)
        self.schedule_dispatch()

    def _report_stuck(self, link: WorkerLink) -> None:
        """Ignore a worker from now on and have the supervisor kill it. Its batches come back by `worker_down`."""
        if not link.is_stuck:
            link.is_stuck = True
            self._shared_metrics.add(Counter.STUCK)
            self._report(WorkerStuck(link.incarnation))

    # --- deadlines ------------------------------------------------------------------------------------------

    def _sweep_soon(self) -> None:
        self.sweep_due_at = time.monotonic() + _SWEEP_INTERVAL_S
        self._sweeper = self._loop.call_later(_SWEEP_INTERVAL_S, self.sweep)

    def sweep(self) -> None:
        late_s = time.monotonic() - self.sweep_due_at
        self._sweep_soon()
        if late_s > _LATE_S:
            log.warning("this process has stood still for %.1f s", late_s)
            for link in self._links.values():  # the time does not count against any worker
                link.up_at += late_s
                for batch in link.in_flight.values():
                    batch.started_at += late_s
        self.transport.receive_all()  # an answer that has arrived is in time, however late it is read
        now = time.monotonic()
        for link in self.links:
            if not link.is_stuck:
                self._check_deadlines(link, now)
        if self.on_sweep is not None:
            self.on_sweep()

    def _check_deadlines(self, link: WorkerLink, now: float) -> None:
        if not link.is_connected and now - link.up_at > self._config.batch_timeout_s:
            log.error("%s has not answered for %.0f s", link.incarnation, now - link.up_at)
            self._report_stuck(link)
        oldest = next(iter(link.in_flight.values()), None)
        if oldest is None:
            return
        num_tokens, so_far_s = oldest.num_tokens, now - oldest.started_at
        if so_far_s > link.cost_model.deadline_s(
            num_tokens,
            limit_s=self._config.batch_timeout_s,
            has_answered=link.has_answered,
            num_gateways=self._num_gateways,
            max_sequence_tokens=self._policy.quantum,
        ):
            log.error("%s has had a batch of %d tokens for %.1f s", link.incarnation, num_tokens, so_far_s)
            self._report_stuck(link)


def _num_thread_choices(link: WorkerLink) -> int:
    return len(link.thread_choices)


def _scope_of(sequences: list[QueuedSequence], key: bytes | None) -> int:
    """`Batch.scope`. `key`: of the hash of a tenant; None: tenants share."""
    if key is None:
        return SCOPE_OF_ALL
    tenant, *others = {sequence.request_queue.tenant for sequence in sequences}
    if others:
        return NO_SCOPE
    digest = blake2b(tenant.encode(), key=key, digest_size=SCOPE_BYTES, person=b"vecd tenant").digest()
    return int.from_bytes(digest) | 2  # neither NO_SCOPE nor SCOPE_OF_ALL


def _note_sent(sequences: list[QueuedSequence], now: float) -> None:
    for sequence in sequences:
        request_queue = sequence.request_queue
        request_queue.num_sent_tokens += sequence.num_tokens
        if request_queue.first_sent_at is None:
            request_queue.first_sent_at = now


def _note_done(batch: InFlight, worker: int, compute_us: int) -> None:
    request_queue: RequestQueue | None = None
    for sequence in (*batch.sequences, *(follower for follower, _ in batch.copies)):
        if sequence.request_queue is request_queue:
            continue
        request_queue = sequence.request_queue
        request_queue.last_done_at = batch.answered_at
        if request_queue.batches is not None and len(request_queue.batches) < _MAX_BATCHES_NOTED:
            share = BatchShare(
                worker=worker,
                number=batch.number,
                sent_at=batch.sent_at,
                done_at=batch.answered_at,
                compute_us=compute_us,
                num_sequences=len(batch.sequences),
                num_tokens=batch.num_tokens,
            )
            if share not in request_queue.batches:
                request_queue.batches.append(share)


def _keep_dying(index: int) -> Unavailable:
    return Unavailable(
        "Workers keep dying, and they have lost more work than may be computed again",
        retry_after_s=_KEEP_DYING_RETRY_AFTER_S,
        code="retry_budget_exhausted",
    )


def _engine_failed(code: FailureCode, index: int) -> EngineFailed:
    what = "ran out of memory on" if code is FailureCode.OUT_OF_MEMORY else "failed on"
    return EngineFailed(f"The engine {what} '{INPUT}[{index}]'", code=code.name.lower())
