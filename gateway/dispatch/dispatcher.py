"""Sends batches to workers over ZeroMQ and delivers their rows.

Owns the ROUTER socket, the gateway's record of each incarnation (`WorkerLink`: its slots, its batches in flight) and
the views of every arena. The transport is never evidence: that a worker lives is the supervisor's word (`worker_up`,
`worker_down`), that a batch arrived is its reply. What a worker says is checked against the record before a row is
read; one that has said what cannot be, or nothing for too long, is not listened to any more.

Life of a slot: free → `_send` → in flight → `Done` → being encoded → free. A lost batch's sequences go back to the
scheduler, as far as `vecd.gateway.dispatch.retry_budget` pays for it; those that workers died of, by the judgement of
`vecd.gateway.dispatch.crash_attribution`, are given up, and refused from then on by `vecd.gateway.dispatch.quarantine`.

Several may live in one process and on one event loop. Called by `vecd.gateway.main` (control messages) and
`vecd.gateway.pipeline` (new sequences, health).
"""

import asyncio
import logging
import math
import secrets
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import zmq

from vecd.gateway.dispatch.crash_attribution import CrashAttribution
from vecd.gateway.dispatch.quarantine import Quarantine, poisonous
from vecd.gateway.dispatch.retry_budget import RetryBudget
from vecd.gateway.scheduling.cost_model import CostModel
from vecd.gateway.scheduling.policy import BatchingPolicy, PlannedBatch
from vecd.gateway.scheduling.queue import QueuedSequence, RequestQueue
from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.gateway.types.errors import DeadlinePassed, EngineFailed, ServerError, Unavailable
from vecd.gateway.types.timeline import BatchShare
from vecd.shm.failure_code import FailureCode
from vecd.shm.shared_metrics import Counter
from vecd.shm.views import Rows, SlotViews
from vecd.shm.wire import Alive, Batch, Done, Failed, Incarnation, Output, Probe, WireError, decode_to_gateway, encode

log = logging.getLogger("vecd.dispatch")

_PROBE_INTERVAL_S = 0.02
_SWEEP_INTERVAL_S = 0.25

_LATE_S = 1.0
"""A sweep that comes so late says that this process has stood still: then no worker is to blame for the time."""

_BROKEN_RETRY_AFTER_S, _KEEP_DYING_RETRY_AFTER_S = 30, 5
_QUARANTINE_KEY_BYTES = 32

_FLOATS_PER_TURN = 32 * 1024
"""Floats encoded before the event loop gets its next turn: 1.4 ms as JSON numbers, 0.03 ms as base64."""

_VECTORS, _TOKENS = Output.VECTORS, Output.TOKENS  # Python 3.11 takes 0.2 µs to find a member of an enumeration

_MAX_BATCHES_NOTED = 64
"""Of one request that is traced."""

_MAX_FAILURES = 10
"""Failures in a row, each on a batch of one sequence, after which the worker itself is suspected."""


@dataclass(slots=True)
class InFlight:
    """A batch that a worker has, or has answered."""

    number: int
    slot: int
    sequences: list[QueuedSequence]
    num_tokens: int
    row_ends: list[int] | range
    """Of the slot's rows, by sequence: the one behind its last."""
    started_at: float
    """When it was sent, or when the batch ahead of it was answered: its deadline counts from here."""
    sent_at: float
    answered_at: float = 0.0
    num_encoded: int = 0
    """Rows."""

    @property
    def num_rows(self) -> int:
        return self.row_ends[-1]


@dataclass(slots=True)
class WorkerLink:
    """The gateway's record of one incarnation."""

    incarnation: Incarnation
    slots: SlotViews
    facts: dict[str, Any]
    cost_model: CostModel
    """How fast it is; learned from its own batches, beginning with what was known of the others."""
    free_slots: list[int] = field(default_factory=list)
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    """By batch number, oldest first: a worker takes batches in the order in which they were sent."""
    is_connected: bool = False
    """It has answered this gateway's probe."""
    is_stuck: bool = False
    """It has let a deadline pass, or is not believed; the supervisor has been told and will kill it."""
    has_answered: bool = False
    """It has done a batch."""
    num_failures: int = 0
    """Batches of one sequence that it has failed on since its last success."""
    up_at: float = field(default_factory=time.monotonic)

    @property
    def is_usable(self) -> bool:
        return self.is_connected and not self.is_stuck

    @property
    def is_idle(self) -> bool:
        return self.is_usable and not self.in_flight and bool(self.free_slots)


