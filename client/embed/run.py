"""One output of `vecd embed`: rows in, vectors out in the same order, and a commit twice a second.

Owns the order and the times of commits. Batches are under way concurrently, and are written in the order of the input,
so that the output is always complete up to some row. Rows count as done after a commit: the rows and the journal are on
the disk.
"""

import asyncio
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from vecd.base.status_line import StatusLine
from vecd.client.embed.files import Commit, OutputFiles
from vecd.client.embed.inputs import InputSource, RowBatch, check_unchanged, read_batches
from vecd.client.embed.options import EmbedError, EmbedOptions, FieldMissing, Interrupted, OtherIdentity, RunEnded
from vecd.client.embed.rows import Position
from vecd.client.embed.service import EmbeddingService
from vecd.client.embed.storage import in_daemon

# --- progress in words ------------------------------------------------------------------------------------------

_WINDOW_S = 30.0
"""Rates are of the last seconds: an earlier restart of the server says nothing about the time left."""
_BAR_WIDTH = 24
AGAIN_S = 10.0
"""From the first line about a server that does not serve to the second."""


class Course:
    """How much of a run is done, and how fast."""

    def __init__(self, total_bytes: int, now_s: float, done: Position, num_tokens: int) -> None:
        """`total_bytes` of the inputs; 0 if it is not known. Rates count from `done` on. Times are on any monotonic
        clock."""
        self._total_bytes = total_bytes
        self._moments = deque[tuple[float, int, int, int]]()
        self.add(now_s, done, num_tokens)

    def add(self, now_s: float, done: Position, num_tokens: int) -> None:
        moments = self._moments
        moments.append((now_s, done.row, num_tokens, done.num_bytes))
        while len(moments) > 2 and moments[1][0] <= now_s - _WINDOW_S:
            moments.popleft()

    def describe(self, now_s: float, num_in_flight: int = 0) -> str:
        """A bar, rows, rates and time left, as far as they are known. `num_in_flight`: rows that are requested."""
        first, last, total = self._moments[0], self._moments[-1], self._total_bytes
        began_s, num_rows, num_bytes = first[0], last[1], last[3]
        elapsed_s = max(now_s - began_s, 1e-3)
        parts = [f"{num_rows:,} rows", *([f"{num_in_flight:,} in flight"] if num_in_flight else [])]
        if last is not first:
            rows_s, tokens_s, bytes_s = ((b - a) / elapsed_s for a, b in zip(first[1:], last[1:], strict=True))
            parts += [f"{rows_s:,.0f} rows/s", f"{tokens_s:,.0f} tokens/s"]
            if total and bytes_s > 0 and (first[3] or not first[1]):  # a journal of an older version has no bytes
                parts.append(f"{in_words((total - num_bytes) / bytes_s)} left")
        return (_bar(min(1.0, num_bytes / total)) if total else "") + ", ".join(parts)


class WaitMessages:
    """While a server refuses or does not respond: one at once, and the next later each time."""

    def __init__(self, server: str, retry_for_s: float) -> None:
        """`server`: what is waited for. `retry_for_s`: how long it may serve nothing before the run ends."""
        self._server = server
        self._retry_for_s = retry_for_s
        self._began_at: float | None = None
        self._due_at = -math.inf
        self._interval_s = AGAIN_S

    def next(self, now_s: float, trouble: str) -> str | None:
        """The line to write now, if there is one. `trouble`: why requests wait, or ""."""
        if not trouble:
            self._began_at = None
            return None
        if self._began_at is None:  # a server that is busy now and then is not worth a line each time
            self._began_at, self._interval_s = now_s, AGAIN_S
        if now_s < self._due_at:
            return None
        waited_s = now_s - self._began_at
        self._due_at, self._interval_s = now_s + self._interval_s, 2 * self._interval_s
        if waited_s < AGAIN_S:
            return f"{self._server}: {trouble}. Trying again for up to {self._retry_for_s:g} s (--retry-for)"
        left_s = max(0.0, self._retry_for_s - waited_s)
        return f"still waiting for {self._server} after {waited_s:.0f} s: {trouble}. Giving up in {left_s:.0f} s"


def _bar(share: float) -> str:
    num_full = int(share * _BAR_WIDTH)
    return f"{share:4.0%} {'━' * num_full}{'╌' * (_BAR_WIDTH - num_full)} "


