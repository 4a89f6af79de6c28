"""One run: rows in, in order out, and a commit every few seconds.

Owns the order. Batches are under way side by side, and are written in the order of the input, so that what is done is
always a beginning of it. Rows count as done when a commit says so, and that comes after the server has shown once more
that it still has the model of the run's beginning, and after they are on the disk. Called by
`vecd.client.bulk.command`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from vecd.client.bulk.feed import Feed
from vecd.client.bulk.inputs import Input, check_unchanged
from vecd.client.bulk.journal import Commit, Journal
from vecd.client.bulk.output import Done, Output
from vecd.client.bulk.progress import Course, Moment
from vecd.client.bulk.rows import Batch
from vecd.client.bulk.service import Service, Vectors

_FIRST_COMMIT_S, _COMMIT_S = 0.25, 2.0
"""Between commits: what a run that is killed has to do again. Twice as long each time, up to the second."""
_TICK_S = 0.25
_AHEAD = 2
"""Batches that are done, or wait for their turn, beside those under way."""
_LAST_COMMIT_S = 10.0


class BadRow(Exception):
    """Raised for the first row without a vector, when that is to end the run."""


class ModelChanged(Exception):
    """Raised when the server makes other vectors than at the run's beginning."""


@dataclass(slots=True)
class _Pending:
    batch: Batch
    task: "asyncio.Task[Vectors]"


