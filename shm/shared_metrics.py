"""The shared metrics: one anonymous shared-memory file in which each gateway counts, and reads the counts of all.

Owns the geometry, makes the file, and names all its cells: a new counter is one more line of `Counter`. Made once by
the supervisor, which never maps it. Gateways use it through `vecd.gateway.telemetry.measures`.

Memory map, int64 in the machine's byte order throughout; each gateway has one section::

    offset 0            section_nbytes       2 × section_nbytes
    ├── gateway 0 ──────┼── gateway 1 ───────┤   …  num_gateways

    gauges       │ model_names │ counts: num_places ×    │ workers       │ batches       │ up to
    num_places × │ num_places  │ (counters │ answers │   │ num_workers × │ NUM_BATCHES × │ n × 64
    Gauge        │             │ histograms)             │ WorkerCell    │ BatchCell     │

The first place counts what belongs to no model, and has the gauges of the whole gateway; what belongs to a model is
counted at its place, and there alone. A place takes 25 KB, most of it for answers that a model seldom gets: so one code
counts, sums and moves the answers of models and of gateways.

    part              who writes                            at the death of the gateway
    counts, workers   the section's gateway                 they stay; its next life counts on from there, so that
                                                            sums over all sections never decrease
    model_names       the section's gateway, when it is     they stay; its next life finds a model's place by the name
                      ready for a model
    batches           the section's gateway, in a ring      they stay: readers go by their times
    gauges            the section's gateway; while it is    the supervisor clears them (`clear_gauges`)
                      dead, the supervisor

Order: a section has one writer at a time. The supervisor writes only between the end of one life, which it has seen by
a pidfd, and the start of the next. A value is eight bytes at a multiple of eight, stored and loaded by one instruction,
so a reader sees the old or the new value, never half of each. Two values may be of different moments, and no decision
depends on two of them (a batch may be read with the times of the one before it, and a page then shows it wrongly for a
moment): there is no lock, no sequence number, no fence. Sections begin at multiples of 64 bytes, so that two gateways
never write to the same cache line.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from hashlib import blake2b
from typing import Self

from vecd.shm.arena import create_sealed

_BYTES_PER_CELL = 8
_NS_PER_S = 1_000_000_000
_CELLS_PER_CACHE_LINE = 8


class _Cell(IntEnum):
    """A member's number is its place in the class; its attributes are set by the `__init__` of the class."""

    def __new__(cls, *_: object) -> Self:
        cell = int.__new__(cls, len(cls.__members__))
        cell._value_ = len(cls.__members__)
        return cell


_LOOKUPS = "vector_cache_lookups", "Sequences looked up in the vector cache before they are queued"


class Counter(_Cell):
    """What only grows: the name of its metric, its help text, and where several share a metric, the label of each;
    these stand together. `per_unit`: how many of what is stored make one of the metric's unit.

    A new counter is one more line here, and the `SharedMetrics.add` that counts.
    """

    def __init__(self, metric: str, help: str, labels: dict[str, str] | None = None, per_unit: int = 1) -> None:
        self.metric, self.help, self.labels, self.per_unit = metric, help, labels or {}, per_unit

    INPUTS = "inputs", "Inputs of embedding requests that were answered"
    INPUT_TOKENS = "input_tokens", "Tokens of these inputs, as their callers are told"
    REFUSED = "requests_refused", "Embedding requests refused because too much is waiting"
    EXPIRED = "requests_expired", "Embedding requests whose deadline passed before they were answered"
    TOKENS = "tokens", "Tokens embedded"
    SEQUENCES = "sequences", "Sequences embedded"
    PADDING_TOKENS = "padding_tokens", "Tokens computed besides these, because a shape had to be filled"
    BATCHES = "batches", "Batches embedded"
    LEASED_BATCHES = "batches_leased", "Of these, batches that were computed with more than one core"
    COMPUTE_US = "compute_seconds", "Time that workers spent on these batches", None, 1_000_000
    RETRIED = "sequences_retried", "Sequences queued again because their worker was lost"
    COALESCED = "sequences_coalesced", "Sequences that got the row of an identical one"
    STUCK = "workers_stuck", "Workers reported for having let a deadline pass, or for saying what cannot be"
    POISONED = "inputs_poisonous", "Inputs given up because one worker after the other died with them"
    LINES_DROPPED = "log_lines_dropped", "Lines of requests that were left out, because there were too many"
    LINES_LOST = "log_lines_lost", "Lines of gateways' logs that were lost, because they were not read"
    VECTOR_CACHE_HITS = *_LOOKUPS, {"result": "hit"}
    VECTOR_CACHE_MISSES = *_LOOKUPS, {"result": "miss"}
    VECTOR_CACHE_STORED = "vector_cache_stored", "Rows stored in the vector cache"
    VECTOR_CACHE_EVICTED = "vector_cache_evicted", "Rows of the vector cache replaced by others"

    @property
    def is_of_model(self) -> bool:
        """Whether it is counted for each model by itself."""
        return self not in (Counter.LINES_DROPPED, Counter.LINES_LOST)


