"""A run from the first contact with the server on: is it the same model, where does it begin, how does it end.

Owns the wiring of feed, service and run, and the signals while they work. Called by `vecd.client.bulk.command`.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NamedTuple

from vecd.client.bulk.feed import BatchSize, Feed, read_batches
from vecd.client.bulk.inputs import Input
from vecd.client.bulk.journal import Commit, Journal, JournalError
from vecd.client.bulk.options import Options
from vecd.client.bulk.output import Output, journal_path
from vecd.client.bulk.progress import BulkLine, Course, bar
from vecd.client.bulk.rows import InputError, Position
from vecd.client.bulk.run import BadRow, BulkRun, ModelChanged
from vecd.client.bulk.service import Limits, Model, NotServed, ServerLost, Service
from vecd.client.connection import Target

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BYTES_PER_CHAR = 6
"""Of a character in JSON, at most."""


class Outcome(NamedTuple):
    """How a run ended: whole, if there is neither signal nor error."""

    commit: Commit
    """What is done."""
    signal_number: int = 0
    error: Exception | None = None


class Session:
    """`run` once."""

    def __init__(
        self,
        options: Options,
        inputs: Sequence[Input],
        output: Output,
        journal: Journal | None,
        line: BulkLine,
    ) -> None:
        """`journal`: of the run to go on with."""
        self._options = options
        self._inputs = inputs
        self._output = output
        self._journal = journal
        self._line = line
        self._run: BulkRun | None = None
        self._signal_number = 0
        self._commit = Commit(Position()) if journal is None else journal.commit

    async def run(self, target: Target, why_gone: Callable[[], str | None]) -> Outcome:
        """Raises JournalError when the server's model is not the one to go on with, PartError, OSError.

        Side effects: SIGINT and SIGTERM end the run in order; the second one does so at once.
        """
        service = Service(target, self._options.asked, why_gone)
        if self._options.concurrency is not None:
            service.pace.fix(self._options.concurrency)
        self._handle_signals()
        try:
            await self._meet_and_run(service)
        except asyncio.CancelledError:
            if not self._signal_number:
                raise
        except (BadRow, ModelChanged, ServerLost, NotServed, InputError, OSError) as error:
            return Outcome(self._done, self._signal_number, error)
        finally:
            _drop_signal_handlers()
            service.close()
        return Outcome(self._done, self._signal_number)

    @property
    def _done(self) -> Commit:
        return self._commit if self._run is None else self._run.commit

    def _handle_signals(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            self._signal_number = number
            _drop_signal_handlers()
            if self._run is not None:
                self._run.stop()
            else:
                task.cancel()

        for number in _SIGNALS:
            loop.add_signal_handler(number, stop, number)

    async def _meet_and_run(self, service: Service) -> None:
        self._line.show(lambda: "waiting for the server")
        model, limits = await service.meet()
        journal = self._begin(model)
        options = self._options
        run = BulkRun(
            journal, journal_path(options.out), self._inputs, self._output, service, options.shape.keep, self._show
        )
        self._run = run
        size = _within(options.size, limits)
        feed = Feed(read_batches(self._inputs, options.shape, size, journal.commit.position))
        await run.run(feed)

    def _begin(self, model: Model) -> Journal:
        """Bring output and journal to where the run begins."""
        options, old = self._options, self._journal
        if old is not None and (why := model.why_other(old.model)):
            raise JournalError(f"the unfinished run had another model: {why}. --restart begins anew")
        self._output.choose_form(
            options.output_format, model.dim, options.asked.dtype, options.shape.keep, on_bad_row=options.on_bad_row
        )
        if old is not None and old.commit.lengths:
            self._output.go_on(old.commit.lengths)
            self._line.say(f"goes on behind row {old.commit.position.row:,}")
            return Journal(old.asked, options.on_bad_row, old.inputs, old.model, old.commit)
        # The journal comes before the first byte: what it does not know of is not ours to cut off.
        inputs = [each.identity() for each in self._inputs]
        journal = Journal(options.fields(), options.on_bad_row, inputs, asdict(model), Commit(Position()))
        journal.save(journal_path(options.out))
        self._output.begin()
        return journal.with_commit(Commit(Position(), self._output.lengths))

    def _show(self, course: Course, trouble: str) -> None:
        def describe() -> str:
            share = course.share
            told = course.describe(time.monotonic())
            waits = f", waiting: {trouble}" if trouble else ""
            return f"{told}{waits}" if share is None else f"{bar(share)} {told}{waits}"

        self._line.show(describe)


def _drop_signal_handlers() -> None:
    """A signal does again what it does everywhere. Not left to the loop's end: uvloop would keep them for ever."""
    for number in _SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)


def _within(size: BatchSize, limits: Limits) -> BatchSize:
    """No more than the server takes in a request."""
    max_texts, max_chars = size.max_texts, size.max_chars
    if limits.max_inputs is not None:
        max_texts = min(max_texts, limits.max_inputs)
    if limits.max_body_bytes is not None:
        max_chars = max(1, min(max_chars, limits.max_body_bytes // _BYTES_PER_CHAR))
    return BatchSize(max_texts, max_chars)
