"""The body of `/info`, and parts of it that `/stats` has too. Reads the state of the gateway, changes none of it.

`/info` is about the whole server, whichever gateway answers it. It is for the operator, except for what
`describe_for_tei` returns. Called by `vecd.gateway.api.system_routes` and `vecd.gateway.api.stats`.
"""

import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from vecd.gateway.api.context import Context
from vecd.gateway.api.schemas import BOOLEAN, STRING, Schema, nullable, record
from vecd.gateway.dispatch.worker_link import WorkerLink
from vecd.gateway.scheduling.policy import SHORT_BATCH_S
from vecd.gateway.telemetry.metrics import ServedModel
from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.gateway.types.config import GatewayConfig
from vecd.gateway.types.request import Overflow
from vecd.shm.batch_limits import FULL_BATCH_S
from vecd.shm.card import ModelCard
from vecd.shm.shared_metrics import Gauge


def describe_info(context: Context, *, shows_tenants: bool) -> dict[str, Any]:
    """The body of `/info`: the model, the limits, the workers and the queue. No text, no key, no path, no address.

    `shows_tenants`: the caller may see the names of keys. Side effect: the polled gauges are published.
    """
    config, shared_metrics = context.config, context.shared_metrics
    shared_metrics.publish()
    return {
        **describe_for_tei(context),
        "model": {**describe_model(config), **_identities(context)},
        "limits": {
            "max_inputs": config.max_inputs,
            "max_body_bytes": config.max_body_bytes,
            "max_batch_tokens": config.max_batch_tokens,
            "max_requests": config.max_requests,
            "max_wait_s": config.max_wait_s,
            "max_priority": config.max_priority,
            "overflow": config.overflow,
        },
        "queue": describe_queue(shared_metrics),
        **({"tenants": _describe_tenants(context)} if shows_tenants else {}),
        "cores": context.describe_cores(),
        "workers": [_describe_worker(link, shared_metrics) for link in context.links()],
        "gateway": {
            "gateway": shared_metrics.gateway,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - context.started_at, 1),
        },
        "gateways": describe_gateways(shared_metrics),
    }


def describe_one(context: Context) -> dict[str, Any]:
    """One of several models, as `/info` lists them; what all share is not repeated."""
    config = context.config
    return {
        **describe_model(config),
        **_identities(context),
        "aliases": config.aliases,
        "unavailable": context.why_unavailable(),
        **describe_residence(context),
        "workers": [_describe_worker(link, context.shared_metrics) for link in context.links()],
    }


def describe_residence(context: Context) -> dict[str, Any]:
    """The state of a model, and what operators want to know of its loads."""
    status, expires_in_s = context.residence.status, context.residence.expires_in_s
    expires_at = None if expires_in_s is None else datetime.fromtimestamp(time.time() + expires_in_s, UTC).isoformat()
    return {
        "state": status.state,
        "reason": status.reason or None,
        "bytes": status.nbytes or None,
        "loads": status.num_loads,
        "failed_loads": status.num_failed_loads,
        "load_s": status.load_s or None,
        "unloads": status.num_unloads,
        "keep_alive_s": context.residence.keep_alive_s,
        "expires_at": expires_at if context.residence.is_resident else None,
        "pinned": context.config.is_pinned,
    }


def all_contexts(context: Context) -> Sequence[Context]:
    """Those of all models that are served beside this one, and this one."""
    return (context,) if context.models is None else context.models.all


def served_models(context: Context) -> list[ServedModel]:
    """All models, if there are several, or if the only one is not loaded all the time."""
    config = context.config
    if context.models is None and not config.loads_on_demand and config.keep_alive_s is None:
        return []
    return [
        ServedModel(
            each.config.model,
            each.residence.status,
            {worker: state_of(link) for worker, link in links_of(each)},
        )
        for each in all_contexts(context)
    ]


