"""A closed loop of load: N clients, each sending its next request when it has the last one's answer.

Owns its clients' tasks and connections. Decides neither when the run ends nor what is counted. Called by
`vecd.client.bench.run`, for what is measured and for the bulk beside it.

A closed loop cannot show what a stall costs requests that would have come meanwhile: its clients wait, too, and send
less. `vecd.client.bench.open_loop` measures that.
"""

import asyncio
import time

from vecd.client.bench.stream import Stream
from vecd.client.connection import BadResponse, ClientConnection, ExchangeResult

_PAUSE_S = 0.05
"""After a request without an answer, so that a server in trouble is not called in a busy loop."""


class ClosedLoop:
    """`run` once; it ends when the stream's window has closed and all answers are there, or when it is cancelled."""

    def __init__(self, stream: Stream, *, clients: int, timeout_s: float, ramp_s: float) -> None:
        """The clients start one by one over `ramp_s`.

        If all connected at once, the server process that wakes first would accept most of them (seen: 12 of 16, by one
        of two under gunicorn).
        """
        self.waiting: dict[object, float] = {}
        """When each request was sent that has no answer yet."""
        self._stream = stream
        self._clients = clients
        self._timeout_s = timeout_s
        self._ramp_s = ramp_s

    async def run(self, first: ClientConnection | None = None) -> None:
        """`first` is the first client's connection to begin with. The caller closes it, too: this may never start."""
        async with asyncio.TaskGroup() as group:
            for index in range(self._clients):
                group.create_task(self._client(index, first if index == 0 else None))

    async def _client(self, index: int, connection: ClientConnection | None) -> None:
        """Send, wait, count, and send again. Latency includes a reconnect."""
        stream = self._stream
        await asyncio.sleep(self._ramp_s * index / self._clients)
        try:
            while stream.window.may_send(sent_at := time.perf_counter()):
                self.waiting[index] = sent_at
                try:
                    if connection is None or not connection.is_open:
                        connection = await stream.contact.connect()
                    outcome: ExchangeResult = await connection.exchange(stream.next_request(), self._timeout_s)
                except (OSError, BadResponse) as error:
                    outcome = error
                is_answer = stream.count(sent_at, outcome)
                del self.waiting[index]
                if not is_answer:
                    await asyncio.sleep(_PAUSE_S)
        finally:
            if connection is not None:
                connection.close()
