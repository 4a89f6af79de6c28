"""What the server says of itself: `/health`, `/live`, `/info`. Reads the gateway's state, changes none of it.

`/health` is about this gateway, whom the caller would send requests to: its own links to the workers. `/info` is about
the whole server, whichever gateway answers it, and is for its operator, but for what `describe_for_tei` says.
"""

import os
import time
from typing import TYPE_CHECKING, Any

from vecd.gateway.dispatch.dispatcher import WorkerLink
from vecd.gateway.scheduling.policy import SHORT_BATCH_S
from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.gateway.types.request import Overflow
from vecd.shm.batch_limits import FULL_BATCH_S
from vecd.shm.shared_metrics import Gauge, Row

if TYPE_CHECKING:
    from vecd.gateway.pipeline import Pipeline


def describe_health(app: "Pipeline") -> tuple[int, dict[str, Any]]:
    """Status and body of `/health`: 200 only while a worker can serve and the server takes requests."""
    reason = "the server is shutting down" if app.is_draining else app.dispatcher.why_unavailable()
    if reason is None:
        return 200, {"status": "ok"}
    return 503, {"status": "unavailable", "reason": reason}


def describe_info(app: "Pipeline", *, shows_tenants: bool) -> dict[str, Any]:
    """The body of `/info`: the model, the limits, the workers and what waits. No text, no key, no path, no address; the
    names of keys only if it `shows_tenants`."""
    config, shared_metrics = app.config, app.shared_metrics
    shared_metrics.publish()
    tenants = {"tenants": _describe_tenants(app)} if shows_tenants else {}
    return {
        **describe_for_tei(app),
        "model": describe_model(app),
        "limits": {
            "max_inputs": config.max_inputs,
            "max_body_bytes": config.max_body_bytes,
            "max_batch_tokens": config.max_batch_tokens,
            "max_requests": config.max_requests,
            "max_wait_s": config.max_wait_s,
            "max_priority": config.max_priority,
            "overflow": config.overflow,
        },
        "queue": {
            "requests": shared_metrics.total(Gauge.REQUESTS),
            "sequences": shared_metrics.total(Gauge.QUEUED_SEQUENCES),
            "tokens": shared_metrics.total(Gauge.QUEUED_TOKENS),
        },
        **tenants,
        "workers": [_describe_worker(link, shared_metrics) for link in app.dispatcher.links],
        "gateway": {
            "gateway": shared_metrics.gateway,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - app.started_at, 1),
        },
        "gateways": describe_gateways(shared_metrics),
    }


def describe_model(app: "Pipeline") -> dict[str, Any]:
    """The card, as `/info` and the page show it."""
    config, card = app.config, app.config.card
    return {
        "id": config.model,
        "architecture": card.model_type,
        "dimensions": card.dim,
        "max_tokens": config.max_tokens,
        "pooling": "+".join(card.pooling),
        "normalized": any(step.kind == "normalize" for step in card.steps),
        "prompt": card.prompt,
        "prompts": [name for name, _ in card.prompts],
        "matryoshka": config.is_matryoshka,
        "matryoshka_dimensions": card.matryoshka_dims,
    }


def describe_for_tei(app: "Pipeline") -> dict[str, Any]:
    """What text-embeddings-inference says under `/info`, by its names, which some of its clients read before they send
    texts: the model and the limits, nothing that is for the operator alone. A worker that is up says the dtype."""
    config, card = app.config, app.config.card
    dtypes = [link.facts.get("dtype") for link in app.dispatcher.links]
    return {
        "model_id": config.model,
        "model_sha": None,
        "model_dtype": next((dtype for dtype in dtypes if dtype), "unknown"),
        "served_model_name": config.model,
        "model_type": {"embedding": {"pooling": "+".join(_TEI_POOLING.get(mode, mode) for mode in card.pooling)}},
        "max_concurrent_requests": config.max_requests,
        "max_input_length": config.max_tokens,
        "max_batch_tokens": config.max_batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": config.max_inputs,
        "auto_truncate": Overflow(config.overflow) is not Overflow.ERROR,
        "tokenization_workers": app.tokenizer.threads.num_threads * config.num_gateways,
        "version": config.version,
        "sha": None,
        "docker_label": None,
    }


_TEI_POOLING = {"lasttoken": "last_token"}
_TEI_TYPES: dict[str, Any] = {
    "model_id": "string",
    "model_sha": ["string", "null"],
    "model_dtype": "string",
    "served_model_name": "string",
    "model_type": "object",
    "max_concurrent_requests": "integer",
    "max_input_length": "integer",
    "max_batch_tokens": "integer",
    "max_batch_requests": ["integer", "null"],
    "max_client_batch_size": "integer",
    "auto_truncate": "boolean",
    "tokenization_workers": "integer",
    "version": "string",
    "sha": ["string", "null"],
    "docker_label": ["string", "null"],
}
INFO_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": list(_TEI_TYPES),
    "properties": {name: {"type": kind} for name, kind in _TEI_TYPES.items()},
}
"""Of what everybody sees of `/info`."""


def _describe_tenants(app: "Pipeline") -> dict[str, Any]:
    """Of this gateway. Without keys a tenant is an address, and only how many there are is said."""
    return {
        "present": app.admission.num_tenants,
        "keys": [
            {
                "name": principal.tenant,
                "requests": app.admission.num_requests_of(principal.tenant),
                "queued_tokens": app.policy.queued_tokens_of(principal.tenant),
            }
            for principal in app.callers.with_keys
        ],
    }


def describe_gateways(shared_metrics: SharedMetrics) -> list[dict[str, Any]]:
    return [_describe_gateway(shared_metrics, index, row) for index, row in enumerate(shared_metrics.rows)]


def _describe_gateway(shared_metrics: SharedMetrics, index: int, row: Row) -> dict[str, Any]:
    """A gateway that is being started again has pid 0. What it has answered is of all its lives."""
    pid, started_ns = row.gauges[Gauge.PID], row.gauges[Gauge.STARTED_NS]
    return {
        "gateway": index,
        "pid": pid,
        "uptime_s": round((time.monotonic_ns() - started_ns) / 1e9, 1) if pid else 0.0,
        "connections": row.gauges[Gauge.CONNECTIONS],
        "requests": row.gauges[Gauge.REQUESTS],
        "answered": shared_metrics.num_answered_by(row),
    }


def state_of(link: WorkerLink | None) -> str:
    """Of a worker, as this gateway sees it: one of `vecd.gateway.telemetry.metrics.WORKER_STATES`."""
    if link is None:
        return "down"
    if link.is_stuck:
        return "stuck"
    return "ready" if link.is_connected else "starting"


def _describe_worker(link: WorkerLink, shared_metrics: SharedMetrics) -> dict[str, Any]:
    """Its state is as this gateway sees it."""
    worker, life = link.incarnation.worker, link.incarnation.life
    state = state_of(link)
    return {
        "worker": worker,
        "life": life,
        "state": ("busy" if link.in_flight else "idle") if state == "ready" else state,
        "batches": shared_metrics.worker_batches_in(worker, life),
        "tokens_per_s": round(link.cost_model.tokens_per_s),
        "batch_tokens": link.cost_model.budget_tokens(FULL_BATCH_S),
        "short_batch_tokens": link.cost_model.budget_tokens(SHORT_BATCH_S),
        **link.facts,
    }