def known_identities(context: Context) -> dict[str, str]:
    """By the names of all models, and of the aliases that have one of their own."""
    identities = [(each.config.model, each.identity) for each in all_contexts(context)]
    of_aliases = [one for _, identity in identities for one in identity.by_alias.items()]
    return {name: identity.text for name, identity in (*identities, *of_aliases) if identity.text is not None}


def links_of(context: Context) -> list[tuple[int, WorkerLink | None]]:
    """The indices of the model's workers; None for one that is not up."""
    by_worker = {link.incarnation.worker: link for link in context.links()}
    first = context.config.first_worker
    return [(worker, by_worker.get(worker)) for worker in range(first, first + context.config.num_workers)]


def describe_model(config: GatewayConfig) -> dict[str, Any]:
    """The model card, as `/info` and the page show it."""
    card = config.card
    return {
        "id": config.model,
        "architecture": card.model_type,
        "capabilities": card.capabilities,
        **({"labels": card.score.labels} if card.score is not None else {}),
        "dimensions": card.default_dim if _HAVE_VECTORS.intersection(card.capabilities) else None,
        "max_tokens": config.max_tokens,
        "pooling": card.pooling_of_output or None,
        "normalized": _are_normalized(card),
        "prompt": card.prompt,
        "prompts": [name for name, _ in card.prompts],
        **({"alias_defaults": defaults} if (defaults := _alias_defaults(config)) else {}),
        "matryoshka": config.is_matryoshka,
        "matryoshka_dimensions": card.matryoshka_dims,
    }


def _identities(context: Context) -> dict[str, Any]:
    identity = context.identity
    by_alias = {alias: each.text for alias, each in identity.by_alias.items()}
    return {"identity": identity.text, **({"alias_identities": by_alias} if by_alias else {})}


def _alias_defaults(config: GatewayConfig) -> dict[str, dict[str, Any]]:
    return {each.alias: each.given() for each in config.alias_defaults}


def _are_normalized(card: ModelCard) -> bool | None:
    """Whether the model's vectors, or those of its tokens, have length 1; None for a model without vectors."""
    if "dense" not in card.capabilities and card.tokens is None:
        return None
    steps = card.steps if "dense" in card.capabilities or card.tokens is None else card.tokens.steps
    return not card.truncate_dim and any(step.kind == "normalize" for step in steps)


def describe_for_tei(context: Context) -> dict[str, Any]:
    """The fields of text-embeddings-inference's `/info`, which some of its clients read before they send texts: the
    model and the limits, nothing for the operator alone. The dtype is that of a worker that is up."""
    config, card = context.config, context.config.card
    dtypes = [link.facts.get("dtype") for link in context.links()]
    return {
        "model_id": config.model,
        "model_sha": None,
        "model_dtype": next((dtype for dtype in dtypes if dtype), "unknown"),
        "served_model_name": config.model,
        "model_type": _type_for_tei(card),
        "max_concurrent_requests": config.max_requests,
        "max_input_length": _longest_input(config),
        "max_batch_tokens": config.max_batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": config.max_inputs,
        "auto_truncate": Overflow(config.overflow) is not Overflow.ERROR,
        "tokenization_workers": context.threads.num_threads * config.num_gateways,
        "version": config.version,
        "sha": None,
        "docker_label": None,
    }


def _longest_input(config: GatewayConfig) -> int:
    """Tokens of a text that are read; of a multi-vector model, tokens of a document."""
    tokens = config.card.tokens
    return min(config.max_tokens, tokens.document_tokens or config.max_tokens) if tokens else config.max_tokens


