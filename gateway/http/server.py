"""The listeners and all their connections: limits on their number, their deadlines, and draining.

Owns the listening sockets, what is counted over all connections, and the clock of their deadlines. One connection is
handled by `vecd.gateway.http.connection`; where the listener speaks TLS, a `vecd.gateway.http.tls_layer` is between the
socket and the connection; where it expects the PROXY protocol, a `vecd.gateway.http.proxy_layer` comes before both.
Never decides on responses (the `Application` does). `vecd.gateway.main` starts and drains it.
"""

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial

from vecd.gateway.http.body_budget import BodyBudget
from vecd.gateway.http.connection import Connection
from vecd.gateway.http.contract import Application, Timeouts
from vecd.gateway.http.drain_listener import refuse_connects
from vecd.gateway.http.forwarded import TrustedProxies
from vecd.gateway.http.proxy_layer import ProxyLayer
from vecd.gateway.http.proxy_protocol import ProxyHeader
from vecd.gateway.http.response_budget import ResponseBudget
from vecd.gateway.http.shared_accept import SharedListener
from vecd.gateway.http.tls import ServerTls
from vecd.gateway.http.tls_layer import TlsLayer
from vecd.gateway.types.messages import HttpRequest, Limits
from vecd.shm.free_memory import return_free_memory
from vecd.shm.socketfile import FileId, file_id

log = logging.getLogger("vecd.gateway")

# asyncio calls listen(2) again on the socket it is given, with 100 by default. The kernel caps it at somaxconn.
_BACKLOG = 4096
_MAX_REFUSED_CONNECTIONS = 256
"""So many refused connections get a response at a time; more are aborted."""
_MAX_ADMIN_CONNECTIONS = 64
_MAX_HELD_BYTES = 512 * 1024 * 1024
_MAX_HELD_BODIES = 4
"""Bodies of the longest size allowed that may be held, arriving or unsent, if that is more than `_MAX_HELD_BYTES`."""
_SILENT_SWEEPS = 3
"""A client that reads nothing for so long may be dropped for want of room. An honest one may be busy for a second."""
_TRIMMED_BYTES = 64 * 1024 * 1024
"""When there are so many fewer bytes of responses than there were, free memory is returned to the kernel."""
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


