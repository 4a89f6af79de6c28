"""The output: .npy, .jsonl or .parquet, with the numbers of its rows and the rejected rows beside it.

Owns the files, their lock, what is written for a row, the journal, and the making of the final files, which get their
names only when they are complete.

    OUT.part                     dense vectors end to end (.npy: behind a header), or JSON lines
    OUT.rows.npy.part            for .npy: the number of each row
    OUT.fields.part              for .parquet of dense vectors: a JSON line a row with all but the vector
    OUT.rejected.jsonl.part      a JSON line for each row without results
    OUT.journal                  what of them is complete, and of what it is

The journal is replaced as a whole, by rename, after all that it describes is on the disk. So it is always true: rows
that are in the files, but not in the journal, are cut off when the run is resumed. In the end the journal says that the
rows are complete, the files are renamed, OUT last, and the journal is removed. Each of these steps may be repeated.
"""

import fcntl
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson

from vecd.base.files import JsonObject, dump, load
from vecd.base.flags import flag_name
from vecd.client.embed.inputs import InputSource, RowBatch
from vecd.client.embed.options import EmbedError, EmbedOptions, OutputLocked, RunEnded
from vecd.client.embed.rows import Position
from vecd.client.embed.service import RunModel

# --- the journal ----------------------------------------------------------------------------------------------

_VERSION, _VERSIONS_READ = 4, (2, 3, 4)
"""Version 2 names the model by more than its identity; 2 and 3 count tokens, and no bytes."""
_FACTS = {"num_bytes": "size", "mtime_ns": "time of change", "head": "beginning"}


@dataclass(frozen=True, slots=True)
class Commit:
    position: Position = field(default_factory=Position)
    lengths: tuple[int, ...] = ()
    """Bytes of each output file, in the order of `OutputFiles`."""
    num_written: int = 0
    num_rejected: int = 0
    is_complete: bool = False
    """All rows are in the files; only the final names are missing."""


@dataclass(frozen=True, slots=True)
class Journal:
    asked: JsonObject
    """The settings that change rows or vectors. A resumed run must have the same."""
    on_bad_row: str
    inputs: list[JsonObject]
    """The `journal_fields` of each `vecd.client.embed.inputs.InputSource`."""
    model: JsonObject = field(default_factory=dict)
    """The fields of `vecd.client.embed.service.RunModel`; empty before the run has met its server."""
    commit: Commit = field(default_factory=Commit)

    def save(self, path: Path) -> None:
        draft = path.with_name(path.name + ".new")
        with _named(path):
            with draft.open("wb") as file:
                file.write(orjson.dumps({"version": _VERSION, **dump(self)}, option=orjson.OPT_INDENT_2))
                file.flush()
                os.fsync(file.fileno())
            draft.rename(path)
        _sync_folder(path)

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """None when there is none. Raises EmbedError when it cannot be read."""
        try:
            fields = orjson.loads(path.read_bytes())
            if fields.pop("version") not in _VERSIONS_READ:
                raise EmbedError(f"{path} is of another version of vecd: --restart begins anew")
            fields["commit"].pop("num_tokens", None)
            journal: Self = load(cls, fields)
            return journal
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise EmbedError(f"{path} cannot be read ({type(error).__name__}): --restart begins anew") from error

    def difference(self, other: Self) -> str:
        """How `other`, which would resume this run, differs from it; "" when it does not."""
        for name in other.asked.keys() | self.asked.keys():
            if other.asked.get(name) != self.asked.get(name):
                return f"{flag_name(name)} was {self.asked.get(name)!r}, is {other.asked.get(name)!r}"
        if other.on_bad_row != self.on_bad_row and self.commit.num_rejected:
            return f"--on-bad-row was {self.on_bad_row}, is {other.on_bad_row}, and there have been bad rows"
        if len(other.inputs) != len(self.inputs):
            return f"it had {len(self.inputs)} inputs, now there are {len(other.inputs)}"
        for was, now in zip(self.inputs, other.inputs, strict=True):
            for name, value in was.items():
                if value != now[name]:
                    return f"{now['path']} has changed: its {_FACTS.get(name, name)} is another"
        return ""


