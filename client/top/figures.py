"""The figures of `vecd top`: rates, percentiles and shares, from two answers of a server.

Owns how they are computed, which answer the last one is compared with, and the past rates. A server that was
started again begins anew. Draws nothing, requests nothing, and knows no clock but the server's, which is in its
answers. A figure without anything to divide by is None. Called by `vecd.client.top.command`; drawn by
`vecd.client.top.view`.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from vecd.client.top.stats import STAGES, Distribution, GatewayStats, ProcessStats, Stats, WorkerStats

NUM_REMEMBERED = 600
"""Answers; more than a terminal has columns."""
_CPU_WINDOW_S = 5.0
"""A server reads the processor time of its processes at most once a second, so shares of less would jump."""
_FAULTS = ("refused", "expired", "retried", "stuck", "poisoned")


@dataclass(frozen=True, slots=True)
class StageLatency:
    """Latency of the requests that finished one stage, or all stages, between two answers."""

    stage: str
    num: float
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """The batches between two answers."""

    per_s: float | None
    mean_sequences: float | None
    mean_tokens: float | None
    mean_fill: float | None
    """Tokens ÷ room for tokens; None also if the server does not say."""
    padding_share: float | None
    """Padding tokens ÷ all tokens computed."""


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    worker: int
    state: str
    num_restarts: int
    busy_share: float | None
    batches_per_s: float | None
    tokens_per_s: float | None
    pid: int | None
    memory_bytes: float | None
    cpu_share: float | None
    """Share of one core."""


@dataclass(frozen=True, slots=True)
class GatewayFigures:
    gateway: int
    pid: int
    uptime_s: float
    connections: float
    requests: float
    answered_per_s: float | None
    memory_bytes: float | None
    cpu_share: float | None


@dataclass(frozen=True, slots=True)
class ErrorFigures:
    """Answers with one status of at least 400."""

    status: int
    per_s: float | None
    num: float
    """Since the start of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFigures:
    """One picture. Its fields are the keys of a line of --json."""

    version: str
    model: Mapping[str, Any]
    dtype: str | None
    path: str | None
    """How the workers compute."""
    uptime_s: float
    """Age of the oldest gateway."""
    elapsed_s: float | None
    """Between the two answers; None with a single one."""
    requests_per_s: float | None
    inputs_per_s: float | None
    tokens_per_s: float | None
    latencies: tuple[StageLatency, ...]
    errors: tuple[ErrorFigures, ...]
    faults: Mapping[str, float]
    """How often what should not happen has happened since the start of the server, without zeros."""
    queue: Mapping[str, float]
    arena: Mapping[str, float]
    batches: BatchFigures
    workers: tuple[WorkerFigures, ...]
    gateways: tuple[GatewayFigures, ...]
    num_processes: int
    memory_bytes: float
    """Memory of all processes; shared pages count once."""
    cpu_cores: float | None


def compute_figures(before: Stats | None, now: Stats, cpu_before: Stats | None = None) -> ServerFigures:
    """What happened between two answers of one life of a server (`is_same_life`), and its state now.

    `cpu_before`: the answer with which processor times are compared, if that is not `before`.
    """
    elapsed_s = now.now_s - before.now_s if before is not None else None
    before = before or now  # nothing has grown, and no rate is known
    shares = _cpu_shares(cpu_before or before, now)

    def rate(earlier: object | None, later: object, name: str) -> float | None:
        """How fast the attribute `name` has grown; None for what is new."""
        return (getattr(later, name) - getattr(earlier, name)) / elapsed_s if earlier and elapsed_s else None

    def growth(earlier: float, later: float) -> float | None:
        return (later - earlier) / elapsed_s if elapsed_s else None

    def process(name: str) -> dict[str, float | None]:
        memory_bytes = _memory(now.processes[name]) if name in now.processes else None
        return {"memory_bytes": memory_bytes, "cpu_share": shares.get(name)}

    def worker_figures(worker: WorkerStats) -> WorkerFigures:
        old = workers_before.get(worker.worker)
        busy = rate(old, worker, "busy_s")
        return WorkerFigures(
            worker=worker.worker,
            state=worker.state,
            num_restarts=max(0, worker.life - 1),
            # A batch counts when it is done, so a long one may be more than the time between two answers.
            busy_share=min(1.0, busy) if busy is not None else None,
            batches_per_s=rate(old, worker, "batches"),
            tokens_per_s=rate(old, worker, "tokens"),
            pid=worker.pid,
            **process(f"worker-{worker.worker}"),
        )

    def gateway_figures(gateway: GatewayStats) -> GatewayFigures:
        return GatewayFigures(
            gateway=gateway.gateway,
            pid=gateway.pid,
            uptime_s=gateway.uptime_s,
            connections=gateway.connections,
            requests=gateway.requests,
            answered_per_s=rate(gateways_before.get(gateway.gateway), gateway, "answered"),
            **process(f"gateway-{gateway.gateway}"),
        )

    workers_before = {worker.worker: worker for worker in before.workers}
    gateways_before = {gateway.gateway: gateway for gateway in before.gateways}
    dtype, path = next(((worker.dtype, worker.path) for worker in now.workers if worker.path), (None, None))
    return ServerFigures(
        version=now.version,
        model=now.model,
        dtype=dtype,
        path=path,
        uptime_s=max((gateway.uptime_s for gateway in now.gateways), default=0.0),
        elapsed_s=elapsed_s,
        requests_per_s=growth(sum(before.answers.values()), sum(now.answers.values())),
        inputs_per_s=growth(before.totals["inputs"], now.totals["inputs"]),
        tokens_per_s=growth(before.totals["tokens"], now.totals["tokens"]),
        latencies=tuple(_latency(stage, before.stages[stage], now.stages[stage]) for stage in STAGES),
        errors=tuple(
            ErrorFigures(status, growth(before.answers.get(status, 0), num), num)
            for status, num in sorted(now.answers.items())
            if status >= 400
        ),
        faults={name: now.totals[name] for name in _FAULTS if now.totals[name]},
        queue=now.queue,
        arena=now.arena,
        batches=_batch_figures(before, now),
        workers=tuple(map(worker_figures, now.workers)),
        gateways=tuple(map(gateway_figures, now.gateways)),
        num_processes=len(now.processes),
        memory_bytes=sum(map(_memory, now.processes.values())),
        cpu_cores=sum(shares.values()) if shares else None,
    )