class Gauge(_Cell):
    """What a gateway has now. `is_summed`: the metric is the sum over all gateways; otherwise each has its own value.
    `per_unit` as in `Counter`."""

    def __init__(self, metric: str, help: str, is_summed: bool = True, per_unit: int = 1) -> None:
        self.metric, self.help, self.is_summed, self.per_unit = metric, help, is_summed, per_unit

    REQUESTS = "requests_in_flight", "Embedding requests admitted and not yet answered"
    QUEUED_SEQUENCES = "queued_sequences", "Sequences that wait for a worker"
    QUEUED_TOKENS = "queued_tokens", "Tokens that wait for a worker"
    IN_FLIGHT_TOKENS = "in_flight_tokens", "Tokens sent to workers and not yet answered"
    CORES_LEASED = "cores_leased", "Cores that batches in flight compute on"
    ARENA_ROWS = "arena_rows", "Rows of shared memory that workers write vectors into"
    ARENA_ROWS_IN_USE = "arena_rows_in_use", "Of these, rows of batches that are computed or encoded"
    QUEUE_AGE_US = "queue_age_seconds", "How long the oldest of what waits for a worker has waited", False, 1_000_000
    OTHERS_USE = (
        "cores_used_by_others",
        "Cores that programs other than the server used in the last second, as far as they are cores of ours",
        False,
        1000,
    )
    VECTOR_CACHE_BYTES = "vector_cache_bytes", "Memory of the vector cache that rows are stored in"
    CONNECTIONS = "connections", "Open connections", False
    WORKERS = "workers_ready", "Workers that the gateway can send batches to", False
    PID = "gateway_pid", "Process id of the gateway; 0 while it is being started again", False
    STARTED_NS = "gateway_start_time_seconds", "When the gateway began", False
    """Stored by `time.monotonic_ns`, which is the same in every process, and which cannot be set."""

    @property
    def is_of_model(self) -> bool:
        return self in (
            Gauge.REQUESTS, Gauge.QUEUED_SEQUENCES, Gauge.QUEUED_TOKENS, Gauge.IN_FLIGHT_TOKENS, Gauge.QUEUE_AGE_US,
            Gauge.WORKERS,
        )  # fmt: skip


_STAGE_BOUNDS_S = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0,
    300.0,
)  # fmt: skip
_STAGE = "request_stage_seconds", "Where the time of answered embedding requests went", _STAGE_BOUNDS_S


