"""Vectors in their final form: .npy, .jsonl, .parquet, and beside them which rows they are and which were rejected.

Owns what is written for a row, and the making of the final files of the parts, which appear under their names only
when they are whole. Called by `vecd.client.bulk.run` and `vecd.client.bulk.command`.

    OUT.part                     vectors end to end (.npy: behind a header), or JSON lines
    OUT.rows.npy.part            of .npy: the number of each row
    OUT.fields.part              of .parquet: a JSON line a row, its number and what is kept
    OUT.rejected.jsonl.part      a JSON line for each row without a vector
    OUT.journal                  `vecd.client.bulk.journal`

Parts come first, the journal second: it never tells of what is not there. At the end the journal says that all is
there, the others are renamed, OUT last, and the journal is removed. Each of these steps may be done twice.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

from vecd.client.bulk.journal import sync_folder
from vecd.client.bulk.parts import Part, PartError
from vecd.client.bulk.rows import Row

FORMATS = ("npy", "jsonl", "parquet")
_NPY_HEADER_BYTES = 128
_NPY_VERSION = b"\x93NUMPY\x01\x00"


class Done(NamedTuple):
    """A batch, answered."""

    rows: Sequence[Row]
    vectors: NDArray[Any]
    """A row for each of `rows`; NaN where there is a reason."""
    reasons: dict[int, str]
    """By index in `rows`: why there is no vector."""


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Of the same length whatever the shape. Source: numpy.lib.format, version 1.0."""
    fields = f"{{'descr': {np.dtype(dtype).newbyteorder('<').str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    num_bytes = _NPY_HEADER_BYTES - len(_NPY_VERSION) - 2
    return _NPY_VERSION + num_bytes.to_bytes(2, "little") + fields.ljust(num_bytes - 1).encode() + b"\n"


class _Form(Protocol):
    """What a format makes of rows. Its first part is OUT's own."""

    names: tuple[str, ...]
    """Of its parts, behind OUT's."""

    def begin(self, parts: Sequence[Part]) -> None:
        """Write what comes before the first row."""

    def render(self, done: Done, keeps: NDArray[np.intp]) -> tuple[bytes | memoryview, ...]:
        """What is appended to each part; `keeps`: the indices of the rows that are written."""

    def finish(self, out: Path, parts: Sequence[Part], num_rows: int) -> Path:
        """The file that is OUT from now on, made of the parts."""


class _Npy:
    names: tuple[str, ...] = (".part", ".rows.npy.part")

    def __init__(self, dim: int, dtype: str) -> None:
        self._dim = dim
        self._dtype = dtype

    def begin(self, parts: Sequence[Part]) -> None:
        self._write_headers(parts, 0, Part.append)

    def render(self, done: Done, keeps: NDArray[np.intp]) -> tuple[bytes | memoryview, ...]:
        numbers = np.array([row.number for row in done.rows], np.int64)
        all_kept = len(keeps) == len(done.rows)
        vectors = np.ascontiguousarray(done.vectors if all_kept else done.vectors[keeps])
        return vectors.reshape(-1).view(np.uint8).data, numbers[keeps].tobytes()

    def finish(self, out: Path, parts: Sequence[Part], num_rows: int) -> Path:
        self._write_headers(parts, num_rows, Part.overwrite)
        return parts[0].path

    def _write_headers(self, parts: Sequence[Part], num_rows: int, write: Any) -> None:
        write(parts[0], npy_header(self._dtype, (num_rows, self._dim)))
        write(parts[1], npy_header("int64", (num_rows,)))


class _JsonLines:
    names: tuple[str, ...] = (".part",)

    def __init__(self, keep: Sequence[str]) -> None:
        self._keep = tuple(keep)

    def begin(self, parts: Sequence[Part]) -> None:
        pass

    def render(self, done: Done, keeps: NDArray[np.intp]) -> tuple[bytes | memoryview, ...]:
        lines = []
        for index in keeps.tolist():
            row = done.rows[index]
            kept = dict(zip(self._keep, row.item.kept, strict=False))
            embedding = None if index in done.reasons else done.vectors[index]
            lines.append(_json_line({"row": row.number, **kept, "embedding": embedding}))
        return (b"".join(lines),)

    def finish(self, out: Path, parts: Sequence[Part], num_rows: int) -> Path:
        return parts[0].path


