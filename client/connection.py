"""One HTTP/1.1 connection to a server, kept alive from request to request.

Owns the socket, the parsing of what comes back and the deadline of each exchange. Knows nothing of embeddings
and never sends anything twice: whether to connect again is the caller's to say. Called by `client.load`.

Why no HTTP library: a load generator shares its cores with the server it measures, so what it costs is an error of
the measurement. This costs 15 µs of CPU per request with everything around it (EPYC, 64 connections, 2 KB answers).
"""

import asyncio
import errno
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

_FRAMING_HEADERS = (b"content-length", b"transfer-encoding")


class ConnectionClosed(ConnectionError):
    """Raised by `exchange` when the server closes before the whole answer has come."""


class BadAnswer(Exception):
    """Raised when what came back is not an HTTP answer, or not the answer to what was asked."""


class Target(NamedTuple):
    """Where a server listens: a host and port, or the path of a unix socket."""

    host: str
    port: int
    unix_path: str | None

    @property
    def host_header(self) -> str:
        if self.unix_path is not None:
            return "localhost"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"http://{self.host_header}" if self.unix_path is None else f"unix:{self.unix_path}"


def parse_target(url: str) -> Target:
    """Read "http://host:port" or "unix:/path". Raises ValueError with a line that says what is wrong."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        if parts.netloc or not parts.path:
            raise ValueError(f"{url!r} names no socket: write unix:/path/to/socket")
        return Target("", 0, parts.path)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"{url!r} is neither http://host:port nor unix:/path")
    if parts.path not in ("", "/") or parts.query:
        raise ValueError(f"{url!r} has a path: give it with --path")
    return Target(parts.hostname, parts.port or 80, None)


def render_post(target: Target, path: str, body: bytes, *, api_key: str | None) -> bytes:
    """A whole POST of a JSON `body`, ready to be sent any number of times.

    Raises ValueError when `path` or `api_key` cannot stand in an HTTP header.
    """
    if not path.startswith("/") or not path.isprintable() or " " in path:
        raise ValueError(f"{path!r} is no path: it must start with / and have no blanks")
    if api_key is not None and not api_key.isprintable():
        raise ValueError("the API key has characters that cannot be sent")
    headers = [
        f"POST {path} HTTP/1.1",
        f"Host: {target.host_header}",
        "User-Agent: vecd-bench",
        "Accept: application/json",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    if api_key is not None:
        headers.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join(headers).encode() + b"\r\n\r\n" + body


class Answer(NamedTuple):
    """What came back, whatever its status."""

    status: int
    body: bytes


class Connection(asyncio.Protocol):
    """One exchange at a time: `exchange` sends a request and returns its answer. Made by `connect`."""

    def __init__(self) -> None:
        self.is_open = False
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._waiting: asyncio.Future[Answer] | None = None
        self._chunks: list[bytes] = []
        self._is_framed = False
        self._ends_with_connection = False
        self._keeps_alive = True

    async def exchange(self, request: bytes, timeout_s: float) -> Answer:
        """Send `request` and return what comes back.

        Raises TimeoutError when the whole answer is not there after `timeout_s`, ConnectionClosed or another
        OSError when the connection breaks, BadAnswer when the bytes are not HTTP. Side effects: after any of
        these, and after an answer that says so, the connection is closed (`is_open`).
        """
        if not self.is_open:
            raise ConnectionClosed("closed while idle")
        self._waiting = self._loop.create_future()
        timer = self._loop.call_later(timeout_s, self._expire)
        self._transport.write(request)
        try:
            return await self._waiting
        finally:
            self._waiting = None
            timer.cancel()

    def close(self) -> None:
        """Drop the connection at once, with whatever is under way."""
        self.is_open = False
        self._transport.abort()

    def _expire(self) -> None:
        self._fail(TimeoutError("no whole answer in time"))

    def _fail(self, error: Exception) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
        self.close()

    def _answer(self) -> None:
        answer = Answer(self._parser.get_status_code(), b"".join(self._chunks))
        self._chunks.clear()
        if self._waiting is None or self._waiting.done():
            self._fail(BadAnswer("an answer that nobody asked for"))
            return
        self._waiting.set_result(answer)

    # --- called by the event loop -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses of it
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BadAnswer(f"not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if exc is None and self._ends_with_connection:
            self._answer()
        else:
            self._fail(exc or ConnectionClosed("closed before the answer was complete"))

    # --- called by the parser -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._is_framed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in _FRAMING_HEADERS:
            self._is_framed = True

    def on_headers_complete(self) -> None:
        self._ends_with_connection = not self._is_framed
        self._keeps_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._ends_with_connection = False
        if self._parser.get_status_code() < 200:  # an interim answer: the real one follows
            return
        self._answer()
        if not self._keeps_alive:
            self.close()


async def connect(target: Target, timeout_s: float) -> Connection:
    """Open a connection. Raises OSError when it cannot be made, TimeoutError when it takes longer than
    `timeout_s`."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        if target.unix_path is not None:
            _, connection = await loop.create_unix_connection(Connection, target.unix_path)
        else:
            _, connection = await loop.create_connection(Connection, target.host, target.port)
    return connection


def name_failure(error: Exception) -> str:
    """The kind under which a failed exchange is counted."""
    match error:
        case BadAnswer():
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
