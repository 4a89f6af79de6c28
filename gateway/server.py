"""The listener and its connections: bytes from sockets to the app, its answers back, deadlines, drain.

Owns every socket, the order of requests on a connection, and all waiting for clients. Never parses HTTP
(`gateway.http1`) and never decides what is answered (the `App`); it only refuses to wait or to hold more. No body is
ever logged, nor an exception's message, which may quote one. `gateway.main` starts and drains it.

A connection answers one request at a time; what a client sends meanwhile waits as plain bytes. Its life:

    reading (IDLE → HEAD → BODY: `http1.ReadState`)  ⇄  answering (one task per request)
        │ refused, timed out, or the last answer is written
        ▼
    lingering: its sending half is shut down, input is dropped until the client closes, too
"""

import asyncio
import logging
import select
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import Protocol, cast

from gateway.accepting import SharedListener
from gateway.closing import turn_away_connects
from gateway.errors import ApiError, RequestTimeout, ServerError, Unavailable
from gateway.http1 import (
    CONTINUE,
    HttpRequest,
    Limits,
    ReadState,
    RequestReader,
    RequestReceived,
    Response,
    encode_response,
    new_request_id,
)
from shm.socketfile import file_id

log = logging.getLogger("vecd.gateway")

# asyncio calls listen(2) again on the socket it is given, with 100 unless told. The kernel caps it at somaxconn.
_BACKLOG = 4096
_MAX_WAITING_BYTES = 64 * 1024
"""Of further requests behind the one being answered; more stays in the kernel. Not 0, because a client that leaves is
only noticed while reading goes on."""
_MAX_REFUSED_CONNECTIONS = 256
"""So many may be told at once that there are too many; the rest is cut off."""
# Of input that comes while a connection lingers.
_MAX_DROPPED_BYTES = 64 * 1024 * 1024
_MIN_DROPPED_BYTES_PER_S = 256 * 1024
_DRAIN_POLL_S = 0.05
_ABORT_TIMEOUT_S = 1.0


class App(Protocol):
    """What is served. The connection answers an ApiError with `render_error`, anything else raised as a 500."""

    def check_head(self, request: HttpRequest) -> Response | None:
        """Look at a request whose body has not all come yet. An answer, or an ApiError, ends the connection.

        Not called for a request that arrives in one piece: `handle` checks for itself.
        """

    async def handle(self, request: HttpRequest) -> Response:
        """Answer a complete request. Cancelled when the client has gone."""

    def render_error(self, error: ApiError, path: str | None) -> Response:
        """The answer to a failed request; `path` is None when its head was not understood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long the server waits for a client. Looked at once per `sweep_s`, so each may last that much longer."""

    head_s: float = 10.0
    """From the first byte of a request to the end of its head."""
    body_s: float = 60.0
    """From the end of the head to the end of the body."""
    idle_s: float = 120.0
    """Between requests, and before the first one. Longer than the idle time of the usual clients (openai-python:
    5 s, Go: 90 s), so that they close and no request meets a closing connection."""
    write_s: float = 30.0
    """Without the client taking a single byte of an answer."""
    linger_s: float = 3.0
    """After the last answer, for the client to read it and close."""
    sweep_s: float = 1.0


