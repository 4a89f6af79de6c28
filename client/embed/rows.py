"""Rows, and how they are read from lines: texts, JSON lines, CSV.

Owns what a row is in each of these formats, and what is wrong with a bad one. Opens nothing.
"""

import csv
import gzip
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import orjson

from vecd.client.embed.options import EmbedError, EmbedOptions, FieldMissing

_BOM = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 18
_JSON_TYPES = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}

ByteStream: TypeAlias = io.FileIO | gzip.GzipFile


class InputRow(NamedTuple):
    line: int
    """Where it begins, from 1; in a parquet file, the number of the row."""
    texts: tuple[str, ...]
    """One, or the two of a pair; none if the row cannot be embedded."""
    reason: str = ""
    """Why it cannot. Never quotes the row."""
    kept: tuple[Any, ...] = ()
    """The values of --keep, None for fields that the row does not have; () for a row that has no fields."""


@dataclass(slots=True)
class Position:
    """A place between two rows of all inputs. A reader moves its own behind each row."""

    input: int = 0
    offset: int = 0
    """Uncompressed bytes of the input, or rows of a parquet file."""
    line: int = 0
    """Lines of the input, or rows of a parquet file."""
    row: int = 0
    """Rows before it, in all inputs."""
    digest: str = ""
    """Digest of all texts before it, for inputs that cannot be opened at an offset."""
    num_bytes: int = 0
    """Bytes of all inputs that had been read then, as they are on the disk."""


def make_row(line: int, names: Iterable[str], values: Sequence[Any], kept: tuple[Any, ...] = ()) -> InputRow:
    """A row with the texts `values` of the fields `names`, or with what is wrong with the first bad one."""
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str):
            kind = "null" if value is None else _JSON_TYPES.get(type(value), "no text")
            return InputRow(line, (), f"{name} is {kind}, not a text", kept)
        if not value or value.isspace():
            return InputRow(line, (), f"{name} is empty", kept)
    return InputRow(line, tuple(values), "", kept)


def quoted(names: Iterable[str]) -> list[str]:
    return [f'"{name}"' for name in names]


def read_rows(
    format: str, stream: ByteStream, options: EmbedOptions, at: Position, never_found: set[str]
) -> Iterator[InputRow]:
    """The rows behind `at` of a `stream` that is at its beginning. Side effects: moves `at` behind each row; takes the
    fields that a line of JSON has out of `never_found`.

    Raises FieldMissing when the header of a CSV file lacks a field, or, at the end of JSON lines that were read from
    the first one on, no line had a field of texts; EmbedError when the stream ends before `at`.
    """
    if format in ("csv", "tsv"):
        yield from _read_csv(stream, options, at, "," if format == "csv" else "\t")
        return
    is_json, is_from_first = format == "jsonl", at.offset == 0
    first: InputRow | None = None
    for raw in _lines_behind(at, stream, options.max_row_bytes):
        if raw is None:
            row: InputRow | None = InputRow(at.line, (), "the line is too long (--max-row-bytes)")
        else:
            row = _parse_json(at.line, raw, options, never_found) if is_json else _parse_text(at.line, raw)
        if row is not None:
            first = first or row
            yield row
    if is_json and is_from_first and first is not None:
        for name, flag in zip(options.text_fields, ("--field", "--pair-with"), strict=False):
            if name in never_found:
                raise FieldMissing(f"no row has a field {name!r} ({flag}); line {first.line}: {first.reason}")


