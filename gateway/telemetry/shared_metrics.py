"""Write this gateway's shared metrics, and read those of all gateways.

Owns this gateway's section of `vecd.shm.shared_metrics`, where the memory and its rules are described. Every write is a
few plain stores: no lock, no system call. Measured: `add` takes 0.15 µs, `set` 0.1 µs. Called wherever something is
counted; read by `vecd.gateway.api.health` and `vecd.gateway.telemetry.metrics`.
"""

import mmap
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from vecd.shm.shared_metrics import (
    NUM_BATCHES,
    STATUSES,
    BatchCell,
    Counter,
    Gauge,
    Histogram,
    Row,
    SharedMetricsSpec,
    WorkerCell,
    cut_rows,
)

_PLACES = {status: place for place, status in enumerate(STATUSES)}
_OTHER_STATUS = {4: _PLACES[400], 5: _PLACES[500]}
"""Where a status that is not in STATUSES is counted, by its first digit."""
_NUM_STATUSES = len(STATUSES)
GONE = 499
"""The status counted for a request whose client disconnected before it got a response."""
_GONE_PLACE = _PLACES[GONE]

# Bound once, because Python 3.11 takes 0.2 µs to find a member of an enumeration.
_BATCHES, _SEQUENCES, _TOKENS = Counter.BATCHES, Counter.SEQUENCES, Counter.TOKENS
_COMPUTE_US, _PADDING_TOKENS = Counter.COMPUTE_US, Counter.PADDING_TOKENS
_BATCH_SEQUENCES, _BATCH_TOKENS, _BATCH_FILL = (
    Histogram.BATCH_SEQUENCES, Histogram.BATCH_TOKENS, Histogram.BATCH_FILL,
)  # fmt: skip


