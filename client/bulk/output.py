"""The output: .npy, .jsonl or .parquet, with the numbers of its rows and the rejected rows beside it.

Owns what is written for a row, and the making of the final files, which get their names only when they are complete.
Called by `vecd.client.bulk.run` and `vecd.client.bulk.command`.

    OUT.part                     vectors end to end (.npy: behind a header), or JSON lines
    OUT.rows.npy.part            for .npy: the number of each row
    OUT.fields.part              for .parquet: a JSON line a row with its number and the kept values
    OUT.rejected.jsonl.part      a JSON line for each row without a vector
    OUT.journal                  `vecd.client.bulk.journal`

The files are written before the journal, so it never describes what is not there. In the end the journal says that the
rows are complete, the files are renamed, OUT last, and the journal is removed. Each of these steps may be repeated.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from vecd.client.bulk.journal import sync_folder
from vecd.client.bulk.output_file import OutputError, OutputFile
from vecd.client.bulk.rows import RowBatch

FORMATS = ("npy", "jsonl", "parquet")
_NPY_HEADER_BYTES = 128
_NPY_VERSION = b"\x93NUMPY\x01\x00"


class EmbeddedBatch(NamedTuple):
    """A batch with its vectors."""

    batch: RowBatch
    vectors: NDArray[Any]
    """[rows, dimensions]; NaN in rows without a vector."""
    reasons: dict[int, str]
    """Why a row has no vector, by its index in the batch."""


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """A header whose length does not depend on the shape. Source: numpy.lib.format, version 1.0."""
    fields = f"{{'descr': {np.dtype(dtype).newbyteorder('<').str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    num_bytes = _NPY_HEADER_BYTES - len(_NPY_VERSION) - 2
    return _NPY_VERSION + num_bytes.to_bytes(2, "little") + fields.ljust(num_bytes - 1).encode() + b"\n"


class _JsonLines:
    """Writes JSON lines. Base of the other formats."""

    suffixes: tuple[str, ...] = (".part",)
    """The suffixes of its files, behind OUT's name; the first file becomes OUT."""

    def __init__(self, keep: Sequence[str], dim: int, dtype: str) -> None:
        self._keep = tuple(keep)
        self._dim = dim
        self._dtype = dtype

    def begin(self, files: Sequence[OutputFile]) -> None:
        """Write what comes before the first row."""

    def render(self, done: EmbeddedBatch, written: NDArray[np.intp]) -> tuple[bytes | memoryview, ...]:
        """The bytes to append to each file for the rows with the indices `written`."""
        batch, lines = done.batch, []
        for index in written.tolist():
            kept = dict(zip(self._keep, batch.rows[index].kept, strict=False))
            embedding = None if index in done.reasons else done.vectors[index]
            lines.append(_json_line({"row": batch.first_row + index, **kept, "embedding": embedding}))
        return (b"".join(lines),)

    def finish(self, out: Path, files: Sequence[OutputFile], num_rows: int) -> Path:
        """Returns the file that is to be renamed to OUT."""
        return files[0].path


class _Npy(_JsonLines):
    suffixes = (".part", ".rows.npy.part")

    def begin(self, files: Sequence[OutputFile]) -> None:
        for file, header in zip(files, self._headers(0), strict=False):
            file.append(header)

    def render(self, done: EmbeddedBatch, written: NDArray[np.intp]) -> tuple[bytes | memoryview, ...]:
        vectors = done.vectors if len(written) == len(done.vectors) else done.vectors[written]
        numbers = written.astype(np.int64) + done.batch.first_row
        return np.ascontiguousarray(vectors).reshape(-1).view(np.uint8).data, numbers.tobytes()

    def finish(self, out: Path, files: Sequence[OutputFile], num_rows: int) -> Path:
        for file, header in zip(files, self._headers(num_rows), strict=False):
            file.overwrite(header)
        return files[0].path

    def _headers(self, num_rows: int) -> tuple[bytes, bytes]:
        return npy_header(self._dtype, (num_rows, self._dim)), npy_header("int64", (num_rows,))


