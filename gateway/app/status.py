"""What the server says of itself: health, `/info`, `/stats`, metrics, the page, and the operator's commands. Only these
change the state of the gateway."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from vecd.base.files import JsonObject
from vecd.gateway.api.answer import json_response
from vecd.gateway.api.fields import BOOLEAN, STRING, Schema, nullable, record
from vecd.gateway.api.operation import Operation
from vecd.gateway.app.app import App
from vecd.gateway.app.routes import ENDPOINTS, Handler, Route, normalize
from vecd.gateway.dispatch.workers import WorkerLink
from vecd.gateway.errors import NotFound
from vecd.gateway.request import HttpRequest, Overflow, Response
from vecd.gateway.scheduling.keys import ANY_SCOPE, Principal
from vecd.gateway.scheduling.policy import SHORT_BATCH_S
from vecd.gateway.service import Service
from vecd.gateway.telemetry.measures import SharedMetrics
from vecd.gateway.telemetry.prometheus import CONTENT_TYPE, ServedModel, Usage, render_metrics
from vecd.model.card import ModelCard
from vecd.shm.control import ModelState, ReloadAsked
from vecd.shm.output import FULL_BATCH_S
from vecd.shm.shared_metrics import Counter, Gauge, Histogram, WorkerCell

_LIMITS = (
    "max_inputs", "max_body_bytes", "max_batch_tokens", "max_requests", "max_wait", "max_priority", "overflow",
)  # fmt: skip


def describe_info(app: App, service: Service, *, shows_tenants: bool) -> JsonObject:
    """The body of `/info`, of the whole server: no text, no key, no path, no address. `shows_tenants`: the caller may
    see the names of keys. Side effect: the polled gauges are published."""
    config, shared_metrics = service.config, service.process.shared_metrics
    shared_metrics.publish()
    return {
        **describe_for_tei(service),
        "model": describe_model(service),
        "limits": {"max_wait_s" if name == "max_wait" else name: getattr(config, name) for name in _LIMITS},
        "queue": describe_queue(shared_metrics),
        **({"tenants": _describe_tenants(app, service)} if shows_tenants else {}),
        "cores": service.process.cores.describe() | {"learned": service.dispatcher.thread_model.describe()},
        "workers": _describe_workers(service),
        "gateway": {
            "gateway": shared_metrics.gateway,
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - service.made_at, 1),
        },
        "gateways": describe_gateways(shared_metrics),
    }


def describe_state(service: Service) -> JsonObject:
    status, expires_at = service.residence.status, service.info.expires_at
    at = None if expires_at is None else datetime.fromtimestamp(expires_at, UTC).isoformat()
    return {
        "id": service.config.model,
        "aliases": service.config.aliases,
        "unavailable": service.why_unavailable(),
        "state": status.state,
        "reason": status.reason or None,
        "bytes": status.nbytes or None,
        "loads": status.num_loads,
        "failed_loads": status.num_failed_loads,
        "load_s": status.load_s or None,
        "unloads": status.num_unloads,
        "keep_alive_s": service.residence.keep_alive_s,
        "expires_at": at if service.residence.is_resident else None,
        "pinned": service.config.pinned,
    }


def shows_models(app: App) -> bool:
    """There are several models, or the only one is not loaded all the time."""
    config = app.active.config
    return app.models.are_several or config.is_loaded_on_demand or config.keep_alive_s is not None


def links_of(service: Service) -> list[tuple[int, WorkerLink | None]]:
    """The indices of the model's workers; None for one that is not up."""
    by_worker = {link.incarnation.worker: link for link in service.dispatcher.links}
    first = service.config.first_worker
    return [(worker, by_worker.get(worker)) for worker in range(first, first + service.config.num_workers)]


def describe_model(service: Service) -> JsonObject:
    """With the identities of the model and of its aliases that have one of their own."""
    config, identity = service.config, service.info.identity
    card, defaults = config.card, {each.alias: each.given() for each in config.alias_defaults}
    by_alias = {alias: each.text for alias, each in identity.by_alias.items()}
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
        **({"alias_defaults": defaults} if defaults else {}),
        "matryoshka": config.is_matryoshka,
        "matryoshka_dimensions": card.matryoshka_dims,
        "identity": identity.text,
        **({"alias_identities": by_alias} if by_alias else {}),
    }


