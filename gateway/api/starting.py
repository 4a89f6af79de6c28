"""What a gateway answers before it knows the model: a probe learns what the start is doing, all else is to come again.

Owns that answer. A download, or the conversion of a tokenizer, may take minutes. Made by `vecd.gateway.main`, which
replaces it by `vecd.gateway.service` as soon as the supervisor has sent a configuration.
"""

import time

from vecd.gateway.api import open_inference
from vecd.gateway.api.registry import ROUTES, render_error
from vecd.gateway.api.routes import normalize, public_table
from vecd.gateway.api.system_routes import alive, unavailable
from vecd.gateway.types.errors import ApiError, NotReady
from vecd.gateway.types.messages import HttpRequest, Response

_PROBES = ("/", "/health", "/ping")
_TABLE = public_table(ROUTES, has_admin_listener=False, has_keys=False)


class StartingApi:
    """A `vecd.gateway.http.contract.Application`."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        """What the server's start is doing."""
        self._started_at = time.monotonic()

    def check_head(self, request: HttpRequest) -> Response | None:
        """Refuse what is not a probe before its body has arrived. Raises NotReady."""
        path = normalize(request.path)
        if path == "/live":
            return alive()
        if path in _PROBES:
            return unavailable(self.stage)
        if path == "/v2/health/live":
            return open_inference.alive()
        if path == "/v2/health/ready":
            return open_inference.unready(self.stage)
        raise NotReady(self.stage, time.monotonic() - self._started_at)

    async def handle(self, request: HttpRequest) -> Response:
        response = self.check_head(request)
        assert response is not None
        return response

    def render_error(self, error: ApiError, path: str | None) -> Response:
        return render_error(error, path, _TABLE)

    def add_headers(self, response: Response, request: HttpRequest | None) -> None:
        pass
