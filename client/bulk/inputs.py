"""The input files: which they are, whether they still are what they were, and their readers.

Owns open files, formats by suffix, and the identity that a run which goes on compares. Called by
`vecd.client.bulk.feed` and `vecd.client.bulk.command`.
"""

import gzip
import hashlib
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vecd.client.bulk.lines import Lines
from vecd.client.bulk.readers import CsvReader, JsonReader, TextReader, read_csv_header
from vecd.client.bulk.rows import InputError, Position, Reader

STDIN = "-"
FORMATS = ("txt", "jsonl", "csv", "tsv", "parquet")
_OTHER_SUFFIXES = {"text": "txt", "ndjson": "jsonl", "pq": "parquet"}
_HEAD_BYTES = 1 << 16
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Shape:
    """What rows are, in all inputs."""

    field: str
    """Where the text is, in formats that have fields."""
    keep: tuple[str, ...]
    """The fields whose values are written out again."""
    max_row_bytes: int
    """A line, or a CSV record, that is longer is a bad row."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input as it was found."""

    path: str
    """Absolute, or "-"."""
    format: str
    is_stream: bool
    """It can be read only once, from its beginning: standard input, or a pipe."""
    is_gzip: bool
    num_bytes: int = 0
    """As all that follows, of a file that is no stream."""
    mtime_ns: int = 0
    head: str = ""
    """Digest of its first 64 KiB."""

    @property
    def name(self) -> str:
        return "standard input" if self.path == STDIN else os.path.relpath(self.path)

    def identity(self) -> dict[str, Any]:
        return asdict(self)


def find_inputs(paths: Sequence[str], format_given: str | None) -> list[Input]:
    """Look at all of them. Raises InputError for the first that cannot be read, or has no format."""
    if paths.count(STDIN) > 1:
        raise InputError("standard input, -, is named twice")
    inputs = [_find(path, format_given) for path in paths]
    if sum(each.is_stream for each in inputs) and len(inputs) > 1:
        raise InputError("an input that is no file, as - is, must be the only one")
    return inputs


def _find(path: str, format_given: str | None) -> Input:
    if path == STDIN:
        if format_given == "parquet":
            raise InputError("standard input cannot be parquet, which is read from its end")
        if sys.stdin is None:  # Python's word for a descriptor 0 that was closed when it started
            raise InputError("standard input is closed")
        return Input(STDIN, format_given or "txt", is_stream=True, is_gzip=False)
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
        if not stat.S_ISREG(mode):  # to open a pipe twice is to lose its writer
            return Input(os.path.abspath(path), format, is_stream=True, is_gzip=is_gzip)
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if format != "parquet" and head.startswith(_UTF16_MARKS):
        raise InputError(f"{path}: is UTF-16, make it UTF-8")
    digest = hashlib.sha256(head).hexdigest()
    return Input(os.path.abspath(path), format, False, is_gzip, found.st_size, found.st_mtime_ns, digest)


def check_readable(inputs: Sequence[Input], shape: Shape) -> None:
    """Read the first row of each file: it is what its format says, and has the fields. Raises InputError."""
    for each in inputs:
        if not each.is_stream:
            with open_reader(each, shape, Position()) as reader:
                next(iter(reader), None)


def check_unchanged(inputs: Sequence[Input]) -> None:
    """Raises InputError when a file is not as large and as old any more as it was found."""
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
def open_reader(each: Input, shape: Shape, at: Position) -> Iterator[Reader]:
    """The input's reader, at that place of it. Raises InputError, also while it is read."""
    try:
        if each.format == "parquet":
            from vecd.client.bulk.parquet import ParquetReader

            with ParquetReader(each.path, shape.field, shape.keep, at.offset, each.num_bytes) as reader:
                yield reader
        else:
            with _open_bytes(each) as file:
                yield _line_reader(each, shape, at, file)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{each.name}: cannot be read: {error}") from error
    except InputError as error:
        raise InputError(f"{each.name}: {error}") from error


def _open_bytes(each: Input) -> BinaryIO:
    # Without a buffer of Python's: no lock is held by a thread that waits for a pipe when the process ends.
    return open(0 if each.path == STDIN else each.path, "rb", buffering=0, closefd=each.path != STDIN)


def _line_reader(each: Input, shape: Shape, at: Position, file: BinaryIO) -> Reader:
    read = _reading(each, file)
    tell = file.tell if each.is_gzip else None
    header: list[str] = []
    delimiter = "\t" if each.format == "tsv" else ","
    lines = Lines(read, shape.max_row_bytes)
    if each.format in ("csv", "tsv"):
        header = read_csv_header(lines, delimiter)
    if at.offset > lines.offset:
        lines = _lines_from(each, shape, at, file)
    match each.format:
        case "txt":
            return TextReader(lines, tell)
        case "jsonl":
            return JsonReader(lines, tell, shape.field, shape.keep)
        case _:
            return CsvReader(
                lines, tell, shape.field, shape.keep,
                delimiter=delimiter, header=header, max_bytes=shape.max_row_bytes,
            )  # fmt: skip


def _lines_from(each: Input, shape: Shape, at: Position, file: BinaryIO) -> Lines:
    """What is compressed is read again up to the place, and forgotten."""
    if each.is_gzip:
        file.seek(0)
        read = _reading(each, file)
        left = at.offset
        while left:
            left -= len(read(min(left, 1 << 18))) or _raise_short(at)
    else:
        file.seek(at.offset)
        read = file.read
    return Lines(read, shape.max_row_bytes, at.offset, at.line)


def _raise_short(at: Position) -> int:
    raise InputError(f"ends before byte {at.offset}, where it was left")


def _reading(each: Input, file: BinaryIO) -> Callable[[int], bytes]:
    return gzip.GzipFile(fileobj=file).read1 if each.is_gzip else file.read