class _Parquet:
    names: tuple[str, ...] = (".part", ".fields.part")

    def __init__(self, keep: Sequence[str], dim: int, dtype: str) -> None:
        self._keep = tuple(keep)
        self._dim = dim
        self._dtype = dtype

    def begin(self, parts: Sequence[Part]) -> None:
        pass

    def render(self, done: Done, keeps: NDArray[np.intp]) -> tuple[bytes | memoryview, ...]:
        fields = [
            _json_line([done.rows[index].number, index not in done.reasons, *done.rows[index].item.kept])
            for index in keeps.tolist()
        ]
        return np.ascontiguousarray(done.vectors[keeps]).tobytes(), b"".join(fields)

    def finish(self, out: Path, parts: Sequence[Part], num_rows: int) -> Path:
        from vecd.client.bulk.parquet import write_parquet

        target = out.with_name(out.name + ".parquet.part")
        write_parquet(parts[0].path, parts[1].path, target, self._keep, self._dim, self._dtype)
        fd = os.open(target, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        return target


def _json_line(value: Any) -> bytes:
    return orjson.dumps(
        value, default=str, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
    )


class Output:
    """The parts of one output, locked. `begin` or `go_on`, then `append` and `sync`, and `finish` at the end."""

    def __init__(self, out: Path) -> None:
        """Raises PartError when another run has them, OSError when they cannot be made."""
        self._out = out
        self._main = Part(_beside(out, ".part"))
        if not self._main.lock():
            self._main.close()
            raise PartError(f"{out} is being made by another vecd embed")
        self._parts: list[Part] = [self._main]

    @property
    def is_new(self) -> bool:
        """Whether nothing has been written."""
        return self._main.num_bytes == 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Bytes of each part."""
        return tuple(part.num_bytes for part in self._parts)

    def choose_form(self, format: str, dim: int, dtype: str, keep: Sequence[str], *, on_bad_row: str) -> None:
        """What is written. Side effects: all parts are there from now on."""
        self._skips = on_bad_row == "skip"
        self._form: _Form
        match format:
            case "npy":
                self._form = _Npy(dim, dtype)
            case "jsonl":
                self._form = _JsonLines(keep)
            case _:
                self._form = _Parquet(keep, dim, dtype)
        names = [*self._form.names[1:], ".rejected.jsonl.part"]
        self._parts += [Part(_beside(self._out, name)) for name in names]

    def begin(self) -> None:
        """Nothing is done yet. Side effects: what an earlier run has left is gone."""
        for part in self._parts:
            part.cut(0)
        self._form.begin(self._parts)

    def go_on(self, lengths: Sequence[int]) -> None:
        """So much is done. Raises PartError when it is not there any more. Side effects: what is more is gone."""
        for part, num_bytes in zip(self._parts, lengths, strict=True):
            part.cut(num_bytes)

    def append(self, done: Done, rejected: Sequence[bytes]) -> int:
        """Write a batch, and return how many rows of the output that makes. Raises OSError."""
        keeps = np.arange(len(done.rows))
        if self._skips and done.reasons:
            keeps = np.delete(keeps, list(done.reasons))
        pieces = (*self._form.render(done, keeps), b"".join(rejected))
        for part, piece in zip(self._parts, pieces, strict=True):
            part.append(piece)
        return len(keeps)

    def sync(self) -> None:
        """All that was appended is on the disk. Raises OSError. May be called from a thread."""
        for part in self._parts:
            part.sync()

    def finish(self, lengths: Sequence[int], num_rows: int) -> None:
        """Make the final files of what is complete. May be called again by another process, whatever became of the
        first. Side effects: of the parts none is left. Raises OSError, PartError."""
        if self._main.num_bytes >= lengths[0]:
            self._place(lengths, num_rows)
        elif not self._out.exists():
            raise PartError(f"{self._out} was complete, and is gone: --restart begins anew")
        for part in self._parts:
            part.path.unlink(missing_ok=True)

    def _place(self, lengths: Sequence[int], num_rows: int) -> None:
        # What is shorter than it was has its final name already: another process has done that before it died.
        is_placed = [part.num_bytes < num_bytes for part, num_bytes in zip(self._parts, lengths, strict=True)]
        for part, num_bytes in zip(self._parts, lengths, strict=True):
            part.cut(min(num_bytes, part.num_bytes))
        final = self._form.finish(self._out, self._parts, num_rows)
        self.sync()
        for part, was_placed in zip(self._parts, is_placed, strict=True):
            if not was_placed:
                self._place_companion(part)
        final.rename(self._out)
        sync_folder(self._out)

    def _place_companion(self, part: Part) -> None:
        """Which rows are meant, or which were rejected; what an earlier output had there is gone."""
        final = part.path.with_name(part.path.name.removesuffix(".part"))
        if final.name == self._out.name + ".rows.npy":
            is_wanted = self._skips
        elif final.name == self._out.name + ".rejected.jsonl":
            is_wanted = part.num_bytes > 0
        else:
            return
        if is_wanted:
            part.path.rename(final)
        else:
            final.unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock. May be called again."""
        for part in reversed(self._parts):
            part.close()

    def remove_if_new(self) -> None:
        """Leave nothing of a run that never began."""
        if self.is_new:
            for part in self._parts:
                with suppress(OSError):
                    part.path.unlink(missing_ok=True)


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(out.name + suffix)


def journal_path(out: Path) -> Path:
    return _beside(out, ".journal")
