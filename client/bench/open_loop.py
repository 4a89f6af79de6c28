"""An open loop of load: requests arrive at random moments, whatever the server does.

Owns the arrivals, the pool of connections and what is on its way in it. Decides neither when the run ends nor what is
counted. Called by `vecd.client.bench.run`.

Latency runs from the planned arrival of a request, and not from when it was sent. So it includes what a stall of the
server, or of this process, costs the requests that arrive meanwhile (no coordinated omission). Arrivals are a Poisson
process, as those of many independent callers are.
"""

import asyncio
import random
import time
from functools import partial

from vecd.client.bench.alarm import Alarm
from vecd.client.bench.stream import Stream
from vecd.client.bench.tally import LATE_S
from vecd.client.connection import ClientConnection, ExchangeResult

_MAX_LATE_S = 1.0
"""Arrivals that are not sent by this time after the window closed are given up."""
_MAX_BURST = 64
"""Requests that a generator which is behind sends in a row before it reads answers again."""

NO_FREE_CONNECTION = "no free connection"
NOT_SENT = "not sent in time"


class OpenLoop:
    """`run` once; it ends when the stream's window has closed and all answers are there, or when it is cancelled.

    The connection used last is used next, so that connections of a burst may fall idle, as in the pools of HTTP
    libraries.
    """

    def __init__(self, stream: Stream, *, rate_per_s: float, max_connections: int, timeout_s: float, seed: int) -> None:
        self.waiting: dict[object, float] = {}
        """The arrival of each request without an answer yet. At most `max_connections`."""
        self._stream = stream
        self._rate_per_s = rate_per_s
        self._max_connections = max_connections
        self._timeout_s = timeout_s
        self._random = random.Random(seed)
        self._idle: list[ClientConnection] = []
        self._num_connections = 0
        """Idle, in use and in the making."""
        self._due = 0.0
        """When the next request arrives."""
        self._has_sent_all = False
        self._finished: asyncio.Future[None]
        self._group: asyncio.TaskGroup
        self._alarm: Alarm

    async def run(self, first: ClientConnection | None = None) -> None:
        """`first` is the first connection of the pool. The caller closes it, too: this may never start."""
        if first is not None:
            self._idle.append(first)
            self._num_connections += 1
        self._finished = asyncio.get_running_loop().create_future()
        self._due = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as self._group:
                with Alarm(self._send_due) as self._alarm:
                    if self._plan_next():
                        self._alarm.set(self._due)
                    await self._finished
        finally:
            self._close_all()

    # --- arrivals -----------------------------------------------------------------------------------------

    def _plan_next(self) -> bool:
        """Move on to the next arrival. Returns whether there is one."""
        self._due += self._random.expovariate(self._rate_per_s)
        if self._stream.window.may_send(self._due):
            return True
        self._end_arrivals()
        return False

    def _send_due(self) -> None:
        """Send all requests that are due, and set the alarm anew."""
        now = time.perf_counter()
        if now > self._stream.window.closes_at + _MAX_LATE_S:
            self._give_up_rest()
            return
        for _ in range(_MAX_BURST):
            if self._due > now:
                break
            self._send(self._due, now)
            if not self._plan_next():
                return
        self._alarm.set(self._due)

    def _give_up_rest(self) -> None:
        """The rate is too high for this process. The number of arrivals that are left is known on average only."""
        window = self._stream.window
        num_left = 1 + round((window.closes_at - max(self._due, window.opens_at)) * self._rate_per_s)
        self._stream.tally.add_errors(NOT_SENT, "the load generator itself is too slow for this rate", num_left)
        self._end_arrivals()

    def _end_arrivals(self) -> None:
        self._has_sent_all = True
        self._alarm.disarm()
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._has_sent_all and not self.waiting and not self._finished.done():
            self._finished.set_result(None)

    # --- requests -----------------------------------------------------------------------------------------

    def _send(self, arrived_at: float, now: float) -> None:
        if now - arrived_at > LATE_S:
            self._stream.count_late(arrived_at, now - arrived_at)
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                self._exchange(connection, arrived_at)
                return
            self._num_connections -= 1
        if self._num_connections < self._max_connections:
            self._num_connections += 1
            key = object()  # it waits from now on, not from the start of its task: this may be the last arrival
            self.waiting[key] = arrived_at
            self._group.create_task(self._connect_and_exchange(key, arrived_at))
        else:
            self._stream.count_error(arrived_at, NO_FREE_CONNECTION, f"all {self._max_connections} were in use")

    async def _connect_and_exchange(self, key: object, arrived_at: float) -> None:
        """Latency includes the connecting: a caller would wait for it, too."""
        try:
            self._exchange(await self._stream.contact.connect(), arrived_at)
        except OSError as error:
            self._num_connections -= 1
            self._stream.count(arrived_at, error)
        del self.waiting[key]
        self._finish_if_done()

    def _exchange(self, connection: ClientConnection, arrived_at: float) -> None:
        """Raises ConnectionClosed when `connection` was closed as soon as it was open."""
        connection.send(self._stream.next_request(), self._timeout_s, partial(self._end, connection, arrived_at))
        self.waiting[connection] = arrived_at

    def _end(self, connection: ClientConnection, arrived_at: float, outcome: ExchangeResult) -> None:
        del self.waiting[connection]
        if connection.is_open:
            self._idle.append(connection)
        else:
            self._num_connections -= 1
        self._stream.count(arrived_at, outcome)
        if self._has_sent_all:
            self._finish_if_done()

    def _close_all(self) -> None:
        for connection in (*self._idle, *self.waiting):
            if isinstance(connection, ClientConnection):
                connection.close()
