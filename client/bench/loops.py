"""Two ways to send a stream of requests: a closed loop and an open one.

Owns when each request is sent, and by which client. Decides neither when the run ends nor what is counted. Called by
`vecd.client.bench.run`, for what is measured and for the bulk beside it.

A closed loop cannot show what a stall costs requests that would have come meanwhile: its clients wait, too, and send
less. In an open loop, requests arrive at random moments, whatever the server does: a Poisson process, as the arrivals
of many independent callers are. Latency runs from the planned arrival, and not from when the request was sent. So it
includes what a stall of the server, or of this process, costs the requests that arrive meanwhile (no coordinated
omission).
"""

import asyncio
import random
import time
from contextlib import closing

from vecd.client.bench.alarm import Alarm
from vecd.client.bench.result import LATE_S
from vecd.client.bench.stream import Client, Stream
from vecd.client.connection import ClientConnection

_PAUSE_S = 0.05
"""After a request without an answer, so that a server in trouble is not called in a busy loop."""
_MAX_LATE_S = 1.0
"""Arrivals that are not sent by this time after the window closed are given up."""
_MAX_BURST = 64
"""Requests that a generator which is behind sends in a row before it reads answers again."""

NO_FREE_CONNECTION = "no free connection"
NOT_SENT = "not sent in time"


async def send_stream(stream: Stream, first: ClientConnection | None = None) -> None:
    """Send the requests of a stream as its load says: in a closed loop or an open one.

    Ends when the stream's window has closed and all answers are there, or when it is cancelled. `first` is the first
    client's connection to begin with. The caller closes it, too: this may never start.
    """
    if stream.load.rate_per_s is not None:
        await _OpenLoop(stream, stream.load.rate_per_s, first).run()
        return
    async with asyncio.TaskGroup() as group:
        for index in range(stream.load.clients):
            group.create_task(_send_in_turn(stream, index, None if index else first))


async def _send_in_turn(stream: Stream, index: int, connection: ClientConnection | None) -> None:
    """One client of a closed loop, which sends its next request when it has the last one's answer."""
    # The clients start one by one in the first half of the warm-up. If all connected at once, the server process that
    # wakes first would accept most of them (seen: 12 of 16, by one of two under gunicorn).
    await asyncio.sleep(stream.load.warmup_s / 2 * index / stream.load.clients)
    with closing(Client(stream, connection)) as client:
        while stream.window.may_send(sent_at := time.perf_counter()):
            if not await client.request(sent_at):
                await asyncio.sleep(_PAUSE_S)


class _OpenLoop:
    """Requests at random moments, by the client used last of those that are free. So the connections of a burst may
    fall idle, as in the pools of HTTP libraries."""

    def __init__(self, stream: Stream, rate_per_s: float, first: ClientConnection | None) -> None:
        self._stream = stream
        self._rate_per_s = rate_per_s
        self._random = random.Random(stream.load.shape.seed)
        self._max_connections = stream.load.max_connections
        self._idle = [Client(stream, first)]
        self._clients = set(self._idle)
        self._due = stream.window.started_at  # and not the present: a task that starts late drops no arrival
        """When the next request arrives."""
        self._has_sent_all = asyncio.Event()
        self._group: asyncio.TaskGroup
        self._alarm: Alarm

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                with Alarm(self._send_due) as self._alarm:
                    if self._plan_next():
                        self._alarm.set(self._due)
                        await self._has_sent_all.wait()
        finally:
            for client in self._clients:
                client.close()

    def _plan_next(self) -> bool:
        """Move on to the next arrival. Returns whether there is one."""
        self._due += self._random.expovariate(self._rate_per_s)
        return self._stream.window.may_send(self._due)

    def _send_due(self) -> None:
        """Send all requests that are due, and set the alarm anew."""
        now = time.perf_counter()
        is_last = now > self._stream.window.closes_at + _MAX_LATE_S
        if is_last:
            self._give_up_rest()
        for _ in range(_MAX_BURST):
            if is_last or self._due > now:
                break
            self._send(self._due, now)
            is_last = not self._plan_next()
        self._alarm.set(None if is_last else self._due)
        if is_last:
            self._has_sent_all.set()

    def _give_up_rest(self) -> None:
        """The rate is too high for this process. The number of arrivals that are left is known on average only."""
        window = self._stream.window
        num_left = 1 + round((window.closes_at - max(self._due, window.opens_at)) * self._rate_per_s)
        self._stream.result.add_errors(NOT_SENT, "the load generator itself is too slow for this rate", num_left)

    def _send(self, arrived_at: float, now: float) -> None:
        if now - arrived_at > LATE_S and self._stream.window.measures_failure(arrived_at, arrived_at):
            self._stream.result.add_late(now - arrived_at)
        if (client := self._take_client()) is not None:
            self._group.create_task(self._request(client, arrived_at))
        else:
            self._stream.count_error(arrived_at, NO_FREE_CONNECTION, f"all {self._max_connections} were in use")

    def _take_client(self) -> Client | None:
        """None when all are busy."""
        while self._idle:
            if (client := self._idle.pop()).is_connected:
                return client
            self._clients.discard(client)
        if len(self._clients) == self._max_connections:
            return None
        self._clients.add(client := Client(self._stream))
        return client

    async def _request(self, client: Client, arrived_at: float) -> None:
        await client.request(arrived_at)
        self._idle.append(client)
