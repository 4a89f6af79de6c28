"""One run of a load: from the first connection to the figures.

Owns the run's streams, when each request is sent, and the run's end. A run ends when the window has closed and the
answers are there, when they do not come, when the server is gone, or when `stop` is called. Prints nothing and reads no
argv.
"""

import asyncio
import ctypes
import itertools
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Self

from vecd.client.bench import report
from vecd.client.bench.load import Load, Unreachable
from vecd.client.bench.report import LATE_S, READERS, RunResult, Window
from vecd.client.http import BadResponse, ServerResponse
from vecd.client.sockets import AsyncConnection, TlsMismatch, connect, find_mismatch, name_failure

# Moments are those of `time.perf_counter`.

_DETAIL_CHARS = 300
_CONNECT_TIMEOUT_S = 5.0
_QUIET_ARRIVALS = 20
"""Without a server's fault, no arrival for as long as 20 take on average has a chance of e⁻²⁰."""


class Stream:
    """The requests of a load, in turn, and their results."""

    def __init__(self, load: Load, run: "LoadRun", started_at: float) -> None:
        self.load = load
        self.task: asyncio.Task[None]
        """That of `send`."""
        self._run = run
        self._requests = itertools.cycle(load.requests)
        self.window = Window(load, started_at)
        self.result = RunResult(load=load)
        self.waiting: dict[object, float] = {}
        """When each request was sent that has no answer yet."""
        self._read = READERS[load.shape.encoding_format]

    async def send(self) -> None:
        """Send the requests as the load says. Ends when the window has closed and all answers are there, or when it is
        cancelled."""
        raise NotImplementedError

    async def request(self, sent_at: float, connection: AsyncConnection | None) -> AsyncConnection | None:
        """Send the next request, which is due at `sent_at`, on `connection` if that is open, and count what becomes of
        it. Latency includes the connecting: a caller would wait for it, too. Returns the connection; None if there was
        no good response, of any status."""
        self.waiting[key := object()] = sent_at
        try:
            if connection is None or not connection.is_open:
                connection = await self._run.connect()
            self._count(sent_at, await connection.exchange(next(self._requests), self.load.timeout_s))
        except (OSError, BadResponse) as error:
            if connection is not None:
                connection.close()
            self.count_error(sent_at, name_failure(error), str(error))
            await self._run.note_failure(error)
            return None
        finally:
            del self.waiting[key]
        return connection

    def _count(self, sent_at: float, response: ServerResponse) -> None:
        """Count the response to the request that should have been sent at `sent_at`. Raises BadResponse when it is
        measured, and does not fit the request."""
        now = self._run.answered_at = time.perf_counter()
        if response.status != 200:
            detail = response.body[:_DETAIL_CHARS].decode(errors="replace")
            self.count_error(sent_at, f"HTTP {response.status}", detail)
            return
        is_measured, is_counted = self.window.measures(sent_at, now), self.window.counts(sent_at, now)
        if is_measured or is_counted:
            num_tokens = self._read(response, self.load.shape.texts_per_request)
            if is_measured:
                self.result.latencies.append(now - sent_at)
            if is_counted:
                self.result.num_requests += 1
                self.result.num_tokens += num_tokens

    def count_error(self, sent_at: float, kind: str, detail: str) -> None:
        if self.window.measures_failure(sent_at, time.perf_counter()):
            self.result.add_errors(kind, detail)


# Event loops count in milliseconds, and a request that is sent half a millisecond late has as much latency that the
# server did not cause. Measured under uvloop, on two cores that other processes kept busy: woken 0.07 ms after the
# moment at the median and 0.2 ms at p90; by `asyncio.sleep` 0.12 and 1.1 ms.

# Source: timerfd_create(2), <bits/timerfd.h>. `os.timerfd_create` is there from Python 3.13 on.
_ABSOLUTE_TIME = 1
_NS_PER_S = 1_000_000_000

_libc = ctypes.CDLL(None, use_errno=True)


