"""Recognize the head of a request that repeats the one before it on its connection.

Owns the comparison: two heads are the same if they differ in the digits of Content-Length alone. What was parsed and
checked of the first then holds for the second, but for that length. Parses no other head and keeps one. Pure. Called by
`vecd.gateway.http.http1`.

Measured, 7 header fields, interleaved: 7 µs for a request, 19 µs where its head is parsed.
"""

import re
from typing import NamedTuple

from vecd.gateway.http.request_line import RequestLine
from vecd.gateway.types.messages import HttpRequest, Limits

_MAX_HEAD_BYTES = 4096
"""Of a head that is kept. A connection keeps twice as much: the bytes and what was parsed of them."""
_MAX_DIGITS = 10
# Within an accepted head a line that begins so is that field: a folded line begins with a blank.
_LENGTH = re.compile(rb"\r\ncontent-length: ?([0-9]{1,%d})\r\n" % _MAX_DIGITS, re.IGNORECASE)
_OF_ONE_REQUEST = frozenset(("expect", "transfer-encoding", "content-encoding", "x-request-id"))
"""The fields that make something of their own of a request."""


class RepeatedHead(NamedTuple):
    before: bytes
    """All of the head before the digits of Content-Length, from the request line on."""
    after: bytes
    """All of it behind them, the blank line included."""
    limits: Limits
    """Those that it was checked against."""
    line: RequestLine
    headers: dict[str, str]

    @classmethod
    def of(cls, head: bytes, limits: Limits, line: RequestLine, request: HttpRequest) -> "RepeatedHead | None":
        """What the next head is compared with. None where it would be parsed all the same: without a Content-Length,
        as the last one of its connection, or with a field that is for one request. `head`: all of its bytes."""
        if len(head) > _MAX_HEAD_BYTES or not request.keep_alive or not _OF_ONE_REQUEST.isdisjoint(request.headers):
            return None
        length = _LENGTH.search(head)
        if length is None:
            return None
        return cls(head[: length.start(1)], head[length.end(1) :], limits, line, request.headers)

    def find_body(self, data: bytes, at: int) -> tuple[int, str] | None:
        """Where the body begins of a request at `at` that has this head, and its length in digits; None if the head is
        another, or not complete."""
        if not data.startswith(self.before, at):
            return None
        start = at + len(self.before)
        stop = data.find(b"\r", start, start + _MAX_DIGITS + 1)
        digits = data[start:stop]
        if stop < 0 or not digits.isdigit() or not data.startswith(self.after, stop):
            return None
        return stop + len(self.after), digits.decode()