class SharedMetrics:
    """`rows` are the sections of all gateways, read-only; this gateway's is at the index `gateway`."""

    def __init__(self, cells: "memoryview[int]", spec: SharedMetricsSpec, gateway: int) -> None:
        """`cells` are the int64s of the whole file, writable.

        Side effect: this gateway's gauges are reset, and its process id and start time set.
        """
        self.gateway = gateway
        self.num_workers = spec.num_workers
        self.rows: list[Row] = cut_rows(cells.toreadonly(), spec)
        self.ours = cut_rows(cells, spec)[gateway]
        """This gateway's section, writable."""
        self.was_ready = False
        """Whether this gateway has ever had a worker that it could send batches to, as `publish` found."""
        self._counters, self._gauges, self._answers = self.ours.counters, self.ours.gauges, self.ours.answers
        self._histograms, self._workers, self._batches = self.ours.histograms, self.ours.workers, self.ours.batches
        self._bounds = [histogram.bounds for histogram in Histogram]
        self._per_unit = [histogram.per_unit for histogram in Histogram]
        self._polled: dict[Gauge, Callable[[], int]] = {}
        for gauge in Gauge:
            self.set(gauge, 0)
        self.set(Gauge.PID, os.getpid())
        self.set(Gauge.STARTED_NS, time.monotonic_ns())

    @classmethod
    def mapped(cls, fd: int, spec: SharedMetricsSpec, gateway: int) -> "SharedMetrics":
        """Map the file behind `fd`, which may be closed afterwards. Raises ValueError when it is too small."""
        return cls(memoryview(mmap.mmap(fd, spec.nbytes)).cast("q"), spec, gateway)

    @classmethod
    def private(cls, num_workers: int = 64) -> "SharedMetrics":
        """Metrics in private memory, for a gateway without a supervisor."""
        spec = SharedMetricsSpec(num_gateways=1, num_workers=num_workers)
        return cls(memoryview(bytearray(spec.nbytes)).cast("q"), spec, 0)

    # --- writing --------------------------------------------------------------------------------------------

    def add(self, counter: Counter, number: int = 1) -> None:
        self._counters[counter] += number

    def set(self, gauge: Gauge, value: int) -> None:
        self._gauges[gauge] = value

    def add_answer(self, endpoint: int, status: int) -> None:
        """Count an HTTP request by its status, or by GONE. `endpoint`: its index in the table of endpoints."""
        place = _PLACES.get(status)
        if place is None:
            place = _OTHER_STATUS[4 if status < 500 else 5]
        self._answers[endpoint * _NUM_STATUSES + place] += 1

    def observe(self, histogram: Histogram, value: float) -> None:
        """Count `value`, in the metric's unit."""
        cells = self._histograms[histogram]
        cells[bisect_left(self._bounds[histogram], value)] += 1
        cells[-1] += int(value * self._per_unit[histogram])

    def observe_alike(self, histograms: Sequence[Histogram], values: Iterable[float]) -> None:
        """Count a value in each of several histograms with the same bounds and unit. 0.4 µs for each."""
        bounds, per_unit = self._bounds[histograms[0]], self._per_unit[histograms[0]]
        all_cells = self._histograms
        for histogram, value in zip(histograms, values, strict=True):
            cells = all_cells[histogram]
            cells[bisect_left(bounds, value)] += 1
            cells[-1] += int(value * per_unit)

    def worker_up(self, worker: int, life: int) -> None:
        """Batches of this worker are from now on of this life."""
        cells = self._workers[worker]
        if cells[WorkerCell.LIFE] != life:
            cells[WorkerCell.BATCHES_BEFORE] = cells[WorkerCell.BATCHES]
            cells[WorkerCell.LIFE] = life

    def batch_sent(self, number: int, worker: int, num_sequences: int, num_tokens: int, room_tokens: int) -> None:
        """A batch has gone to a worker. `room_tokens`: what it might have had."""
        self.observe(_BATCH_SEQUENCES, num_sequences)
        self.observe(_BATCH_TOKENS, num_tokens)
        self.observe(_BATCH_FILL, num_tokens / room_tokens)
        cells = self._batches[number % NUM_BATCHES]
        # In the order of `BatchCell`. First that it is not done: nobody is to take the old times for the new batch's.
        cells[5] = 0
        cells[0], cells[1], cells[2], cells[3] = number, worker, num_sequences, num_tokens
        cells[4] = time.monotonic_ns()

    def batch_done(
        self, number: int, worker: int, num_sequences: int, num_tokens: int, compute_us: int, padding_tokens: int
    ) -> None:
        """A worker has answered a batch with its rows."""
        counters = self._counters
        counters[_BATCHES] += 1
        counters[_SEQUENCES] += num_sequences
        counters[_TOKENS] += num_tokens
        counters[_COMPUTE_US] += compute_us
        counters[_PADDING_TOKENS] += padding_tokens
        cells = self._workers[worker]  # in the order of `WorkerCell`
        cells[1] += 1
        cells[3] += num_sequences
        cells[4] += num_tokens
        cells[5] += compute_us
        cells = self._batches[number % NUM_BATCHES]
        if cells[0] == number:  # or so many have been sent since
            cells[6] = compute_us
            cells[5] = time.monotonic_ns()

    def batch_lost(self, number: int) -> None:
        """A batch will not be answered."""
        cells = self._batches[number % NUM_BATCHES]
        if cells[0] == number:
            cells[6] = 0
            cells[5] = time.monotonic_ns()

    def poll(self, gauges: Mapping[Gauge, Callable[[], int]]) -> None:
        """Let `publish` read these gauges by a call, rather than have them set whenever they change."""
        self._polled.update(gauges)

    def publish(self) -> None:
        """Update the polled gauges. To be called regularly, and before metrics are read."""
        for gauge, value in self._polled.items():
            self._gauges[gauge] = value()
        self.was_ready = self.was_ready or self._gauges[Gauge.WORKERS] > 0

    # --- reading, over all gateways -------------------------------------------------------------------------

    def total(self, cell: Counter | Gauge) -> int:
        """The sum as it is stored: `per_unit` of it make one of the metric's unit."""
        if isinstance(cell, Counter):
            return sum(row.counters[cell] for row in self.rows)
        return sum(row.gauges[cell] for row in self.rows)

    def others(self, gauge: Gauge) -> list[int]:
        """The values of all gateways but this one."""
        return [row.gauges[gauge] for index, row in enumerate(self.rows) if index != self.gateway]

    def histogram(self, histogram: Histogram) -> tuple[list[int], float]:
        """The count of each bucket, and the sum of all values in the metric's unit."""
        *counts, total = (sum(cells) for cells in zip(*(row.histograms[histogram] for row in self.rows), strict=True))
        return counts, total / histogram.per_unit

    def answers(self) -> dict[tuple[int, int], int]:
        """The number of finished requests by endpoint and status, where there are any."""
        sums = map(sum, zip(*(row.answers for row in self.rows), strict=True))
        return {
            (cell // _NUM_STATUSES, STATUSES[cell % _NUM_STATUSES]): number
            for cell, number in enumerate(sums)
            if number
        }

    def num_answered_by(self, row: Row) -> int:
        """The number of requests that one gateway has answered, in all its lives."""
        return sum(row.answers) - sum(row.answers[_GONE_PLACE::_NUM_STATUSES])

    def known_workers(self) -> list[int]:
        """Those that have been up; the board may have room for more."""
        return [
            worker for worker in range(self.num_workers) if any(r.workers[worker][WorkerCell.LIFE] for r in self.rows)
        ]

    def worker_total(self, worker: int, cell: WorkerCell) -> int:
        """What all lives of a worker have done. Not for LIFE."""
        return sum(row.workers[worker][cell] for row in self.rows)

    def worker_life(self, worker: int) -> int:
        """The newest that any gateway has heard of."""
        return max(row.workers[worker][WorkerCell.LIFE] for row in self.rows)

    def recent_batches(self, since_ns: int) -> list[tuple[int, ...]]:
        """What is remembered of all gateways' batches that were answered since then, or are under way, but for those of
        a gateway's former lives: for each the gateway and the cells in the order of `BatchCell`, oldest first."""
        found = [
            (gateway, *cells)
            for gateway, row in enumerate(self.rows)
            for cells in row.batches
            if 0 < row.gauges[Gauge.STARTED_NS] < cells[4] and (not cells[5] or cells[5] >= since_ns)
        ]
        return sorted(found, key=lambda batch: batch[1 + BatchCell.SENT_NS])

    def worker_batches_in(self, worker: int, life: int) -> int:
        """Batches that one life of a worker has done: the newest, of those gateways that have heard of it."""
        return sum(
            cells[WorkerCell.BATCHES] - cells[WorkerCell.BATCHES_BEFORE]
            for cells in (row.workers[worker] for row in self.rows)
            if cells[WorkerCell.LIFE] == life
        )
