"""One output of `vecd embed`: rows in, vectors out in the same order, and a commit every few seconds.

Owns the order and the commits. Batches are under way concurrently, and are written in the order of the input, so that
the output is always complete up to some row. Rows count as done after a commit: the rows and the journal are on the
disk.
"""

import asyncio
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from vecd.base.status_line import StatusLine
from vecd.client.embed.files import Commit, Journal, OutputFiles, journal_path
from vecd.client.embed.inputs import InputSource, RowBatch, check_unchanged, read_batches
from vecd.client.embed.options import EmbedError, EmbedOptions, FieldMissing, OtherIdentity, RunEnded
from vecd.client.embed.service import EmbeddingService, Results
from vecd.client.embed.storage import in_daemon

# --- progress in words ------------------------------------------------------------------------------------------

_WINDOW_S = 30.0
"""Rates are of the last seconds: an earlier restart of the server says nothing about the time left."""
_BAR_WIDTH = 24
AGAIN_S = 10.0
"""From the first line about a server that does not serve to the second."""


class Moment(NamedTuple):
    """The state of a run at one time."""

    at_s: float
    """On any monotonic clock."""
    num_rows: int
    """Rows of the input that are done, also by earlier runs."""
    num_tokens: int
    num_bytes: int
    """Bytes of the inputs up to the last row that is done."""


class Course:
    def __init__(self, total_bytes: int, first: Moment) -> None:
        """`total_bytes` of the inputs; 0 if it is not known. Rates count from `first`."""
        self._total_bytes = total_bytes
        self._moments = deque([first])

    def add(self, moment: Moment) -> None:
        moments = self._moments
        moments.append(moment)
        while len(moments) > 2 and moments[1].at_s <= moment.at_s - _WINDOW_S:
            moments.popleft()

    def describe(self, now_s: float, num_in_flight: int = 0) -> str:
        """A bar, rows, rates and time left, as far as they are known. `num_in_flight`: rows that are requested."""
        first, last, total = self._moments[0], self._moments[-1], self._total_bytes
        elapsed_s = max(now_s - first.at_s, 1e-3)
        parts = [f"{last.num_rows:,} rows", *([f"{num_in_flight:,} in flight"] if num_in_flight else [])]
        if last is not first:
            parts.append(f"{(last.num_rows - first.num_rows) / elapsed_s:,.0f} rows/s")
            parts.append(f"{(last.num_tokens - first.num_tokens) / elapsed_s:,.0f} tokens/s")
            bytes_per_s = (last.num_bytes - first.num_bytes) / elapsed_s
            if total and bytes_per_s > 0:
                parts.append(f"{in_words((total - last.num_bytes) / bytes_per_s)} left")
        return (_bar(min(1.0, last.num_bytes / total)) if total else "") + ", ".join(parts)


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


async def until_interrupted(work: Coroutine[Any, Any, None]) -> int:
    """Await `work`, which SIGINT and SIGTERM cancel. Returns the signal that has done so, or 0.

    Raises what `work` raises, unless it was interrupted. Side effects: a second signal does what it does by default.
    """
    loop, task, number = asyncio.get_running_loop(), asyncio.ensure_future(work), 0

    def restore() -> None:  # uvloop would keep the handlers after its end
        for each in _SIGNALS:
            loop.remove_signal_handler(each)

    def interrupt(received: int) -> None:
        nonlocal number
        number = received
        restore()
        task.cancel()

    for each in _SIGNALS:
        loop.add_signal_handler(each, interrupt, each)
    try:
        await asyncio.wait({task})
        if not number:
            await task
    finally:
        restore()
    return number


async def keep_telling(service: EmbeddingService, line: StatusLine, retry_for_s: float) -> None:
    """Say why requests wait, until this is cancelled."""
    messages = WaitMessages(str(service.target), retry_for_s)
    while True:
        if (message := messages.next(time.monotonic(), service.trouble)) is not None:
            line.say(message)
        await asyncio.sleep(_TELL_S)


async def in_thread(call: Callable[[], _T], name: str) -> _T:
    return await asyncio.wrap_future(in_daemon(call, name))


_COMMIT_PAUSE_S = 0.1
"""At least, from the end of one commit to the next."""
_TICK_S = 0.25
_TELL_S = 0.1
_LAST_COMMIT_S = 10.0
_BYTES_PER_CHAR = 6
"""Most bytes of a character in JSON."""


