"""Parquet: rows out of a file, and vectors into one. The only module that imports pyarrow.

Owns both in memory that depends on a row group and not on the file. Imported where it is needed, and only there:
pyarrow may be missing, and takes 30 MB. Called by `vecd.client.bulk.inputs` and `vecd.client.bulk.output`.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import orjson
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from vecd.client.bulk.readers import why_no_text
from vecd.client.bulk.rows import InputError, Item

_ROWS_READ = 1024
_GROUP_BYTES = 1 << 24
"""Of vectors, in a row group that is written."""


class ParquetReader:
    """The rows of a file from `offset` on, by row groups. To be closed by `with`."""

    def __init__(self, path: str, field: str, keep: Sequence[str], offset: int, num_bytes: int) -> None:
        """Raises InputError when the file is none, lacks a column, or has something else than texts in `field`."""
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"not a parquet file: {error}") from error
        names = self._file.schema_arrow.names
        for name in (field, *keep):
            if name not in names:
                self._file.close()
                raise InputError(f"it has no column {name!r}, it has: {', '.join(names)[:500]}")
        kind = self._file.schema_arrow.field(field).type
        if not _is_text(kind):
            self._file.close()
            raise InputError(f"its column {field!r} holds {kind}, not texts")
        self._field = field
        self._keep = tuple(keep)
        self.offset = offset
        self._num_bytes = num_bytes

    @property
    def line(self) -> int:
        return self.offset

    @property
    def bytes_read(self) -> int:
        num_rows: int = self._file.metadata.num_rows
        return self._num_bytes * self.offset // max(1, num_rows)

    def __iter__(self) -> Iterator[Item]:
        try:
            yield from self._items()
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"cannot be read behind row {self.offset}: {error}") from error

    def _items(self) -> Iterator[Item]:
        metadata, start = self._file.metadata, 0
        for group in range(metadata.num_row_groups):
            num_rows = metadata.row_group(group).num_rows
            if self.offset < start + num_rows:
                yield from self._items_of(group, self.offset - start)
            start += num_rows

    def _items_of(self, group: int, num_skipped: int) -> Iterator[Item]:
        columns = list(dict.fromkeys((self._field, *self._keep)))
        name = f'"{self._field}"'
        for batch in self._file.iter_batches(_ROWS_READ, row_groups=[group], columns=columns):
            if num_skipped >= batch.num_rows:
                num_skipped -= batch.num_rows
                continue
            rest = batch.slice(num_skipped)
            num_skipped = 0
            texts = rest.column(columns.index(self._field)).to_pylist()
            kept_columns = [rest.column(columns.index(name)).to_pylist() for name in self._keep]
            for index, text in enumerate(texts):
                kept = tuple(column[index] for column in kept_columns)
                self.offset += 1
                reason = why_no_text(text, name)
                yield Item(self.offset, None, reason, kept) if reason else Item(self.offset, text, "", kept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _is_text(kind: Any) -> bool:
    types = pyarrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    # A column of nothing but nulls may have a type of its own: each of its rows is a bad one.
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or types.is_null(kind)
    )


# --- writing --------------------------------------------------------------------------------------------------


def write_parquet(vectors: Path, fields: Path, target: Path, keep: Sequence[str], dim: int, dtype: str) -> None:
    """Columns `row`, those of `keep`, and `embedding`, a list of fixed size, which is null for a row without a vector.

    `vectors`: raw rows end to end; `fields`: a JSON line a row: its number, whether it has a vector, what is kept.
    A kept column has the type that all its values have; one of mixed or nested values is of JSON texts.
    """
    kinds = _column_kinds(fields, len(keep))
    schema = pyarrow.schema(
        [
            ("row", pyarrow.int64()),
            *((name, pyarrow.string() if kind == "json" else kind) for name, kind in zip(keep, kinds, strict=True)),
            ("embedding", pyarrow.list_(pyarrow.from_numpy_dtype(dtype), dim)),
        ]
    )
    item = np.dtype(dtype)
    group_rows = max(1, _GROUP_BYTES // (dim * item.itemsize))
    with (
        vectors.open("rb") as matrix,
        fields.open("rb") as lines,
        pyarrow.parquet.ParquetWriter(target, schema) as writer,
    ):
        while records := [orjson.loads(line) for line in itertools.islice(lines, group_rows)]:
            rows = np.fromfile(matrix, item, len(records) * dim)
            writer.write_table(_table(schema, kinds, records, rows, dim))


def _table(schema: Any, kinds: Sequence[str], records: list[list[Any]], rows: NDArray[Any], dim: int) -> Any:
    numbers, have_vectors, *kept = zip(*records, strict=True)
    columns = [pyarrow.array(numbers, pyarrow.int64())]
    for kind, values in zip(kinds, kept, strict=True):
        told = map(_as_json, values) if kind == "json" else values
        columns.append(pyarrow.array(told, pyarrow.string() if kind == "json" else kind))
    has_none = pyarrow.array([not has_vector for has_vector in have_vectors])
    columns.append(pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows), dim, mask=has_none))
    return pyarrow.Table.from_arrays(columns, schema=schema)


def _as_json(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value).decode()


def _column_kinds(fields: Path, num_kept: int) -> list[str]:
    """What all values of each kept column are: Arrow's name of their type, or "json"."""
    seen: list[set[str]] = [set() for _ in range(num_kept)]
    with fields.open("rb") as lines:
        for line in lines if num_kept else ():
            for kinds, value in zip(seen, orjson.loads(line)[2:], strict=True):
                kinds.add(_kind(value))
    return [_common_kind(kinds - {"null"}) for kinds in seen]


def _kind(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return "int64" if -(2**63) <= value < 2**63 else "json"
    return {type(None): "null", bool: "bool", float: "float64", str: "string"}.get(type(value), "json")


def _common_kind(kinds: set[str]) -> str:
    if len(kinds) > 1:
        return "float64" if kinds == {"int64", "float64"} else "json"
    return next(iter(kinds), "string")
