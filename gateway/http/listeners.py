"""The listeners and all their connections: limits on their number, their deadlines, and draining.

Owns the listening sockets, what is counted over all connections, and the clock of their deadlines. Parses nothing and
never decides on responses (the `Application` does).
"""

import asyncio
import ctypes
import logging
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import partial
from ipaddress import ip_address

from vecd.base.programs import return_free_memory
from vecd.gateway.http.connection import Connection, Host
from vecd.gateway.http.forwarded import TrustedProxies
from vecd.gateway.http.tls import ServerTls
from vecd.gateway.http.tls_layer import TlsLayer
from vecd.gateway.request import Limits
from vecd.shm.control import FileId, file_id, remove_if_ours

# Every gateway wakes when a client connects, and the first one accepts all that wait: when many connect at once, one
# gateway may get all of them (measured on 2 busy cores: all of 16 connections at one of 2 gateways, in 1 of 6 tries).
# So a gateway with more connections than another waits once, for a moment, before it accepts.

log = logging.getLogger("vecd.gateway")

_STEP_BACK_S = 0.002
"""An idle gateway with fewer connections has accepted by then; a busy one costs a new connection no more than that."""
_NO_DESCRIPTOR_PAUSE_S = 1.0


class SharedListener:
    """Accepts from a listening socket that several gateways share, so that each has about as many connections."""

    def __init__(
        self, sock: socket.socket, make_protocol: Callable[[], asyncio.Protocol], is_ahead: Callable[[], bool]
    ) -> None:
        """Accept from `sock`, which is listening, until `close`. Call on the running event loop. `is_ahead`: another
        gateway should have the next connection. Side effect: owns `sock`."""
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._make_protocol = make_protocol
        self._is_ahead = is_ahead
        self._has_stepped_back = False
        self._connecting: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stop accepting; what waits in the backlog is left to other gateways."""
        self._pause()
        self._sock.close()

    def _resume(self) -> None:
        self._timer = None
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _pause(self) -> None:
        if self._timer is None:
            self._loop.remove_reader(self._sock.fileno())
        else:
            self._timer.cancel()

    def _pause_for(self, seconds: float) -> None:
        self._pause()
        self._timer = self._loop.call_later(seconds, self._resume)

    def _accept(self) -> None:
        """Accept one connection; more are left for other gateways."""
        if not self._has_stepped_back and self._is_ahead():
            self._has_stepped_back = True
            self._pause_for(_STEP_BACK_S)
            return
        self._has_stepped_back = False
        try:
            accepted, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another gateway was faster, or the client has disconnected
        except OSError as error:
            log.error("no connection can be accepted: %s", error)
            self._pause_for(_NO_DESCRIPTOR_PAUSE_S)
            return
        task = self._loop.create_task(self._connect(accepted))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            accepted.setblocking(False)
            if accepted.family != socket.AF_UNIX:
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._make_protocol, accepted)
        except OSError as error:  # the client has disconnected already
            log.info("a connection ended before it began: %s", error)
            accepted.close()


# Closing a listening socket resets every connection that no process has accepted yet: a client would get no response to
# a request that it has already sent. So new connections are refused first, then those that wait are accepted, then the
# socket is closed.

# Linux UAPI include/uapi/asm-generic/socket.h, linux/filter.h: BPF_RET | BPF_K, "accept 0 bytes of the packet".
_SO_ATTACH_FILTER = 26
_DROP_PACKET = b"\x06\x00" + bytes(6)


def refuse_connects(sock: socket.socket, uds_id: FileId | None) -> None:
    """Refuse new connections to the listening `sock`; those that it already has can still be accepted.

    On TCP a socket filter drops the packets that open one; such a client tries again a second later. On a unix socket
    the file is removed, if it is still the one that `uds_id` names. Best effort: where the kernel forbids the filter, a
    connect in the moment of closing may be reset.
    """
    with suppress(OSError):
        if sock.family == socket.AF_UNIX:
            remove_if_ours(sock.getsockname(), uds_id)
            return
        instructions = ctypes.create_string_buffer(_DROP_PACKET)
        program = struct.pack("HP", 1, ctypes.addressof(instructions))  # struct sock_fprog
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


# asyncio calls listen(2) again on the socket it is given, with 100 by default. The kernel caps it at somaxconn.
_BACKLOG = 4096
_MAX_REFUSED_CONNECTIONS = 256
"""The most refused connections that get a response at a time; more are aborted."""
_MAX_ADMIN_CONNECTIONS = 64
_MAX_HELD_BYTES = 512 * 1024 * 1024
_MAX_HELD_BODIES = 4
"""Bodies of the longest size allowed that may be held, arriving or unsent, if that is more than `_MAX_HELD_BYTES`."""
_SILENT_SWEEPS = 3
"""A client that reads nothing for so long may be dropped for want of room."""
_TRIMMED_BYTES = 64 * 1024 * 1024
"""When responses have this many bytes less than they had, free memory is returned to the kernel."""
_DRAIN_POLL_S = 0.05
_ADMIN_DRAIN_S = 1.0
_ABORT_TIMEOUT_S = 1.0


@dataclass(slots=True)
class _Listener:
    sock: socket.socket
    uds_id: FileId | None
    accepting: asyncio.AbstractServer | SharedListener
    is_admin: bool
    keeps_listening: bool


@dataclass(eq=False, repr=False)
class Server(Host):
    """All connections of one gateway, to its public listener and its admin listener, if it has one."""

    is_ahead: Callable[[], bool] | None = field(default=None, kw_only=True)
    """Where several gateways share the socket: whether one of them has fewer connections."""
    connections: set[Connection] = field(default_factory=set, init=False)
    admin_connections: set[Connection] = field(default_factory=set, init=False)
    num_of_address: Counter[str] = field(default_factory=Counter, init=False)
    _refused: set[Connection] = field(default_factory=set, init=False)
    _listeners: list[_Listener] = field(default_factory=list, init=False)
    _sweeper: asyncio.TimerHandle | None = field(default=None, init=False)
    _num_refused_since_sweep = _num_refused_of_address_since_sweep = 0

    def __post_init__(self) -> None:
        self.change(self.limits, self.trusted_proxies)

    @property
    def num_connections(self) -> int:
        """To the public listener, without those that are being refused."""
        return len(self.connections)

    @property
    def max_connections_per_address(self) -> int:
        return self.limits.max_connections_per_address or self.limits.max_connections

    def change(self, limits: Limits, trusted_proxies: TrustedProxies) -> None:
        """Use these from now on. Open connections stay; their next request is held to `limits`, and is of whom a proxy
        says that is trusted now. Call on the running loop."""
        self.limits, self.trusted_proxies = limits, trusted_proxies
        self.arriving.max_bytes = max(_MAX_HELD_BYTES, _MAX_HELD_BODIES * limits.max_body_bytes)
        self.unsent.max_bytes = self.arriving.max_bytes
        for connection in self._all_connections():
            connection.reader.limits = limits
            num_held_bytes, num_unsent_bytes = connection.num_held_bytes, connection.num_unsent_bytes
            self.arriving.count(connection, 0)
            self.unsent.count(connection, 0)
            self._count_address(connection, -1)
            connection.trust(trusted_proxies)
            self._count_address(connection, 1)
            self.arriving.count(connection, num_held_bytes)
            self.unsent.count(connection, num_unsent_bytes)

    async def start(
        self,
        sock: socket.socket,
        *,
        tls: ServerTls | None = None,
        is_admin: bool = False,
        keeps_listening: bool = False,
    ) -> None:
        """Accept from a bound and listening stream socket, TCP or unix. `drain` closes it, and removes its file.

        Call it once for the public socket, and once more for the admin socket, if there is one, whose connections have
        a small limit of their own, and which closes last. With `keeps_listening`, another process has the socket open,
        too: `drain` only closes it here, its file stays, and its backlog is left to that process.
        """
        self._loop = asyncio.get_running_loop()
        is_ours = sock.family == socket.AF_UNIX and not keeps_listening
        uds_id = file_id(sock.getsockname()) if is_ours else None
        is_loopback = sock.family != socket.AF_UNIX and ip_address(sock.getsockname()[0]).is_loopback
        make_protocol: Callable[[], asyncio.Protocol] = partial(self._connection, tls, is_admin, is_loopback)
        accepting: asyncio.AbstractServer | SharedListener
        is_ahead = self.is_ahead
        if is_ahead is None or is_admin:
            accepting = await self._loop.create_server(make_protocol, sock=sock, backlog=_BACKLOG)
        else:
            accepting = SharedListener(sock, make_protocol, lambda: not self.is_draining and is_ahead())
        self._listeners.append(_Listener(sock, uds_id, accepting, is_admin, keeps_listening))
        if self._sweeper is None:
            self._sweep_regularly()

    def _connection(self, tls: ServerTls | None, is_admin: bool, is_loopback: bool) -> asyncio.Protocol:
        connection = Connection(self, self._loop, is_admin=is_admin, is_loopback=is_loopback)
        if tls is None:
            return connection
        return TlsLayer(tls.context, connection, self._loop, self.timeouts.handshake_s)

    async def drain(self, deadline_s: float, grace_s: float = 0.5) -> bool:
        """Answer the requests that were sent, then close everything. True when none was left at the deadline.

        The public listener stays open for `grace_s`, and an idle connection is closed only after as long a silence, so
        that requests already on their way are served. Every response has `connection: close`. The admin listener serves
        until the rest is done; its requests are not counted as left.
        """
        self.is_draining = True
        end = time.monotonic() + deadline_s
        await asyncio.sleep(min(grace_s, deadline_s))
        await self._close_listeners(is_admin=False)
        await self._finish(self.connections, end, grace_s)
        is_all_answered = not any(connection.owes_response for connection in self.connections)
        await self._close_listeners(is_admin=True)
        await self._finish(self.admin_connections, min(end, time.monotonic() + _ADMIN_DRAIN_S), 0)
        await self._abort_all()
        return is_all_answered

    async def _close_listeners(self, *, is_admin: bool) -> None:
        closing = [listener for listener in self._listeners if listener.is_admin is is_admin]
        for listener in closing:
            # The public one is closed by all gateways at once, the admin one by each when it is done: what it has not
            # accepted is left to others, and so is the file.
            if listener.keeps_listening:
                listener.accepting.close()
            elif not is_admin or self.is_ahead is None:
                refuse_connects(listener.sock, listener.uds_id)
        if closing:
            # What waits in our own backlog is accepted, and the last accepted sockets become connections.
            await asyncio.sleep(_DRAIN_POLL_S)
        for listener in closing:
            if not listener.keeps_listening:
                listener.accepting.close()
            self._listeners.remove(listener)

    async def _finish(self, connections: set[Connection], end: float, grace_s: float) -> None:
        while connections and (left_s := end - time.monotonic()) > 0:
            silent_since = self.clock() - grace_s
            for connection in list(connections):
                connection.close_if_silent(silent_since)
            await asyncio.sleep(min(left_s, _DRAIN_POLL_S))

    # --- called by connections ---

    def register(self, connection: Connection) -> str | None:
        reason = self._admit(connection)
        if reason is not None:
            self._num_refused_since_sweep += 1
            if len(self._refused) >= _MAX_REFUSED_CONNECTIONS:
                connection.transport.abort()
            self._refused.add(connection)
        return reason

    def _admit(self, connection: Connection) -> str | None:
        if connection.is_admin:
            if (num := len(self.admin_connections)) >= _MAX_ADMIN_CONNECTIONS:
                return f"Too many connections: {num} to the admin listener are open, the most allowed"
            self.admin_connections.add(connection)
            return None
        most, most_of_address = self.limits.max_connections, self.max_connections_per_address
        if len(self.connections) >= most:
            return f"Too many connections: {most} are open, the most allowed"
        if connection.address and self.num_of_address[connection.address] >= most_of_address:
            self._num_refused_of_address_since_sweep += 1
            return f"Too many connections from one address: {most_of_address} are open, the most allowed"
        self.connections.add(connection)
        self._count_address(connection, 1)
        return None

    def _count_address(self, connection: Connection, num: int) -> None:
        if connection.address and connection in self.connections:
            self.num_of_address[connection.address] += num
            if self.num_of_address[connection.address] <= 0:
                del self.num_of_address[connection.address]

    def forget(self, connection: Connection) -> None:
        self._refused.discard(connection)
        self.admin_connections.discard(connection)
        self._count_address(connection, -1)
        self.connections.discard(connection)
        self.unsent.forget(connection)

    # --- deadlines ---

    def sweep(self) -> None:
        """Check the deadlines of every connection once. One timer for all of them costs a request nothing."""
        if self.unsent.num_most_bytes - self.unsent.num_bytes > _TRIMMED_BYTES:
            self.unsent.num_most_bytes = self.unsent.num_bytes
            return_free_memory()
        self.date = formatdate(usegmt=True)
        now = self.clock()
        connections = self._all_connections()
        for connection in connections:
            connection.check_deadlines(now)
        self._reset_silent(connections)
        if self._num_refused_since_sweep:
            log.warning(
                "%d connections refused, %d of them because their address has %d: %d are open, at most %d are allowed",
                self._num_refused_since_sweep,
                self._num_refused_of_address_since_sweep,
                self.max_connections_per_address,
                self.num_connections,
                self.limits.max_connections,
            )
            self._num_refused_since_sweep = self._num_refused_of_address_since_sweep = 0
        if self.num_plain_since_sweep:
            log.warning(
                "Connections refused that sent plain HTTP to the TLS port, where clients must use https://: %d",
                self.num_plain_since_sweep,
            )
            self.num_plain_since_sweep = 0

    def _reset_silent(self, connections: list[Connection]) -> None:
        """Reset connections that read nothing while others wait for room."""
        silent = [each for each in connections if each.num_silent_checks >= _SILENT_SWEEPS and each.num_unsent_bytes]
        num_unsent_bytes, num_reset = self.unsent.num_bytes, 0
        for connection in sorted(silent, key=self.unsent.rank, reverse=True):
            if self.unsent.must_drop(connection):
                num_reset += 1
                connection.reset()
        if num_reset:
            log.warning(
                "%d connections reset that read nothing of their responses: %d bytes were unsent, at most %d are held, "
                "half of them for one address",
                num_reset,
                num_unsent_bytes,
                self.unsent.max_bytes,
            )

    def _all_connections(self) -> list[Connection]:
        return [*self.connections, *self.admin_connections, *self._refused]

    def _sweep_regularly(self) -> None:
        self._sweeper = self._loop.call_later(self.timeouts.sweep_s, self._sweep_regularly)
        self.sweep()

    async def _abort_all(self) -> None:
        """Side effect: the handlers of requests that are still in flight are cancelled."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        connections = self._all_connections()
        tasks = [connection.task for connection in connections if connection.task is not None]
        for connection in connections:
            connection.transport.abort()
        await asyncio.sleep(0)  # until the loop has called `connection_lost` of each
        if tasks:
            await asyncio.wait(tasks, timeout=_ABORT_TIMEOUT_S)
