"""One run of a load: from the first connection to the figures.

Owns the run's streams and its end. A run ends when the window has closed and the answers are there, when they do not
come, when the server is gone, or when `stop` is called. Prints nothing and reads no argv. Called by
`vecd.client.bench.command`.
"""

import asyncio
import time
from collections.abc import Callable

from vecd.client.bench import report
from vecd.client.bench.load import Load, Unreachable
from vecd.client.bench.loops import send_stream
from vecd.client.bench.result import RunResult
from vecd.client.bench.stream import Contact, Stream
from vecd.client.connection import ClientConnection, TlsMismatch, check_not_tls

_TICK_S = 0.1
"""How often a run checks whether it should end early, and reports its progress."""
_SILENCE_S = 1.0
"""Without any response for this long from the beginning, the server may speak TLS and the target not."""
_DRAIN_S = 10.0
"""How long a timed run waits for answers after its last request, so that the next run begins with an idle server."""


class LoadRun:
    """`run` once; `stop` may end it early, from the same event loop."""

    def __init__(self, load: Load, on_progress: Callable[[str], None] | None = None) -> None:
        self._load = load
        self._on_progress = on_progress
        self._stop_requested = asyncio.Event()
        self._ended_early: str | None = None
        self._contact = Contact(load)

    async def run(self) -> RunResult:
        """Send until the window closes, or `stop`. Raises Unreachable when no connection can be made."""
        stopping = asyncio.create_task(self._stop_requested.wait())
        try:
            first = await self._connect_first(stopping)
            return await self._send(first, stopping)
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

    async def _send(self, first: ClientConnection | None, stopping: "asyncio.Task[bool]") -> RunResult:
        started_at = self._contact.answered_at = time.perf_counter()
        measured = Stream(self._load, self._contact, started_at)
        bulk = None if self._load.bulk is None else Stream(self._load.bulk, self._contact, started_at)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {group.create_task(send_stream(measured, first)): measured}
                if bulk is not None:
                    tasks[group.create_task(send_stream(bulk))] = bulk
                checking = asyncio.create_task(self._stop_if_tls(started_at))
                await self._watch(tasks, stopping)
                checking.cancel()
        finally:
            if first is not None:
                first.close()
        if self._contact.has_cut_off and self._contact.answered_at == started_at:
            try:
                await check_not_tls(self._load.target)
            except TlsMismatch as error:
                raise Unreachable(f"{self._load.target}: {error}") from error
        measured.result.bulk = None if bulk is None else bulk.result
        return measured.result

    async def _stop_if_tls(self, started_at: float) -> None:
        """End a run that cannot have a response, as the server speaks TLS and the target is plain HTTP."""
        await asyncio.sleep(_SILENCE_S)
        if self._contact.has_cut_off and self._contact.answered_at == started_at:
            try:
                await check_not_tls(self._load.target)
            except TlsMismatch as error:
                self.stop(str(error))

    async def _watch(self, tasks: "dict[asyncio.Task[None], Stream]", stopping: "asyncio.Task[bool]") -> None:
        """Wait until all loops are done, or end them. Side effects: sets what a result has when the run is over."""
        measuring, measured = next(iter(tasks.items()))
        began, ended = _clocks(), None
        while (running := [task for task in tasks if not task.done()]) and not stopping.done():
            await asyncio.wait([*running, stopping], timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
            now = time.perf_counter()
            if now < measured.window.opens_at:
                began = _clocks()
            if ended is None and (measuring.done() or now >= measured.window.closes_at):
                ended = _clocks()
                for stream in tasks.values():
                    stream.window.closes_at = min(stream.window.closes_at, now)
            for task in running:
                self._end_if_hopeless(task, tasks[task], now)
            if self._on_progress is not None:
                num_waiting = len(measured.waiting)
                self._on_progress(report.describe_progress(measured.window, measured.result, num_waiting, now))
        for task in tasks:
            task.cancel()
        ended = ended or _clocks()
        wall_s, cpu_s = (end - begin for begin, end in zip(began, ended, strict=True))
        for stream in tasks.values():
            stream.result.elapsed_s = stream.window.elapsed_s(ended[0])
            stream.result.cpu_share = cpu_s / wall_s if wall_s > 0 else 0.0
            stream.result.ended_early = self._ended_early

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


def _clocks() -> tuple[float, float]:
    """Wall time, and the CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()
