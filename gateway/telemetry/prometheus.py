"""`/metrics`: the shared metrics of all gateways in Prometheus' text format, the same from each of them.

No label has a value that a client sends. A new counter or histogram of `vecd.shm.shared_metrics` needs no change here.
"""

import asyncio
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.shm.control import UNLOAD_REASONS, ModelIs, ModelState
from vecd.shm.shared_metrics import Counter, Gauge, Histogram, WorkerCell

_KEEP_S = 1.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


class Usage(NamedTuple):
    pid: int
    cpu_s: float
    resident_bytes: int
    proportional_bytes: int
    """Resident memory, where memory that n processes share counts as an n-th: the sum over all processes is right. 0
    where the kernel does not report it."""


class Processes:
    """Reads the usage of processes, in a thread, since each takes about a millisecond, and keeps it for a second."""

    def __init__(self) -> None:
        self._read_at = float("-inf")
        self._usages: dict[str, Usage] = {}
        self._reading = asyncio.Lock()

    async def usages(self, pids: Mapping[str, int]) -> dict[str, Usage]:
        """By the names in `pids`, at most a second old. Ended processes are left out."""
        async with self._reading:
            if time.monotonic() - self._read_at > _KEEP_S or not pids.keys() <= self._usages.keys():
                self._usages = await asyncio.to_thread(_read_all, dict(pids))
                self._read_at = time.monotonic()
            return self._usages


def _read_all(pids: Mapping[str, int]) -> dict[str, Usage]:
    found = {}
    for name, pid in pids.items():
        with suppress(OSError, ValueError, IndexError):  # it has ended, or belongs to another user
            found[name] = read_usage(pid)
    return found


def read_usage(pid: int) -> Usage:
    """The usage of a process. Raises OSError when there is no such process."""
    folder = Path("/proc", str(pid))
    resident = int((folder / "statm").read_bytes().split()[1]) * _PAGE_BYTES
    proportional = 0
    with suppress(OSError):
        if pss := _PSS.search((folder / "smaps_rollup").read_bytes()):
            proportional = int(pss[1]) * 1024
    return Usage(pid, cpu_s(folder), resident, proportional)


def cpu_s(folder: Path) -> float:
    """The processor time of the process with this folder in /proc."""
    # The fields behind the name, which may contain blanks and parentheses.
    fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WORKER_STATES = ("ready", "starting", "stuck", "down")
"""The state of a worker in one gateway. "starting": it is up, and not yet connected."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    status: ModelIs
    workers: Mapping[int, str]
    """The states of its workers, one of WORKER_STATES each, by their index."""
    identities: Mapping[str, str] = field(default_factory=dict)
    """Those that are known, by its name and those of its aliases that have one of their own."""
    changed_files: str = ""
    """"": they are as loaded."""


def render_metrics(
    shared_metrics: SharedMetrics,
    *,
    version: str,
    endpoints: Sequence[tuple[str, str]],
    models: Sequence[ServedModel],
    have_states: bool,
    usages: Mapping[str, Usage] = MappingProxyType({}),
) -> bytes:
    """The body of `/metrics`. `endpoints`: route and dialect, by the index that requests are counted under. `models`:
    all; `have_states`: there are several, or the only one is not loaded all the time. `usages`: of processes, by
    name."""
    names, stated = [each.name for each in models], models if have_states else ()
    told_apart = names if len(names) > 1 else []
    with_workers = (ModelState.READY, ModelState.DRAINING)
    awaited = [each.name for each in stated if each.status.state not in with_workers]
    worker_states = {at: state for each in models if each.name not in awaited for at, state in each.workers.items()}
    known = [((name, each), 1) for model in models for name, each in model.identities.items()]
    files = [((each.name,), bool(each.changed_files)) for each in models]
    families = (
        _gauge(
            "info", "What is served, by which version", [_MODEL, "version"], [((name, version), 1) for name in names]
        ),
        _gauge(
            "model_identity_info",
            "What decides a model's vectors: equal on servers that may be mixed",
            [_MODEL, "identity"],
            known,
        ),
        _gauge("model_files_changed", "1 while files of a model are no longer those that were loaded", [_MODEL], files),
        _requests(shared_metrics, endpoints, told_apart),
        *_counters(shared_metrics, told_apart),
        *_gauges(shared_metrics, told_apart, awaited),
        *_histograms(shared_metrics, told_apart),
        *_workers(shared_metrics, worker_states, models if told_apart else ()),
        *_models(shared_metrics, stated),
        *_attributes("process", _OF_PROCESSES, usages),
    )
    return generate_latest(_Families(families))


class _Families(list[Metric], Collector):
    def collect(self) -> Iterable[Metric]:
        return self


_Samples: TypeAlias = Iterable[tuple[Sequence[object], float]]
"""Of each sample its labels' values, and its own."""


