"""HTTP/1.x as bytes: bytes received become requests, and responses become bytes.

Owns how a request is read (its framing, its limits, which bytes are refused and with which error) and how the head of a
response is written. Never touches a socket, a task or a clock.

llhttp (by httptools) parses header fields. This module adds what llhttp leaves to its user: limits, one well-formed
Host, exactly known transfer codings, no upgrades. llhttp cannot stop at the end of a head, so it never gets bytes
beyond it:

    bytes fed  │ request line  │ header fields … CRLF CRLF                     │ body      │ next request …
    read by    └`request_line` └ llhttp: 3 bytes held back until the end comes ┘ `framing` │ waits, unparsed

So pipelined requests wait as plain bytes, each head is read by a parser of its own, and nothing leaks from one request
into the next. A head that only repeats the one before is not parsed again.
"""

import itertools
import os
import re
from enum import Enum, auto
from functools import lru_cache
from http import HTTPMethod, HTTPStatus
from ipaddress import ip_address
from typing import NamedTuple, NoReturn
from urllib.parse import unquote_to_bytes

import httptools

from vecd.gateway.errors import (
    ApiError,
    BadRequest,
    HeadersTooLarge,
    HttpVersionNotSupported,
    NotImplementedByServer,
    PayloadTooLarge,
    quoted,
)
from vecd.gateway.http.framing import Body, ChunkedBody, KnownBody, coding_named
from vecd.gateway.request import REQUEST_ID, HttpRequest, Limits, Response

_METHODS = {str(method) for method in HTTPMethod} - {"CONNECT"} | {"QUERY"}
"""Those of RFC 9110 and 5789, and the one of draft-ietf-httpbis-safe-method-w-body. A path that has others of them is
answered by 405."""
_MAX_METHOD_BYTES = 32

_METHOD_BEGUN = re.compile(rb"[!#$%%&'*+.^_`|~0-9A-Za-z-]{1,%d}" % (_MAX_METHOD_BYTES + 1))
# Several spaces in a row have one meaning only.
_LINE = re.compile(rb"(\S+) +([\x21-\x7e]+) +HTTP/([0-9])\.([0-9])\r\n")
_SIMPLE_REQUEST = re.compile(rb"GET +/[\x21-\x7e]* *\r\n")
"""Of HTTP/0.9."""
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?]*)(.*)")

# RFC 9110, section 7.2; RFC 3986, section 3.2.2. Without the comma: no name has one, but two Host headers that a proxy
# has joined do.
_AUTHORITY = re.compile(
    r"(?:(?:[A-Za-z0-9._~!$&'()*+;=-]|%[0-9A-Fa-f]{2})*|\[[0-9A-Fa-f:.]+\]|\[v[0-9A-Fa-f]+\.[\w.~!$&'()*+,;=:-]+\])"
    r"(?::[0-9]*)?",
    re.ASCII,
)
_INVALID_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")


class RequestLine(NamedTuple):
    method: str
    path: str
    """Percent-decoded; "*" for the server as a whole."""
    query: bytes
    http_minor: int
    """0 or 1: a later version of HTTP/1 is served as 1.1."""


def check_line_begun(begun: bytes, max_target_bytes: int) -> None:
    """Check the first bytes of a request line, at least one. Raises ApiError if no line that begins so is taken."""
    method = _METHOD_BEGUN.match(begun)
    if method is None:
        raise _malformed()
    if method.end() > _MAX_METHOD_BYTES:
        raise NotImplementedByServer(f"method: longer than {_MAX_METHOD_BYTES} bytes, no method is that long")
    if begun[method.end() : method.end() + 1] not in (b"", b" "):
        raise _malformed()
    target = begun[method.end() :].lstrip(b" ").partition(b" ")[0].rstrip(b"\r\n")
    if len(target) > max_target_bytes:
        raise HeadersTooLarge(f"request target: longer than the {max_target_bytes} bytes allowed")


@lru_cache(maxsize=64)  # a server has few paths; without the cache, a tenth of the time of a small request
def parse_line(line: bytes, max_target_bytes: int) -> RequestLine:
    """Parse a request line with its end. Raises ApiError: BadRequest for a malformed line and for any protocol but
    HTTP, HttpVersionNotSupported, NotImplementedByServer for CONNECT and unknown methods, HeadersTooLarge."""
    check_line_begun(line, max_target_bytes)
    match = _LINE.fullmatch(line)
    if match is None:
        if _SIMPLE_REQUEST.fullmatch(line):
            raise _unsupported_version("0.9")
        raise _malformed()
    method, target, major, minor = match.groups()
    if major != b"1":
        raise _unsupported_version(f"{major.decode()}.{minor.decode()}")
    if method.decode() not in _METHODS:
        raise NotImplementedByServer(f"method {method.decode()}: not supported")
    return RequestLine(method.decode(), *_path_and_query(target), http_minor=min(1, int(minor)))


