"""One picture of `vecd top`: what a server does, from two of its answers.

Owns the figures: rates, percentiles, shares. Draws nothing, asks nobody, and knows no clock but the server's, which is
in its answers. Where there is nothing to divide by, a figure is None. Called by `vecd.client.top.history`; read by
`vecd.client.top.view`.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from vecd.client.top.stats import STAGES, Distribution, Gateway, Process, Stats, Worker


@dataclass(frozen=True, slots=True)
class Latency:
    """Of the requests that one stage, or all of them, let go."""

    stage: str
    num: float
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class Batches:
    per_s: float | None
    """The rest: of the batches in between."""
    mean_sequences: float | None
    mean_tokens: float | None
    mean_fill: float | None
    """Tokens, of those that there was room for; None, too, where the server does not say."""
    padding_share: float | None
    """Of all tokens computed."""


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
    """Of one core."""


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
class Errors:
    """Answers of one status from 400."""

    status: int
    per_s: float | None
    num: float
    """Since the server began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    version: str
    model: Mapping[str, Any]
    dtype: str | None
    path: str | None
    """How the workers compute."""
    uptime_s: float
    """Of the gateway that has run longest."""
    elapsed_s: float | None
    """What the rates are of; None: there is one answer so far."""
    requests_per_s: float | None
    inputs_per_s: float | None
    tokens_per_s: float | None
    latencies: tuple[Latency, ...]
    errors: tuple[Errors, ...]
    faults: Mapping[str, float]
    """What should not happen, and how often it has since the server began; what has not is left out."""
    queue: Mapping[str, float]
    arena: Mapping[str, float]
    batches: Batches
    workers: tuple[WorkerFigures, ...]
    gateways: tuple[GatewayFigures, ...]
    num_processes: int
    memory_bytes: float
    """Of all processes; what they share counts once."""
    cpu_cores: float | None


def make_frame(before: Stats | None, now: Stats, cpu_before: Stats | None = None) -> Frame:
    """What happened between two answers of one life of a server (`is_same_life`), and what is now.

    `cpu_before`: the answer that processor time is compared with, where it is another than `before`.
    """
    elapsed_s = now.now_s - before.now_s if before is not None else None
    shares = cpu_shares(cpu_before or before, now)
    known = [worker for worker in now.workers if worker.path is not None]
    return Frame(
        version=now.version,
        model=now.model,
        dtype=known[0].dtype if known else None,
        path=known[0].path if known else None,
        uptime_s=max((gateway.uptime_s for gateway in now.gateways), default=0.0),
        elapsed_s=elapsed_s,
        requests_per_s=_rate(_num_answered(before), _num_answered(now), elapsed_s),
        inputs_per_s=_total_rate("inputs", before, now, elapsed_s),
        tokens_per_s=_total_rate("tokens", before, now, elapsed_s),
        latencies=tuple(
            latency_of(stage, before.stages[stage] if before is not None else None, now.stages[stage])
            for stage in STAGES
        ),
        errors=tuple(
            Errors(status, _rate(before.answers.get(status, 0) if before is not None else None, num, elapsed_s), num)
            for status, num in sorted(now.answers.items())
            if status >= 400
        ),
        faults={name: now.totals[name] for name in _FAULTS if now.totals[name]},
        queue=now.queue,
        arena=now.arena,
        batches=_describe_batches(before, now, elapsed_s),
        workers=_describe_workers(before, now, elapsed_s, shares),
        gateways=_describe_gateways(before, now, elapsed_s, shares),
        num_processes=len(now.processes),
        memory_bytes=sum(map(_memory, now.processes.values())),
        cpu_cores=sum(shares.values()) if shares else None,
    )


_FAULTS = ("refused", "expired", "retried", "stuck", "poisoned")


def is_same_life(before: Stats, now: Stats) -> bool:
    """Whether both are of one life of the server: nothing that only grows has gone back."""
    supervisor = before.processes.get("supervisor"), now.processes.get("supervisor")
    if supervisor[0] is not None and supervisor[1] is not None and supervisor[0].pid != supervisor[1].pid:
        return False
    return (
        now.now_s > before.now_s
        and all(now.totals[name] >= number for name, number in before.totals.items())
        and all(now.answers.get(status, 0) >= number for status, number in before.answers.items())
        and all(
            later >= earlier
            for stage in STAGES
            for earlier, later in zip(before.stages[stage].counts, now.stages[stage].counts, strict=False)
        )
        and all(before.stages[stage].bounds == now.stages[stage].bounds for stage in STAGES)
    )


# --- percentiles -----------------------------------------------------------------------------------------------


