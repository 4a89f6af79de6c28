"""The board: one anonymous shared-memory file in which every gateway writes what it counts, and reads what all do.

Owns the geometry, the making of the file, and the names of everything on it: a new counter is one more line of
`Counter`. Made once by the supervisor, which never maps it. `gateway.board` is how it is used.

Memory map, int64 of the machine's own byte order throughout::

    offset 0            row_nbytes           2 × row_nbytes
    ├── gateway 0 ──────┼── gateway 1 ───────┤   …  num_gateways
    │ counters │ gauges │ histograms                    │ workers                        │ up to a multiple of 64
    │ Counter  │ Gauge  │ Histogram × (buckets … │ sum)  │ num_workers × WorkerCell       │

    part          who writes                                  a gateway's death
    counters,     the gateway whose row it is                 leaves them; its next life counts on from there, so that
    histograms,                                               sums over all rows never go back
    workers
    gauges        the gateway whose row it is; while it is    clears them (`clear_gauges`)
                  dead, the supervisor

Order: a row has one writer at a time. The supervisor writes only between the end of one life, which it has seen by a
pidfd, and the start of the next. A value is eight bytes at a multiple of eight, stored and loaded by one instruction,
so a reader sees it as it was or as it is, never half of each. Two values may be of different moments, and nobody
decides anything by two of them: there is no lock, no sequence number, no fence. Rows begin at multiples of 64 bytes, so
that two gateways never write to the same line of a cache.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from shm.memory import create_sealed

_BYTES_PER_CELL = 8
_CELLS_PER_CACHE_LINE = 8


class Counter(IntEnum):
    """What only grows: the name of its metric, what it says, and where several share a metric, the label of each; these
    stand together.

    `per_unit` is how many of what is stored make one of the metric's unit.
    """

    metric: str
    help: str
    labels: dict[str, str]
    per_unit: int

    def __new__(cls, metric: str, help: str, labels: dict[str, str] | None = None, per_unit: int = 1) -> "Counter":
        cell = int.__new__(cls, len(cls.__members__))
        cell._value_ = len(cls.__members__)
        cell.metric, cell.help, cell.labels, cell.per_unit = metric, help, labels or {}, per_unit
        return cell

    ANSWERS_2XX = "requests", "HTTP requests answered", {"status": "2xx"}
    ANSWERS_3XX = "requests", "HTTP requests answered", {"status": "3xx"}
    ANSWERS_4XX = "requests", "HTTP requests answered", {"status": "4xx"}
    ANSWERS_5XX = "requests", "HTTP requests answered", {"status": "5xx"}
    REFUSED = "requests_refused", "Embedding requests refused because too much is waiting"
    EXPIRED = "requests_expired", "Embedding requests whose deadline passed before they were answered"
    TOKENS = "tokens", "Tokens embedded"
    SEQUENCES = "sequences", "Sequences embedded"
    BATCHES = "batches", "Batches embedded"
    COMPUTE_US = "compute_seconds", "Time that workers spent on these batches", None, 1_000_000
    RETRIED = "sequences_retried", "Sequences queued again because their worker was lost"
    STUCK = "workers_stuck", "Workers reported for having let a deadline pass, or for saying what cannot be"
    POISONED = "inputs_poisonous", "Inputs given up because one worker after the other died with them"


class Gauge(IntEnum):
    """What a gateway has now. `is_summed`: the metric is the sum over all gateways, else each has its own value."""

    metric: str
    help: str
    is_summed: bool

    def __new__(cls, metric: str, help: str, is_summed: bool = True) -> "Gauge":
        cell = int.__new__(cls, len(cls.__members__))
        cell._value_ = len(cls.__members__)
        cell.metric, cell.help, cell.is_summed = metric, help, is_summed
        return cell

    REQUESTS = "requests_in_flight", "Embedding requests admitted and not yet answered"
    QUEUED_SEQUENCES = "queued_sequences", "Sequences that wait for a worker"
    QUEUED_TOKENS = "queued_tokens", "Tokens that wait for a worker"
    IN_FLIGHT_TOKENS = "in_flight_tokens", "Tokens sent to workers and not yet answered"
    CONNECTIONS = "connections", "Open connections", False
    WORKERS = "workers_ready", "Workers that the gateway can send batches to", False
    PID = "gateway_pid", "Process id of the gateway; 0 while it is being started again", False
    STARTED_NS = "gateway_start_time_seconds", "When the gateway began", False
    """On the board by the clock of `time.monotonic_ns`, which every process reads alike and nobody sets."""


class Histogram(IntEnum):
    """What is counted by size: upper bounds of the buckets in seconds. What is above the last has a bucket of its own.

    In the row: the count of each bucket, then the sum of all values in nanoseconds.
    """

    metric: str
    help: str
    bounds_s: tuple[float, ...]

    def __new__(cls, metric: str, help: str, bounds_s: tuple[float, ...]) -> "Histogram":
        cell = int.__new__(cls, len(cls.__members__))
        cell._value_ = len(cls.__members__)
        cell.metric, cell.help, cell.bounds_s = metric, help, bounds_s
        return cell

    @property
    def num_cells(self) -> int:
        return len(self.bounds_s) + 2

    LOOP_LAG = (
        "loop_lag_seconds",
        "How late the event loop comes to what is due",
        (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    )


class WorkerCell(IntEnum):
    """What a gateway knows of one worker."""

    LIFE = 0
    """The newest incarnation it has been told of."""
    BATCHES = 1
    """Done by all lives together."""
    BATCHES_BEFORE = 2
    """Of these, by lives before the newest."""


@dataclass(frozen=True, slots=True)
class BoardSpec:
    """The geometry of a server's board."""

    num_gateways: int
    num_workers: int

    @property
    def row_cells(self) -> int:
        histograms = sum(histogram.num_cells for histogram in Histogram)
        cells = len(Counter) + len(Gauge) + histograms + self.num_workers * len(WorkerCell)
        return -(-cells // _CELLS_PER_CACHE_LINE) * _CELLS_PER_CACHE_LINE

    @property
    def nbytes(self) -> int:
        return self.num_gateways * self.row_cells * _BYTES_PER_CELL


@dataclass(frozen=True, slots=True)
class Row:
    """One gateway's part of the board, as memoryviews of int64. Each borrows the board's memory."""

    counters: "memoryview[int]"
    """By `Counter`."""
    gauges: "memoryview[int]"
    """By `Gauge`."""
    histograms: Sequence["memoryview[int]"]
    """By `Histogram`."""
    workers: Sequence["memoryview[int]"]
    """By the worker's index, and then by `WorkerCell`."""


def create_board(spec: BoardSpec) -> int:
    """Make a board full of zeros and return its descriptor, which the caller owns. Raises OSError without memory."""
    return create_sealed("vecd-board", spec.nbytes)


def clear_gauges(fd: int, spec: BoardSpec, gateway: int) -> None:
    """Write zeros over the gauges of a gateway that has died, without mapping the board."""
    offset = (gateway * spec.row_cells + len(Counter)) * _BYTES_PER_CELL
    os.pwrite(fd, bytes(len(Gauge) * _BYTES_PER_CELL), offset)


def cut_rows(cells: "memoryview[int]", spec: BoardSpec) -> list[Row]:
    """The rows of a board whose memory is `cells`, int64s."""
    return [_cut_row(cells[n * spec.row_cells : (n + 1) * spec.row_cells], spec) for n in range(spec.num_gateways)]


def _cut_row(cells: "memoryview[int]", spec: BoardSpec) -> Row:
    start = 0

    def take(num_cells: int) -> "memoryview[int]":
        nonlocal start
        start += num_cells
        return cells[start - num_cells : start]

    return Row(
        counters=take(len(Counter)),
        gauges=take(len(Gauge)),
        histograms=[take(histogram.num_cells) for histogram in Histogram],
        workers=[take(len(WorkerCell)) for _ in range(spec.num_workers)],
    )