def split_lines(read: Callable[[int], bytes], max_bytes: int, at: Position) -> Iterator[bytes | None]:
    """Lines without their line feed; None for one longer than `max_bytes`, which is not kept.

    `read(n)` returns at most n bytes, and none at the end. The last line may lack its line feed. A byte order mark at
    the beginning is removed. Side effects: moves `at` behind each line.
    """
    begun: list[bytes] = []
    num_begun = 0

    def complete(end: bytes, num_feeds: int) -> bytes | None:
        nonlocal num_begun
        num_bytes = num_begun + len(end)
        line = b"".join((*begun, end)) if num_bytes <= max_bytes else None
        if line is not None and at.offset == 0:
            line = line.removeprefix(_BOM)
        at.offset += num_bytes + num_feeds
        at.line += 1
        begun.clear()
        num_begun = 0
        return line

    while chunk := read(_CHUNK_BYTES):
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield complete(end, 1)
        num_begun += len(rest)
        if num_begun <= max_bytes:
            begun.append(rest)
        else:  # the bytes of a line that is too long are counted, and dropped
            begun.clear()
    if num_begun:
        yield complete(b"", 0)


def _lines_behind(at: Position, stream: ByteStream, max_bytes: int) -> Iterator[bytes | None]:
    # A compressed file is read up to there. A pipe, which cannot be moved, is at its beginning.
    if at.offset and stream.seek(at.offset) != at.offset:
        raise EmbedError(f"ends before byte {at.offset}, where it was left")
    return split_lines(stream.read1 if isinstance(stream, gzip.GzipFile) else stream.read, max_bytes, at)


def _parse_text(line: int, raw: bytes) -> InputRow:
    try:
        text = raw.decode().removesuffix("\r")
    except UnicodeDecodeError as error:
        return InputRow(line, (), f"not UTF-8: byte {error.start} of the line")
    return InputRow(line, (text,)) if text and not text.isspace() else InputRow(line, (), "the line is empty")


def _parse_json(line: int, raw: bytes, options: EmbedOptions, never_found: set[str]) -> InputRow | None:
    """An object with the texts in their fields, or one text itself as a string; None for a blank line."""
    if not raw or raw.isspace():
        return None
    try:
        value = orjson.loads(raw)
    except ValueError as error:
        reason = str(error).partition(": line ")[0]  # orjson counts the lines of this one line
        return InputRow(line, (), f"not JSON: {reason}")
    if not isinstance(value, dict):
        if options.pair_with is not None:
            return InputRow(line, (), "the line is no object with the two texts of a pair")
        if isinstance(value, str):  # it has no fields, and needs none
            never_found.clear()
        return make_row(line, ("the line",), (value,))
    never_found.difference_update(value)
    kept, fields = tuple(value.get(key) for key in options.keep), options.text_fields
    for name in fields:
        if name not in value:
            return InputRow(line, (), f'no field "{name}"', kept)
    return make_row(line, quoted(fields), [value[name] for name in fields], kept)


def _read_csv(stream: ByteStream, options: EmbedOptions, at: Position, delimiter: str) -> Iterator[InputRow]:
    """Every record below the header that is not blank is a row."""
    begin = at.offset, at.line
    at.offset = at.line = 0
    records = _read_records(stream, options, at, delimiter)
    _, header, wrong = next(records, (0, [], ""))
    if not header:
        raise EmbedError(f"its header is {wrong}" if wrong else "it has no header")
    for name in (*options.text_fields, *options.keep):
        if name not in header:
            raise FieldMissing(f"its header has no field {name!r}, it has: {', '.join(header)[:500]}")
    if begin[0]:
        at.offset, at.line = begin
        records = _read_records(stream, options, at, delimiter)
    names, columns = quoted(options.text_fields), [header.index(name) for name in options.text_fields]
    kept_columns = [header.index(name) for name in options.keep]
    for line, record, reason in records:
        kept = tuple(_utf8_or_none(record[index]) if index < len(record) else None for index in kept_columns)
        if reason:
            yield InputRow(line, (), reason, kept)
        elif record and len(record) != len(header):
            yield InputRow(line, (), f"{len(record)} fields, the header has {len(header)}", kept)
        elif record:
            texts = [_utf8_or_none(record[column]) for column in columns]
            if None in texts:
                yield InputRow(line, (), f"{names[texts.index(None)]} is not UTF-8", kept)
            else:
                yield make_row(line, names, texts, kept)


