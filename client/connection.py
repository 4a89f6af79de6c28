"""One HTTP/1.1 connection to a server, kept alive from request to request.

Owns the socket, the parsing of what comes back and the deadline of each exchange. Knows nothing of embeddings and never
sends anything twice: its caller decides whether to connect again.

Why no HTTP library: a load generator shares its cores with the server it measures, so its own cost is an error of the
measurement. With everything around it this costs 9 µs of CPU per request, system calls not counted (64 connections,
2 KB responses).
"""

import asyncio
import errno
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import httptools

from vecd.base.target import Target

_FRAMING_HEADERS = (b"content-length", b"transfer-encoding")
_NUMBER_HEADERS = {
    b"x-vecd-tokens": "num_tokens",
    b"x-compute-tokens": "num_tokens",  # text-embeddings-inference's
    b"x-vecd-dimensions": "num_dimensions",
    b"retry-after": "retry_after_s",
}
"""By header, the field of `ServerResponse` that takes its number."""
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")
"""OpenSSL's reasons for a first message that is not one of TLS."""
_Protocol = TypeVar("_Protocol", bound=asyncio.BaseProtocol)
_TLS_CHECK_S = 2.0
_TEXT_HEADERS = {b"x-vecd-model": "model", b"x-vecd-identity": "identity"}
"""By header, the field of `ServerResponse` that takes its text."""
_MAX_BODY_BYTES = 1 << 30
"""A server that sends without end must not take this process's memory before the timeout comes."""


class ConnectionClosed(ConnectionError):
    """Raised by `exchange` when the server closes before the whole response has come."""


class BadResponse(Exception):
    """Raised when the bytes are not an HTTP response, or the response does not fit the request."""


class TlsMismatch(ConnectionError):
    """Raised when one end speaks TLS and the other does not, or the certificate is not trusted. The message says what
    to change; another try would bring the same."""


def render_request(
    target: Target,
    path: str,
    body: bytes | None = None,
    *,
    api_key: str | None,
    accept: str = "application/json",
    headers: Mapping[str, str] | None = None,
    user_agent: str = "vecd-bench",
) -> bytes:
    """A whole POST of a JSON `body`, or a GET without one, ready to be sent any number of times.

    Raises ValueError when `path`, `api_key` or one of `headers` cannot stand in an HTTP request.
    """
    if not path.startswith("/") or not path.isprintable() or " " in path:
        raise ValueError(f"{path!r} is no path: it must start with / and have no blanks")
    if api_key is not None and not api_key.isprintable():
        raise ValueError("the API key has characters that cannot be sent")
    lines = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        f"Host: {target.host_header}",
        f"User-Agent: {user_agent}",
        f"Accept: {accept}",
    ]
    if api_key is not None:
        lines.append(f"Authorization: Bearer {api_key}")
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    for name, value in (headers or {}).items():
        if not value or not value.isascii() or not value.isprintable():
            raise ValueError(f"{value!r} cannot be sent as the header {name}")
        lines.append(f"{name}: {value}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")


class ServerResponse(NamedTuple):
    """A response, whatever its status. None: no header says it."""

    status: int
    body: bytes
    num_tokens: int | None = None
    """Of the request."""
    num_dimensions: int | None = None
    """Of each vector."""
    model: str | None = None
    retry_after_s: int | None = None
    identity: str | None = None
    """Of the model: "<32 hex>;dtype=<format>"."""