class Server:
    """All connections of one listening socket."""

    def __init__(
        self,
        app: App,
        *,
        limits: Limits,
        timeouts: Timeouts,
        max_connections: int,
        clock: Callable[[], float] = time.monotonic,
        on_answer: Callable[[int], None] = lambda status: None,
        is_ahead: Callable[[], bool] | None = None,
    ) -> None:
        """`clock`, in seconds, is what the timeouts are measured by; `on_answer` hears the status of each answer.
        `is_ahead`, where several gateways share the socket, says whether one of them has fewer connections."""
        self.app = app
        self.limits = limits
        self.timeouts = timeouts
        self.max_connections = max_connections
        self.clock = clock
        self.on_answer = on_answer
        self._is_ahead = is_ahead
        self.is_draining = False
        self.num_requests_in_flight = 0
        self._connections: set[Connection] = set()
        self._refused: set[Connection] = set()
        self._num_refused_since_sweep = 0
        self._date_of, self._date = 0, ""

    @property
    def num_connections(self) -> int:
        """Without those that are only being told that there are too many."""
        return len(self._connections)

    async def start(self, sock: socket.socket) -> None:
        """Accept from a bound and listening stream socket, TCP or unix. `drain` closes it, and removes its file.

        uvloop sets TCP_NODELAY on what it accepts.
        """
        self._loop = asyncio.get_running_loop()
        self._listening = sock
        self._uds_id = file_id(sock.getsockname()) if sock.family == socket.AF_UNIX else None
        self._listener = await self._listen(sock, lambda: Connection(self, self._loop))
        self._sweep_regularly()

    async def _listen(
        self, sock: socket.socket, make_connection: "Callable[[], Connection]"
    ) -> asyncio.AbstractServer | SharedListener:
        if self._is_ahead is None:
            return await self._loop.create_server(make_connection, sock=sock, backlog=_BACKLOG)
        is_ahead = self._is_ahead
        return SharedListener(sock, make_connection, lambda: not self.is_draining and is_ahead())

    async def drain(self, deadline_s: float, grace_s: float = 0.5) -> bool:
        """Answer what has been sent, then close everything. True when nothing was left unanswered at the deadline.

        The listener stays open for `grace_s`, so that connections waiting in its backlog are served, and an idle
        connection is closed only after as long a silence, so that a request already on its way is, too. From now on
        every answer says `connection: close`.
        """
        self.is_draining = True
        end = time.monotonic() + deadline_s
        await asyncio.sleep(min(grace_s, deadline_s))
        turn_away_connects(self._listening, self._uds_id)
        await asyncio.sleep(_DRAIN_POLL_S)  # the loop accepts what is left in the backlog
        self._listener.close()
        while self._connections and (left_s := end - time.monotonic()) > 0:
            silent_since = self.clock() - grace_s
            for connection in list(self._connections):
                connection.close_if_silent(silent_since)
            await asyncio.sleep(min(left_s, _DRAIN_POLL_S))
        is_all_answered = not any(connection.owes_an_answer for connection in self._connections)
        await self._abort_all()
        return is_all_answered

    # --- called by connections ---

    def http_date(self) -> str:
        """Now, for the Date header; written anew once a second."""
        now = int(time.time())
        if now != self._date_of:
            self._date_of, self._date = now, formatdate(now, usegmt=True)
        return self._date

    def register(self, connection: "Connection") -> bool:
        """Count a new connection. False when there are too many: then it is to be refused."""
        if len(self._connections) < self.max_connections:
            self._connections.add(connection)
            return True
        self._num_refused_since_sweep += 1
        if len(self._refused) >= _MAX_REFUSED_CONNECTIONS:
            connection.abort()
        self._refused.add(connection)
        return False

    def forget(self, connection: "Connection") -> None:
        self._refused.discard(connection)
        self._connections.discard(connection)

    # --- deadlines ---

    def sweep(self) -> None:
        """Look at every connection's deadlines once. One timer for all of them costs a request nothing."""
        now = self.clock()
        for connection in [*self._connections, *self._refused]:
            connection.check_deadlines(now)
        if self._num_refused_since_sweep:
            log.warning(
                "%d connections refused: %d are open, the most allowed",
                self._num_refused_since_sweep,
                self.num_connections,
            )
            self._num_refused_since_sweep = 0

    def _sweep_regularly(self) -> None:
        self._sweeper = self._loop.call_later(self.timeouts.sweep_s, self._sweep_regularly)
        self.sweep()

    async def _abort_all(self) -> None:
        """Side effect: the handlers of requests that are still in flight are cancelled."""
        self._sweeper.cancel()
        connections = [*self._connections, *self._refused]
        tasks = [connection.task for connection in connections if connection.task is not None]
        for connection in connections:
            connection.abort()
        await asyncio.sleep(0)  # until the loop has told them
        if tasks:
            await asyncio.wait(tasks, timeout=_ABORT_TIMEOUT_S)


