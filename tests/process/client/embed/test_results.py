"""`vecd embed` of results that are not dense vectors, against a server of made-up ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet
import pytest

from tests.support.bulk_server import AT_ONCE, DIM, BulkServer, record_of, vector_of
from vecd.client.embed.command import main

NUM_ROWS = 40
ROWS = [{"text": f"text {n}", "second": f"second {n}", "id": n} for n in range(NUM_ROWS)]
KINDS = {
    "scores": (("rerank",), ("--pair-with", "second")),
    "labels": (("classify",), ("--all-scores",)),
    "entities": (("token-classify",), ()),
    "sparse": (("sparse",), ()),
    "multi-vector": (("multi-vector",), ()),
}
"""By kind of results, the capabilities of a model for it, and the flags."""


def embed(server: BulkServer, folder: Path, *flags: str, out: str = "o.jsonl", rows: Sequence[Any] = ROWS) -> int:
    source = folder / "a.jsonl"
    if not source.exists():
        source.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    arguments = [str(source), "-o", str(folder / out), "--url", server.url, "--batch-texts", "10", "--retry-for", "3"]
    return main([*arguments, "--concurrency", "1", *flags], AT_ONCE)


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return list(pyarrow.parquet.read_table(path).to_pylist())
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def expected_of(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    item = f"{row['text']}|{row['second']}" if kind == "scores" else row["text"]
    return record_of(item, kind)


@pytest.mark.parametrize("out", ["o.jsonl", "o.parquet"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_has_its_results(server, tmp_path, kind, out, capsys):
    server.capabilities, flags = KINDS[kind]
    rows = [*ROWS[:3], {**ROWS[3], "text": " "}, *ROWS[4:]]
    assert embed(server, tmp_path, *flags, "--keep", "id", out=out, rows=rows) == 1
    found = rows_of(tmp_path / out)
    for number, row in enumerate(found):
        columns = expected_of(kind, ROWS[number])
        assert row == {"row": number, "id": number, **(dict.fromkeys(columns) if number == 3 else columns)}
    said = capsys.readouterr().err
    assert f"writes {'labels' if kind == 'entities' else kind}: " in said
    assert "1 row could not be embedded; its results are null. " in said


@pytest.mark.parametrize("kind", KINDS)
def test_another_model_ends_the_run_which_goes_on_with_its_own(server, tmp_path, kind, capsys):
    """Its file is that of a run that was not ended."""
    server.capabilities, flags = KINDS[kind]
    assert embed(server, tmp_path, *flags, out="whole.parquet") == 0

    def change(items: list[str]) -> None:
        if any("text 25" in item for item in items):
            server.model = "another"

    server.fail = change
    assert embed(server, tmp_path, *flags, out="o.parquet") == 1
    assert f"{server.url} has another model: its identity is " in capsys.readouterr().err
    assert embed(server, tmp_path, *flags, out="o.parquet") == 2
    assert "the unfinished run had another model: " in capsys.readouterr().err
    server.model, server.fail = "made-up", lambda items: None
    server.bodies.clear()
    assert embed(server, tmp_path, *flags, out="o.parquet") == 0
    assert not any("text 5" in item.split("|") for item in server.texts)
    assert (tmp_path / "o.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


@pytest.mark.parametrize(("status", "kind"), [(400, "scores"), (413, "labels"), (500, "sparse")])
def test_a_row_that_is_refused_is_told_from_its_neighbours(server, tmp_path, kind, status):
    server.capabilities, flags = KINDS[kind]
    server.fail = lambda items: (status, "not this") if any("text 12" in item for item in items) else None
    assert embed(server, tmp_path, *flags) == 1
    columns = expected_of(kind, ROWS[0])
    blank = [row["row"] for row in rows_of(tmp_path / "o.jsonl") if row[next(iter(columns))] is None]
    assert blank == [12]
    [rejected] = rows_of(tmp_path / "o.jsonl.rejected.jsonl")
    assert rejected["row"] == 12
    assert rejected["reason"].endswith("not this")


def test_several_kinds_of_vectors_in_one_request(server, tmp_path):
    server.capabilities = ("dense", "sparse", "multi-vector")
    assert embed(server, tmp_path, "--results", "sparse,multi-vector,dense", out="o.parquet") == 0
    for row in rows_of(tmp_path / "o.parquet"):
        text = ROWS[row.pop("row")]["text"]
        vectors = {"embedding": vector_of(text).tolist(), **record_of(text, "sparse")}
        assert row == {**vectors, **record_of(text, "multi-vector")}
    schema = pyarrow.parquet.read_schema(tmp_path / "o.parquet")
    assert schema.field("embedding").type == pyarrow.list_(pyarrow.float32(), DIM)
    assert schema.field("embeddings").type == pyarrow.list_(pyarrow.list_(pyarrow.float32(), DIM))
    assert schema.field("indices").type == pyarrow.list_(pyarrow.int32())
    assert [body["encoding_format"] for body in server.bodies] == ["float"] + ["base64"] * (len(server.bodies) - 1)
    assert embed(server, tmp_path, out="o.npy") == 0  # its main ones
    np.testing.assert_array_equal(np.load(tmp_path / "o.npy")[7], vector_of("text 7"))


def test_the_kind_of_a_server_that_comes_late(server, tmp_path):
    server.capabilities, server.num_info_failures = ("sparse",), 2
    assert embed(server, tmp_path) == 0
    assert rows_of(tmp_path / "o.jsonl")[3]["indices"] == record_of("text 3", "sparse")["indices"]


def test_pairs_of_each_format(server, tmp_path):
    server.capabilities, flags = KINDS["scores"]
    (tmp_path / "b.csv").write_text("text,second\n" + "".join(f"{row['text']},{row['second']}\n" for row in ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "b.parquet")
    for name in ("b.csv", "b.parquet"):
        out = tmp_path / "o.jsonl"
        assert main([str(tmp_path / name), "-o", str(out), "--url", server.url, *flags, "--restart"]) == 0
        assert [row["score"] for row in rows_of(out)] == [expected_of("scores", row)["score"] for row in ROWS]


@pytest.mark.parametrize(
    ("capability", "flags", "said"),
    [
        ("classify", ("--results", "sparse"), "the model makes no sparse; it makes: labels (/predict)"),
        ("rerank", ("--pair-with", "no such"), "no row has a field 'no such' (--pair-with)"),
    ],
)
def test_what_does_not_go_together_begins_nothing(server, tmp_path, capability, flags, said, capsys):
    server.capabilities = (capability,)
    assert embed(server, tmp_path, *flags) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
