"""The body of `/stats`: the whole server at one moment, as numbers. The page at `/` and `vecd top` show it.

Owns the shape of that body. Each number is a level or only grows, so that the difference of two bodies gives rates and
percentiles; nothing that a caller sent is in it. Reads the shared metrics and the links, changes nothing. Called by
`vecd.gateway.api.system_routes`.

    now_s               by the server's monotonic clock, as all times here
    requests[]          route, dialect, status, count                   } since the server began
    totals              inputs, input_tokens, sequences, tokens, padding_tokens, batches, compute_s, refused, expired,
                        retried, coalesced, stuck, poisoned             }
    stages{}            by stage: counts of each bucket (the last: above all bounds), sum_s; `stage_bounds_s`
    batch_tokens{}      the same for the sizes of batches: bounds, counts, sum
    batch_fill{}        the same for the part of its room that each batch used, at most 1
    queue               requests, sequences, tokens, age_s              }
    arena               rows, rows_in_use                               } now
    vector_cache        max_bytes (0: there is none), bytes: now; hits, misses: since the server began
    workers[]           worker, life, state, batches, sequences, tokens, busy_s, pid, dtype, path, tokens_per_s; state:
                        as in `vecd_worker_state`, or that of a model that is not loaded
    gateways[]          gateway, pid, connections, requests, answered, uptime_s
    batches[]           gateway, number, worker, sequences, tokens, sent_s, done_s (null: under way), compute_s;
                        those under way and those of the last seconds
    processes{}         by name: pid, cpu_s, resident_bytes, proportional_bytes
    model, server       what does not change while this generation serves
    models[]            only with several models, or one that is not loaded all the time; of each: model, state, reason,
                        kind (dense, rerank …: the first capability), workers (those that are ready), num_workers,
                        requests, queued_tokens, in_flight_tokens, tokens_per_s (of its ready workers together), bytes,
                        load_s, wait_s: now; tokens, loads, failed_loads, unloads{}: since the server began
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from vecd.gateway.api.context import Context
from vecd.gateway.api.info import (
    all_contexts,
    describe_gateways,
    describe_model,
    describe_queue,
    links_of,
    served_models,
    state_of,
)
from vecd.gateway.telemetry.metrics import ServedModel
from vecd.gateway.telemetry.processes import Usage
from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.shm.shared_metrics import Counter, Gauge, Histogram, WorkerCell

RECENT_S = 5.0
"""Batches that were done in the last so many seconds are listed, if the shared metrics still have them."""

_STAGES = {
    "parse": Histogram.PARSE,
    "tokenize": Histogram.TOKENIZE,
    "queue": Histogram.QUEUE,
    "compute": Histogram.COMPUTE,
    "encode": Histogram.ENCODE,
    "total": Histogram.TOTAL,
}
_TOTALS = {
    "inputs": Counter.INPUTS,
    "input_tokens": Counter.INPUT_TOKENS,
    "sequences": Counter.SEQUENCES,
    "tokens": Counter.TOKENS,
    "padding_tokens": Counter.PADDING_TOKENS,
    "batches": Counter.BATCHES,
    "batches_leased": Counter.LEASED_BATCHES,
    "compute_s": Counter.COMPUTE_US,
    "refused": Counter.REFUSED,
    "expired": Counter.EXPIRED,
    "retried": Counter.RETRIED,
    "coalesced": Counter.COALESCED,
    "stuck": Counter.STUCK,
    "poisoned": Counter.POISONED,
}


def describe_stats(context: Context, usages: Mapping[str, Usage]) -> dict[str, Any]:
    """The body of `/stats`. `usages`: of the server's processes. Side effect: the polled gauges are published."""
    config, shared_metrics, endpoints = context.config, context.shared_metrics, context.endpoints
    now_ns = time.monotonic_ns()
    shared_metrics.publish()
    models = served_models(context)
    return {
        "now_s": now_ns / 1e9,
        "model": describe_model(config),
        "server": {
            "version": config.version,
            "num_gateways": config.num_gateways,
            "gateway": shared_metrics.gateway,
        },
        "requests": [
            {"route": endpoints[endpoint].route, "dialect": endpoints[endpoint].dialect, "status": status, "count": num}
            for (endpoint, status), num in shared_metrics.answers().items()
        ],
        "totals": {name: shared_metrics.total(counter) / counter.per_unit for name, counter in _TOTALS.items()},
        "stage_bounds_s": Histogram.TOTAL.bounds,
        "stages": {name: _histogram(shared_metrics, histogram, "sum_s") for name, histogram in _STAGES.items()},
        "batch_tokens": {
            "bounds": Histogram.BATCH_TOKENS.bounds, **_histogram(shared_metrics, Histogram.BATCH_TOKENS, "sum")
        },
        "batch_fill": {
            "bounds": Histogram.BATCH_FILL.bounds, **_histogram(shared_metrics, Histogram.BATCH_FILL, "sum")
        },
        "queue": {
            **describe_queue(shared_metrics),
            "age_s": max(section.gauges[Gauge.QUEUE_AGE_US] for section in shared_metrics.sections) / 1e6,
        },
        "arena": {
            "rows": shared_metrics.total(Gauge.ARENA_ROWS),
            "rows_in_use": shared_metrics.total(Gauge.ARENA_ROWS_IN_USE),
        },
        "vector_cache": {
            "max_bytes": config.vector_cache,
            "bytes": shared_metrics.total(Gauge.VECTOR_CACHE_BYTES),
            "hits": shared_metrics.total(Counter.VECTOR_CACHE_HITS),
            "misses": shared_metrics.total(Counter.VECTOR_CACHE_MISSES),
        },
        "workers": _describe_workers(context, models),
        "gateways": describe_gateways(shared_metrics),
        "batches": [_describe_batch(*batch) for batch in shared_metrics.recent_batches(now_ns - int(RECENT_S * 1e9))],
        "processes": {name: usage._asdict() for name, usage in usages.items()},
        **({"models": _describe_models(context, models)} if models else {}),
    }  # fmt: skip