def _sync_folder(path: Path) -> None:
    """Make durable what was created, renamed or removed beside `path`."""
    with suppress(OSError):  # not every file system can
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Give the errors of a file its name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


# --- the files ------------------------------------------------------------------------------------------------

_SUFFIXES = {
    "npy": (".rows.npy.part", ".rejected.jsonl.part"),
    "jsonl": (".rejected.jsonl.part",),
    "parquet": (".fields.part", ".rejected.jsonl.part"),
}
"""By format, the suffixes of the files beside OUT.part. Their order is that of the lengths in the journal."""


class OutputFile:
    """A file of an unfinished output: it only grows, and is cut back to the length in the journal.

    Raises OSError, with its name, when it cannot be opened or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.num_bytes = os.fstat(self._fd).st_size

    def lock(self) -> bool:
        """False when another process has the lock, or has just renamed the file. Lasts until `close`."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except (BlockingIOError, FileNotFoundError):
            return False

    def cut(self, num_bytes: int) -> None:
        """Cut the file to `num_bytes`. Raises EmbedError when it is shorter."""
        if self.num_bytes < num_bytes:
            raise EmbedError(
                f"{self.path} has {self.num_bytes:,} bytes, the journal knows of {num_bytes:,}: --restart begins anew"
            )
        os.ftruncate(self._fd, num_bytes)
        self.num_bytes = num_bytes

    def check(self) -> None:
        """Raises RunEnded when the file is not as long as this process has made it, as happens when another one writes
        it, on file systems whose locks are not shared between machines."""
        with _named(self.path):
            found = os.fstat(self._fd).st_size
        if found != self.num_bytes:
            raise RunEnded(
                f"{self.path} has {found:,} bytes where this run wrote {self.num_bytes:,}: another run writes it"
            )

    def write(self, data: bytes | memoryview, at: int) -> None:
        view = memoryview(data)
        with _named(self.path):
            while view:
                num_written = os.pwrite(self._fd, view, at)
                at, view = at + num_written, view[num_written:]
                self.num_bytes = max(self.num_bytes, at)

    def sync(self) -> None:
        with _named(self.path):
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class OutputFiles:
    """One output, locked: `resume`, then `begin`, `append` and `save` unless it `is_complete`, `finish`, `forget`."""

    def __init__(self, options: EmbedOptions) -> None:
        """Raises OutputLocked when another run has them open, OSError when they cannot be created."""
        self._options, self._journal_path = options, journal_path(options.path)
        self._main = OutputFile(_beside(options.path, ".part"))
        if not self._main.lock():
            self._main.close()
            raise OutputLocked(f"{options.path} is being made by another vecd embed")
        self._files = [self._main]
        self.journal: Journal
        """Its commit is on the disk."""
        self.written: Commit
        """The next commit: what is in the files."""
        self.how = "the run before was complete"
        """How its rows were made, for the last line."""

    def resume(self, inputs: Sequence[InputSource]) -> None:
        """Find where the run begins. Raises EmbedError when something else is in the place of the output."""
        options, path = self._options, self._journal_path
        journal = Journal(
            options.journal_fields(), options.on_bad_row or "blank", [each.journal_fields() for each in inputs]
        )
        if options.restart:
            path.unlink(missing_ok=True)
        elif (old := Journal.load(path)) is None:
            if options.path.exists():
                raise EmbedError(f"{options.path} exists; --restart replaces it")
            if self._main.num_bytes:
                raise EmbedError(f"{self._main.path} exists, and nothing tells what it is; --restart replaces it")
        elif old.commit.position.row or old.commit.is_complete:  # else nothing was done: the run begins anew
            if difference := old.difference(journal):
                raise EmbedError(
                    f"the unfinished run was another one: {difference}. Run it as it was, or begin anew by --restart"
                )
            journal = replace(old, on_bad_row=journal.on_bad_row)
        self.journal, self.written = journal, journal.commit

    @property
    def is_complete(self) -> bool:
        return self.journal.commit.is_complete

    @property
    def is_begun(self) -> bool:
        return bool(self.written.lengths)

    @property
    def _columns(self) -> Mapping[str, str]:
        """As in `vecd.client.embed.service`; empty for dense vectors."""
        return self.journal.model.get("columns") or {}

    def begin(self, model: RunModel) -> None:
        """Continue behind the last commit, or begin with no rows. Raises EmbedError when `model` is another than that
        of the commit, or a file is shorter. Side effects: cuts off what an earlier run has written behind."""
        commit = self.journal.commit
        if not self.is_begun:
            self.journal = replace(self.journal, model=model._asdict())
        elif why := model.why_other(self.journal.model):
            raise EmbedError(f"the unfinished run had another model: {why}. --restart begins anew")
        self._open()
        if not self.is_begun:  # the journal comes before the first byte: files without one are not ours to cut off
            self.journal.save(self._journal_path)
        for file, num_bytes in zip(self._files, commit.lengths or [0] * len(self._files), strict=True):
            file.cut(num_bytes)
        if not self.is_begun:
            self._write_headers(0)
        self.written = replace(commit, lengths=tuple(file.num_bytes for file in self._files))
        self.journal = replace(self.journal, commit=self.written)

    def _open(self) -> None:
        suffixes = _SUFFIXES[self._options.output_format]
        self._files += [OutputFile(_beside(self._options.path, suffix)) for suffix in suffixes]

    def append(self, batch: RowBatch) -> None:
        """Write the rows of `batch`, and describe the rejected ones. Raises OSError, and RunEnded also for the first
        row without results, with --on-bad-row fail."""
        on_bad_row, reasons = self._options.on_bad_row, sorted(batch.reasons.items())
        if reasons and on_bad_row == "fail":
            index, reason = reasons[0]
            raise RunEnded(f"{batch.source.name}, line {batch.rows[index].line}: {reason}")
        indices: Sequence[int] = range(len(batch.rows))
        if reasons and on_bad_row == "skip":
            indices = [index for index in indices if index not in batch.reasons]
        rejected = b"".join(self._describe_rejected(batch, index, reason) for index, reason in reasons)
        for file, piece in zip(self._files, (*self._render(batch, indices), rejected), strict=True):
            file.check()
            file.write(piece, file.num_bytes)
        written = self.written
        self.written = Commit(
            batch.end,
            tuple(file.num_bytes for file in self._files),
            written.num_written + len(indices),
            written.num_rejected + len(reasons),
        )

    def _render(self, batch: RowBatch, indices: Sequence[int]) -> tuple[bytes | memoryview, ...]:
        """The bytes to append to each file for the rows with these indices."""
        output_format, rows = self._options.output_format, batch.results
        if output_format == "jsonl" or not batch.has_vectors:
            lines = b"".join(self._line(batch, index, batch.columns(index)) for index in indices)
            return (lines, b"") if output_format == "parquet" else (lines,)
        if len(indices) < len(rows):
            rows = rows[indices]
        raw = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        if output_format == "npy":
            return raw, (np.array(indices, np.int64) + batch.first_row).tobytes()
        return raw, b"".join(self._line(batch, index, {"embedding": index not in batch.reasons}) for index in indices)

    def _line(self, batch: RowBatch, index: int, found: Mapping[str, Any]) -> bytes:
        columns = {name: found.get(name) for name in self._columns or ("embedding",)}
        return _json_line({"row": batch.first_row + index, **self._kept(batch, index), **columns})

    def _describe_rejected(self, batch: RowBatch, index: int, reason: str) -> bytes:
        row = batch.rows[index]
        line = {"row": batch.first_row + index, "file": batch.source.origin, "line": row.line, "reason": reason}
        return _json_line({**line, "kept": self._kept(batch, index)} if self._options.keep else line)

    def _kept(self, batch: RowBatch, index: int) -> JsonObject:
        kept = batch.rows[index].kept
        return dict(zip(self._options.keep, kept or [None] * len(self._options.keep), strict=True))

    def check(self) -> None:
        """Raises RunEnded when another process writes the files, too."""
        for file in self._files:
            file.check()

    def save(self, commit: Commit) -> None:
        """Bring all that was appended, and the journal with `commit`, to the disk. Raises OSError. May be called from
        a thread."""
        for file in self._files:
            file.sync()
        self.journal = replace(self.journal, commit=commit)
        self.journal.save(self._journal_path)

    def finish(self) -> str:
        """Give the complete files their final names. Returns what is said about them. May be repeated by another
        process if the first one died, before `forget`.

        Side effects: removes the other files. Raises OSError, EmbedError, RunEnded.
        """
        if len(self._files) == 1:
            self._open()
        self.check()
        if self._main.num_bytes >= self.journal.commit.lengths[0]:
            self._place()
        elif not self._options.path.exists():
            raise EmbedError(f"{self._options.path} was complete, and is gone: --restart begins anew")
        for file in self._files:
            file.path.unlink(missing_ok=True)
        return f"{self.journal.commit.num_written:,} rows ({self.how})"

    def _place(self) -> None:
        left = []
        for file, num_bytes in zip(self._files, self.journal.commit.lengths, strict=True):
            # One that is shorter already has its final name: another process has died after renaming it.
            if file.num_bytes >= num_bytes:
                file.cut(num_bytes)
                left.append(file)
        final = self._make_final()
        for file in self._files:
            file.sync()
        for file in left[1:]:
            target = file.path.with_suffix("")
            is_wanted = {".npy": self._options.on_bad_row == "skip", ".jsonl": file.num_bytes > 0}.get(target.suffix)
            if is_wanted:
                file.path.rename(target)
            elif is_wanted is False:
                target.unlink(missing_ok=True)  # of an earlier output
        final.rename(self._options.path)
        _sync_folder(self._options.path)

    def _make_final(self) -> Path:
        options, columns, main = self._options, self._columns, self._main.path
        self._write_headers(self.journal.commit.num_written)
        if options.output_format != "parquet":
            return main
        from vecd.client.embed.parquet import write_parquet

        target = OutputFile(_beside(options.path, ".parquet.part"))
        lines, vectors = (main, None) if columns else (self._files[1].path, main)
        try:
            columns = columns or {"embedding": f"vector {self.journal.model['dim']}"}
            write_parquet(lines, target.path, options.keep, columns, options.dtype, vectors)
            target.sync()
        finally:
            target.close()
        return target.path

    def _write_headers(self, num_rows: int) -> None:
        if self._options.output_format == "npy":
            self._main.write(npy_header(self._options.dtype, (num_rows, self.journal.model["dim"])), 0)
            self._files[1].write(npy_header("int64", (num_rows,)), 0)

    def describe_rejected(self, out: str) -> str:
        """What has become of rows without results, if there are any. `out`: where the output is in the end."""
        num, options = self.written.num_rejected, self._options
        if not num:
            return ""
        is_one = num == 1
        rows, verb = ("1 row", "is") if is_one else (f"{num:,} rows", "are")
        if options.on_bad_row == "skip":
            effect = f"{'it' if is_one else 'they'} {verb} left out"
        else:
            blank = "NaN" if options.output_format == "npy" else "null"
            what = "results are" if self._columns else f"vector{'' if is_one else 's'} {verb}"
            effect = f"{'its' if is_one else 'their'} {what} {blank}"
        return f"{rows} could not be embedded; {effect}. The reasons are in {out}.rejected.jsonl"

    def forget(self) -> None:
        self._journal_path.unlink(missing_ok=True)

    def discard(self) -> None:
        self.forget()
        for file in self._files:
            file.cut(0)

    def close(self) -> None:
        """Unlock. Side effects: removes the files of a run that never began."""
        is_begun = self._main.num_bytes or self._journal_path.exists()
        for file in reversed(self._files):
            if not is_begun:
                with suppress(OSError):
                    file.path.unlink(missing_ok=True)
            file.close()


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """A header whose length does not depend on the number of rows: numpy leaves room for it to grow."""
    file, descr = io.BytesIO(), np.dtype(dtype).newbyteorder("<").str
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def _json_line(value: Any) -> bytes:
    return orjson.dumps(
        value, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
    )


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(out.name + suffix)


def beside_final(out: Path) -> list[Path]:
    return [_beside(out, suffix) for suffix in (".rows.npy", ".rejected.jsonl")]


def journal_path(out: Path) -> Path:
    return _beside(out, ".journal")
