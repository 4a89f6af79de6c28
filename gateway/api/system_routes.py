"""The server's own routes, which belong to no dialect: health, figures, documentation, commands of the operator.

Owns their handlers and their documentation. The bodies are written by `vecd.gateway.api.info`,
`vecd.gateway.api.stats` and `vecd.gateway.telemetry.metrics`. Read by `vecd.gateway.api.registry`.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

import orjson

from vecd.gateway.admission.auth import ANY_SCOPE
from vecd.gateway.admission.principals import Principal
from vecd.gateway.api import schemas
from vecd.gateway.api.context import Context
from vecd.gateway.api.info import (
    INFO_SCHEMA,
    all_contexts,
    describe_for_tei,
    describe_info,
    describe_one,
    describe_residence,
    known_identities,
    links_of,
    served_models,
    state_of,
)
from vecd.gateway.api.operations import Operation
from vecd.gateway.api.routes import Handler, Route, normalize
from vecd.gateway.api.schemas import Schema
from vecd.gateway.api.stats import describe_stats
from vecd.gateway.telemetry.metrics import CONTENT_TYPE, render_metrics
from vecd.gateway.telemetry.processes import Usage
from vecd.gateway.types.errors import NotFound
from vecd.gateway.types.messages import HttpRequest, Response
from vecd.shm.residence import ModelState
from vecd.shm.shared_metrics import Gauge


async def health(context: Context, http: HttpRequest, principal: Principal) -> Response:
    """200 only while a worker can serve and the server takes requests. Is about this gateway and its own links to the
    workers, because the caller's requests would go to it. Where several models are served it is about all of them, or
    about the one that the request names; with an API key that reaches some models alone, about these."""
    reason = why_unavailable(context, http, principal)
    if reason is not None:
        return unavailable(reason)
    contexts = _named_contexts(context, http, principal)
    body = {"status": "ok", "model_files": _describe_files(contexts)}
    if len(contexts) == 1 and (context.models is not None or contexts[0].residence.is_told):
        body["state"] = contexts[0].residence.state
    return _json(200, body)


def _describe_files(contexts: Sequence[Context]) -> str:
    """Which files are no longer those that were loaded, with the models' names if there are several."""
    changed = [(each.model_info.model, what) for each in contexts if (what := each.changed_files())]
    return "; ".join(what if len(contexts) == 1 else f"{model}: {what}" for model, what in changed) or "as loaded"


def why_unavailable(context: Context, http: HttpRequest, principal: Principal) -> str | None:
    """The reason why no embedding request can be served; None while one can. A model that is loaded on demand and
    cannot be loaded makes the server of others no less available. Raises
    ApiError for a model that is not served."""
    contexts = _named_contexts(context, http, principal)
    if len(contexts) == 1:
        return contexts[0].why_unavailable()
    needed = [each for each in contexts if not (each.config.loads_on_demand and each.residence.is_awaited)]
    reasons = [(each.model_info.model, reason) for each in needed if (reason := each.why_unavailable()) is not None]
    if reasons:
        return "; ".join(f"{model}: {reason}" for model, reason in reasons)
    return None if context.models is None or context.models.is_complete else "models are loading"


def _named_contexts(context: Context, http: HttpRequest, principal: Principal) -> Sequence[Context]:
    """Those of the models that a request is about: of the one that its path, its header or its query names, or else of
    all that its sender reaches. Raises ApiError for an unknown name in the query, whatever the policy is."""
    models = context.models_for(principal)
    if models is None or http.choice is None or http.choice.is_made:
        return (context,)
    [name, *_] = parse_qs(http.query.decode("ascii", "replace")).get("model", [""])
    if not name:
        return models.all
    found = models.find(name)
    if found is None:
        raise models.refusal(name)
    return (found,)


def unavailable(reason: str) -> Response:
    """What a probe gets while no embedding request can be served."""
    return _json(503, {"status": "unavailable", "reason": reason}, headers={"retry-after": "1"})


async def live(context: Context, http: HttpRequest, principal: Principal) -> Response:
    return alive()


def alive() -> Response:
    return _json(200, {"status": "ok"})


def _is_by_path(http: HttpRequest) -> bool:
    return http.choice is not None and http.choice.is_by_path


