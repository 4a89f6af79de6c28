"""One output of `vecd embed`: rows in, vectors out in the same order, and a commit every few seconds.

Owns the order and the commits. Batches are under way concurrently, and are written in the order
of the input, so that the output is always complete up to some row. Rows count as done after a commit: the server has
shown that their vectors are of the model of the beginning of the run, and the rows and the journal are on the disk.
Called by `vecd.client.bulk.command` and `vecd.client.bulk.folder`.
"""

import asyncio
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace

from vecd.client.bulk.errors import EmbedError, FieldMissing, ModelChanged, OtherIdentity, RunEnded
from vecd.client.bulk.inputs import InputSource, RowBatch, check_unchanged, read_batches
from vecd.client.bulk.journal import Commit, Journal
from vecd.client.bulk.options import EmbedOptions
from vecd.client.bulk.output import OutputFiles, journal_path
from vecd.client.bulk.progress import Course, Moment, WaitMessages
from vecd.client.bulk.service import EmbeddingService, Results
from vecd.client.bulk.tasks import in_thread
from vecd.client.status_line import StatusLine

_FIRST_COMMIT_S, _COMMIT_S = 0.25, 0.5
"""From the beginning of one commit to that of the next: doubled each time, up to the second. A killed run repeats the
work of about this time, and what was under way."""
_COMMIT_PAUSE_S = 0.1
"""At least, from the end of one commit to the next."""
_TICK_S = 0.25
_TELL_S = 0.1
_LAST_COMMIT_S = 10.0
_BYTES_PER_CHAR = 6
"""Most bytes of a character in JSON."""


