"""Rows of a parquet file, from any of its rows on."""

from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
import pyarrow.parquet

from vecd.client.bulk.options import EmbedOptions
from vecd.client.bulk.parquet import open_parquet
from vecd.client.bulk.rows import Position


def read(path: Path, offset: int) -> list[tuple[int, str | None, tuple[object, ...]]]:
    at, options = Position(offset=offset, line=offset), EmbedOptions(files=[], out=Path("v.jsonl"), keep=("id",))
    with open_parquet(str(path), options, at) as (rows, num_rows):
        found = [(row.line, row.text, row.kept) for row in rows]
    assert at.offset == at.line == num_rows
    return found


@pytest.mark.slow
@pytest.mark.parametrize("group_rows", [1, 3, 2000, 5000])
def test_reading_goes_on_behind_any_row(tmp_path: Path, group_rows: int) -> None:
    path = tmp_path / "a.parquet"
    texts = [None if n % 7 == 3 else f"text {n}" for n in range(3000)]
    pyarrow.parquet.write_table(pyarrow.table({"id": range(3000), "text": texts}), path, row_group_size=group_rows)
    rows = [(n + 1, text, (n,)) for n, text in enumerate(texts)]
    for offset in (0, 1, 2, 3, 4, 1023, 1024, 1025, 1999, 2000, 2999, 3000):
        assert read(path, offset) == rows[offset:]


def test_a_file_without_rows_has_none(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"id": pyarrow.array([], "int64"), "text": pyarrow.array([], "string")}), path
    )
    assert read(path, 0) == []
