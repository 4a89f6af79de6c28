"""`/metrics`: the shared metrics of all gateways in Prometheus' text format, the same from each of them.

Owns the prefix `vecd_` of the names in `vecd.shm.shared_metrics`, and the labels: their values are workers, gateways,
processes, routes, dialects and statuses, and never anything that a client sends. A new counter or histogram there needs
no change here. `vecd.gateway.telemetry.tei_metrics` writes the metrics named `te_*`. Reads the metrics, changes
nothing. Called by `vecd.gateway.api.system_routes`.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from types import MappingProxyType

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
    collector = _Collector(shared_metrics, {"version": version, "model": model}, endpoints, worker_states, usages)
    ours = generate_latest(collector)
    return (
        ours
        if tei_max_tokens is None
        else ours + render_tei_metrics(shared_metrics, max_tokens=tei_max_tokens).encode()
    )


class _Collector(Collector):
    def __init__(
        self,
        shared_metrics: SharedMetrics,
        info: dict[str, str],
        endpoints: Sequence[tuple[str, str]],
        worker_states: Mapping[int, str],
        usages: Mapping[str, Usage],
    ) -> None:
        self._shared_metrics = shared_metrics
        self._info = info
        self._endpoints = endpoints
        self._worker_states = worker_states
        self._usages = usages

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily("vecd", "What is served, by which version", self._info)
        yield self._requests()
        yield from self._counters()
        yield from self._gauges()
        yield from self._histograms()
        yield from self._workers()
        yield from self._processes()

    def _requests(self) -> Metric:
        metric = CounterMetricFamily(
            "vecd_requests",
            "HTTP requests answered; status 499: the client went before",
            labels=["route", "dialect", "status"],
        )
        for (endpoint, status), number in self._shared_metrics.answers().items():
            metric.add_metric([*self._endpoints[endpoint], str(status)], number)
        return metric

    def _counters(self) -> Iterator[Metric]:
        for _, counters in groupby(Counter, lambda counter: counter.metric):
            first, *others = counters
            metric = CounterMetricFamily(f"vecd_{first.metric}", first.help, labels=list(first.labels))
            for counter in (first, *others):
                metric.add_metric(list(counter.labels.values()), self._shared_metrics.total(counter) / counter.per_unit)
            yield metric

    def _gauges(self) -> Iterator[Metric]:
        for gauge in Gauge:
            if gauge is Gauge.STARTED_NS:
                yield self._start_times()
            elif gauge.is_summed:
                total = self._shared_metrics.total(gauge) / gauge.per_unit
                yield GaugeMetricFamily(f"vecd_{gauge.metric}", gauge.help, total)
            else:
                metric = GaugeMetricFamily(f"vecd_{gauge.metric}", gauge.help, labels=["gateway"])
                for index, section in enumerate(self._shared_metrics.sections):
                    metric.add_metric([str(index)], section.gauges[gauge] / gauge.per_unit)
                yield metric

    def _start_times(self) -> Metric:
        """In seconds since 1970. A gateway that is restarting has none."""
        gauge = Gauge.STARTED_NS
        metric = GaugeMetricFamily(f"vecd_{gauge.metric}", gauge.help, labels=["gateway"])
        zero_s = time.time() - time.monotonic()
        for index, section in enumerate(self._shared_metrics.sections):
            if started_ns := section.gauges[gauge]:
                metric.add_metric([str(index)], round(zero_s + started_ns / 1e9, 3))
        return metric

    def _histograms(self) -> Iterator[Metric]:
        for name, histograms in groupby(Histogram, lambda histogram: histogram.metric):
            first, *others = histograms
            metric = HistogramMetricFamily(f"vecd_{name}", first.help, labels=list(first.labels))
            for histogram in (first, *others):
                counts, total = self._shared_metrics.histogram(histogram)
                names = [*map(str, histogram.bounds), "+Inf"]
                buckets = list(zip(names, accumulate(counts), strict=True))
                metric.add_metric(list(histogram.labels.values()), buckets, total)
            yield metric

    def _workers(self) -> Iterator[Metric]:
        for cell, name, help, per_unit in _OF_WORKERS:
            metric = CounterMetricFamily(f"vecd_worker_{name}", help, labels=["worker"])
            for index in self._shared_metrics.known_workers():
                metric.add_metric([str(index)], self._shared_metrics.worker_total(index, cell) / per_unit)
            yield metric
        metric = CounterMetricFamily(
            "vecd_worker_restarts", "Lives of a worker after its first, reloads among them", labels=["worker"]
        )
        for index in self._shared_metrics.known_workers():
            metric.add_metric([str(index)], self._shared_metrics.worker_life(index) - 1)
        yield metric
        states = GaugeMetricFamily(
            "vecd_worker_state", "1 for the state that a worker is in, as the gateway that answers sees it",
            labels=["worker", "state"],
        )  # fmt: skip
        for index, current in self._worker_states.items():
            for state in WORKER_STATES:
                states.add_metric([str(index), state], float(state == current))
        yield states

    def _processes(self) -> Iterator[Metric]:
        cpu = CounterMetricFamily("vecd_process_cpu_seconds", "Processor time of a process", labels=["process"])
        resident = GaugeMetricFamily(
            "vecd_process_resident_bytes", "Memory of a process, with what others have, too", labels=["process"]
        )
        proportional = GaugeMetricFamily(
            "vecd_process_proportional_bytes",
            "Memory of a process, of what n share an n-th: these add up to the server's",
            labels=["process"],
        )
        for name, usage in self._usages.items():
            cpu.add_metric([name], usage.cpu_s)
            resident.add_metric([name], usage.resident_bytes)
            proportional.add_metric([name], usage.proportional_bytes)
        yield from (cpu, resident, proportional)


_OF_WORKERS = (
    (WorkerCell.BATCHES, "batches", "Batches embedded by all lives of a worker", 1),
    (WorkerCell.SEQUENCES, "sequences", "Sequences of these", 1),
    (WorkerCell.TOKENS, "tokens", "Tokens of these", 1),
    (WorkerCell.COMPUTE_US, "busy_seconds", "Time spent on them: its rate is the share of the time it was busy", 10**6),
)
