"""Hands the rows of answered batches to the pending results of their requests.

Owns the queue of answered batches, the order in which their rows are handed out (batch by batch, row by row), the check
that a row is finite, and how much is encoded in one turn of the event loop. A slot belongs to this module from
`Delivery.add` until `on_delivered`. Knows no worker and no socket. Called by `vecd.gateway.dispatch.dispatcher`.
"""

import asyncio
import logging
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from vecd.gateway.dispatch.worker_link import InFlight, WorkerLink
from vecd.gateway.scheduling.queue import QueuedSequence
from vecd.gateway.types.errors import EngineFailed, ServerError
from vecd.shm.output import Output
from vecd.shm.views import Rows

log = logging.getLogger("vecd.dispatch")

_FLOATS_PER_TURN = 32 * 1024
"""Floats encoded in one turn of the event loop, over all batches: 1.4 ms as JSON numbers, 0.03 ms as base64. Exceeded
by a part of a row at most, or by a part of a sequence whose output spans rows: of 30,522 floats, 0.05 ms."""


class Delivery:
    def __init__(
        self,
        *,
        widths: Mapping[Output, int],
        on_delivered: Callable[[WorkerLink, InFlight], None],
        keep: Callable[[list[QueuedSequence], Rows], None] | None = None,
    ) -> None:
        """`widths`: the number of floats that are each output's own, the first ones of a row, or of all rows that a
        sequence spans; all where there is no number. `on_delivered` is called once for each batch, when none of its
        rows is needed any more; `keep`, with sequences that have one row each, and these rows, if all of them are
        finite."""
        self._widths = widths
        self._dim = widths.get(Output.VECTORS)
        self._on_delivered = on_delivered
        self._keep = keep
        self._to_encode: deque[tuple[WorkerLink, InFlight]] = deque()
        self._floats_left = 0
        """What may still be encoded in this turn."""
        self._is_turn_due = False
        """The next turn's budget has been asked for."""

    @property
    def num_rows(self) -> int:
        """Rows of the batches that are being encoded, or wait for it."""
        return sum(batch.num_rows for _, batch in self._to_encode)

    def clear(self) -> None:
        """Forget all batches. Their requests stay unanswered."""
        self._to_encode.clear()

    def add(self, link: WorkerLink, batch: InFlight) -> None:
        """Take a batch whose rows stand in its slot, and encode what this turn of the event loop has room for. Call on
        the running event loop."""
        self._to_encode.append((link, batch))
        self._encode_some()

    def _begin_turn(self) -> None:
        self._is_turn_due = False
        self._encode_some()

    def _encode_some(self) -> None:
        """Encode rows, oldest batch first, until this turn's budget is used up; the next turn goes on with the rest."""
        if not self._is_turn_due and self._to_encode:  # nothing has been encoded in this turn
            self._is_turn_due = True
            self._floats_left = _FLOATS_PER_TURN
            asyncio.get_running_loop().call_soon(self._begin_turn)
        while self._to_encode and self._floats_left > 0:
            link, batch = self._to_encode[0]
            rows = link.slots.rows[batch.slot]
            rows_left = max(1, self._floats_left // rows.shape[1])
            end_of_all = batch.num_rows + len(batch.copies)
            end = _end_of_span(batch, min(end_of_all, batch.num_encoded + rows_left))
            try:
                self._deliver(batch, rows, end)
            except Exception:  # a fault of this module; it must not hold up the batches behind this one
                log.exception("batch %d cannot be delivered", batch.number)
                for sequence in (*batch.sequences, *(follower for follower, _ in batch.copies)):
                    sequence.pending.fail(_server_error())
            self._floats_left -= (end - batch.num_encoded) * rows.shape[1]
            batch.num_encoded = end
            if end == end_of_all:
                self._to_encode.popleft()
                self._on_delivered(link, batch)

    def _deliver(self, batch: InFlight, rows: Rows, end: int) -> None:
        """Hand the rows from `batch.num_encoded` to `end` to their requests. Behind the batch's own rows come the
        copies."""
        start, ends = batch.num_encoded, batch.row_ends
        if end > batch.num_rows:
            self._deliver_copies(batch, rows, max(0, start - batch.num_rows), end - batch.num_rows)
            end = batch.num_rows
            if start >= end:
                return
        if isinstance(ends, range):
            vectors = rows[start:end]
            if self._dim is not None and rows.shape[1] != self._dim:
                vectors = np.ascontiguousarray(vectors[:, : self._dim])
            deliver_vectors(batch.sequences[start:end], vectors, self._keep)
            return
        at = bisect_right(ends, start)
        while start < end:
            sequence = batch.sequences[at]
            width = self._widths.get(sequence.output)
            if sequence.output.is_per_token:
                stop, behind = min(end, ends[at]), at + 1
                _deliver_tokens(sequence, rows[start:stop, :width], num_left=ends[at] - stop)
            else:
                behind = _end_of_output(batch.sequences, at, bisect_right(ends, end))
                stop = ends[behind - 1]
                of_each = rows[start:stop].reshape(behind - at, -1)[:, :width]
                deliver_vectors(batch.sequences[at:behind], np.ascontiguousarray(of_each), self._keep)
            start, at = stop, behind

    def _deliver_copies(self, batch: InFlight, rows: Rows, start: int, end: int) -> None:
        """Hand the copies from `start` to `end` to their requests."""
        sequences = [follower for follower, _ in batch.copies[start:end]]
        copied = rows[[batch.row_ends[position] - 1 for _, position in batch.copies[start:end]]]
        at = 0
        while at < len(sequences):
            behind = _end_of_output(sequences, at, len(sequences))
            width = self._widths.get(sequences[at].output)
            deliver_vectors(sequences[at:behind], np.ascontiguousarray(copied[at:behind, :width]))
            at = behind


def _end_of_span(batch: InFlight, end: int) -> int:
    """`end`; or the end of the sequence that has row `end - 1`, if its output spans rows, and is delivered whole."""
    if isinstance(batch.row_ends, range) or end >= batch.num_rows:
        return end
    at = bisect_left(batch.row_ends, end)
    return batch.row_ends[at] if batch.sequences[at].output.spans_rows else end


def _end_of_output(sequences: list[QueuedSequence], start: int, stop: int) -> int:
    """The first index behind `start` whose sequence has another output; `stop`, or the end, if none has."""
    output = sequences[start].output
    for index in range(start + 1, min(stop, len(sequences))):
        if sequences[index].output is not output:
            return index
    return min(stop, len(sequences))


def _deliver_tokens(sequence: QueuedSequence, rows: Rows, *, num_left: int) -> None:
    """Hand some rows of a sequence's tokens to its request; one that is not finite fails it."""
    if not _are_finite(rows):
        _fail_not_finite(sequence)
    try:
        sequence.pending.deliver_one(sequence, np.ascontiguousarray(rows), num_left)
    except Exception as error:
        _fail_encoding(sequence, error)


def deliver_vectors(
    sequences: list[QueuedSequence], rows: Rows, keep: Callable[[list[QueuedSequence], Rows], None] | None = None
) -> None:
    """Hand the rows, one of each, to their requests; a row that is not finite fails its own request and no other.
    `keep`: as in `Delivery`."""
    if _are_finite(rows):
        if keep is not None:
            keep(sequences, rows)
    else:
        for sequence, row in zip(sequences, rows, strict=True):
            if not np.isfinite(row).all():
                _fail_not_finite(sequence)
    start = 0
    for end in range(1, len(sequences) + 1):
        # Neighbours in a batch are most often neighbours in their request; these are handed over together.
        if end == len(sequences) or not _follows(sequences[end], sequences[end - 1]):
            first = sequences[start]
            try:
                if first.chunked is None:
                    first.request_queue.pending.deliver(first.index, rows[start:end])
                else:
                    first.request_queue.pending.deliver_one(first, rows[start:end])
            except Exception as error:
                _fail_encoding(first, error)
            start = end


def _follows(sequence: QueuedSequence, other: QueuedSequence) -> bool:
    # Chunks of one input have the same index, and share `chunked` with nothing else: no chunk follows another.
    is_next = sequence.request_queue is other.request_queue and sequence.index == other.index + 1
    return is_next and sequence.chunked is other.chunked


def _are_finite(rows: Rows) -> bool:
    """Whether all are. Their sum is finite then, but for huge values, and takes a third of the time."""
    with np.errstate(all="ignore"):
        return math.isfinite(rows.sum()) or bool(np.isfinite(rows).all())


def _fail_not_finite(sequence: QueuedSequence) -> None:
    log.error("the model gave a vector that is not finite for a sequence of %d tokens", sequence.num_tokens)
    sequence.pending.fail(
        EngineFailed(f"The model gave a vector that is not finite for 'input[{sequence.index}]'", code="not_finite")
    )


def _fail_encoding(sequence: QueuedSequence, error: Exception) -> None:
    """Fail one request by a fault of the server's. The log has it once: a request that is over takes no more rows."""
    log.error("the rows of a request cannot be encoded: %s", type(error).__name__, exc_info=error)
    sequence.pending.fail(_server_error())


def _server_error() -> ServerError:
    return ServerError("The server failed on this request")
