"""The HTTP API of a gateway: from an HTTP request to the handler of its route, for the model that it is for.

Owns the table of all routes, the choice of a model by path or header, the headers that all responses have in common,
and the answer before the model is known. A request stays with the generation that it began with; where several models
are served, it counts for all of them until its model is known.
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import product
from typing import NoReturn

import orjson

from vecd.gateway.api.answer import Headers, json_response
from vecd.gateway.api.operation import Dialect, Operation
from vecd.gateway.api.served import HEADER as MODEL_HEADER
from vecd.gateway.api.served import PREFIX, Models, header_value, readings_of
from vecd.gateway.app.handle import Claim, OperationsHandler, claims_of
from vecd.gateway.app.openapi import describe_api
from vecd.gateway.app.routes import ENDPOINTS as ENDPOINTS
from vecd.gateway.app.routes import (
    Route,
    Table,
    endpoint_of,
    find_route,
    methods_at,
    normalize,
    served,
)
from vecd.gateway.app.status import LIVE, OWN_ROUTES, unavailable
from vecd.gateway.config import GatewayConfig
from vecd.gateway.dialects import cohere, ollama, openai, rerank, tei, vllm
from vecd.gateway.errors import ApiError, NotFound, NotReady
from vecd.gateway.request import (
    HEADER,
    OWN,
    Durations,
    HttpRequest,
    ModelChoice,
    Response,
)
from vecd.gateway.scheduling.keys import ANY_SCOPE, Principal
from vecd.gateway.service import Service, Services
from vecd.shm.settings import names_of
from vecd.shm.shared_metrics import MAX_ENDPOINTS

# Cross-origin resource sharing: which web pages may call. Off unless origins are configured. Cookies are never allowed,
# so a page of an allowed origin can do no more than its key. Source: the Fetch standard, "CORS protocol"; "Private
# Network Access" for the one header of it.

ANY = "*"
_METHODS = "GET, HEAD, POST, OPTIONS"
_USUAL_HEADERS = "authorization, content-type"
_MAX_AGE_S = 7200
"""How long a browser may keep the response to a preflight; Chromium keeps none for longer."""
_ALWAYS_EXPOSED = ("x-request-id", "retry-after", "retry-after-ms")
_READABLE_ANYWAY = {"content-type", "content-length", "vary", "access-control-allow-origin"}
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_HEADER_NAMES = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:[ \t]*,[ \t]*[!#$%&'*+.^_`|~0-9A-Za-z-]+)*")


class Cors:
    def __init__(self, origins: Sequence[str]) -> None:
        """`origins`: as in `GatewayConfig.cors_origins`; empty: no page may call."""
        self.preflight_route = Route(self.respond_to_preflight, scope=None)
        """Replaces the route of the path, if the request is a preflight."""
        self._origins = frozenset(map(_as_browsers_write_it, origins))

    def is_preflight(self, request: HttpRequest) -> bool:
        """For a page of an allowed origin."""
        headers = request.headers
        return (
            request.method == "OPTIONS"
            and "access-control-request-method" in headers
            and self._allowed(headers) is not None
        )

    async def respond_to_preflight(self, service: Service, request: HttpRequest, principal: Principal) -> Response:
        """The same at an unknown path, or else the page could not read the 404. The requested headers are allowed by
        name, because "*" would leave out Authorization."""
        requested = request.headers.get("access-control-request-headers", "")
        headers = {
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": requested if _HEADER_NAMES.fullmatch(requested) else _USUAL_HEADERS,
            "access-control-max-age": str(_MAX_AGE_S),
        }
        if request.headers.get("access-control-request-private-network", "").lower() == "true":
            headers["access-control-allow-private-network"] = "true"
        return Response(204, headers=headers)

    def add_headers(self, response: Response, request: HttpRequest | None) -> None:
        """Add the headers that every response to `request` has, errors included; None: it could not be parsed."""
        if not self._origins:
            return
        allowed = self._allowed({"origin": ""} if request is None else request.headers)
        added = {}
        if allowed is not None:
            added["access-control-allow-origin"] = allowed
            if response.status != 204:
                names = [name for name in response.headers if name not in _READABLE_ANYWAY]
                added["access-control-expose-headers"] = ", ".join(dict.fromkeys((*_ALWAYS_EXPOSED, *names)))
        if ANY not in self._origins:
            # Also on responses without the other headers: a cache must not give them to other origins.
            vary = response.headers.get("vary")
            added["vary"] = f"{vary}, origin" if vary else "origin"
        response.headers = {**response.headers, **added}

    def _allowed(self, headers: Headers) -> str | None:
        """The value of Access-Control-Allow-Origin, if there is to be one."""
        origin = headers.get("origin")
        if origin is None:
            return None
        if ANY in self._origins:
            return ANY
        return origin if origin in self._origins else None


def _as_browsers_write_it(origin: str) -> str:
    """In lower case, and without the default port of the scheme."""
    origin = origin.lower()
    return origin.removesuffix(_DEFAULT_PORTS.get(origin.partition(":")[0], ""))


DIALECTS: tuple[Dialect, ...] = (
    openai.DIALECT, vllm.DIALECT, ollama.DIALECT, tei.DIALECT, cohere.DIALECT, rerank.DIALECT,
)  # fmt: skip
"""Of the dialects at one path, the first takes what no other claims."""

_BY_NAME = {dialect.name: dialect for dialect in DIALECTS}


def _make_routes() -> Table:
    """Those of the dialects, and the server's own. Both may be at one path, with different methods."""
    claims: dict[str, list[Claim]] = {}
    by_capability: dict[str, list[str]] = {}
    for dialect in DIALECTS:
        for at, operation in dialect.operations.items():
            path = at.partition(" ")[2]
            claims.setdefault(at, []).append(Claim(dialect, operation, endpoint_of(path, dialect.name)))
            # Errors name no path that holds the name of a model, and none below /openai, which repeats another.
            for capability in operation.needs if "*" not in path and not path.startswith("/openai/") else ():
                by_capability.setdefault(capability, []).append(path)
    about = Operation(summary="This document", response={"type": "object"})
    own = {**OWN_ROUTES, "GET /openapi.json": Route(openapi, ANY_SCOPE, about)}
    table: dict[str, dict[str, Route]] = {}
    for at in (*claims, *own):
        method, _, path = at.partition(" ")
        if (theirs := claims.get(at)) is not None:
            route = Route(OperationsHandler(tuple(theirs), path, by_capability), endpoint=theirs[0].endpoint)
        else:
            route = own[at]._replace(endpoint=endpoint_of(path, OWN))
        table.setdefault(path, {})[method] = route
    return table


