"""One output from its lock to its final files: a run that is begun, resumed, or found complete.

Owns the decision between these, and the last line about an output. Starts no server. Called by
`vecd.client.bulk.command` and, for each of many outputs, by `vecd.client.bulk.folder`.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from vecd.client.bulk.errors import EmbedError, FieldMissing
from vecd.client.bulk.inputs import InputSource
from vecd.client.bulk.journal import Commit, Journal
from vecd.client.bulk.options import EmbedOptions
from vecd.client.bulk.output import OutputFiles, journal_path
from vecd.client.bulk.progress import in_words
from vecd.client.bulk.run import EmbedRun
from vecd.client.bulk.service import EmbeddingService
from vecd.client.status_line import StatusLine


class OneOutput:
    """`embed` unless it `is_complete`, and `finish`."""

    def __init__(self, options: EmbedOptions, inputs: Sequence[InputSource], files: OutputFiles) -> None:
        """`files` are locked. Raises EmbedError when something else is in the place of the output."""
        self._options = options
        self._inputs = inputs
        self._files = files
        self._how = "the run before was complete"
        self._journal = self._find_journal()
        self.commit: Commit = self._journal.commit
        """What is done."""

    @property
    def is_complete(self) -> bool:
        """Whether only the final names are missing."""
        return self.commit.is_complete

    def _find_journal(self) -> Journal:
        """That of the run to resume, or a new one. Raises EmbedError."""
        options = self._options
        path = journal_path(options.path)
        inputs = [each.journal_fields() for each in self._inputs]
        new = Journal(options.journal_fields(), options.on_bad_row, inputs)
        if options.restart:
            path.unlink(missing_ok=True)
            return new
        old = Journal.load(path)
        if old is not None:
            if not old.commit.position.row and not old.commit.is_complete:
                return new  # nothing was done: the run begins anew, whatever has changed
            old.check_same(new)
            return replace(old, on_bad_row=options.on_bad_row)
        if options.path.exists():
            raise EmbedError(f"{options.path} exists; --restart replaces it")
        if not self._files.is_new:
            raise EmbedError(f"{options.path}.part exists, and nothing tells what it is; --restart replaces it")
        return new

    async def embed(self, service: EmbeddingService, line: StatusLine, label: str = "") -> None:
        """Embed the rows that are left. Raises as `EmbedRun.run`. Side effects: `commit` is what is done, however it
        ends."""
        began_at = time.monotonic()
        run = EmbedRun(self._options, self._inputs, self._files, self._journal, service, line, label)
        try:
            await run.run()
        except FieldMissing:  # no row had a vector
            journal_path(self._options.path).unlink(missing_ok=True)
            self._files.discard()
            raise
        finally:
            self.commit = run.commit
        took_s = time.monotonic() - began_at
        num_rows = self.commit.position.row - self._journal.commit.position.row
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
        """Remove the journal: what is complete is in its place."""
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