def _type_for_tei(card: ModelCard) -> dict[str, Any]:
    """One of the three types of models that text-embeddings-inference has: its clients look for that key, which is the
    only one, and take a model for what they can request from it. So a multi-vector model without dense vectors, which
    text-embeddings-inference has none of, is a reranker without labels."""
    if card.score is None and card.capabilities != ("multi-vector",):
        mode_names = [_TEI_POOLING.get(mode, mode) for mode in card.pooling]
        is_sparse = card.capabilities == ("sparse",)
        return {"embedding": {"pooling": "splade" if is_sparse else "+".join(mode_names)}}
    labels = () if card.score is None else card.score.labels
    names = {"id2label": {str(index): label for index, label in enumerate(labels)}}
    ids = {"label2id": {label: index for index, label in enumerate(labels)}}
    is_reranker = card.score is None or "rerank" in card.capabilities
    return {"reranker" if is_reranker else "classifier": {**names, **ids}}


_TEI_POOLING = {"lasttoken": "last_token"}
_HAVE_VECTORS = frozenset({"dense", "multi-vector"})
"""Capabilities of models whose vectors have dimensions."""
_INTEGER: Schema = {"type": "integer"}
INFO_SCHEMA = record(
    model_id=STRING,
    model_sha=nullable("string"),
    model_dtype=STRING,
    served_model_name=STRING,
    model_type={"type": "object"},
    max_concurrent_requests=_INTEGER,
    max_input_length=_INTEGER,
    max_batch_tokens=_INTEGER,
    max_batch_requests=nullable("integer"),
    max_client_batch_size=_INTEGER,
    auto_truncate=BOOLEAN,
    tokenization_workers=_INTEGER,
    version=STRING,
    sha=nullable("string"),
    docker_label=nullable("string"),
)
"""The schema of the fields of `/info` that every caller sees."""


def _describe_tenants(context: Context) -> dict[str, Any]:
    """The tenants of this gateway. Without keys a tenant is an address, and only their number is shown."""
    keys = []
    for tenant in (holder.tenant for holder in context.principals.with_keys):
        num_requests, queued_tokens = context.load_of(tenant)
        keys.append({"name": tenant, "requests": num_requests, "queued_tokens": queued_tokens})
    return {"present": context.num_tenants(), "keys": keys}


def describe_queue(shared_metrics: SharedMetrics) -> dict[str, Any]:
    return {
        "requests": shared_metrics.total(Gauge.REQUESTS),
        "sequences": shared_metrics.total(Gauge.QUEUED_SEQUENCES),
        "tokens": shared_metrics.total(Gauge.QUEUED_TOKENS),
    }


def describe_gateways(shared_metrics: SharedMetrics) -> list[dict[str, Any]]:
    """A gateway that is being started again has pid 0. `answered` counts over all its lives."""
    now_ns = time.monotonic_ns()
    return [
        {
            "gateway": index,
            "pid": (pid := section.gauges[Gauge.PID]),
            "uptime_s": round((now_ns - section.gauges[Gauge.STARTED_NS]) / 1e9, 1) if pid else 0.0,
            "connections": section.gauges[Gauge.CONNECTIONS],
            "requests": section.gauges[Gauge.REQUESTS],
            "answered": shared_metrics.num_answered_by(section),
        }
        for index, section in enumerate(shared_metrics.sections)
    ]


def state_of(link: WorkerLink | None) -> str:
    """The state of a worker, as this gateway sees it: one of `vecd.gateway.telemetry.metrics.WORKER_STATES`."""
    if link is None:
        return "down"
    if link.is_stuck:
        return "stuck"
    return "ready" if link.is_connected else "starting"


def _describe_worker(link: WorkerLink, shared_metrics: SharedMetrics) -> dict[str, Any]:
    """The state is as this gateway sees it."""
    state = state_of(link)
    return {
        "worker": link.incarnation.worker,
        "life": link.incarnation.life,
        "state": ("busy" if link.in_flight else "idle") if state == "ready" else state,
        "batches": shared_metrics.worker_batches_in(link.key),
        "tokens_per_s": round(link.cost_model.tokens_per_s),
        "batch_tokens": link.cost_model.budget_tokens(FULL_BATCH_S),
        "short_batch_tokens": link.cost_model.budget_tokens(SHORT_BATCH_S),
        **link.facts,
    }