async def openapi(service: Service, http: HttpRequest, principal: Principal) -> Response:
    """The OpenAPI document of the listener that `http` came by: of the model that it names, or of all that its sender
    reaches. Kept until keys or models change, because to make one takes 10 to 20 ms of the loop."""
    services, choice, are_several = service.services, http.choice, http.may_choose
    infos = service.models_for(principal).all if are_several else (service.info,)
    is_by_path, documents = choice is not None and choice.is_by_path, services.documents
    key = (http.is_admin, is_by_path, are_several, tuple(info.model for info in infos))
    if key not in documents:
        have_keys = services.principals.have_keys
        table = _tables(services.active.config.has_admin_listener, have_keys)[http.is_admin, is_by_path]
        prefix = "" if choice is None or are_several else f"{PREFIX}{service.info.model}"
        document = describe_api(table, infos, has_keys=have_keys, prefix=prefix, are_several=are_several)
        if len(documents) >= _MAX_DOCUMENTS:
            del documents[next(iter(documents))]
        documents[key] = orjson.dumps(document)
    return Response(200, documents[key])


_MAX_DOCUMENTS = 8
"""Of some 0.6 MB each: by listener, by prefix, and by the models that keys reach."""

ROUTES = _make_routes()


@cache
def _tables(has_admin_listener: bool, has_keys: bool) -> Mapping[tuple[bool, ...], Table]:
    """What is served, by whether the admin listener serves it, and by whether the path names a model."""
    place = partial(served, ROUTES, has_admin_listener=has_admin_listener, has_keys=has_keys)
    return {each: place(is_admin=each[0], is_by_path=each[1]) for each in product((False, True), repeat=2)}


assert len(ENDPOINTS) <= MAX_ENDPOINTS


def render_error(error: ApiError, path: str | None, table: Table) -> Response:
    """In the shape of the request's dialect, or in OpenAI's if the dialect is not known."""
    dialect = _BY_NAME.get(error.dialect) if error.dialect is not None else _dialect_at(path, table)
    response = (dialect or openai.DIALECT).render_error(error)
    response.headers.update(error.headers)
    return response


