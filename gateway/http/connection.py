"""One client's connection: its requests, one after the other, their answers, and its end.

Owns the order of requests on a connection, and all waiting for its client. Never parses HTTP
(`vecd.gateway.http.http1`) and never decides what is answered (the server's `Application`); it only refuses to wait or
to hold more. No body is ever logged, nor an exception's message, which may quote one. `vecd.gateway.http.server` makes
it, counts it, and looks at its deadlines.

A connection answers one request at a time; what a client sends meanwhile waits as plain bytes. Its life:

    reading (IDLE → HEAD → BODY: `http1.ReadState`)  ⇄  answering (one task per request)
        │ refused, timed out, or the last answer is written
        ▼
    lingering: its sending half is shut down, input is dropped until the client closes, too
"""

import array
import asyncio
import fcntl
import ipaddress
import logging
import os
import select
import socket
import struct
import termios
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from vecd.gateway.http.http1 import CONTINUE, ReadState, RequestReader, RequestReceived, encode_response, new_request_id
from vecd.gateway.telemetry.shared_metrics import GONE
from vecd.gateway.types.errors import (
    ApiError,
    PermissionDenied,
    RequestTimeout,
    ServerError,
    TooManyRequests,
    Unavailable,
)
from vecd.gateway.types.messages import HttpRequest, Limits, Response

if TYPE_CHECKING:
    from vecd.gateway.http.contract import Timeouts
    from vecd.gateway.http.server import Server

log = logging.getLogger("vecd.gateway")

_MAX_WAITING_BYTES = 64 * 1024
"""Of further requests behind the one being answered; more stays in the kernel. Not 0, because a client that leaves is
only noticed while reading goes on."""
# Of input that comes while a connection lingers.
_MAX_DROPPED_BYTES = 64 * 1024 * 1024
_MIN_DROPPED_BYTES_PER_S = 256 * 1024
_MIN_BODY_BYTES_PER_S = 256 * 1024
"""A client that sends a body so fast has longer for it."""
_MIN_TAKEN_BYTES = 16 * 1024
_MAX_WRITE_PERIODS = 32
"""A client takes so much of an answer in each `write_s`, and enough to have the whole after so many of them."""
_RESET = struct.pack("ii", 1, 0)  # struct linger: what is unsent when the socket closes is dropped, and the peer told