def _are_normalized(card: ModelCard) -> bool | None:
    """Whether the model's vectors, or those of its tokens, have length 1; None for a model without vectors."""
    head = card if "dense" in card.capabilities else card.tokens
    return None if head is None else not card.truncate_dim and any(step.kind == "normalize" for step in head.steps)


def describe_for_tei(service: Service) -> JsonObject:
    """The fields of text-embeddings-inference's `/info`, which some of its clients read before they send texts. The
    dtype is that of a worker that is up."""
    config, card = service.config, service.config.card
    dtypes = [dtype for link in service.dispatcher.links if (dtype := link.facts.get("dtype"))]
    longest = card.tokens.document_tokens if card.tokens else 0
    return {
        "model_id": config.model,
        "model_sha": None,
        "model_dtype": dtypes[0] if dtypes else "unknown",
        "served_model_name": config.model,
        "model_type": _type_for_tei(card),
        "max_concurrent_requests": config.max_requests,
        "max_input_length": min(config.max_tokens, longest or config.max_tokens),
        "max_batch_tokens": config.max_batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": config.max_inputs,
        "auto_truncate": Overflow(config.overflow) is not Overflow.ERROR,
        "tokenization_workers": service.tokenizer.threads.num_threads * config.gateways,
        "version": config.version,
        "sha": None,
        "docker_label": None,
    }


def _type_for_tei(card: ModelCard) -> JsonObject:
    """One of the three types of models that text-embeddings-inference has: its clients look for that key, which is the
    only one, and take a model for what they can request from it. So a multi-vector model without dense vectors, which
    text-embeddings-inference has none of, is a reranker without labels."""
    if card.score is None and card.capabilities != ("multi-vector",):
        pooling = "+".join(card.pooling).replace("lasttoken", "last_token")
        return {"embedding": {"pooling": "splade" if card.capabilities == ("sparse",) else pooling}}
    labels = () if card.score is None else card.score.labels
    names = {"id2label": {str(index): label for index, label in enumerate(labels)}}
    ids = {"label2id": {label: index for index, label in enumerate(labels)}}
    is_reranker = card.score is None or "rerank" in card.capabilities
    return {"reranker" if is_reranker else "classifier": {**names, **ids}}


_HAVE_VECTORS = frozenset({"dense", "multi-vector"})
_INTEGER: Schema = {"type": "integer"}
INFO_SCHEMA = record(
    **dict.fromkeys(("model_id", "model_dtype", "served_model_name", "version"), STRING),
    **dict.fromkeys(("model_sha", "sha", "docker_label"), nullable("string")),
    **dict.fromkeys(
        ("max_concurrent_requests", "max_input_length", "max_batch_tokens", "max_client_batch_size"), _INTEGER
    ),
    max_batch_requests=nullable("integer"),
    tokenization_workers=_INTEGER,
    auto_truncate=BOOLEAN,
    model_type={"type": "object"},
)
"""The schema of the fields of `/info` that every caller sees."""


def _describe_tenants(app: App, service: Service) -> JsonObject:
    """Without keys a tenant is an address, and only their number is shown."""
    keys = [
        {
            "name": holder.tenant,
            "requests": service.admission.num_requests_of(holder.tenant),
            "queued_tokens": service.policy.queued_tokens_of(holder.tenant),
        }
        for holder in app.principals.with_keys
    ]
    return {"present": service.admission.num_tenants, "keys": keys}


def describe_queue(shared_metrics: SharedMetrics) -> JsonObject:
    return {
        "requests": shared_metrics.total(Gauge.REQUESTS),
        "sequences": shared_metrics.total(Gauge.QUEUED_SEQUENCES),
        "tokens": shared_metrics.total(Gauge.QUEUED_TOKENS),
    }


def describe_gateways(shared_metrics: SharedMetrics) -> list[JsonObject]:
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
    """The state of a worker, as this gateway sees it: one of `vecd.gateway.telemetry.prometheus.WORKER_STATES`."""
    if link is None:
        return "down"
    if link.is_stuck:
        return "stuck"
    return "ready" if link.is_connected else "starting"


def _describe_workers(service: Service) -> list[JsonObject]:
    return [
        {
            "worker": link.incarnation.worker,
            "life": link.incarnation.life,
            "state": ("busy" if link.in_flight else "idle") if (state := state_of(link)) == "ready" else state,
            "batches": int(link.slots.num_done[0]),
            "tokens_per_s": round(link.cost_model.tokens_per_s),
            "batch_tokens": link.cost_model.budget_tokens(FULL_BATCH_S),
            "short_batch_tokens": link.cost_model.budget_tokens(SHORT_BATCH_S),
            **link.facts,
        }
        for link in service.dispatcher.links
    ]