def _dialect_at(path: str | None, table: Table) -> Dialect | None:
    if path is None:
        return None
    for route in (methods_at(table, path) or {}).values():
        for claim in claims_of(route):
            return claim.dialect
    return next((dialect for dialect in DIALECTS if dialect.prefix and path.startswith(dialect.prefix)), None)


_LARGE_BODY_BYTES = 64 * 1024
_UNKNOWN_KEY = 401
"""The status of responses that tell no model's name."""
_MODELS_TIMEOUT_S = 10.0
"""How long a request waits for models that are still to come. A gateway that is started again has read the tokenizers
of all models within a second or two."""

_TIMING_HEADER = "x-vecd-timing"
"""A request with this header, whatever its value, gets a response with `server-timing`."""


class App:
    """The `vecd.gateway.http.connection.Application` that the server serves."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.begin_trace: Callable[[HttpRequest], None] | None = None
        """Called with each request that is complete, before it is handled."""
        self.change(services.active.config)

    def change(self, config: GatewayConfig) -> None:
        """Apply the configuration of the first model, which is the server's."""
        self._cors = Cors(names_of(config.cors_origins))
        self._has_admin_listener = config.has_admin_listener

    # --- what the server calls ------------------------------------------------------------------------------

    def check_head(self, request: HttpRequest) -> Response | None:
        """Refuse what can be refused before the body has arrived. Raises ApiError."""
        models, path = self.services.models, request.path
        if models.is_complete or not path.startswith(PREFIX) or models.split(path) is not None:
            self._check_head(self._enter(request), request)
        else:  # its model may be still to come, and the body arrives meanwhile
            request.path = self._likeliest_reading(path)[1]
            self._check_head(self.services.active, request)
            request.path = path
        return None

    async def handle(self, request: HttpRequest) -> Response:
        services = self.services
        if not services.models.is_complete:
            await self._await_models(request)
        if self.begin_trace is not None:
            self.begin_trace(request)
        service, choice = self._enter(request), request.choice
        if choice is None or choice.is_made:
            held = [service]
        else:
            held = [*services.of_models]

            def keep(model: str) -> None:
                for each in [each for each in held if each.config.model != model]:
                    held.remove(each)
                    each.num_handled -= 1

            choice.on_chosen = keep
        for each in held:
            each.num_handled += 1
        try:
            route, principal = self._find(service, request)
            request.timeline.principal = principal.name
            return await route.handler(service, request, principal)
        finally:
            for each in held:
                each.num_handled -= 1

    def render_error(self, error: ApiError, path: str | None) -> Response:
        return render_error(error, path, self._table())

    def add_headers(self, response: Response, request: HttpRequest | None) -> None:
        if request is None:
            self._cors.add_headers(response, None)
            return
        timeline, identity = request.timeline, request.identity
        if timeline.model and response.status != _UNKNOWN_KEY:
            response.headers[MODEL_HEADER] = header_value(timeline.model)
        if identity is not None and identity.text is not None:
            response.headers[HEADER] = identity.text
        self._cors.add_headers(response, request)
        if _TIMING_HEADER in request.headers and timeline.is_embedded:
            response.headers["server-timing"] = _server_timing(timeline.durations(time.monotonic()))

    # --- the route and the sender ---------------------------------------------------------------------------

    def _check_head(self, service: Service, request: HttpRequest) -> None:
        """Raises ApiError."""
        route, principal = self._find(service, request)
        if route.scope == "embed" and _is_large(request):
            principal.check_quota()  # a small body is read all the same, so that the client keeps its connection

    def _find(self, service: Service, request: HttpRequest) -> tuple[Route, Principal]:
        """Raises ApiError. Takes 4 µs. Called twice for a request that arrives in parts, because its key may have been
        removed before the last one."""
        if self._cors.is_preflight(request):
            route = self._cors.preflight_route
        else:
            choice = request.choice
            table = self._table(is_admin=request.is_admin, is_by_path=choice is not None and choice.is_by_path)
            route = find_route(table, request.method, request.path)
            request.timeline.endpoint = route.endpoint
        principal = self.services.principals.identify(
            request.headers, request.client, route.scope, is_admin=request.is_admin
        )
        reached = principal.models
        if reached is not None and route.scope in ("embed", ANY_SCOPE) and service.config.model not in reached:
            # None that the key reaches is served: a configuration and its keys take effect one after the other.
            if not self.services.models.is_complete:
                raise self.services.models.refusal("")
            raise NotFound("No model that this API key may use is served", code="model_not_found")
        return route, principal

    def _table(self, *, is_admin: bool = False, is_by_path: bool = False) -> Table:
        """The routes of a listener; `is_by_path`: those of a path that names a model."""
        tables = _tables(self._has_admin_listener, self.services.principals.have_keys)
        return tables[is_admin, is_by_path]

    # --- several models -------------------------------------------------------------------------------------

    async def _await_models(self, request: HttpRequest) -> None:
        """Let a request that may be for a model which is still to come wait for it. During the server's own start no
        request waits."""
        path = self._likeliest_reading(request.path)[1] if request.path.startswith(PREFIX) else request.path
        route = (methods_at(self._table(), path) or {}).get(request.method)
        is_for_model = route is not None and route.scope == "embed"
        if is_for_model and self.services.active.dispatcher.start_stage is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.services.have_come.wait(), _MODELS_TIMEOUT_S)

    def _enter(self, request: HttpRequest) -> Service:
        """The service of the model that a request's path or header names, or else the first one, of those that its API
        key reaches. Raises ApiError for an unknown name in the path. Side effects: where several are served, the
        request has a `choice`, and the prefix that names a model is taken from the path."""
        services, models, choice = self.services, self.services.models, request.choice
        if choice is None and not models.are_several:
            return services.active
        names = services.principals.models_of(request.headers, is_admin=request.is_admin)
        models = models if names is None else models.only(names)
        # A key that reaches some models alone learns nothing of others.
        first = services.all[models.all[0].generation] if models.all else services.active
        if choice is None:
            named, is_by_path = request.headers.get(MODEL_HEADER, ""), request.path.startswith(PREFIX)
            if is_by_path:
                named, request.path = models.split(request.path) or self._refuse(models, first, request)
            choice = request.choice = ModelChoice(named, is_by_path=is_by_path)
        # Found again when the rest of a body has arrived: another generation may be the active one then.
        found = models.find(choice.named) if choice.named else None
        if found is None:
            if choice.is_made:  # the model was withdrawn meanwhile
                raise models.refusal(choice.named)
            return first
        choice.is_made, request.timeline.model = True, found.model
        return services.all[found.generation]

    def _refuse(self, models: Models, first: Service, request: HttpRequest) -> NoReturn:
        """Raises ApiError. Side effect: the request's path is the rest, in whose shape the error is rendered."""
        name, request.path = self._likeliest_reading(request.path)
        self._check_head(first, request)
        raise models.refusal(name)

    def _likeliest_reading(self, path: str) -> tuple[str, str]:
        """A name, and the rest of a path that begins with PREFIX, which has a route if possible."""
        readings, table = readings_of(path), self._table()
        return next((each for each in readings if methods_at(table, each[1]) is not None), readings[0])


