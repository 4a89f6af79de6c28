"""All routes as one table: those of the dialects, and the server's own.

Owns the list of dialects, whose order decides at a path that several have, and the names that requests are counted
under. Knows no socket. Read by `vecd.gateway.api.application` (routes, shapes of errors) and `vecd.gateway.service`.
"""

from vecd.gateway.api.dialects import cohere, ollama, openai, rerank, tei, vllm
from vecd.gateway.api.handlers import Claim, OperationsHandler
from vecd.gateway.api.open_inference import OPEN_INFERENCE_ROUTES
from vecd.gateway.api.operations import Dialect
from vecd.gateway.api.routes import Route, Table, methods_at
from vecd.gateway.api.system_routes import OWN_ROUTES
from vecd.gateway.types.endpoints import NO_ROUTE, OWN, Endpoint
from vecd.gateway.types.errors import ApiError
from vecd.gateway.types.messages import Response
from vecd.shm.shared_metrics import MAX_ENDPOINTS

DIALECTS: tuple[Dialect, ...] = (
    openai.DIALECT, vllm.DIALECT, ollama.DIALECT, tei.DIALECT, cohere.DIALECT, rerank.DIALECT,
)  # fmt: skip
"""Of the dialects at one path, the first takes what no other claims."""

_BY_NAME = {dialect.name: dialect for dialect in DIALECTS}

_endpoints: dict[Endpoint, int] = {NO_ROUTE: 0}


def _endpoint(route: str, dialect: str) -> int:
    return _endpoints.setdefault(Endpoint(route, dialect), len(_endpoints))


def _routes_by_capability() -> dict[str, list[str]]:
    """The paths of the operations that need each capability, without those that hold the name of a model, and without
    those below /openai, which repeat others."""
    routes: dict[str, list[str]] = {}
    for dialect in DIALECTS:
        for at, operation in dialect.operations.items():
            path = at.partition(" ")[2]
            for capability in operation.needs if "*" not in path and not path.startswith("/openai/") else ():
                routes.setdefault(capability, []).append(path)
    return routes


def _make_routes() -> Table:
    """The routes of the dialects, and the server's own. Both may be at one path, with different methods."""
    claims: dict[tuple[str, str], list[Claim]] = {}
    for dialect in DIALECTS:
        for at, operation in dialect.operations.items():
            method, _, path = at.partition(" ")
            claim = Claim(dialect, operation, _endpoint(path, dialect.name))
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
    """Render an error in the shape of the request's dialect, or in OpenAI's if the dialect is not known."""
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
