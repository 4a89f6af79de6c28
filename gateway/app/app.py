"""The HTTP API of one generation of the configuration: from an HTTP request to its route's handler.

Owns the table of all routes, the headers that all responses have in common, and the answer before the model is known.
"""

import re
import time
from collections.abc import Awaitable, Iterator, Sequence

import orjson

from vecd.gateway.api.answer import Headers, json_response
from vecd.gateway.api.operation import Dialect
from vecd.gateway.api.served import PREFIX, Models
from vecd.gateway.app.handle import Claim, OperationsHandler
from vecd.gateway.app.openapi import describe_api
from vecd.gateway.app.routes import (
    Context,
    Route,
    Table,
    admin_table,
    find_route,
    methods_at,
    model_table,
    normalize,
    public_table,
)
from vecd.gateway.app.status import LIVE, OPEN_INFERENCE_ROUTES, OWN_ROUTES, unavailable
from vecd.gateway.config import ApiKey
from vecd.gateway.dialects import cohere, ollama, openai, rerank, tei, vllm
from vecd.gateway.errors import ApiError, NotFound, NotReady
from vecd.gateway.request import HEADER, NO_ROUTE, OWN, Durations, Endpoint, HttpRequest, Response
from vecd.gateway.scheduling.keys import ANY_SCOPE, Principal, Principals
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
        self._allows_any = ANY in origins
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

    async def respond_to_preflight(self, context: Context, request: HttpRequest, principal: Principal) -> Response:
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
        if not self._allows_any:
            # Also on responses without the other headers: a cache must not give them to other origins.
            vary = response.headers.get("vary")
            added["vary"] = f"{vary}, origin" if vary else "origin"
        response.headers = {**response.headers, **added}

    def _allowed(self, headers: Headers) -> str | None:
        """The value of Access-Control-Allow-Origin, if there is to be one."""
        origin = headers.get("origin")
        if origin is None:
            return None
        if self._allows_any:
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

_endpoints: dict[Endpoint, int] = {NO_ROUTE: 0}


def _endpoint(route: str, dialect: str) -> int:
    return _endpoints.setdefault(Endpoint(route, dialect), len(_endpoints))


def _claims() -> Iterator[tuple[str, str, Claim]]:
    """Of all dialects, with their methods and paths."""
    for dialect in DIALECTS:
        for at, operation in dialect.operations.items():
            method, _, path = at.partition(" ")
            yield method, path, Claim(dialect, operation, _endpoint(path, dialect.name))


def _routes_by_capability() -> dict[str, list[str]]:
    """The paths of the operations that need each capability, without those that hold the name of a model, and without
    those below /openai, which repeat others."""
    routes: dict[str, list[str]] = {}
    for _, path, claim in _claims():
        for capability in claim.operation.needs if "*" not in path and not path.startswith("/openai/") else ():
            routes.setdefault(capability, []).append(path)
    return routes


def _make_routes() -> Table:
    """Those of the dialects, and the server's own. Both may be at one path, with different methods."""
    claims: dict[tuple[str, str], list[Claim]] = {}
    for method, path, claim in _claims():
        claims.setdefault((path, method), []).append(claim)
    table: dict[str, dict[str, Route]] = {}
    routes = _routes_by_capability()
    for (path, method), theirs in claims.items():
        handler = OperationsHandler(tuple(theirs), path, routes)
        table.setdefault(path, {})[method] = Route(handler, endpoint=theirs[0].endpoint)
    for path, methods in {**OWN_ROUTES, **OPEN_INFERENCE_ROUTES}.items():
        for method, route in methods.items():
            table.setdefault(path, {})[method] = route._replace(endpoint=_endpoint(path, OWN))
    return table


ROUTES = _make_routes()

ENDPOINTS: tuple[Endpoint, ...] = tuple(_endpoints)
"""By the index that `Route.endpoint` and `RequestTimeline.endpoint` have."""
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
        if isinstance(route.handler, OperationsHandler):
            return route.handler.claims[0].dialect
    return next((dialect for dialect in DIALECTS if dialect.prefix and path.startswith(dialect.prefix)), None)


_LARGE_BODY_BYTES = 64 * 1024
_MAX_DOCUMENTS = 8
"""Of /openapi.json that are kept, of some 0.6 MB each: by listener, by prefix, and by the models that keys reach."""

_TIMING_HEADER = "x-vecd-timing"
"""A request with this header, whatever its value, gets a response with `server-timing`."""


