"""A closed loop of load: N clients, each sending its next request when it has the last one's answer.

Owns one run: its connections, its tasks and its end, which always comes. Prints nothing and reads no argv.
Called by `client.bench` and `benchmarks.compare`.

A closed loop cannot show what a stall costs those who would have come meanwhile: its clients wait too, and
ask for less. Its latencies are those of N patient callers, not of the world.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from client.answers import read_answer
from client.connection import Answer, BadAnswer, Connection, Target, connect, name_failure
from client.tally import Result, Tally, summarize
from client.window import CountedWindow, TimedWindow, Window

_TICK_S = 0.1
"""How often a run looks whether it should end early."""
_CONNECT_TIMEOUT_S = 5.0
_PAUSE_S = 0.05
"""After a request without an answer: a server in trouble must not be asked in a busy loop."""
_GONE_AFTER_S = 3.0
"""So long without one connection or answer, and the server counts as gone."""
_DRAIN_S = 10.0
"""So long after the last request a timed run waits for answers, for the next run to begin with an idle
server."""
_DETAIL_CHARS = 300
"""How much of the first error of a kind is kept."""


class Unreachable(Exception):
    """Raised by `ClosedLoop.run` when not one connection can be made: there is nothing to measure."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent to whom, by how many, for how long. Immutable."""

    target: Target
    requests: Sequence[bytes]
    """Whole HTTP requests, sent in turn by all clients together."""
    texts_per_request: int
    clients: int
    warmup_s: float
    duration_s: float
    """Of the measured window; ignored when `num_requests` is given."""
    num_requests: int | None
    timeout_s: float
    """Of one request, from sending it to having its whole answer."""

    def open_window(self, started_at: float) -> Window:
        if self.num_requests is not None:
            return CountedWindow(started_at, self.warmup_s, self.num_requests)
        return TimedWindow(started_at, self.warmup_s, self.duration_s)


class CpuMeter:
    """This process's CPU seconds per second of wall time, between `start` and the first `stop`."""

    def __init__(self) -> None:
        self._started: tuple[float, float] | None = None
        self._stopped: tuple[float, float] | None = None

    def start(self) -> None:
        self._started = (time.process_time(), time.perf_counter())

    def stop(self) -> None:
        self._stopped = self._stopped or (time.process_time(), time.perf_counter())

    @property
    def share(self) -> float:
        """0.0 when it never started."""
        if self._started is None or self._stopped is None or self._stopped[1] <= self._started[1]:
            return 0.0
        return (self._stopped[0] - self._started[0]) / (self._stopped[1] - self._started[1])


class ClosedLoop:
    """One run. `run` once; `stop` may end it early, from the same event loop."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._requests = itertools.cycle(load.requests)
        self._tally = Tally()
        self._cpu = CpuMeter()
        self._window: Window
        self._answered_at = 0.0
        self._unreachable_since: float | None = None
        self._ended_early: str | None = None
        self._connect_timeout_s = min(load.timeout_s, _CONNECT_TIMEOUT_S)

    async def run(self) -> Result:
        """Send until the window closes, or `stop`. Raises Unreachable when nothing can be connected to."""
        first = await self._connect_first()
        self._start_clock()
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(self._start_client(i, first)) for i in range(self._load.clients)]
            ended_at = await self._watch(clients)
        return summarize(
            self._tally,
            clients=self._load.clients,
            elapsed_s=self._window.elapsed_s(ended_at),
            cpu_share=self._cpu.share,
            ended_early=self._ended_early,
        )

    def stop(self, reason: str) -> None:
        """End the run within a moment, without waiting for answers. What was measured stays."""
        self._ended_early = self._ended_early or reason

    # --- the run's own end --------------------------------------------------------------------------------

    def _start_clock(self) -> None:
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        self._answered_at = now
        self._window = self._load.open_window(now)
        loop.call_later(self._window.opens_at - now, self._cpu.start)
        if self._window.closes_at < math.inf:
            loop.call_later(self._window.closes_at - now, self._cpu.stop)

    async def _watch(self, clients: list[asyncio.Task[None]]) -> float:
        """Wait until all clients are done, or end them. Returns when that was."""
        pending = set(clients)
        while pending and self._ended_early is None:
            _, pending = await asyncio.wait(pending, timeout=_TICK_S)
            now = time.perf_counter()
            if pending and now > self._window.closes_at + _DRAIN_S:
                self._tally.add_errors("unanswered", f"nothing for {_DRAIN_S:g} s after the end", len(pending))
                break
            if pending and now < self._window.closes_at:
                self._ended_early = self._ended_early or self._why_give_up(now)
        self._cpu.stop()
        for client in pending:
            client.cancel()
        return time.perf_counter()

    def _why_give_up(self, now: float) -> str | None:
        since = self._unreachable_since
        if since is not None and now - max(since, self._answered_at) > _GONE_AFTER_S:
            return f"no connection to {self._load.target} for {_GONE_AFTER_S:g} s"
        patience_s = self._load.timeout_s + _GONE_AFTER_S
        if now - self._answered_at > patience_s:
            return f"{self._load.target} answered nothing for {patience_s:g} s"
        return None

    # --- the clients --------------------------------------------------------------------------------------

    async def _connect_first(self) -> Connection:
        try:
            return await connect(self._load.target, self._connect_timeout_s)
        except OSError as error:
            raise Unreachable(f"cannot connect to {self._load.target}: {str(error) or 'timeout'}") from error

    async def _start_client(self, index: int, first: Connection) -> None:
        """Clients come one by one over the first half of the warm-up.

        All at once, whichever of a server's processes wakes first accepts the most of them (seen: 12 of 16, by one
        of two under gunicorn), and that is not how callers come.
        """
        await asyncio.sleep(self._load.warmup_s / 2 * index / self._load.clients)
        await self._client(first if index == 0 else None)

    async def _client(self, connection: Connection | None) -> None:
        """Ask, wait, count, again. Latency runs from wanting to send, so a reconnect is part of it."""
        try:
            while self._window.may_send(sent_at := time.perf_counter()):
                try:
                    if connection is None or not connection.is_open:
                        connection = await self._connect()
                    answer = await connection.exchange(next(self._requests), self._load.timeout_s)
                    self._count_answer(sent_at, answer)
                except (OSError, BadAnswer) as error:
                    self._count_error(sent_at, name_failure(error), str(error))
                    await asyncio.sleep(_PAUSE_S)
        finally:
            if connection is not None:
                connection.close()

    async def _connect(self) -> Connection:
        try:
            connection = await connect(self._load.target, self._connect_timeout_s)
        except OSError:
            self._unreachable_since = self._unreachable_since or time.perf_counter()
            raise
        self._unreachable_since = None
        return connection

    def _count_answer(self, sent_at: float, answer: Answer) -> None:
        """Raises BadAnswer when it is not what was asked for."""
        now = self._answered_at = time.perf_counter()
        if answer.status != 200:
            self._count_error(sent_at, f"HTTP {answer.status}", answer.body[:_DETAIL_CHARS].decode(errors="replace"))
        elif self._window.measures(sent_at, now):
            receipt = read_answer(answer, self._load.texts_per_request)
            self._tally.add_success((now - sent_at) * 1000, receipt)

    def _count_error(self, sent_at: float, kind: str, detail: str) -> None:
        if self._window.measures_failure(sent_at, time.perf_counter()):
            self._tally.add_errors(kind, detail)
