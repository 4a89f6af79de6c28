"""`/metrics`: the shared metrics of all gateways in Prometheus' text format, the same from each of them.

Owns the prefix `vecd_` of the names in `vecd.shm.shared_metrics`, and the labels: their values are workers, gateways,
processes, routes, dialects and statuses, and never anything that a client sends. A new counter or histogram there needs
no change here. `vecd.gateway.telemetry.tei_metrics` writes the metrics named `te_*`. Reads the metrics, changes
nothing. Called by `vecd.gateway.api.system_routes`.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from types import MappingProxyType
from typing import TypeAlias

from prometheus_client import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from vecd.gateway.telemetry.processes import Usage
from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.gateway.telemetry.tei_metrics import render_tei_metrics
from vecd.shm.shared_metrics import Counter, Gauge, Histogram, WorkerCell

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WORKER_STATES = ("ready", "starting", "stuck", "down")
"""The state of a worker in one gateway. "starting": it is up, and not yet connected."""


def render_metrics(
    shared_metrics: SharedMetrics,
    *,
    version: str,
    model: str,
    endpoints: Sequence[tuple[str, str]],
    worker_states: Mapping[int, str] = MappingProxyType({}),
    usages: Mapping[str, Usage] = MappingProxyType({}),
    tei_max_tokens: int | None = None,
) -> bytes:
    """The body of `/metrics`. `endpoints`: route and dialect, by the index that requests are counted under.
    `worker_states`: of WORKER_STATES, by the worker's index. `usages`: of processes, by name. `tei_max_tokens`: the
    model's longest sequence, if the body is to have text-embeddings-inference's metrics, too.

    Takes 2.5 ms, and reads only its arguments and the shared memory, so that a thread can call it. Before, the caller
    publishes the polled gauges, on the event loop.
    """
    ours = generate_latest(
        _Families(
            [
                InfoMetricFamily("vecd", "What is served, by which version", {"version": version, "model": model}),
                _requests(shared_metrics, endpoints),
                *_counters(shared_metrics),
                *_gauges(shared_metrics),
                *_histograms(shared_metrics),
                *_workers(shared_metrics, worker_states),
                *_processes(usages),
            ]
        )
    )
    if tei_max_tokens is None:
        return ours
    return ours + render_tei_metrics(shared_metrics, max_tokens=tei_max_tokens).encode()


class _Families(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


_Samples: TypeAlias = Iterable[tuple[Sequence[object], float]]
"""Of each sample its labels' values, and its own."""


def _counter(name: str, help: str, labels: Iterable[str], samples: _Samples) -> Metric:
    return _with_samples(CounterMetricFamily(f"vecd_{name}", help, labels=list(labels)), samples)


def _gauge(name: str, help: str, labels: Iterable[str], samples: _Samples) -> Metric:
    return _with_samples(GaugeMetricFamily(f"vecd_{name}", help, labels=list(labels)), samples)


def _with_samples(metric: CounterMetricFamily | GaugeMetricFamily, samples: _Samples) -> Metric:
    for values, number in samples:
        metric.add_metric([str(value) for value in values], number)
    return metric


def _requests(shared_metrics: SharedMetrics, endpoints: Sequence[tuple[str, str]]) -> Metric:
    return _counter(
        "requests",
        "HTTP requests answered; status 499: the client went before",
        ["route", "dialect", "status"],
        [((*endpoints[endpoint], status), number) for (endpoint, status), number in shared_metrics.answers().items()],
    )


def _counters(shared_metrics: SharedMetrics) -> Iterator[Metric]:
    for name, counters in groupby(Counter, lambda counter: counter.metric):
        first, *others = counters
        samples = [
            ((*counter.labels.values(),), shared_metrics.total(counter) / counter.per_unit)
            for counter in (first, *others)
        ]
        yield _counter(name, first.help, first.labels, samples)


def _gauges(shared_metrics: SharedMetrics) -> Iterator[Metric]:
    zero_s = time.time() - time.monotonic()
    for gauge in Gauge:
        by_gateway = [((index,), section.gauges[gauge]) for index, section in enumerate(shared_metrics.sections)]
        if gauge.is_summed:
            yield _gauge(gauge.metric, gauge.help, (), [((), shared_metrics.total(gauge) / gauge.per_unit)])
        elif gauge is Gauge.STARTED_NS:  # in seconds since 1970; a gateway that is restarting has none
            started = [(index, round(zero_s + ns / 1e9, 3)) for index, ns in by_gateway if ns]
            yield _gauge(gauge.metric, gauge.help, ["gateway"], started)
        else:
            values = [(index, value / gauge.per_unit) for index, value in by_gateway]
            yield _gauge(gauge.metric, gauge.help, ["gateway"], values)


def _histograms(shared_metrics: SharedMetrics) -> Iterator[Metric]:
    for name, histograms in groupby(Histogram, lambda histogram: histogram.metric):
        first, *others = histograms
        metric = HistogramMetricFamily(f"vecd_{name}", first.help, labels=list(first.labels))
        for histogram in (first, *others):
            counts, total = shared_metrics.histogram(histogram)
            names = [*map(str, histogram.bounds), "+Inf"]
            buckets = list(zip(names, accumulate(counts), strict=True))
            metric.add_metric(list(histogram.labels.values()), buckets, total)
        yield metric


_OF_WORKERS = (
    (WorkerCell.BATCHES, "batches", "Batches embedded by all lives of a worker", 1),
    (WorkerCell.SEQUENCES, "sequences", "Sequences of these", 1),
    (WorkerCell.TOKENS, "tokens", "Tokens of these", 1),
    (WorkerCell.COMPUTE_US, "busy_seconds", "Time spent on them: its rate is the share of the time it was busy", 10**6),
)


def _workers(shared_metrics: SharedMetrics, states: Mapping[int, str]) -> Iterator[Metric]:
    known = shared_metrics.known_workers()
    for cell, name, help, per_unit in _OF_WORKERS:
        totals = [((index,), shared_metrics.worker_total(index, cell) / per_unit) for index in known]
        yield _counter(f"worker_{name}", help, ["worker"], totals)
    restarts = [((index,), shared_metrics.worker_life(index) - 1) for index in known]
    yield _counter("worker_restarts", "Lives of a worker after its first, reloads among them", ["worker"], restarts)
    yield _gauge(
        "worker_state",
        "1 for the state that a worker is in, as the gateway that answers sees it",
        ["worker", "state"],
        [((index, state), state == current) for index, current in states.items() for state in WORKER_STATES],
    )


def _processes(usages: Mapping[str, Usage]) -> Iterator[Metric]:
    def samples(value: Callable[[Usage], float]) -> _Samples:
        return [((name,), value(usage)) for name, usage in usages.items()]

    labels = ["process"]
    yield _counter("process_cpu_seconds", "Processor time of a process", labels, samples(lambda usage: usage.cpu_s))
    resident = samples(lambda usage: usage.resident_bytes)
    yield _gauge("process_resident_bytes", "Memory of a process, with what others have, too", labels, resident)
    help = "Memory of a process, of what n share an n-th: these add up to the server's"
    yield _gauge("process_proportional_bytes", help, labels, samples(lambda usage: usage.proportional_bytes))