@lru_cache(maxsize=64)  # a server has few names
def is_authority(text: str) -> bool:
    """Whether `text` is a host name or address with an optional port, or empty."""
    return _AUTHORITY.fullmatch(text) is not None


def names_this_machine(authority: str) -> bool:
    """Whether a well-formed authority is localhost, a name below that, an address, or empty: no name that another one
    could let resolve to this machine."""
    name = authority[1:].partition("]")[0] if authority.startswith("[") else authority.partition(":")[0]
    if not name or f".{name.lower()}".endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _malformed() -> BadRequest:
    return BadRequest("not a well-formed HTTP request: Invalid request line, expected METHOD TARGET HTTP/1.1")


def _unsupported_version(version: str) -> HttpVersionNotSupported:
    return HttpVersionNotSupported(f"HTTP version {version}: only 1.1 and 1.0 are supported")


def _path_and_query(target: bytes) -> tuple[str, bytes]:
    """Split a request target: origin-form, absolute-form ("http://host/path"), or "*"."""
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is not None:
        authority, rest = absolute.groups()
        target = rest if rest.startswith(b"/") else b"/" + rest
        if authority[:1] in (b"", b":") or not is_authority(authority.decode()):
            raise BadRequest("request target: no host name or address with an optional port after the scheme")
    path, _, query = target.partition(b"#")[0].partition(b"?")
    if not path.startswith(b"/") and path != b"*":
        raise BadRequest("request target: neither a path that starts with a slash nor a URL of http or https")
    if b"%" not in path:
        return path.decode("ascii"), query
    if _INVALID_ESCAPE.search(path):
        raise BadRequest("request target: a percent sign without two hexadecimal digits after it")
    try:
        decoded = unquote_to_bytes(path).decode()
    except UnicodeDecodeError:
        raise BadRequest("request target: the percent-decoded path is not UTF-8") from None
    return decoded, query


# What was parsed and checked of a head holds for the next one on its connection if that differs in its length alone.
# Measured, 7 header fields, interleaved: 7 µs for a request, 19 µs where its head is parsed.

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


def _repeatable(head: bytes, limits: Limits, line: RequestLine, request: HttpRequest) -> RepeatedHead | None:
    """What the next head is compared with; None without a Content-Length, for the last one of its connection, and with
    a field that is for one request. `head`: all of its bytes."""
    length = _LENGTH.search(head) if len(head) <= _MAX_HEAD_BYTES else None
    if length is None or not request.keep_alive or not _OF_ONE_REQUEST.isdisjoint(request.headers):
        return None
    return RepeatedHead(head[: length.start(1)], head[length.end(1) :], limits, line, request.headers)


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_BLANK_LINE = b"\r\n\r\n"
"""Ends every head. llhttp takes no other line end than CRLF."""
_MAX_KEPT_BACK_BYTES = len(_BLANK_LINE) - 1
_LINE_ENDS, _LINE_END_BYTES = re.compile(rb"[\r\n]*"), (b"\r", b"\n")
_ANY_LINE = b"POST / HTTP/1.1"
"""What llhttp gets for a request line. It parses the header fields of all methods and versions alike."""

_REQUEST_ID_PREFIX = f"req_{os.urandom(8).hex()}"
_request_numbers = itertools.count(1)


class ReadState(Enum):
    """The state of a reader, by which a connection sets its deadline."""

    IDLE = auto()
    """No byte of the next request was received."""
    HEAD = auto()
    BODY = auto()
    """The head is acceptable, and bytes of the body are missing."""
    CLOSED = auto()
    """All further bytes are dropped."""


_IDLE, _HEAD, _BODY, _CLOSED = ReadState  # Python 3.11 takes 0.1 µs to find a member of an enumeration


