"""One HTTP/1.1 exchange without a socket: the bytes of a request, and the reader of the response.

Owns the memory into which a response is received. The reader hands out the place where the next bytes belong, so that
vectors go from the socket into the caller's matrix and are copied nowhere. Never sends, waits or repeats: connections
do that (`vecd.client.sockets`).

Why no HTTP library: a load generator shares its cores with the server it measures, so its own cost is an error of the
measurement.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import httptools

from vecd.base.target import Target

_SCRATCH_BYTES, _PIECE_BYTES = 8192, 1 << 16
"""What comes along with a head is copied: at most this many bytes. And so is a body of unknown length."""
_MAX_HEAD_BYTES = 1 << 20
_MAX_BODY_BYTES = 1 << 32
"""A server that sends without end must not take all memory."""
_MAX_DIGITS = 18


class BadResponse(Exception):
    """Raised when the bytes are not an HTTP response, or the response does not fit the request."""


class ConnectionClosed(ConnectionError):
    """Raised when the server closes before the whole response has come."""


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

    `path`: behind the target's own. Raises ValueError when it, `api_key` or one of `headers` cannot stand in an HTTP
    request.
    """
    path = target.prefix + path
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


@dataclass(slots=True)
class ServerResponse:
    """A response, whatever its status. Properties are None where no header says it."""

    status: int
    body: bytes = b""
    """Empty where the caller has given the memory, and of a body that is streamed."""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Names in small letters."""

    def text(self, name: bytes) -> str | None:
        value = dict(self.headers).get(name)
        return None if value is None else value.decode("latin-1")

    def number(self, *names: bytes) -> int | None:
        """Of the first of these headers that has ASCII digits, and no more of them than anything counts."""
        found = dict(self.headers)
        for name in names:
            if (value := found.get(name, b"")).isdigit() and len(value) <= _MAX_DIGITS:
                return int(value)
        return None

    @property
    def num_tokens(self) -> int | None:
        """Of the request."""
        return self.number(b"x-vecd-tokens", b"x-compute-tokens")  # the second is text-embeddings-inference's

    @property
    def num_dimensions(self) -> int | None:
        """Of each vector."""
        return self.number(b"x-vecd-dimensions")

    @property
    def identity(self) -> str | None:
        """Of the model: "<32 hex>;dtype=<format>"."""
        return self.text(b"x-vecd-identity")

    @property
    def request_id(self) -> str | None:
        return self.text(b"x-request-id")

    @property
    def retry_after_s(self) -> float | None:
        if (milliseconds := self.number(b"retry-after-ms")) is not None:
            return milliseconds / 1000
        return self.number(b"retry-after")


Place: TypeAlias = Callable[[ServerResponse, int], memoryview | None]
"""Called with the head of a response and the length of its body: the memory for exactly these bytes, or None for
memory of the reader's own. May raise BadResponse."""


class ResponseReader:
    """The responses of one connection, fed by the owner of the socket: `begin` for each; then read up to
    len(`buffer()`) bytes into it and call `received`, until that returns True, or `ended`.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._is_placed = False
        """Whether the rest of the body is received where it stays, past the parser."""
        self.begin()

    def begin(self, place: Place | None = None, *, is_streamed: bool = False, has_body: bool = True) -> None:
        """Expect a response. `is_streamed`: its body is what `take` returns, of any length. `has_body`: False for one
        to HEAD."""
        if self._is_placed:  # the parser still waits for that body
            self._parser = httptools.HttpResponseParser(self)
        self.response: ServerResponse | None = None
        """Once the head of the final response is there."""
        self.has_bytes = self.is_complete = self._is_placed = self._is_own = self._has_more = False
        self.keeps_alive = False
        """Whether the connection can be used again, after a complete response."""
        self._target, self._num_received = self._scratch, 0
        """The second: bytes in `_target`, once that is where the body stays."""
        self._place, self._is_streamed, self._has_body = place, is_streamed, has_body
        self._headers: list[tuple[bytes, bytes]] = []
        self._num_head_bytes = self._num_body_bytes = 0
        self._pieces: list[bytes] = []

    def buffer(self) -> memoryview:
        return self._target[self._num_received :]

    def received(self, num_bytes: int) -> bool:
        """Take the first bytes of the last `buffer()`. Returns whether the response is complete. Raises BadResponse."""
        self.has_bytes = True
        if self._is_placed:
            self._num_received += num_bytes
            self.is_complete = self._num_received == len(self._target)
            if self.is_complete and self._is_own and self.response is not None:
                self.response.body = self._target.tobytes()
        else:
            self._parse(self._target[:num_bytes])
        if self.is_complete:  # the memory is the caller's again
            self._target, self._num_received, self._place = self._scratch, 0, None
        return self.is_complete

    def ended(self) -> None:
        """The other side has closed. Raises ConnectionClosed unless that ends the response; BadResponse."""
        framing = {b"content-length", b"transfer-encoding"}
        if self.response is None or not framing.isdisjoint(dict(self.response.headers)):
            raise ConnectionClosed("closed before the response was complete")
        self.is_complete = True
        self._finish()

    def take(self) -> bytes:
        """What has come of a streamed body since."""
        body = b"".join(self._pieces)
        self._pieces.clear()
        return body

    def _parse(self, data: memoryview) -> None:
        begins = self.response is None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise BadResponse(f"not HTTP: {error}") from error
        # Not from the parser's own callbacks: it takes exceptions in them for errors in the response.
        if self._has_more:
            raise BadResponse("more than one response")
        if self.response is None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                raise BadResponse(f"its head is longer than {_MAX_HEAD_BYTES >> 20} MiB")
        elif self.is_complete:
            self._finish()
        elif begins:
            self._begin_body(self.response)
        elif not self._is_streamed:
            _check_length(self._num_body_bytes)

    def _finish(self) -> None:
        """The whole body has come through the parser."""
        if self._is_streamed:
            return
        assert self.response is not None
        body = self.take()
        if (place := self._memory(self.response, len(body))) is None:
            self.response.body = body
        else:
            place[:] = body

    def _begin_body(self, response: ServerResponse) -> None:
        found = dict(response.headers)
        if self._is_streamed or b"content-length" not in found or b"transfer-encoding" in found:
            self._target = memoryview(bytearray(_PIECE_BYTES))
            return
        length = int(found[b"content-length"])
        _check_length(length)
        place = self._memory(response, length)
        self._is_own = place is None
        if place is None:
            place = memoryview(bytearray(length))
        piece = self.take()
        place[: len(piece)] = piece
        self._target, self._num_received, self._is_placed = place, len(piece), True

    def _memory(self, response: ServerResponse, length: int) -> memoryview | None:
        place = None if self._place is None else self._place(response, length)
        if place is not None and len(place) != length:
            raise BadResponse(f"{length} bytes where {len(place)} were expected")
        return place

    # --- called by the parser -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._has_more = self.is_complete
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and not self._has_more:  # an interim response is followed by the final one
            self.response = ServerResponse(status, b"", self._headers)
            self._headers = []  # behind the body come trailers
            self.keeps_alive = self._parser.should_keep_alive()
            if not self._has_body:  # the parser would wait for what the length announces
                self.is_complete, self.keeps_alive = True, False

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = self.response is not None


def _check_length(num_bytes: int) -> None:
    if num_bytes > _MAX_BODY_BYTES:
        raise BadResponse(f"it is longer than {_MAX_BODY_BYTES >> 30} GiB")
