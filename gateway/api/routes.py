"""The routes as data: path → method → handler, with the scope of the key and the listeners of each.

Owns the lookup of a path and its errors. Knows no socket.

Clients write paths in many ways: a base URL with or without /v1, a trailing or a double slash, the whole URL in place
of a base. Those that can mean only one route are served directly. They are never redirected, because a redirect turns a
POST into a GET. A spelling never leads to a route with another first part, so that a proxy may route by prefix.
"""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

from vecd.gateway.admission.principals import Principal
from vecd.gateway.api.context import Context
from vecd.gateway.api.operations import Operation
from vecd.gateway.types.errors import MethodNotAllowed, NotFound
from vecd.gateway.types.messages import HttpRequest, Response

Handler: TypeAlias = Callable[[Context, HttpRequest, Principal], Awaitable[Response]]
"""A function of `vecd.gateway.api.system_routes`, or a `vecd.gateway.api.handlers.OperationsHandler`."""


class Route(NamedTuple):
    handler: Handler
    scope: str | None = "embed"
    """The scope that a key must have: one of `vecd.gateway.types.config.SCOPES`, or ANY_SCOPE. None: no key is needed,
    because the probes of a load balancer have none. Decides which listeners serve the route, too."""
    about: Operation | None = None
    """For the documentation, if the handler is not a `vecd.gateway.api.handlers.OperationsHandler`."""
    endpoint: int = 0
    """As in `RequestTimeline.endpoint`; that of the first dialect, if several share the path."""


Table: TypeAlias = Mapping[str, Mapping[str, Route]]
"""Path → method → route. A path may have one `*`, which stands for one part or several: a model's name may have
slashes. At the end it stands for no path of another operation: in /models/m/v1/chat/completions no model is named."""

_WHAT_IS_SERVED = (
    "this server serves embeddings: POST /v1/embeddings (OpenAI), /embed (text-embeddings-inference), "
    "/v2/embed (Cohere), /api/embed (Ollama); and scores, with a model for them: /rerank, /v1/rerank, /v2/rerank, "
    "/score; GET /openapi.json lists all paths"
)
"""For a client that takes the server for one that chats or completes, or has a wrong base URL."""
_SLASHES = re.compile("//+")
_FIRST_V1S = re.compile(r"^(/v1)+(?=/)")
_OPERATION = re.compile(
    r"(?:^|/)(?:v\d/.*|pipeline/.*|chat|classify|completions|embed|embeddings|generate|generate_stream|messages|predict|"
    r"rerank|responses|score)$"
)
"""The end of a path that clients of some server append to a base URL."""
_MAX_PARTS = 16
"""Repetitions are looked for only in paths of at most so many parts."""


def public_table(table: Table, *, has_admin_listener: bool, has_keys: bool) -> Table:
    """The routes of the public listener: not the operator's if there is an admin listener, and no commands if everyone
    could give them."""
    if has_admin_listener:
        return _without(table, {"metrics", "admin"})
    return table if has_keys else _without(table, {"admin"})


def admin_table(table: Table) -> Table:
    """The routes of the admin listener."""
    return _without(table, {"embed"})


def model_table(table: Table) -> Table:
    """The routes behind a path that names a model, of a listener's: none of the operator's, which are the server's."""
    return _without(table, {"metrics", "admin"})


def _without(table: Table, scopes: set[str]) -> Table:
    found = {
        path: {method: route for method, route in methods.items() if route.scope not in scopes}
        for path, methods in table.items()
    }
    return {path: methods for path, methods in found.items() if methods}


def find_route(table: Table, method: str, path: str) -> Route:
    """Raises NotFound for an unknown path, MethodNotAllowed for a known one with another method.

    OPTIONS is answered at every known path, and needs no key: the methods are no secret.
    """
    methods = methods_at(table, path)
    if method == "OPTIONS" and (methods is not None or path == "*"):
        allow = allowed_methods(methods or {"GET": None, "POST": None})
        return Route(partial(_respond_to_options, allow), scope=None)
    if methods is None:
        raise NotFound(f"There is nothing at this path; {_WHAT_IS_SERVED}", code="unknown_url")
    route = methods.get("GET" if method == "HEAD" else method)
    if route is None:
        only = ", ".join(sorted({*methods, "HEAD"} if "GET" in methods else methods))
        where = f"; {_WHAT_IS_SERVED}" if method == "POST" else ""
        raise MethodNotAllowed(
            f"{method} is not allowed on this path, only {only}{where}", allow=allowed_methods(methods)
        )
    return route


def allowed_methods(methods: Mapping[str, object]) -> str:
    """The value of the header Allow."""
    return ", ".join(sorted({*methods, "OPTIONS", *(["HEAD"] if "GET" in methods else [])}))


async def _respond_to_options(allow: str, context: Context, http: HttpRequest, principal: Principal) -> Response:
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
