"""The routes, as data: path → method → handler. Owns the table and its errors; knows no socket.

Clients write paths in many ways (a base URL with or without /v1, a trailing or a double slash); those that can mean
only one thing are served directly, never redirected, because a redirect turns a POST into a GET.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from gateway.errors import MethodNotAllowed, NotFound
from gateway.http1 import HttpRequest, Response

if TYPE_CHECKING:
    from gateway.app import App

Handler: TypeAlias = Callable[["App", HttpRequest], Awaitable[Response]]


class Route(NamedTuple):
    handler: Handler
    needs_key: bool = True
    """Whether a configured API key is asked for. Probes of a load balancer have none."""


Table: TypeAlias = Mapping[str, Mapping[str, Route]]
"""Path → method → route. A path that ends in `/*` matches everything below it."""


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
