"""Lines → rows: texts, JSON lines, CSV.

Owns what a row is in each format, and what is wrong with one that is none. Opens nothing. Called by
`vecd.client.bulk.inputs`.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from vecd.client.bulk.lines import Lines
from vecd.client.bulk.rows import InputError, Item

_BOM = b"\xef\xbb\xbf"
_JSON_TYPES = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}


def why_no_text(value: Any, name: str) -> str:
    """What is wrong with the value of a field; "" when it is a text that can be embedded."""
    if isinstance(value, str):
        return "" if value and not value.isspace() else f"{name} is empty"
    return f"{name} is {'null' if value is None else _JSON_TYPES.get(type(value), 'no text')}, not a text"


class LineReader:
    """What readers of lines share."""

    def __init__(self, lines: Lines, tell: Callable[[], int] | None) -> None:
        """`tell`: how many bytes of the file have been read, where that is not the same as the offset."""
        self._lines = lines
        self._tell = tell

    @property
    def offset(self) -> int:
        return self._lines.offset

    @property
    def line(self) -> int:
        return self._lines.line

    @property
    def bytes_read(self) -> int:
        return self.offset if self._tell is None else self._tell()

    def _without_bom(self) -> Iterator[bytes | None]:
        is_first = self._lines.offset == 0
        for line in self._lines:
            yield line.removeprefix(_BOM) if is_first and line is not None else line
            is_first = False


class TextReader(LineReader):
    """Every line is a row."""

    def __iter__(self) -> Iterator[Item]:
        lines = self._lines
        for raw in self._without_bom():
            if raw is None:
                yield Item(lines.line, None, "the line is too long (--max-row-bytes)")
                continue
            try:
                text = raw.decode()
            except UnicodeDecodeError as error:
                yield Item(lines.line, None, f"not UTF-8: byte {error.start} of the line")
                continue
            text = text.removesuffix("\r")
            reason = why_no_text(text, "the line")
            yield Item(lines.line, None, reason) if reason else Item(lines.line, text)


class JsonReader(LineReader):
    """Every line that is not blank is a row: an object with the text in a field, or the text itself as a string."""

    def __init__(self, lines: Lines, tell: Callable[[], int] | None, field: str, keep: Sequence[str]) -> None:
        super().__init__(lines, tell)
        self._field = field
        self._keep = tuple(keep)

    def __iter__(self) -> Iterator[Item]:
        lines = self._lines
        none_kept = (None,) * len(self._keep)
        for raw in self._without_bom():
            if raw is None:
                yield Item(lines.line, None, "the line is too long (--max-row-bytes)", none_kept)
            elif raw and not raw.isspace():
                try:
                    value = orjson.loads(raw)
                except ValueError as error:
                    yield Item(lines.line, None, f"not JSON: {_without_place(error)}", none_kept)
                else:
                    yield self._item(value, none_kept)

    def _item(self, value: Any, kept: tuple[Any, ...]) -> Item:
        line, name = self._lines.line, "the line"
        if isinstance(value, dict):
            kept = tuple(value.get(key) for key in self._keep)
            name = f'"{self._field}"'
            if self._field not in value:
                return Item(line, None, f"no field {name}", kept)
            value = value[self._field]
        reason = why_no_text(value, name)
        return Item(line, None, reason, kept) if reason else Item(line, value, "", kept)


def _without_place(error: ValueError) -> str:
    """Not the line that orjson counts, which is of this one line."""
    return str(error).partition(": line ")[0]


class CsvReader(LineReader):
    """Every record below the header that is not blank is a row. Quoted fields may hold line feeds."""

    def __init__(
        self,
        lines: Lines,
        tell: Callable[[], int] | None,
        field: str,
        keep: Sequence[str],
        *,
        delimiter: str,
        header: Sequence[str],
        max_bytes: int,
    ) -> None:
        """`header`: of `read_csv_header`. Raises InputError when a field is not in it."""
        super().__init__(lines, tell)
        self._delimiter = delimiter
        self._max_bytes = max_bytes
        missing = [name for name in (field, *keep) if name not in header]
        if missing:
            raise InputError(f"its header has no field {missing[0]!r}, it has: {', '.join(header)[:500]}")
        self._column = header.index(field)
        self._name = f'"{field}"'
        self._kept_columns = [header.index(name) for name in keep]
        self._num_columns = len(header)
        self._record_bytes = 0
        self._is_cut_off = False

    def __iter__(self) -> Iterator[Item]:
        csv.field_size_limit(self._max_bytes)
        records = csv.reader(self._decoded(), delimiter=self._delimiter)
        while True:
            line, self._record_bytes = self._lines.line + 1, 0
            try:
                record = next(records)
            except StopIteration:
                return
            except (csv.Error, _LongRecord) as error:
                kept = (None,) * len(self._kept_columns)
                yield Item(line, None, f"not CSV: {error}", kept)
                if isinstance(error, _LongRecord):  # it has ended the generator that feeds the reader
                    records = csv.reader(self._decoded(), delimiter=self._delimiter)
                continue
            if self._is_cut_off:
                yield Item(line, None, "not CSV: a quote is never closed", (None,) * len(self._kept_columns))
            elif record:
                yield self._item(line, record)

    def _item(self, line: int, record: list[str]) -> Item:
        kept = tuple(record[column] if column < len(record) else None for column in self._kept_columns)
        if len(record) != self._num_columns:
            return Item(line, None, f"{len(record)} fields, the header has {self._num_columns}", kept)
        text = record[self._column]
        reason = why_no_text(text, self._name)
        if not reason and not _is_utf8(text):
            reason = f"{self._name} is not UTF-8"
        kept = tuple(value if value is None or _is_utf8(value) else None for value in kept)
        return Item(line, None, reason, kept) if reason else Item(line, text, "", kept)

    def _decoded(self) -> Iterator[str]:
        """What is not UTF-8 is told by the record that it stands in."""
        for raw in self._lines:
            if raw is None or self._record_bytes + len(raw) > self._max_bytes:
                raise _LongRecord("the record is too long (--max-row-bytes); is a quote never closed?")
            self._record_bytes += len(raw) + 1
            yield raw.decode(errors="surrogateescape") + "\n"
        self._is_cut_off = self._record_bytes > 0  # asked for one line more: the record has not ended


class _LongRecord(Exception):
    """Raised while a record is read that has no end in sight."""


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_csv_header(lines: Lines, delimiter: str) -> list[str]:
    """The names of the columns. Side effects: `lines` is behind it. Raises InputError when there is none."""
    decoded = (raw.removeprefix(_BOM).decode(errors="replace") + "\n" for raw in lines if raw is not None)
    try:
        header = next(csv.reader(decoded, delimiter=delimiter), [])
    except csv.Error as error:
        raise InputError(f"its header is not CSV: {error}") from error
    if not header:
        raise InputError("it has no header")
    return header