async def root(context: Context, http: HttpRequest, principal: Principal) -> Response:
    """The page for a browser, and a health check for other clients: text-embeddings-inference has its health here, and
    Ollama's clients request this path first. The page is the server's, and is not served behind a model's name."""
    if context.config.has_ui and "text/html" in http.headers.get("accept", "") and not _is_by_path(http):
        response = _page("page.html")
    elif why_unavailable(context, http, principal) is not None:
        response = await health(context, http, principal)
    else:
        response = Response(200, b"vecd is running", content_type=_TEXT)
    if context.config.has_ui:
        response.headers["vary"] = "accept"  # a cache must not answer one kind of client with the other's response
    return response


async def info(context: Context, http: HttpRequest, principal: Principal) -> Response:
    """Operators get everything; other callers get the fields of text-embeddings-inference, which its clients need.
    Where several models are served it is about the one that the request names, or else about the first, with a list of
    all for operators."""
    contexts = _named_contexts(context, http, principal)
    context = contexts[0]
    is_operators = principal.sees_metrics and (http.is_admin or not context.config.has_admin_listener)
    if not is_operators:
        return _json(200, describe_for_tei(context))
    body = describe_info(context, shows_tenants=http.is_admin or principal.is_admin)
    return _json(200, body | ({"models": [*map(describe_one, contexts)]} if len(contexts) > 1 else {}))


async def metrics(context: Context, http: HttpRequest, principal: Principal) -> Response:
    config = context.config
    usages = await _usages(context)
    context.shared_metrics.publish()
    render = partial(
        render_metrics,
        context.shared_metrics,
        version=config.version,
        model=config.model,
        endpoints=context.endpoints,
        models=served_models(context),
        worker_states={worker: state_of(link) for each in all_contexts(context) for worker, link in links_of(each)},
        usages=usages,
        identities=known_identities(context),
        changed_files={each.config.model: each.changed_files() for each in all_contexts(context)},
        tei_max_tokens=config.max_tokens if config.has_tei_metrics else None,
    )
    return Response(200, await asyncio.to_thread(render), content_type=CONTENT_TYPE)


async def stats(context: Context, http: HttpRequest, principal: Principal) -> Response:
    return _json(200, describe_stats(context, await _usages(context)), headers={"cache-control": "no-store"})


async def _usages(context: Context) -> dict[str, Usage]:
    """The usage of the supervisor, all gateways, the workers that are up, and their fork server."""
    pids = {"supervisor": os.getppid()}
    sections = enumerate(context.shared_metrics.sections)
    pids |= {f"gateway-{index}": pid for index, section in sections if (pid := section.gauges[Gauge.PID])}
    for each in all_contexts(context):
        fork_server = "forkserver" if context.models is None else f"forkserver-{each.config.model}"
        for link in each.links():
            pids |= {f"worker-{link.incarnation.worker}": link.facts["pid"], fork_server: link.facts["parent_pid"]}
    return await context.processes.usages(pids)


async def reload(context: Context, http: HttpRequest, principal: Principal) -> Response:
    context.on_reload()
    return _json(202, {"status": "reloading"})


async def models(context: Context, http: HttpRequest, principal: Principal) -> Response:
    return _json(200, {"models": [_describe_state(each) for each in all_contexts(context)]})


async def load(context: Context, http: HttpRequest, principal: Principal) -> Response:
    return await _change_state("load", context, http)


async def unload(context: Context, http: HttpRequest, principal: Principal) -> Response:
    return await _change_state("unload", context, http)


async def park(context: Context, http: HttpRequest, principal: Principal) -> Response:
    return await _change_state("park", context, http)


async def _change_state(action: str, context: Context, http: HttpRequest) -> Response:
    """Have a model of the configuration loaded, unloaded or parked: 200 once it is so, 503 if it has failed, and 202
    where nobody waits for that. Raises NotFound for all other names."""
    name = normalize(http.path).removeprefix(_MODELS).removesuffix(f"/{action}")
    named = next((each for each in all_contexts(context) if name in each.model_info.names), None)
    if named is None:
        raise NotFound(
            "No model of the configuration has this name; GET /admin/models lists them", code="model_not_found"
        )
    waits = parse_qs(http.query.decode("ascii", "replace")).get("wait", ["true"])[0].lower() not in ("false", "0")
    is_done = await named.residence.ask(action, named.config.request_timeout_s if waits else 0.0)
    described = _describe_state(named)
    if action == "load" and (reason := named.residence.why_failed()) is not None and is_done:
        return _json(503, {**described, "status": "failed", "reason": reason})
    return _json(200 if is_done else 202, described)


