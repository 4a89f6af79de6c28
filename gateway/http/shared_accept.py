"""Accept connections from a listening socket that several gateways share, so that each has about as many.

Owns the accepting alone; `vecd.gateway.http.server` owns the connections. A single gateway does not use it: there the
event loop accepts.

Every gateway wakes when a client connects, and the first one accepts all that wait: when many connect at once, as a
client's pool does, one gateway may be the only one that runs, and have all of them for as long as they live. Measured
on 2 busy cores: of 16 connections to 2 gateways, all 16 at one, in 1 of 6 tries. So a gateway with more connections
than another waits once, for a moment; if no other gateway has accepted by then, it accepts.
"""

import asyncio
import logging
import socket
from collections.abc import Callable

log = logging.getLogger("vecd.gateway")

_STEP_BACK_S = 0.002
"""An idle gateway with fewer connections has accepted by then; a busy one costs a new connection no more than that."""
_NO_DESCRIPTOR_PAUSE_S = 1.0


class SharedListener:
    def __init__(
        self, sock: socket.socket, make_protocol: Callable[[], asyncio.Protocol], is_ahead: Callable[[], bool]
    ) -> None:
        """Accept from `sock`, which is listening, until `close`. Call on the running event loop.

        `is_ahead` says whether another gateway should have the next connection. Side effect: owns `sock`.
        """
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
        """Accept one connection; more are left for the next turn of the loop, and for other gateways."""
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
