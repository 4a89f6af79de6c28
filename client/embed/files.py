"""The output: .npy, .jsonl or .parquet, with the numbers of its rows and the rejected rows beside it.

Owns the files, their lock, what is written for a row, and the making of the final files, which get their names only
when they are complete.

    OUT.part                     dense vectors end to end (.npy: behind a header), or JSON lines
    OUT.rows.npy.part            for .npy: the number of each row
    OUT.fields.part              for .parquet of dense vectors: a JSON line a row with all but the vector
    OUT.rejected.jsonl.part      a JSON line for each row without results
    OUT.journal                  `vecd.client.embed.files`

The files are written before the journal, so it never describes what is not there. In the end the journal says that the
rows are complete, the files are renamed, OUT last, and the journal is removed. Each of these steps may be repeated.
"""

import fcntl
import io
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson
from numpy.typing import NDArray

from vecd.base.files import JsonObject, dump, load
from vecd.base.flags import flag_name
from vecd.client.embed.inputs import RowBatch
from vecd.client.embed.options import EmbedError, EmbedOptions, OutputLocked, RunEnded
from vecd.client.embed.rows import Position
from vecd.client.embed.service import Results

# The journal of a run is replaced as a whole, by rename, after all that it describes is on the disk. So it is always
# true: rows that are in the output files, but not in the journal, are cut off when the run is resumed.

_VERSION, _VERSIONS_READ = 3, (2, 3)
"""The second names the model by more than its identity."""
_FACTS = {"num_bytes": "size", "mtime_ns": "time of change", "head": "beginning"}


@dataclass(frozen=True, slots=True)
class Commit:
    position: Position = field(default_factory=Position)
    lengths: tuple[int, ...] = ()
    """Bytes of each output file, in the order of `OutputFiles`."""
    num_written: int = 0
    num_rejected: int = 0
    num_tokens: int = 0
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
        try:
            with draft.open("wb") as file:
                file.write(orjson.dumps({"version": _VERSION, **dump(self)}, option=orjson.OPT_INDENT_2))
                file.flush()
                os.fsync(file.fileno())
            draft.rename(path)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        sync_folder(path)

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """None when there is none. Raises EmbedError when it cannot be read."""
        try:
            fields = orjson.loads(path.read_bytes())
            if fields.pop("version") not in _VERSIONS_READ:
                raise EmbedError(f"{path} is of another version of vecd: --restart begins anew")
            journal: Self = load(cls, fields)
            return journal
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise EmbedError(f"{path} cannot be read ({type(error).__name__}): --restart begins anew") from error

    def check_same(self, other: Self) -> None:
        """Raises EmbedError when `other`, which would resume this run, differs from it."""
        if difference := self._difference(other):
            raise EmbedError(
                f"the unfinished run was another one: {difference}. Run it as it was, or begin anew by --restart"
            )

    def _difference(self, other: Self) -> str:
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


def sync_folder(path: Path) -> None:
    """Make durable what was created, renamed or removed beside `path`."""
    with suppress(OSError):  # not every file system can
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


_SUFFIXES = {
    "npy": (".rows.npy.part", ".rejected.jsonl.part"),
    "jsonl": (".rejected.jsonl.part",),
    "parquet": (".fields.part", ".rejected.jsonl.part"),
}
"""By format, the suffixes of the files beside OUT.part. Their order is that of the lengths in the journal."""


