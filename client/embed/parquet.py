"""Parquet: rows out of a file, and vectors into one. The only module that imports pyarrow.

Both take memory that depends on a row group and not on the file. Imported only where parquet is used: pyarrow is an
extra, and takes 30 MB.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import pyarrow
import pyarrow.parquet

from vecd.base.files import JsonObject
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


def write_parquet(
    lines: Path, target: Path, keep: Sequence[str], columns: Mapping[str, str], dtype: str, vectors: Path | None = None
) -> None:
    """Columns `row`, those of `keep`, and `columns`, which are null for a row without results.

    `lines`: a JSON object a row. `columns`: by name, the type: one of `_TYPES`, or that of vectors, as "vector 384" for
    one of 384 dimensions and "vectors 128" for a list of some. `vectors`: those of the only column, raw and end to end;
    the lines have whether there is one. A kept column has the type that all its values have; mixed or nested values
    become JSON texts.
    """
    with lines.open("rb") as file:
        kinds = {"row": "int64", **_kinds_of((_record(line, keep) for line in file), keep), **columns}
    schema = pyarrow.schema([(name, _type_of(kind, dtype)) for name, kind in kinds.items()])
    group_rows = None
    if vectors is not None:
        [kind] = columns.values()
        group_rows = max(1, _GROUP_BYTES // (_width(kind) * np.dtype(dtype).itemsize))
    with (
        lines.open("rb") as file,
        (vectors or lines).open("rb") as matrix,
        pyarrow.parquet.ParquetWriter(target, schema) as writer,
    ):
        while group := list(itertools.islice(file, group_rows)) if vectors else file.readlines(_GROUP_BYTES):
            records = [_record(line, keep) for line in group]
            arrays = [_array(kind, [record[name] for record in records], dtype, matrix) for name, kind in kinds.items()]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def _record(line: bytes, keep: Sequence[str]) -> JsonObject:
    found = orjson.loads(line)
    # An unfinished run of an older version has lists.
    return found if isinstance(found, dict) else dict(zip(("row", "embedding", *keep), found, strict=True))


_SCORE = pyarrow.float64()
"""As the server has it: of two scores near 1, float32 would make one."""
_LABEL = ("label", pyarrow.string())
_TYPES = {
    "number": _SCORE,
    "text": pyarrow.string(),
    "json": pyarrow.string(),
    "indices": pyarrow.list_(pyarrow.int32()),
    "values": pyarrow.list_(pyarrow.float32()),
    "labels": pyarrow.list_(pyarrow.struct([_LABEL, ("score", _SCORE)])),
    "entities": pyarrow.list_(
        pyarrow.struct([_LABEL, ("start", pyarrow.int32()), ("end", pyarrow.int32()), ("score", _SCORE)])
    ),
}


def _type_of(kind: str, dtype: str) -> Any:
    if not (width := _width(kind)):
        return _TYPES.get(kind, kind)
    vector = pyarrow.list_(pyarrow.from_numpy_dtype(dtype), width)
    return vector if kind.startswith("vector ") else pyarrow.list_(vector)


def _width(kind: str) -> int:
    """0 if it is none of vectors."""
    return int(kind.partition(" ")[2] or 0)


def _array(kind: str, values: Sequence[Any], dtype: str, matrix: BinaryIO) -> Any:
    """`values` are True and False where the vectors are in `matrix`."""
    if kind == "json":
        values = [None if value is None else orjson.dumps(value).decode() for value in values]
    if (width := _width(kind)) and isinstance(values[0], bool):
        numbers = pyarrow.array(np.fromfile(matrix, dtype, len(values) * width))
        are_null = pyarrow.array([not has_vector for has_vector in values])
        return pyarrow.FixedSizeListArray.from_arrays(numbers, width, mask=are_null)
    if kind.startswith("vector "):  # pyarrow makes float16 of numpy's numbers alone
        values = [vector and np.array(vector, dtype) for vector in values]
    elif width:
        values = [vectors and [np.array(vector, dtype) for vector in vectors] for vectors in values]
    return pyarrow.array(values, _type_of(kind, dtype))


def _kinds_of(records: Iterable[JsonObject], keep: Sequence[str]) -> dict[str, str]:
    """The type that all values of each kept column have: Arrow's name of it, or "json"."""
    seen: dict[str, set[str]] = {name: set() for name in keep}
    for record in records if keep else ():
        for name, kinds in seen.items():
            kinds.add(_kind(record[name]))
    return {name: _common_kind(kinds - {"null"}) for name, kinds in seen.items()}


def _kind(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return "int64" if -(2**63) <= value < 2**63 else "json"
    return {type(None): "null", bool: "bool", float: "float64", str: "string"}.get(type(value), "json")


def _common_kind(kinds: set[str]) -> str:
    if len(kinds) > 1:
        return "float64" if kinds == {"int64", "float64"} else "json"
    return next(iter(kinds), "string")