# The body of `/stats`: the whole server at one moment, as numbers. The page at `/` and `vecd top` show it.
#
# Each number is a level or only grows, so that the difference of two bodies gives rates and percentiles; nothing that a
# caller sent is in it. Times are of the server's monotonic clock.
#
#   since the server began   requests, totals, stages, batch_tokens, batch_fill (the part of its room that a batch used,
#                            at most 1), the cache's hits and misses; of a model tokens, loads, failed_loads, unloads
#   stages, batch_…          counts of each bucket, the last above all bounds, and the sum of the values
#   workers[].state          as in `vecd_worker_state`, or that of a model that is not loaded
#   batches[]                those under way, whose done_s is null, and those of the last seconds
#   models[]                 only with several, or one that is not loaded all the time; workers: those that are ready

RECENT_S = 5.0
"""Batches that were done in the last seconds, this many, are listed, if the shared metrics still have them."""

_STAGES = {name: Histogram[name.upper()] for name in ("parse", "tokenize", "queue", "compute", "encode", "total")}
_OF_BATCHES = {"batch_tokens": Histogram.BATCH_TOKENS, "batch_fill": Histogram.BATCH_FILL}
_NAMES_OF_TOTALS = (
    "inputs", "input_tokens", "sequences", "tokens", "padding_tokens", "batches", "refused", "expired", "retried",
    "coalesced", "stuck", "poisoned",
)  # fmt: skip
_TOTALS = {
    **{name: Counter[name.upper()] for name in _NAMES_OF_TOTALS},
    "batches_leased": Counter.LEASED_BATCHES,
    "compute_s": Counter.COMPUTE_US,
}


def describe_stats(app: App, service: Service, usages: Mapping[str, Usage]) -> JsonObject:
    """The body of `/stats`. `usages`: of the server's processes. Side effect: the polled gauges are published."""
    config, shared_metrics, of_models = service.config, service.process.shared_metrics, app.of_models
    total, now_ns = shared_metrics.total, time.monotonic_ns()
    shared_metrics.publish()
    models = [
        _describe_load(one, partial(total, model=one.config.model if len(of_models) > 1 else None))
        for one in (of_models if shows_models(app) else ())
    ]
    return {
        "now_s": now_ns / 1e9,
        "model": describe_model(service),
        "server": {
            "version": config.version,
            "num_gateways": config.gateways,
            "gateway": shared_metrics.gateway,
        },
        "requests": [
            {**ENDPOINTS[endpoint]._asdict(), "status": status, "count": num}
            for (endpoint, status), num in shared_metrics.answers().items()
        ],
        "totals": {name: total(counter) / counter.per_unit for name, counter in _TOTALS.items()},
        "stage_bounds_s": Histogram.TOTAL.bounds,
        "stages": {
            name: dict(zip(("counts", "sum_s"), shared_metrics.histogram(histogram), strict=True))
            for name, histogram in _STAGES.items()
        },
        **{
            name: dict(zip(("counts", "sum"), shared_metrics.histogram(each), strict=True), bounds=each.bounds)
            for name, each in _OF_BATCHES.items()
        },
        "queue": {
            **describe_queue(shared_metrics),
            "age_s": max(section.gauges[Gauge.QUEUE_AGE_US] for section in shared_metrics.sections) / 1e6,
        },
        "arena": {"rows": total(Gauge.ARENA_ROWS), "rows_in_use": total(Gauge.ARENA_ROWS_IN_USE)},
        "vector_cache": {
            "max_bytes": config.vector_cache,
            "bytes": total(Gauge.VECTOR_CACHE_BYTES),
            "hits": total(Counter.VECTOR_CACHE_HITS),
            "misses": total(Counter.VECTOR_CACHE_MISSES),
        },
        "workers": [
            _describe_work(one, *each, one.residence.state if models and not one.residence.is_resident else "down")
            for one in of_models
            for each in links_of(one)
        ],
        "gateways": describe_gateways(shared_metrics),
        "batches": [*map(_describe_batch, shared_metrics.recent_batches(now_ns - int(RECENT_S * 1e9)))],
        "processes": {name: usage._asdict() for name, usage in usages.items()},
        **({"models": models} if models else {}),
    }  # fmt: skip