def _read_records(
    stream: ByteStream, options: EmbedOptions, at: Position, delimiter: str
) -> Iterator[tuple[int, list[str], str]]:
    """The line at which each CSV record behind `at` begins, its fields, and what is wrong with it instead.

    Quoted fields may contain line feeds. Bytes that are not UTF-8 are surrogates, which `_utf8_or_none` finds.
    """
    max_bytes = options.max_row_bytes
    lines = _lines_behind(at, stream, max_bytes)
    num_bytes, is_cut_off = 0, False
    """Of the record that is being read."""

    def decode() -> Iterator[str]:
        nonlocal num_bytes, is_cut_off
        for raw in lines:
            if raw is None or num_bytes + len(raw) > max_bytes:
                raise csv.Error("the record is too long (--max-row-bytes); is a quote never closed?")
            num_bytes += len(raw) + 1
            yield raw.decode(errors="surrogateescape") + "\n"
        is_cut_off = num_bytes > 0  # the parser has requested one line more: the record has no end

    csv.field_size_limit(max_bytes)
    records = csv.reader(decode(), delimiter=delimiter)
    while True:
        line, num_bytes = at.line + 1, 0
        try:
            record = next(records)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, [], f"not CSV: {error}"
            records = csv.reader(decode(), delimiter=delimiter)
        else:
            yield (line, [], "not CSV: a quote is never closed") if is_cut_off else (line, record, "")


def _utf8_or_none(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    return text


# How fast the server embeds, as measured, and how much work it is therefore given. Work is counted in characters, as
# tokens are not known before the response: a text costs those that the model reads, and a few for its own overhead.

WORK_S = 1.0
"""Seconds of the server's work that are under way, and that a kill loses. With a second of work, it never waits."""
_NUM_SHARES = 3
"""Requests that make up the work, if they may be so large. Smaller ones cost the server more, and end no sooner."""
MIN_REQUESTS, MAX_REQUESTS = 2, 32
_FIRST_COST = 3072.0
"""Before anything is measured. A slow server (1,500 tokens a second) takes about a second for it."""
_OVERHEAD_CHARS = 8
_CHARS_PER_TOKEN = 5
_WEIGHT = 0.3
"""Of the newest measurement in the estimate."""
_MAX_GROWTH = 2.0
_MIN_TOOK_S = 1e-3


class ThroughputEstimate:
    def __init__(self, num_requests: int | None) -> None:
        """`num_requests`: how many should be under way, if it is given."""
        self.max_text_chars = float("inf")
        """Characters of a text that cost something: what is behind them is cut off by the server."""
        self._num_requests = num_requests
        self._work = _FIRST_COST
        self._under_way = 0.0

    @property
    def max_request_cost(self) -> float:
        """How large the next request should be. May be read by any thread."""
        return self._work / (self._num_requests or _NUM_SHARES)

    def set_max_tokens(self, max_tokens: int) -> None:
        self.max_text_chars = max_tokens * _CHARS_PER_TOKEN

    def cost(self, text: str) -> float:
        return min(len(text), self.max_text_chars) + _OVERHEAD_CHARS

    def has_room(self, num_running: int, costs: Iterable[float]) -> bool:
        """Whether another request may be under way. `costs`: of those that run, or wait for an earlier one."""
        found = list(costs)
        if self._num_requests is not None:
            return num_running < self._num_requests and len(found) < self._num_requests + MIN_REQUESTS
        return len(found) < MIN_REQUESTS or (num_running < MAX_REQUESTS and sum(found) < self._work)

    def begin(self, cost: float) -> float:
        """A request is sent. Returns all work that is under way, for `end`."""
        self._under_way += cost
        return self._under_way

    def end(self, cost: float, work: float, took_s: float | None) -> None:
        """It has been served in `took_s`, or not (None). The server has done the `work` of `begin` meanwhile."""
        self._under_way -= cost
        if took_s is not None:
            measured = work / max(took_s, _MIN_TOOK_S) * WORK_S
            self._work = min(self._work + _WEIGHT * (measured - self._work), _MAX_GROWTH * self._work)
