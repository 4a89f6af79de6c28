"""The HTTP API of one generation of the configuration: from an HTTP request to its route's handler.

Owns `Api`, the `vecd.gateway.http.contract.Application`: it finds the route and the principal of a request, passes the
`Context` to the route's handler, and adds the headers that responses have in common. What is embedded goes through
`Context.embedder`. Made by `vecd.gateway.service`.
"""

import time
from collections.abc import Awaitable, Sequence

import orjson

from vecd.gateway.admission.auth import ANY_SCOPE
from vecd.gateway.admission.principals import Principal, Principals
from vecd.gateway.api.context import Context
from vecd.gateway.api.cors import Cors
from vecd.gateway.api.models import PREFIX, Models
from vecd.gateway.api.openapi import describe_api
from vecd.gateway.api.registry import ROUTES, render_error
from vecd.gateway.api.routes import Route, Table, admin_table, find_route, methods_at, model_table, public_table
from vecd.gateway.types.config import ApiKey
from vecd.gateway.types.errors import ApiError, NotFound
from vecd.gateway.types.identity import HEADER
from vecd.gateway.types.messages import HttpRequest, Response
from vecd.gateway.types.timeline import Durations

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
        """Find the route and the principal of a request. Raises ApiError. Takes 4 µs.

        Called twice for a request that arrives in parts, because its key may have been removed before the last one.
        """
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

    # --- what is served -------------------------------------------------------------------------------------

    def describe(self, request: HttpRequest, principal: Principal) -> bytes:
        """The OpenAPI document of the listener that `request` came by, as JSON: of the model that it names, or of all
        that its sender reaches. Kept until keys or models change, because to make one takes 10 to 20 ms of the loop."""
        models, choice, own = self.context.models_for(principal), request.choice, self.context.model_info
        are_several = models is not None and choice is not None and not choice.is_made
        infos = [model.model_info for model in models.all] if models is not None and are_several else [own]
        is_by_path = choice is not None and choice.is_by_path
        key = (request.is_admin, is_by_path, are_several, tuple(info.model for info in infos))
        if key not in self._documents:
            path = "" if models is None or are_several else f"{PREFIX}{own.model}"
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
    """As the header has it, which browsers show: https://www.w3.org/TR/server-timing/."""
    stages = zip(durations._fields, durations, strict=True)
    return ", ".join(f"{name.removesuffix('_s')};dur={seconds * 1e3:.3f}" for name, seconds in stages)


def _is_large(request: HttpRequest) -> bool:
    """Whether more of a body is to come than is read for the sake of a connection."""
    length = request.headers.get("content-length", "")
    return not length.isdecimal() or int(length) > _LARGE_BODY_BYTES
