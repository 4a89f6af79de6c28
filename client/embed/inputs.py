"""The input files: how they are found, opened and read in batches, and whether they have changed.

Owns open files, formats by suffix, the sizes of batches, and the identity that a resumed run compares.
"""

import gzip
import hashlib
import itertools
import os
import stat
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from vecd.base.files import JsonObject
from vecd.client.embed.options import INPUT_FORMATS, STDIN, EmbedError, EmbedOptions
from vecd.client.embed.rows import InputRow, Position, ThroughputEstimate, read_rows
from vecd.client.embed.storage import shown

_OTHER_SUFFIXES = {"text": "txt", "ndjson": "jsonl", "pq": "parquet"}
_HEAD_BYTES = 1 << 16
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class InputSource:
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
    """Digest of its first 64 KiB, of a copy that of all its bytes."""
    url: str = ""
    """Of what the file at `path` is a copy, as it may be printed, or ""."""

    @property
    def origin(self) -> str:
        return self.url or self.path

    @property
    def name(self) -> str:
        return "standard input" if self.path == STDIN else self.url or os.path.relpath(self.path)

    def journal_fields(self) -> dict[str, Any]:
        """By which a resumed run recognizes it. A copy has a path and a time of its own."""
        fields = asdict(self)
        url = fields.pop("url")
        return {**fields, "path": url, "mtime_ns": 0} if url else fields


@dataclass(slots=True)
class RowBatch:
    """Rows that are read, requested and written together."""

    source: InputSource
    rows: Sequence[InputRow]
    end: Position
    cost: float = 0.0
    """Of its texts, as `vecd.client.embed.rows` counts."""
    results: NDArray[Any] = field(init=False, compare=False)
    """Vectors [rows, dimensions], or the columns of each row, [rows]. NaN or None where there is none."""
    reasons: dict[int, str] = field(init=False)
    """Why a row has no results, by its index."""

    def __post_init__(self) -> None:
        self.reasons = {index: row.reason for index, row in enumerate(self.rows) if not row.texts}

    @property
    def has_vectors(self) -> bool:
        return self.results.ndim == 2

    def columns(self, index: int) -> JsonObject:
        """{} for a row without results."""
        if index in self.reasons:
            return {}
        columns: JsonObject = {"embedding": self.results[index]} if self.has_vectors else self.results[index]
        return columns

    @property
    def first_row(self) -> int:
        """Number of the first one among the rows of all inputs, from 0."""
        return self.end.row - len(self.rows)


def find_inputs(paths: Sequence[str], format_given: str | None) -> list[InputSource]:
    """Raises EmbedError for the first that cannot be read, or has no format."""
    if not paths:
        raise EmbedError("no input is named; -: standard input")
    if paths.count(STDIN) > 1:
        raise EmbedError("standard input, -, is named twice")
    inputs = [_find(path, format_given) for path in paths]
    if sum(each.is_stream for each in inputs) and len(inputs) > 1:
        raise EmbedError("an input that is no file, as - is, must be the only one")
    return inputs


def file_key(path: str) -> Any:
    """The same for all names of one local file, through whatever links; the path or URL itself where there is none."""
    try:
        found = os.stat(0 if path == STDIN else path)
    except OSError:
        return path
    return found.st_dev, found.st_ino


def copied_from(url: str, copy: InputSource) -> InputSource:
    """A remote input, of which there is a copy. Raises OSError.

    What is secret in `url` is not kept: a run that is resumed recognizes the input by its content, also if the URL has
    been signed anew.
    """
    with open(copy.path, "rb") as file:
        return replace(copy, url=shown(url), head=hashlib.file_digest(file, "sha256").hexdigest())


def known_format(name: str, format_given: str | None) -> tuple[str, bool]:
    """The format of a file by its name, "" if that has no known suffix and none is given; and whether it is packed."""
    suffixes = [suffix[1:].lower() for suffix in Path(name).suffixes[-2:]]
    is_gzip = bool(suffixes) and suffixes[-1] == "gz"
    suffix = "".join((suffixes[:-1] if is_gzip else suffixes)[-1:])
    format = format_given or _OTHER_SUFFIXES.get(suffix, suffix)
    return format if format in INPUT_FORMATS else "", is_gzip


def _find(path: str, format_given: str | None) -> InputSource:
    if path == STDIN:
        if format_given == "parquet":
            raise EmbedError("standard input cannot be parquet, which is read from its end")
        if sys.stdin is None:  # so Python marks a descriptor that was closed at the start
            raise EmbedError("standard input is closed")
        return InputSource(STDIN, format_given or "txt", is_stream=True, is_gzip=False)
    format, is_gzip = known_format(path, format_given)
    if not format:
        raise EmbedError(f"{path}: no format has this suffix, say which with --format ({', '.join(INPUT_FORMATS)})")
    if is_gzip and format == "parquet":
        raise EmbedError(f"{path}: parquet is compressed within; unpack the file")
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise EmbedError(f"{path}: is a folder, name the files in it")
        if not stat.S_ISREG(mode):  # opening a pipe twice would lose its writer
            return InputSource(os.path.abspath(path), format, is_stream=True, is_gzip=is_gzip)
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise EmbedError(f"{path}: cannot be read: {error.strerror}") from error
    if format != "parquet" and head.startswith(_UTF16_MARKS):
        raise EmbedError(f"{path}: is UTF-16, make it UTF-8")
    digest = hashlib.sha256(head).hexdigest()
    return InputSource(os.path.abspath(path), format, False, is_gzip, found.st_size, found.st_mtime_ns, digest)