class Api:
    def __init__(self, context: Context) -> None:
        self.context = context
        self._documents: dict[tuple[bool, bool, bool, tuple[str, ...]], bytes] = {}
        self._cors = Cors(context.config.cors_origins)
        self._admin_table = admin_table(ROUTES)
        self._admin_model_table = model_table(self._admin_table)
        self.set_keys(context.config.keys)

    @property
    def principals(self) -> Principals:
        return self.context.principals

    def set_keys(self, keys: Sequence[ApiKey]) -> None:
        """Accept these keys from now on. What has been admitted goes on."""
        self.principals.set_keys(keys)
        self._public_table = public_table(
            ROUTES,
            has_admin_listener=self.context.config.has_admin_listener,
            has_keys=self.principals.have_keys,
        )
        self._model_table = model_table(self._public_table)
        self._documents.clear()

    def adopt(self, principals: Principals, keys: Sequence[ApiKey]) -> None:
        """Go on with another generation's principals, because what they have used stays used, under these keys."""
        self.context.principals = principals
        self.set_keys(keys)

    def join(self, models: Models[Context] | None) -> None:
        """Serve beside other models from now on, or as the only one."""
        self.context.models = models
        self._documents.clear()
        # A large body is read before its model is known.
        bodies = self.context.bodies
        bodies.widen([] if models is None else [model.bodies for model in models.all])

    # --- what the server calls ------------------------------------------------------------------------------

    def check_head(self, request: HttpRequest) -> Response | None:
        """Refuse what can be refused before the body has arrived. Raises ApiError."""
        route, principal = self._find(request)
        if route.scope == "embed" and _is_large(request):
            principal.check_quota()  # a small body is read all the same, so that the client keeps its connection
        return None

    def handle(self, request: HttpRequest) -> Awaitable[Response]:
        route, principal = self._find(request)
        request.timeline.principal = principal.name
        return route.handler(self.context, request, principal)

    def has_route(self, path: str) -> bool:
        """Whether the public listener has a route at this path."""
        return methods_at(self._public_table, path) is not None

    def is_for_model(self, method: str, path: str) -> bool:
        """Whether the public listener has a route for this that is for a model, not about the server."""
        route = (methods_at(self._public_table, path) or {}).get(method)
        return route is not None and route.scope == "embed"

    def render_error(self, error: ApiError, path: str | None) -> Response:
        return render_error(error, path, self._public_table)

    def add_headers(self, response: Response, request: HttpRequest | None) -> None:
        if request is not None and request.identity is not None and (identity := request.identity.text) is not None:
            response.headers[HEADER] = identity
        self._cors.add_headers(response, request)
        if request is not None and _TIMING_HEADER in request.headers and request.timeline.is_embedded:
            response.headers["server-timing"] = _server_timing(request.timeline.durations(time.monotonic()))

    def _find(self, request: HttpRequest) -> tuple[Route, Principal]:
        """Raises ApiError. Takes 4 µs. Called twice for a request that arrives in parts, because its key may have been
        removed before the last one."""
        if self._cors.is_preflight(request):
            route = self._cors.preflight_route
        else:
            route = find_route(self._table(request), request.method, request.path)
            request.timeline.endpoint = route.endpoint
        principal = self.context.principals.identify(
            request.headers, request.client, route.scope, is_admin=request.is_admin
        )
        if principal.models is not None:
            self._check_reach(route, principal)
        return route, principal

    def _check_reach(self, route: Route, principal: Principal) -> None:
        """Raises ApiError if the principal does not reach this model, which is one of its own unless none of these is
        served: a configuration and its keys take effect one after the other."""
        if route.scope in ("embed", ANY_SCOPE) and self.context.config.model not in (principal.models or ()):
            models = self.context.models
            if models is not None and not models.is_complete:
                raise models.refusal("")
            raise NotFound("No model that this API key may use is served", code="model_not_found")

    def describe(self, request: HttpRequest, principal: Principal) -> bytes:
        """The OpenAPI document of the listener that `request` came by, as JSON: of the model that it names, or of all
        that its sender reaches. Kept until keys or models change, because to make one takes 10 to 20 ms of the loop."""
        models, choice, own = self.context.models_left(request, principal), request.choice, self.context.model_info
        infos, are_several = [own] if models is None else [model.model_info for model in models.all], models is not None
        is_by_path = choice is not None and choice.is_by_path
        key = (request.is_admin, is_by_path, are_several, tuple(info.model for info in infos))
        if key not in self._documents:
            path = "" if self.context.models is None or are_several else f"{PREFIX}{own.model}"
            document = describe_api(
                self._table(request), infos, has_keys=self.principals.have_keys, path=path, are_several=are_several
            )
            if len(self._documents) >= _MAX_DOCUMENTS:
                del self._documents[next(iter(self._documents))]
            self._documents[key] = orjson.dumps(document)
        return self._documents[key]

    def _table(self, request: HttpRequest) -> Table:
        if request.choice is not None and request.choice.is_by_path:
            return self._admin_model_table if request.is_admin else self._model_table
        return self._admin_table if request.is_admin else self._public_table


def _server_timing(durations: Durations) -> str:
    """Source of the format, which browsers show: https://www.w3.org/TR/server-timing/."""
    stages = zip(durations._fields, durations, strict=True)
    return ", ".join(f"{name.removesuffix('_s')};dur={seconds * 1e3:.3f}" for name, seconds in stages)


def _is_large(request: HttpRequest) -> bool:
    """Whether more of a body is to come than is read for the sake of a connection."""
    length = request.headers.get("content-length", "")
    return not length.isdecimal() or int(length) > _LARGE_BODY_BYTES


_PROBES = ("/", "/health", "/ping")
_TABLE = public_table(ROUTES, has_admin_listener=False, has_keys=False)


class StartingApi:
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
            return unavailable(self.stage)
        if path == "/v2/health/ready":
            return unavailable(self.stage, ready=False)
        raise NotReady(self.stage, time.monotonic() - self._started_at)

    async def handle(self, request: HttpRequest) -> Response:
        response = self.check_head(request)
        assert response is not None
        return response

    def render_error(self, error: ApiError, path: str | None) -> Response:
        return render_error(error, path, _TABLE)

    def add_headers(self, response: Response, request: HttpRequest | None) -> None:
        pass