class Histogram(_Cell):
    """What is counted by size. A member has several cells: the count of each bucket, then the sum of all values, of
    which `per_unit` make one of the metric's unit. `bounds`: the buckets' upper bounds; what is above the last has a
    bucket of its own. Where several share a metric, they have the label of each, and the same bounds."""

    def __init__(
        self,
        metric: str,
        help: str,
        bounds: tuple[float, ...],
        labels: dict[str, str] | None = None,
        per_unit: int = _NS_PER_S,
    ) -> None:
        self.metric, self.help, self.bounds, self.labels, self.per_unit = metric, help, bounds, labels or {}, per_unit
        self.num_cells = len(bounds) + 2

    LOOP_LAG = (
        "loop_lag_seconds",
        "How late the event loop comes to what is due",
        (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    )
    PARSE = *_STAGE, {"stage": "parse"}
    """From the request's last byte until its body was parsed."""
    TOKENIZE = *_STAGE, {"stage": "tokenize"}
    """From admission until all inputs were tokenized; of a large request, a part was computed meanwhile."""
    QUEUE = *_STAGE, {"stage": "queue"}
    """The wait for admission; and from tokenization, if that was earlier, until the first batch was sent."""
    COMPUTE = *_STAGE, {"stage": "compute"}
    """From then until the last batch was done."""
    ENCODE = *_STAGE, {"stage": "encode"}
    """From then until the response was handed to the connection."""
    TOTAL = *_STAGE, {"stage": "total"}
    """All of it."""
    BATCH_SEQUENCES = (
        "batch_sequences",
        "Sequences of a batch",
        (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0),
        None,
        1,
    )
    BATCH_TOKENS = (
        "batch_tokens",
        "Tokens of a batch",
        (8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0),
        None,
        1,
    )
    BATCH_FILL = (
        "batch_fill_ratio",
        "Tokens of a batch, of those that it had room for",
        (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        None,
        1_000_000,
    )


STATUSES = (
    200, 202, 204, 400, 401, 403, 404, 405, 408, 409, 412, 413, 415, 417, 422, 424, 429, 431, 499, 500, 501, 503, 505,
)  # fmt: skip
"""The HTTP statuses of responses. 499: the client disconnected before it got one."""

MAX_ENDPOINTS = 128
"""A route with a dialect each. The gateways, all of one version, define which and in which order."""


class WorkerCell(IntEnum):
    LIFE = 0
    """The newest, of a generation that new requests were for."""
    BATCHES = 1
    SEQUENCES = 2
    """Of these batches."""
    TOKENS = 3
    COMPUTE_US = 4


NO_MODEL, REMOVED_MODELS = 1, 2
"""The names of what belongs to no model, and of what counts for all models whose places were given to others."""
FIRST_MODEL = 2
"""The first place of a model, behind those of NO_MODEL and REMOVED_MODELS."""


def digest_of(model: str) -> int:
    """What stands for a model's name in the metrics, NO_MODEL for ""; never 0, which is no name, nor REMOVED_MODELS."""
    if not model:
        return NO_MODEL
    return int.from_bytes(blake2b(model.encode(), digest_size=8).digest(), "little", signed=True) | 4


NUM_BATCHES = 128
"""The latest batches of a gateway, which are kept."""


class BatchCell(IntEnum):
    NUMBER = 0
    """Unique within a life of the gateway, over all generations, from 1; 0 where there has been none."""
    WORKER = 1
    SEQUENCES = 2
    TOKENS = 3
    SENT_NS = 4
    """By `time.monotonic_ns`, as all times here."""
    DONE_NS = 5
    """When it was answered; 0 while it is not. One that is lost never is."""
    COMPUTE_US = 6
    """What the worker says it took."""


@dataclass(frozen=True, slots=True)
class SharedMetricsSpec:
    num_gateways: int
    num_workers: int
    """Of all models."""
    num_models: int = 1

    @property
    def num_places(self) -> int:
        """Two for each model, because a reload may replace all of them."""
        return FIRST_MODEL + 2 * self.num_models

    @property
    def cells_of_place(self) -> int:
        """Without its gauges."""
        num_answers = MAX_ENDPOINTS * len(STATUSES)
        return len(Counter) + num_answers + sum(histogram.num_cells for histogram in Histogram)

    @property
    def section_cells(self) -> int:
        cells = self.num_places * (len(Gauge) + 1 + self.cells_of_place)
        cells += self.num_workers * len(WorkerCell) + NUM_BATCHES * len(BatchCell)
        return -(-cells // _CELLS_PER_CACHE_LINE) * _CELLS_PER_CACHE_LINE

    @property
    def nbytes(self) -> int:
        return self.num_gateways * self.section_cells * _BYTES_PER_CELL


@dataclass(frozen=True, slots=True)
class CountingCells:
    """Of one place. Memoryviews of int64, which borrow the memory of the file."""

    gauges: "memoryview[int]"
    """By `Gauge`. The whole gateway's, or those of a model: then of those that are of a model, `Gauge.is_of_model`."""
    counters: "memoryview[int]"
    answers: "memoryview[int]"
    """By endpoint, and then by the place of the status among STATUSES, in one: endpoint × len(STATUSES) + place."""
    histograms: Sequence["memoryview[int]"]


class Section:
    """The cells of one gateway."""

    def __init__(self, cells: "memoryview[int]", spec: SharedMetricsSpec) -> None:
        """`cells`: those of all gateways' file from the section's first one on."""
        take = _cutter(cells)
        self.all_gauges = take(spec.num_places * len(Gauge))
        """By place, and then by `Gauge`, in one."""
        self.model_names = take(spec.num_places)
        """By place: the name, by `digest_of`; 0 where there has been none."""
        self._counts = [take(spec.cells_of_place) for _ in range(spec.num_places)]
        self.workers = [take(len(WorkerCell)) for _ in range(spec.num_workers)]
        """By the worker's index, and then by `WorkerCell`."""
        self.batches = [take(len(BatchCell)) for _ in range(NUM_BATCHES)]
        """A batch's number modulo NUM_BATCHES, and then `BatchCell`."""
        self.at = cache(self._at)  # most places are never used
        self.own = self.at(0)
        """Of what belongs to no model."""
        self.gauges = self.own.gauges

    def _at(self, place: int) -> CountingCells:
        take = _cutter(self._counts[place])
        return CountingCells(
            gauges=self.all_gauges[place * len(Gauge) : (place + 1) * len(Gauge)],
            counters=take(len(Counter)),
            answers=take(MAX_ENDPOINTS * len(STATUSES)),
            histograms=[take(histogram.num_cells) for histogram in Histogram],
        )


def create_shared_metrics(spec: SharedMetricsSpec) -> int:
    return create_sealed("vecd-metrics", spec.nbytes)


def clear_gauges(fd: int, spec: SharedMetricsSpec, gateway: int) -> None:
    """Without mapping the file."""
    nbytes = spec.num_places * len(Gauge) * _BYTES_PER_CELL
    os.pwrite(fd, bytes(nbytes), gateway * spec.section_cells * _BYTES_PER_CELL)


def cut_sections(cells: "memoryview[int]", spec: SharedMetricsSpec) -> list[Section]:
    return [Section(cells[gateway * spec.section_cells :], spec) for gateway in range(spec.num_gateways)]


def _cutter(cells: "memoryview[int]") -> Callable[[int], "memoryview[int]"]:
    start = 0

    def take(num_cells: int) -> "memoryview[int]":
        nonlocal start
        start += num_cells
        return cells[start - num_cells : start]

    return take
