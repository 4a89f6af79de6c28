"""Sends batches to workers over ZeroMQ and delivers their rows.

Owns the ROUTER socket, the gateway's record of each incarnation (`WorkerLink`: its slots, its batches in flight) and
the views of every arena. The transport is never evidence: that a worker lives is the supervisor's word (`worker_up`,
`worker_down`), that a batch arrived is its reply. What a worker says is checked against the record before a row is
read.

Life of a slot: free → `_send` → in flight → `Done` → being encoded → free. A lost batch's sequences go back to the
scheduler. Called by `gateway.main` (control messages) and `gateway.app` (new sequences, health).
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq

from gateway.board import Board
from gateway.errors import DeadlinePassed, PoisonInput, ServerError
from gateway.pace import FULL_BATCH_S, SHORT_BATCH_S, Pace
from gateway.request import Sequence
from gateway.scheduler import Scheduler
from shm.board import Counter
from shm.failure import FailureCode
from shm.view import Rows, SlotViews
from shm.wire import Alive, Batch, Done, Failed, Incarnation, Probe, WireError, decode_to_gateway, encode

log = logging.getLogger("vecd.dispatch")

_PROBE_INTERVAL_S = 0.02
_SWEEP_INTERVAL_S = 1.0

_FLOATS_PER_TURN = 32 * 1024
"""Floats encoded before the event loop gets its next turn: 1.4 ms as JSON numbers, 0.03 ms as base64."""

_MAX_FAILURES = 10
"""Failures in a row, each on a batch of one sequence, after which the worker itself is suspected."""

_MAX_DEATHS = 3
"""Deadly batches after which a sequence is given up: two in company, the third alone."""


@dataclass(slots=True)
class InFlight:
    """A batch that a worker has, or has answered."""

    number: int
    slot: int
    sequences: list[Sequence]
    num_tokens: int
    started_at: float
    """When it was sent, or when the batch ahead of it was answered: its deadline counts from here."""
    num_encoded: int = 0


@dataclass(slots=True)
class WorkerLink:
    """The gateway's record of one incarnation."""

    incarnation: Incarnation
    slots: SlotViews
    facts: dict[str, Any]
    pace: Pace
    """How fast it is; learned from its own batches, beginning with what was known of the others."""
    free_slots: list[int] = field(default_factory=list)
    in_flight: dict[int, InFlight] = field(default_factory=dict)
    """By batch number, oldest first: a worker takes batches in the order in which they were sent."""
    is_connected: bool = False
    """It has answered this gateway's probe."""
    is_stuck: bool = False
    """It has let a deadline pass; the supervisor has been told and will kill it."""
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
    """`on_stuck` tells the supervisor of a worker past a deadline."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        epoch: int,
        max_batch_tokens: int,
        batch_timeout_s: float,
        on_stuck: Callable[[Incarnation], None],
        board: Board | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._epoch = epoch
        self._batch_timeout_s = batch_timeout_s
        self._on_stuck = on_stuck
        self._pace = Pace(max_batch_tokens)
        """Of a worker about which nothing is known yet: that of the last batch of any."""
        self._board = board or Board.private()
        self._links: dict[bytes, WorkerLink] = {}
        self._last_number = 0
        self._to_encode: deque[tuple[WorkerLink, InFlight]] = deque()
        self._is_encoding = False
        self._is_pump_due = False
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
        self._sweeper = self._loop.call_later(_SWEEP_INTERVAL_S, self._sweep)

    def stop(self) -> None:
        self._sweeper.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._context.destroy(linger=0)

    # --- what others ask ------------------------------------------------------------------------------------

    @property
    def links(self) -> list[WorkerLink]:
        return list(self._links.values())

    def why_unavailable(self) -> str | None:
        """None when some worker can serve; else the reason, for `/health`."""
        if any(link.is_usable for link in self._links.values()):
            return None
        if not self._links:
            return self._last_death
        return "; ".join(
            f"{link.incarnation} {'is stuck' if link.is_stuck else 'does not answer yet'}" for link in self.links
        )

    def pump_soon(self) -> None:
        """Send what can be sent, once the requests that have arrived in this turn of the loop are all queued."""
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    # --- what the supervisor says ---------------------------------------------------------------------------

    def worker_up(self, incarnation: Incarnation, slots: SlotViews, facts: dict[str, Any]) -> None:
        """An incarnation is ready. It gets batches once it has answered a probe."""
        link = WorkerLink(incarnation, slots, facts, self._pace.copy(), free_slots=list(range(len(slots.rows))))
        self._links[incarnation.identity] = link
        self._probe(link)

    def worker_down(self, incarnation: Incarnation, reason: str) -> None:
        """An incarnation is dead: its batches are queued again, its arena dropped."""
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
            if link.slots.begun[batch.slot] == batch.number:
                self._count_death(batch)
        self._put_back([sequence for batch in lost for sequence in batch.sequences])

    # --- sending --------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Work-conserving: every idle worker gets a batch, a busy one a second only when a whole one waits.

        While short requests wait for the batches of a backlog, these are short, and none is sent ahead.
        """
        self._is_pump_due = False
        now = time.monotonic()
        is_short = self._scheduler.wants_short_batches(now)
        batch_s = SHORT_BATCH_S if is_short else FULL_BATCH_S
        idle = [link for link in self._links.values() if link.is_idle]
        while idle:
            budget = idle[-1].pace.budget_tokens(batch_s)
            batch = self._next_batch(now, idle[-1].pace, budget, len(idle), is_short=is_short)
            if not batch:
                return
            self._send(idle.pop(), batch, now)
        if not is_short:
            self._send_ahead(now)

    def _send_ahead(self, now: float) -> None:
        for link in self._links.values():
            budget = link.pace.budget_tokens(FULL_BATCH_S)
            is_taking = link.is_usable and link.free_slots and self._scheduler.fills(budget)
            if is_taking and (batch := self._next_batch(now, link.pace, budget)):
                self._send(link, batch, now)

    def _next_batch(
        self, now: float, pace: Pace, budget: int, num_idle: int = 1, *, is_short: bool = False
    ) -> list[Sequence]:
        num_tokens = min(budget, self._scheduler.queued_tokens // num_idle)
        done_by = now + pace.batch_s(num_tokens)
        batch = self._scheduler.next_batch(
            now, max_tokens=budget, num_idle_workers=num_idle, done_by=done_by, is_short=is_short
        )
        if self._scheduler.hopeless:
            for flow in self._scheduler.hopeless:
                self._board.add(Counter.EXPIRED)
                flow.gathering.fail(DeadlinePassed(None))
            self._scheduler.hopeless.clear()
        return batch

    def _send(self, link: WorkerLink, sequences: list[Sequence], now: float) -> None:
        self._last_number += 1
        num_tokens = sum(sequence.num_tokens for sequence in sequences)
        batch = InFlight(self._last_number, link.free_slots.pop(), sequences, num_tokens, now)
        link.in_flight[batch.number] = batch
        self.in_flight_tokens += num_tokens
        lengths = np.array([sequence.num_tokens for sequence in sequences], dtype="<i4").tobytes()
        ids = b"".join([sequence.token_ids for sequence in sequences])
        message = Batch(self._epoch, batch.number, batch.slot, len(sequences), num_tokens, lengths, ids)
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
        """Ask until it answers: the worker connects in its own time."""
        if link.is_connected or self._links.get(link.incarnation.identity) is not link:
            return
        self._send_frames(link, Probe(self._epoch))
        self._loop.call_later(_PROBE_INTERVAL_S, self._probe, link)

    # --- receiving ------------------------------------------------------------------------------------------

    def _has_message(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _receive_all(self) -> None:
        """Read until nothing is left: the descriptor is edge-triggered."""
        while self._has_message():
            try:
                identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._receive(identity, frames)

    def _receive(self, identity: bytes, frames: list[bytes]) -> None:
        link = self._links.get(identity)
        if link is None:
            return  # a dead incarnation's last words
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
                link.is_connected = True
                self.pump_soon()
            case Done():
                self._on_done(link, message)
            case Failed():
                self._on_failed(link, message)

    def _on_done(self, link: WorkerLink, done: Done) -> None:
        batch = self._take_answered(link, done.number, done.slot)
        if batch is None:
            return
        if done.num_rows != len(batch.sequences):
            log.error("%s wrote %d rows for %d sequences", link.incarnation, done.num_rows, len(batch.sequences))
            self._put_back(batch.sequences)
            self._report_stuck(link)
            return
        link.pace.observe(batch.num_tokens, done.compute_us / 1e6)
        self._note_pace(link.pace)
        self._board.add(Counter.BATCHES)
        self._board.add(Counter.SEQUENCES, len(batch.sequences))
        self._board.add(Counter.TOKENS, batch.num_tokens)
        self._board.add(Counter.COMPUTE_US, done.compute_us)
        self._board.add_batch(link.incarnation.worker)
        link.num_failures = 0
        self._pump()  # the worker computes its next batch while this one's rows are encoded
        self._to_encode.append((link, batch))
        if not self._is_encoding:
            self._encode_some()

    def _note_pace(self, pace: Pace) -> None:
        self._pace = pace
        speeds = [link.pace.tokens_per_s for link in self._links.values() if link.is_usable]
        if speeds:
            self.tokens_per_s = sum(speeds)

    def _on_failed(self, link: WorkerLink, failed: Failed) -> None:
        batch = self._take_answered(link, failed.number, failed.slot)
        if batch is None:
            return
        log.error("%s failed on a batch of %d: %s", link.incarnation, len(batch.sequences), failed.code.name)
        link.free_slots.append(batch.slot)
        if len(batch.sequences) == 1:
            _fail(batch.sequences[0], failed.code)
            self._count_failure(link)
        else:
            # One of them, most often; halves find it in a few batches, and the others are done with.
            middle = len(batch.sequences) // 2
            for half in (batch.sequences[:middle], batch.sequences[middle:]):
                self._scheduler.set_aside([sequence for sequence in half if not sequence.is_abandoned])
        self.pump_soon()

    def _take_answered(self, link: WorkerLink, number: int, slot: int) -> InFlight | None:
        """The record of the batch that a worker answers; None, and the worker is not believed, when there is none."""
        batch = link.in_flight.get(number)
        if batch is None or batch.slot != slot:
            log.error("%s answered batch %d in slot %d, which it does not have", link.incarnation, number, slot)
            self._report_stuck(link)
            return None
        del link.in_flight[number]
        self.in_flight_tokens -= batch.num_tokens
        now = time.monotonic()
        for waiting in link.in_flight.values():
            waiting.started_at = now
        return batch

    # --- rows → answers -------------------------------------------------------------------------------------

    def _encode_some(self) -> None:
        """Encode a turn's worth of rows; come back for the rest after the event loop has had its turn."""
        floats_left = _FLOATS_PER_TURN
        while self._to_encode:
            link, batch = self._to_encode[0]
            rows = link.slots.rows[batch.slot]
            rows_left = max(1, floats_left // rows.shape[1])
            end = min(len(batch.sequences), batch.num_encoded + rows_left)
            try:
                _deliver(batch.sequences[batch.num_encoded : end], rows[batch.num_encoded : end])
            except Exception as error:  # one batch's trouble must not hold up those behind it
                log.error("rows of batch %d cannot be encoded: %s", batch.number, type(error).__name__)
                for sequence in batch.sequences:
                    sequence.gathering.fail(ServerError("The server failed on this request"))
            floats_left -= (end - batch.num_encoded) * rows.shape[1]
            batch.num_encoded = end
            if end == len(batch.sequences):
                self._to_encode.popleft()
                link.free_slots.append(batch.slot)
                self.pump_soon()
            if floats_left <= 0:
                break
        self._is_encoding = bool(self._to_encode)
        if self._is_encoding:
            self._loop.call_soon(self._encode_some)

    # --- when things go wrong -------------------------------------------------------------------------------

    def _count_death(self, batch: InFlight) -> None:
        for sequence in batch.sequences:
            sequence.num_deaths += 1
            if sequence.num_deaths >= _MAX_DEATHS:
                log.error("a sequence of %d tokens died with %d workers; given up", sequence.num_tokens, _MAX_DEATHS)
                sequence.gathering.fail(PoisonInput(f"'input[{sequence.index}]' ended its worker each time it ran"))

    def _count_failure(self, link: WorkerLink) -> None:
        """A worker that only fails is always idle, and would be given everything: it is replaced."""
        link.num_failures += 1
        if link.num_failures >= _MAX_FAILURES:
            log.error("%s has failed %d times in a row", link.incarnation, link.num_failures)
            self._report_stuck(link)

    def _put_back(self, sequences: list[Sequence]) -> None:
        alive = [sequence for sequence in sequences if not sequence.is_abandoned]
        self._scheduler.put_back([sequence for sequence in alive if sequence.num_deaths < _MAX_DEATHS - 1])
        for suspect in alive:
            if suspect.num_deaths >= _MAX_DEATHS - 1:
                self._scheduler.set_aside([suspect])
        self.pump_soon()

    def _report_stuck(self, link: WorkerLink) -> None:
        """Give the worker nothing more, and have it killed; its batches come back with `worker_down`."""
        if not link.is_stuck:
            link.is_stuck = True
            self._on_stuck(link.incarnation)

    def _sweep(self) -> None:
        self._sweeper = self._loop.call_later(_SWEEP_INTERVAL_S, self._sweep)
        now = time.monotonic()
        for link in self.links:
            if not link.is_connected and now - link.up_at > self._batch_timeout_s and not link.is_stuck:
                log.error("%s has not answered for %.0f s", link.incarnation, now - link.up_at)
                self._report_stuck(link)
            oldest = next(iter(link.in_flight.values()), None)
            if oldest is not None and now - oldest.started_at > self._batch_timeout_s and not link.is_stuck:
                log.error(
                    "%s has had a batch of %d tokens for %.0f s",
                    link.incarnation,
                    oldest.num_tokens,
                    now - oldest.started_at,
                )
                self._report_stuck(link)


def _deliver(sequences: list[Sequence], rows: Rows) -> None:
    """Hand the rows to their requests; a row that is not finite fails its own request and no other."""
    if not _are_finite(rows):
        for sequence, row in zip(sequences, rows, strict=True):
            if not np.isfinite(row).all():
                _fail_not_finite(sequence)
    start = 0
    for end in range(1, len(sequences) + 1):
        # Neighbours in a batch are most often neighbours in their request: then they go together.
        if end == len(sequences) or not _follows(sequences[end], sequences[end - 1]):
            first = sequences[start]
            first.flow.gathering.deliver(first.index, rows[start:end])
            start = end


def _follows(sequence: Sequence, other: Sequence) -> bool:
    return sequence.flow is other.flow and sequence.index == other.index + 1


def _are_finite(rows: Rows) -> bool:
    """Whether all are. A sum is finite if they are, but for huge ones; and takes a third of looking at each."""
    with np.errstate(all="ignore"):
        return math.isfinite(rows.sum()) or bool(np.isfinite(rows).all())


def _fail_not_finite(sequence: Sequence) -> None:
    log.error("the model gave a vector that is not finite for a sequence of %d tokens", sequence.num_tokens)
    sequence.gathering.fail(
        ServerError(f"The model gave a vector that is not finite for 'input[{sequence.index}]'", code="not_finite")
    )


def _fail(sequence: Sequence, code: FailureCode) -> None:
    what = "ran out of memory on" if code is FailureCode.OUT_OF_MEMORY else "failed on"
    sequence.gathering.fail(ServerError(f"The engine {what} 'input[{sequence.index}]'", code=code.name.lower()))
