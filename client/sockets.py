"""Connections to a server: of asyncio, and blocking. Each carries one exchange after the other (`vecd.client.http`).

Owns sockets, and the deadlines of connecting, of an exchange and of silence. Sends nothing twice: callers decide
whether to connect again.
"""

import asyncio
import errno
import math
import socket
import ssl
import time
from contextlib import suppress
from typing import cast

from vecd.base.target import Target, parse_target
from vecd.client.http import BadResponse, ConnectionClosed, Place, ResponseReader, ServerResponse

_CONNECT_S = 10.0
_TLS_CHECK_S = 2.0
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")
"""OpenSSL's reasons for a first message that is not one of TLS."""


class TlsMismatch(ConnectionError):
    """Raised when one end speaks TLS and the other does not, or the certificate is not trusted. The message says what
    to change; another try would bring the same."""


class NotConnected(ConnectionError, TimeoutError):
    """Raised when a connection takes too long to be made."""


# --- of asyncio -----------------------------------------------------------------------------------------------


class AsyncConnection(asyncio.BufferedProtocol):
    """One `exchange` at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self.reader = ResponseReader()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._done: asyncio.Future[None] | None = None
        self._until = self._silence_s = math.inf
        self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        """Stays from exchange to exchange: one for each would be a third of their cost."""
        self._unused = memoryview(bytearray(1))

    async def exchange(
        self, request: bytes, timeout_s: float = math.inf, place: Place | None = None, silence_s: float = math.inf
    ) -> ServerResponse:
        """Send `request` and return what comes back. `silence_s`: the longest time without a byte.

        Raises TimeoutError when the whole response does not come in time, ConnectionClosed or another OSError when the
        connection breaks, BadResponse when the bytes are not HTTP. Side effects: after an error, or a response that
        ends the connection, it is closed (`is_open`).
        """
        self.reader.begin(place)
        if not self.is_open:
            raise ConnectionClosed("closed while idle")
        self._done = self._loop.create_future()
        self._heard_at = self._loop.time()
        self._until, self._silence_s = self._heard_at + timeout_s, silence_s
        if self._timer is None or self._timer.when() > self._due():
            self._watch()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:  # cancelled, too: the response would be taken for that of the next request
            self.close()
            raise
        finally:
            self._done = None  # the memory is the caller's again
        if not self.reader.keeps_alive:
            self.close()
        assert self.reader.response is not None
        return self.reader.response

    def close(self) -> None:
        """Drop the connection at once. An exchange under way raises ConnectionClosed."""
        self._fail(ConnectionClosed("closed by the client"))

    def _fail(self, error: Exception) -> None:
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        self._transport.abort()
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def _due(self) -> float:
        return min(self._until, self._heard_at + self._silence_s)

    def _watch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._done is None:
            return
        if self._loop.time() >= self._due():
            self._fail(TimeoutError("no whole response in time"))
        elif self._due() < math.inf:
            self._timer = self._loop.call_at(self._due(), self._watch)

    # --- called by the event loop -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses of it
        self.is_open = True

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._unused if self._done is None or self._done.done() else self.reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._done is None or self._done.done():
            self._fail(BadResponse("a response without a request"))
            return
        self._heard_at = self._loop.time()
        try:
            if self.reader.received(nbytes):
                self._done.set_result(None)
        except BadResponse as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            if exc is None and self._done is not None and not self._done.done():
                self.reader.ended()
                self._done.set_result(None)
        except (ConnectionClosed, BadResponse) as error:
            exc = error
        self._fail(exc or ConnectionClosed("closed by the server"))


async def connect(target: Target, timeout_s: float) -> AsyncConnection:
    """Open a connection, in 10 s at most. Raises OSError when it cannot be made, of which NotConnected is one, and
    TlsMismatch, when the server's certificate is not trusted or it does not speak TLS."""
    loop, timeout_s = asyncio.get_running_loop(), min(timeout_s, _CONNECT_S)
    try:
        async with asyncio.timeout(timeout_s):
            if target.unix_path is not None:
                return (await loop.create_unix_connection(AsyncConnection, target.unix_path))[1]
            return (await loop.create_connection(AsyncConnection, target.host, target.port, ssl=target.tls))[1]
    except ssl.SSLError as error:
        _check_mismatch(error, target)
        raise
    except TimeoutError as error:
        raise NotConnected(f"no connection in {timeout_s:g} s") from error


async def find_mismatch(target: Target) -> TlsMismatch | None:
    """What is wrong if `target` is plain HTTP and the server speaks TLS.

    To be called after a failure only: a server of plain HTTP counts this as a bad request.
    """
    if target.tls is not None or target.unix_path is not None:
        return None
    with_tls = parse_target(f"https://{target.host_header}", insecure=True)
    try:
        connection = await connect(with_tls, _TLS_CHECK_S)
    except OSError:
        return None
    connection.close()
    return TlsMismatch(f"it speaks TLS: use {with_tls}")


# --- blocking -------------------------------------------------------------------------------------------------


class BlockingConnection:
    """One `exchange` at a time. Raises as `connect`."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.reader = ResponseReader()
        timeout_s = min(timeout_s, _CONNECT_S)
        if target.unix_path is None:
            self._socket = socket.create_connection((target.host, target.port), timeout_s)
        else:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if target.unix_path is not None:
                self._socket.settimeout(timeout_s)
                self._socket.connect(target.unix_path)
            else:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if target.tls is not None:
                    self._socket = target.tls.wrap_socket(self._socket, server_hostname=target.host)
        except OSError as error:
            self._socket.close()
            if isinstance(error, ssl.SSLError):
                _check_mismatch(error, target)
            raise

    def exchange(self, request: bytes, until: float, place: Place | None, silence_s: float) -> ServerResponse:
        """As `AsyncConnection.exchange`. `until` is on the clock of `time.monotonic`. After an error, or a response
        that ends the connection, it is the caller's to close."""
        self.reader.begin(place)
        failure: OSError | None = None
        try:
            self._wait_until(until, silence_s)
            self._socket.sendall(request)
        except TimeoutError:
            raise
        except OSError as error:  # it may have answered before it closed: the body is too large, say
            failure = error
        while not self.reader.is_complete:
            self._wait_until(until, silence_s)
            try:
                num_bytes = self._socket.recv_into(self.reader.buffer())
            except OSError as error:
                raise failure or error from None
            if num_bytes:
                self.reader.received(num_bytes)
            elif failure is not None and not self.reader.has_bytes:
                raise failure
            else:
                self.reader.ended()
        assert self.reader.response is not None
        return self.reader.response

    def _wait_until(self, until: float, silence_s: float) -> None:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no whole response in time")
        self._socket.settimeout(min(left_s, silence_s))

    def interrupt(self) -> None:
        """End what another thread does with it."""
        with suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


# --- what went wrong ------------------------------------------------------------------------------------------


def _check_mismatch(error: ssl.SSLError, target: Target) -> None:
    """Raises TlsMismatch with what to change, if that is what `error` is."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message or error.reason
        raise TlsMismatch(f"its certificate is not trusted: {why} (ca=, --ca FILE, or --insecure)") from error
    if error.reason in _NO_TLS:
        raise TlsMismatch(f"it does not speak TLS: use http://{target.host_header}") from error


def name_failure(error: Exception) -> str:
    match error:
        case BadResponse():
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
