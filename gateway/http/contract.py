"""What the HTTP room asks of the application that it serves, and how long it waits for clients.

Owns types alone. `vecd.gateway.pipeline` is the application; `vecd.gateway.http.server` and its connections call it.
"""

from dataclasses import dataclass
from typing import Protocol

from vecd.gateway.types.errors import ApiError
from vecd.gateway.types.messages import HttpRequest, Response


class Application(Protocol):
    """What is served. The connection answers an ApiError with `render_error`, anything else raised as a 500."""

    def check_head(self, request: HttpRequest) -> Response | None:
        """Look at a request whose body has not all come yet. An answer, or an ApiError, ends the connection.

        Not called for a request that arrives in one piece: `handle` checks for itself.
        """

    async def handle(self, request: HttpRequest) -> Response:
        """Answer a complete request. Cancelled when the client has gone."""

    def render_error(self, error: ApiError, path: str | None) -> Response:
        """The answer to a failed request; `path` is None when its head was not understood."""

    def add_headers(self, response: Response, request: HttpRequest | None) -> None:
        """Add the headers that every answer to `request` has, errors included; None: its head was not understood.

        Not called on the admin listener.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the server waits for a client. Looked at once per `sweep_s`, so each may last that much longer."""

    head_s: float = 10.0
    """From the first byte of a request to the end of its head."""
    handshake_s: float = 10.0
    """From a connection's beginning to the end of its TLS handshake."""
    body_s: float = 60.0
    """From the end of the head to the end of the body; and a second more for each 256 KiB of it that have come."""
    idle_s: float = 120.0
    """Between requests, and before the first one. Longer than the idle time of the usual clients (openai-python:
    5 s, Go: 90 s), so that they close and no request meets a closing connection."""
    write_s: float = 30.0
    """In which a client has to take 16 KiB of an answer, and its 32nd part if that is more, or all that is left."""
    linger_s: float = 3.0
    """After the last answer, for the client to read it and close."""
    sweep_s: float = 1.0
