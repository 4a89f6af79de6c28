"""One HTTP/1.1 connection to a server, kept alive from request to request.

Owns the socket, the parsing of what comes back and the deadline of each exchange. Knows nothing of embeddings and
never sends anything twice: its caller decides whether to connect again. Called by the load loops of `vecd bench`, by
`vecd.client.bulk.service` and by `vecd.client.top.source`.

Why no HTTP library: a load generator shares its cores with the server it measures, so its own cost is an error of the
measurement. With everything around it this costs 9 µs of CPU per request, system calls not counted (64 connections,
2 KB responses).
"""

import asyncio
import errno
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import httptools

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
_TLS_CHECK_S = 2.0
_TEXT_HEADERS = {b"x-vecd-model": "model", b"x-vecd-identity": "identity"}
"""By header, the field of `ServerResponse` that takes its text."""
_CREDENTIALS = re.compile(r"(?!unix:(?!//))([^/?#]*//)?[^/?#]*@")
"""What an address begins with that has a user in front of its host."""
_MAX_BODY_BYTES = 1 << 30
"""A server that sends without end must not take this process's memory before the timeout comes."""


class ConnectionClosed(ConnectionError):
    """Raised by `exchange` when the server closes before the whole response has come."""


class BadResponse(Exception):
    """Raised when the bytes are not an HTTP response, or the response does not fit the request."""


class TlsMismatch(ConnectionError):
    """Raised when one end speaks TLS and the other does not, or the certificate is not trusted. The message says what
    to change; another try would bring the same."""


class Target(NamedTuple):
    """Where a server listens: a host and port, or the path of a unix socket."""

    host: str
    port: int
    unix_path: str | None
    tls: ssl.SSLContext | None = None
    """Of an https:// address."""

    @property
    def host_header(self) -> str:
        if self.unix_path is not None:
            return "localhost"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{self.host_header}" if self.unix_path is None else f"unix:{self.unix_path}"


def parse_target(url: str, ca: Path | None = None, *, insecure: bool = False) -> Target:
    """Read "http://host:port", "https://host:port" or "unix:/path".

    `ca`: a PEM file of the certificates to trust, instead of the system's. `insecure`: trust any certificate. Raises
    ValueError with a line that says what is wrong.
    """
    refuse_credentials(url)
    parts = urlsplit(url)
    if (ca is not None or insecure) and parts.scheme != "https":
        raise ValueError(f"--ca and --insecure mean something only with https://, not with {url!r}")
    if parts.scheme == "unix":
        if parts.netloc or not parts.path:
            raise ValueError(f"{url!r} names no socket: write unix:/path/to/socket")
        return Target("", 0, parts.path)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is neither http://host:port nor https://host:port nor unix:/path")
    if parts.path not in ("", "/") or parts.query:
        raise ValueError(f"{url!r} has a path: give it with --path")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}") from error
    if parts.scheme == "http":
        return Target(parts.hostname, port or 80, None)
    try:
        tls = ssl.create_default_context(cafile=ca)
    except OSError as error:  # of which SSLError is one
        raise ValueError(f"--ca: {ca}: {error.strerror or error}") from error
    if insecure:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return Target(parts.hostname, port or 443, None, tls)


def refuse_credentials(url: str) -> None:
    """Raises ValueError, which does not quote `url`, when that has a user or a password: they would not be sent, and
    be written wherever the address is."""
    if _CREDENTIALS.match(url):
        raise ValueError(
            "the address has a user or a password in front of its host, which is never sent: leave it out, and give an "
            "API key as api_key=, --api-key or the variable VECD_API_KEY"
        )


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
    """A response, whatever its status."""

    status: int
    body: bytes
    num_tokens: int | None = None
    """Tokens of the request, if a header said so."""
    num_dimensions: int | None = None
    """Dimensions of each vector, if a header said so."""
    model: str | None = None
    """Name of the model, if a header said so."""
    retry_after_s: int | None = None
    """The Retry-After header, if it is a number of seconds."""
    identity: str | None = None
    """Identity of the model, "<32 hex>;dtype=<format>", if a header said so."""


class ClientConnection(asyncio.Protocol):
    """One `exchange` at a time. Made by `connect`."""

    def __init__(self) -> None:
        self.is_open = False
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._outcome: asyncio.Future[ServerResponse] | None = None
        """Of the exchange under way."""
        self._responses: list[ServerResponse] = []
        """Complete, not yet delivered: one, if the server sends no more than was requested."""
        self._chunks: list[bytes] = []
        self._num_body_bytes = 0
        self._fields: dict[str, Any] = {}
        """Of the response that is being received, those that a header said."""
        self._is_framed = False
        self._ends_with_connection = False
        self._keeps_alive = True

    async def exchange(self, request: bytes, timeout_s: float) -> ServerResponse:
        """Send `request` and return what comes back.

        Raises TimeoutError when the whole response does not come in time, ConnectionClosed or another OSError when the
        connection breaks, BadResponse when the bytes are not HTTP.

        Side effects: after an error, or a response that ends the connection, the connection is closed (`is_open`).
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
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        if target.unix_path is not None:
            _, connection = await loop.create_unix_connection(ClientConnection, target.unix_path)
        else:
            try:
                _, connection = await loop.create_connection(ClientConnection, target.host, target.port, ssl=target.tls)
            except ssl.SSLCertVerificationError as error:
                why = error.verify_message or error.reason
                raise TlsMismatch(f"its certificate is not trusted: {why} (--ca FILE, or --insecure)") from error
            except ssl.SSLError as error:
                if error.reason not in _NO_TLS:
                    raise
                raise TlsMismatch(f"it does not speak TLS: use http://{target.host_header}") from error
    return connection


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
    """The kind under which a failed exchange is counted."""
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
