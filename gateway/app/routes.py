"""The routes as data, and the lookup of a path."""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from vecd.base.files import JsonMapping
from vecd.gateway.api.large_json import FieldNames
from vecd.gateway.api.operation import Dialect, Operation
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.errors import ApiError, MethodNotAllowed, NotFound
from vecd.gateway.request import NO_ROUTE, Endpoint, HttpRequest, Response

# Clients write paths in many ways: a base URL with or without /v1, a trailing or a double slash, the whole URL in place
# of a base. Those that can mean only one route are served directly. They are never redirected, because a redirect turns
# a POST into a GET. A spelling never leads to a route with another first part, so that a proxy may route by prefix.

Handler: TypeAlias = Callable[..., Awaitable[Response]]
"""Takes the `vecd.gateway.app.app.App`, the service of the model, the request and its principal."""

ENDPOINTS = [NO_ROUTE]
"""By the index that `Route.endpoint` and `RequestTimeline.endpoint` have; complete once the table of routes is made."""


def endpoint_of(route: str, dialect: str) -> int:
    endpoint = Endpoint(route, dialect)
    if endpoint not in ENDPOINTS:
        ENDPOINTS.append(endpoint)
    return ENDPOINTS.index(endpoint)


class Claim(NamedTuple):
    """An operation of one dialect, at the path that it shares with others."""

    dialect: Dialect
    operation: Operation
    endpoint: int = 0
    """As in `RequestTimeline.endpoint`."""


class Route(NamedTuple):
    handler: Handler | None = None
    """None: a dialect's operation is run."""
    scope: str | None = "embed"
    """The scope that a key must have: one of `vecd.gateway.config.SCOPES`, or ANY_SCOPE. None: no key is needed,
    because the probes of a load balancer have none. Decides which listeners serve the route, too."""
    about: Operation | None = None
    """For the documentation, if there is a handler."""
    endpoint: int = 0
    """As in `RequestTimeline.endpoint`; that of the first dialect, if several share the path."""
    claims: tuple[Claim, ...] = ()
    """A body belongs to the first claim whose field it has, or else to the first that the model can answer, or to the
    first of all. None if there is a handler."""
    path: str = ""
    """Of the claims. A `*` inside it stands for the name of a model, which replaces the one in the body."""
    names: FieldNames = FieldNames(frozenset())

    def claim_of(self, body: JsonMapping, info: ModelInfo) -> Claim:
        able = (claim for claim in self.claims if info.can(claim.operation.needs))
        return self._claimed(body) or next(able, self.claims[0])

    def claims_for(self, body: JsonMapping) -> Sequence[Claim]:
        """Those that a body may belong to, for a model that is still to be chosen."""
        if len(self.claims) > 1 and (claimed := self._claimed(body)) is not None:
            return [claimed]
        return [claim for claim in self.claims if not claim.operation.claims] or self.claims

    def _claimed(self, body: JsonMapping) -> Claim | None:
        """The first claim that the body has a field of."""
        claims = (claim for claim in self.claims for name in claim.operation.claims if body.get(name) is not None)
        return next(claims, None)


def route_of(claims: Sequence[Claim], path: str) -> Route:
    operations = [claim.operation for claim in claims]
    names = FieldNames(
        frozenset[str]().union(*(operation.fields.large for operation in operations)),
        frozenset[str]().union(*(operation.fields.small for operation in operations)),
        next((operation.bare_list for operation in operations if operation.bare_list), ""),
    )
    return Route(endpoint=claims[0].endpoint, claims=tuple(claims), path=path, names=names)


Table: TypeAlias = Mapping[str, Mapping[str, Route]]
"""Path → method → route. A path may have one `*`, which stands for one part or several: a model's name may have
slashes. At the end it stands for no path of another operation: in /models/m/v1/chat/completions no model is named."""

_WHAT_IS_SERVED = (
    "this server serves embeddings: POST /v1/embeddings (OpenAI), /embed (text-embeddings-inference), "
    "/v2/embed (Cohere), /api/embed (Ollama); and scores, with a model for them: /rerank, /v1/rerank, /v2/rerank, "
    "/score; GET /openapi.json lists all paths"
)
"""For a client that takes the server for one that chats or completes, or has a wrong base URL."""
RETIRED = {
    "/admin/models/*/park": "models are not parked any more: POST /admin/models/NAME/unload, and …/load",
    "/v2/models/*/ready": "/v2/health/ready says whether it can serve, /v1/models/NAME what a model is",
    "/v2/models/*": "/v1/models/NAME and /info say what a model is, /v2/health/ready whether it can serve",
    "/vertex": "/embed takes texts with the same options",
}
"""Of paths that were routes in the release before: what serves their users. Kept for one release."""
_SLASHES = re.compile("//+")
_FIRST_V1S = re.compile(r"^(/v1)+(?=/)")
_OPERATION = re.compile(
    r"(?:^|/)(?:v\d/.*|pipeline/.*|chat|classify|completions|embed|embeddings|generate|generate_stream|messages|predict|"
    r"rerank|responses|score)$"
)
"""The end of a path that clients of some server append to a base URL."""
_MAX_PARTS = 16
"""Repetitions are looked for only in paths of at most this many parts."""


def served(
    table: Table, *, is_admin: bool = False, is_by_path: bool = False, has_admin_listener: bool, has_keys: bool
) -> Table:
    """The routes of a listener, or of its paths that name a model. The public one has none of the operator's if there
    is an admin listener, and no commands if everyone could give them; paths that name a model have none of the
    operator's, which are the server's."""
    hidden = {"embed"} if is_admin else {"metrics", "admin"} if has_admin_listener else set() if has_keys else {"admin"}
    hidden |= {"metrics", "admin"} if is_by_path else set()
    found = {
        path: {method: route for method, route in methods.items() if route.scope not in hidden}
        for path, methods in table.items()
    }
    return {path: methods for path, methods in found.items() if methods}


