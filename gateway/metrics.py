"""`/metrics`: the board in Prometheus' text format, summed over all gateways, whichever of them answers.

Owns the prefix `vecd_` before the names that `shm.board` gives, and the labels: there are never more of them than
workers, gateways and classes of status. What is called `te_` is written by `gateway.tei_metrics`. Reads the board,
changes nothing. Called by `gateway.own_routes`.
"""

import time
from collections.abc import Iterable, Iterator
from itertools import accumulate, groupby

from prometheus_client import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gateway.board import Board
from gateway.tei_metrics import render_tei_metrics
from shm.board import Counter, Gauge, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(board: Board, *, version: str, model: str, tei_max_tokens: int | None = None) -> bytes:
    """The body of `/metrics`. `tei_max_tokens`: the model's longest sequence, where text-embeddings-inference's metrics
    are to be in it, too. Side effect: the board's polled gauges are published."""
    board.publish()
    ours = generate_latest(_Collector(board, {"version": version, "model": model}))
    return ours if tei_max_tokens is None else ours + render_tei_metrics(board, max_tokens=tei_max_tokens).encode()


class _Collector(Collector):
    def __init__(self, board: Board, info: dict[str, str]) -> None:
        self._board = board
        self._info = info

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily("vecd", "What is served, by which version", self._info)
        yield from self._counters()
        yield from self._gauges()
        yield from self._histograms()
        yield from self._workers()

    def _counters(self) -> Iterator[Metric]:
        for _, counters in groupby(Counter, lambda counter: counter.metric):
            first, *others = counters
            metric = CounterMetricFamily(f"vecd_{first.metric}", first.help, labels=list(first.labels))
            for counter in (first, *others):
                metric.add_metric(list(counter.labels.values()), self._board.total(counter) / counter.per_unit)
            yield metric

    def _gauges(self) -> Iterator[Metric]:
        for gauge in Gauge:
            if gauge is Gauge.STARTED_NS:
                yield self._start_times()
            elif gauge.is_summed:
                yield GaugeMetricFamily(f"vecd_{gauge.metric}", gauge.help, self._board.total(gauge))
            else:
                metric = GaugeMetricFamily(f"vecd_{gauge.metric}", gauge.help, labels=["gateway"])
                for index, row in enumerate(self._board.rows):
                    metric.add_metric([str(index)], row.gauges[gauge])
                yield metric

    def _start_times(self) -> Metric:
        """As seconds since 1970. A gateway that is being started again has none."""
        gauge = Gauge.STARTED_NS
        metric = GaugeMetricFamily(f"vecd_{gauge.metric}", gauge.help, labels=["gateway"])
        zero_s = time.time() - time.monotonic()
        for index, row in enumerate(self._board.rows):
            if started_ns := row.gauges[gauge]:
                metric.add_metric([str(index)], round(zero_s + started_ns / 1e9, 3))
        return metric

    def _histograms(self) -> Iterator[Metric]:
        for histogram in Histogram:
            counts, sum_s = self._board.histogram(histogram)
            names = [*map(str, histogram.bounds_s), "+Inf"]
            buckets = list(zip(names, accumulate(counts), strict=True))
            yield HistogramMetricFamily(f"vecd_{histogram.metric}", histogram.help, buckets, sum_s)

    def _workers(self) -> Iterator[Metric]:
        metric = CounterMetricFamily(
            "vecd_worker_batches", "Batches embedded by all lives of a worker", labels=["worker"]
        )
        for index in self._board.known_workers():
            metric.add_metric([str(index)], self._board.worker_batches(index))
        yield metric
