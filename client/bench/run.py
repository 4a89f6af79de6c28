"""One run of a load: from the first connection to the figures.

Owns the run's loops and its end. A run ends when the window has closed and the answers are there, when they do not
come, when the server is gone, or when `stop` is called. Prints nothing and reads no argv. Called by
`vecd.client.bench.command`.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vecd.client.bench.closed_loop import ClosedLoop
from vecd.client.bench.load import Bulk, Load, Unreachable
from vecd.client.bench.open_loop import OpenLoop
from vecd.client.bench.stream import Contact, Stream
from vecd.client.bench.tally import RunResult
from vecd.client.bench.window import TimedWindow
from vecd.client.connection import ClientConnection

_TICK_S = 0.1
"""How often a run checks whether it should end early, and reports its progress."""
_DRAIN_S = 10.0
"""How long a timed run waits for answers after its last request, so that the next run begins with an idle server."""
_QUIET_ARRIVALS = 20
"""Without a server's fault, no arrival for as long as 20 take on average has a chance of e⁻²⁰."""


class CpuMeter:
    """This process's CPU seconds per second of wall time, between `start` and the first `stop` after it."""

    def __init__(self) -> None:
        self.share = 0.0
        """0.0 until it has been stopped."""
        self._started: tuple[float, float] | None = None

    def start(self) -> None:
        self._started = (time.process_time(), time.perf_counter())

    def stop(self) -> None:
        if self._started is not None:
            cpu_s, wall_s = time.process_time() - self._started[0], time.perf_counter() - self._started[1]
            self.share = cpu_s / wall_s if wall_s > 0 else 0.0
            self._started = None


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The state of a run under way. Figures are of the measured window so far."""

    is_warming_up: bool
    elapsed_s: float
    left_s: float
    """Until no more is sent; infinite in a run by number, 0 while the last answers are awaited."""
    num_requests: int
    num_errors: int
    num_waiting: int
    """Requests without an answer yet."""

    def describe(self) -> str:
        if self.is_warming_up:
            return "warming up"
        rate = self.num_requests / self.elapsed_s if self.elapsed_s > 0 else 0.0
        if self.left_s == 0:
            rest = f"waiting for {self.num_waiting} answers"
        elif self.left_s < math.inf:
            rest = f"{math.ceil(self.left_s)} s left"
        else:
            rest = f"{self.num_requests} answered"
        return f"{rate:,.1f} req/s, {self.num_errors} errors, {rest}"


@dataclass(slots=True)
class _Leg:
    """One loop of a run, with the stream it sends and its task."""

    stream: Stream
    loop: ClosedLoop | OpenLoop
    task: "asyncio.Task[None]" = field(init=False)

    def start(self, group: asyncio.TaskGroup, first: ClientConnection | None = None) -> None:
        self.task = group.create_task(self.loop.run(first))


class LoadRun:
    """`run` once; `stop` may end it early, from the same event loop."""

    def __init__(self, load: Load, on_progress: Callable[[RunProgress], None] | None = None) -> None:
        self._load = load
        self._on_progress = on_progress
        self._cpu = CpuMeter()
        self._stop_requested = asyncio.Event()
        self._ended_early: str | None = None
        quiet_s = _QUIET_ARRIVALS / load.rate_per_s if load.rate_per_s else 0.0
        self._contact = Contact(load.target, load.timeout_s, quiet_s)

    async def run(self) -> RunResult:
        """Send until the window closes, or `stop`. Raises Unreachable when no connection can be made."""
        stopping = asyncio.create_task(self._stop_requested.wait())
        try:
            first = await self._connect_first(stopping)
            return await self._run_legs(first, stopping)
        finally:
            stopping.cancel()

    def stop(self, reason: str) -> None:
        """End the run at once, without waiting for answers. The figures so far stay."""
        self._ended_early = self._ended_early or reason
        self._stop_requested.set()

    async def _connect_first(self, stopping: "asyncio.Task[bool]") -> ClientConnection | None:
        """None when the run is stopped meanwhile."""
        connecting = asyncio.create_task(self._contact.connect())
        await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            connecting.cancel()
            return None
        try:
            return connecting.result()
        except OSError as error:
            raise Unreachable(f"cannot connect to {self._load.target}: {str(error) or 'timeout'}") from error

    async def _run_legs(self, first: ClientConnection | None, stopping: "asyncio.Task[bool]") -> RunResult:
        started_at = self._contact.answered_at = time.perf_counter()
        measured, bulk = self._measured_leg(started_at), self._bulk_leg(started_at)
        try:
            async with asyncio.TaskGroup() as group:
                measured.start(group, first)
                if bulk is not None:
                    bulk.start(group)
                timers = self._start_clock(measured.stream.window)
                ended_at = await self._watch(measured, bulk, stopping)
                for timer in timers:
                    timer.cancel()
        finally:
            if first is not None:
                first.close()
        return self._summarize(measured, bulk, ended_at)

    # --- start --------------------------------------------------------------------------------------------

    def _measured_leg(self, started_at: float) -> _Leg:
        load = self._load
        stream = Stream(
            load.requests,
            load.texts_per_request,
            load.open_window(started_at),
            self._contact,
            encoding_format=load.encoding_format,
            goodput_ms=load.goodput_ms,
        )
        if load.rate_per_s is None:
            return self._closed_leg(stream, load.clients)
        loop = OpenLoop(
            stream,
            rate_per_s=load.rate_per_s,
            max_connections=load.max_connections,
            timeout_s=load.timeout_s,
            seed=load.seed,
        )
        return _Leg(stream, loop)

    def _bulk_leg(self, started_at: float) -> _Leg | None:
        """Beside a run by number, its window closes when the run ends."""
        load, bulk = self._load, self._load.bulk
        if bulk is None:
            return None
        window = TimedWindow(started_at, load.warmup_s, load.duration_s if load.num_requests is None else math.inf)
        stream = Stream(
            bulk.requests, bulk.texts_per_request, window, self._contact, encoding_format=bulk.encoding_format
        )
        return self._closed_leg(stream, bulk.clients)

    def _closed_leg(self, stream: Stream, clients: int) -> _Leg:
        load = self._load
        return _Leg(stream, ClosedLoop(stream, clients=clients, timeout_s=load.timeout_s, ramp_s=load.warmup_s / 2))

    def _start_clock(self, window: TimedWindow) -> list[asyncio.TimerHandle]:
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        timers = [loop.call_later(window.opens_at - now, self._cpu.start)]
        if window.closes_at < math.inf:
            timers.append(loop.call_later(window.closes_at - now, self._cpu.stop))
        return timers

    # --- end ----------------------------------------------------------------------------------------------

    async def _watch(self, measured: _Leg, bulk: _Leg | None, stopping: "asyncio.Task[bool]") -> float:
        """Wait until all legs are done, or end them. Returns when the measured one was done."""
        ended_at: float | None = None
        legs = [measured] if bulk is None else [measured, bulk]
        while (running := [leg for leg in legs if not leg.task.done()]) and not stopping.done():
            tasks = [leg.task for leg in running]
            await asyncio.wait([*tasks, stopping], timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
            now = time.perf_counter()
            if ended_at is None and measured.task.done():
                ended_at = now
                self._cpu.stop()
                if bulk is not None:
                    bulk.stream.window.closes_at = min(bulk.stream.window.closes_at, now)
            for leg in running:
                self._end_if_hopeless(leg, now)
            self._report_progress(measured, now)
        self._cpu.stop()
        for leg in legs:
            leg.task.cancel()
        return ended_at or time.perf_counter()

    def _end_if_hopeless(self, leg: _Leg, now: float) -> None:
        """End `leg` when its answers do not come, and the run when the server is gone."""
        if leg.task.done():
            return
        closes_at = leg.stream.window.closes_at
        if now > closes_at + _DRAIN_S:
            for sent_at in leg.loop.waiting.values():
                leg.stream.count_error(sent_at, "unanswered", f"nothing for {_DRAIN_S:g} s after the end")
            leg.task.cancel()
        elif now < closes_at and (reason := self._contact.why_give_up(now)) is not None:
            self.stop(reason)

    def _report_progress(self, measured: _Leg, now: float) -> None:
        if self._on_progress is None:
            return
        window, tally = measured.stream.window, measured.stream.tally
        self._on_progress(
            RunProgress(
                is_warming_up=now < window.opens_at,
                elapsed_s=window.elapsed_s(now),
                left_s=max(0.0, window.closes_at - now),
                num_requests=tally.num_requests,
                num_errors=tally.errors.total(),
                num_waiting=len(measured.loop.waiting),
            )
        )

    def _summarize(self, measured: _Leg, bulk: _Leg | None, ended_at: float) -> RunResult:
        def result_of(leg: _Leg, load: Load | Bulk, **more: Any) -> RunResult:
            return RunResult.of(
                leg.stream.tally,
                clients=load.clients,
                texts_per_request=load.texts_per_request,
                elapsed_s=leg.stream.window.elapsed_s(ended_at),
                cpu_share=self._cpu.share,
                ended_early=self._ended_early,
                **more,
            )

        load = self._load
        beside = None if bulk is None or load.bulk is None else result_of(bulk, load.bulk)
        return result_of(measured, load, rate_per_s=load.rate_per_s, bulk=beside)