def _server_timing(durations: Durations) -> str:
    """Source of the format, which browsers show: https://www.w3.org/TR/server-timing/."""
    stages = zip(durations._fields, durations, strict=True)
    return ", ".join(f"{name.removesuffix('_s')};dur={seconds * 1e3:.3f}" for name, seconds in stages)


def _is_large(request: HttpRequest) -> bool:
    """Whether more of a body is to come than is read for the sake of a connection."""
    length = request.headers.get("content-length", "")
    return not length.isdecimal() or int(length) > _LARGE_BODY_BYTES


_PROBES: Mapping[str, Mapping[str, bool]] = {"/": {}, "/health": {}, "/ping": {}, "/v2/health/ready": {"ready": False}}
"""What the body has besides the reason."""


class StartingApp:
    """What a gateway answers before it knows the model, which may take minutes: a probe learns what the start is doing,
    all else is to come again. A `vecd.gateway.http.connection.Application`."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        """What the server's start is doing."""
        self._started_at = time.monotonic()

    def check_head(self, request: HttpRequest) -> Response | None:
        """Refuse what is not a probe before its body has arrived. Raises NotReady."""
        path = normalize(request.path)
        if path in LIVE:
            return json_response(200, LIVE[path])
        if path in _PROBES:
            return unavailable(self.stage, **_PROBES[path])
        raise NotReady(self.stage, time.monotonic() - self._started_at)

    async def handle(self, request: HttpRequest) -> Response:
        response = self.check_head(request)
        assert response is not None
        return response

    def render_error(self, error: ApiError, path: str | None) -> Response:
        return render_error(error, path, _tables(False, False)[False, False])

    def add_headers(self, response: Response, request: HttpRequest | None) -> None:
        pass
