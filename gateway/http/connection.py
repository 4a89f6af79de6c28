"""One client's connection: its requests, one after the other, their responses, and its end.

Owns the order of requests on a connection, and all waiting for its client. Never parses HTTP and never decides on
responses; it only refuses to wait longer or to hold more. No body is ever logged, nor an exception's message, which may
quote one.

A connection handles one request at a time; what a client sends meanwhile waits as plain bytes. Its life:

    reading (IDLE → HEAD → BODY: `ReadState`)  ⇄  handling (one task per request)
        │ refused, timed out, or the last response is written
        ▼
    lingering: its sending half is shut down, input is dropped until the client closes, too
"""

import array
import asyncio
import fcntl
import logging
import os
import select
import socket
import struct
import termios
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol, cast

from vecd.gateway.errors import ApiError, PermissionDenied, RequestTimeout, ServerError, TooManyRequests, Unavailable
from vecd.gateway.http.budgets import BodyBudget, ResponseBudget
from vecd.gateway.http.forwarded import TrustedProxies, client_of
from vecd.gateway.http.reader import (
    CONTINUE,
    ReadState,
    RequestReader,
    encode_response,
    names_this_machine,
    new_request_id,
)
from vecd.gateway.request import HttpRequest, Limits, Response
from vecd.gateway.telemetry.measures import GONE


class Application(Protocol):
    """What handles requests: `vecd.gateway.app.app.App`. An ApiError that it raises is rendered by `render_error`,
    anything else as a 500."""

    def check_head(self, request: HttpRequest) -> Response | None:
        """Check a request whose body is still arriving; any other is checked by `handle`. A response, or an ApiError,
        ends the connection."""

    async def handle(self, request: HttpRequest) -> Response:
        """Handle a complete request. Cancelled when the client disconnects."""

    def render_error(self, error: ApiError, request: HttpRequest | None) -> Response:
        """The response to a failed request; None: its head could not be parsed."""

    def add_headers(self, response: Response, request: HttpRequest | None) -> None:
        """Add the headers that every response to `request` has but on the admin listener, errors included; None: its
        head could not be parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the server waits for a client. Checked once per `sweep_s`, so each may last that much longer."""

    head_s: float = 10.0
    """From the first byte of a request to the end of its head."""
    handshake_s: float = 10.0
    """From a connection's beginning to the end of its TLS handshake."""
    body_s: float = 60.0
    """From the end of the head to the end of the body, and a second more for each 256 KiB received of it."""
    idle_s: float = 120.0
    """Between requests, and before the first one. Longer than the idle time of the usual clients (openai-python:
    5 s, Go: 90 s), so that no request meets a closing connection."""
    write_s: float = 30.0
    """In this time a client must read 16 KiB of a response, or its 32nd part if that is more, or all the rest."""
    linger_s: float = 3.0
    """After the last response, for the client to read it and close."""
    sweep_s: float = 1.0


@dataclass(eq=False, repr=False)
class Host:
    """What connections use of their server, `vecd.gateway.http.listeners.Server`, and what they count there."""

    app: Application
    limits: Limits
    _: KW_ONLY
    timeouts: Timeouts = Timeouts()
    trusted_proxies: TrustedProxies = field(default_factory=TrustedProxies)
    """The peers of the public listener whose headers say who the caller is."""
    clock: Callable[[], float] = time.monotonic
    on_finished: Callable[[int, HttpRequest | None], None] = lambda status, request: None
    """Called with the status of each response, or with `vecd.gateway.telemetry.measures.GONE` where the client
    disconnected before it, and with the request, if its head could be parsed."""
    arriving: BodyBudget = field(default_factory=BodyBudget, init=False)
    """Of requests that cannot be handled yet."""
    unsent: ResponseBudget = field(default_factory=ResponseBudget, init=False)
    """Of responses that are being made or are not sent."""
    is_draining: bool = field(default=False, init=False)
    num_requests_in_flight = num_plain_since_sweep = 0
    """The second: connections that spoke plain HTTP to the TLS listener."""
    date = ""
    """At the last sweep, for the header of all responses."""

    def register(self, connection: "Connection") -> str | None:
        """Returns the reason to refuse a new connection when there are too many, else None."""
        raise NotImplementedError

    def forget(self, connection: "Connection") -> None:
        raise NotImplementedError