def in_words(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


# --- signals and threads ----------------------------------------------------------------------------------------

_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def until_interrupted(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, which SIGINT and SIGTERM cancel. Raises Interrupted when they have, else what `work` raises.
    Side effects: a second signal does what it does by default."""
    loop, task, received = asyncio.get_running_loop(), asyncio.ensure_future(work), list[int]()

    def restore() -> None:  # uvloop would keep the handlers after its end
        for each in _SIGNALS:
            loop.remove_signal_handler(each)

    def interrupt(number: int) -> None:
        received.append(number)
        restore()
        task.cancel()

    for each in _SIGNALS:
        loop.add_signal_handler(each, interrupt, each)
    try:
        await asyncio.wait({task})
    finally:
        restore()
    if received:
        raise Interrupted(received[0])
    await task


async def keep_telling(service: EmbeddingService, line: StatusLine, retry_for_s: float) -> None:
    """Say why requests wait, until this is cancelled."""
    messages = WaitMessages(str(service.target), retry_for_s)
    while True:
        if (message := messages.next(time.monotonic(), service.trouble)) is not None:
            line.say(message)
        await asyncio.sleep(_TELL_S)


async def in_thread(call: Callable[[], _T], name: str) -> _T:
    return await asyncio.wrap_future(in_daemon(call, name))


# --- the run ----------------------------------------------------------------------------------------------------

_COMMIT_PAUSE_S = 0.1
"""At least, from the end of one commit to the next."""
_TICK_S = 0.25
_TELL_S = 0.1
_LAST_COMMIT_S = 10.0
_BYTES_PER_CHAR = 6
"""Most bytes of a character in JSON."""


@dataclass
class EmbedRun:
    """The rows of one output that are left, and their results."""

    options: EmbedOptions
    inputs: Sequence[InputSource]
    files: OutputFiles
    """They know where the run begins."""
    service: EmbeddingService
    line: StatusLine
    label: str = ""
    """What its lines begin with."""

    def __post_init__(self) -> None:
        self._first_row = self.files.written.position.row
        self._course: Course
        self._pending: dict[asyncio.Task[None], RowBatch] = {}
        """Batches that are requested and not yet written, in their order."""
        # One thread, so that commits reach the disk in order, also when one is no longer awaited.
        self._disk = ThreadPoolExecutor(1, "commit")

    async def embed(self) -> None:
        """Embed the rows that are left. Commits what is done, however this ends, also when it is cancelled.

        Raises EmbedError when the server has another model than the unfinished run or the files of that are gone,
        FieldMissing when no row has a text and the input no field for it, RunEnded or OSError when rows are left.
        """
        files, began_at = self.files, time.monotonic()
        await self._begin()
        try:
            await self._work()
            await self._commit(replace(files.written, is_complete=True))
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, FieldMissing) and files.written.num_rejected == files.written.position.row:
                self._disk.shutdown()  # a commit may be under way
                files.discard()
                raise
            with suppress(Exception):  # if this is not possible soon, the last commit stands
                async with asyncio.timeout(_LAST_COMMIT_S):
                    await self._commit(files.written)
            if isinstance(error, EmbedError):
                raise RunEnded(str(error)) from error
            raise
        finally:
            self._disk.shutdown(wait=False)
        took_s, num_rows = time.monotonic() - began_at, files.written.position.row - self._first_row
        files.how = f"{num_rows:,} in {in_words(took_s)}, {num_rows / took_s:,.0f} a second"

    async def _begin(self) -> None:
        """Connect to the server, and bring the files to where the run begins."""
        files, service, line, label = self.files, self.service, self.line, self.label
        line.show(lambda: f"{label}waiting for {service.target}")
        is_begun = files.is_begun
        try:
            model = await service.connect(files.journal.model.get("identity"))
        except OtherIdentity as error:
            if not is_begun:
                raise
            raise EmbedError(f"the unfinished run had another model: {error}. --restart begins anew") from error
        files.begin(model)
        if model.columns:
            line.say(f"{label}writes {' and '.join(service.kind.names)}: {', '.join(model.columns)}")
        if is_begun:
            line.say(f"{label}goes on behind row {self._first_row:,}")
        total_bytes = sum(each.num_bytes for each in self.inputs)
        self._course = Course(total_bytes, time.monotonic(), files.written.position, service.num_tokens)

    async def _work(self) -> None:
        options, service, files = self.options, self.service, self.files
        limited = replace(
            options,
            batch_texts=min(options.batch_texts, service.max_texts),
            batch_chars=min(options.batch_chars, max(1, service.max_bytes // _BYTES_PER_CHAR)),
        )
        batches = read_batches(self.inputs, limited, files.written.position, service.estimate)
        reading = asyncio.create_task(_next_batch(batches))
        committing = asyncio.create_task(self._keep_committing())
        try:
            while True:
                while self._pending and (first := next(iter(self._pending))).done():
                    first.result()
                    files.append(self._pending.pop(first))
                    self._course.add(time.monotonic(), files.written.position, service.num_tokens)
                if committing.done():
                    committing.result()
                if reading.done() and self._has_room():
                    if (batch := reading.result()) is not None:
                        self._pending[asyncio.create_task(service.embed(batch))] = batch
                        reading = asyncio.create_task(_next_batch(batches))
                    elif not self._pending:
                        return
                self.line.show(self._describe_progress)
                waits = [task for task in (reading, committing, *self._pending) if not task.done()]
                await asyncio.wait(waits, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks = (reading, committing, *self._pending)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(ValueError):  # the thread is still reading
                batches.close()

    def _has_room(self) -> bool:
        num_running = sum(not task.done() for task in self._pending)
        return self.service.estimate.has_room(num_running, (batch.cost for batch in self._pending.values()))

    # --- progress and commits -----------------------------------------------------------------------------

    def _describe_progress(self) -> str:
        trouble = self.service.trouble
        num_in_flight = sum(len(batch.rows) for batch in self._pending.values())
        progress = self._course.describe(time.monotonic(), num_in_flight)
        return self.label + progress + (f", waiting: {trouble}" if trouble else "")

    async def _keep_committing(self) -> None:
        pace, files = self.options.pace, self.files
        interval_s, took_s = pace.first_commit_s, 0.0
        while True:
            await asyncio.sleep(max(interval_s - took_s, min(_COMMIT_PAUSE_S, interval_s)))
            began_at = time.monotonic()
            if files.written != files.journal.commit:
                await self._commit(files.written)
                interval_s = min(2 * interval_s, pace.commit_s)
            took_s = time.monotonic() - began_at

    async def _commit(self, commit: Commit) -> None:
        """Raises RunEnded, EmbedError, OSError. Side effects: replaces the journal."""
        if commit != self.files.journal.commit:
            check_unchanged(self.inputs)
            self.files.check()
            await asyncio.get_running_loop().run_in_executor(self._disk, self.files.save, commit)


async def _next_batch(batches: Iterator[RowBatch]) -> RowBatch | None:
    return await in_thread(lambda: next(batches, None), "reader")