def _describe_state(context: Context) -> dict[str, Any]:
    return {
        "id": context.model_info.model,
        "aliases": context.model_info.aliases,
        **describe_residence(context),
        "unavailable": context.why_unavailable(),
    }


async def keys(context: Context, http: HttpRequest, principal: Principal) -> Response:
    """The limits and the use of each key, by its name; neither a key nor its digest."""
    return _json(
        200,
        {
            "gateway": context.shared_metrics.gateway,
            "keys": [holder.describe() for holder in context.principals.with_keys],
        },
    )


def _json(status: int, body: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(status, orjson.dumps(body), headers=dict(headers or {}))


async def openapi(context: Context, http: HttpRequest, principal: Principal) -> Response:
    """The document of the listener that the request came by."""
    return Response(200, context.openapi(http, principal))


async def docs(context: Context, http: HttpRequest, principal: Principal) -> Response:
    """A page that shows /openapi.json, for which it asks for a key, and loads nothing else."""
    return _page("docs.html")


def _page(name: str) -> Response:
    data = files("vecd.gateway.api").joinpath("data")
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
_STATUS = schemas.record(status=schemas.STRING)
_HEALTH_STATUS = schemas.record(
    "state", "reason", "model_files", status=schemas.STRING, state={"enum": [*ModelState]}, reason=schemas.STRING,
    model_files=schemas.STRING,
)  # fmt: skip
_OBJECT = {"type": "object"}


def _get(
    handler: Handler, summary: str, response: Schema, *, scope: str | None = None, media_type: str = "application/json"
) -> dict[str, Route]:
    return {"GET": Route(handler, scope, Operation(summary=summary, response=response, media_type=media_type))}


_HEALTH = Route(
    health,
    None,
    Operation(summary="Whether a worker can serve", response=_HEALTH_STATUS, other_responses={503: _HEALTH_STATUS}),
)
_MODELS = "/admin/models/"
_STATE = Operation(summary="", response=_OBJECT, other_responses={202: _OBJECT, 404: _OBJECT, 503: _OBJECT})


def _order(handler: Handler, summary: str) -> dict[str, Route]:
    waits = "; ?wait=false does not wait until it is so"
    return {"POST": Route(handler, "admin", replace(_STATE, summary=summary + waits))}


_RELOAD = Operation(summary="Read the configuration again, as SIGHUP does", response=_STATUS, status=202)
_INFO = "Describe the model and the limits; to operators the queue and the workers, too"
_STATS = "The whole server at this moment, as the page shows it"
_METRICS = "Counters and gauges for Prometheus"

OWN_ROUTES = {
    "/health": {"GET": _HEALTH},
    "/ping": {"GET": _HEALTH, "POST": _HEALTH},
    "/live": _get(live, "Whether the gateway runs", _STATUS),
    "/": _get(root, "Whether a worker can serve", schemas.STRING, media_type=_TEXT),
    "/info": _get(info, _INFO, INFO_SCHEMA, scope=ANY_SCOPE),
    "/metrics": _get(metrics, _METRICS, schemas.STRING, scope="metrics", media_type=CONTENT_TYPE),
    "/stats": _get(stats, _STATS, _OBJECT, scope="metrics"),
    "/admin/reload": {"POST": Route(reload, "admin", _RELOAD)},
    "/admin/models": _get(models, "The state of each model", _OBJECT, scope="admin"),
    "/admin/models/*/load": _order(load, "Load a model"),
    "/admin/models/*/unload": _order(unload, "Unload a model, even if it is pinned"),
    "/admin/models/*/park": _order(park, "End a model's workers, and keep its weights"),
    "/admin/keys": _get(keys, "Limits and use of each API key", _OBJECT, scope="admin"),
    "/openapi.json": _get(openapi, "This document", _OBJECT, scope=ANY_SCOPE),
    "/docs": _get(docs, "A page that shows this document", schemas.STRING, media_type=_HTML),
}