log = logging.getLogger("vecd.gateway")

_MAX_WAITING_BYTES = 64 * 1024
"""Of further requests behind the one being handled; more stays in the kernel. Not 0, because a disconnect is only
noticed while the connection is read."""
# Input while a connection lingers.
_MAX_DROPPED_BYTES = 64 * 1024 * 1024
_MIN_DROPPED_BYTES_PER_S = 256 * 1024
_MIN_BODY_BYTES_PER_S = 256 * 1024
"""A client that sends a body at this rate or faster has more time for it."""
_MIN_TAKEN_BYTES = 16 * 1024
_MAX_WRITE_PERIODS = 32
"""In each `write_s`, a client must read _MIN_TAKEN_BYTES, and enough to have all of a response after this number of
periods."""
_PLAIN_HTTP = b"This port speaks HTTPS. Use https:// instead of http:// in the URL.\n"
_IDLE, _HEAD, _BODY, _CLOSED = ReadState  # Python 3.11 takes 0.1 µs to find a member of an enumeration
_RESET = struct.pack("ii", 1, 0)  # struct linger: close drops unsent bytes and resets the connection


class Connection(asyncio.Protocol):
    def __init__(
        self,
        server: Host,
        loop: asyncio.AbstractEventLoop,
        *,
        is_admin: bool = False,
        is_loopback: bool = False,
    ) -> None:
        """`is_loopback`: its listener is on a loopback address."""
        self.is_admin = is_admin
        self.client = ""
        """See `client_of`: that of a request whose headers do not say another."""
        self.address = ""
        """What limits by address count; "" if many callers may share the connection: on a unix socket, and from a
        trusted proxy."""
        self._checks_host = is_admin and is_loopback
        self._proxies: TrustedProxies | None = None  # None: headers do not say whose a request is
        self._server = server
        self._loop = loop
        self.reader = RequestReader(server.limits)
        self._since = server.clock()  # when the present wait began
        self._awaited: ReadState | None = _IDLE  # None while a request is handled
        self.task: asyncio.Task[None] | None = None
        self._request: HttpRequest | None = None  # the one that the task handles
        self._why_refused: str | None = None  # None: it is not refused
        self.num_held_bytes = 0
        """Of an incomplete body, of a request that waits for room for its response, and of those behind the one being
        handled; counted in the server's `arriving`."""
        self._is_ending = False  # the last response was written, or the client has disconnected
        self._has_eof = False
        self._is_reading_paused = False
        self._is_advance_due = False  # in the next turn of the event loop
        self._is_write_blocked = False
        self.num_unsent_bytes = 0
        """Of a response that is being made, or is not all sent. Counted in the server's `unsent`."""
        self.num_silent_checks = 0
        """The last checks of the deadlines that found unsent bytes of which the client has read nothing."""
        self._room: asyncio.Future[None] | None = None  # what the request waited for last, before it was computed
        self._num_input_bytes = 0  # of that request
        self.num_sent_bytes = 0
        self._num_taken_bytes = 0  # of those sent, when the client had last read enough
        self._num_taken_at_look: int | None = None  # of those sent; None when nothing was unsent
        self._num_due_bytes = 0  # that the client must read in time; 0 while nothing is unsent
        self._last_taken_at = self._since
        self._num_dropped_bytes = 0

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.trust(self._server.trusted_proxies)
        self._why_refused = self._server.register(self)

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            self._drop(len(data))
        elif self._why_refused is None:
            is_free = self.task is None and not self._is_write_blocked
            if is_free and (request := self.reader.read_whole(data)) is not None:
                self._start(request)
                return
            self.reader.feed(data)
            if self._is_advance_due:
                self._count_held()
            else:
                self._advance()
        else:
            # Not before the client has sent something: some clients take a response without a request for an error.
            self._refuse_connection(self._why_refused, data)

    def eof_received(self) -> bool:
        """True keeps the connection, for a client that only shut down its sending half."""
        self._has_eof = True
        if self._is_ending or not (self.task or self._is_write_blocked or self._is_advance_due):
            return False
        if self._request is not None and self._request.http_minor == 1:
            # What an HTTP/1.1 client skips, to learn whether it has disconnected: on TCP, close() and shutdown(SHUT_WR)
            # look alike until a byte is sent, to which a kernel replies with a reset after a close().
            self.send([CONTINUE])
        return True

    def pause_writing(self) -> None:
        self._is_write_blocked = True

    def resume_writing(self) -> None:
        self._is_write_blocked = False
        self._server.unsent.count(self, 0)
        self._advance()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_ending = True
        self._stop_reading()
        self._server.forget(self)
        if self.task is not None:
            self.task.cancel()

    # --- reading ---

    def _advance(self) -> None:
        """Process what was received, as far as one turn of the event loop should."""
        while self.task is None and not self._is_write_blocked and not self._is_ending:
            if self.reader.state is _IDLE and self._awaited is None and not (self.num_held_bytes or self._has_eof):
                self._awaited, self._since = _IDLE, self._server.clock()  # nothing was sent behind the last request
                return
            try:
                request = self.reader.next_request()
            except ApiError as error:
                self._refuse(error)
                break
            if request is None:
                self._await_bytes()
                break
            if self.reader.state is _BODY:
                self._check_head(request)
            else:
                self._start(request)
        self._count_held()

    def _advance_again(self) -> None:
        self._is_advance_due = False
        if not self.transport.is_closing():
            self._advance()

    def _count_held(self) -> None:
        """Count what is held, and drop it where it is too much: here, or on a connection that holds more."""
        num_held_bytes = self.reader.num_waiting_bytes
        if self.task is None:
            num_held_bytes += self.reader.num_body_bytes
        elif self._room is not None and not self._room.done():
            num_held_bytes += self._num_input_bytes
        if num_held_bytes != self.num_held_bytes:
            arriving = self._server.arriving
            arriving.count(self, num_held_bytes)
            while (largest := arriving.next_to_drop(self)) is not None:
                largest.drop_held()
        is_full = self.reader.num_waiting_bytes > _MAX_WAITING_BYTES  # nothing waits where it was just dropped
        if is_full == self._is_reading_paused:
            return
        self._is_reading_paused = is_full
        if is_full:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _await_bytes(self) -> None:
        if self.reader.has_more:
            if not self._is_advance_due:
                self._is_advance_due = True
                self._loop.call_soon(self._advance_again)
        elif self._has_eof:
            self.transport.close()
            return
        if self.reader.state is not self._awaited:
            self._awaited, self._since = self.reader.state, self._server.clock()

    def _stop_reading(self) -> None:
        self.reader.close()
        if self.num_held_bytes:
            self._server.arriving.count(self, 0)

    def _check_head(self, request: HttpRequest) -> None:
        self._identify(request)
        try:
            if self.is_admin:
                self._check_page(request)
            response = self._server.app.check_head(request)
        except Exception as error:
            response = self._render(error, request.request_id, request)
        if response is not None:
            self._end_with(response, request.request_id, request)
        elif request.expects_continue:
            self.send([CONTINUE])

    def _identify(self, request: HttpRequest) -> None:
        request.client, request.is_admin = self.client, self.is_admin
        if self._proxies is not None:
            request.client, request.scheme = self._proxies.caller_of(request.headers, self.client)

    def _check_page(self, request: HttpRequest) -> None:
        """Refuse requests of web pages: a browser lets any page send requests to the machine that it runs on, and read
        the responses where the name of the page's own server comes to resolve to this machine (DNS rebinding)."""
        if "origin" in request.headers:
            raise PermissionDenied(
                "header Origin: the admin listener answers no requests of web pages", code="origin_not_allowed"
            )
        if self._checks_host and not names_this_machine(request.headers.get("host", "")):
            raise PermissionDenied(
                "header Host: on a loopback address the admin listener answers to localhost and to addresses alone",
                code="host_not_allowed",
            )

    # --- handling ---

    def _start(self, request: HttpRequest) -> None:
        self._identify(request)
        self._request = request
        request.timeline.take_room = self._take_room
        request.timeline.started_at = time.monotonic()
        self._awaited = None
        self.task = self._loop.create_task(self._serve(request))

    def _take_room(self, num_bytes: int, num_input_bytes: int) -> asyncio.Future[None] | None:
        """As `ResponseBudget.take`. While the request waits, its inputs count as an arriving body does."""
        self._room, self._num_input_bytes = self._server.unsent.take(self, num_bytes), num_input_bytes
        if self._room is not None:
            self._room.add_done_callback(lambda _: self._count_held())
            self._count_held()
        return self._room

    async def _serve(self, request: HttpRequest) -> None:
        """Write exactly one response."""
        self._server.num_requests_in_flight += 1
        try:
            try:
                if self.is_admin:
                    self._check_page(request)
                is_last = self._write_response(await self._server.app.handle(request), request.request_id, request)
            except asyncio.CancelledError as error:
                if self.task is None or self.task.cancelling():
                    raise
                is_last = self._write_failure(request, error)  # the application cancelled a task of its own
            except Exception as error:
                is_last = self._write_failure(request, error)
        except BaseException as error:
            # The client has disconnected, or not even an error could be rendered: it must not wait for a response.
            self.transport.abort()
            self._server.on_finished(GONE if isinstance(error, asyncio.CancelledError) else 500, request)
            raise
        finally:
            self._server.num_requests_in_flight -= 1
            self.task = self._request = self._room = None
        if is_last:
            self._linger()
        self._advance()

    def _write_failure(self, request: HttpRequest, failure: BaseException) -> bool:
        """As `_write_response`, with an error."""
        try:
            response = self._render(failure, request.request_id, request)
            return self._write_response(response, request.request_id, request)
        finally:
            _drop_frames(failure)

    def _write_response(
        self, response: Response, request_id: str, request: HttpRequest | None, *, is_last: bool = False
    ) -> bool:
        """`request`: None if its head could not be parsed. Returns whether it is the connection's last response, as it
        is where the request itself says so, or too much was sent behind it. Nothing is sent when it raises (ValueError,
        KeyError)."""
        server, state = self._server, self.reader.state
        is_last = is_last or state is _CLOSED or (state is _IDLE and (self._has_eof or server.is_draining))
        if not self.is_admin:
            server.app.add_headers(response, request)
        pieces = encode_response(
            response,
            request_id=request_id,
            keep_alive=not is_last,
            date=server.date,
            http_minor=1 if request is None else request.http_minor,
            head_only=request is not None and request.method == "HEAD",
        )
        self.send(pieces)
        if self.num_unsent_bytes or self._is_write_blocked:
            server.unsent.count(self, sum(map(len, pieces)) if self._is_write_blocked else 0)
        server.on_finished(response.status, request)
        return is_last

    def _render(self, error: BaseException, request_id: str, request: HttpRequest | None) -> Response:
        """The response to a failure, which is logged here. `request` as in `_write_response`."""
        if request is not None:
            # Nothing of it comes from a client.
            request.timeline.error = error.code or error.type if isinstance(error, ApiError) else ServerError.type
        if isinstance(error, ApiError):
            # Messages of client errors name the value, which may be a text: only their kind is logged.
            kind = f"{error.code or error.type} {error.param or ''}".rstrip()
            reason = error.message if error.log_level > logging.DEBUG else kind
            log.log(error.log_level, "request %s: %d, %s", request_id, error.status, reason)
        else:
            # Without its message, which may quote what a client sent.
            where = "".join(traceback.format_tb(error.__traceback__))
            log.error("request %s: unexpected %s\n%s", request_id, type(error).__qualname__, where)
            error = ServerError("The server failed on this request. Its log says more under the id of the request.")
        return self._server.app.render_error(error, request)

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """uvloop takes pieces as they are, and counts their bytes until the client's kernel has them."""
        if not self.transport.is_closing():
            self.num_sent_bytes += sum(map(len, pieces))
            self.transport.writelines(pieces)

    # --- ending ---

    def refuse_plain_http(self, transport: asyncio.Transport) -> None:
        """Answer a client that speaks plain HTTP to a TLS listener. `transport`: that of the socket."""
        self.transport = transport
        self._server.num_plain_since_sweep += 1
        response = Response(400, _PLAIN_HTTP, content_type="text/plain; charset=utf-8")
        self._end_with(response, new_request_id())

    def _refuse(self, error: ApiError) -> None:
        request = self.reader.request
        request_id = request.request_id if request is not None else new_request_id()
        self._end_with(self._render(error, request_id, request), request_id, request)

    def _refuse_connection(self, reason: str, data: bytes = b"") -> None:
        """Refuse the whole connection. The sweep logs the number of these. `data`: what the client has sent, of which a
        head is read for the request's id alone."""
        request_id = new_request_id()
        with suppress(ApiError):
            self.reader.feed(data)
            if (request := self.reader.next_request()) is not None:
                request_id = request.request_id
        error = Unavailable(reason, retry_after_s=1)
        self._end_with(self._server.app.render_error(error, None), request_id)

    def _end_with(self, response: Response, request_id: str, request: HttpRequest | None = None) -> None:
        self._write_response(response, request_id, request, is_last=True)
        self._linger()

    def _linger(self) -> None:
        """Send no more, and wait for the client to close. Closing while input is still arriving would reset the
        connection, and the reset can overtake the response: a client that sends too large a body would never learn
        why."""
        self._is_ending = True
        self._stop_reading()
        self._since = self._server.clock()
        if self._has_eof or not self.transport.can_write_eof():
            self.transport.close()
        elif not self.transport.is_closing():
            self.transport.write_eof()

    def _drop(self, num_bytes: int) -> None:
        """Let a client finish sending and then read the response, unless it sends very slowly."""
        self._since = min(self._server.clock(), self._since + num_bytes / _MIN_DROPPED_BYTES_PER_S)
        self._num_dropped_bytes += num_bytes
        if self._num_dropped_bytes > _MAX_DROPPED_BYTES:
            self.transport.abort()

    def _is_hung_up(self, events: int = 0) -> bool:
        """Whether the connection is closed in both directions, or has one of the `events` of poll(2)."""
        poll = select.poll()
        poll.register(self._fileno(), events)
        return bool(poll.poll(0))

    def _close_unless_readable(self) -> None:
        """A late event loop runs its timers before it reads."""
        if not self._is_hung_up(select.POLLIN):
            self.transport.close()

    def _fileno(self) -> int:
        return cast(int, self.transport.get_extra_info("socket").fileno())

    # --- called by the server ---

    @property
    def owes_response(self) -> bool:
        """A request has begun to arrive whose response is not sent completely."""
        has_request = self.task is not None or self.reader.state in (_HEAD, _BODY)
        return (has_request and not self._is_ending) or self.transport.get_write_buffer_size() > 0

    def trust(self, proxies: TrustedProxies) -> None:
        """Believe these proxies from the next request on. Side effect: `client` and `address` are set."""
        peername = self.transport.get_extra_info("peername")
        self.client = client_of(peername)
        is_proxy = not self.is_admin and proxies.trusts(peername)
        self.address = "" if is_proxy else self.client
        self._proxies = proxies if is_proxy else None

    def drop_held(self) -> None:
        """Refuse the body that is arriving, or the request that waits for room, or what is behind the one that is being
        handled."""
        self._stop_reading()
        limit = self._server.arriving.max_bytes
        error = TooManyRequests(
            f"Too much is being sent: at most {limit} bytes are held of requests that are not complete, or that wait "
            "until responses are read, half of them from one address",
            retry_after_s=5,
        )
        if self.task is None:
            self._refuse(error)
        elif self._room is not None and not self._room.done():
            self._room.set_exception(error)
        # A response to the task's request says that it is the last.

    def reset(self) -> None:
        """Abort, and have the kernel drop its unsent bytes."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._fileno())) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._server.unsent.count(self, 0)
        self.transport.abort()

    def close_if_silent(self, since: float) -> None:
        if self._awaited is _IDLE and self._since <= since and not self._is_ending:
            self._close_unless_readable()

    def check_deadlines(self, now: float) -> None:
        num_unsent_bytes = self.transport.get_write_buffer_size()
        if self.task is None and (num_unsent_bytes or self.num_unsent_bytes):
            num_held_bytes = max(num_unsent_bytes, self.num_unsent_bytes) if num_unsent_bytes else 0
            self._server.unsent.count(self, num_held_bytes)
        if num_unsent_bytes > 0 or self._is_ending:
            # A kernel buffers megabytes: what counts is what the client's kernel has acknowledged.
            num_unsent_bytes += self._num_bytes_in_kernel()
        is_stalled = self._is_stalled(now, num_unsent_bytes)
        if is_stalled:
            self.reset()
        elif self.task is not None:
            if self._has_eof and self._is_hung_up():
                self.transport.abort()
        elif num_unsent_bytes > 0:
            self._since = now  # the client must read the response before its next request is awaited
        elif not self._is_ending:
            self._check_waiting(now - self._since)
        elif now - self._since >= self._server.timeouts.linger_s:
            self.transport.abort()

    def _is_stalled(self, now: float, num_unsent_bytes: int) -> bool:
        num_taken_bytes = self.num_sent_bytes - num_unsent_bytes
        takes_nothing = num_unsent_bytes > 0 and num_taken_bytes == self._num_taken_at_look
        self.num_silent_checks = self.num_silent_checks + 1 if takes_nothing else 0
        self._num_taken_at_look = num_taken_bytes if num_unsent_bytes else None
        if num_unsent_bytes == 0:
            self._num_due_bytes = 0
            return False
        if self._num_due_bytes == 0 or num_taken_bytes - self._num_taken_bytes >= self._num_due_bytes:
            self._num_taken_bytes, self._last_taken_at = num_taken_bytes, now
        self._num_due_bytes = max(self._num_due_bytes, _MIN_TAKEN_BYTES, num_unsent_bytes // _MAX_WRITE_PERIODS)
        return now - self._last_taken_at >= self._server.timeouts.write_s

    def _num_bytes_in_kernel(self) -> int:
        """Bytes that the client's kernel has not acknowledged; on a unix socket, that the client has not read."""
        num_bytes = array.array("i", [0])
        try:
            fcntl.ioctl(self._fileno(), termios.TIOCOUTQ, num_bytes)
        except (OSError, ValueError):  # the socket was just closed
            return 0
        # The FIN of this side counts as a byte.
        return max(0, num_bytes[0] - self._is_ending)

    def _check_waiting(self, waited_s: float) -> None:
        timeouts = self._server.timeouts
        if self._why_refused is not None:
            if waited_s >= timeouts.linger_s:
                self._refuse_connection(self._why_refused)
        elif self._awaited is _IDLE:
            if waited_s >= timeouts.idle_s:
                self._close_unless_readable()
        else:
            part, limit_s, more_s = "head", timeouts.head_s, 0.0
            if self._awaited is _BODY:
                part, limit_s, more_s = "body", timeouts.body_s, self.num_held_bytes / _MIN_BODY_BYTES_PER_S
            if waited_s >= limit_s + more_s:
                self._refuse(RequestTimeout(f"{part} of the request: not complete after {limit_s:g} s"))


def _drop_frames(error: BaseException | None) -> None:
    """Drop an exception's frames: they hold the request with its body, and one of them holds the exception."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__
