"""Lines → rows: texts, JSON lines, CSV.

Owns what a row is in each format, and what is wrong with a bad one. Opens nothing. Called by
`vecd.client.bulk.inputs`.
"""

import csv
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from vecd.client.bulk.lines import Lines
from vecd.client.bulk.rows import InputError, InputRow

_BOM = b"\xef\xbb\xbf"
_JSON_TYPES = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}
_TOO_LONG = "the line is too long (--max-row-bytes)"


def make_row(line: int, value: Any, name: str, kept: tuple[Any, ...] = ()) -> InputRow:
    """A row with the text `value` of the field `name`, or with what is wrong with it."""
    if not isinstance(value, str):
        kind = "null" if value is None else _JSON_TYPES.get(type(value), "no text")
        return InputRow(line, None, f"{name} is {kind}, not a text", kept)
    if not value or value.isspace():
        return InputRow(line, None, f"{name} is empty", kept)
    return InputRow(line, value, "", kept)


def _without_bom(lines: Lines) -> Iterator[bytes | None]:
    is_first = lines.offset == 0
    for line in lines:
        yield line.removeprefix(_BOM) if is_first and line is not None else line
        is_first = False


def read_text_rows(lines: Lines) -> Iterator[InputRow]:
    """Every line is a row."""
    for raw in _without_bom(lines):
        if raw is None:
            yield InputRow(lines.line, None, _TOO_LONG)
            continue
        try:
            yield make_row(lines.line, raw.decode().removesuffix("\r"), "the line")
        except UnicodeDecodeError as error:
            yield InputRow(lines.line, None, f"not UTF-8: byte {error.start} of the line")


def read_json_rows(lines: Lines, field: str, keep: Sequence[str]) -> Iterator[InputRow]:
    """Every line that is not blank is a row: an object with the text in `field`, or the text itself as a string."""
    none_kept = (None,) * len(keep)
    for raw in _without_bom(lines):
        if raw is None:
            yield InputRow(lines.line, None, _TOO_LONG, none_kept)
            continue
        if not raw or raw.isspace():
            continue
        try:
            value = orjson.loads(raw)
        except ValueError as error:
            reason = str(error).partition(": line ")[0]  # orjson counts the lines of this one line
            yield InputRow(lines.line, None, f"not JSON: {reason}", none_kept)
            continue
        if not isinstance(value, dict):
            yield make_row(lines.line, value, "the line", none_kept)
            continue
        kept = tuple(value.get(key) for key in keep)
        if field in value:
            yield make_row(lines.line, value[field], f'"{field}"', kept)
        else:
            yield InputRow(lines.line, None, f'no field "{field}"', kept)


class CsvReader:
    """Every record below the header that is not blank is a row. Quoted fields may contain line feeds."""

    def __init__(
        self, lines: Lines, field: str, keep: Sequence[str], *, delimiter: str, header: Sequence[str], max_bytes: int
    ) -> None:
        """`header`: of `read_csv_header`. Raises InputError when a field is not in it."""
        missing = [name for name in (field, *keep) if name not in header]
        if missing:
            raise InputError(f"its header has no field {missing[0]!r}, it has: {', '.join(header)[:500]}")
        self._lines = lines
        self._delimiter = delimiter
        self._max_bytes = max_bytes
        self._column = header.index(field)
        self._name = f'"{field}"'
        self._kept_columns = [header.index(name) for name in keep]
        self._num_columns = len(header)
        self._record_bytes = 0
        self._is_cut_off = False

    def __iter__(self) -> Iterator[InputRow]:
        csv.field_size_limit(self._max_bytes)
        none_kept = (None,) * len(self._kept_columns)
        records = csv.reader(self._decoded(), delimiter=self._delimiter)
        while True:
            line, self._record_bytes = self._lines.line + 1, 0
            try:
                record = next(records)
            except StopIteration:
                return
            except (csv.Error, _LongRecord) as error:
                yield InputRow(line, None, f"not CSV: {error}", none_kept)
                if isinstance(error, _LongRecord):  # it has ended the generator that feeds the reader
                    records = csv.reader(self._decoded(), delimiter=self._delimiter)
                continue
            if self._is_cut_off:
                yield InputRow(line, None, "not CSV: a quote is never closed", none_kept)
            elif record:
                yield self._row(line, record)

    def _row(self, line: int, record: list[str]) -> InputRow:
        values = [record[column] if column < len(record) else None for column in self._kept_columns]
        if len(record) != self._num_columns:
            return InputRow(line, None, f"{len(record)} fields, the header has {self._num_columns}", tuple(values))
        kept = tuple(value if value is None or _is_utf8(value) else None for value in values)
        text = record[self._column]
        if text and not _is_utf8(text):
            return InputRow(line, None, f"{self._name} is not UTF-8", kept)
        return make_row(line, text, self._name, kept)

    def _decoded(self) -> Iterator[str]:
        """Bytes that are not UTF-8 become surrogates, which `_row` finds."""
        for raw in self._lines:
            if raw is None or self._record_bytes + len(raw) > self._max_bytes:
                raise _LongRecord("the record is too long (--max-row-bytes); is a quote never closed?")
            self._record_bytes += len(raw) + 1
            yield raw.decode(errors="surrogateescape") + "\n"
        self._is_cut_off = self._record_bytes > 0  # the parser has requested one line more: the record has no end


class _LongRecord(Exception):
    """Raised while a record is read that is longer than --max-row-bytes."""


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