class EmbedRun:
    """One output, from its journal to its final files: `embed` unless it `is_complete`, `finish`, and `forget`."""

    def __init__(self, options: EmbedOptions, inputs: Sequence[InputSource], files: OutputFiles) -> None:
        """`files` are locked. Raises EmbedError when something else is in the place of the output."""
        self._options = options
        self._inputs = inputs
        self._files = files
        self._how = "the run before was complete"
        self._journal = self._find_journal()
        self.commit = self._written = self._journal.commit
        """What is done; the next commit, what has been written since."""
        self._line: StatusLine
        self._service: EmbeddingService
        self._label = ""
        self._course: Course
        self._pending: dict[asyncio.Task[Results], RowBatch] = {}
        """Batches that are requested and not yet written, in their order."""
        self._commit_due_at = 0.0
        self._commit_s = options.pace.first_commit_s

    @property
    def is_complete(self) -> bool:
        return self.commit.is_complete

    def _find_journal(self) -> Journal:
        options = self._options
        path = journal_path(options.path)
        inputs = [each.journal_fields() for each in self._inputs]
        new = Journal(options.journal_fields(), options.bad_rows, inputs)
        if options.restart:
            path.unlink(missing_ok=True)
            return new
        old = Journal.load(path)
        if old is not None:
            if not old.commit.position.row and not old.commit.is_complete:
                return new  # nothing was done: the run begins anew, whatever has changed
            old.check_same(new)
            return replace(old, on_bad_row=options.bad_rows)
        if options.path.exists():
            raise EmbedError(f"{options.path} exists; --restart replaces it")
        if not self._files.is_new:
            raise EmbedError(f"{options.path}.part exists, and nothing tells what it is; --restart replaces it")
        return new

    async def embed(self, service: EmbeddingService, line: StatusLine, label: str = "") -> None:
        """Embed the rows that are left. Commits what is done, however this ends, also when it is cancelled. `label`:
        what its lines begin with.

        Raises EmbedError when the server has another model than the unfinished run or the files of that are gone,
        FieldMissing when no row has a text and the input no field for it, RunEnded or OSError when rows are left.
        """
        self._service, self._line, self._label = service, line, label
        began_at, first_row = time.monotonic(), self.commit.position.row
        # One thread, so that commits reach the disk in order, also when one is no longer awaited.
        self._disk = ThreadPoolExecutor(1, "commit")
        try:
            await self._embed_all(await self._begin())
        finally:
            self._disk.shutdown(wait=False)
        took_s, num_rows = time.monotonic() - began_at, self.commit.position.row - first_row
        self._how = f"{num_rows:,} in {in_words(took_s)}, {num_rows / took_s:,.0f} a second"

    def finish(self) -> str:
        """Make the final files. Returns what is said about them. Raises OSError, EmbedError. Side effects: a run that
        is repeated before `forget` comes here at once."""
        files, commit = self._files, self.commit
        if self._journal.commit.is_complete:
            files.open(self._journal.model["dim"], self._journal.model.get("columns"))
        files.finish(commit.lengths, commit.num_written)
        return f"{commit.num_written:,} rows ({self._how})"

    def forget(self) -> None:
        journal_path(self._options.path).unlink(missing_ok=True)

    def describe_rejected(self, out: str) -> str:
        """What has become of rows without results, if there are any. `out`: where the output is in the end."""
        num, options = self.commit.num_rejected, self._options
        if not num:
            return ""
        is_one = num == 1
        rows, verb = ("1 row", "is") if is_one else (f"{num:,} rows", "are")
        if options.on_bad_row == "skip":
            effect = f"{'it' if is_one else 'they'} {verb} left out"
        else:
            blank = "NaN" if options.output_format == "npy" else "null"
            what = "results are" if self._files.has_columns else f"vector{'' if is_one else 's'} {verb}"
            effect = f"{'its' if is_one else 'their'} {what} {blank}"
        return f"{rows} could not be embedded; {effect}. The reasons are in {out}.rejected.jsonl"

    async def _begin(self) -> Generator[RowBatch, None, None]:
        """Connect to the server, and bring output and journal to where the run begins. Returns the rows left."""
        self._line.show(lambda: f"{self._label}waiting for {self._service.target}")
        options, service = self._options, self._service
        is_new, theirs = not self.commit.lengths, self._journal.model.get("identity")
        try:
            model = await service.connect(None if is_new else theirs)
        except OtherIdentity as error:
            if is_new:
                raise
            raise EmbedError(f"the unfinished run had another model: {error}. --restart begins anew") from error
        if is_new:
            self._journal = replace(self._journal, model=model._asdict())
        elif why := model.why_other(self._journal.model):
            raise EmbedError(f"the unfinished run had another model: {why}. --restart begins anew")
        if model.columns:
            self._line.say(f"{self._label}writes {' and '.join(service.kind.names)}: {', '.join(model.columns)}")
        self._files.open(model.dim, model.columns)
        if is_new:  # the journal comes before the first byte: files without one are not this command's to cut off
            self._journal.save(journal_path(options.path))
        else:
            self._line.say(f"{self._label}goes on behind row {self.commit.position.row:,}")
        self._files.begin(self.commit.lengths)
        self.commit = self._written = replace(self.commit, lengths=self._files.lengths)
        self._commit_due_at = time.monotonic() + self._commit_s
        self._begin_course(0)
        limited = replace(
            options,
            batch_texts=min(options.batch_texts, service.max_texts),
            batch_chars=min(options.batch_chars, max(1, service.max_bytes // _BYTES_PER_CHAR)),
        )
        return read_batches(self._inputs, limited, self.commit.position, service.estimate)

    # --- rows ---------------------------------------------------------------------------------------------

    async def _embed_all(self, batches: Generator[RowBatch, None, None]) -> None:
        """Commits what is done if it is ended. Raises FieldMissing when no row has a text, RunEnded, OSError."""
        try:
            await self._work(batches)
            await self._save_commit(replace(self._written, is_complete=True))
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, FieldMissing) and self._written.num_rejected == self._written.position.row:
                self.forget()
                self._files.discard()
                raise
            with suppress(Exception):  # if this is not possible soon, the last commit stands
                async with asyncio.timeout(_LAST_COMMIT_S):
                    await self._save_commit(self._written)
            if isinstance(error, EmbedError):
                raise RunEnded(str(error)) from error
            raise

    async def _work(self, batches: Generator[RowBatch, None, None]) -> None:
        reading = asyncio.create_task(_next_batch(batches))
        committing: asyncio.Task[None] | None = None
        try:
            while True:
                while self._pending and (first := next(iter(self._pending))).done():
                    self._write(self._pending.pop(first), first.result())
                if committing is not None and committing.done():
                    committing.result()
                    committing = None
                if committing is None and time.monotonic() >= self._commit_due_at:
                    committing = asyncio.create_task(self._save_commit(self._written))
                if reading.done() and self._has_room():
                    batch = reading.result()
                    if batch is not None:
                        self._start(batch)
                        reading = asyncio.create_task(_next_batch(batches))
                    elif not self._pending:
                        return
                self._line.show(self._describe_progress)
                tasks = {reading, committing, *self._pending}
                waits = [task for task in tasks if task is not None and not task.done()]
                await asyncio.wait(waits, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            others = [reading, *self._pending]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            with suppress(ValueError):  # the thread is still reading
                batches.close()
            if committing is not None:  # one that has begun is awaited: two at a time would not be in order
                await asyncio.wait({committing}, timeout=_LAST_COMMIT_S)
                committing.cancel()
                with suppress(asyncio.CancelledError):
                    await committing

    def _has_room(self) -> bool:
        num_running = sum(not task.done() for task in self._pending)
        return self._service.estimate.has_room(num_running, (batch.cost for batch in self._pending.values()))

    def _start(self, batch: RowBatch) -> None:
        if batch.first_row and batch.first_row == self._journal.commit.position.row:
            self._begin_course(batch.bytes_read)
        self._pending[asyncio.create_task(self._service.embed(batch.rows))] = batch

    def _write(self, batch: RowBatch, results: Results) -> None:
        """Raises RunEnded for the first row without results, with --on-bad-row fail."""
        if results.reasons and self._options.on_bad_row == "fail":
            index = min(results.reasons)
            raise RunEnded(f"{batch.source.name}, line {batch.rows[index].line}: {results.reasons[index]}")
        num_written, written = self._files.append(batch, results), self._written
        self._written = replace(
            written,
            position=batch.end,
            lengths=self._files.lengths,
            num_written=written.num_written + num_written,
            num_rejected=written.num_rejected + len(results.reasons),
            num_tokens=written.num_tokens + results.num_tokens,
        )
        self._course.add(self._moment(batch.bytes_read))

    def _begin_course(self, num_bytes: int) -> None:
        self._course = Course(sum(each.num_bytes for each in self._inputs), self._moment(num_bytes))

    def _moment(self, num_bytes: int) -> Moment:
        return Moment(time.monotonic(), self._written.position.row, self._written.num_tokens, num_bytes)

    def _describe_progress(self) -> str:
        trouble = self._service.trouble
        num_in_flight = sum(len(batch.rows) for batch in self._pending.values())
        progress = self._course.describe(time.monotonic(), num_in_flight)
        return self._label + progress + (f", waiting: {trouble}" if trouble else "")

    # --- commits ------------------------------------------------------------------------------------------

    async def _save_commit(self, commit: Commit) -> None:
        """Raises RunEnded, EmbedError, OSError. Side effects: replaces the journal."""
        began_at = time.monotonic()
        if commit != self.commit:
            check_unchanged(self._inputs)
            await asyncio.get_running_loop().run_in_executor(self._disk, self._save, commit)
            self.commit = commit
            self._commit_s = min(2 * self._commit_s, self._options.pace.commit_s)
        self._commit_due_at = max(began_at + self._commit_s, time.monotonic() + min(_COMMIT_PAUSE_S, self._commit_s))

    def _save(self, commit: Commit) -> None:
        self._files.sync()
        replace(self._journal, commit=commit).save(journal_path(self._options.path))


async def _next_batch(batches: Iterator[RowBatch]) -> RowBatch | None:
    return await in_thread(lambda: next(batches, None), "reader")
