"""TLS between a socket's transport and a connection, which does not notice it.

Owns one connection's encryption: the handshake and its deadline, the data that waits to be encrypted, and how TLS
begins and ends. Never reads what it carries.

Why not the event loop's own TLS: uvloop encrypts a whole response at once, and then counts none of it as unsent, so
neither flow control nor a deadline would notice a client that reads nothing; and it cannot shut down one half of a
connection. Here only as much is encrypted as the socket takes.
"""

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast

from vecd.gateway.http.connection import Connection

log = logging.getLogger("vecd.gateway")

_READ_BYTES = 256 * 1024
_ENCRYPTED_AT_ONCE_BYTES = 64 * 1024
"""Four records."""
_MAX_UNASKED_BYTES = 1024 * 1024
"""Unsent bytes of OpenSSL's own replies, such as key updates, to a client that does not read."""


class TlsLayer(asyncio.Protocol, asyncio.Transport):
    """The protocol of a socket's transport, and the transport of a connection that exists before the handshake."""

    def __init__(
        self,
        context: ssl.SSLContext,
        connection: Connection,
        loop: asyncio.AbstractEventLoop,
        handshake_timeout_s: float,
    ) -> None:
        super().__init__()
        self._connection: Connection | None = connection
        self._loop = loop
        self._handshake_timeout_s = handshake_timeout_s
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._has_begun = False  # the client has sent something
        self._is_open = False  # the handshake is done, and the connection has not been lost
        self._unencrypted: deque[memoryview] = deque()
        self.is_socket_blocked = False
        self._is_connection_blocked = False
        self._has_closed = self._has_written_eof = False  # called by the connection
        self._has_close_notify = False  # the client has sent its close_notify
        self._is_shut_down = False  # this side has sent its close_notify

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert self._connection is not None
        self.socket = cast(asyncio.Transport, transport)
        self._timer = self._loop.call_later(self._handshake_timeout_s, self._give_up)
        self._connection.connection_made(self)

    def data_received(self, data: bytes) -> None:
        if self._connection is None or self._has_close_notify or self._has_closed:
            return
        if self._is_shut_down:
            self._connection.data_received(data)  # which only counts the bytes
            return
        if not self._has_begun:
            self._has_begun = True
            if data[:1].isalpha():  # as HTTP begins, and TLS never does
                self._step_aside(self._connection)
                return
        self._incoming.write(data)
        try:
            if not self._is_open:
                self._shake_hands()
            if self._is_open:
                self._decrypt(self._connection)
        except ssl.SSLError as error:
            self._break_off(error)

    def eof_received(self) -> bool:
        if not self._is_open or self._connection is None:
            return False
        if not self._connection.eof_received():
            self.close()
        return True

    def pause_writing(self) -> None:
        self.is_socket_blocked = True

    def resume_writing(self) -> None:
        self.is_socket_blocked = False
        self._encrypt()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._is_open = False
        self._unencrypted.clear()
        # The connection refers to this layer as its transport: only garbage collection would free the cycle.
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.connection_lost(exc)

    # --- reading ---

    def _step_aside(self, connection: Connection) -> None:
        """Leave the socket to the connection, which refuses the client."""
        self._timer.cancel()
        self._connection = None
        self.socket.set_protocol(connection)
        connection.refuse_plain_http(self.socket)

    def _shake_hands(self) -> None:
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            self._is_open = True
            self._timer.cancel()
        self._flush()

    def _decrypt(self, connection: Connection) -> None:
        while (self._incoming.pending or self._tls.pending()) and not (self._is_shut_down or self.is_closing()):
            try:
                data = self._tls.read(_READ_BYTES)
            except ssl.SSLWantReadError:
                break
            if not data:
                self._has_close_notify = True
                self.eof_received()
                break
            connection.data_received(data)
        if self._outgoing.pending:
            self._flush()
            if self.socket.get_write_buffer_size() > _MAX_UNASKED_BYTES + _ENCRYPTED_AT_ONCE_BYTES:
                self.abort()

    def _break_off(self, error: ssl.SSLError) -> None:
        """Abort: the bytes are not TLS, or an unsupported version of it, or were tampered with."""
        log.debug("a TLS connection is aborted: %s", error.reason)
        self._is_open = False
        self._unencrypted.clear()
        self._flush()  # the alert with the reason
        self.socket.close()

    def _give_up(self) -> None:
        log.debug("a TLS handshake was not done after %g s", self._handshake_timeout_s)
        self.socket.abort()

    # --- writing ---

    def _encrypt(self) -> None:
        if self._connection is None:
            return
        try:
            while self._unencrypted and not self.is_socket_blocked:
                piece = self._next_unencrypted()
                num_written_bytes = self._tls.write(piece)
                if num_written_bytes < len(piece):
                    self._unencrypted.appendleft(memoryview(piece)[num_written_bytes:])
                self._flush()
        except ssl.SSLError as error:
            self._break_off(error)
        self._update_flow_control()
        if not self._unencrypted:
            self._end_if_asked()

    def _next_unencrypted(self) -> bytes | memoryview:
        """Up to `_ENCRYPTED_AT_ONCE_BYTES`; small pieces together, because a record costs as much as a kilobyte."""
        taken: list[memoryview] = []
        room = _ENCRYPTED_AT_ONCE_BYTES
        while self._unencrypted and room:
            piece = self._unencrypted.popleft()
            if len(piece) > room:
                self._unencrypted.appendleft(piece[room:])
                piece = piece[:room]
            room -= len(piece)
            taken.append(piece)
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def _flush(self) -> None:
        if self._outgoing.pending and not self.socket.is_closing():
            self.socket.write(self._outgoing.read())

    def _update_flow_control(self) -> None:
        is_blocked = self.is_socket_blocked or bool(self._unencrypted)
        if is_blocked == self._is_connection_blocked or self._connection is None:
            return
        self._is_connection_blocked = is_blocked
        if is_blocked:
            self._connection.pause_writing()
        else:
            self._connection.resume_writing()

    # --- ending ---

    def _end_if_asked(self) -> None:
        if (self._has_written_eof or self._has_closed) and not self._is_shut_down:
            self._is_shut_down = True
            if self._is_open:
                with suppress(ssl.SSLError):  # it wants to read the client's close_notify
                    self._tls.unwrap()
                self._flush()
            if self._has_written_eof and not self.socket.is_closing():
                self.socket.write_eof()
        if self._has_closed:
            self.socket.close()

    # --- called by the connection ---

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Hold the pieces, without a copy, until they are encrypted. Before the handshake they are dropped, because the
        client could not read them."""
        if not self._is_open or self.is_closing() or self._has_written_eof:
            return
        self._unencrypted.extend(memoryview(piece) for piece in list_of_data if len(piece))
        self._encrypt()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writelines([data])

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self._unencrypted)) + self.socket.get_write_buffer_size()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Shut down this half once everything is sent; without a handshake, close at once."""
        if not self._is_open:
            self.socket.abort()
            return
        self._has_written_eof = True
        self._encrypt()

    def close(self) -> None:
        self._has_closed = True
        self._encrypt()

    def abort(self) -> None:
        self.socket.abort()

    def is_closing(self) -> bool:
        return self._has_closed or self.socket.is_closing()

    def pause_reading(self) -> None:
        self.socket.pause_reading()

    def resume_reading(self) -> None:
        self.socket.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.socket.get_extra_info(name, default)
