"""Parquet: rows out of a file, and vectors into one. The only module that imports pyarrow.

Both take memory that depends on a row group and not on the file. Imported only where parquet is used: pyarrow is an
extra, and takes 30 MB. Called by `vecd.client.bulk.inputs` and `vecd.client.bulk.output`.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from vecd.client.bulk.errors import EmbedError
from vecd.client.bulk.options import EmbedOptions
from vecd.client.bulk.rows import InputRow, Position, make_row

_ROWS_READ = 1024
_GROUP_BYTES = 1 << 24
"""Bytes of vectors in a row group that is written."""


@contextmanager
def open_parquet(path: str, options: EmbedOptions, at: Position) -> Iterator[tuple[Iterator[InputRow], int]]:
    """The rows of a file behind `at`, and the number of all its rows. Side effects: moves `at` behind each row.

    Raises EmbedError when the file is not parquet, lacks a column, has no texts in `options.field`, or, while its rows
    are read, is damaged.
    """
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise EmbedError(f"not a parquet file: {error}") from error
    with file:
        schema = file.schema_arrow
        for name in (options.field, *options.keep):
            if name not in schema.names:
                raise EmbedError(f"it has no column {name!r}, it has: {', '.join(schema.names)[:500]}")
        kind = schema.field(options.field).type
        if not _is_text(kind):
            raise EmbedError(f"its column {options.field!r} holds {kind}, not texts")
        try:
            yield _read_rows(file, options, at), file.metadata.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise EmbedError(f"cannot be read behind row {at.offset}: {error}") from error


def _read_rows(file: pyarrow.parquet.ParquetFile, options: EmbedOptions, at: Position) -> Iterator[InputRow]:
    """Row groups before `at` are not read."""
    columns, group_end = list(dict.fromkeys((options.field, *options.keep))), 0
    for group in range(file.metadata.num_row_groups):
        num_skipped, group_end = at.offset - group_end, group_end + file.metadata.row_group(group).num_rows
        if at.offset >= group_end:
            continue
        # One group at a time: pyarrow would hold the memory of all that it is given together.
        for batch in file.iter_batches(_ROWS_READ, row_groups=[group], columns=columns):
            values = batch.slice(num_skipped).to_pydict()
            num_skipped = max(0, num_skipped - batch.num_rows)
            for text, *kept in zip(*(values[name] for name in (options.field, *options.keep)), strict=True):
                at.offset = at.line = at.offset + 1
                yield make_row(at.line, text, f'"{options.field}"', tuple(kept))


def _is_text(kind: Any) -> bool:
    types = pyarrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    # A column of nulls alone may have the type null: each of its rows is a bad one.
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or types.is_null(kind)
    )


# --- writing --------------------------------------------------------------------------------------------------


def write_parquet(vectors: Path, fields: Path, target: Path, keep: Sequence[str], dim: int, dtype: str) -> None:
    """Columns `row`, those of `keep`, and `embedding`, a list of fixed size, which is null for a row without a vector.

    `vectors`: raw rows end to end; `fields`: a JSON line a row with its number, whether it has a vector, and the kept
    values. A kept column has the type that all its values have; mixed or nested values become JSON texts.
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
        if kind == "json":
            texts = [None if value is None else orjson.dumps(value).decode() for value in values]
            columns.append(pyarrow.array(texts, pyarrow.string()))
        else:
            columns.append(pyarrow.array(values, kind))
    has_none = pyarrow.array([not has_vector for has_vector in have_vectors])
    columns.append(pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows), dim, mask=has_none))
    return pyarrow.Table.from_arrays(columns, schema=schema)


def _column_kinds(fields: Path, num_kept: int) -> list[str]:
    """The type that all values of each kept column have: Arrow's name of it, or "json"."""
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
