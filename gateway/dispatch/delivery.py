"""Hands the rows of answered batches to the results of their requests, batch by batch and row by row.

Owns the check that a row is finite, and how much is encoded in one turn of the event loop. A slot belongs to this
module from `Delivery.add` until `on_delivered`.
"""

import asyncio
import logging
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from vecd.gateway.dispatch.workers import InFlight, WorkerLink
from vecd.gateway.errors import INPUT, EngineFailed, ServerError
from vecd.gateway.scheduling.queue import QueuedSequence
from vecd.shm.output import Output
from vecd.shm.views import Rows

log = logging.getLogger("vecd.dispatch")

FLOATS_PER_TURN = 32 * 1024
"""Floats encoded in one turn of the event loop, over all batches: 1.4 ms as JSON numbers, 0.03 ms as base64. Exceeded
by a part of a row at most, or by a part of a sequence whose output spans rows: of 30,522 floats, 0.05 ms."""

_VECTORS = Output.VECTORS  # Python 3.11 takes 0.2 µs to find a member of an enumeration

Keep: TypeAlias = Callable[[list[QueuedSequence], Rows], None]


class Delivery:
    def __init__(
        self,
        *,
        widths: Mapping[Output, int],
        on_delivered: Callable[[WorkerLink, InFlight], None],
        keep: Keep | None = None,
    ) -> None:
        """`widths`: how many of the first floats of a row, or of all rows that a sequence spans, are each output's own;
        all where there is no number. `on_delivered` is called when none of a batch's rows is needed any more; `keep`,
        with sequences that have one row each, and these rows, if all of them are finite."""
        self._widths = widths
        self._on_delivered = on_delivered
        self._keep = keep
        self._to_encode: deque[tuple[WorkerLink, InFlight]] = deque()
        self._floats_left = 0
        """What may still be encoded in this turn."""
        self._is_turn_due = False

    @property
    def num_rows(self) -> int:
        """Of the batches that are not encoded yet."""
        return sum(batch.num_rows for _, batch in self._to_encode)

    def clear(self) -> None:
        self._to_encode.clear()

    def add(self, link: WorkerLink, batch: InFlight) -> None:
        """Encode what this turn of the event loop has room for, and the rest later. Call on the running event loop."""
        self._to_encode.append((link, batch))
        self._encode_some()

    def _begin_turn(self) -> None:
        self._is_turn_due = False
        self._encode_some()

    def _encode_some(self) -> None:
        if not self._is_turn_due and self._to_encode:  # nothing has been encoded in this turn
            self._is_turn_due = True
            self._floats_left = FLOATS_PER_TURN
            asyncio.get_running_loop().call_soon(self._begin_turn)
        while self._to_encode and self._floats_left > 0:
            link, batch = self._to_encode[0]
            rows = link.slots.rows[batch.slot]
            start, width = batch.num_encoded, rows.shape[1]
            end_of_all = batch.num_rows + len(batch.copies)
            end = _end_of_span(batch, min(end_of_all, start + max(1, self._floats_left // width)))
            try:
                self._deliver(batch, rows, start, end)
            except Exception:  # a fault of this module; it must not hold up the batches behind this one
                log.exception("batch %d cannot be delivered", batch.number)
                for sequence in (*batch.sequences, *(follower for follower, _ in batch.copies)):
                    sequence.result.fail(ServerError("The server failed on this request"))
            self._floats_left -= (end - start) * width
            batch.num_encoded = end
            if end == end_of_all:
                self._to_encode.popleft()
                self._on_delivered(link, batch)

    def _deliver(self, batch: InFlight, rows: Rows, start: int, end: int) -> None:
        """Hand the rows from `start` to `end` to their requests: the batch's own, and then the copies."""
        ends = batch.row_ends
        if end > batch.num_rows:
            copies = batch.copies[max(0, start - batch.num_rows) : end - batch.num_rows]
            copied = rows[[ends[position] - 1 for _, position in copies]]
            self._deliver_vectors([follower for follower, _ in copies], copied)
            end = batch.num_rows
            if start >= end:
                return
        if isinstance(ends, range):
            vectors = np.ascontiguousarray(rows[start:end, : self._widths.get(_VECTORS)])
            deliver_vectors(batch.sequences[start:end], vectors, self._keep)
            return
        at = bisect_right(ends, start)
        while start < end:
            sequence = batch.sequences[at]
            if sequence.output.is_per_token:
                stop, behind = min(end, ends[at]), at + 1
                of_tokens = np.ascontiguousarray(rows[start:stop, : self._widths.get(sequence.output)])
                if not _are_finite(of_tokens):
                    _fail_not_finite(sequence)
                sequence.result.put(sequence.index, of_tokens, ends[at] - stop)
            else:
                behind = _end_of_output(batch.sequences, at, bisect_right(ends, end))
                stop = ends[behind - 1]
                of_each = rows[start:stop].reshape(behind - at, -1)
                self._deliver_vectors(batch.sequences[at:behind], of_each, self._keep)
            start, at = stop, behind

    def _deliver_vectors(self, sequences: list[QueuedSequence], rows: Rows, keep: Keep | None = None) -> None:
        """Hand over the rows, one of each sequence, each as wide as its output."""
        at = 0
        while at < len(sequences):
            behind = _end_of_output(sequences, at, len(sequences))
            width = self._widths.get(sequences[at].output)
            deliver_vectors(sequences[at:behind], np.ascontiguousarray(rows[at:behind, :width]), keep)
            at = behind


def _end_of_span(batch: InFlight, end: int) -> int:
    """`end`; or the end of the sequence that has row `end - 1`, if its output spans rows, and is delivered whole."""
    if isinstance(batch.row_ends, range) or end >= batch.num_rows:
        return end
    at = bisect_left(batch.row_ends, end)
    return batch.row_ends[at] if batch.sequences[at].output.spans_rows else end


def _end_of_output(sequences: list[QueuedSequence], start: int, stop: int) -> int:
    """The first index behind `start` whose sequence has another output; `stop`, or the end, if none has."""
    output, stop = sequences[start].output, min(stop, len(sequences))
    return next((index for index in range(start + 1, stop) if sequences[index].output is not output), stop)


def deliver_vectors(sequences: list[QueuedSequence], rows: Rows, keep: Keep | None = None) -> None:
    """Hand the rows, one of each, to their requests; a row that is not finite fails its own request alone. `keep`: as
    in `Delivery`."""
    if not _are_finite(rows):
        for sequence, row in zip(sequences, rows, strict=True):
            if not np.isfinite(row).all():
                _fail_not_finite(sequence)
    elif keep is not None:
        try:
            keep(sequences, rows)
        except Exception:  # requests get their rows all the same
            log.exception("rows cannot be kept")
    start = 0
    for end in range(1, len(sequences) + 1):
        # Neighbours in a batch are most often neighbours in their request; these are handed over together.
        if end == len(sequences) or not _follows(sequences[end], sequences[end - 1]):
            first = sequences[start]
            if not first.weight:
                first.request_queue.result.put_each(first.index, rows[start:end])
            else:
                first.request_queue.result.put_chunk(first.index, rows[start], first.weight)
            start = end


def _follows(sequence: QueuedSequence, other: QueuedSequence) -> bool:
    is_next = sequence.request_queue is other.request_queue and sequence.index == other.index + 1
    return is_next and not sequence.weight and not other.weight


def _are_finite(rows: Rows) -> bool:
    """The sum of the squares of finite values is finite, but for huge ones. BLAS takes a third of the time."""
    return math.isfinite(np.vdot(rows, rows)) or bool(np.isfinite(rows).all())


def _fail_not_finite(sequence: QueuedSequence) -> None:
    log.error("the model gave a vector that is not finite for a sequence of %d tokens", sequence.num_tokens)
    sequence.result.fail(
        EngineFailed(f"The model gave a vector that is not finite for '{INPUT}[{sequence.index}]'", code="not_finite")
    )
