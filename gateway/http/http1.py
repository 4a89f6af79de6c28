"""HTTP/1.x as bytes: bytes received become requests, and responses become bytes.

Owns how a request is read (its framing, its limits, which bytes are refused and with which error) and how the head of a
response is written. Never touches a socket, a task or a clock: `vecd.gateway.http.connection` feeds it, sends what it
encodes, and keeps the deadlines. Tests drive it with bytes alone.

llhttp (by httptools) parses header fields. This module adds what llhttp leaves to its user: limits, one well-formed
Host, exactly known transfer codings, no upgrades. llhttp cannot stop at the end of a head, so it never gets bytes
beyond it:

    bytes fed  │ request line  │ header fields … CRLF CRLF                     │ body      │ next request …
    read by    └`request_line` └ llhttp: 3 bytes held back until the end comes ┘ `framing` │ waits, unparsed

So the pipelined requests of a connection wait as plain bytes, each head is read by a parser of its own, and nothing (a
trailer, an upgrade, a `Connection: close`) leaks from one request into the next. A head that only repeats the one
before is not parsed again (`vecd.gateway.http.repeated_head`).
"""

import itertools
import os
import re
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from http import HTTPStatus
from typing import NoReturn, TypeAlias

import httptools

from vecd.gateway.http.decompress import coding_named
from vecd.gateway.http.framing import Body, ChunkedBody, KnownBody
from vecd.gateway.http.repeated_head import RepeatedHead
from vecd.gateway.http.request_line import RequestLine, check_line_begun, is_authority, parse_line
from vecd.gateway.types.errors import (
    ApiError,
    BadRequest,
    HeadersTooLarge,
    NotImplementedByServer,
    PayloadTooLarge,
)
from vecd.gateway.types.messages import REQUEST_ID, HttpRequest, Limits, Response
from vecd.gateway.types.quoting import quoted

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_BLANK_LINE = b"\r\n\r\n"
"""Ends every head. llhttp takes no other line end than CRLF."""
_MAX_KEPT_BACK_BYTES = len(_BLANK_LINE) - 1
_LINE_ENDS, _LINE_END_BYTES = re.compile(rb"[\r\n]*"), (b"\r", b"\n")
_ANY_LINE = b"POST / HTTP/1.1"
"""What llhttp gets for a request line. It parses the header fields of all methods and versions alike."""

_REQUEST_ID_PREFIX = f"req_{os.urandom(8).hex()}"
_request_numbers = itertools.count(1)


@dataclass(slots=True)
class HeadReceived:
    """The head of a request is complete and acceptable, and bytes of its body are missing."""

    request: HttpRequest


@dataclass(slots=True)
class RequestReceived:
    """A request is complete."""

    request: HttpRequest


Event: TypeAlias = HeadReceived | RequestReceived


class ReadState(Enum):
    """The state of a reader, by which a connection sets its deadline."""

    IDLE = auto()
    """Between requests: no byte of the next one was received."""
    HEAD = auto()
    """At least one byte of a request was received, and its head is not complete."""
    BODY = auto()
    CLOSED = auto()
    """The bytes were refused, or the last request asked to close: all further bytes are dropped."""


_IDLE, _HEAD, _BODY, _CLOSED = ReadState  # Python 3.11 takes 0.1 µs to find a member of an enumeration