class Dispatcher:
    def __init__(
        self,
        *,
        policy: BatchingPolicy,
        epoch: int,
        max_batch_tokens: int,
        batch_timeout_s: float,
        on_stuck: Callable[[Incarnation], None],
        on_met: Callable[[Incarnation], None] | None = None,
        on_quarantined: Callable[[str], None] | None = None,
        quarantine_key: bytes | None = None,
        num_gateways: int = 1,
        token_dim: int | None = None,
        shared_metrics: SharedMetrics | None = None,
    ) -> None:
        """What the supervisor is to be told: `on_stuck`, that a worker is past its deadline or is not believed;
        `on_met`, that one has answered for the first time; `on_quarantined`, the digest of an input that is given up,
        made with `quarantine_key` (None: a random one).

        `batch_timeout_s` is the most that a worker has for a batch; `num_gateways` take turns at it. `token_dim`: so
        many floats of a token's row are its own, the first ones; None: all.
        """
        self._policy = policy
        self._epoch = epoch
        self._batch_timeout_s = batch_timeout_s
        self._num_gateways = num_gateways
        self._token_dim = token_dim
        self._on_stuck = on_stuck
        self._on_met = on_met
        self._on_quarantined = on_quarantined
        self._on_broken: Callable[[Callable[[], Unavailable]], None] | None = None
        self._on_sending: Callable[[int, int], None] | None = None
        self.quarantine = Quarantine(quarantine_key or secrets.token_bytes(_QUARANTINE_KEY_BYTES))
        self._suspects = CrashAttribution()
        self._retries = RetryBudget(max_batch_tokens)
        self._pace = CostModel(max_batch_tokens)
        """Of a worker about which nothing is known yet: that of the last batch of any."""
        self._board = shared_metrics or SharedMetrics.private()
        self._links: dict[bytes, WorkerLink] = {}
        self._last_number = 0
        self._to_encode: deque[tuple[WorkerLink, InFlight]] = deque()
        self._is_encoding = False
        self._is_pump_due = False
        self._is_stopped = False
        self._num_done = 0
        self.broken: str | None = None
        """Why no worker stays alive, once the supervisor has said so; None again as soon as one is up."""
        self.tokens_per_s = self._pace.tokens_per_s
        """Of all workers together, with full batches. While there is none, as before."""
        self.in_flight_tokens = 0
        """Sent to workers and not answered."""
        self._last_death = "workers are loading"

    # --- life -----------------------------------------------------------------------------------------------

    def start(self, listening_fd: int) -> None:
        """Take over the ZeroMQ listening socket. Call on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.USE_FD, listening_fd)
        # The path is not used: the socket behind listening_fd has been bound, and its name removed, already.
        self._socket.bind("ipc://vecd")
        self._loop.add_reader(self._socket.fileno(), self._receive_all)
        self._sweep_soon()

    def stop(self) -> None:
        """Forget all workers and close the socket. What is still queued or being encoded stays unanswered."""
        self._is_stopped = True
        self._links.clear()
        self._to_encode.clear()
        self._sweeper.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._context.destroy(linger=0)

    # --- what others ask ------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Of all workers' slots."""
        return sum(_num_slot_rows(link) for link in self._links.values())

    @property
    def num_rows_in_use(self) -> int:
        """Of batches that workers have, or that are being encoded."""
        in_flight = sum(batch.num_rows for link in self._links.values() for batch in link.in_flight.values())
        return in_flight + sum(batch.num_rows for _, batch in self._to_encode)

    @property
    def links(self) -> list[WorkerLink]:
        return list(self._links.values())

    def why_unavailable(self) -> str | None:
        """None when some worker can serve; else the reason, for `/health`."""
        if self.broken is not None:
            return self.broken
        if any(link.is_usable for link in self._links.values()):
            return None
        if not self._links:
            return self._last_death
        return "; ".join(
            f"{link.incarnation} {'is stuck' if link.is_stuck else 'does not answer yet'}" for link in self.links
        )

    def raise_if_broken(self) -> None:
        """Raises Unavailable while no worker stays alive: to wait for one would be in vain."""
        if self.broken is not None:
            raise self._broken_error()

    def _broken_error(self) -> Unavailable:
        return Unavailable(
            f"The model cannot be served: {self.broken}", retry_after_s=_BROKEN_RETRY_AFTER_S, code="model_broken"
        )

    def when_broken(self, fail_all: Callable[[Callable[[], Unavailable]], None]) -> None:
        """Call `fail_all`, with what makes the error for each request, when the model turns out to be broken."""
        self._on_broken = fail_all

    def when_sending(self, count: Callable[[int, int], None]) -> None:
        """Call `count` with each batch's sequences and tokens, when it goes to a worker."""
        self._on_sending = count

    def pump_soon(self) -> None:
        """Send what can be sent, once the requests that have arrived in this turn of the loop are all queued."""
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    def enqueue(self, request_queue: RequestQueue, sequences: list[QueuedSequence]) -> None:
        """Queue sequences of an open request, with the deaths of workers that their inputs are known for, and send
        what can be sent soon."""
        if self._suspects:
            for sequence in sequences:
                sequence.deaths = self._suspects.find(self.quarantine.digest(sequence.token_ids))
        self._policy.add(request_queue, sequences, time.monotonic())
        self.pump_soon()

    # --- what the supervisor says ---------------------------------------------------------------------------

    def worker_up(self, incarnation: Incarnation, slots: SlotViews, facts: dict[str, Any]) -> None:
        """An incarnation is ready. It gets batches once it has answered a probe."""
        if self._is_stopped:
            return
        self.broken = None
        link = WorkerLink(incarnation, slots, facts, self._pace.copy(), free_slots=list(range(len(slots.rows))))
        self._links[incarnation.identity] = link
        self._retries.make_room_for(len(self._links))
        self._probe(link)

    def set_broken(self, reason: str) -> None:
        """No worker stays alive: every request is failed at once, and new ones, until one is up all the same."""
        log.error("the model is given up for now: %s", reason)
        self.broken = reason
        if self._on_broken is not None:
            self._on_broken(self._broken_error)

    def worker_down(self, incarnation: Incarnation, reason: str, *, has_crashed: bool = False) -> None:
        """An incarnation is dead: its batches are queued again, its arena dropped. `has_crashed`: by its own doing."""
        link = self._links.pop(incarnation.identity, None)
        self._last_death = f"{incarnation} {reason}"
        if link is None:
            return
        # Answered batches are still encoded: their rows were complete before the worker died, and the view keeps
        # the arena. Of the others only those that were being computed are counted; a batch that was sent ahead, or
        # waited for another gateway's, is innocent.
        lost = list(link.in_flight.values())
        link.in_flight.clear()
        self.in_flight_tokens -= sum(batch.num_tokens for batch in lost)
        for batch in lost:
            _note_lost(batch.sequences)
            self._board.batch_lost(batch.number)
            if link.slots.begun[batch.slot] == batch.number:
                self._count_death(batch, has_crashed=has_crashed)
        self._put_back([sequence for batch in lost for sequence in batch.sequences])

    # --- sending --------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send the batches that the policy plans for idle workers, and then those for busy ones."""
        self._is_pump_due = False
        if self._is_stopped:
            return
        now = time.monotonic()
        idle = [link for link in self._links.values() if link.is_idle]
        while idle:
            batch = self._next_batch(now, idle[-1].cost_model, len(idle))
            if not batch.sequences:
                return
            self._send(idle.pop(), batch.sequences, now, batch.budget_tokens)
        for link in self._links.values():
            if link.is_usable and link.free_slots:
                batch = self._next_batch(now, link.cost_model, 0)
                if batch.sequences:
                    self._send(link, batch.sequences, now, batch.budget_tokens)

    def _next_batch(self, now: float, cost_model: CostModel, num_idle_workers: int) -> PlannedBatch:
        """The policy's next batch of which something may be sent: without inputs that were quarantined after they had
        been queued. Requests that can only be late are failed."""
        while True:
            batch = self._policy.next_batch(now, cost_model, num_idle_workers)
            for request_queue in batch.too_late:
                self._board.add(Counter.EXPIRED)
                request_queue.pending.fail(DeadlinePassed(None))
            if not self.quarantine or not batch.sequences:
                return batch
            for sequence in batch.sequences:
                if self.quarantine.holds(sequence.token_ids):
                    sequence.pending.fail(poisonous(sequence.index))
            batch.sequences = [sequence for sequence in batch.sequences if not sequence.is_abandoned]
            if batch.sequences:
                return batch

    def _send(self, link: WorkerLink, sequences: list[QueuedSequence], now: float, budget_tokens: int) -> None:
        self._last_number += 1
        lengths = [sequence.num_tokens for sequence in sequences]
        num_tokens = sum(lengths)
        outputs = _outputs_bytes(sequences)
        row_ends = _row_ends(sequences, outputs)
        batch = InFlight(self._last_number, link.free_slots.pop(), sequences, num_tokens, row_ends, now, now)
        link.in_flight[batch.number] = batch
        self.in_flight_tokens += num_tokens
        _note_sent(sequences, now)
        self._board.batch_sent(batch.number, link.incarnation.worker, len(sequences), num_tokens, budget_tokens)
        if self._on_sending is not None:
            self._on_sending(len(sequences), num_tokens)
        message = Batch(
            self._epoch,
            batch.number,
            batch.slot,
            len(sequences),
            num_tokens,
            lengths_bytes=np.array(lengths, dtype="<i4").tobytes(),
            token_ids_bytes=b"".join([sequence.token_ids for sequence in sequences]),
            outputs_bytes=outputs,
        )
        if not self._send_frames(link, message):
            # Not evidence of death; but a worker that cannot be reached must not keep a batch.
            log.warning("%s cannot be reached; its batch goes to another", link.incarnation)
            self._report_stuck(link)

    def _send_frames(self, link: WorkerLink, message: Batch | Probe) -> bool:
        try:
            self._socket.send_multipart([link.incarnation.identity, *encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        finally:
            # A send, failed or not, may swallow the wake-up of a message that has arrived meanwhile: look again, or it
            # waits for ever.
            if self._has_message():
                self._loop.call_soon(self._receive_all)
        return True

    def _probe(self, link: WorkerLink) -> None:
        """Ask until it answers: the worker connects in its own time. A link that is gone is not asked any more."""
        if link.is_connected or self._links.get(link.incarnation.identity) is not link:
            return
        self._send_frames(link, Probe(self._epoch))
        self._loop.call_later(_PROBE_INTERVAL_S, self._probe, link)

    # --- receiving ------------------------------------------------------------------------------------------

    def _has_message(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _receive_all(self) -> None:
        """Read until nothing is left: the descriptor is edge-triggered."""
        while not self._is_stopped and self._has_message():
            try:
                identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._receive(identity, frames)

    def _receive(self, identity: bytes, frames: list[bytes]) -> None:
        link = self._links.get(identity)
        if link is None or link.is_stuck:
            return  # a dead incarnation's last words, or those of one that is being killed
        try:
            message = decode_to_gateway(frames)
        except WireError as error:
            log.error("%s sent what cannot be read: %s", link.incarnation, error)
            self._report_stuck(link)
            return
        if message.epoch != self._epoch:
            return  # an answer to the gateway before this one
        match message:
            case Alive():
                self._on_alive(link)
            case Done():
                self._on_done(link, message)
            case Failed():
                self._on_failed(link, message)

    def _on_alive(self, link: WorkerLink) -> None:
        is_first, link.is_connected = not link.is_connected, True
        if is_first and self._on_met is not None:
            self._on_met(link.incarnation)
        self.pump_soon()

    def _on_done(self, link: WorkerLink, done: Done) -> None:
        batch = self._take_answered(link, done.number, done.slot)
        if batch is None:
            return
        if done.num_rows != batch.num_rows:
            log.error("%s wrote %d rows instead of %d", link.incarnation, done.num_rows, batch.num_rows)
            self._report_stuck(link)
            _note_lost(batch.sequences)
            self._board.batch_lost(batch.number)
            self._count_death(batch, has_crashed=True)  # it costs a worker as well: no batch may do so for ever
            self._put_back(batch.sequences)
            return
        link.has_answered = True
        link.cost_model.observe(batch.num_tokens, done.compute_us / 1e6)
        self._note_pace(link.cost_model)
        self._retries.earn(batch.num_tokens)
        self._num_done += 1
        worker = link.incarnation.worker
        self._board.batch_done(
            batch.number, worker, len(batch.sequences), batch.num_tokens, done.compute_us, done.num_padding_tokens
        )
        _note_done(batch, worker, done.compute_us)
        link.num_failures = 0
        if self._suspects:
            self._clear(batch.sequences)
        self._pump()  # the worker computes its next batch while this one's rows are encoded
        self._to_encode.append((link, batch))
        if not self._is_encoding:
            self._encode_some()

    def _note_pace(self, cost_model: CostModel) -> None:
        self._pace = cost_model
        self.tokens_per_s = sum(link.cost_model.tokens_per_s for link in self._links.values() if link.is_usable)

    def _on_failed(self, link: WorkerLink, failed: Failed) -> None:
        batch = self._take_answered(link, failed.number, failed.slot)
        if batch is None:
            return
        log.error("%s failed on a batch of %d: %s", link.incarnation, len(batch.sequences), failed.code.name)
        link.free_slots.append(batch.slot)
        _note_lost(batch.sequences)
        self._board.batch_lost(batch.number)
        if len(batch.sequences) == 1:
            _fail(batch.sequences[0], failed.code)
            self._count_failure(link)
        else:
            # One of them, most often; halves find it in a few batches, and the others are done with.
            middle = len(batch.sequences) // 2
            for half in (batch.sequences[:middle], batch.sequences[middle:]):
                self._policy.isolate([sequence for sequence in half if not sequence.is_abandoned])
        self.pump_soon()

    def _take_answered(self, link: WorkerLink, number: int, slot: int) -> InFlight | None:
        """The record of the batch that a worker answers; None, and the worker is not believed, when there is none."""
        batch = link.in_flight.get(number)
        if batch is None or batch.slot != slot:
            log.error("%s answered batch %d in slot %d, which it does not have", link.incarnation, number, slot)
            self._report_stuck(link)
            return None
        del link.in_flight[number]
        batch.answered_at = time.monotonic()
        self.in_flight_tokens -= batch.num_tokens
        for waiting in link.in_flight.values():
            waiting.started_at = batch.answered_at
        return batch

    # --- rows → answers -------------------------------------------------------------------------------------

    def _encode_some(self) -> None:
        """Encode a turn's worth of rows; come back for the rest after the event loop has had its turn."""
        floats_left = _FLOATS_PER_TURN
        while self._to_encode:
            link, batch = self._to_encode[0]
            rows = link.slots.rows[batch.slot]
            rows_left = max(1, floats_left // rows.shape[1])
            end = min(batch.num_rows, batch.num_encoded + rows_left)
            try:
                self._deliver(batch, rows, end)
            except Exception as error:  # one batch's trouble must not hold up those behind it
                log.error("rows of batch %d cannot be encoded: %s", batch.number, type(error).__name__)
                for sequence in batch.sequences:
                    sequence.pending.fail(ServerError("The server failed on this request"))
            floats_left -= (end - batch.num_encoded) * rows.shape[1]
            batch.num_encoded = end
            if end == batch.num_rows:
                self._to_encode.popleft()
                link.free_slots.append(batch.slot)
                self.pump_soon()
            if floats_left <= 0:
                break
        self._is_encoding = bool(self._to_encode)
        if self._is_encoding:
            self._loop.call_soon(self._encode_some)

    def _deliver(self, batch: InFlight, rows: Rows, end: int) -> None:
        """Hand the rows from `batch.num_encoded` to `end` to their requests."""
        start, ends = batch.num_encoded, batch.row_ends
        if isinstance(ends, range):
            _deliver_vectors(batch.sequences[start:end], rows[start:end])
            return
        at = bisect_right(ends, start)
        while start < end:
            sequence = batch.sequences[at]
            if sequence.output is _TOKENS:
                stop, behind = min(end, ends[at]), at + 1
                _deliver_tokens(sequence, rows[start:stop, : self._token_dim], num_left=ends[at] - stop)
            else:
                behind = _end_of_vectors(batch.sequences, at, at + end - start)
                stop = ends[behind - 1]
                _deliver_vectors(batch.sequences[at:behind], rows[start:stop])
            start, at = stop, behind

    # --- when things go wrong -------------------------------------------------------------------------------

    def _count_death(self, batch: InFlight, *, has_crashed: bool) -> None:
        """One more for each input in the batch, also for those whose callers have gone."""
        is_alone = len(batch.sequences) == 1
        by_digest: dict[str, list[QueuedSequence]] = {}
        for sequence in batch.sequences:
            by_digest.setdefault(self.quarantine.digest(sequence.token_ids), []).append(sequence)
        for digest, sequences in by_digest.items():
            deaths = self._suspects.record(digest, sequences[0].deaths)
            for sequence in sequences:
                sequence.deaths = deaths
            if deaths.count(is_alone=is_alone, has_crashed=has_crashed, num_done=self._num_done):
                self._give_up(sequences[0], digest)

    def _clear(self, sequences: list[QueuedSequence]) -> None:
        """They have been computed, and their worker lives."""
        for sequence in sequences:
            if sequence.deaths is not None:
                self._suspects.forget(self.quarantine.digest(sequence.token_ids))

    def _give_up(self, sequence: QueuedSequence, digest: str) -> None:
        """Fail the request, and every other that has the same input for a while."""
        log.error("a sequence of %d tokens died with %d workers; given up", sequence.num_tokens, sequence.num_deaths)
        self._board.add(Counter.POISONED)
        sequence.pending.fail(poisonous(sequence.index))
        self._suspects.forget(digest)
        self.quarantine.add(digest)
        if self._on_quarantined is not None:
            self._on_quarantined(digest)

    def _count_failure(self, link: WorkerLink) -> None:
        """A worker that only fails is always idle, and would be given everything: it is replaced."""
        link.num_failures += 1
        if link.num_failures >= _MAX_FAILURES:
            log.error("%s has failed %d times in a row", link.incarnation, link.num_failures)
            self._report_stuck(link)

    def _put_back(self, sequences: list[QueuedSequence]) -> None:
        """Queue lost sequences again, as far as the retry budget pays for those that may share a batch."""
        for sequence in sequences:
            is_free = sequence.is_abandoned or sequence.must_run_alone
            if not is_free and not self._retries.pay(sequence.num_tokens):
                sequence.pending.fail(_keep_dying())
        alive = [sequence for sequence in sequences if not sequence.is_abandoned]
        self._board.add(Counter.RETRIED, len(alive))
        self._policy.put_back(alive)
        self.pump_soon()

    def _report_stuck(self, link: WorkerLink) -> None:
        """Believe the worker nothing, give it nothing more, and have it killed; its batches come back with
        `worker_down`."""
        if not link.is_stuck:
            link.is_stuck = True
            self._board.add(Counter.STUCK)
            self._on_stuck(link.incarnation)

    # --- deadlines ------------------------------------------------------------------------------------------

    def _sweep_soon(self) -> None:
        self._sweep_due_at = time.monotonic() + _SWEEP_INTERVAL_S
        self._sweeper = self._loop.call_later(_SWEEP_INTERVAL_S, self._sweep)

    def _sweep(self) -> None:
        late_s = time.monotonic() - self._sweep_due_at
        self._sweep_soon()
        if late_s > _LATE_S:
            log.warning("this process has stood still for %.1f s", late_s)
            self._excuse(late_s)
        self._receive_all()  # an answer that has arrived is in time, however late it is read
        now = time.monotonic()
        for link in self.links:
            if not link.is_stuck:
                self._judge(link, now)

    def _excuse(self, seconds: float) -> None:
        """Count no such time against any worker."""
        for link in self._links.values():
            link.up_at += seconds
            for batch in link.in_flight.values():
                batch.started_at += seconds

    def _judge(self, link: WorkerLink, now: float) -> None:
        if not link.is_connected and now - link.up_at > self._batch_timeout_s:
            log.error("%s has not answered for %.0f s", link.incarnation, now - link.up_at)
            self._report_stuck(link)
        oldest = next(iter(link.in_flight.values()), None)
        if oldest is not None and now - oldest.started_at > self._deadline_s(link, oldest.num_tokens):
            log.error(
                "%s has had a batch of %d tokens for %.1f s",
                link.incarnation,
                oldest.num_tokens,
                now - oldest.started_at,
            )
            self._report_stuck(link)

    def _deadline_s(self, link: WorkerLink, num_tokens: int) -> float:
        return link.cost_model.deadline_s(
            num_tokens,
            limit_s=self._batch_timeout_s,
            has_answered=link.has_answered,
            num_gateways=self._num_gateways,
            max_sequence_tokens=self._policy.quantum,
        )


def _outputs_bytes(sequences: list[QueuedSequence]) -> bytes:
    """What they ask for, as a Batch has it."""
    outputs = [sequence.output for sequence in sequences]
    return b"" if outputs.count(_VECTORS) == len(outputs) else bytes(outputs)


def _row_ends(sequences: list[QueuedSequence], outputs: bytes) -> list[int] | range:
    """A range where each has one row, as is usual, and a list where not."""
    if _TOKENS not in outputs:
        return range(1, len(sequences) + 1)
    return list(accumulate([sequence.num_rows for sequence in sequences]))


def _end_of_vectors(sequences: list[QueuedSequence], start: int, stop: int) -> int:
    """The first from `start` on that asks for rows of its tokens; `stop`, or the end, if none does before it."""
    for index in range(start, min(stop, len(sequences))):
        if sequences[index].output is _TOKENS:
            return index
    return min(stop, len(sequences))


def _deliver_tokens(sequence: QueuedSequence, rows: Rows, *, num_left: int) -> None:
    """Hand some rows of a sequence's tokens to its request; one that is not finite fails it."""
    if not _are_finite(rows):
        _fail_not_finite(sequence)
    sequence.pending.deliver_one(sequence, np.ascontiguousarray(rows), num_left)


def _deliver_vectors(sequences: list[QueuedSequence], rows: Rows) -> None:
    """Hand the rows, one of each, to their requests; a row that is not finite fails its own request and no other."""
    if not _are_finite(rows):
        for sequence, row in zip(sequences, rows, strict=True):
            if not np.isfinite(row).all():
                _fail_not_finite(sequence)
    start = 0
    for end in range(1, len(sequences) + 1):
        # Neighbours in a batch are most often neighbours in their request: then they go together.
        if end == len(sequences) or not _follows(sequences[end], sequences[end - 1]):
            first = sequences[start]
            if first.chunked is None:
                first.request_queue.pending.deliver(first.index, rows[start:end])
            else:
                first.request_queue.pending.deliver_one(first, rows[start:end])
            start = end


def _follows(sequence: QueuedSequence, other: QueuedSequence) -> bool:
    # Those that are chunks have that in common with none but chunks of their own input, which have the same index.
    is_next = sequence.request_queue is other.request_queue and sequence.index == other.index + 1
    return is_next and sequence.chunked is other.chunked


def _are_finite(rows: Rows) -> bool:
    """Whether all are. A sum is finite if they are, but for huge ones; and takes a third of looking at each."""
    with np.errstate(all="ignore"):
        return math.isfinite(rows.sum()) or bool(np.isfinite(rows).all())


def _fail_not_finite(sequence: QueuedSequence) -> None:
    log.error("the model gave a vector that is not finite for a sequence of %d tokens", sequence.num_tokens)
    sequence.pending.fail(
        EngineFailed(f"The model gave a vector that is not finite for 'input[{sequence.index}]'", code="not_finite")
    )


def _note_sent(sequences: list[QueuedSequence], now: float) -> None:
    for sequence in sequences:
        request_queue = sequence.request_queue
        request_queue.num_sent_tokens += sequence.num_tokens
        if request_queue.first_sent_at is None:
            request_queue.first_sent_at = now


def _note_done(batch: InFlight, worker: int, compute_us: int) -> None:
    request_queue: RequestQueue | None = None
    for sequence in batch.sequences:
        if sequence.request_queue is request_queue:
            continue
        request_queue = sequence.request_queue
        request_queue.last_done_at = batch.answered_at
        if request_queue.batches is not None and len(request_queue.batches) < _MAX_BATCHES_NOTED:
            share = BatchShare(
                worker, batch.number, batch.sent_at, batch.answered_at, compute_us, len(batch.sequences),
                batch.num_tokens,
            )  # fmt: skip
            if share not in request_queue.batches:
                request_queue.batches.append(share)


def _num_slot_rows(link: WorkerLink) -> int:
    return sum(map(len, link.slots.rows))


def _note_lost(sequences: list[QueuedSequence]) -> None:
    for sequence in sequences:
        sequence.request_queue.num_sent_tokens -= sequence.num_tokens


def _keep_dying() -> Unavailable:
    return Unavailable(
        "Workers keep dying, and what they leave is more than may be computed again",
        retry_after_s=_KEEP_DYING_RETRY_AFTER_S,
        code="retry_budget_exhausted",
    )


def _fail(sequence: QueuedSequence, code: FailureCode) -> None:
    what = "ran out of memory on" if code is FailureCode.OUT_OF_MEMORY else "failed on"
    sequence.pending.fail(EngineFailed(f"The engine {what} 'input[{sequence.index}]'", code=code.name.lower()))
