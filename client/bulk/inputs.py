"""The input files: how they are found and opened, and whether they have changed.

Owns open files, formats by suffix, and the identity that a resumed run compares. Called by
`vecd.client.bulk.feed` and `vecd.client.bulk.command`.
"""

import gzip
import hashlib
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vecd.client.bulk.lines import Lines
from vecd.client.bulk.readers import CsvReader, read_csv_header, read_json_rows, read_text_rows
from vecd.client.bulk.rows import InputError, InputPlace, InputRow, Position

STDIN = "-"
FORMATS = ("txt", "jsonl", "csv", "tsv", "parquet")
_OTHER_SUFFIXES = {"text": "txt", "ndjson": "jsonl", "pq": "parquet"}
_HEAD_BYTES = 1 << 16
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class RowShape:
    """How rows are read, in all inputs."""

    field: str
    """The field with the text, in formats that have fields."""
    keep: tuple[str, ...]
    """The fields that are copied to the output."""
    max_row_bytes: int
    """A longer line, or CSV record, is a bad row."""


@dataclass(frozen=True, slots=True)
class InputSource:
    """One input as it was found."""

    path: str
    """Absolute, or "-"."""
    format: str
    is_stream: bool
    """Standard input or a pipe, which can be read only once, from its beginning."""
    is_gzip: bool
    num_bytes: int = 0
    """0 for a stream, as the fields below are empty."""
    mtime_ns: int = 0
    head: str = ""
    """Digest of its first 64 KiB."""

    @property
    def name(self) -> str:
        return "standard input" if self.path == STDIN else os.path.relpath(self.path)

    def identity(self) -> dict[str, Any]:
        return asdict(self)


def find_inputs(paths: Sequence[str], format_given: str | None) -> list[InputSource]:
    """Raises InputError for the first that cannot be read, or has no format."""
    if paths.count(STDIN) > 1:
        raise InputError("standard input, -, is named twice")
    inputs = [_find(path, format_given) for path in paths]
    if sum(each.is_stream for each in inputs) and len(inputs) > 1:
        raise InputError("an input that is no file, as - is, must be the only one")
    return inputs


def _find(path: str, format_given: str | None) -> InputSource:
    if path == STDIN:
        if format_given == "parquet":
            raise InputError("standard input cannot be parquet, which is read from its end")
        if sys.stdin is None:  # so Python marks a descriptor that was closed at the start
            raise InputError("standard input is closed")
        return InputSource(STDIN, format_given or "txt", is_stream=True, is_gzip=False)
    suffixes = [suffix[1:].lower() for suffix in Path(path).suffixes[-2:]]
    is_gzip = bool(suffixes) and suffixes[-1] == "gz"
    suffix = (suffixes[:-1] if is_gzip else suffixes)[-1:]
    format = format_given or _OTHER_SUFFIXES.get("".join(suffix), "".join(suffix))
    if format not in FORMATS:
        raise InputError(f"{path}: no format has this suffix, say which with --format ({', '.join(FORMATS)})")
    if is_gzip and format == "parquet":
        raise InputError(f"{path}: parquet is compressed within; unpack the file")
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise InputError(f"{path}: is a folder, name the files in it")
        if not stat.S_ISREG(mode):  # opening a pipe twice would lose its writer
            return InputSource(os.path.abspath(path), format, is_stream=True, is_gzip=is_gzip)
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if format != "parquet" and head.startswith(_UTF16_MARKS):
        raise InputError(f"{path}: is UTF-16, make it UTF-8")
    digest = hashlib.sha256(head).hexdigest()
    return InputSource(os.path.abspath(path), format, False, is_gzip, found.st_size, found.st_mtime_ns, digest)


def check_readable(inputs: Sequence[InputSource], shape: RowShape) -> None:
    """Read the first row of each file. Raises InputError when it has another format or lacks a field."""
    for each in inputs:
        if not each.is_stream:
            with open_rows(each, shape, Position()) as (_, rows):
                next(iter(rows), None)


def check_unchanged(inputs: Sequence[InputSource]) -> None:
    """Raises InputError when the size or the time of change of a file is not what it was."""
    for each in inputs:
        if each.is_stream:
            continue
        try:
            found = os.stat(each.path)
        except OSError as error:
            raise InputError(f"{each.name}: cannot be read any more: {error.strerror}") from error
        if (found.st_size, found.st_mtime_ns) != (each.num_bytes, each.mtime_ns):
            raise InputError(f"{each.name}: has been changed while it was read; --restart begins anew")


@contextmanager
def open_rows(each: InputSource, shape: RowShape, at: Position) -> Iterator[tuple[InputPlace, Iterable[InputRow]]]:
    """The rows of the input from `at` on, and the place behind the last one returned.

    Raises InputError, also while they are read.
    """
    try:
        if each.format == "parquet":
            from vecd.client.bulk.parquet import ParquetReader

            with ParquetReader(each.path, shape.field, shape.keep, at.offset, each.num_bytes) as reader:
                yield reader, reader
        else:
            # Without a buffer of Python's: a thread that waits for a pipe holds no lock when the process ends.
            path = 0 if each.path == STDIN else each.path
            with open(path, "rb", buffering=0, closefd=each.path != STDIN) as file:
                yield _line_rows(each, shape, at, file)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{each.name}: cannot be read: {error}") from error
    except InputError as error:
        raise InputError(f"{each.name}: {error}") from error


def _line_rows(
    each: InputSource, shape: RowShape, at: Position, file: BinaryIO
) -> tuple[InputPlace, Iterable[InputRow]]:
    lines = Lines(_reading(each, file), shape.max_row_bytes, tell=file.tell if each.is_gzip else None)
    header: list[str] = []
    delimiter = "\t" if each.format == "tsv" else ","
    if each.format in ("csv", "tsv"):
        header = read_csv_header(lines, delimiter)
    if at.offset > lines.offset:
        lines = _lines_from(each, shape, at, file)
    match each.format:
        case "txt":
            return lines, read_text_rows(lines)
        case "jsonl":
            return lines, read_json_rows(lines, shape.field, shape.keep)
    return lines, CsvReader(
        lines, shape.field, shape.keep, delimiter=delimiter, header=header, max_bytes=shape.max_row_bytes
    )


def _lines_from(each: InputSource, shape: RowShape, at: Position, file: BinaryIO) -> Lines:
    """A compressed file is read again from its beginning."""
    if not each.is_gzip:
        file.seek(at.offset)
        return Lines(file.read, shape.max_row_bytes, at.offset, at.line)
    file.seek(0)
    read = _reading(each, file)
    left = at.offset
    while left:
        skipped = read(min(left, 1 << 18))
        if not skipped:
            raise InputError(f"ends before byte {at.offset}, where it was left")
        left -= len(skipped)
    return Lines(read, shape.max_row_bytes, at.offset, at.line, file.tell)


def _reading(each: InputSource, file: BinaryIO) -> Callable[[int], bytes]:
    return gzip.GzipFile(fileobj=file).read1 if each.is_gzip else file.read
