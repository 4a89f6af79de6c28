"""The bytes of one HTTP/1.1 exchange, without a socket: the head that is sent, and a reader of what comes back.

Owns the memory into which an answer is received: its reader hands out the place where the next bytes belong, so that
vectors go from the socket into the caller's matrix and are copied nowhere. Never sends or waits. Called by
`vecd.client.sdk.client` (blocking sockets) and `vecd.client.sdk.aio` (asyncio).
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from vecd.client.connection import BadResponse, ConnectionClosed

_SCRATCH_BYTES = 8192
"""What comes along with a head is copied: so many bytes at most."""
_MAX_HEAD_BYTES = 1 << 20
_MAX_BODY_BYTES = 1 << 32
"""A server that sends without end must not take all memory."""
_MAX_DIGITS = 18


class ResponseHead(NamedTuple):
    """Status and headers of an answer. Names are in small letters."""

    status: int
    headers: Mapping[str, str]
    length: int | None
    """Bytes of the body; None if they are not known before its end."""


class ResponseReader:
    """One answer, fed by whoever has the socket: read up to len(`buffer()`) bytes into it, and call `received`.

    `place`: called with the head of each final answer, returns the memory for a body of exactly `length` bytes, or None
    for memory of the reader's own. It may raise BadResponse.
    """

    def __init__(self, place: Callable[[ResponseHead], memoryview | None]) -> None:
        self._place = place
        self.head: ResponseHead | None = None
        self.is_complete = False
        self.has_bytes = False
        """Whether anything has come at all."""
        self._target = memoryview(bytearray(_SCRATCH_BYTES))
        self._num_received = 0
        """Bytes in `_target`."""
        self._body: bytearray | None = None
        self._chunks: _Chunks | None = None

    @property
    def body(self) -> bytes | bytearray | None:
        """Of an answer whose memory is the reader's own."""
        return self._body

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can be used again."""
        if self.head is None or not self.is_complete or (self.head.length is None and self._chunks is None):
            return False
        return self.head.headers.get("connection", "").lower() != "close"

    def buffer(self) -> memoryview:
        return self._target[self._num_received :]

    def received(self, num_bytes: int) -> bool:
        """Take the first bytes of the last `buffer()`. Returns whether the answer is complete. Raises BadResponse."""
        self.has_bytes = True
        self._num_received += num_bytes
        if self.head is None:
            self._read_head()
        elif self._chunks is not None or self.head.length is None:
            self._take_piece()
        elif self._num_received == len(self._target):
            self.is_complete = True
        return self.is_complete

    def ended(self) -> None:
        """The other side has closed. Raises ConnectionClosed unless that ends the answer."""
        if self.is_complete:
            return
        if self.head is None or self.head.length is not None or self._chunks is not None:
            raise ConnectionClosed("closed before the answer was complete")
        self.is_complete = True

    def _read_head(self) -> None:
        while self.head is None:
            data = bytes(self._target[: self._num_received])
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if self._num_received == len(self._target):
                    self._grow()
                return
            head = _parse_head(data[:end])
            rest = data[end + 4 :]
            if head.status < 200:  # an interim answer is followed by the final one
                self._target[: len(rest)] = rest
                self._num_received = len(rest)
                continue
            self.head = head
            self._begin_body(head, rest)

    def _grow(self) -> None:
        if len(self._target) >= _MAX_HEAD_BYTES:
            raise BadResponse(f"its head is longer than {_MAX_HEAD_BYTES >> 20} MiB")
        larger = memoryview(bytearray(2 * len(self._target)))
        larger[: len(self._target)] = self._target
        self._target = larger

    def _begin_body(self, head: ResponseHead, rest: bytes) -> None:
        if head.headers.get("transfer-encoding", "").lower() == "chunked":
            self._chunks = _Chunks()
        if head.length is not None and head.length > _MAX_BODY_BYTES:
            raise BadResponse(f"it is longer than {_MAX_BODY_BYTES >> 30} GiB")
        place = self._place(head)
        if head.length is None:
            self._body = bytearray()
            self._target = memoryview(bytearray(1 << 16))
            self._target[: len(rest)] = rest
            self._num_received = len(rest)
            self._take_piece()
            return
        if place is None:
            self._body = bytearray(head.length)
            place = memoryview(self._body)
        if len(place) != head.length or len(rest) > head.length:
            raise BadResponse(f"{max(head.length, len(rest))} bytes where {len(place)} were expected")
        place[: len(rest)] = rest
        self._target, self._num_received = place, len(rest)
        self.is_complete = self._num_received == head.length

    def _take_piece(self) -> None:
        assert self._body is not None
        piece = bytes(self._target[: self._num_received])
        self._num_received = 0
        if self._chunks is None:
            self._body += piece
        else:
            self.is_complete = self._chunks.feed(piece, self._body)
        if len(self._body) > _MAX_BODY_BYTES:
            raise BadResponse(f"it is longer than {_MAX_BODY_BYTES >> 30} GiB")


class _Chunks:
    """The transfer coding `chunked`, as a proxy may send it."""

    def __init__(self) -> None:
        self._pending = b""
        self._left = 0
        """Bytes that the chunk still has, its line end included."""
        self._is_last = False

    def feed(self, data: bytes, body: bytearray) -> bool:
        """Add what is in `data` to `body`. Returns whether that was the end. Raises BadResponse."""
        data, self._pending = self._pending + data, b""
        while data:
            if self._left:
                piece, data = data[: self._left], data[self._left :]
                body += piece[: max(0, self._left - 2)]
                self._left -= len(piece)
                continue
            line, found, rest = data.partition(b"\r\n")
            if not found:
                self._pending = data
                return False
            data = rest
            if self._is_last:
                if not line:  # the end of the trailers
                    return True
                continue
            try:
                size = int(line.partition(b";")[0], 16)
                if size < 0:
                    raise ValueError
            except ValueError:
                raise BadResponse(f"{line[:20]!r} is no size of a chunk") from None
            self._left = size + 2 if size else 0
            self._is_last = not size
        return False


def _parse_head(data: bytes) -> ResponseHead:
    line, *lines = data.decode("latin-1").split("\r\n")
    version, _, rest = line.partition(" ")
    status = number_of(rest[:3])
    if not version.startswith("HTTP/1.") or status is None:
        raise BadResponse(f"not HTTP: {line[:40]!r}")
    headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    length = headers.get("content-length", "0" if status in (204, 304) else "")
    if "transfer-encoding" in headers:
        length = ""
    num_bytes = number_of(length)
    if length and num_bytes is None:
        raise BadResponse(f"{length[:40]!r} is no length")
    return ResponseHead(status, headers, num_bytes)


def number_of(text: str) -> int | None:
    """The number that `text` is in ASCII digits; None if it is something else, or beyond all that a header counts."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None
