"""One run of a load: from the first connection to the figures.

Owns the run's loops and its end. A run ends when the window has closed and the answers are there, when they do not
come, when the server is gone, or when `stop` is called. Prints nothing and reads no argv. Called by
`vecd.client.bench.command`.
"""

import asyncio
import math
import time
from collections.abc import Callable

from vecd.client.bench import report
from vecd.client.bench.load import Load, Unreachable
from vecd.client.bench.loops import ClosedLoop, LoadLoop, OpenLoop
from vecd.client.bench.result import RunResult
from vecd.client.bench.stream import Contact, Stream
from vecd.client.bench.window import Window
from vecd.client.connection import ClientConnection

_TICK_S = 0.1
"""How often a run checks whether it should end early, and reports its progress."""
_DRAIN_S = 10.0
"""How long a timed run waits for answers after its last request, so that the next run begins with an idle server."""
_QUIET_ARRIVALS = 20
"""Without a server's fault, no arrival for as long as 20 take on average has a chance of e⁻²⁰."""


class LoadRun:
    """`run` once; `stop` may end it early, from the same event loop."""

    def __init__(self, load: Load, on_progress: Callable[[str], None] | None = None) -> None:
        self._load = load
        self._on_progress = on_progress
        self._cpu_marks: list[tuple[float, float]] = []
        """CPU and wall time in seconds, at the beginning and at the end of what is measured."""
        self._stop_requested = asyncio.Event()
        self._ended_early: str | None = None
        quiet_s = _QUIET_ARRIVALS / load.rate_per_s if load.rate_per_s else 0.0
        self._contact = Contact(load.target, load.timeout_s, quiet_s)

    async def run(self) -> RunResult:
        """Send until the window closes, or `stop`. Raises Unreachable when no connection can be made."""
        stopping = asyncio.create_task(self._stop_requested.wait())
        try:
            first = await self._connect_first(stopping)
            return await self._run_loops(first, stopping)
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

    async def _run_loops(self, first: ClientConnection | None, stopping: "asyncio.Task[bool]") -> RunResult:
        started_at = self._contact.answered_at = time.perf_counter()
        measured, bulk = self._measured_loop(started_at), self._bulk_loop(started_at)
        timers = self._start_clock(measured.stream.window)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {group.create_task(measured.run(first)): measured.stream}
                if bulk is not None:
                    tasks[group.create_task(bulk.run())] = bulk.stream
                ended_at = await self._watch(tasks, stopping)
        finally:
            for timer in timers:
                timer.cancel()
            if first is not None:
                first.close()
        return self._complete(list(tasks.values()), ended_at)

    # --- start --------------------------------------------------------------------------------------------

    def _measured_loop(self, started_at: float) -> LoadLoop:
        load = self._load
        window = Window(
            started_at,
            load.warmup_s,
            load.duration_s,
            num_requests=load.num_requests,
            is_by_arrival=load.rate_per_s is not None,
        )
        result = RunResult(
            clients=load.clients,
            rate_per_s=load.rate_per_s,
            texts_per_request=load.texts_per_request,
            goodput_ms=load.goodput_ms,
        )
        stream = Stream(load.requests, window, self._contact, result, load.encoding_format)
        if load.rate_per_s is None:
            return ClosedLoop(stream, clients=load.clients, ramp_s=load.warmup_s / 2)
        return OpenLoop(stream, rate_per_s=load.rate_per_s, max_connections=load.max_connections, seed=load.seed)

    def _bulk_loop(self, started_at: float) -> LoadLoop | None:
        """Beside a run by number, its window closes when the run ends."""
        load, bulk = self._load, self._load.bulk
        if bulk is None:
            return None
        window = Window(started_at, load.warmup_s, load.duration_s if load.num_requests is None else math.inf)
        result = RunResult(clients=bulk.clients, texts_per_request=bulk.texts_per_request)
        stream = Stream(bulk.requests, window, self._contact, result, bulk.encoding_format)
        return ClosedLoop(stream, clients=bulk.clients, ramp_s=load.warmup_s / 2)

    def _start_clock(self, window: Window) -> list[asyncio.TimerHandle]:
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        moments = [moment for moment in (window.opens_at, window.closes_at) if moment < math.inf]
        return [loop.call_later(moment - now, self._mark_cpu) for moment in moments]

    def _mark_cpu(self) -> None:
        self._cpu_marks.append((time.process_time(), time.perf_counter()))

    # --- end ----------------------------------------------------------------------------------------------

    async def _watch(self, tasks: "dict[asyncio.Task[None], Stream]", stopping: "asyncio.Task[bool]") -> float:
        """Wait until all loops are done, or end them. Returns when the measured one, which is the first, was done."""
        measuring, *_ = tasks
        ended_at: float | None = None
        while (running := [task for task in tasks if not task.done()]) and not stopping.done():
            await asyncio.wait([*running, stopping], timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
            now = time.perf_counter()
            if ended_at is None and measuring.done():
                ended_at = now
                self._mark_cpu()
                for stream in tasks.values():
                    stream.window.closes_at = min(stream.window.closes_at, now)
            for task in running:
                self._end_if_hopeless(task, tasks[task], now)
            if self._on_progress is not None:
                stream = tasks[measuring]
                self._on_progress(report.describe_progress(stream.window, stream.result, len(stream.waiting), now))
        for task in tasks:
            task.cancel()
        self._mark_cpu()
        return ended_at or time.perf_counter()

    def _end_if_hopeless(self, task: "asyncio.Task[None]", stream: Stream, now: float) -> None:
        """End a loop when its answers do not come, and the run when the server is gone."""
        if task.done():
            return
        if now > stream.window.closes_at + _DRAIN_S:
            for sent_at in stream.waiting.values():
                stream.count_error(sent_at, "unanswered", f"nothing for {_DRAIN_S:g} s after the end")
            task.cancel()
        elif now < stream.window.closes_at and (reason := self._contact.why_give_up(now)) is not None:
            self.stop(reason)

    def _complete(self, streams: list[Stream], ended_at: float) -> RunResult:
        """The result of the first stream, with that of the second as its bulk."""
        cpu_share = 0.0
        if len(self._cpu_marks) > 1:
            (cpu_began, began), (cpu_ended, ended), *_ = self._cpu_marks
            cpu_share = (cpu_ended - cpu_began) / (ended - began) if ended > began else 0.0
        for stream in streams:
            stream.result.elapsed_s = stream.window.elapsed_s(ended_at)
            stream.result.cpu_share = cpu_share
            stream.result.ended_early = self._ended_early
        result, *beside = [stream.result for stream in streams]
        result.bulk = beside[0] if beside else None
        return result