class RequestReader:
    """Reads the requests of one connection, one at a time: feed it, then take events until there is none."""

    __slots__ = ("_at", "_data", "_head", "_message", "limits", "state")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        """Of the next request; the one that is being read keeps those that it began with."""
        self._data = b""
        self._at = 0  # the part of _data before this position is parsed
        self._message: _Message | None = None
        self._head: RepeatedHead | None = None
        self.state = _IDLE

    @property
    def request(self) -> HttpRequest | None:
        """The request being read, or refused, once its head is known."""
        return self._message.request if self._message is not None else None

    @property
    def num_body_bytes(self) -> int:
        """Bytes that are held of an incomplete body."""
        return self._message.body.num_bytes if self._message is not None else 0

    @property
    def has_more(self) -> bool:
        """`next_event` returned None because it has done enough for one turn of the event loop: call it again."""
        return self._message is not None and self._message.body.has_more

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes fed and not parsed yet: those behind the request that is being handled."""
        return len(self._data) - self._at

    def read_whole(self, data: bytes) -> HttpRequest | None:
        """The request that the received bytes are, if they are one and its head is that of the one before; None if they
        must be fed. Nothing is kept of them."""
        if self._head is None or self.state is not _IDLE:
            return None
        found = self._head.find_body(data, 0)
        if found is None or found[0] + int(found[1]) != len(data):
            return None
        return self._repeated(self._head, found[1], data, 0, found[0])

    def feed(self, data: bytes) -> None:
        """Add bytes that the connection received. Parses nothing yet."""
        if self.state is _CLOSED:
            return
        rest = self._data[self._at :]
        self._data = rest + data if rest else data
        self._at = 0
        if self.state is _IDLE:
            self._seek_request()

    def next_event(self) -> Event | None:
        """Parse the next event; None when bytes are missing, or it `has_more`, or when the reader is closed.

        Raises ApiError when the bytes are refused. Every complete request before them has been returned by then;
        the reader is closed, and `request` is the one refused, if its head was known.
        """
        if self.state is _IDLE or self.state is _CLOSED:
            return None
        message, start = self._message, self._at
        if message is None:
            if self._head is not None and (repeated := self._read_repeated(self._head)) is not None:
                return RequestReceived(repeated)
            message = self._message = _Message(self.limits)
        else:
            start = -1  # it began in other data
        try:
            self._read(message)
        except ApiError:
            self.close()
            raise
        if message.request is None:
            return None
        if message.body.is_complete:
            if start >= 0 and message.line is not None:
                head = self._data[start : self._at - message.body.num_bytes]
                self._head = RepeatedHead.of(head, message.limits, message.line, message.request)
            return self._end_message(message.request)
        if self.state is _BODY:
            return None
        self.state = _BODY
        return HeadReceived(message.request)

    def _read_repeated(self, head: RepeatedHead) -> HttpRequest | None:
        """The request that comes next, if all of it is there, within the limits, and its head is this one again."""
        found = head.find_body(self._data, self._at)
        if found is None:
            return None
        request = self._repeated(head, found[1], self._data, self._at, found[0])
        if request is not None:
            self._at = found[0] + int(found[1])
            self._seek_request()
        return request

    def _repeated(self, head: RepeatedHead, digits: str, data: bytes, at: int, start: int) -> HttpRequest | None:
        """The request at `at` with this head but for its length in `digits`, whose body begins at `start`; None if the
        body is not complete, or a limit is exceeded."""
        limits, num_body_bytes = head.limits, int(digits)
        stop = start + num_body_bytes
        if (
            limits is not self.limits
            or stop > len(data)
            or num_body_bytes > limits.max_body_bytes
            or start - at > limits.max_head_bytes
        ):
            return None
        headers = {**head.headers, "content-length": digits}
        method, path, query, http_minor = head.line
        return HttpRequest(
            method, path, query, headers, http_minor, True, new_request_id(), False, None, data[start:stop]
        )

    def _read(self, message: "_Message") -> None:
        """Parse the received bytes of one request, and none beyond it."""
        if message.line is None:
            self._at = message.parse_line(self._data, self._at)
            if message.line is None:
                return
        while message.request is None:
            start, stop = self._at, self._segment_end()
            if stop == start:
                return
            self._at = stop
            message.parse_head(self._data[start:stop])
        if not message.body.is_complete:
            self._at = message.body.read(self._data, self._at)

    def _segment_end(self) -> int:
        """The position up to which llhttp can parse without going beyond the head."""
        blank_line = self._data.find(_BLANK_LINE, self._at)
        if blank_line >= 0:
            return blank_line + len(_BLANK_LINE)
        return max(self._at, len(self._data) - _MAX_KEPT_BACK_BYTES)

    def _end_message(self, request: HttpRequest) -> RequestReceived:
        assert self._message is not None
        request.body = self._message.body.take()
        self._message.free()
        self._message = None
        if request.keep_alive:
            self._seek_request()
        else:
            self.close()
        return RequestReceived(request)

    def _seek_request(self) -> None:
        """Skip empty lines, which may precede a request and are no part of it (RFC 9112, section 2.2)."""
        if self._data[self._at : self._at + 1] in _LINE_END_BYTES:
            match = _LINE_ENDS.match(self._data, self._at)
            assert match is not None
            self._at = match.end()
        self.state = _HEAD if self._at < len(self._data) else _IDLE

    def close(self) -> None:
        """Read nothing more, and drop the received bytes of a request."""
        self.state = _CLOSED
        self._data, self._at = b"", 0
        if self._message is not None:
            self._message.free()


_NO_BODY = KnownBody(0)


class _Message:
    """One request while it is read: the callbacks of llhttp, the checks, and the body received so far."""

    __slots__ = (
        "_headers", "_num_head_bytes", "_num_headers", "_parser", "_refusal", "body", "limits", "line", "request",
    )  # fmt: skip

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        # `_check_transfer_encoding` is stricter, but takes a tab behind the coding.
        self._parser.set_dangerous_leniencies(lenient_transfer_encoding=True)
        self._headers: dict[str, str] = {}
        self._num_headers = 0
        self._num_head_bytes = 0
        self._refusal: ApiError | None = None
        self.line: RequestLine | None = None
        self.request: HttpRequest | None = None
        self.body: Body = _NO_BODY

    def parse_line(self, data: bytes, at: int) -> int:
        """Parse the request line that begins at `at`, if all of it is there; returns the position of its CRLF, which is
        left for `parse_head`, or `at`. Raises ApiError when it is refused, and as soon as it is clear that it will."""
        end = data.find(b"\n", at) + 1
        if end == 0:
            self._num_head_bytes = len(data) - at
            check_line_begun(data[at:], self.limits.max_target_bytes)
            self._check_head_size()
            return at
        self.line = parse_line(data[at:end], self.limits.max_target_bytes)
        assert self._parser is not None
        self._parser.feed_data(_ANY_LINE)
        self._num_head_bytes = end - len(b"\r\n") - at
        return end - len(b"\r\n")

    def parse_head(self, segment: bytes) -> None:
        """Parse the next bytes after the request line with llhttp. Raises ApiError when they are refused, by llhttp or
        by a check here."""
        assert self._parser is not None
        self._num_head_bytes += len(segment)
        try:
            self._parser.feed_data(segment)
        except httptools.HttpParserUpgrade:
            pass  # Java's own client always offers h2c, and continues with HTTP/1.1.
        except httptools.HttpParserCallbackError:
            # httptools hides exceptions of callbacks.
            if self._refusal is None:
                raise
            raise self._refusal from None
        except httptools.HttpParserError as error:
            raise _refusal_of(error) from None
        self._check_head_size()

    def free(self) -> None:
        """Free what was read now, rather than at the next garbage collection: parser and callbacks are a cycle."""
        self._parser = None
        self.body = _NO_BODY

    # --- called by llhttp ---

    def on_message_begin(self) -> None:
        self._check_is_head()

    def on_body(self, piece: bytes) -> None:
        self._check_is_head()

    def on_header(self, raw_name: bytes, raw_value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self.limits.max_headers:
            self._refuse(HeadersTooLarge(f"headers: more than the {self.limits.max_headers} allowed"))
        name = raw_name.lower().decode("latin-1")
        value = raw_value.strip(b" \t").decode("latin-1")
        if name in self._headers:
            value = self._joined(name, value)
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        try:
            self._check_head_size()
            self.request = self._request()
            self._check(self.request)
        except ApiError as error:
            self._refuse(error)

    # --- checks ---

    def _refuse(self, error: ApiError) -> NoReturn:
        self._refusal = error
        raise error

    def _check_is_head(self) -> None:
        if self.request is not None:
            self._refuse(BadRequest("a request does not end where its head says"))

    def _check_head_size(self) -> None:
        """llhttp has no limit of its own, and httptools collects what it is given."""
        if self._num_head_bytes > self.limits.max_head_bytes:
            self._refuse(
                HeadersTooLarge(f"head of the request: longer than the {self.limits.max_head_bytes} bytes allowed")
            )

    def _joined(self, name: str, value: str) -> str:
        if name == "host":
            self._refuse(BadRequest("header Host: given more than once"))
        return f"{self._headers[name]}, {value}"

    def _request(self) -> HttpRequest:
        assert self.line is not None
        method, path, query, http_minor = self.line
        own_id = self._headers.get("x-request-id")
        return HttpRequest(
            method=method,
            path=path,
            query=query,
            headers=self._headers,
            http_minor=http_minor,
            keep_alive=_keeps_alive(self._headers.get("connection", ""), http_minor),
            request_id=own_id if own_id and REQUEST_ID.fullmatch(own_id) else new_request_id(),
        )

    def _check(self, request: HttpRequest) -> None:
        """Check what llhttp does not. It refuses Content-Length given twice, or beside Transfer-Encoding."""
        headers = self._headers
        if "host" not in headers and request.http_minor == 1:
            raise BadRequest("header Host: missing, and HTTP/1.1 requires it")
        if not is_authority(headers.get("host", "")):
            raise BadRequest("header Host: not a host name or address with an optional port")
        if "content-encoding" in headers:
            request.coding = coding_named(headers["content-encoding"])
        self.body = self._body(request)
        if "expect" in headers and request.http_minor == 1:
            request.expects_continue = headers["expect"].lower() == "100-continue" and self.body is not _NO_BODY

    def _body(self, request: HttpRequest) -> Body:
        headers, limit = self._headers, self.limits.max_body_bytes
        if "transfer-encoding" in headers:
            _check_transfer_encoding(headers["transfer-encoding"], request.http_minor)
            return ChunkedBody(limit, self.limits.max_head_bytes)
        length = int(headers.get("content-length", 0))
        if length > limit:
            raise PayloadTooLarge(f"body: Content-Length is {length} bytes, at most {limit} are allowed")
        return KnownBody(length) if length else _NO_BODY


@lru_cache(maxsize=16)  # clients send few different ones
def _keeps_alive(connection: str, http_minor: int) -> bool:
    """Whether the client wants to send more, by its Connection header (RFC 9112, section 9.3)."""
    options = _elements(connection)
    return "close" not in options and (http_minor == 1 or "keep-alive" in options)


def _elements(value: str) -> list[str]:
    """The elements of a list in a header, in lower case."""
    return [element.strip(" \t") for element in value.lower().split(",")]


def _check_transfer_encoding(value: str, http_minor: int) -> None:
    if http_minor == 0:
        raise BadRequest("header Transfer-Encoding: not allowed in HTTP/1.0")
    *others, last = _elements(value)
    if "chunked" in others:
        raise BadRequest("header Transfer-Encoding: chunked is not the last coding")
    # Proxies differ in how they read anything else beside it, even an empty element.
    if others or last != "chunked":
        raise NotImplementedByServer(f"header Transfer-Encoding: {quoted(value)}, only chunked is supported")


def _refusal_of(error: httptools.HttpParserError) -> ApiError:
    """The error for a refusal of llhttp, whose reasons are fixed sentences that quote nothing."""
    return BadRequest(f"not a well-formed HTTP request: {error}")


def new_request_id() -> str:
    """An id that no other request of any gateway process has."""
    return f"{_REQUEST_ID_PREFIX}{next(_request_numbers):08x}"


# --- responses ----------------------------------------------------------------------------------------------------

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}" for status in HTTPStatus}
_BODILESS_STATUSES = {HTTPStatus.NO_CONTENT.value, HTTPStatus.NOT_MODIFIED.value}
_MAX_JOINED_BYTES = 48 * 1024
"""Copying so many bytes takes 1 µs."""


def encode_response(
    response: Response,
    *,
    request_id: str,
    keep_alive: bool,
    http_minor: int = 1,
    head_only: bool = False,
    date: str | None = None,
) -> list[bytes | memoryview]:
    """The bytes of a response: one piece, or the head and the pieces of the body if that is too large to copy.

    `keep_alive`: the connection stays open for another request. `http_minor`: of the request. `head_only`: the request
    was a HEAD. `date`: now, as HTTP writes it. Raises ValueError when a value would end its line (response splitting)
    or is not latin-1, and KeyError for a status that does not exist.
    """
    lines = [_STATUS_LINES[response.status], f"x-request-id: {request_id}"]
    is_bodiless = response.status in _BODILESS_STATUSES
    num_body_bytes = response.num_body_bytes
    if not is_bodiless:
        lines += (f"content-type: {response.content_type}", f"content-length: {num_body_bytes}")
    if response.headers:
        lines += [f"{name}: {value}" for name, value in response.headers.items()]
    if date is not None:
        lines.append(f"date: {date}")
    if not keep_alive:
        lines.append("connection: close")
    elif http_minor == 0:
        lines.append("connection: keep-alive")
    head = _encode_lines(lines)
    if head_only or is_bodiless:
        return [head]
    pieces: list[bytes | memoryview] = [head]
    pieces += [response.body] if isinstance(response.body, bytes) else response.body
    return [b"".join(pieces)] if num_body_bytes <= _MAX_JOINED_BYTES else pieces


def _encode_lines(lines: list[str]) -> bytes:
    text = "\r\n".join(lines) + "\r\n\r\n"
    num_line_ends = len(lines) + 1
    # One check of the whole head instead of one for each value: it must have as many line ends as lines.
    if text.count("\n") != num_line_ends or text.count("\r") != num_line_ends or "\0" in text:
        raise ValueError("a response header has a line end or a NUL in it")
    return text.encode("latin-1")
