"""Parquet: rows out of a file, and vectors into one. The only module that imports pyarrow.

Both take memory that depends on a row group and not on the file. Imported only where parquet is used: pyarrow is an
extra, and takes 30 MB.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow
import pyarrow.parquet

from vecd.client.embed.options import EmbedError, EmbedOptions
from vecd.client.embed.rows import InputRow, Position, make_row, quoted

_ROWS_READ = 1024
_GROUP_BYTES = 1 << 24
"""Bytes of vectors, or of JSON lines, in a row group that is written."""


@contextmanager
def open_parquet(path: str, options: EmbedOptions, at: Position) -> Iterator[tuple[Iterator[InputRow], int]]:
    """The rows of a file behind `at`, and the number of all its rows. Side effects: moves `at` behind each row.

    Raises EmbedError when the file is not parquet, lacks a column, has no texts in those of texts, or, while its rows
    are read, is damaged.
    """
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise EmbedError(f"not a parquet file: {error}") from error
    with file:
        schema = file.schema_arrow
        for name in (*options.text_fields, *options.keep):
            if name not in schema.names:
                raise EmbedError(f"it has no column {name!r}, it has: {', '.join(schema.names)[:500]}")
        for name in options.text_fields:
            if not _is_text(kind := schema.field(name).type):
                raise EmbedError(f"its column {name!r} holds {kind}, not texts")
        try:
            yield _read_rows(file, options, at), file.metadata.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise EmbedError(f"cannot be read behind row {at.offset}: {error}") from error


def _read_rows(file: pyarrow.parquet.ParquetFile, options: EmbedOptions, at: Position) -> Iterator[InputRow]:
    """Row groups before `at` are not read."""
    fields, group_end = options.text_fields, 0
    columns, names = list(dict.fromkeys((*fields, *options.keep))), quoted(fields)
    for group in range(file.metadata.num_row_groups):
        num_skipped, group_end = at.offset - group_end, group_end + file.metadata.row_group(group).num_rows
        if at.offset >= group_end:
            continue
        # One group at a time: pyarrow would hold the memory of all that it is given together.
        for batch in file.iter_batches(_ROWS_READ, row_groups=[group], columns=columns):
            values = batch.slice(num_skipped).to_pydict()
            num_skipped = max(0, num_skipped - batch.num_rows)
            for row in zip(*(values[name] for name in (*fields, *options.keep)), strict=True):
                at.offset = at.line = at.offset + 1
                yield make_row(at.line, names, row[: len(fields)], row[len(fields) :])


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
    kinds = _column_kinds((record[2:] for record in _json_lines(fields)), len(keep))
    schema = _schema(keep, kinds, {"embedding": pyarrow.list_(pyarrow.from_numpy_dtype(dtype), dim)})
    item = np.dtype(dtype)
    group_rows = max(1, _GROUP_BYTES // (dim * item.itemsize))
    with (
        vectors.open("rb") as matrix,
        fields.open("rb") as lines,
        pyarrow.parquet.ParquetWriter(target, schema) as writer,
    ):
        while records := [orjson.loads(line) for line in itertools.islice(lines, group_rows)]:
            numbers, have_vectors, *kept = zip(*records, strict=True)
            rows = pyarrow.array(np.fromfile(matrix, item, len(records) * dim))
            has_none = pyarrow.array([not has_vector for has_vector in have_vectors])
            found = pyarrow.FixedSizeListArray.from_arrays(rows, dim, mask=has_none)
            writer.write_table(_table(schema, numbers, kinds, kept, [found]))


def write_records(lines: Path, target: Path, keep: Sequence[str], columns: Mapping[str, str], dtype: str) -> None:
    """Columns `row`, those of `keep`, and `columns`, which are null for a row without results.

    `lines`: a JSON object a row. `columns`: by name, the type: one of `_TYPES`, or that of vectors, as "vector 384" for
    one of 384 dimensions and "vectors 128" for a list of some.
    """
    kinds = _column_kinds(([record[name] for name in keep] for record in _json_lines(lines)), len(keep))
    schema = _schema(keep, kinds, {name: _type_of(kind, dtype) for name, kind in columns.items()})
    with lines.open("rb") as file, pyarrow.parquet.ParquetWriter(target, schema) as writer:
        while group := file.readlines(_GROUP_BYTES):
            records = [orjson.loads(line) for line in group]
            values = {name: [record[name] for record in records] for name in ("row", *keep, *columns)}
            found = [_result_array(kind, values[name], dtype) for name, kind in columns.items()]
            writer.write_table(_table(schema, values["row"], kinds, [values[name] for name in keep], found))


def _table(
    schema: Any, numbers: Sequence[int], kinds: Sequence[str], kept: Iterable[Sequence[Any]], results: Sequence[Any]
) -> Any:
    arrays = [pyarrow.array(numbers, pyarrow.int64()), *map(_kept_array, kinds, kept), *results]
    return pyarrow.Table.from_arrays(arrays, schema=schema)


def _schema(keep: Sequence[str], kinds: Sequence[str], results: Mapping[str, Any]) -> Any:
    kept = {name: pyarrow.string() if kind == "json" else kind for name, kind in zip(keep, kinds, strict=True)}
    return pyarrow.schema([("row", pyarrow.int64()), *kept.items(), *results.items()])


_SCORE = pyarrow.float64()
"""As the server has it: of two scores near 1, float32 would make one."""
_LABEL = ("label", pyarrow.string())
_TYPES = {
    "number": _SCORE,
    "text": pyarrow.string(),
    "indices": pyarrow.list_(pyarrow.int32()),
    "values": pyarrow.list_(pyarrow.float32()),
    "labels": pyarrow.list_(pyarrow.struct([_LABEL, ("score", _SCORE)])),
    "entities": pyarrow.list_(
        pyarrow.struct([_LABEL, ("start", pyarrow.int32()), ("end", pyarrow.int32()), ("score", _SCORE)])
    ),
}


def _type_of(kind: str, dtype: str) -> Any:
    name, _, width = kind.partition(" ")
    if not width:
        return _TYPES[kind]
    vector = pyarrow.list_(pyarrow.from_numpy_dtype(dtype), int(width))
    return vector if name == "vector" else pyarrow.list_(vector)


def _result_array(kind: str, values: Sequence[Any], dtype: str) -> Any:
    name, _, width = kind.partition(" ")
    if not width:
        return pyarrow.array(values, _TYPES[kind])
    are_null = [value is None for value in values]
    if name == "vector":
        matrix = np.array([value or [0.0] * int(width) for value in values], dtype)
        return pyarrow.FixedSizeListArray.from_arrays(
            pyarrow.array(matrix.reshape(-1)), int(width), mask=pyarrow.array(are_null)
        )
    matrix = np.array([row for value in values for row in value or ()], dtype)
    rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(matrix.reshape(-1)), int(width))
    ends = np.cumsum([0, *(len(value or ()) for value in values)], dtype=np.int32)
    return pyarrow.ListArray.from_arrays(pyarrow.array(ends), rows, mask=pyarrow.array(are_null))


def _kept_array(kind: str, values: Sequence[Any]) -> Any:
    if kind != "json":
        return pyarrow.array(values, kind)
    texts = [None if value is None else orjson.dumps(value).decode() for value in values]
    return pyarrow.array(texts, pyarrow.string())


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as lines:
        yield from map(orjson.loads, lines)


def _column_kinds(rows: Iterable[Sequence[Any]], num_kept: int) -> list[str]:
    """The type that all values of each kept column have: Arrow's name of it, or "json". `rows`: the kept values."""
    seen: list[set[str]] = [set() for _ in range(num_kept)]
    for row in rows if num_kept else ():
        for kinds, value in zip(seen, row, strict=True):
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