class Connection(asyncio.Protocol):
    """One client's connection. asyncio calls the methods of its Protocol, the server those at the end."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._reader = RequestReader(server.limits)
        self._since = server.clock()  # when what is awaited or being done began
        self._awaited: ReadState | None = ReadState.IDLE  # None while a request is answered
        self.task: asyncio.Task[None] | None = None
        self._request: HttpRequest | None = None  # the one that the task answers
        self._is_admitted = True
        self._is_ending = False  # the last answer has been given, or nobody is there to take one
        self._has_eof = False
        self._is_reading_paused = False
        self._is_write_blocked = False
        self._num_sent_bytes = 0
        self._num_taken_bytes = 0  # of those sent, when last looked at
        self._last_taken_at = self._since
        self._num_dropped_bytes = 0

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._is_admitted = self._server.register(self)

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            self._drop(len(data))
        elif self._is_admitted:
            self._reader.feed(data)
            self._advance()
        else:
            # Not before the client has spoken: some take an answer without a question for a protocol error.
            self._refuse_connection()

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
        self._reader.close()
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
            if isinstance(event, RequestReceived):
                self._start(event.request)
            else:
                self._check_head(event.request)
        self._limit_waiting()

    def _await_bytes(self) -> None:
        if self._has_eof:
            self._transport.close()
        elif self._reader.state is not self._awaited:
            self._awaited, self._since = self._reader.state, self._server.clock()

    def _limit_waiting(self) -> None:
        is_full = self._reader.num_waiting_bytes > _MAX_WAITING_BYTES
        if is_full == self._is_reading_paused:
            return
        self._is_reading_paused = is_full
        if is_full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _check_head(self, request: HttpRequest) -> None:
        try:
            response = self._server.app.check_head(request)
        except Exception as error:
            response = self._render(error, request.request_id, request.path)
        if response is not None:
            self._end_with(response, request.request_id, is_head=request.method == "HEAD")
        elif request.expects_continue:
            self._send([CONTINUE])

    # --- answering ---

    def _start(self, request: HttpRequest) -> None:
        self._request = request
        self._awaited, self._since = None, self._server.clock()
        self.task = self._loop.create_task(self._serve(request))

    async def _serve(self, request: HttpRequest) -> None:
        self._server.num_requests_in_flight += 1
        try:
            is_last = await self._answer(request)
        except BaseException:
            # The client has gone, or not even an error could be rendered: nobody is left waiting.
            self._transport.abort()
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
            return self._write_answer(request, await self._server.app.handle(request))
        except asyncio.CancelledError as error:
            if self.task is None or self.task.cancelling():
                raise
            failure = error  # the app cancelled something of its own
        except Exception as error:
            failure = error
        try:
            return self._write_answer(request, self._render(failure, request.request_id, request.path))
        finally:
            _let_go(failure)

    def _write_answer(self, request: HttpRequest, response: Response) -> bool:
        """True when it is the connection's last. Nothing is sent when it raises (ValueError, KeyError)."""
        is_last = self._is_last(request)
        pieces = encode_response(
            response,
            request_id=request.request_id,
            keep_alive=not is_last,
            http_minor=request.http_minor,
            head_only=request.method == "HEAD",
            date=self._server.http_date(),
        )
        self._send(pieces)
        self._server.on_answer(response.status)
        if log.isEnabledFor(logging.DEBUG):
            self._log_access(request, response.status)
        return is_last

    def _is_last(self, request: HttpRequest) -> bool:
        is_leaving = self._has_eof or self._server.is_draining
        return not request.keep_alive or (is_leaving and self._reader.state is ReadState.IDLE)

    def _render(self, error: BaseException, request_id: str, path: str | None) -> Response:
        """The answer to a failure, which is logged here, once."""
        if isinstance(error, ApiError):
            log.log(error.log_level, "request %s: %d, %s", request_id, error.status, error.message)
        else:
            log.error("request %s: unexpected %s", request_id, _describe(error))
            error = ServerError("The server failed on this request. Its log says more under the id of the request.")
        return self._server.app.render_error(error, path)

    def _send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """uvloop takes pieces as they are, and counts their bytes until the client's kernel has them."""
        if not self._transport.is_closing():
            self._num_sent_bytes += sum(map(len, pieces))
            self._transport.writelines(pieces)

    def _log_access(self, request: HttpRequest, status: int) -> None:
        elapsed_ms = (self._server.clock() - self._since) * 1000
        log.debug("%s %s %d %.1f ms %s", request.method, request.path, status, elapsed_ms, request.request_id)

    # --- ending ---

    def _refuse(self, error: ApiError) -> None:
        """Give up on what the client sends: answer why, and end."""
        request = self._reader.request
        if request is None:
            request_id = new_request_id()
            self._end_with(self._render(error, request_id, None), request_id)
        else:
            response = self._render(error, request.request_id, request.path)
            self._end_with(response, request.request_id, is_head=request.method == "HEAD")

    def _refuse_connection(self) -> None:
        """Unlike other refusals not logged each by itself: the sweep counts them."""
        limit = self._server.max_connections
        error = Unavailable(f"Too many connections: {limit} are open, the most allowed", retry_after_s=1)
        self._end_with(self._server.app.render_error(error, None), new_request_id())

    def _end_with(self, response: Response, request_id: str, *, is_head: bool = False) -> None:
        date = self._server.http_date()
        self._send(encode_response(response, request_id=request_id, keep_alive=False, head_only=is_head, date=date))
        self._server.on_answer(response.status)
        self._linger()

    def _linger(self) -> None:
        """Send no more, and wait for the client to close.

        Closing at once while input is still arriving would reset the connection, and the reset can overtake the
        answer: a client that is still sending a body which is too large would never learn why.
        """
        self._is_ending = True
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
        poll.register(self._transport.get_extra_info("socket").fileno(), 0)
        return bool(poll.poll(0))

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

    def close_if_silent(self, since: float) -> None:
        """Close an idle connection on which nothing has happened since then."""
        if self._awaited is ReadState.IDLE and self._since <= since and not self._is_ending:
            self._transport.close()

    def check_deadlines(self, now: float) -> None:
        timeouts = self._server.timeouts
        num_unsent_bytes = self._transport.get_write_buffer_size()
        if self._is_stalled(now, num_unsent_bytes):
            self.abort()
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
        """The client has not taken a byte of what it was sent for too long."""
        num_taken_bytes = self._num_sent_bytes - num_unsent_bytes
        if num_unsent_bytes == 0 or num_taken_bytes > self._num_taken_bytes:
            self._num_taken_bytes, self._last_taken_at = num_taken_bytes, now
        return now - self._last_taken_at >= self._server.timeouts.write_s

    def _check_waiting(self, waited_s: float, timeouts: Timeouts) -> None:
        if not self._is_admitted:
            if waited_s >= timeouts.linger_s:
                self._refuse_connection()
        elif self._awaited is ReadState.IDLE:
            if waited_s >= timeouts.idle_s:
                self._transport.close()
        elif self._awaited is ReadState.HEAD:
            if waited_s >= timeouts.head_s:
                self._refuse(RequestTimeout(f"head of the request: not complete after {timeouts.head_s:g} s"))
        elif waited_s >= timeouts.body_s:
            self._refuse(RequestTimeout(f"body of the request: not complete after {timeouts.body_s:g} s"))


def _let_go(error: BaseException | None) -> None:
    """Forget where an exception came from: its frames hold the request, body and all, and one of them holds it."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _describe(error: BaseException) -> str:
    """The exception's type and where it was raised. Not its message: it may quote what a client sent."""
    return f"{type(error).__qualname__}\n{''.join(traceback.format_tb(error.__traceback__))}"