def _describe_models(context: Context, models: Sequence[ServedModel]) -> list[dict[str, Any]]:
    shared_metrics = context.shared_metrics
    described = []
    for one, model in zip(all_contexts(context), models, strict=True):
        told_apart = model.name if len(models) > 1 else None
        status, ready = model.status, [link for link in one.links() if link.is_usable]
        described.append(
            {
                "model": model.name,
                "state": status.state,
                "reason": status.reason,
                "kind": one.config.card.capabilities[0],
                "workers": len(ready),
                "num_workers": one.config.num_workers,
                "requests": shared_metrics.total(Gauge.REQUESTS, told_apart),
                "queued_tokens": shared_metrics.total(Gauge.QUEUED_TOKENS, told_apart),
                "in_flight_tokens": shared_metrics.total(Gauge.IN_FLIGHT_TOKENS, told_apart),
                "tokens_per_s": round(sum(link.cost_model.tokens_per_s for link in ready)),
                "tokens": shared_metrics.total(Counter.TOKENS, told_apart),
                "bytes": status.nbytes,
                "load_s": status.load_s,
                "wait_s": status.wait_s,
                "loads": status.num_loads,
                "failed_loads": status.num_failed_loads,
                "unloads": status.num_unloads,
            }
        )
    return described


def _histogram(shared_metrics: SharedMetrics, histogram: Histogram, sum_name: str) -> dict[str, Any]:
    counts, total = shared_metrics.histogram(histogram)
    return {"counts": counts, sum_name: total}


def _describe_workers(context: Context, models: Sequence[ServedModel]) -> list[dict[str, Any]]:
    shared_metrics = context.shared_metrics
    described = []
    of_no_worker = {worker: model.status.state for model in models if not model.has_workers for worker in model.workers}
    for worker, link in (each for one in all_contexts(context) for each in links_of(one)):
        facts = link.facts if link is not None else {}
        described.append(
            {
                "worker": worker,
                "life": shared_metrics.worker_life(worker),
                "state": of_no_worker.get(worker, "down") if link is None else state_of(link),
                "batches": shared_metrics.worker_total(worker, WorkerCell.BATCHES),
                "sequences": shared_metrics.worker_total(worker, WorkerCell.SEQUENCES),
                "tokens": shared_metrics.worker_total(worker, WorkerCell.TOKENS),
                "busy_s": shared_metrics.worker_total(worker, WorkerCell.COMPUTE_US) / 1e6,
                "tokens_per_s": round(link.cost_model.tokens_per_s) if link is not None else 0,
                **{name: facts.get(name) for name in ("pid", "dtype", "path")},
            }
        )
    return described


def _describe_batch(
    gateway: int, number: int, worker: int, sequences: int, tokens: int, sent_ns: int, done_ns: int, compute_us: int
) -> dict[str, Any]:
    return {
        "gateway": gateway,
        "number": number,
        "worker": worker,
        "sequences": sequences,
        "tokens": tokens,
        "sent_s": sent_ns / 1e9,
        "done_s": done_ns / 1e9 if done_ns else None,
        "compute_s": compute_us / 1e6,
    }