def _counter(name: str, help: str, labels: Iterable[str], samples: _Samples) -> Metric:
    return _with(CounterMetricFamily(f"vecd_{name}", help, labels=[*labels]), samples)


def _gauge(name: str, help: str, labels: Iterable[str], samples: _Samples) -> Metric:
    return _with(GaugeMetricFamily(f"vecd_{name}", help, labels=[*labels]), samples)


def _with(metric: CounterMetricFamily | GaugeMetricFamily, samples: _Samples) -> Metric:
    for values, number in samples:
        metric.add_metric([*map(str, values)], number)
    return metric


# `models`: the names that are told apart by the label `model`; empty: there is no such label.

_MODEL = "model"
_NO_MODEL = ""
"""Of what belongs to none: Prometheus takes an empty label for none."""


def _parts(models: Sequence[str]) -> list[tuple[tuple[str, ...], str | None]]:
    """Of each part of a metric's samples the label's value, if there is one, and what `SharedMetrics` is to count."""
    return [((model,), model) for model in (_NO_MODEL, *models)] if models else [((), None)]


def _label(models: Sequence[str]) -> list[str]:
    return [_MODEL] if models else []


def _requests(shared_metrics: SharedMetrics, endpoints: Sequence[tuple[str, str]], models: Sequence[str]) -> Metric:
    return _counter(
        "requests",
        "HTTP requests answered; status 499: the client went before",
        [*_label(models), "route", "dialect", "status"],
        [
            ((*label, *endpoints[endpoint], status), number)
            for label, model in _parts(models)
            for (endpoint, status), number in shared_metrics.answers(model).items()
        ],
    )


def _counters(shared_metrics: SharedMetrics, models: Sequence[str]) -> Iterator[Metric]:
    for name, counters in groupby(Counter, lambda counter: counter.metric):
        first, *others = counters
        told_apart = models if first.is_of_model else ()
        samples = [
            ((*label, *counter.labels.values()), total / counter.per_unit)
            for label, model in _parts(told_apart)
            for counter in (first, *others)
            if (total := shared_metrics.total(counter, model)) or model != _NO_MODEL
        ]
        yield _counter(name, first.help, [*_label(told_apart), *first.labels], samples)


def _gauges(shared_metrics: SharedMetrics, models: Sequence[str], awaited: Collection[str]) -> Iterator[Metric]:
    """`awaited`: models without workers, which nothing is wrong with."""
    zero_s = time.time() - time.monotonic()
    for gauge in Gauge:
        told_apart = models if gauge.is_of_model else ()
        parts = [(label, model) for label, model in _parts(told_apart) if model != _NO_MODEL]
        if gauge is Gauge.WORKERS and awaited:
            parts = [(label, model) for label, model in parts if model is not None and model not in awaited]
        if gauge.is_summed:
            totals = [(label, shared_metrics.total(gauge, model) / gauge.per_unit) for label, model in parts]
            yield _gauge(gauge.metric, gauge.help, _label(told_apart), totals)
            continue
        values = [
            ((*label, index), value / gauge.per_unit)
            for label, model in parts
            for index, value in enumerate(shared_metrics.by_gateway(gauge, model))
        ]
        if gauge is Gauge.STARTED_NS:  # in seconds since 1970; a gateway that is restarting has none
            values = [(labels, round(zero_s + seconds, 3)) for labels, seconds in values if seconds]
        yield _gauge(gauge.metric, gauge.help, [*_label(told_apart), "gateway"], values)


def _histograms(shared_metrics: SharedMetrics, models: Sequence[str]) -> Iterator[Metric]:
    for name, histograms in groupby(Histogram, lambda histogram: histogram.metric):
        first, *others = histograms
        told_apart = models if first is not Histogram.LOOP_LAG else ()
        metric = HistogramMetricFamily(f"vecd_{name}", first.help, labels=[*_label(told_apart), *first.labels])
        for label, model in _parts(told_apart):
            for histogram in (first, *others):
                counts, total = shared_metrics.histogram(histogram, model)
                if model == _NO_MODEL and not any(counts):
                    continue
                names = [*map(str, histogram.bounds), "+Inf"]
                buckets = list(zip(names, accumulate(counts), strict=True))
                metric.add_metric([*label, *histogram.labels.values()], buckets, total)
        yield metric