class _Parquet(_JsonLines):
    suffixes = (".part", ".fields.part")

    def render(self, done: EmbeddedBatch, written: NDArray[np.intp]) -> tuple[bytes | memoryview, ...]:
        batch = done.batch
        fields = [
            _json_line([batch.first_row + index, index not in done.reasons, *batch.rows[index].kept])
            for index in written.tolist()
        ]
        return np.ascontiguousarray(done.vectors[written]).tobytes(), b"".join(fields)

    def finish(self, out: Path, files: Sequence[OutputFile], num_rows: int) -> Path:
        from vecd.client.bulk.parquet import write_parquet

        target = _beside(out, ".parquet.part")
        write_parquet(files[0].path, files[1].path, target, self._keep, self._dim, self._dtype)
        fd = os.open(target, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        return target


_FORMS = {"npy": _Npy, "jsonl": _JsonLines, "parquet": _Parquet}


def _json_line(value: Any) -> bytes:
    return orjson.dumps(
        value, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
    )


class OutputFiles:
    """The files of one output, locked. `begin` or `resume`, then `append` and `sync`, and `finish` in the end."""

    def __init__(self, out: Path) -> None:
        """Raises OutputError when another run has them open, OSError when they cannot be created."""
        self._out = out
        self._main = OutputFile(_beside(out, ".part"))
        if not self._main.lock():
            self._main.close()
            raise OutputError(f"{out} is being made by another vecd embed")
        self._files = [self._main]

    @property
    def is_new(self) -> bool:
        """Whether nothing has been written."""
        return self._main.num_bytes == 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Bytes of each file."""
        return tuple(file.num_bytes for file in self._files)

    def choose_form(self, format: str, dim: int, dtype: str, keep: Sequence[str], *, on_bad_row: str) -> None:
        """Say what is to be written. Side effects: creates the files."""
        self._skips = on_bad_row == "skip"
        self._form: _JsonLines = _FORMS[format](keep, dim, dtype)
        suffixes = [*self._form.suffixes[1:], ".rejected.jsonl.part"]
        self._files += [OutputFile(_beside(self._out, suffix)) for suffix in suffixes]

    def begin(self) -> None:
        """Begin with no rows. Side effects: removes what an earlier run has written."""
        for file in self._files:
            file.cut(0)
        self._form.begin(self._files)

    def resume(self, lengths: Sequence[int]) -> None:
        """Continue behind `lengths` bytes of each file. Side effects: cuts off the rest.

        Raises OutputError when a file is shorter.
        """
        for file, num_bytes in zip(self._files, lengths, strict=True):
            file.cut(num_bytes)

    def append(self, done: EmbeddedBatch, rejected: Sequence[bytes]) -> int:
        """Write a batch, and the lines of its rejected rows. Returns the number of rows written. Raises OSError."""
        written = np.arange(len(done.batch.rows))
        if self._skips and done.reasons:
            written = np.delete(written, list(done.reasons))
        pieces = (*self._form.render(done, written), b"".join(rejected))
        for file, piece in zip(self._files, pieces, strict=True):
            file.append(piece)
        return len(written)

    def sync(self) -> None:
        """Bring all that was appended to the disk. Raises OSError. May be called from a thread."""
        for file in self._files:
            file.sync()

    def finish(self, lengths: Sequence[int], num_rows: int) -> None:
        """Give the complete files their final names. May be repeated by another process if the first one died.

        Side effects: removes the other files. Raises OSError, OutputError.
        """
        if self._main.num_bytes >= lengths[0]:
            self._place(lengths, num_rows)
        elif not self._out.exists():
            raise OutputError(f"{self._out} was complete, and is gone: --restart begins anew")
        for file in self._files:
            file.path.unlink(missing_ok=True)

    def _place(self, lengths: Sequence[int], num_rows: int) -> None:
        # A file that is shorter than it was already has its final name: another process has died after renaming it.
        is_placed = [file.num_bytes < num_bytes for file, num_bytes in zip(self._files, lengths, strict=True)]
        for file, num_bytes in zip(self._files, lengths, strict=True):
            file.cut(min(num_bytes, file.num_bytes))
        final = self._form.finish(self._out, self._files, num_rows)
        self.sync()
        for file, was_placed in zip(self._files, is_placed, strict=True):
            if not was_placed:
                self._place_companion(file)
        final.rename(self._out)
        sync_folder(self._out)

    def _place_companion(self, file: OutputFile) -> None:
        """The row numbers, or the rejected rows. Side effects: removes those of an earlier output."""
        final = file.path.with_name(file.path.name.removesuffix(".part"))
        if final.name == self._out.name + ".rows.npy":
            is_wanted = self._skips
        elif final.name == self._out.name + ".rejected.jsonl":
            is_wanted = file.num_bytes > 0
        else:
            return
        if is_wanted:
            file.path.rename(final)
        else:
            final.unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock. May be repeated."""
        for file in reversed(self._files):
            file.close()

    def remove_if_new(self) -> None:
        """Remove the files of a run that never began."""
        if self.is_new:
            for file in self._files:
                with suppress(OSError):
                    file.path.unlink(missing_ok=True)


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(out.name + suffix)


def journal_path(out: Path) -> Path:
    return _beside(out, ".journal")