class RequestReader:
    """Reads the requests of one connection, one at a time: feed it, then take requests until there is none."""

    __slots__ = ("_at", "_data", "_head", "_incoming", "limits", "state")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        """Of the next request; the one that is being read keeps those that it began with."""
        self._data = b""
        self._at = 0  # the part of _data before this position is parsed
        self._incoming: IncomingRequest | None = None
        self._head: RepeatedHead | None = None
        self.state = _IDLE

    @property
    def request(self) -> HttpRequest | None:
        """The request being read, or refused, once its head is known."""
        return self._incoming.request if self._incoming is not None else None

    @property
    def num_body_bytes(self) -> int:
        """Held of an incomplete body."""
        return self._incoming.body.num_bytes if self._incoming is not None else 0

    @property
    def has_more(self) -> bool:
        """`next_request` has done enough for one turn of the event loop: call it again."""
        return self._incoming is not None and self._incoming.body.has_more

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes fed and not parsed yet: those behind the request that is being handled."""
        return len(self._data) - self._at

    def read_whole(self, data: bytes) -> HttpRequest | None:
        """The request that the received bytes are, if its head is that of the one before; None if they must be fed.
        Nothing is kept of them."""
        if self.state is not _IDLE or (repeated := self._repeated(data, 0)) is None or repeated[1] < len(data):
            return None
        return repeated[0]

    def feed(self, data: bytes) -> None:
        """Add received bytes. Parses nothing yet."""
        if self.state is _CLOSED:
            return
        rest = self._data[self._at :]
        self._data = rest + data if rest else data
        self._at = 0
        if self.state is _IDLE:
            self._seek_request()

    def next_request(self) -> HttpRequest | None:
        """Parse the next request. One whose body is not there with its head is returned twice: at its head, when the
        state is BODY, and complete. None when bytes are missing, or it `has_more`, or when the reader is closed. Raises
        ApiError when the bytes are refused, after every complete request before them: the reader is closed then, and
        `request` is the one refused, if its head was known."""
        if self.state is _IDLE or self.state is _CLOSED:
            return None
        incoming, start = self._incoming, -1  # it began in other data
        if incoming is None:
            if (repeated := self._repeated(self._data, self._at)) is not None:
                self._at = repeated[1]
                self._seek_request()
                return repeated[0]
            incoming, start = IncomingRequest(self.limits), self._at
            self._incoming = incoming
        try:
            self._at = incoming.read(self._data, self._at)
        except ApiError:
            self.close()
            raise
        request = incoming.request
        if request is None:
            return None
        if not incoming.body.is_complete:
            is_known, self.state = self.state is _BODY, _BODY
            return None if is_known else request
        if start >= 0 and incoming.line is not None:
            head = self._data[start : self._at - incoming.body.num_bytes]
            self._head = _repeatable(head, incoming.limits, incoming.line, request)
        request.body = incoming.body.take()
        incoming.free()
        self._incoming = None
        if request.keep_alive:
            self._seek_request()
        else:
            self.close()
        return request

    def _repeated(self, data: bytes, at: int) -> tuple[HttpRequest, int] | None:
        """The request at `at`, and the position after it, if all of it is there, within the limits, and its head is the
        one before but for its length."""
        if self._head is None:
            return None
        before, after, limits, line, headers = self._head
        if limits is not self.limits or not data.startswith(before, at):
            return None
        start = at + len(before)
        stop = data.find(b"\r", start, start + _MAX_DIGITS + 1)
        digits = data[start:stop]
        if stop < 0 or not digits.isdigit() or not data.startswith(after, stop):
            return None
        start, num_body_bytes = stop + len(after), int(digits)
        stop = start + num_body_bytes
        if stop > len(data) or num_body_bytes > limits.max_body_bytes or start - at > limits.max_head_bytes:
            return None
        method, path, query, http_minor = line
        headers = {**headers, "content-length": digits.decode()}
        return HttpRequest(
            method, path, query, headers, http_minor, True, new_request_id(), False, None, data[start:stop]
        ), stop

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
        if self._incoming is not None:
            self._incoming.free()


_NO_BODY = KnownBody(0)


class IncomingRequest:
    """One request while it is read: the callbacks of llhttp, the checks, and the body received so far."""

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

    def read(self, data: bytes, at: int) -> int:
        """Parse received bytes of this request, which begin at `at`, and none beyond it; returns the position after
        them. Raises ApiError as soon as it is clear that the request is refused."""
        if self.line is None:
            end = data.find(b"\n", at) + 1
            if end == 0:
                check_line_begun(data[at:], self.limits.max_target_bytes)
                self._check_head_size(len(data) - at)
                return at
            self.line = parse_line(data[at:end], self.limits.max_target_bytes)
            end -= len(b"\r\n")  # which is left for llhttp
            self._num_head_bytes = end - at
            self.parse(_ANY_LINE)
            at = end
        while self.request is None:
            blank_line = data.find(_BLANK_LINE, at)
            # llhttp must not get bytes beyond the head.
            stop = blank_line + len(_BLANK_LINE) if blank_line >= 0 else len(data) - _MAX_KEPT_BACK_BYTES
            if stop <= at:
                return at
            self._num_head_bytes += stop - at
            self.parse(data[at:stop])
            self._check_head_size(self._num_head_bytes)
            at = stop
        return self.body.read(data, at)

    def parse(self, segment: bytes) -> None:
        """Parse the next bytes of the head with llhttp. Raises ApiError when they are refused."""
        assert self._parser is not None
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
            # Its reasons are fixed sentences that quote nothing.
            raise BadRequest(f"not a well-formed HTTP request: {error}") from None

    def free(self) -> None:
        """Free what was read now, rather than at the next garbage collection: parser and callbacks are a cycle."""
        self._parser = None
        self.body = _NO_BODY

    # --- called by llhttp ---

    def on_body(self, piece: bytes = b"") -> None:
        """llhttp gets nothing behind the head."""
        if self.request is not None:
            self._refuse(BadRequest("a request does not end where its head says"))

    on_message_begin = on_body

    def on_header(self, raw_name: bytes, raw_value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self.limits.max_headers:
            self._refuse(HeadersTooLarge(f"headers: more than the {self.limits.max_headers} allowed"))
        name = raw_name.lower().decode("latin-1")
        value = raw_value.strip(b" \t").decode("latin-1")
        if name in self._headers:
            if name == "host":
                self._refuse(BadRequest("header Host: given more than once"))
            value = f"{self._headers[name]}, {value}"
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        try:
            self._check_head_size(self._num_head_bytes)
            self._make_request()
        except ApiError as error:
            self._refuse(error)

    # --- checks ---

    def _refuse(self, error: ApiError) -> NoReturn:
        self._refusal = error
        raise error

    def _check_head_size(self, num_bytes: int) -> None:
        """llhttp has no limit of its own, and httptools collects what it is given."""
        if num_bytes > self.limits.max_head_bytes:
            self._refuse(
                HeadersTooLarge(f"head of the request: longer than the {self.limits.max_head_bytes} bytes allowed")
            )

    def _make_request(self) -> None:
        """Set `request`, also where it is refused. llhttp refuses Content-Length given twice, or beside
        Transfer-Encoding."""
        assert self.line is not None
        headers, http_minor = self._headers, self.line.http_minor
        own_id = headers.get("x-request-id")
        request_id = own_id if own_id and REQUEST_ID.fullmatch(own_id) else new_request_id()
        keep_alive = _keeps_alive(headers.get("connection", ""), http_minor)
        method, path, query, _ = self.line
        self.request = request = HttpRequest(method, path, query, headers, http_minor, keep_alive, request_id)
        if not path.isprintable() and _CONTROL_CHARACTER.search(path):
            raise BadRequest("request target: a control character in the percent-decoded path")
        if "host" not in headers and http_minor == 1:
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
    """RFC 9112, section 9.3."""
    options = _elements(connection)
    return "close" not in options and (http_minor == 1 or "keep-alive" in options)


def _elements(value: str) -> list[str]:
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


def new_request_id() -> str:
    return f"{_REQUEST_ID_PREFIX}{next(_request_numbers):08x}"


# --- responses ----------------------------------------------------------------------------------------------------

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}" for status in HTTPStatus}
_BODILESS_STATUSES = {HTTPStatus.NO_CONTENT.value, HTTPStatus.NOT_MODIFIED.value}
_MAX_JOINED_BYTES = 48 * 1024
"""Copying this many bytes takes 1 µs."""


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
    `http_minor`: of the request. `date`: now, as HTTP writes it. Raises ValueError when a value would end its line
    (response splitting) or is not latin-1, and KeyError for a status that does not exist."""
    status, body, headers = response.status, response.body, response.headers
    num_body_bytes = len(body) if isinstance(body, bytes) else sum(map(len, body))
    is_bodiless = status in _BODILESS_STATUSES
    given = "".join((request_id, response.content_type, *headers, *headers.values()))
    if "\n" in given or "\r" in given or "\0" in given:
        raise ValueError("a response header has a line end or a NUL in it")
    text = f"{_STATUS_LINES[status]}\r\nx-request-id: {request_id}\r\n"
    if not is_bodiless:
        text += f"content-type: {response.content_type}\r\ncontent-length: {num_body_bytes}\r\n"
    for name, value in headers.items():
        text += f"{name}: {value}\r\n"
    if date is not None:
        text += f"date: {date}\r\n"
    if not keep_alive:
        text += "connection: close\r\n"
    elif http_minor == 0:
        text += "connection: keep-alive\r\n"
    head = f"{text}\r\n".encode("latin-1")
    if head_only or is_bodiless:
        return [head]
    pieces = (head, body) if isinstance(body, bytes) else (head, *body)
    return [b"".join(pieces)] if num_body_bytes <= _MAX_JOINED_BYTES else [*pieces]
