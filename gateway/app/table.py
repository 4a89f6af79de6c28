"""The table of all routes, of the dialects and the server's own; and what a gateway answers before it has an app."""

import time
from collections.abc import Mapping

import orjson

from vecd.gateway.api.answer import json_response
from vecd.gateway.api.operation import Dialect, Operation
from vecd.gateway.api.served import PREFIX
from vecd.gateway.app.app import App
from vecd.gateway.app.openapi import describe_api
from vecd.gateway.app.routes import (
    ENDPOINTS as ENDPOINTS,
)
from vecd.gateway.app.routes import (
    Claim,
    Route,
    Table,
    dialects_of,
    endpoint_of,
    normalize,
    render_error,
    route_of,
)
from vecd.gateway.app.status import LIVE, OWN_ROUTES, unavailable
from vecd.gateway.dialects import cohere, ollama, openai, rerank, tei, vllm
from vecd.gateway.errors import ApiError, NotReady
from vecd.gateway.request import OWN, HttpRequest, Response
from vecd.gateway.scheduling.keys import ANY_SCOPE, Principal
from vecd.gateway.service import Service
from vecd.shm.shared_metrics import MAX_ENDPOINTS

DIALECTS: tuple[Dialect, ...] = (
    openai.DIALECT, vllm.DIALECT, ollama.DIALECT, tei.DIALECT, cohere.DIALECT, rerank.DIALECT,
)  # fmt: skip
"""Of the dialects at one path, the first takes what no other claims."""
_MAX_DOCUMENTS = 8
"""Of some 0.6 MB each: by listener, by prefix, and by the models that keys reach."""


async def openapi(app: App, service: Service, http: HttpRequest, principal: Principal) -> Response:
    """The OpenAPI document of the listener that `http` came by: of the model that it names, or of all that its sender
    reaches. Kept until keys or models change, because to make one takes 10 to 20 ms of the loop."""
    choice, are_several, documents = http.choice, http.may_choose, app.documents
    infos = app.models_for(principal).all if are_several else (service.info,)
    is_by_path = choice is not None and choice.is_by_path
    key = (http.is_admin, is_by_path, are_several, tuple(info.model for info in infos))
    if key not in documents:
        prefix = "" if choice is None or are_several else f"{PREFIX}{service.info.model}"
        document = describe_api(
            app.tables[http.is_admin, is_by_path], infos, has_keys=app.principals.have_keys, prefix=prefix,
            are_several=are_several,
        )  # fmt: skip
        if len(documents) >= _MAX_DOCUMENTS:
            del documents[next(iter(documents))]
        documents[key] = orjson.dumps(document)
    return Response(200, documents[key])


def _make_routes() -> Table:
    claims: dict[str, list[Claim]] = {}
    for dialect in DIALECTS:
        for at, operation in dialect.operations.items():
            endpoint = endpoint_of(at.partition(" ")[2], dialect.name)
            claims.setdefault(at, []).append(Claim(dialect, operation, endpoint))
    about = Operation(summary="This document", response={"type": "object"})
    own = {**OWN_ROUTES, "GET /openapi.json": Route(openapi, ANY_SCOPE, about)}
    table: dict[str, dict[str, Route]] = {}
    for at in (*claims, *own):
        method, _, path = at.partition(" ")
        route = route_of(claims[at], path) if at in claims else own[at]._replace(endpoint=endpoint_of(path, OWN))
        table.setdefault(path, {})[method] = route
    return table


ROUTES = _make_routes()
_DIALECTS = dialects_of(ROUTES)
assert len(ENDPOINTS) <= MAX_ENDPOINTS

_PROBES: Mapping[str, Mapping[str, bool]] = {"/": {}, "/health": {}, "/ping": {}, "/v2/health/ready": {"ready": False}}
"""What the body has besides the reason."""


class StartingApp:
    """What a gateway answers before it knows the model, which may take minutes: a probe learns what the start is doing,
    all else is to come again. A `vecd.gateway.http.connection.Application`."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self._started_at = time.monotonic()

    def check_head(self, request: HttpRequest) -> Response:
        """Refuse what is not a probe before its body has arrived. Raises NotReady."""
        path = normalize(request.path)
        if path in LIVE:
            return json_response(200, LIVE[path])
        if path in _PROBES:
            return unavailable(self.stage, **_PROBES[path])
        raise NotReady(self.stage, time.monotonic() - self._started_at)

    async def handle(self, request: HttpRequest) -> Response:
        return self.check_head(request)

    def render_error(self, error: ApiError, request: HttpRequest | None) -> Response:
        return render_error(error, request, ROUTES, _DIALECTS)

    def add_headers(self, response: Response, request: HttpRequest | None) -> None:
        pass
