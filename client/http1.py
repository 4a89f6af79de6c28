"""The reader of what comes back in one HTTP/1.1 exchange, without a socket.

Owns the memory into which an answer is received: the reader hands out the place where the next bytes belong, so that
vectors go from the socket into the caller's matrix and are copied nowhere. Never sends or waits.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import httptools

from vecd.client.connection import BadResponse, ConnectionClosed

_SCRATCH_BYTES, _PIECE_BYTES = 8192, 1 << 16
"""What comes along with a head is copied: at most this many bytes. And so is a body of unknown length."""
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
    """One answer, fed by the owner of the socket: read up to len(`buffer()`) bytes into it, and call `received`.

    `place` is called with the head of the final answer. It returns the memory for a body of exactly `length` bytes, or
    None for memory of the reader's own. It may raise BadResponse.
    """

    def __init__(self, place: Callable[[ResponseHead], memoryview | None]) -> None:
        self.head: ResponseHead | None = None
        self.body: bytearray | None = None
        """Of an answer whose memory is the reader's own."""
        self.has_bytes = False
        self.is_complete = self.keeps_alive = False
        """The second: whether the connection can be used again, after a complete answer."""
        self._place = place
        self._parser = httptools.HttpResponseParser(self)
        self._num_head_bytes = 0
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._is_placed = False
        """Whether the rest of the body is received where it stays, past the parser."""
        self._target = memoryview(bytearray(_SCRATCH_BYTES))
        self._num_received = 0
        """Bytes in `_target`, once that is the place."""

    def buffer(self) -> memoryview:
        return self._target[self._num_received :]

    def received(self, num_bytes: int) -> bool:
        """Take the first bytes of the last `buffer()`. Returns whether the answer is complete. Raises BadResponse."""
        self.has_bytes = True
        if self._is_placed:
            self._num_received += num_bytes
        else:
            self._parse(self._target[:num_bytes])
        if self._is_placed:
            self.is_complete = self._num_received == len(self._target)
        return self.is_complete

    def ended(self) -> None:
        """The other side has closed. Raises ConnectionClosed unless that ends the answer."""
        is_open = self.head is not None and self.head.length is None and "transfer-encoding" not in self.head.headers
        if not self.is_complete and not is_open:
            raise ConnectionClosed("closed before the answer was complete")
        self.is_complete = True

    def _parse(self, data: memoryview) -> None:
        begins = self.head is None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise BadResponse(f"not HTTP: {error}") from error
        if self.head is None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                raise BadResponse(f"its head is longer than {_MAX_HEAD_BYTES >> 20} MiB")
            return
        # Not from the parser's own callbacks: it takes exceptions in them for errors in the answer.
        piece = b"".join(self._pieces)
        self._pieces.clear()
        if begins:
            self._begin_body(self.head)
        if self._is_placed:
            self._target[: len(piece)] = piece
            self._num_received = len(piece)
        else:
            assert self.body is not None
            self.body += piece
            self._check_length(len(self.body))

    def _begin_body(self, head: ResponseHead) -> None:
        self._check_length(head.length or 0)
        place = self._place(head)
        if head.length is None:
            self.body, self._target = bytearray(), memoryview(bytearray(_PIECE_BYTES))
            return
        if place is None:
            self.body = bytearray(head.length)
            place = memoryview(self.body)
        if len(place) != head.length:
            raise BadResponse(f"{head.length} bytes where {len(place)} were expected")
        self._target, self._is_placed = place, True

    def _check_length(self, num_bytes: int) -> None:
        if num_bytes > _MAX_BODY_BYTES:
            raise BadResponse(f"it is longer than {_MAX_BODY_BYTES >> 30} GiB")

    # --- called by the parser -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise BadResponse("more than one answer")
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status, headers = self._parser.get_status_code(), self._headers
        if status >= 200:  # an interim answer is followed by the final one
            length = headers.get("content-length", "0" if status in (204, 304) else "")
            length = "" if "transfer-encoding" in headers else length
            self.head = ResponseHead(status, headers, int(length) if length else None)
            self.keeps_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = self.head is not None


def number_of(text: str) -> int | None:
    """The number that `text` is in ASCII digits; None if it is something else, or beyond all that a header counts."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None