class EmbedRun:
    """`run` once."""

    def __init__(
        self,
        options: EmbedOptions,
        inputs: Sequence[InputSource],
        output: OutputFiles,
        journal: Journal,
        service: EmbeddingService,
        line: StatusLine,
        label: str = "",
    ) -> None:
        """`journal`: that of the run to resume, or a new one. `label`: what its lines begin with."""
        self.commit = journal.commit
        """The last one: what is done."""
        self._options = options
        self._inputs = inputs
        self._output = output
        self._journal = journal
        self._service = service
        self._line = line
        self._label = label
        self._messages = WaitMessages(str(service.target), options.retry_for)
        self._written = self.commit
        """The next commit: what has been written since."""
        self._course: Course
        self._pending: dict[asyncio.Task[Results], RowBatch] = {}
        """Batches that are requested and not yet written, in their order."""
        self._unverified_row = 0
        """Rows before this one may have vectors of another model, unless they are committed."""
        self._commit_due_at = 0.0
        self._commit_s = _FIRST_COMMIT_S
        # One thread, so that commits reach the disk in order, also when one is no longer awaited.
        self._disk = ThreadPoolExecutor(1, "commit")

    async def run(self) -> None:
        """Embed all rows. Commits what is done, however the run ends, also when it is cancelled.

        Raises EmbedError when the server has another model than the unfinished run or the files of that are gone,
        FieldMissing when no row has a text and the input no field for it, RunEnded or OSError when rows are left.
        """
        telling = asyncio.create_task(self._keep_telling())
        try:
            await self._embed_all(await self._begin())
        finally:
            telling.cancel()
            self._disk.shutdown(wait=False)

    async def _keep_telling(self) -> None:
        """Say what the server is waited for, from the first failure on."""
        while True:
            if (message := self._messages.next(time.monotonic(), self._service.trouble)) is not None:
                self._line.say(message)
            await asyncio.sleep(_TELL_S)

    async def _begin(self) -> Generator[RowBatch, None, None]:
        """Connect to the server, and bring output and journal to where the run begins. Returns the rows left."""
        self._line.show(lambda: f"{self._label}waiting for {self._service.target}")
        options = self._options
        is_new, service = not self.commit.lengths, self._service
        if wants_its_own := not is_new and service.identity is None:
            service.identity = self._journal.model.get("identity")
        try:
            model, max_texts, max_bytes = await service.connect()
        except OtherIdentity as error:
            if not wants_its_own:
                raise
            raise EmbedError(f"the unfinished run had another model: {error}. --restart begins anew") from error
        if is_new:
            self._journal = replace(self._journal, model=asdict(model))
        elif why := model.why_other(self._journal.model):
            raise EmbedError(f"the unfinished run had another model: {why}. --restart begins anew")
        if model.columns:
            self._line.say(f"{self._label}writes {self._service.what}: {', '.join(model.columns)}")
        self._output.open(model.dim, model.columns)
        if is_new:  # the journal comes before the first byte: files without one are not this command's to cut off
            self._journal.save(journal_path(options.path))
        else:
            self._line.say(f"{self._label}goes on behind row {self.commit.position.row:,}")
        self._output.begin(self.commit.lengths)
        self.commit = self._written = replace(self.commit, lengths=self._output.lengths)
        self._commit_due_at = time.monotonic() + self._commit_s
        self._begin_course(0)
        limited = replace(
            options,
            batch_texts=min(options.batch_texts, max(1, (max_texts or 1 << 40) - self._service.num_probes)),
            batch_chars=min(options.batch_chars, max(1, (max_bytes or 1 << 40) // _BYTES_PER_CHAR)),
        )
        return read_batches(self._inputs, limited, self.commit.position, self._service.estimate)

    # --- rows ---------------------------------------------------------------------------------------------

    async def _embed_all(self, batches: Generator[RowBatch, None, None]) -> None:
        """Commits what is done if it is ended. Raises FieldMissing when no row has a text, RunEnded, OSError."""
        try:
            await self._work(batches)
            await self._save_commit(replace(self._written, is_complete=True))
        except ModelChanged:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, FieldMissing) and self._written.num_rejected == self._written.position.row:
                raise
            with suppress(Exception):  # if this is not possible soon, the last commit stands
                async with asyncio.timeout(_LAST_COMMIT_S):
                    await self._save_commit(self._written)
            if isinstance(error, EmbedError):
                raise RunEnded(str(error)) from error
            raise

    async def _work(self, batches: Generator[RowBatch, None, None]) -> None:
        """Embed and write all rows, and commit meanwhile."""
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
        """Whether another request may be under way."""
        num_running = sum(not task.done() for task in self._pending)
        return self._service.estimate.has_room(num_running, (batch.cost for batch in self._pending.values()))

    def _start(self, batch: RowBatch) -> None:
        """Send the request of `batch`."""
        if batch.first_row and batch.first_row == self._journal.commit.position.row:
            self._begin_course(batch.bytes_read)
        self._pending[asyncio.create_task(self._service.embed(batch.rows))] = batch

    def _write(self, batch: RowBatch, results: Results) -> None:
        """Raises RunEnded for the first row without results, with --on-bad-row fail."""
        if results.reasons and self._options.on_bad_row == "fail":
            index = min(results.reasons)
            raise RunEnded(f"{batch.source.name}, line {batch.rows[index].line}: {results.reasons[index]}")
        num_written, written = self._output.append(batch, results), self._written
        if not results.is_verified:
            self._unverified_row = batch.end.row
        self._written = replace(
            written,
            position=batch.end,
            lengths=self._output.lengths,
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
        """Raises ModelChanged, RunEnded, EmbedError, OSError. Side effects: replaces the journal."""
        began_at = time.monotonic()
        if commit != self.commit:
            if self._unverified_row > self.commit.position.row:
                await self._service.check_same_model()
            check_unchanged(self._inputs)
            await asyncio.get_running_loop().run_in_executor(self._disk, self._save, commit)
            self.commit = commit
            self._commit_s = min(2 * self._commit_s, _COMMIT_S)
        self._commit_due_at = max(began_at + self._commit_s, time.monotonic() + min(_COMMIT_PAUSE_S, self._commit_s))

    def _save(self, commit: Commit) -> None:
        self._output.sync()
        replace(self._journal, commit=commit).save(journal_path(self._options.path))


async def _next_batch(batches: Iterator[RowBatch]) -> RowBatch | None:
    """Read in a thread, as a pipe may block while responses have to be received and committed. None is the end."""
    return await in_thread(lambda: next(batches, None), "reader")
