"""The rate of a server whose requests take seconds, measured in short turns beside other servers.

Owns the clients of one server, and that it uses nothing between its turns. Called by `benchmarks.rerank`.

A turn must not begin with an empty server, nor end with one: filling and emptying it takes longer than the turn. So a
peer is stopped in the middle of its work (SIGSTOP), and goes on with it in its next turn, with the same connections:
its turns make one long run.
vecd, whose supervisor would take stopped processes for stuck ones, drops the work of clients that leave: they do, and
fill it anew.
"""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import uvloop

from benchmarks.cpu import await_asleep
from benchmarks.flood import Connection, Crowd, connect
from benchmarks.pairs import RerankBody, staggered
from benchmarks.servers import Server, ServerFailure
from vecd.base.target import parse_target

NUM_CLIENTS = 16
_CONNECT_EVERY_S = 0.05
"""If all came at once, the process that wakes first would accept most of them."""
_POLL_S = 0.02
_TIMEOUT_S = 180.0

Found = TypeVar("Found")


class SteadyLoad:
    """Clients in a closed loop, who are only there during turns."""

    def __init__(self, server: Server, bodies: Sequence[RerankBody], *, stops: bool) -> None:
        """`bodies`: those of all its requests, of which the first are sent once. `stops`: whether the server is stopped
        between its turns, from the first one's end to `close`."""
        self._session, self._target = server.session, parse_target(server.url)
        self._stops = stops
        first, rest = staggered(bodies[:NUM_CLIENTS]), bodies[NUM_CLIENTS:]
        self._num_documents = {body.render(self._target): len(body.documents) for body in (*first, *rest)}
        requests = list(self._num_documents)
        self._first, self._rest = requests[:NUM_CLIENTS], itertools.cycle(requests[NUM_CLIENTS:])
        self._answers: list[tuple[float, int]] = []
        """When each response came, by the time in which the server was not stopped, and with how many documents."""
        self._stopped_s = 0.0
        self._stopped_at: float | None = None
        self._loop = uvloop.new_event_loop()
        self._crowd: Crowd | None = None
        self._connections: list[Connection] = []

    def turn(self, duration_s: float) -> float:
        """Documents per second, over `duration_s` at least. Raises ServerFailure for any error."""
        try:
            return self._loop.run_until_complete(self._turn(duration_s))
        finally:
            if self._stops:
                os.killpg(self._session, signal.SIGSTOP)
                self._stopped_at = time.perf_counter()
            else:
                self._leave()

    def close(self) -> None:
        """The clients leave. Returns once the server has ended the work that it goes on with all the same."""
        if self._stops:
            os.killpg(self._session, signal.SIGCONT)
        self._leave()
        self._loop.close()
        if self._stops:
            await_asleep([self._session], _TIMEOUT_S)

    async def _turn(self, duration_s: float) -> float:
        if self._crowd is None:
            crowd = await self._come()
            await self._await(crowd, lambda: len(self._answers) >= NUM_CLIENTS or None)
            self._answers.clear()
        else:
            crowd = self._crowd
            os.killpg(self._session, signal.SIGCONT)
            if self._stopped_at is not None:
                self._stopped_s += time.perf_counter() - self._stopped_at
        rate, last = await self._await(crowd, lambda: rate_of(self._answers, duration_s))
        del self._answers[:last]  # the next turn begins where this one has ended
        return rate

    async def _come(self) -> Crowd:
        """Connect, each with its first request at once."""
        crowd = self._crowd = Crowd(itertools.chain(self._first, self._rest), self._count)
        for _ in range(NUM_CLIENTS):
            connection = await connect(crowd, self._target)
            self._connections.append(connection)
            connection.send_next()
            await crowd.sleep(_CONNECT_EVERY_S)
        return crowd

    def _leave(self) -> None:
        async def leave() -> None:
            for connection in self._connections:
                connection.close()
            await asyncio.sleep(0)

        self._loop.run_until_complete(leave())
        self._connections.clear()
        self._answers.clear()
        self._crowd = None

    def _count(self, request: bytes) -> None:
        self._answers.append((time.perf_counter() - self._stopped_s, self._num_documents[request]))

    async def _await(self, crowd: Crowd, look: Callable[[], Found | None]) -> Found:
        """What `look` returns once it is not None. Raises ServerFailure when that takes too long."""
        deadline_s = time.perf_counter() + _TIMEOUT_S
        while (found := look()) is None:
            if time.perf_counter() > deadline_s:
                raise ServerFailure(f"{len(self._answers)} responses in {_TIMEOUT_S:g} s")
            await crowd.sleep(_POLL_S)
        return found


def rate_of(answers: Sequence[tuple[float, int]], duration_s: float) -> tuple[float, int] | None:
    """Documents per second from the first answer, which is not counted, to the first one that came `duration_s` later
    or more, and the index of that; None while there is none. Answers are (when, documents), in their order."""
    num_documents = 0
    for index, (when_s, num) in enumerate(answers):
        elapsed_s = when_s - answers[0][0]
        num_documents += num if index else 0
        if elapsed_s >= duration_s:
            return num_documents / elapsed_s, index
    return None