_SHARED_HELP = "Memory of a process, of what n share an n-th: these add up to the server's"
_Table: TypeAlias = tuple[tuple[Callable[[str, str, Iterable[str], _Samples], Metric], str, str, str], ...]
"""Of each metric of a thing its name, its help text, and the attribute of the thing that has its value."""
_OF_MODELS: _Table = (
    (_counter, "loads", "Times that a model was loaded", "num_loads"),
    (_counter, "failed_loads", "Loads of a model that failed", "num_failed_loads"),
    (_gauge, "load_seconds", "Duration of the last load of a model; 0 before the first", "load_s"),
    (_gauge, "memory_bytes", "Memory that a model has, or is expected to need", "nbytes"),
)
_OF_PROCESSES: _Table = (
    (_counter, "cpu_seconds", "Processor time of a process", "cpu_s"),
    (_gauge, "resident_bytes", "Memory of a process, with what others have, too", "resident_bytes"),
    (_gauge, "proportional_bytes", _SHARED_HELP, "proportional_bytes"),
)
_OF_WORKERS = (
    (WorkerCell.BATCHES, "batches", "Batches embedded by all lives of a worker", 1),
    (WorkerCell.SEQUENCES, "sequences", "Sequences of these", 1),
    (WorkerCell.TOKENS, "tokens", "Tokens of these", 1),
    (WorkerCell.COMPUTE_US, "busy_seconds", "Time spent on them: its rate is the share of the time it was busy", 10**6),
)


def _workers(
    shared_metrics: SharedMetrics, states: Mapping[int, str], models: Sequence[ServedModel]
) -> Iterator[Metric]:
    known = shared_metrics.known_workers()
    labels = [*_label([each.name for each in models]), "worker"]
    model_of = {worker: each.name for each in models for worker in each.workers}

    def values_of(worker: int) -> tuple[object, ...]:
        return (model_of.get(worker, _NO_MODEL), worker) if models else (worker,)

    for cell, name, help, per_unit in _OF_WORKERS:
        totals = [(values_of(index), shared_metrics.worker_total(index, cell) / per_unit) for index in known]
        yield _counter(f"worker_{name}", help, labels, totals)
    restarts = [(values_of(index), shared_metrics.worker_life(index) - 1) for index in known]
    yield _counter("worker_restarts", "Lives of a worker after its first, reloads among them", labels, restarts)
    yield _gauge(
        "worker_state",
        "1 for the state that a worker is in, as the gateway that answers sees it",
        [*labels, "state"],
        [((*values_of(index), state), state == now) for index, now in states.items() for state in WORKER_STATES],
    )


def _models(shared_metrics: SharedMetrics, models: Sequence[ServedModel]) -> Iterator[Metric]:
    if not models:
        return
    yield _gauge(
        "model_state",
        "1 for the state that a model is in, as the gateway that answers knows it",
        [_MODEL, "state"],
        [((each.name, state), state == each.status.state) for each in models for state in ModelState],
    )
    yield from _attributes(_MODEL, _OF_MODELS, {each.name: each.status for each in models})
    yield _counter(
        "model_unloads",
        "Times that a model was unloaded",
        [_MODEL, "reason"],
        [((each.name, why), each.status.num_unloads.get(why, 0)) for each in models for why in UNLOAD_REASONS],
    )
    waiting = [((each.name,), num_waiting(shared_metrics, each, is_only=len(models) == 1)) for each in models]
    yield _gauge("model_waiting_requests", "Requests that wait until a model is loaded", [_MODEL], waiting)


def num_waiting(shared_metrics: SharedMetrics, model: ServedModel, *, is_only: bool) -> int:
    """Requests that wait until the model is loaded, at all gateways."""
    if model.status.state == ModelState.READY:
        return 0
    return shared_metrics.total(Gauge.REQUESTS, None if is_only else model.name)


def _attributes(label: str, table: _Table, things: Mapping[str, object]) -> Iterator[Metric]:
    for make, name, help, of in table:
        yield make(f"{label}_{name}", help, [label], [((at,), getattr(each, of)) for at, each in things.items()])