def _describe_load(service: Service, total: Callable[..., int]) -> JsonObject:
    """`total`: of the model's gauges and counters."""
    status, ready = service.residence.status, [link for link in service.dispatcher.links if link.is_usable]
    return {
        "model": service.config.model,
        "state": status.state,
        "reason": status.reason,
        "kind": service.config.card.capabilities[0],
        "workers": len(ready),
        "num_workers": service.config.num_workers,
        "requests": total(Gauge.REQUESTS),
        "queued_tokens": total(Gauge.QUEUED_TOKENS),
        "in_flight_tokens": total(Gauge.IN_FLIGHT_TOKENS),
        "tokens_per_s": round(sum(link.cost_model.tokens_per_s for link in ready)),
        "tokens": total(Counter.TOKENS),
        "bytes": status.nbytes,
        "load_s": status.load_s,
        "wait_s": status.wait_s,
        "loads": status.num_loads,
        "failed_loads": status.num_failed_loads,
        "unloads": status.num_unloads,
    }


def _describe_work(service: Service, worker: int, link: WorkerLink | None, without: str) -> JsonObject:
    """What a worker has done. `without`: the state of one that is not up."""
    shared_metrics = service.process.shared_metrics
    facts, done = {} if link is None else link.facts, partial(shared_metrics.worker_total, worker)
    return {
        "worker": worker,
        "life": shared_metrics.worker_life(worker),
        "state": without if link is None else state_of(link),
        "batches": done(WorkerCell.BATCHES),
        "sequences": done(WorkerCell.SEQUENCES),
        "tokens": done(WorkerCell.TOKENS),
        "busy_s": done(WorkerCell.COMPUTE_US) / 1e6,
        "tokens_per_s": round(link.cost_model.tokens_per_s) if link is not None else 0,
        **{name: facts.get(name) for name in ("pid", "dtype", "path")},
    }


def _describe_batch(batch: tuple[int, ...]) -> JsonObject:
    *numbers, sent_ns, done_ns, compute_us = batch
    return {
        **dict(zip(("gateway", "number", "worker", "sequences", "tokens"), numbers, strict=True)),
        "sent_s": sent_ns / 1e9,
        "done_s": done_ns / 1e9 if done_ns else None,
        "compute_s": compute_us / 1e6,
    }


# The server's own routes, which belong to no dialect: health, figures, documentation, commands of the operator.


async def health(app: App, service: Service, http: HttpRequest, principal: Principal) -> Response:
    """200 only while a worker can serve and the server takes requests. Is about this gateway and its own links to the
    workers, because the caller's requests would go to it, and about the models of `_named_services`."""
    services = _named_services(app, service, http, principal)
    if (reason := _why_unavailable(app, services)) is not None:
        return unavailable(reason)
    changed = [(each.info.model, what) for each in services if (what := each.known.changed_files)]
    files = [what if len(services) == 1 else f"{model}: {what}" for model, what in changed]
    body = {"status": "ok", "model_files": "; ".join(files) or "as loaded"}
    if len(services) == 1 and (app.models.are_several or services[0].residence.is_told):
        body["state"] = services[0].residence.state
    return json_response(200, body)


def _why_unavailable(app: App, services: Sequence[Service]) -> str | None:
    """The reason why no embedding request can be served; None while one can. A model that is loaded on demand and
    cannot be loaded makes the server of others no less available."""
    if len(services) == 1:
        return services[0].why_unavailable()
    needed = [each for each in services if not (each.config.is_loaded_on_demand and each.residence.is_awaited)]
    reasons = [f"{each.info.model}: {reason}" for each in needed if (reason := each.why_unavailable()) is not None]
    return "; ".join(reasons) or (None if app.models.is_complete else "models are loading")


def _named_services(app: App, service: Service, http: HttpRequest, principal: Principal) -> Sequence[Service]:
    """Those of the models that a request is about: of the one that its path, its header or its query names, or else of
    all that its sender reaches. Raises ApiError for an unknown name in the query, whatever the policy is."""
    if not http.may_choose:
        return (service,)
    models, all_services = app.models_for(principal), app.all
    [name, *_] = parse_qs(http.query.decode("ascii", "replace")).get("model", [""])
    if not name:
        return [all_services[info.generation] for info in models.all]
    found = models.find(name)
    if found is None:
        raise models.refusal(name)
    return (all_services[found.generation],)


def unavailable(reason: str, **body: Any) -> Response:
    """What a probe gets while no embedding request can be served."""
    body = body or {"status": "unavailable"}
    return json_response(503, {**body, "reason": reason}, headers={"retry-after": "1"})


