"""Write this gateway's shared metrics, and read those of all gateways.

Owns this gateway's section of `vecd.shm.shared_metrics`, where the memory and its rules are described. Every write is a
few plain stores: no lock, no system call. Measured: `add` takes 0.15 µs, `set` 0.1 µs. Called wherever something is
counted; read by `vecd.gateway.api.info` and `vecd.gateway.telemetry.metrics`.
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
    LifeCell,
    Section,
    ServiceCell,
    ServiceKey,
    SharedMetricsSpec,
    WorkerCell,
    WorkerKey,
    cut_sections,
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
_LEASED_BATCHES = Counter.LEASED_BATCHES
_BATCH_SEQUENCES, _BATCH_TOKENS, _BATCH_FILL = (
    Histogram.BATCH_SEQUENCES, Histogram.BATCH_TOKENS, Histogram.BATCH_FILL,
)  # fmt: skip
_BATCH_NUMBER, _BATCH_WORKER, _BATCH_NUM_SEQUENCES, _BATCH_NUM_TOKENS = (
    BatchCell.NUMBER, BatchCell.WORKER, BatchCell.SEQUENCES, BatchCell.TOKENS,
)  # fmt: skip
_BATCH_SENT_NS, _BATCH_DONE_NS, _BATCH_COMPUTE_US = BatchCell.SENT_NS, BatchCell.DONE_NS, BatchCell.COMPUTE_US
_WORKER_BATCHES, _WORKER_SEQUENCES, _WORKER_TOKENS, _WORKER_COMPUTE_US = (
    WorkerCell.BATCHES, WorkerCell.SEQUENCES, WorkerCell.TOKENS, WorkerCell.COMPUTE_US,
)  # fmt: skip
_LIFE_BATCHES = LifeCell.BATCHES


class SharedMetrics:
    """`sections` are the sections of all gateways, read-only; this gateway's is at the index `gateway`."""

    def __init__(self, cells: "memoryview[int]", spec: SharedMetricsSpec, gateway: int) -> None:
        """`cells` are the int64s of the whole file, writable.

        Side effect: this gateway's gauges are reset, and its process id and start time set.
        """
        self.gateway = gateway
        self.num_workers = spec.num_workers
        self.sections: list[Section] = cut_sections(cells.toreadonly(), spec)
        self.ours = cut_sections(cells, spec)[gateway]
        """This gateway's section, writable."""
        self.was_ready = False
        """Whether this gateway has ever had a worker that it could send batches to, as `publish` found."""
        self._counters, self._gauges, self._answers = self.ours.counters, self.ours.gauges, self.ours.answers
        self._histograms, self._workers, self._batches = self.ours.histograms, self.ours.workers, self.ours.batches
        self._lives = self.ours.lives
        self._bounds = [histogram.bounds for histogram in Histogram]
        self._per_unit = [histogram.per_unit for histogram in Histogram]
        self._polled: dict[Gauge, Callable[[], int]] = {}
        self._services: list[ServiceKey | None] = [None] * spec.num_services
        """Those that this gateway has, by their place in the section."""
        self._active: dict[int, ServiceKey] = {}
        """By the model's index."""
        self._last_batch_number = 0
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

    def open_service(self, service: ServiceKey) -> int:
        """Open a service and return its place in the section. What an earlier life of this gateway has counted for it
        stays. Raises ValueError when as many are open already as there is room for."""
        free = [place for place, occupant in enumerate(self._services) if occupant is None]
        if not free:
            raise ValueError(f"a gateway has at most {len(self._services)} services at a time")
        known = [place for place in free if _service_of(self.ours.services[place]) == service]
        [place, *_] = known or free
        if not known:
            for cells in (self.ours.services[place], *self.ours.lives[place]):
                for cell in range(len(cells)):
                    cells[cell] = 0
            self.ours.services[place][ServiceCell.MODEL] = service.model
            self.ours.services[place][ServiceCell.GENERATION] = service.generation
        self._services[place] = service
        return place

    def activate_service(self, service: ServiceKey) -> None:
        """New requests for its model are for this service, which is open, from now on: its workers' lives are those
        that count."""
        self._active[service.model] = service
        for worker, cells in enumerate(self.ours.lives[self._services.index(service)]):
            if cells[LifeCell.LIFE]:
                self._workers[worker][WorkerCell.LIFE] = cells[LifeCell.LIFE]

    def close_service(self, service: ServiceKey) -> None:
        """The service is over. What it has counted stays in the totals."""
        if service in self._services:
            self._services[self._services.index(service)] = None

    def worker_up(self, key: WorkerKey) -> None:
        """Batches of this worker in this service, which is open, are from now on of this life."""
        worker, life = key.incarnation.worker, key.incarnation.life
        cells = self.ours.lives[self._services.index(key.service)][worker]
        if cells[LifeCell.LIFE] != life:
            cells[LifeCell.LIFE] = 0
            cells[LifeCell.BATCHES] = 0
            cells[LifeCell.LIFE] = life
        if key.service == self._active.get(key.service.model):
            self._workers[worker][WorkerCell.LIFE] = life

    def next_batch_number(self) -> int:
        """A number that no other batch of this life of the gateway has, from 1."""
        self._last_batch_number += 1
        return self._last_batch_number

    def batch_sent(self, number: int, worker: int, num_sequences: int, num_tokens: int, budget_tokens: int) -> None:
        """A batch has gone to a worker. `budget_tokens`: those that it should have had; a sequence that is begun is
        sent whole, so it may have more, and its fill is 1 then."""
        self.observe(_BATCH_SEQUENCES, num_sequences)
        self.observe(_BATCH_TOKENS, num_tokens)
        self.observe(_BATCH_FILL, num_tokens / max(budget_tokens, num_tokens))
        cells = self._batches[number % NUM_BATCHES]
        cells[_BATCH_DONE_NS] = 0  # first: a reader must not take the old times for the new batch's
        cells[_BATCH_NUMBER] = number
        cells[_BATCH_WORKER] = worker
        cells[_BATCH_NUM_SEQUENCES] = num_sequences
        cells[_BATCH_NUM_TOKENS] = num_tokens
        cells[_BATCH_SENT_NS] = time.monotonic_ns()

    def batch_done(
        self,
        number: int,
        worker: int,
        num_sequences: int,
        num_tokens: int,
        compute_us: int,
        padding_tokens: int,
        place: int = 0,
        num_threads: int = 0,
    ) -> None:
        """A worker has answered a batch with its sections. `place`: its service's, as `open_service` returned it."""
        counters = self._counters
        counters[_BATCHES] += 1
        if num_threads > 1:
            counters[_LEASED_BATCHES] += 1
        counters[_SEQUENCES] += num_sequences
        counters[_TOKENS] += num_tokens
        counters[_COMPUTE_US] += compute_us
        counters[_PADDING_TOKENS] += padding_tokens
        cells = self._workers[worker]
        cells[_WORKER_BATCHES] += 1
        cells[_WORKER_SEQUENCES] += num_sequences
        cells[_WORKER_TOKENS] += num_tokens
        cells[_WORKER_COMPUTE_US] += compute_us
        self._lives[place][worker][_LIFE_BATCHES] += 1
        cells = self._batches[number % NUM_BATCHES]
        if cells[_BATCH_NUMBER] == number:  # else NUM_BATCHES have been sent since
            cells[_BATCH_COMPUTE_US] = compute_us
            cells[_BATCH_DONE_NS] = time.monotonic_ns()

    def batch_lost(self, number: int) -> None:
        """A batch will not be answered."""
        cells = self._batches[number % NUM_BATCHES]
        if cells[_BATCH_NUMBER] == number:
            cells[_BATCH_COMPUTE_US] = 0
            cells[_BATCH_DONE_NS] = time.monotonic_ns()

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
            return sum(section.counters[cell] for section in self.sections)
        return sum(section.gauges[cell] for section in self.sections)

    def others(self, gauge: Gauge) -> list[int]:
        """The values of all gateways but this one."""
        return [section.gauges[gauge] for index, section in enumerate(self.sections) if index != self.gateway]

    def histogram(self, histogram: Histogram) -> tuple[list[int], float]:
        """The count of each bucket, and the sum of all values in the metric's unit."""
        *counts, total = (
            sum(cells) for cells in zip(*(section.histograms[histogram] for section in self.sections), strict=True)
        )
        return counts, total / histogram.per_unit

    def answers(self) -> dict[tuple[int, int], int]:
        """The number of finished requests by endpoint and status, where there are any."""
        sums = map(sum, zip(*(section.answers for section in self.sections), strict=True))
        return {
            (cell // _NUM_STATUSES, STATUSES[cell % _NUM_STATUSES]): number
            for cell, number in enumerate(sums)
            if number
        }

    def num_answered_by(self, section: Section) -> int:
        """The number of requests that one gateway has answered, in all its lives."""
        return sum(section.answers) - sum(section.answers[_GONE_PLACE::_NUM_STATUSES])

    def known_workers(self) -> list[int]:
        """Workers that have been up; there may be cells for more."""
        return [
            worker
            for worker in range(self.num_workers)
            if any(r.workers[worker][WorkerCell.LIFE] for r in self.sections)
        ]

    def worker_total(self, worker: int, cell: WorkerCell) -> int:
        """What all lives of a worker have done. Not for LIFE."""
        return sum(section.workers[worker][cell] for section in self.sections)

    def worker_life(self, worker: int) -> int:
        """The newest, of the services that requests have been sent to, that any gateway knows."""
        return max(section.workers[worker][WorkerCell.LIFE] for section in self.sections)

    def recent_batches(self, since_ns: int) -> list[tuple[int, ...]]:
        """What is remembered of all gateways' batches that were answered since then, or are under way, but for those of
        a gateway's former lives: for each the gateway and the cells in the order of `BatchCell`, oldest first."""
        found = [
            (gateway, *cells)
            for gateway, section in enumerate(self.sections)
            for cells in section.batches
            if 0 < section.gauges[Gauge.STARTED_NS] < cells[_BATCH_SENT_NS]
            and (not cells[_BATCH_DONE_NS] or cells[_BATCH_DONE_NS] >= since_ns)
        ]
        return sorted(found, key=lambda batch: batch[1 + BatchCell.SENT_NS])

    def worker_batches_in(self, key: WorkerKey) -> int:
        """Batches that one life of a worker has done, for all gateways. 0 of a life that is over."""
        worker, life = key.incarnation.worker, key.incarnation.life
        lives = (
            lives[worker]
            for section in self.sections
            for cells, lives in zip(section.services, section.lives, strict=True)
            if _service_of(cells) == key.service
        )
        return sum(cells[LifeCell.BATCHES] for cells in lives if cells[LifeCell.LIFE] == life)


def _service_of(cells: "memoryview[int]") -> ServiceKey:
    return ServiceKey(cells[ServiceCell.GENERATION], cells[ServiceCell.MODEL])