def latency_of(stage: str, before: Distribution | None, now: Distribution) -> Latency:
    """Of what came in between; nothing while there is no `before`."""
    if before is None:
        return Latency(stage, 0, None, None, None)
    counts = [later - earlier for earlier, later in zip(before.counts, now.counts, strict=True)]
    p50_s, p90_s, p99_s = (percentile(now.bounds, counts, share) for share in (0.5, 0.9, 0.99))
    return Latency(stage, sum(counts), p50_s, p90_s, p99_s)


def percentile(bounds: tuple[float, ...], counts: list[float], share: float) -> float | None:
    """What `share` of the values are below, as if they lay evenly in their bucket, which is what Prometheus'
    histogram_quantile takes them for, too. Above the last bound: that bound. None of nothing."""
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


# --- rates and shares ------------------------------------------------------------------------------------------


def _rate(before: float | None, now: float, elapsed_s: float | None) -> float | None:
    return (now - before) / elapsed_s if before is not None and elapsed_s else None


def _total_rate(name: str, before: Stats | None, now: Stats, elapsed_s: float | None) -> float | None:
    return _rate(before.totals[name] if before is not None else None, now.totals[name], elapsed_s)


def _num_answered(stats: Stats | None) -> Any:
    return sum(stats.answers.values()) if stats is not None else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _describe_batches(before: Stats | None, now: Stats, elapsed_s: float | None) -> Batches:
    if before is None:
        return Batches(None, None, None, None, None)
    batches, sequences, tokens, padding = (
        now.totals[name] - before.totals[name] for name in ("batches", "sequences", "tokens", "padding_tokens")
    )
    fill = None
    if before.batch_fill is not None and now.batch_fill is not None:
        num_sent = sum(now.batch_fill.counts) - sum(before.batch_fill.counts)
        fill = _share(now.batch_fill.sum - before.batch_fill.sum, num_sent)
    return Batches(
        per_s=_rate(0, batches, elapsed_s),
        mean_sequences=_share(sequences, batches),
        mean_tokens=_share(tokens, batches),
        mean_fill=fill,
        padding_share=_share(padding, tokens + padding),
    )


def _describe_workers(
    before: Stats | None, now: Stats, elapsed_s: float | None, shares: Mapping[str, float]
) -> tuple[WorkerFigures, ...]:
    """A worker that was not there before has no rates yet."""
    others = {worker.worker: worker for worker in before.workers} if before is not None else {}
    return tuple(_describe_worker(others.get(w.worker), w, now, elapsed_s, shares) for w in now.workers)


def _describe_worker(
    before: Worker | None, now: Worker, stats: Stats, elapsed_s: float | None, shares: Mapping[str, float]
) -> WorkerFigures:
    busy = _rate(before.busy_s if before is not None else None, now.busy_s, elapsed_s)
    name = f"worker-{now.worker}"
    return WorkerFigures(
        worker=now.worker,
        state=now.state,
        num_restarts=max(0, now.life - 1),
        # A batch counts when it is answered, so that a long one may be more than the time between two answers.
        busy_share=min(1.0, busy) if busy is not None else None,
        batches_per_s=_rate(before.batches if before is not None else None, now.batches, elapsed_s),
        tokens_per_s=_rate(before.tokens if before is not None else None, now.tokens, elapsed_s),
        pid=now.pid,
        memory_bytes=_memory(stats.processes[name]) if name in stats.processes else None,
        cpu_share=shares.get(name),
    )


def _describe_gateways(
    before: Stats | None, now: Stats, elapsed_s: float | None, shares: Mapping[str, float]
) -> tuple[GatewayFigures, ...]:
    others = {gateway.gateway: gateway for gateway in before.gateways} if before is not None else {}
    return tuple(_describe_gateway(others.get(g.gateway), g, now, elapsed_s, shares) for g in now.gateways)


def _describe_gateway(
    before: Gateway | None, now: Gateway, stats: Stats, elapsed_s: float | None, shares: Mapping[str, float]
) -> GatewayFigures:
    name = f"gateway-{now.gateway}"
    return GatewayFigures(
        gateway=now.gateway,
        pid=now.pid,
        uptime_s=now.uptime_s,
        connections=now.connections,
        requests=now.requests,
        answered_per_s=_rate(before.answered if before is not None else None, now.answered, elapsed_s),
        memory_bytes=_memory(stats.processes[name]) if name in stats.processes else None,
        cpu_share=shares.get(name),
    )


def cpu_shares(before: Stats | None, now: Stats) -> dict[str, float]:
    """Of one core, by process; of those that were there before, under the same id."""
    if before is None or now.now_s <= before.now_s:
        return {}
    both = ((name, before.processes.get(name), process) for name, process in now.processes.items())
    return {
        name: max(0.0, later.cpu_s - earlier.cpu_s) / (now.now_s - before.now_s)
        for name, earlier, later in both
        if earlier is not None and earlier.pid == later.pid
    }


def _memory(process: Process) -> float:
    """Where the kernel does not say what is shared, all of it."""
    return process.proportional_bytes or process.resident_bytes