class Server:
    """All connections of one gateway: those of its public listener, and those of its admin listener, if it has one."""

    def __init__(
        self,
        app: Application,
        *,
        limits: Limits,
        timeouts: Timeouts,
        max_connections: int,
        max_connections_per_address: int | None = None,
        trusted_proxies: TrustedProxies | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_finished: Callable[[int, HttpRequest | None], None] = lambda status, request: None,
        is_ahead: Callable[[], bool] | None = None,
    ) -> None:
        """`max_connections`: to the public listener; `max_connections_per_address`: of these, from one `client_of`;
        None: as many. `trusted_proxies`: the peers of the public listener whose headers say who the caller is; None:
        no peer. `clock`: in seconds, for the timeouts. `on_finished`: called with the status of each response,
        or with `vecd.gateway.telemetry.shared_metrics.GONE` where the client disconnected before it, and with the
        request, if its head could be parsed. `is_ahead`, where several gateways share the socket: whether one of them
        has fewer connections.
        """
        self.app = app
        self.timeouts = timeouts
        self.arriving = BodyBudget()
        """The bytes that all connections hold of requests that cannot be handled yet."""
        self.unsent = ResponseBudget()
        """The bytes of all responses that are being made or are not sent."""
        self.clock = clock
        self.on_finished = on_finished
        self._is_ahead = is_ahead
        self.trusted_proxies = trusted_proxies
        self.is_draining = False
        self.num_requests_in_flight = 0
        self._listeners: list[_Listener] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self._connections: set[Connection] = set()
        self._num_of_address: Counter[str] = Counter()
        self._admin_connections: set[Connection] = set()
        self._refused: set[Connection] = set()
        self._awaiting_header: set[ProxyLayer] = set()
        self._num_without_header_since_sweep, self._why_without_header = 0, ""
        self._num_refused_since_sweep = 0
        self._num_refused_of_address_since_sweep = 0
        self.num_plain_since_sweep = 0
        """Connections that spoke plain HTTP to the TLS listener."""
        self._date_of, self._date = 0, ""
        self.change_limits(limits, max_connections, max_connections_per_address)

    @property
    def num_connections(self) -> int:
        """To the public listener, without those that are being refused because there are too many."""
        return len(self._connections)

    def change_limits(
        self, limits: Limits, max_connections: int, max_connections_per_address: int | None = None
    ) -> None:
        """Use other limits from now on. The arguments are those of the constructor. Open connections stay, even if they
        are more than allowed now; their next request is held to `limits`. Call on the running loop."""
        self.limits = limits
        self.max_connections = max_connections
        self.max_connections_per_address = max_connections_per_address or max_connections
        self.arriving.max_bytes = max(_MAX_HELD_BYTES, _MAX_HELD_BODIES * limits.max_body_bytes)
        self.unsent.max_bytes = self.arriving.max_bytes
        for connection in self._all_connections():
            connection.set_limits(limits)

    def trust(self, proxies: TrustedProxies | None) -> None:
        """Believe these proxies from now on, also on open connections. Call on the running loop."""
        self.trusted_proxies = proxies
        for connection in self._all_connections():
            num_held_bytes = connection.num_held_bytes
            self.arriving.count(connection, 0)
            self._count_address(connection, -1)
            num_unsent_bytes = connection.num_unsent_bytes
            self.unsent.count(connection, 0)
            connection.trust(proxies)
            self._count_address(connection, 1)
            self.arriving.count(connection, num_held_bytes)
            self.unsent.count(connection, num_unsent_bytes)

    async def start(
        self,
        sock: socket.socket,
        *,
        tls: ServerTls | None = None,
        is_admin: bool = False,
        proxy_protocol: bool = False,
        keeps_listening: bool = False,
    ) -> None:
        """Accept from a bound and listening stream socket, TCP or unix. `drain` closes it, and removes its file.

        Call it once for the public socket, which speaks TLS if `tls` is given, and once more for the admin socket, if
        there is one. With `proxy_protocol`, each connection must be of a trusted proxy and begin with a PROXY header;
        any other is closed. Requests of the admin listener have `is_admin`, its connections have a small limit of their
        own, and it closes last. uvloop sets TCP_NODELAY on what it accepts. With `keeps_listening`, another process has
        the socket open, too: `drain` only closes it here, its file stays, and its backlog is left to that process.
        """
        self._loop = asyncio.get_running_loop()
        is_ours = sock.family == socket.AF_UNIX and not keeps_listening
        uds_id = file_id(sock.getsockname()) if is_ours else None
        make_protocol: Callable[[], asyncio.Protocol] = partial(self._connection, tls, is_admin)
        if proxy_protocol:
            make_protocol = partial(ProxyLayer, self, partial(self._connection, tls, is_admin), self._loop)
        accepting: asyncio.AbstractServer | SharedListener
        if self._is_ahead is None or is_admin:
            accepting = await self._loop.create_server(make_protocol, sock=sock, backlog=_BACKLOG)
        else:
            is_ahead = self._is_ahead
            accepting = SharedListener(sock, make_protocol, lambda: not self.is_draining and is_ahead())
        self._listeners.append(_Listener(sock, uds_id, accepting, is_admin, keeps_listening))
        if self._sweeper is None:
            self._sweep_regularly()

    def _connection(
        self, tls: ServerTls | None, is_admin: bool, proxied: ProxyHeader | None = None
    ) -> asyncio.Protocol:
        connection = Connection(self, self._loop, is_admin=is_admin, proxied=proxied)
        if tls is None:
            return connection
        return TlsLayer(tls.context, connection, self._loop, self.timeouts.handshake_s)

    async def drain(self, deadline_s: float, grace_s: float = 0.5) -> bool:
        """Answer the requests that were sent, then close everything. True when none was left at the deadline.

        The public listener stays open for `grace_s`, so that connections waiting in its backlog are served, and an idle
        connection is closed only after as long a silence, so that a request already on its way is, too. From now on
        every response has `connection: close`. The admin listener serves until the rest is done; its requests are not
        counted as left.
        """
        self.is_draining = True
        end = time.monotonic() + deadline_s
        await asyncio.sleep(min(grace_s, deadline_s))
        await self._close_listeners(is_admin=False)
        await self._finish(self._connections, end, grace_s)
        is_all_answered = not any(connection.owes_response for connection in self._connections)
        await self._close_listeners(is_admin=True)
        await self._finish(self._admin_connections, min(end, time.monotonic() + _ADMIN_DRAIN_S), 0)
        await self._abort_all()
        return is_all_answered

    async def _close_listeners(self, *, is_admin: bool) -> None:
        closing = [listener for listener in self._listeners if listener.is_admin is is_admin]
        for listener in closing:
            # The public one is closed by all gateways at once, the admin one by each when it is done: what it has not
            # accepted is left to others, and so is the file.
            if listener.keeps_listening:
                listener.accepting.close()
            elif not is_admin or self._is_ahead is None:
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

    def http_date(self) -> str:
        """Now, for the Date header; rendered once a second."""
        now = int(time.time())
        if now != self._date_of:
            self._date_of, self._date = now, formatdate(now, usegmt=True)
        return self._date

    def register(self, connection: Connection) -> str | None:
        """Count a new connection. Returns the reason to refuse it when there are too many, else None."""
        reason = self._admit(connection)
        if reason is not None:
            self._num_refused_since_sweep += 1
            if len(self._refused) >= _MAX_REFUSED_CONNECTIONS:
                connection.abort()
            self._refused.add(connection)
        return reason

    def _admit(self, connection: Connection) -> str | None:
        if connection.is_admin:
            if len(self._admin_connections) >= _MAX_ADMIN_CONNECTIONS:
                limit = _MAX_ADMIN_CONNECTIONS
                return f"Too many connections: {limit} to the admin listener are open, the most allowed"
            self._admin_connections.add(connection)
            return None
        if len(self._connections) >= self.max_connections:
            return f"Too many connections: {self.max_connections} are open, the most allowed"
        if connection.address and self._num_of_address[connection.address] >= self.max_connections_per_address:
            self._num_refused_of_address_since_sweep += 1
            limit = self.max_connections_per_address
            return f"Too many connections from one address: {limit} are open, the most allowed"
        self._connections.add(connection)
        self._count_address(connection, 1)
        return None

    def _count_address(self, connection: Connection, num: int) -> None:
        if connection.address and connection in self._connections:
            self._num_of_address[connection.address] += num
            if self._num_of_address[connection.address] <= 0:
                del self._num_of_address[connection.address]

    def forget(self, connection: Connection) -> None:
        self._refused.discard(connection)
        self._admin_connections.discard(connection)
        self._count_address(connection, -1)
        self._connections.discard(connection)
        self.unsent.forget(connection)

    def await_header(self, layer: ProxyLayer) -> bool:
        """As in `vecd.gateway.http.proxy_layer.ProxyHost`, and so is `end_awaiting`."""
        if len(self._connections) + len(self._awaiting_header) >= self.max_connections:
            self._num_refused_since_sweep += 1
            return False
        self._awaiting_header.add(layer)
        return True

    def end_awaiting(self, layer: ProxyLayer, why_refused: str | None = None) -> None:
        if why_refused is not None and layer in self._awaiting_header:
            self._num_without_header_since_sweep += 1
            self._why_without_header = why_refused
        self._awaiting_header.discard(layer)

    # --- deadlines ---

    def sweep(self) -> None:
        """Check the deadlines of every connection once. One timer for all of them costs a request nothing."""
        if self.unsent.num_most_bytes - self.unsent.num_bytes > _TRIMMED_BYTES:
            self.unsent.num_most_bytes = self.unsent.num_bytes
            return_free_memory()
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
                self.max_connections,
            )
            self._num_refused_since_sweep = self._num_refused_of_address_since_sweep = 0

        if self.num_plain_since_sweep:
            log.warning(
                "Connections refused that sent plain HTTP to the TLS port, where clients must use https://: %d",
                self.num_plain_since_sweep,
            )
            self.num_plain_since_sweep = 0

        if self._num_without_header_since_sweep:
            log.warning(
                "Connections closed without the PROXY protocol header that --proxy-protocol expects of a proxy in "
                "--trusted-proxies: %d; the last one: %s",
                self._num_without_header_since_sweep,
                self._why_without_header,
            )
            self._num_without_header_since_sweep = 0

    def _reset_silent(self, connections: list[Connection]) -> None:
        """Reset connections that read nothing while others wait for room. Each of them alone has `write_s`."""
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
        return [*self._connections, *self._admin_connections, *self._refused]

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
            connection.abort()
        for layer in list(self._awaiting_header):
            layer.abort()
        await asyncio.sleep(0)  # until the loop has called `connection_lost` of each
        if tasks:
            await asyncio.wait(tasks, timeout=_ABORT_TIMEOUT_S)