class OutputFile:
    """A file of an unfinished output: it only grows, and is cut back to the length in the journal.

    Raises OSError, with its name, when it cannot be opened or written; RunEnded when another process writes it too, as
    happens on file systems whose locks are not shared between machines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.num_bytes = os.fstat(self._fd).st_size
        self._growing = threading.Lock()  # the file and `num_bytes`, for `check` in another thread

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
        """Raises RunEnded when the file is not as long as this process has made it."""
        with self._growing, self._named():
            self._check()

    def _check(self) -> None:
        if (found := os.fstat(self._fd).st_size) != self.num_bytes:
            raise RunEnded(
                f"{self.path} has {found:,} bytes where this run wrote {self.num_bytes:,}: another run writes it"
            )

    def append(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        with self._growing, self._named():
            self._check()
            while view:
                num_written = os.pwrite(self._fd, view, self.num_bytes)
                self.num_bytes += num_written
                view = view[num_written:]

    def overwrite(self, data: bytes) -> None:
        with self._growing, self._named():
            os.pwrite(self._fd, data, 0)
            self.num_bytes = max(self.num_bytes, len(data))

    def sync(self) -> None:
        with self._named():
            os.fsync(self._fd)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """May be repeated."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class OutputFiles:
    """The files of one output, locked. `open` and `begin`, then `append` and `sync`, and `finish` in the end."""

    def __init__(self, options: EmbedOptions) -> None:
        """Raises OutputLocked when another run has them open, OSError when they cannot be created."""
        self._options = options
        self._main = OutputFile(_beside(options.path, ".part"))
        if not self._main.lock():
            self._main.close()
            raise OutputLocked(f"{options.path} is being made by another vecd embed")
        self._files = [self._main]
        self._columns: Mapping[str, str] = {}

    @property
    def is_new(self) -> bool:
        return self._main.num_bytes == 0

    @property
    def has_columns(self) -> bool:
        """Whether rows have results in columns, not a dense vector. To be read after `open`."""
        return bool(self._columns)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(file.num_bytes for file in self._files)

    def open(self, dim: int, columns: Mapping[str, str] | None = None) -> None:
        """Open the other files, for vectors of `dim` dimensions or, if there are any, for results in these `columns`,
        which are as in `vecd.client.embed.service`. Side effects: creates them."""
        self._dim, self._columns = dim, columns or {}
        suffixes = _SUFFIXES[self._options.output_format]
        self._files += [OutputFile(_beside(self._options.path, suffix)) for suffix in suffixes]

    def begin(self, lengths: Sequence[int]) -> None:
        """Continue behind `lengths` bytes of each file, or begin with no rows if there are none.

        Side effects: cuts off what an earlier run has written behind. Raises EmbedError when a file is shorter.
        """
        for file, num_bytes in zip(self._files, lengths or [0] * len(self._files), strict=True):
            file.cut(num_bytes)
        if not lengths:
            self._write_headers(0)

    def append(self, batch: RowBatch, results: Results) -> int:
        """Write the rows of `batch`, and describe the rejected ones. Returns the number of rows written.

        Raises OSError, RunEnded.
        """
        written = np.arange(len(batch.rows))
        if self._options.on_bad_row == "skip":
            written = np.delete(written, list(results.reasons))
        rejected = b"".join(
            self._describe_rejected(batch, index, why) for index, why in sorted(results.reasons.items())
        )
        for file, piece in zip(self._files, (*self._render(batch, results, written), rejected), strict=True):
            file.append(piece)
        return len(written)

    def _render(
        self, batch: RowBatch, results: Results, written: NDArray[np.intp]
    ) -> tuple[bytes] | tuple[bytes | memoryview, bytes]:
        """The bytes to append to each file for the rows with the indices `written`."""
        output_format = self._options.output_format
        if output_format == "jsonl" or not results.are_vectors:
            lines = b"".join(self._line(batch, index, results.record(index)) for index in written.tolist())
            return (lines, b"") if output_format == "parquet" else (lines,)
        matrix = results.rows if len(written) == len(batch.rows) else results.rows[written]
        raw = np.ascontiguousarray(matrix).reshape(-1).view(np.uint8).data
        if output_format == "npy":
            return raw, (written.astype(np.int64) + batch.first_row).tobytes()
        have = [self._line(batch, index, {"embedding": index not in results.reasons}) for index in written.tolist()]
        return raw, b"".join(have)

    def _line(self, batch: RowBatch, index: int, record: Mapping[str, Any]) -> bytes:
        columns = {name: record.get(name) for name in self._columns or ("embedding",)}
        return _json_line({"row": batch.first_row + index, **self._kept(batch, index), **columns})

    def _describe_rejected(self, batch: RowBatch, index: int, reason: str) -> bytes:
        row = batch.rows[index]
        line = {"row": batch.first_row + index, "file": batch.source.origin, "line": row.line, "reason": reason}
        return _json_line({**line, "kept": self._kept(batch, index)} if self._options.keep else line)

    def _kept(self, batch: RowBatch, index: int) -> JsonObject:
        return dict(zip_longest(self._options.keep, batch.rows[index].kept))

    def sync(self) -> None:
        """Bring all that was appended to the disk. Raises OSError, RunEnded. May be called from a thread."""
        for file in self._files:
            file.check()
            file.sync()

    def finish(self, lengths: Sequence[int], num_rows: int) -> None:
        """Give the complete files their final names. May be repeated by another process if the first one died.

        Side effects: removes the other files. Raises OSError, EmbedError, RunEnded.
        """
        for file in self._files:
            file.check()
        if self._main.num_bytes >= lengths[0]:
            self._place(lengths, num_rows)
        elif not self._options.path.exists():
            raise EmbedError(f"{self._options.path} was complete, and is gone: --restart begins anew")
        for file in self._files:
            file.path.unlink(missing_ok=True)

    def _place(self, lengths: Sequence[int], num_rows: int) -> None:
        # A file that is shorter than it was already has its final name: another process has died after renaming it.
        placed = [file for file, num_bytes in zip(self._files, lengths, strict=True) if file.num_bytes < num_bytes]
        for file, num_bytes in zip(self._files, lengths, strict=True):
            file.cut(min(num_bytes, file.num_bytes))
        final = self._make_final(num_rows)
        self.sync()
        for file in self._files[1:]:
            target = file.path.with_suffix("")
            is_wanted = {".npy": self._options.on_bad_row == "skip", ".jsonl": file.num_bytes > 0}.get(target.suffix)
            if is_wanted and file not in placed:
                file.path.rename(target)
            elif is_wanted is False and file not in placed:
                target.unlink(missing_ok=True)  # of an earlier output
        final.rename(self._options.path)
        sync_folder(self._options.path)

    def _make_final(self, num_rows: int) -> Path:
        options = self._options
        self._write_headers(num_rows)
        if options.output_format != "parquet":
            return self._main.path
        from vecd.client.embed.parquet import write_parquet

        target = OutputFile(_beside(options.path, ".parquet.part"))
        try:
            lines, vectors = (self._main.path, None) if self._columns else (self._files[1].path, self._main.path)
            columns = self._columns or {"embedding": f"vector {self._dim}"}
            write_parquet(lines, target.path, options.keep, columns, options.dtype, vectors)
            target.sync()
        finally:
            target.close()
        return target.path

    def _write_headers(self, num_rows: int) -> None:
        if self._options.output_format == "npy":
            self._main.overwrite(npy_header(self._options.dtype, (num_rows, self._dim)))
            self._files[1].overwrite(npy_header("int64", (num_rows,)))

    def discard(self) -> None:
        for file in self._files:
            file.cut(0)

    def close(self) -> None:
        """Unlock. May be repeated. Side effects: removes the files of a run that never began."""
        for file in reversed(self._files):
            if self.is_new and not journal_path(self._options.path).exists():
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
