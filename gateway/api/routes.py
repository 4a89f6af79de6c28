"""The routes, as data: path → method → handler, who may call it, and on which listener. Owns the table and its errors;
knows no socket.

Clients write paths in many ways (a base URL with or without /v1, a trailing or a double slash, the whole URL where a
base was asked for); those that can mean only one thing are served directly, never redirected, because a redirect turns
a POST into a GET. No spelling leads below another first part than its own, so that a proxy may tell paths by prefix.
"""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from enum import Enum, auto
from typing import NamedTuple, TypeAlias

from vecd.gateway.admission.principals import Principal
from vecd.gateway.api.context import Context
from vecd.gateway.api.operations import Operation
from vecd.gateway.types.errors import MethodNotAllowed, NotFound
from vecd.gateway.types.messages import HttpRequest, Response

Handler: TypeAlias = Callable[[Context, HttpRequest, Principal], Awaitable[Response]]
"""A function of `vecd.gateway.api.system_routes`, or a `vecd.gateway.api.handlers.OperationsHandler`."""


class Place(Enum):
    """Where a route is served."""

    PUBLIC = auto()
    BOTH = auto()
    OPERATOR = auto()
    """On the admin listener alone, if there is one."""
    ADMIN = auto()
    """The same, and nowhere on a server without keys: nobody may command one that is open to all."""


class Route(NamedTuple):
    handler: Handler
    scope: str | None = "embed"
    """What the caller's key must allow, of `vecd.gateway.types.config.SCOPES`. None: no key is asked for, as probes of
    a load balancer have none."""
    place: Place = Place.PUBLIC
    about: Operation | None = None
    """For the documentation; a `vecd.gateway.api.handlers.OperationsHandler` has its own."""
    endpoint: int = 0
    """As a `vecd.gateway.types.timeline.RequestTimeline` has it; of several dialects at one path, the first one's."""


Table: TypeAlias = Mapping[str, Mapping[str, Route]]
"""Path → method → route. A `*` in a path, of which it has one at most, is one part or several: a model's name may have
slashes in it."""

_SLASHES = re.compile("//+")
_FIRST_V1S = re.compile(r"^(/v1)+(?=/)")
_MAX_PARTS = 16
"""Of a path in which repetitions are looked for."""


def public_table(table: Table, *, has_admin_listener: bool, has_keys: bool) -> Table:
    """What is served on the public listener."""
    places = {Place.PUBLIC, Place.BOTH}
    if not has_admin_listener:
        places |= {Place.OPERATOR, Place.ADMIN} if has_keys else {Place.OPERATOR}
    return _of_places(table, places)


def admin_table(table: Table) -> Table:
    """What is served on the admin listener."""
    return _of_places(table, {Place.BOTH, Place.OPERATOR, Place.ADMIN})


def _of_places(table: Table, places: set[Place]) -> Table:
    found = {
        path: {method: route for method, route in methods.items() if route.place in places}
        for path, methods in table.items()
    }
    return {path: methods for path, methods in found.items() if methods}


def find_route(table: Table, method: str, path: str) -> Route:
    """Raises NotFound for an unknown path, MethodNotAllowed for a known one with another method.

    OPTIONS is answered at every path that there is, and needs no key: it says what anybody could find out.
    """
    methods = methods_at(table, path)
    if method == "OPTIONS" and (methods is not None or path == "*"):
        return Route(_Options(allowed_methods(methods or {"GET": None, "POST": None})), scope=None)
    if methods is None:
        raise NotFound(
            "There is nothing at this path; embeddings are at POST /v1/embeddings",
            code="unknown_url",
        )
    route = methods.get("GET" if method == "HEAD" else method)
    if route is None:
        only = ", ".join(sorted({*methods, "HEAD"} if "GET" in methods else methods))
        raise MethodNotAllowed(f"{method} is not allowed on this path, only {only}", allow=allowed_methods(methods))
    return route


def allowed_methods(methods: Mapping[str, object]) -> str:
    """As the header Allow has them."""
    return ", ".join(sorted({*methods, "OPTIONS", *(["HEAD"] if "GET" in methods else [])}))


class _Options:
    """A handler: which methods there are."""

    def __init__(self, allow: str) -> None:
        self._allow = allow

    async def __call__(self, context: Context, http: HttpRequest, principal: Principal) -> Response:
        return Response(204, headers={"allow": self._allow})


def methods_at(table: Table, path: str) -> Mapping[str, Route] | None:
    """What is at a path, however it is written; None where there is nothing."""
    methods = table.get(path)
    if methods is not None:
        return methods
    for spelling in _spellings(path):
        methods = table.get(spelling) or _wildcard(table, spelling)
        if methods is not None:
            return methods
    return None


def name_in(pattern: str, path: str) -> str | None:
    """What stands in a path, however it is written, for the `*` of `pattern`; None where the path is another."""
    return next((name for spelling in _spellings(path) if (name := _name_in(pattern, spelling))), None)


def normalize(path: str) -> str:
    """One slash where there are several, none at the end, one /v1 where there are two."""
    path = "/" + _SLASHES.sub("/", path).strip("/")
    return _FIRST_V1S.sub("/v1", path)


def _spellings(path: str) -> Iterator[str]:
    """What a path may mean, the likeliest first."""
    path = normalize(path)
    yield path
    parts = path.split("/", _MAX_PARTS + 1)[1:]
    if len(parts) <= _MAX_PARTS and len(fewer := _without_repetitions(parts)) < len(parts):
        yield "/" + "/".join(fewer)


def _without_repetitions(parts: list[str]) -> list[str]:
    """Of parts, one or several, that follow directly on the same again, the first."""
    for length in range(len(parts) // 2, 0, -1):
        for start in range(len(parts) - 2 * length + 1):
            middle = start + length
            if parts[start:middle] == parts[middle : middle + length]:
                return _without_repetitions(parts[:middle] + parts[middle + length :])
    return parts


def _wildcard(table: Table, path: str) -> Mapping[str, Route] | None:
    return next((methods for pattern, methods in table.items() if "*" in pattern and _name_in(pattern, path)), None)


def _name_in(pattern: str, path: str) -> str | None:
    before, star, after = pattern.partition("*")
    if not star or not path.startswith(before) or not path.endswith(after):
        return None
    name = path[len(before) : len(path) - len(after)]
    # What ends as the pattern does is the end given twice, and no name.
    return None if after and name.endswith(after) else name