def _batch_figures(before: Stats, now: Stats) -> BatchFigures:
    batches, sequences, tokens, padding = (
        now.totals[name] - before.totals[name] for name in ("batches", "sequences", "tokens", "padding_tokens")
    )
    fill = None
    if before.batch_fill is not None and now.batch_fill is not None:
        num_sent = sum(now.batch_fill.counts) - sum(before.batch_fill.counts)
        fill = _share(now.batch_fill.sum - before.batch_fill.sum, num_sent)
    return BatchFigures(
        per_s=_share(batches, now.now_s - before.now_s),
        mean_sequences=_share(sequences, batches),
        mean_tokens=_share(tokens, batches),
        mean_fill=fill,
        padding_share=_share(padding, tokens + padding),
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _memory(process: ProcessStats) -> float:
    return process.proportional_bytes or process.resident_bytes


def _cpu_shares(before: Stats, now: Stats) -> dict[str, float]:
    """Shares of one core, by process, for those that were already there under the same id."""
    if now.now_s <= before.now_s:
        return {}
    return {
        name: max(0.0, process.cpu_s - before.processes[name].cpu_s) / (now.now_s - before.now_s)
        for name, process in now.processes.items()
        if name in before.processes and before.processes[name].pid == process.pid
    }


def _latency(stage: str, before: Distribution, now: Distribution) -> StageLatency:
    counts = [later - earlier for earlier, later in zip(before.counts, now.counts, strict=True)]
    p50_s, p90_s, p99_s = (percentile(now.bounds, counts, share) for share in (0.5, 0.9, 0.99))
    return StageLatency(stage, sum(counts), p50_s, p90_s, p99_s)


def percentile(bounds: tuple[float, ...], counts: list[float], share: float) -> float | None:
    """The value that `share` of all values are below, or None without values.

    Values are taken to lie evenly in their bucket, as by histogram_quantile of Prometheus. Above the last bound the
    result is that bound.
    """
    total = sum(counts)
    if total <= 0:
        return None
    sums = list(accumulate(counts))
    bucket = bisect_left(sums, share * total)
    if bucket >= len(bounds):
        return bounds[-1]
    below = sums[bucket - 1] if bucket else 0
    lower = bounds[bucket - 1] if bucket else 0.0
    return lower + (bounds[bucket] - lower) * (share * total - below) / counts[bucket]


# --- from answer to answer ---------------------------------------------------------------------------------------


class Trends(NamedTuple):
    """The rates of the last answers, oldest first."""

    requests_per_s: tuple[float, ...] = ()
    inputs_per_s: tuple[float, ...] = ()
    tokens_per_s: tuple[float, ...] = ()
    num_lives: int = 1
    """Starts of the server that were seen, and the first one."""


class History:
    """`add` each answer, in order."""

    def __init__(self) -> None:
        self._rates: deque[tuple[float, ...]] = deque(maxlen=NUM_REMEMBERED)
        self._recent: deque[Stats] = deque(maxlen=NUM_REMEMBERED)
        """The answers of the last seconds, oldest first."""
        self._num_lives = 1

    def add(self, stats: Stats) -> ServerFigures:
        """What has happened since the last answer."""
        if self._recent and not is_same_life(self._recent[-1], stats):
            self._num_lives += 1
            self._recent.clear()
            self._rates.clear()
        while len(self._recent) > 1 and stats.now_s - self._recent[0].now_s > _CPU_WINDOW_S:
            self._recent.popleft()
        first, last = (self._recent[0], self._recent[-1]) if self._recent else (None, None)
        figures = compute_figures(last, stats, first)
        self._recent.append(stats)
        rates = (figures.requests_per_s, figures.inputs_per_s, figures.tokens_per_s)
        if figures.requests_per_s is not None:
            self._rates.append(tuple(rate or 0.0 for rate in rates))
        return figures

    def trends(self) -> Trends:
        """Until now."""
        requests, inputs, tokens = zip(*self._rates, strict=True) if self._rates else ((), (), ())
        return Trends(requests, inputs, tokens, self._num_lives)


def is_same_life(before: Stats, now: Stats) -> bool:
    """Whether the server has not been started again: no count that only grows has become smaller."""
    supervisors = [stats.processes["supervisor"].pid for stats in (before, now) if "supervisor" in stats.processes]
    return (
        len(set(supervisors)) < 2
        and now.now_s > before.now_s
        and all(now.totals[name] >= number for name, number in before.totals.items())
        and all(now.answers.get(status, 0) >= number for status, number in before.answers.items())
        and all(
            before.stages[stage].bounds == now.stages[stage].bounds
            and all(old <= new for old, new in zip(before.stages[stage].counts, now.stages[stage].counts, strict=True))
            for stage in STAGES
        )
    )