def paths_of(table: Table) -> dict[str, list[str]]:
    """By capability, the paths of the operations that need it, for errors. These name no path that holds the name of a
    model, and none below /openai, which repeats another."""
    paths: dict[str, list[str]] = {}
    for path, methods in table.items():
        for route in methods.values() if "*" not in path and not path.startswith("/openai/") else ():
            for claim in route.claims:
                for capability in claim.operation.needs:
                    paths.setdefault(capability, []).append(path)
    return paths


def dialects_of(table: Table) -> dict[str, Dialect]:
    routes = [route for methods in table.values() for route in methods.values()]
    return {claim.dialect.name: claim.dialect for route in routes for claim in route.claims}


def render_error(error: ApiError, http: HttpRequest | None, table: Table, dialects: Mapping[str, Dialect]) -> Response:
    """In the shape of the request's dialect, or in that of the first of all if the dialect is not known. `http`: None:
    its head could not be parsed."""
    dialect = dialects.get(error.dialect or "") or (http and _dialect_at(table, http, dialects))
    response = (dialect or next(iter(dialects.values()))).render_error(error)
    response.headers.update(error.headers)
    return response


def _dialect_at(table: Table, http: HttpRequest, dialects: Mapping[str, Dialect]) -> Dialect | None:
    """That of the method at the path, or else of another method there, or else of all paths that begin so."""
    methods = methods_at(table, http.path) or {}
    routes = [methods[http.method]] if http.method in methods else []
    for route in (*routes, *methods.values()):
        if route.claims:
            return route.claims[0].dialect
    prefixed = (each for each in dialects.values() if each.prefix and http.path.startswith(each.prefix))
    return next(prefixed, None)


def find_route(table: Table, method: str, path: str) -> Route:
    """Raises NotFound for an unknown path, MethodNotAllowed for a known one with another method. OPTIONS is answered at
    every known path, and needs no key: the methods are no secret."""
    methods = methods_at(table, path)
    if method == "OPTIONS" and (methods is not None or path == "*"):
        allow = allowed_methods(methods or {"GET": None, "POST": None})
        return Route(partial(_respond_to_options, allow), scope=None)
    if methods is None:
        retired = (why for at, why in RETIRED.items() if at == normalize(path) or name_in(at, path))
        raise NotFound(f"There is nothing at this path; {next(retired, _WHAT_IS_SERVED)}", code="unknown_url")
    route = methods.get("GET" if method == "HEAD" else method)
    if route is None:
        only = ", ".join(sorted({*methods, "HEAD"} if "GET" in methods else methods))
        where = f"; {_WHAT_IS_SERVED}" if method == "POST" else ""
        raise MethodNotAllowed(
            f"{method} is not allowed on this path, only {only}{where}", headers={"allow": allowed_methods(methods)}
        )
    return route


def allowed_methods(methods: Mapping[str, object]) -> str:
    return ", ".join(sorted({*methods, "OPTIONS", *(["HEAD"] if "GET" in methods else [])}))


async def _respond_to_options(allow: str, *_: object) -> Response:
    return Response(204, headers={"allow": allow})


def methods_at(table: Table, path: str) -> Mapping[str, Route] | None:
    """The routes of a path, in any spelling; None if there are none."""
    methods = table.get(path)
    if methods is not None:
        return methods
    for spelling in _spellings(path):
        methods = table.get(spelling) or _wildcard(table, spelling)
        if methods is not None:
            return methods
    return None


def name_in(pattern: str, path: str) -> str | None:
    """The part of a path, in any spelling, that the `*` of `pattern` stands for; None if the path does not match."""
    return next((name for spelling in _spellings(path) if (name := _name_in(pattern, spelling))), None)


def normalize(path: str) -> str:
    """Reduce repeated slashes and a repeated /v1 to one, and remove a slash at the end."""
    path = "/" + _SLASHES.sub("/", path).strip("/")
    return _FIRST_V1S.sub("/v1", path)


def _spellings(path: str) -> Iterator[str]:
    """The normal spellings of a path, the likeliest first."""
    path = normalize(path)
    yield path
    parts = path.split("/", _MAX_PARTS + 1)[1:]
    if len(parts) <= _MAX_PARTS and len(fewer := _without_repetitions(parts)) < len(parts):
        yield "/" + "/".join(fewer)


def _without_repetitions(parts: list[str]) -> list[str]:
    """Where one part or several are directly followed by the same again, keep the first."""
    for length in range(len(parts) // 2, 0, -1):
        for start in range(len(parts) - 2 * length + 1):
            middle = start + length
            if parts[start:middle] == parts[middle : middle + length]:
                return _without_repetitions(parts[:middle] + parts[middle + length :])
    return parts


def _wildcard(table: Table, path: str) -> Mapping[str, Route] | None:
    """Of several patterns the longest counts: /models/*/pipeline/feature-extraction before /models/*."""
    patterns = [pattern for pattern in table if "*" in pattern and _name_in(pattern, path)]
    return table[max(patterns, key=len)] if patterns else None


def _name_in(pattern: str, path: str) -> str | None:
    before, star, after = pattern.partition("*")
    if not star or not path.startswith(before) or not path.endswith(after):
        return None
    name = path[len(before) : len(path) - len(after)]
    if not after and _OPERATION.search(name):
        return None
    # A name that ends like the pattern is the end of the pattern, written twice.
    return None if after and name.endswith(after) else name