class ClientConnection(asyncio.Protocol):
    """One `exchange` at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._outcome: asyncio.Future[ServerResponse] | None = None
        self._responses: list[ServerResponse] = []
        """Complete, not yet delivered: one, if the server sends no more than was requested."""
        self._chunks: list[bytes] = []
        self._num_body_bytes = 0
        self._fields: dict[str, Any] = {}
        """Of the response that is being received, by its headers."""
        self._is_framed = False
        self._ends_with_connection = False
        self._keeps_alive = True

    async def exchange(self, request: bytes, timeout_s: float) -> ServerResponse:
        """Send `request` and return what comes back.

        Raises TimeoutError when the whole response does not come in time, ConnectionClosed or another OSError when the
        connection breaks, BadResponse when the bytes are not HTTP. Side effects: after an error, or a response that
        ends the connection, it is closed (`is_open`).
        """
        if not self.is_open:
            raise ConnectionClosed("closed while idle")
        self._outcome = self._loop.create_future()
        timer = self._loop.call_later(timeout_s, self._fail, TimeoutError("no whole response in time"))
        self._transport.write(request)
        try:
            return await self._outcome
        finally:
            timer.cancel()
            self._outcome = None

    def close(self) -> None:
        """Drop the connection at once. An exchange under way raises ConnectionClosed."""
        self._fail(ConnectionClosed("closed by the client"))

    def _fail(self, error: Exception) -> None:
        self.is_open = False
        self._transport.abort()
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_exception(error)

    def _deliver(self) -> None:
        response, *others = self._responses
        self._responses.clear()
        if self._outcome is None or self._outcome.done() or others:
            self._fail(BadResponse("a response without a request"))
            return
        self._outcome.set_result(response)
        if not self._keeps_alive:
            self.close()

    # --- called by the event loop -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses of it
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BadResponse(f"not HTTP: {error}"))
            return
        # Not from the parser's own callbacks: it takes exceptions in them for errors in the response.
        if self._responses:
            self._deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if exc is None and self._ends_with_connection and self._outcome is not None:
            self._complete_response()
            self._deliver()
        else:
            self._fail(exc or ConnectionClosed("closed before the response was complete"))

    # --- called by the parser -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._is_framed = False
        self._fields = {}
        self._num_body_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _FRAMING_HEADERS:
            self._is_framed = True
        elif name in _NUMBER_HEADERS and value.isdigit():
            self._fields[_NUMBER_HEADERS[name]] = int(value)
        elif name in _TEXT_HEADERS:
            self._fields[_TEXT_HEADERS[name]] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._ends_with_connection = not self._is_framed
        self._keeps_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if self._num_body_bytes > _MAX_BODY_BYTES:
            self._fail(BadResponse(f"longer than {_MAX_BODY_BYTES >> 30} GiB"))
        else:
            self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._ends_with_connection = False
        if self._parser.get_status_code() >= 200:  # an interim response is followed by the final one
            self._complete_response()

    def _complete_response(self) -> None:
        body = b"".join(self._chunks)
        self._chunks.clear()
        self._responses.append(ServerResponse(self._parser.get_status_code(), body, **self._fields))


async def connect(target: Target, timeout_s: float) -> ClientConnection:
    """Open a connection. Raises OSError when it cannot be made, TimeoutError when it takes longer than `timeout_s`,
    TlsMismatch when the server's certificate is not trusted, or it does not speak TLS."""
    return await connect_protocol(ClientConnection, target, timeout_s, "--ca FILE, or --insecure", target.host_header)


async def connect_protocol(
    make: Callable[[], _Protocol], target: Target, timeout_s: float, how_to_trust: str, address: str = ""
) -> _Protocol:
    """As `connect`, for any protocol of asyncio. The rest is as of `check_mismatch`."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            if target.unix_path is not None:
                return (await loop.create_unix_connection(make, target.unix_path))[1]
            return (await loop.create_connection(make, target.host, target.port, ssl=target.tls))[1]
    except ssl.SSLError as error:
        check_mismatch(error, how_to_trust, address)
        raise


def check_mismatch(error: ssl.SSLError, how_to_trust: str, address: str = "") -> None:
    """Raises TlsMismatch with what to change, if that is what `error` is."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message or error.reason
        raise TlsMismatch(f"its certificate is not trusted: {why} ({how_to_trust})") from error
    if error.reason in _NO_TLS:
        raise TlsMismatch(f"it does not speak TLS: use http://{address}") from error


async def or_mismatch(target: Target, exchange: Awaitable[ServerResponse]) -> ServerResponse:
    """As `exchange`. Raises TlsMismatch, too, when that fails because the server speaks TLS and `target` does not."""
    try:
        response = await exchange
    except (ConnectionRefusedError, TlsMismatch):
        raise
    except (OSError, BadResponse):
        await check_not_tls(target)
        raise
    if response.status == 400:
        await check_not_tls(target)
    return response


async def check_not_tls(target: Target) -> None:
    """Raises TlsMismatch when `target` is plain HTTP and the server speaks TLS.

    To be called after a failure only: a server of plain HTTP counts this as a bad request.
    """
    if target.tls is not None or target.unix_path is not None:
        return
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        connection = await connect(target._replace(tls=context), _TLS_CHECK_S)
    except OSError:
        return
    connection.close()
    raise TlsMismatch(f"it speaks TLS: use https://{target.host_header}")


def name_failure(error: Exception) -> str:
    match error:
        case BadResponse():
            return "bad answer"
        case TimeoutError():
            return "timeout"
        case ConnectionClosed():
            return "connection closed"
        case ConnectionRefusedError():
            return "connection refused"
        case ConnectionResetError() | BrokenPipeError():
            return "connection reset"
        case OSError(errno=int(number)):
            return f"connection error {errno.errorcode.get(number, number)}"
        case _:
            return f"connection error {type(error).__name__}"
