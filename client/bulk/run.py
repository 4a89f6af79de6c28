"""One run of `vecd embed`: rows in, vectors out in the same order, and a commit every few seconds.

Owns the order, the commits, and the signals meanwhile. Batches are under way concurrently, and are written in the order
of the input, so that the output is always complete up to some row. Rows count as done after a commit: the server has
shown again that it has the model of the beginning of the run, and the rows and the journal are on the disk. Called by
`vecd.client.bulk.command`.
"""

import asyncio
import signal
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
import orjson

from vecd.client.bulk.feed import Feed, RequestSize, read_batches
from vecd.client.bulk.inputs import InputSource, check_unchanged
from vecd.client.bulk.journal import Commit, Journal, JournalError
from vecd.client.bulk.options import EmbedOptions
from vecd.client.bulk.output import EmbeddedBatch, OutputFiles, journal_path
from vecd.client.bulk.progress import Course, Moment, bar
from vecd.client.bulk.rows import InputError, Position, RowBatch
from vecd.client.bulk.service import (
    EmbeddingService,
    ModelFingerprint,
    NotServed,
    RequestLimits,
    ServerLost,
    Vectors,
)
from vecd.client.status_line import StatusLine

_FIRST_COMMIT_S, _COMMIT_S = 0.25, 2.0
"""Between commits, which is the work that a killed run repeats: doubled each time, up to the second."""
_TICK_S = 0.25
_AHEAD = 2
"""Batches that are done, or wait for a request, beside those under way."""
_LAST_COMMIT_S = 10.0
_BYTES_PER_CHAR = 6
"""Most bytes of a character in JSON."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class BadRow(Exception):
    """Raised for the first row without a vector, with --on-bad-row fail."""


class ModelChanged(Exception):
    """Raised when the server has another model than at the beginning of the run."""


class RunOutcome(NamedTuple):
    """How a run ended: complete, if there is neither signal nor error."""

    commit: Commit
    """What is done."""
    signal_number: int = 0
    error: Exception | None = None


class _Pending(NamedTuple):
    batch: RowBatch
    task: "asyncio.Task[Vectors]"


class EmbedRun:
    """`run` once."""

    def __init__(
        self,
        options: EmbedOptions,
        inputs: Sequence[InputSource],
        output: OutputFiles,
        unfinished: Journal | None,
        service: EmbeddingService,
        line: StatusLine,
    ) -> None:
        """`unfinished`: the journal of the run to resume."""
        self._options = options
        self._inputs = inputs
        self._output = output
        self._unfinished = unfinished
        self._service = service
        self._line = line
        self._journal: Journal
        self._commit = Commit(Position()) if unfinished is None else unfinished.commit
        """The last one."""
        self._written = self._commit
        """The next one: what has been written since."""
        self._course = Course(None if inputs[0].is_stream else sum(each.num_bytes for each in inputs))
        self._pending: deque[_Pending] = deque()
        self._signal_number = 0
        self._stopping = asyncio.Event()
        self._is_connected = False
        self._commit_due_at = 0.0
        self._commit_s = _FIRST_COMMIT_S
        # One thread, so that commits reach the disk in order, also when one is no longer awaited.
        self._disk = ThreadPoolExecutor(1, "commit")

    async def run(self) -> RunOutcome:
        """Raises JournalError when the server has another model than the unfinished run, OutputError, OSError.

        Side effects: SIGINT and SIGTERM end the run in order, a second one at once.
        """
        self._handle_signals()
        try:
            await self._embed_all(await self._begin())
        except asyncio.CancelledError:
            if not self._signal_number:
                raise
        except (BadRow, ModelChanged, ServerLost, NotServed, InputError, OSError) as error:
            return RunOutcome(self._commit, self._signal_number, error)
        finally:
            _drop_signal_handlers()
            self._service.close()
        return RunOutcome(self._commit, self._signal_number)

    def _handle_signals(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            self._signal_number = number
            _drop_signal_handlers()
            if self._is_connected:
                self._stopping.set()
            else:
                task.cancel()

        for number in _SIGNALS:
            loop.add_signal_handler(number, stop, number)

    # --- beginning ----------------------------------------------------------------------------------------

    async def _begin(self) -> Feed:
        """Connect to the server, and bring output and journal to where the run begins."""
        self._line.show(lambda: "waiting for the server")
        model, limits = await self._service.connect()
        self._journal = self._begin_output(model)
        self._commit = self._written = self._journal.commit
        self._is_connected = True
        self._commit_due_at = time.monotonic() + self._commit_s
        self._course.begin(self._moment(0))
        size = _limit_size(self._options.size, limits)
        return Feed(read_batches(self._inputs, self._options.shape, size, self._commit.position))

    def _begin_output(self, model: ModelFingerprint) -> Journal:
        options, old = self._options, self._unfinished
        if old is not None and (why := model.why_other(old.model)):
            raise JournalError(f"the unfinished run had another model: {why}. --restart begins anew")
        self._output.choose_form(
            options.output_format, model.dim, options.dtype, options.keep, on_bad_row=options.on_bad_row
        )
        if old is not None and old.commit.lengths:
            self._output.resume(old.commit.lengths)
            self._line.say(f"goes on behind row {old.commit.position.row:,}")
            return replace(old, on_bad_row=options.on_bad_row)
        # The journal comes before the first byte: files without a journal are not this command's to cut off.
        inputs = [each.identity() for each in self._inputs]
        journal = Journal(options.journal_fields(), options.on_bad_row, inputs, asdict(model), Commit(Position()))
        journal.save(journal_path(options.out))
        self._output.begin()
        return journal.with_commit(Commit(Position(), self._output.lengths))

    # --- rows ---------------------------------------------------------------------------------------------

    async def _embed_all(self, feed: Feed) -> None:
        """Commits what is done, however the run ends. Raises BadRow, ModelChanged, ServerLost, NotServed, InputError,
        OSError."""
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            if await self._work(feed, stopping):
                await self._save_commit(replace(self._written, is_complete=True))
            else:
                await self._try_commit()
        except ModelChanged:
            raise
        except Exception:
            await self._try_commit()
            raise
        finally:
            stopping.cancel()
            tasks = [each.task for each in self._pending]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, feed: Feed, stopping: "asyncio.Task[Any]") -> bool:
        """Returns whether all rows are done."""
        getting: asyncio.Task[RowBatch | None] | None = None
        committing: asyncio.Task[None] | None = None
        is_at_end = False
        try:
            while not stopping.done():
                if getting is None and not is_at_end and len(self._pending) < self._service.concurrency.limit + _AHEAD:
                    getting = asyncio.create_task(feed.get())
                head = self._pending[0].task if self._pending else None
                if getting is None and head is None:
                    return True
                waits = [task for task in (getting, head, committing, stopping) if task is not None]
                await asyncio.wait(waits, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
                if getting is not None and getting.done():
                    batch, getting = getting.result(), None
                    is_at_end = batch is None
                    if batch is not None:
                        self._start(batch)
                while self._pending and self._pending[0].task.done():
                    first = self._pending.popleft()
                    self._write(first.batch, first.task.result())
                if committing is not None and committing.done():
                    committing.result()
                    committing = None
                if committing is None and time.monotonic() >= self._commit_due_at:
                    committing = asyncio.create_task(self._save_commit(self._written))
                self._line.show(self._describe_progress)
            return False
        finally:
            if getting is not None:
                getting.cancel()
                with suppress(BaseException):
                    await getting
            if committing is not None:  # one that has begun is awaited: two at a time would not be in order
                await asyncio.wait({committing}, timeout=_LAST_COMMIT_S)
                committing.cancel()
                with suppress(asyncio.CancelledError):
                    await committing

    def _start(self, batch: RowBatch) -> None:
        """Send the request of `batch`."""
        if batch.first_row and batch.first_row == self._journal.commit.position.row:
            self._course.begin(self._moment(batch.bytes_read))
        self._pending.append(_Pending(batch, asyncio.create_task(self._service.embed(batch.texts()))))

    def _write(self, batch: RowBatch, vectors: Vectors) -> None:
        """Raises BadRow."""
        done = _join(batch, vectors)
        name = self._inputs[batch.input].name
        if done.reasons and self._options.on_bad_row == "fail":
            index = min(done.reasons)
            raise BadRow(f"{name}, line {batch.rows[index].line}: {done.reasons[index]}")
        rejected = [self._describe_rejected(done, index) for index in sorted(done.reasons)]
        num_written = self._output.append(done, rejected)
        written = self._written
        self._written = replace(
            written,
            position=batch.end,
            lengths=self._output.lengths,
            num_written=written.num_written + num_written,
            num_rejected=written.num_rejected + len(rejected),
            num_tokens=written.num_tokens + vectors.num_tokens,
        )
        self._course.add(self._moment(batch.bytes_read))

    def _describe_rejected(self, done: EmbeddedBatch, index: int) -> bytes:
        """A line of OUT.rejected.jsonl."""
        batch, row = done.batch, done.batch.rows[index]
        line: dict[str, Any] = {
            "row": batch.first_row + index,
            "file": self._inputs[batch.input].path,
            "line": row.line,
            "reason": done.reasons[index],
        }
        if self._options.keep:
            line["kept"] = dict(zip(self._options.keep, row.kept, strict=False))
        return orjson.dumps(line, default=str, option=orjson.OPT_APPEND_NEWLINE)

    def _moment(self, num_bytes: int) -> Moment:
        return Moment(time.monotonic(), self._written.position.row, self._written.num_tokens, num_bytes)

    def _describe_progress(self) -> str:
        share, trouble = self._course.share, self._service.trouble
        words = self._course.describe(time.monotonic()) + (f", waiting: {trouble}" if trouble else "")
        return words if share is None else f"{bar(share)} {words}"

    # --- commits ------------------------------------------------------------------------------------------

    async def _try_commit(self) -> None:
        """If this is not possible soon, the last commit stands."""
        with suppress(Exception):
            async with asyncio.timeout(_LAST_COMMIT_S):
                await self._save_commit(self._written)

    async def _save_commit(self, commit: Commit) -> None:
        """Raises ModelChanged, ServerLost, NotServed, InputError, OSError. Side effects: replaces the journal."""
        if commit != self._commit:
            if not await self._service.has_same_model():
                raise ModelChanged("the server has another model than this run began with: its vectors are not used")
            check_unchanged(self._inputs)
            await asyncio.get_running_loop().run_in_executor(self._disk, self._save, commit)
            self._commit = commit
            self._commit_s = min(2 * self._commit_s, _COMMIT_S)
        self._commit_due_at = time.monotonic() + self._commit_s

    def _save(self, commit: Commit) -> None:
        self._output.sync()
        self._journal.with_commit(commit).save(journal_path(self._options.out))


def _join(batch: RowBatch, vectors: Vectors) -> EmbeddedBatch:
    """Each row of the batch with its vector, or with the reason why it has none."""
    rows = batch.rows
    if len(vectors.matrix) == len(rows):
        return EmbeddedBatch(batch, vectors.matrix, vectors.reasons)
    sent = [index for index, row in enumerate(rows) if row.text is not None]
    reasons = {index: row.reason for index, row in enumerate(rows) if row.text is None}
    reasons |= {sent[index]: reason for index, reason in vectors.reasons.items()}
    matrix = np.full((len(rows), vectors.matrix.shape[1]), np.nan, vectors.matrix.dtype)
    matrix[sent] = vectors.matrix
    return EmbeddedBatch(batch, matrix, reasons)


def _limit_size(size: RequestSize, limits: RequestLimits) -> RequestSize:
    """No more than the server accepts in a request."""
    max_texts, max_chars = size
    if limits.max_inputs is not None:
        max_texts = min(max_texts, limits.max_inputs)
    if limits.max_body_bytes is not None:
        max_chars = max(1, min(max_chars, limits.max_body_bytes // _BYTES_PER_CHAR))
    return RequestSize(max_texts, max_chars)


def _drop_signal_handlers() -> None:
    """Restore what signals do by default. uvloop would keep the handlers after its end."""
    for number in _SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)