class BulkRun:
    """`run` once; `stop` ends it early, from the same event loop."""

    def __init__(
        self,
        journal: Journal,
        journal_path: Path,
        inputs: Sequence[Input],
        output: Output,
        service: Service,
        keep: Sequence[str],
        on_progress: Callable[[Course, str], None],
    ) -> None:
        """`output` stands where the journal's commit says. `on_progress` is told what is wrong, too, or ""."""
        self.commit = journal.commit
        """The last one."""
        self._written = journal.commit
        """What the next one may say."""
        self._journal = journal
        self._journal_path = journal_path
        self._inputs = inputs
        self._output = output
        self._service = service
        self._keep = tuple(keep)
        self._on_progress = on_progress
        total_bytes = sum(each.num_bytes for each in inputs)
        self._course = Course(None if inputs[0].is_stream else total_bytes)
        self._first_row = journal.commit.position.row
        self._pending: deque[_Pending] = deque()
        self._stopping = asyncio.Event()
        self._course.begin(self._moment(0))
        self._commit_due_at = time.monotonic() + _FIRST_COMMIT_S
        self._commit_s = _FIRST_COMMIT_S
        # One thread: commits reach the disk in the order in which they were begun, also when nobody waits for one.
        self._disk = ThreadPoolExecutor(1, "commit")

    def stop(self) -> None:
        self._stopping.set()

    async def run(self, feed: Feed) -> bool:
        """Whether all rows are done, and not stopped before. What is done is committed, whatever ends the run.

        Raises BadRow, ModelChanged, ServerLost, NotServed, InputError, OSError.
        """
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            is_whole = await self._work(feed, stopping)
            if is_whole:
                await self._commit(replace(self._written, is_complete=True))
            else:
                await self._try_commit()
        except ModelChanged:
            raise
        except Exception:
            await self._try_commit()
            raise
        finally:
            stopping.cancel()
            await self._drop_pending()
        return is_whole

    async def _try_commit(self) -> None:
        """If it cannot be done soon, the commit before stands."""
        with suppress(Exception):
            async with asyncio.timeout(_LAST_COMMIT_S):
                await self._commit(self._written)

    async def _work(self, feed: Feed, stopping: "asyncio.Task[Any]") -> bool:
        getting: asyncio.Task[Batch | None] | None = None
        committing: asyncio.Task[None] | None = None
        is_at_end = False
        try:
            while not stopping.done():
                if getting is None and not is_at_end and len(self._pending) < self._service.pace.limit + _AHEAD:
                    getting = asyncio.create_task(feed.get())
                head = self._pending[0].task if self._pending else None
                if getting is None and head is None:
                    return True
                waits = [task for task in (getting, head, committing, stopping) if task is not None]
                await asyncio.wait(waits, timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
                if getting is not None and getting.done():
                    is_at_end = self._take(getting.result())
                    getting = None
                while self._pending and self._pending[0].task.done():
                    first = self._pending.popleft()
                    self._write(first.batch, first.task.result())
                if committing is not None and committing.done():
                    committing.result()
                    committing = None
                if committing is None and time.monotonic() >= self._commit_due_at:
                    committing = asyncio.create_task(self._commit(self._written))
                self._on_progress(self._course, self._service.trouble)
            return False
        finally:
            await _end(getting, self._finished(committing))

    async def _finished(self, committing: "asyncio.Task[None] | None") -> None:
        """A commit that has begun is let come to its end: two at a time would not be in order."""
        if committing is not None:
            await asyncio.wait({committing}, timeout=_LAST_COMMIT_S)
            committing.cancel()
            with suppress(asyncio.CancelledError):
                await committing

    def _take(self, batch: Batch | None) -> bool:
        """Whether it was the end."""
        if batch is None:
            return True
        if batch.rows[0].number == self._first_row and batch.rows[0].number:
            self._course.begin(self._moment(batch.bytes_read))
        self._pending.append(_Pending(batch, asyncio.create_task(self._service.embed(batch.texts()))))
        return False

    # --- what is done -------------------------------------------------------------------------------------

    def _write(self, batch: Batch, vectors: Vectors) -> None:
        """Raises BadRow."""
        done = _joined(batch, vectors)
        if done.reasons and self._journal.on_bad_row == "fail":
            index = min(done.reasons)
            raise BadRow(f"{self._place(done, index)}: {done.reasons[index]}")
        rejected = [self._describe(done, index) for index in sorted(done.reasons)]
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

    def _moment(self, num_bytes: int) -> Moment:
        return Moment(time.monotonic(), self._written.position.row, self._written.num_tokens, num_bytes)

    def _place(self, done: Done, index: int) -> str:
        row = done.rows[index]
        return f"{self._inputs[row.input].name}, line {row.item.line}"

    def _describe(self, done: Done, index: int) -> bytes:
        """A line of OUT.rejected.jsonl."""
        row = done.rows[index]
        told = {
            "row": row.number,
            "file": self._inputs[row.input].path,
            "line": row.item.line,
            "reason": done.reasons[index],
        }
        if self._keep:
            told["kept"] = dict(zip(self._keep, row.item.kept, strict=False))
        return orjson.dumps(told, default=str, option=orjson.OPT_APPEND_NEWLINE)

    async def _commit(self, commit: Commit) -> None:
        """Raises ModelChanged, and what its parts raise. Side effects: the journal says so from then on."""
        if commit != self.commit:
            if not await self._service.still_same():
                raise ModelChanged("the server has another model than this run began with: its vectors are not used")
            check_unchanged(self._inputs)
            await asyncio.get_running_loop().run_in_executor(self._disk, self._save, commit)
            self.commit = commit
            self._commit_s = min(2 * self._commit_s, _COMMIT_S)
        self._commit_due_at = time.monotonic() + self._commit_s

    def _save(self, commit: Commit) -> None:
        self._output.sync()
        self._journal.with_commit(commit).save(self._journal_path)

    async def _drop_pending(self) -> None:
        tasks = [each.task for each in self._pending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _joined(batch: Batch, vectors: Vectors) -> Done:
    """A row for each row that was read, with its vector or with the reason why there is none."""
    rows = batch.rows
    if len(vectors.matrix) == len(rows):
        return Done(rows, vectors.matrix, vectors.reasons)
    asked = [index for index, row in enumerate(rows) if row.item.text is not None]
    reasons = {index: row.item.reason for index, row in enumerate(rows) if row.item.text is None}
    reasons |= {asked[index]: reason for index, reason in vectors.reasons.items()}
    matrix = np.full((len(rows), vectors.matrix.shape[1]), np.nan, vectors.matrix.dtype)
    matrix[asked] = vectors.matrix
    return Done(rows, matrix, reasons)


async def _end(getting: "asyncio.Task[Any] | None", committing: Coroutine[Any, Any, None]) -> None:
    if getting is not None:
        getting.cancel()
        with suppress(BaseException):
            await getting
    await committing
