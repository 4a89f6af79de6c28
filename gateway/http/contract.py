"""The contracts between connections, the server that holds them, and the application that handles requests.

Owns types alone. `vecd.gateway.service.Services` is the application. `vecd.gateway.http.server` and its connections
call it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from vecd.gateway.http.body_budget import BodyBudget
from vecd.gateway.http.forwarded import TrustedProxies
from vecd.gateway.http.response_budget import ResponseBudget
from vecd.gateway.types.errors import ApiError
from vecd.gateway.types.messages import HttpRequest, Limits, Response


class Application(Protocol):
    """What handles requests. An ApiError that it raises is rendered by `render_error`, anything else as a 500."""

    def check_head(self, request: HttpRequest) -> Response | None:
        """Check a request whose body is still arriving. A response, or an ApiError, ends the connection.

        Not called for a request that arrives in one piece: `handle` checks it.
        """

    async def handle(self, request: HttpRequest) -> Response:
        """Handle a complete request. Cancelled when the client disconnects."""

    def render_error(self, error: ApiError, path: str | None) -> Response:
        """The response to a failed request; `path` is None when its head could not be parsed."""

    def add_headers(self, response: Response, request: HttpRequest | None) -> None:
        """Add the headers that every response to `request` has, errors included; None: its head could not be parsed.

        Not called on the admin listener.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the server waits for a client. Checked once per `sweep_s`, so each may last that much longer."""

    head_s: float = 10.0
    """From the first byte of a request to the end of its head; and from a connection's beginning to the end of its
    PROXY header, where there must be one."""
    handshake_s: float = 10.0
    """From a connection's beginning to the end of its TLS handshake."""
    body_s: float = 60.0
    """From the end of the head to the end of the body, and a second more for each 256 KiB received of it."""
    idle_s: float = 120.0
    """Between requests, and before the first one. Longer than the idle time of the usual clients (openai-python:
    5 s, Go: 90 s), so that they close and no request meets a closing connection."""
    write_s: float = 30.0
    """The time in which a client must read 16 KiB of a response, or its 32nd part if that is more, or all the rest."""
    linger_s: float = 3.0
    """After the last response, for the client to read it and close."""
    sweep_s: float = 1.0


class ConnectionHost(Protocol):
    """What a connection uses of its server."""

    app: Application
    limits: Limits
    timeouts: Timeouts
    trusted_proxies: TrustedProxies | None
    clock: Callable[[], float]
    on_finished: Callable[[int, HttpRequest | None], None]
    arriving: BodyBudget
    unsent: ResponseBudget
    is_draining: bool
    num_requests_in_flight: int
    num_plain_since_sweep: int

    def http_date(self) -> str: ...
    def register(self, connection: Any) -> str | None: ...
    def forget(self, connection: Any) -> None: ...