LIVE = {"/live": {"status": "ok"}, "/v2/health/live": {"live": True}}
"""By path, the body of its response for as long as the gateway runs."""


async def _live(path: str, *_: object) -> Response:
    return json_response(200, LIVE[path])


async def ready_v2(app: App, service: Service, http: HttpRequest, principal: Principal) -> Response:
    """The same truth as /health, for KServe, which probes the Open Inference Protocol: 503 is what its own servers
    answer, where the protocol only says 4xx."""
    reason = _why_unavailable(app, _named_services(app, service, http, principal))
    return json_response(200, {"ready": True}) if reason is None else unavailable(reason, ready=False)


async def root(app: App, service: Service, http: HttpRequest, principal: Principal) -> Response:
    """The page for a browser, and a health check for other clients: text-embeddings-inference has its health here, and
    Ollama's clients request this path first. The page is the server's, and is not served behind a model's name."""
    if (
        service.config.ui
        and "text/html" in http.headers.get("accept", "")
        and not (http.choice is not None and http.choice.is_by_path)
    ):
        response = _page("page.html")
    elif (response := await health(app, service, http, principal)).status == 200:
        response = Response(200, b"vecd is running", content_type=_TEXT)
    if service.config.ui:
        response.headers["vary"] = "accept"  # a cache must not answer one kind of client with the other's response
    return response


async def info(app: App, service: Service, http: HttpRequest, principal: Principal) -> Response:
    """Operators get everything; other callers get the fields of text-embeddings-inference, which its clients need. Of
    several models it is about the first that the request may mean, with a list of all for operators."""
    services = _named_services(app, service, http, principal)
    service = services[0]
    if not (principal.sees_metrics and (http.is_admin or not service.config.has_admin_listener)):
        return json_response(200, describe_for_tei(service))
    body = describe_info(app, service, shows_tenants=http.is_admin or principal.is_admin)
    if len(services) > 1:
        body["models"] = [
            {**describe_model(each), **describe_state(each), "workers": _describe_workers(each)} for each in services
        ]
    return json_response(200, body)


async def metrics(app: App, service: Service, *_: object) -> Response:
    usages = await _usages(app)
    service.process.shared_metrics.publish()
    render = partial(
        render_metrics,
        service.process.shared_metrics,
        version=service.config.version,
        endpoints=ENDPOINTS,
        models=[*map(_served_model, app.of_models)],
        have_states=shows_models(app),
        usages=usages,
    )
    return Response(200, await asyncio.to_thread(render), content_type=CONTENT_TYPE)


def _served_model(service: Service) -> ServedModel:
    model, identity = service.config.model, service.info.identity
    identities = {model: identity, **identity.by_alias}
    return ServedModel(
        model,
        service.residence.status,
        {worker: state_of(link) for worker, link in links_of(service)},
        {name: each.text for name, each in identities.items() if each.text is not None},
        service.known.changed_files,
    )


async def stats(app: App, service: Service, *_: object) -> Response:
    return json_response(200, describe_stats(app, service, await _usages(app)), headers={"cache-control": "no-store"})


async def _usages(app: App) -> dict[str, Usage]:
    """Of the supervisor, all gateways, the workers that are up, and their fork server."""
    pids = {"supervisor": os.getppid()}
    sections = enumerate(app.process.shared_metrics.sections)
    pids |= {f"gateway-{index}": pid for index, section in sections if (pid := section.gauges[Gauge.PID])}
    for each in app.of_models:
        fork_server = f"forkserver-{each.config.model}" if app.models.are_several else "forkserver"
        for link in each.dispatcher.links:
            pids |= {f"worker-{link.incarnation.worker}": link.facts["pid"], fork_server: link.facts["parent_pid"]}
    return await app.processes.usages(pids)


async def reload(app: App, *_: object) -> Response:
    app.process.send(ReloadAsked())
    return json_response(202, {"status": "reloading"})


async def models(app: App, *_: object) -> Response:
    return json_response(200, {"models": [describe_state(each) for each in app.of_models]})