class Alarm:
    """A context that calls `on_time` from the event loop at the moment last `set`, repeatedly until it is set anew.

    Raises OSError when the kernel has no timer left.
    """

    def __init__(self, on_time: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        # struct itimerspec: seconds and nanoseconds of the interval, which is none, and of the moment.
        self._moment = (ctypes.c_long * 4)()
        self._loop.add_reader(self._fd, on_time)

    def set(self, moment: float | None) -> None:
        """`moment` is on the clock of `time.perf_counter`, which on Linux is CLOCK_MONOTONIC. A past moment is now.

        With None, `on_time` is not called until the next `set`.
        """
        moment_ns = 0 if moment is None else max(round(moment * _NS_PER_S), 1)
        self._moment[2], self._moment[3] = divmod(moment_ns, _NS_PER_S)
        if _libc.timerfd_settime(self._fd, _ABSOLUTE_TIME, self._moment, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


# Two ways to send a stream of requests.
#
# A closed loop cannot show what a stall costs requests that would have come meanwhile: its clients wait, too. In an
# open loop, requests arrive at random moments whatever the server does, as those of many independent callers: a Poisson
# process. Latency runs from the planned arrival, so it includes what a stall of the server, or of this process, costs
# the requests that arrive meanwhile (no coordinated omission).

_PAUSE_S = 0.05
"""After a request without an answer, so that a server in trouble is not called in a busy loop."""
_MAX_LATE_S = 1.0
"""Arrivals that are not sent by this time after the window closed are given up."""
_MAX_BURST = 64
"""Requests that a generator which is behind sends in a row before it reads answers again."""


class _ClosedLoop(Stream):
    async def send(self) -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(self.load.clients):
                group.create_task(self._send_in_turn(index))

    async def _send_in_turn(self, index: int) -> None:
        # The clients start one by one in the first half of the warm-up. If all connected at once, the server process
        # that wakes first would accept most of them (seen: 12 of 16, by one of two under gunicorn).
        await asyncio.sleep(self.load.warmup_s / 2 * index / self.load.clients)
        connection: AsyncConnection | None = None
        try:
            while self.window.may_send(sent_at := time.perf_counter()):
                if (connection := await self.request(sent_at, connection)) is None:
                    await asyncio.sleep(_PAUSE_S)
        finally:
            if connection is not None:
                connection.close()


class _OpenLoop(Stream):
    """Requests at random moments, on the connection used last of those that are free. So the connections of a burst
    may fall idle, as in the pools of HTTP libraries."""

    def __init__(self, load: Load, run: "LoadRun", started_at: float) -> None:
        super().__init__(load, run, started_at)
        self._rate_per_s = load.rate_per_s or math.inf
        self._random = random.Random(load.shape.seed)
        self._idle: list[AsyncConnection] = []
        self._num_under_way = 0
        self._due = started_at  # and not the present: a task that starts late drops no arrival
        self._has_sent_all = asyncio.Event()
        self._group: asyncio.TaskGroup
        self._alarm: Alarm

    async def send(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                with Alarm(self._send_due) as self._alarm:
                    if self._plan_next():
                        self._alarm.set(self._due)
                        await self._has_sent_all.wait()
        finally:
            for connection in self._idle:
                connection.close()

    def _plan_next(self) -> bool:
        self._due += self._random.expovariate(self._rate_per_s)
        return self.window.may_send(self._due)

    def _send_due(self) -> None:
        now = time.perf_counter()
        is_last = now > self.window.closes_at + _MAX_LATE_S
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
        num_left = 1 + round((self.window.closes_at - max(self._due, self.window.opens_at)) * self._rate_per_s)
        why = "the load generator itself is too slow for this rate"
        self.result.add_errors("not sent in time", why, num_left)

    def _send(self, arrived_at: float, now: float) -> None:
        if now - arrived_at > LATE_S and self.window.measures_failure(arrived_at, arrived_at):
            self.result.delays.append(now - arrived_at)
        while self._idle and not self._idle[-1].is_open:
            self._idle.pop()
        if not self._idle and self._num_under_way == self.load.max_connections:
            in_use = f"all {self._num_under_way} were in use"
            self.count_error(arrived_at, "no free connection", in_use)
            return
        self._num_under_way += 1
        self._group.create_task(self._request(arrived_at, self._idle.pop() if self._idle else None))

    async def _request(self, arrived_at: float, connection: AsyncConnection | None) -> None:
        connection = await self.request(arrived_at, connection)
        self._num_under_way -= 1
        if connection is not None:
            self._idle.append(connection)


_TICK_S = 0.1
"""How often a run checks whether it should end early, and reports its progress."""


class LoadRun:
    """`run` once; `stop` may end it early, from the same event loop. Its streams share what is known of the server."""

    def __init__(self, load: Load, on_progress: Callable[[str], None] | None = None) -> None:
        self.answered_at = 0.0
        """When the last answer came, of any status; at first the start of the run."""
        self._load = load
        self._on_progress = on_progress
        self._ended_early: str | None = None
        self._mismatch: TlsMismatch | None = None
        """Found when the first exchange fails."""
        self._started_at = 0.0
        self._gone_after_s = load.gone_after_s + (_QUIET_ARRIVALS / load.rate_per_s if load.rate_per_s else 0.0)
        self._unreachable_since = math.inf

    def stop(self, reason: str) -> None:
        """End the run without waiting for answers. The figures so far stay."""
        self._ended_early = self._ended_early or reason

    async def run(self) -> RunResult:
        """Send until the window closes, or `stop`. Raises Unreachable when no connection can be made."""
        try:
            (await self.connect()).close()
        except OSError as error:
            raise Unreachable(f"cannot connect to {self._load.target}: {str(error) or 'timeout'}") from error
        self._started_at = self.answered_at = time.perf_counter()
        loads = [self._load] if self._load.bulk is None else [self._load, self._load.bulk]
        streams = [
            (_ClosedLoop if load.rate_per_s is None else _OpenLoop)(load, self, self._started_at) for load in loads
        ]
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                stream.task = group.create_task(stream.send())
            await self._watch(streams)
        if self._mismatch is not None:
            raise Unreachable(f"{self._load.target}: {self._mismatch}") from self._mismatch
        measured, *bulk = (stream.result for stream in streams)
        measured.bulk = bulk[0] if bulk else None
        return measured

    async def connect(self) -> AsyncConnection:
        """Raises OSError, of which TimeoutError is one, when no connection can be made."""
        try:
            connection = await connect(self._load.target, min(self._load.timeout_s, _CONNECT_TIMEOUT_S))
        except OSError:
            self._unreachable_since = min(self._unreachable_since, time.perf_counter())
            raise
        self._unreachable_since = math.inf
        return connection

    async def note_failure(self, error: Exception) -> None:
        has_answered = self.answered_at > self._started_at
        if not has_answered and self._mismatch is None and not isinstance(error, TimeoutError):
            self._mismatch = await find_mismatch(self._load.target)

    async def _watch(self, streams: Sequence[Stream]) -> None:
        """Wait until all loops are done, or end them. Side effects: sets what a result has when the run is over."""
        measured = streams[0]
        began, ended = _clocks(), None
        while (running := [stream for stream in streams if not stream.task.done()]) and self._ended_early is None:
            tasks = [stream.task for stream in running]
            await asyncio.wait(tasks, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
            now = time.perf_counter()
            if now < measured.window.opens_at:
                began = _clocks()
            if ended is None and (measured.task.done() or now >= measured.window.closes_at):
                ended = _clocks()
                for stream in streams:
                    stream.window.closes_at = min(stream.window.closes_at, now)
            for stream in running:
                self._end_if_hopeless(stream, now)
            if self._on_progress is not None:
                num_waiting = len(measured.waiting)
                self._on_progress(report.describe_progress(measured.window, measured.result, num_waiting, now))
        ended = ended or _clocks()
        wall_s, cpu_s = (end - begin for begin, end in zip(began, ended, strict=True))
        for stream in streams:
            stream.task.cancel()
            stream.result.elapsed_s = stream.window.elapsed_s(ended[0])
            stream.result.cpu_share = cpu_s / wall_s if wall_s > 0 else 0.0
            stream.result.ended_early = self._ended_early

    def _end_if_hopeless(self, stream: Stream, now: float) -> None:
        """End a loop when its answers do not come, and the run when the server is gone."""
        if stream.task.done():
            return
        if now > stream.window.closes_at + self._load.drain_s:
            for sent_at in stream.waiting.values():
                stream.count_error(sent_at, "unanswered", f"nothing for {self._load.drain_s:g} s after the end")
            stream.task.cancel()
        elif now < stream.window.closes_at and (reason := self._why_give_up(now)) is not None:
            self.stop(reason)

    def _why_give_up(self, now: float) -> str | None:
        if now - max(self._unreachable_since, self.answered_at) > self._gone_after_s:
            return f"no connection to {self._load.target} for {self._gone_after_s:g} s"
        if now - self.answered_at > (silence_s := self._load.timeout_s + self._gone_after_s):
            return f"{self._load.target} answered nothing for {silence_s:g} s"
        return None if self._mismatch is None else str(self._mismatch)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