def check_readable(inputs: Sequence[InputSource], options: EmbedOptions) -> None:
    """Read each file until all fields have been found, which is usually in the first row.

    Raises EmbedError when a file has another format, no row of a file has a field of texts, or no row of any file has
    one of the fields to keep.
    """
    for each in inputs:
        if options.pair_with is not None and each.format == "txt":
            raise EmbedError(f"{each.name}: --pair-with names a field, and lines of text have none")
    num_rows, never_kept = 0, set(options.keep)
    for each in inputs:
        if each.is_stream:
            return  # it is the only one, and can be read only once
        never_found = {*options.text_fields, *options.keep}
        with _open_rows(each, options, Position(), never_found) as (rows, _):
            for _row in rows:
                num_rows += 1
                never_kept &= never_found if each.format == "jsonl" else set()
                if not never_kept and (each.format != "jsonl" or never_found.isdisjoint(options.text_fields)):
                    break
    if never_kept and num_rows:
        names = ", ".join(repr(name) for name in options.keep if name in never_kept)
        raise EmbedError(f"no row has a field {names} (--keep)")


def check_unchanged(inputs: Sequence[InputSource]) -> None:
    """Raises EmbedError when the size or the time of change of a file is not what it was."""
    for each in inputs:
        if each.is_stream:
            continue
        try:
            found = os.stat(each.path)
        except OSError as error:
            raise EmbedError(f"{each.name}: cannot be read any more: {error.strerror}") from error
        if (found.st_size, found.st_mtime_ns) != (each.num_bytes, each.mtime_ns):
            raise EmbedError(f"{each.name}: has been changed while it was read; --restart begins anew")


def read_batches(
    inputs: Sequence[InputSource], options: EmbedOptions, start: Position, estimate: ThroughputEstimate
) -> Generator[RowBatch, None, None]:
    """All rows behind `start`, in requests of the size that `estimate` says when each is read.

    Raises EmbedError, also when the first rows of a stream are others than before.
    """
    at, bytes_before = replace(start), sum(each.num_bytes for each in inputs[: start.input])
    for source in inputs[start.input :]:
        if source.is_stream:  # it cannot be opened at an offset: its rows are read again, and skipped
            at = Position()
        with _open_rows(source, options, at, set(options.text_fields)) as (rows, bytes_read):
            digest = hashlib.sha256()
            if source.is_stream and start.row:
                _digest(itertools.islice(rows, start.row), digest)
                at.row = start.row
                if digest.hexdigest() != start.digest:
                    raise EmbedError(f"its first {start.row:,} rows are not those of the run that is to be resumed")
            while (taken_at_cost := _take(rows, options, estimate))[0]:
                taken, cost = taken_at_cost
                at.row += len(taken)
                if source.is_stream:
                    _digest(taken, digest)
                    at.digest = digest.hexdigest()
                yield RowBatch(source, taken, replace(at, num_bytes=bytes_before + bytes_read()), cost)
        bytes_before += source.num_bytes
        at = Position(at.input + 1, row=at.row)


@contextmanager
def _open_rows(
    source: InputSource, options: EmbedOptions, at: Position, never_found: set[str]
) -> Iterator[tuple[Iterator[InputRow], Callable[[], int]]]:
    """The rows of the input behind `at`, and what returns how many bytes of the file have been read. Raises EmbedError,
    also while they are read. Side effects: as `vecd.client.embed.rows.read_rows`."""
    try:
        if source.format == "parquet":
            from vecd.client.embed.parquet import open_parquet

            with open_parquet(source.path, options, at) as (rows, num_rows):
                yield rows, lambda: source.num_bytes * at.offset // max(1, num_rows)
        else:
            # Without a buffer of Python's: a thread that waits for a pipe holds no lock when the process ends.
            path = 0 if source.path == STDIN else source.path
            with open(path, "rb", buffering=0, closefd=source.path != STDIN) as file:
                stream = gzip.GzipFile(fileobj=file) if source.is_gzip else file
                is_packed_file = source.is_gzip and not source.is_stream
                yield (
                    read_rows(source.format, stream, options, at, never_found),
                    file.tell if is_packed_file else lambda: at.offset,
                )
    except (OSError, EOFError, zlib.error) as error:
        raise EmbedError(f"{source.name}: cannot be read: {error}") from error
    except EmbedError as error:
        raise type(error)(f"{source.name}: {error}") from error


def _take(
    rows: Iterator[InputRow], options: EmbedOptions, estimate: ThroughputEstimate
) -> tuple[list[InputRow], float]:
    """The rows of the next request, and their cost. None is read ahead: the reader's position is behind the last."""
    taken: list[InputRow] = []
    num_chars, cost, max_cost = 0, 0.0, estimate.max_request_cost
    for row in rows:
        taken.append(row)
        for text in row.texts:
            num_chars += len(text)
            cost += estimate.cost(text)
        if len(taken) >= options.batch_texts or num_chars >= options.batch_chars or cost >= max_cost:
            break
    return taken, cost


def _digest(rows: Iterable[InputRow], digest: "hashlib._Hash") -> None:
    """Of all texts of a stream, by which the same stream is recognized."""
    for row in rows:
        for text in row.texts or (None,):
            digest.update(b"-" if text is None else b"+%d:" % len(text) + text.encode())