async def _change_state(action: str, app: App, service: Service, http: HttpRequest, _: object) -> Response:
    """Have a model of the configuration loaded or unloaded: 200 once it is so, 503 if it has failed, and 202
    where the caller does not wait for that. Raises NotFound for all other names."""
    name = normalize(http.path).removeprefix(_MODELS).removesuffix(f"/{action}")
    named = next((each for each in app.of_models if name in each.info.names), None)
    if named is None:
        raise NotFound(
            "No model of the configuration has this name; GET /admin/models lists them", code="model_not_found"
        )
    waits = parse_qs(http.query.decode("ascii", "replace")).get("wait", ["true"])[0].lower() not in ("false", "0")
    is_done = await named.residence.ask(action, named.config.request_timeout if waits else 0.0)
    described = describe_state(named)
    if action == "load" and (reason := named.residence.why_failed()) is not None and is_done:
        return json_response(503, {**described, "status": "failed", "reason": reason})
    return json_response(200 if is_done else 202, described)


async def keys(app: App, *_: object) -> Response:
    """Neither a key nor its digest."""
    described = [holder.describe() for holder in app.principals.with_keys]
    return json_response(200, {"gateway": app.process.shared_metrics.gateway, "keys": described})


async def docs(*_: object) -> Response:
    """A page that shows /openapi.json, for which it asks for a key, and loads nothing else."""
    return _page("docs.html")


def _page(name: str) -> Response:
    data = files("vecd.gateway.app").joinpath("data")
    design = b"<style>\n" + data.joinpath("design.css").read_bytes() + b"</style>"
    page = data.joinpath(name).read_bytes().replace(_LINK_TO_DESIGN, design)
    return Response(200, page, dict(_PAGE_HEADERS), _HTML)


_LINK_TO_DESIGN = b'<link rel="stylesheet" href="design.css">'
_POLICY = (
    # A page contains all of its parts, and sends requests only to its own server.
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    # No other page may embed it, because clicks there would count as clicks here; no text may become markup.
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_PAGE_HEADERS = {
    "content-security-policy": _POLICY,
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

_TEXT = "text/plain; charset=utf-8"
_HTML = "text/html; charset=utf-8"
_STATUS = record(status=STRING)
_HEALTH_STATUS = record(
    "state", "reason", "model_files", status=STRING, state={"enum": [*ModelState]}, reason=STRING, model_files=STRING
)
_OBJECT = {"type": "object"}


def _route(handler: Handler, summary: str, response: Schema, scope: str | None = None, **about: Any) -> Route:
    return Route(handler, scope, Operation(summary=summary, response=response, **about))


_HEALTH = _route(health, "Whether a worker can serve", _HEALTH_STATUS, other_responses={503: _HEALTH_STATUS})
_MODELS = "/admin/models/"
_READY = record("reason", ready=BOOLEAN, reason=STRING)


def _order(action: str, summary: str) -> Route:
    return _route(
        partial(_change_state, action), f"{summary}; ?wait=false does not wait until it is so", _OBJECT, "admin",
        other_responses={202: _OBJECT, 404: _OBJECT, 503: _OBJECT},
    )  # fmt: skip


OWN_ROUTES = {
    "GET /health": _HEALTH,
    "GET /ping": _HEALTH,
    "POST /ping": _HEALTH,
    "GET /live": _route(partial(_live, "/live"), "Whether the gateway runs", _STATUS),
    "GET /": _route(root, "Whether a worker can serve", STRING, media_type=_TEXT),
    "GET /info": _route(
        info, "Describe the model and the limits; to operators the queue and the workers, too", INFO_SCHEMA, ANY_SCOPE
    ),
    "GET /metrics": _route(metrics, "Counters and gauges for Prometheus", STRING, "metrics", media_type=CONTENT_TYPE),
    "GET /stats": _route(stats, "The whole server at this moment, as the page shows it", _OBJECT, "metrics"),
    "POST /admin/reload": _route(reload, "Read the configuration again, as SIGHUP does", _STATUS, "admin", status=202),
    "GET /admin/models": _route(models, "The state of each model", _OBJECT, "admin"),
    "POST /admin/models/*/load": _order("load", "Load a model"),
    "POST /admin/models/*/unload": _order("unload", "Unload a model, even if it is pinned"),
    "GET /admin/keys": _route(keys, "Limits and use of each API key", _OBJECT, "admin"),
    "GET /docs": _route(docs, "A page that shows this document", STRING, media_type=_HTML),
    "GET /v2/health/live": _route(partial(_live, "/v2/health/live"), "Whether the gateway runs", record(live=BOOLEAN)),
    "GET /v2/health/ready": _route(ready_v2, "Whether a worker can serve", _READY, other_responses={503: _READY}),
}
