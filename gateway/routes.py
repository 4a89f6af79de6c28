"""The routes, as data: path → method → handler, who may call it, and on which listener. Owns the table and its errors;
knows no socket.

Clients write paths in many ways (a base URL with or without /v1, a trailing or a double slash); those that can mean
only one thing are served directly, never redirected, because a redirect turns a POST into a GET.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from gateway.callers import Caller
from gateway.errors import MethodNotAllowed, NotFound
from gateway.http1 import HttpRequest, Response

if TYPE_CHECKING:
    from gateway.app import App

Handler: TypeAlias = Callable[["App", HttpRequest, Caller], Awaitable[Response]]


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
    """What the caller's key must allow, of `gateway.config.SCOPES`. None: no key is asked for, as probes of a load
    balancer have none."""
    place: Place = Place.PUBLIC


Table: TypeAlias = Mapping[str, Mapping[str, Route]]
"""Path → method → route. A path that ends in `/*` matches everything below it."""


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
    """Raises NotFound for an unknown path, MethodNotAllowed for a known one with another method."""
    methods = table.get(path)
    if methods is None:
        path = normalize(path)
        methods = table.get(path) or _wildcard(table, path)
    if methods is None:
        raise NotFound(
            "There is nothing at this path; embeddings are at POST /v1/embeddings",
            code="unknown_url",
        )
    route = methods.get("GET" if method == "HEAD" else method)
    if route is None:
        allow = ", ".join(sorted({*methods, "HEAD"} if "GET" in methods else methods))
        raise MethodNotAllowed(f"{method} is not allowed on this path, only {allow}", allow=allow)
    return route


def normalize(path: str) -> str:
    """One slash where there are several, none at the end, one /v1 where there are two."""
    path = "/" + "/".join(part for part in path.split("/") if part)
    return re.sub(r"^(/v1)+(?=/)", "/v1", path)


def _wildcard(table: Table, path: str) -> Mapping[str, Route] | None:
    for pattern, methods in table.items():
        if pattern.endswith("/*") and path.startswith(pattern[:-1]) and len(path) >= len(pattern):
            return methods
    return None