class Connection(asyncio.Protocol):
    """One client's connection. asyncio calls the methods of its Protocol, the server those at the end."""

    def __init__(self, server: "Server", loop: asyncio.AbstractEventLoop, *, is_admin: bool = False) -> None:
        self.is_admin = is_admin
        self.client = ""
        """See `client_of`."""
        self._server = server
        self._loop = loop
        self._reader = RequestReader(server.limits)
        self._since = server.clock()  # when what is awaited or being done began
        self._awaited: ReadState | None = ReadState.IDLE  # None while a request is answered
        self.task: asyncio.Task[None] | None = None
        self._request: HttpRequest | None = None  # the one that the task answers
        self._why_refused: str | None = None  # instead of being served
        self.num_held_bytes = 0
        """Of a body that is not complete, or of requests behind the one being answered; counted by the server."""
        self._is_ending = False  # the last answer has been given, or nobody is there to take one
        self._has_eof = False
        self._is_reading_paused = False
        self._is_write_blocked = False
        self.num_unsent_bytes = 0
        """Of answers, when its deadlines were looked at last; not what the kernel has of them."""
        self.takes_nothing = False
        """All the time between the last two looks something was unsent, and nothing of it was taken."""
        self._num_sent_bytes = 0
        self._num_taken_bytes = 0  # of those sent, when enough was taken last
        self._num_taken_at_look: int | None = None  # of those sent; None when nothing was unsent then
        self._num_due_bytes = 0  # what is enough; 0 while nothing is unsent
        self._last_taken_at = self._since
        self._num_dropped_bytes = 0

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.client = client_of(self._transport.get_extra_info("peername"))
        self._why_refused = self._server.register(self)

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            self._drop(len(data))
        elif self._why_refused is None:
            self._reader.feed(data)
            self._advance()
        else:
            # Not before the client has spoken: some take an answer without a question for a protocol error.
            self._refuse_connection(self._why_refused)

    def eof_received(self) -> bool:
        """The client sends no more. True keeps the connection, for a client that only shut down its sending half."""
        self._has_eof = True
        if self._is_ending or not (self.task or self._is_write_blocked):
            return False
        self._probe()
        return True

    def pause_writing(self) -> None:
        self._is_write_blocked = True

    def resume_writing(self) -> None:
        self._is_write_blocked = False
        self._advance()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_ending = True
        self._stop_reading()
        self._server.forget(self)
        if self.task is not None:
            self.task.cancel()

    # --- reading ---

    def _advance(self) -> None:
        """Take up what has been received, until a request is being answered or bytes are missing."""
        while self.task is None and not self._is_write_blocked and not self._is_ending:
            try:
                event = self._reader.next_event()
            except ApiError as error:
                self._refuse(error)
                break
            if event is None:
                self._await_bytes()
                break
            event.request.client, event.request.is_admin = self.client, self.is_admin
            if isinstance(event, RequestReceived):
                self._start(event.request)
            else:
                self._check_head(event.request)
        num_held_bytes = self._reader.num_waiting_bytes
        if self.task is None:
            num_held_bytes += self._reader.num_body_bytes
        if num_held_bytes or self.num_held_bytes or self._is_reading_paused:
            self._hold(num_held_bytes)

    def _await_bytes(self) -> None:
        if self._has_eof:
            self._transport.close()
            return
        if self._reader.state is not self._awaited:
            self._awaited, self._since = self._reader.state, self._server.clock()

    def _hold(self, num_bytes: int) -> None:
        """Count what is held of a body that is not complete, or behind a request, and see that it does not become too
        much, here or, if others hold more, there."""
        if num_bytes != self.num_held_bytes:
            arriving = self._server.arriving
            arriving.count(self, num_bytes)
            while (one_too_many := arriving.one_too_many(self)) is not None:
                one_too_many.give_up_held()
        is_full = self._reader.num_waiting_bytes > _MAX_WAITING_BYTES
        if is_full == self._is_reading_paused:
            return
        self._is_reading_paused = is_full
        if is_full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _stop_reading(self) -> None:
        self._reader.close()
        if self.num_held_bytes:
            self._server.arriving.count(self, 0)

    def _check_head(self, request: HttpRequest) -> None:
        try:
            if self.is_admin:
                _check_origin(request)
            response = self._server.app.check_head(request)
        except Exception as error:
            response = self._render(error, request.request_id, request.path, request)
        if response is not None:
            self._end_with(response, request.request_id, request)
        elif request.expects_continue:
            self._send([CONTINUE])

    # --- answering ---

    def _start(self, request: HttpRequest) -> None:
        self._request = request
        request.timeline.started_at = time.monotonic()
        self._awaited, self._since = None, self._server.clock()
        self.task = self._loop.create_task(self._serve(request))

    async def _serve(self, request: HttpRequest) -> None:
        self._server.num_requests_in_flight += 1
        try:
            is_last = await self._answer(request)
        except BaseException as error:
            # The client has gone, or not even an error could be rendered: nobody is left waiting.
            self._transport.abort()
            self._server.on_finished(GONE if isinstance(error, asyncio.CancelledError) else 500, request)
            raise
        finally:
            self._server.num_requests_in_flight -= 1
            self.task = self._request = None
        if is_last:
            self._linger()
        self._advance()

    async def _answer(self, request: HttpRequest) -> bool:
        """Answer a request exactly once; True when it was the connection's last."""
        failure: BaseException
        try:
            if self.is_admin:
                _check_origin(request)
            return self._write_answer(request, await self._server.app.handle(request))
        except asyncio.CancelledError as error:
            if self.task is None or self.task.cancelling():
                raise
            failure = error  # the app cancelled something of its own
        except Exception as error:
            failure = error
        try:
            return self._write_answer(request, self._render(failure, request.request_id, request.path, request))
        finally:
            _let_go(failure)

    def _write_answer(self, request: HttpRequest, response: Response) -> bool:
        """True when it is the connection's last. Nothing is sent when it raises (ValueError, KeyError)."""
        is_last = self._is_last(request)
        self._add_headers(response, request)
        pieces = encode_response(
            response,
            request_id=request.request_id,
            keep_alive=not is_last,
            http_minor=request.http_minor,
            head_only=request.method == "HEAD",
            date=self._server.http_date(),
        )
        self._send(pieces)
        self._server.on_finished(response.status, request)
        return is_last

    def _add_headers(self, response: Response, request: HttpRequest | None) -> None:
        if not self.is_admin:
            self._server.app.add_headers(response, request)

    def _is_last(self, request: HttpRequest) -> bool:
        is_leaving = self._has_eof or self._server.is_draining
        # Closed by the request itself, or because too much came behind it.
        return self._reader.state is ReadState.CLOSED or (is_leaving and self._reader.state is ReadState.IDLE)

    def _render(
        self, error: BaseException, request_id: str, path: str | None, request: HttpRequest | None = None
    ) -> Response:
        """The answer to a failure, which is logged here, once."""
        if request is not None:
            request.timeline.error = _name_of(error)
        if isinstance(error, ApiError):
            log.log(error.log_level, "request %s: %d, %s", request_id, error.status, _reason(error))
        else:
            log.error("request %s: unexpected %s", request_id, _describe(error))
            error = ServerError("The server failed on this request. Its log says more under the id of the request.")
        return self._server.app.render_error(error, path)

    def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """uvloop takes pieces as they are, and counts their bytes until the client's kernel has them."""
        if not self._transport.is_closing():
            self._num_sent_bytes += sum(map(len, pieces))
            self._transport.writelines(pieces)

    # --- ending ---

    def _refuse(self, error: ApiError) -> None:
        """Give up on what the client sends: answer why, and end."""
        request = self._reader.request
        if request is None:
            request_id = new_request_id()
            self._end_with(self._render(error, request_id, None), request_id)
        else:
            response = self._render(error, request.request_id, request.path, request)
            self._end_with(response, request.request_id, request)

    def _refuse_connection(self, reason: str) -> None:
        """Unlike other refusals not logged each by itself: the sweep counts them."""
        error = Unavailable(reason, retry_after_s=1)
        self._end_with(self._server.app.render_error(error, None), new_request_id())

    def _end_with(self, response: Response, request_id: str, request: HttpRequest | None = None) -> None:
        self._add_headers(response, request)
        date = self._server.http_date()
        is_head = request is not None and request.method == "HEAD"
        self._send(encode_response(response, request_id=request_id, keep_alive=False, head_only=is_head, date=date))
        self._server.on_finished(response.status, request)
        self._linger()

    def _linger(self) -> None:
        """Send no more, and wait for the client to close.

        Closing at once while input is still arriving would reset the connection, and the reset can overtake the
        answer: a client that is still sending a body which is too large would never learn why.
        """
        self._is_ending = True
        self._stop_reading()
        self._since = self._server.clock()
        if self._has_eof or not self._transport.can_write_eof():
            self._transport.close()
        elif not self._transport.is_closing():
            self._transport.write_eof()

    def _drop(self, num_bytes: int) -> None:
        """Let a client that sends on reach the end of it, and read the answer; but not one that only drips."""
        self._since = min(self._server.clock(), self._since + num_bytes / _MIN_DROPPED_BYTES_PER_S)
        self._num_dropped_bytes += num_bytes
        if self._num_dropped_bytes > _MAX_DROPPED_BYTES:
            self.abort()

    def _is_hung_up(self) -> bool:
        """Whether the connection is dead in both directions, and not only the client's sending half is shut down."""
        poll = select.poll()
        poll.register(self._fileno(), 0)
        return bool(poll.poll(0))

    def _close_unless_asked(self) -> None:
        """A loop that was held up comes to its timers first: a request may be there, and not have been read yet."""
        poll = select.poll()
        poll.register(self._fileno(), select.POLLIN)
        if not poll.poll(0):
            self._transport.close()

    def _fileno(self) -> int:
        return cast(int, self._transport.get_extra_info("socket").fileno())

    def _probe(self) -> None:
        """Send what an HTTP/1.1 client skips, to learn whether the client has gone.

        On TCP nothing tells close() from shutdown(SHUT_WR) until a byte is sent: if the client has gone, its kernel
        answers with a reset, and the next sweep finds the connection hung up.
        """
        if self._request is not None and self._request.http_minor == 1:
            self._send([CONTINUE])

    # --- called by the server ---

    @property
    def owes_an_answer(self) -> bool:
        """Something of a request has come, and its answer has not gone out whole."""
        is_asked = self.task is not None or self._reader.state in (ReadState.HEAD, ReadState.BODY)
        return (is_asked and not self._is_ending) or self._transport.get_write_buffer_size() > 0

    def abort(self) -> None:
        self._transport.abort()

    def take_limits(self, limits: Limits) -> None:
        """They hold from the next request on."""
        self._reader.limits = limits

    def give_up_held(self) -> None:
        """Too much is held by all, and of that too much here: refuse the body that is coming; of a request that is
        being answered, what is behind it."""
        self._stop_reading()
        if self.task is not None:
            return  # the answer says that it is the last
        limit = self._server.arriving.max_bytes
        self._refuse(
            TooManyRequests(
                f"Too much is being sent: at most {limit} bytes of requests that are not complete are held, half of "
                "them from one address",
                retry_after_s=5,
            )
        )

    def reset(self) -> None:
        """Abort, and have the kernel drop what it holds: it would go on for as long as the client takes any of it."""
        with suppress(OSError), socket.socket(fileno=os.dup(self._fileno())) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.num_unsent_bytes = 0
        self.abort()

    def close_if_silent(self, since: float) -> None:
        """Close an idle connection on which nothing has happened since then."""
        if self._awaited is ReadState.IDLE and self._since <= since and not self._is_ending:
            self._close_unless_asked()

    def check_deadlines(self, now: float) -> None:
        timeouts = self._server.timeouts
        num_unsent_bytes = self.num_unsent_bytes = self._transport.get_write_buffer_size()
        is_stalled = False
        if num_unsent_bytes > 0 or self._is_ending:
            # A kernel takes megabytes at a time: what matters is what has left it.
            num_unsent_bytes += self._num_bytes_in_kernel()
            is_stalled = self._is_stalled(now, num_unsent_bytes)
            num_taken_bytes = self._num_sent_bytes - num_unsent_bytes
            self.takes_nothing = num_taken_bytes == self._num_taken_at_look
            self._num_taken_at_look = num_taken_bytes if num_unsent_bytes else None
        else:
            self._num_due_bytes, self._num_taken_at_look, self.takes_nothing = 0, None, False
        if is_stalled:
            self.reset()
        elif self.task is not None:
            if self._has_eof and self._is_hung_up():
                self.abort()
        elif num_unsent_bytes > 0:
            self._since = now  # the client has to take the answer before anything else is expected of it
        elif not self._is_ending:
            self._check_waiting(now - self._since, timeouts)
        elif now - self._since >= timeouts.linger_s:
            self.abort()

    def _is_stalled(self, now: float, num_unsent_bytes: int) -> bool:
        """The client has taken too little of what it was sent for too long."""
        if num_unsent_bytes == 0:
            self._num_due_bytes = 0
            return False
        num_taken_bytes = self._num_sent_bytes - num_unsent_bytes
        if self._num_due_bytes == 0 or num_taken_bytes - self._num_taken_bytes >= self._num_due_bytes:
            self._num_taken_bytes, self._last_taken_at = num_taken_bytes, now
        self._num_due_bytes = max(self._num_due_bytes, _MIN_TAKEN_BYTES, num_unsent_bytes // _MAX_WRITE_PERIODS)
        return now - self._last_taken_at >= self._server.timeouts.write_s

    def _num_bytes_in_kernel(self) -> int:
        """Sent, and not acknowledged by the client's kernel; on a unix socket, not read by the client."""
        num_bytes = array.array("i", [0])
        try:
            fcntl.ioctl(self._fileno(), termios.TIOCOUTQ, num_bytes)
        except (OSError, ValueError):  # it has just been closed
            return 0
        # Our end of the stream counts as a byte.
        return max(0, num_bytes[0] - self._is_ending)

    def _check_waiting(self, waited_s: float, timeouts: "Timeouts") -> None:
        if self._why_refused is not None:
            if waited_s >= timeouts.linger_s:
                self._refuse_connection(self._why_refused)
        elif self._awaited is ReadState.IDLE:
            if waited_s >= timeouts.idle_s:
                self._close_unless_asked()
        elif self._awaited is ReadState.HEAD:
            if waited_s >= timeouts.head_s:
                self._refuse(RequestTimeout(f"head of the request: not complete after {timeouts.head_s:g} s"))
        elif waited_s >= timeouts.body_s + self.num_held_bytes / _MIN_BODY_BYTES_PER_S:
            self._refuse(RequestTimeout(f"body of the request: not complete after {timeouts.body_s:g} s"))


def _check_origin(request: HttpRequest) -> None:
    """Browsers send this header, and let any page that the operator looks at ask what is on his machine."""
    if "origin" in request.headers:
        raise PermissionDenied(
            "header Origin: the admin listener answers no requests of web pages", code="origin_not_allowed"
        )


def client_of(peername: object) -> str:
    """Who is at the other end: an IPv4 address, the /64 of an IPv6 address, which is what one site has at least; ""
    where there is none, as on a unix socket."""
    if not isinstance(peername, tuple):
        return ""
    host = str(peername[0])
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{ipaddress.IPv6Address(int(address) >> 64 << 64)}/64"


def _let_go(error: BaseException | None) -> None:
    """Forget where an exception came from: its frames hold the request, body and all, and one of them holds it."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _name_of(error: BaseException) -> str:
    """What may be counted and logged of a failure, whatever a caller sent."""
    return error.code or error.type if isinstance(error, ApiError) else ServerError.type


def _reason(error: ApiError) -> str:
    """For the log. What a caller has done wrong is told with the value, so only its kind is: it may be a text."""
    if error.log_level > logging.DEBUG:  # ours
        return error.message
    return f"{error.code or error.type} {error.param or ''}".rstrip()


def _describe(error: BaseException) -> str:
    """The exception's type and where it was raised. Not its message: it may quote what a client sent."""
    return f"{type(error).__qualname__}\n{''.join(traceback.format_tb(error.__traceback__))}"
