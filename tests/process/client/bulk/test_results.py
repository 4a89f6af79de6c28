"""`vecd embed` of results that are not dense vectors, against a server of made-up ones."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet
import pytest

from tests.support.bulk_server import DIM, BulkServer, record_of, vector_of
from vecd.client.bulk import run as run_module
from vecd.client.bulk import service as service_module
from vecd.client.bulk.command import main

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


@pytest.fixture(autouse=True)
def commit_and_ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_FIRST_COMMIT_S", 0.0)
    monkeypatch.setattr(run_module, "_COMMIT_S", 0.0)
    monkeypatch.setattr(service_module, "_FIRST_PAUSE_S", 0.02)


@pytest.fixture
def server() -> Iterator[BulkServer]:
    with BulkServer() as server:
        yield server


def embed(server: BulkServer, folder: Path, *flags: str, out: str = "o.jsonl", rows: Sequence[Any] = ROWS) -> int:
    source = folder / "a.jsonl"
    if not source.exists():
        source.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    arguments = [str(source), "-o", str(folder / out), "--url", server.url, "--batch-texts", "10", "--retry-for", "3"]
    return main([*arguments, "--concurrency", "1", *flags])


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return list(pyarrow.parquet.read_table(path).to_pylist())
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def expected_of(kind: str, row: dict[str, Any]) -> dict[str, Any]:
    item = f"{row['text']}|{row['second']}" if kind == "scores" else row["text"]
    return record_of(item, kind)


@pytest.mark.parametrize("out", ["o.jsonl", "o.parquet"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_has_its_results(
    server: BulkServer, tmp_path: Path, kind: str, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
def test_a_run_that_was_ended_goes_on(server: BulkServer, tmp_path: Path, kind: str) -> None:
    """Its file is that of a run that was not ended."""
    server.capabilities, flags = KINDS[kind]
    assert embed(server, tmp_path, *flags, out="whole.parquet") == 0
    server.fail = lambda items: (403, "enough") if any("text 25" in item for item in items) else None
    assert embed(server, tmp_path, *flags, out="o.parquet") == 1
    server.fail = lambda items: None
    server.bodies.clear()
    assert embed(server, tmp_path, *flags, out="o.parquet") == 0
    assert not any("text 5" in item.split("|") for item in server.texts)
    assert (tmp_path / "o.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_another_model_is_found_out(
    server: BulkServer, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.capabilities, flags = KINDS[kind]

    def change(items: list[str]) -> None:
        if any("text 25" in item for item in items):
            server.model = "another"

    server.fail = change
    assert embed(server, tmp_path, *flags) == 1
    assert "the server has another model than this run began with" in capsys.readouterr().err
    assert embed(server, tmp_path, *flags) == 2
    assert "the unfinished run had another model: other vectors for the same text" in capsys.readouterr().err
    server.model, server.fail = "made-up", lambda items: None
    assert embed(server, tmp_path, *flags) == 0
    assert {name: rows_of(tmp_path / "o.jsonl")[25][name] for name in expected_of(kind, ROWS[25])} == expected_of(
        kind, ROWS[25]
    )


@pytest.mark.parametrize(("status", "kind"), [(400, "scores"), (413, "labels"), (500, "sparse")])
def test_a_row_that_is_refused_is_told_from_its_neighbours(
    server: BulkServer, tmp_path: Path, kind: str, status: int
) -> None:
    server.capabilities, flags = KINDS[kind]
    server.fail = lambda items: (status, "not this") if any("text 12" in item for item in items) else None
    assert embed(server, tmp_path, *flags) == 1
    columns = expected_of(kind, ROWS[0])
    blank = [row["row"] for row in rows_of(tmp_path / "o.jsonl") if row[next(iter(columns))] is None]
    assert blank == [12]
    [rejected] = rows_of(tmp_path / "o.jsonl.rejected.jsonl")
    assert rejected["row"] == 12
    assert rejected["reason"].endswith("not this")


def test_several_kinds_of_vectors_in_one_request(server: BulkServer, tmp_path: Path) -> None:
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


def test_the_kind_of_a_server_that_comes_late(
    server: BulkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its model is for is not known when the first request is sent."""
    server.capabilities = ("sparse",)
    info = service_module.EmbeddingService._info
    answers: list[dict[str, Any]] = [{}]

    async def later(self: service_module.EmbeddingService) -> dict[str, Any]:
        return answers.pop() if answers else await info(self)

    monkeypatch.setattr(service_module.EmbeddingService, "_info", later)
    server.fail = lambda items: (400, "no dense vectors") if "output" not in server.bodies[-1] else None
    assert embed(server, tmp_path) == 0
    assert rows_of(tmp_path / "o.jsonl")[3]["indices"] == record_of("text 3", "sparse")["indices"]


def test_pairs_of_each_format(server: BulkServer, tmp_path: Path) -> None:
    server.capabilities, flags = KINDS["scores"]
    (tmp_path / "b.csv").write_text("text,second\n" + "".join(f"{row['text']},{row['second']}\n" for row in ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "b.parquet")
    for name in ("b.csv", "b.parquet"):
        out = tmp_path / "o.jsonl"
        assert main([str(tmp_path / name), "-o", str(out), "--url", server.url, *flags, "--restart"]) == 0
        assert [row["score"] for row in rows_of(out)] == [expected_of("scores", row)["score"] for row in ROWS]


def test_bad_pairs(server: BulkServer, tmp_path: Path) -> None:
    server.capabilities, flags = KINDS["scores"]
    rows = [ROWS[0], {"text": "a"}, {"text": "a", "second": ""}, {"text": "", "second": "b"}, "one", ROWS[5]]
    assert embed(server, tmp_path, *flags, rows=rows) == 1
    assert [row["score"] is None for row in rows_of(tmp_path / "o.jsonl")] == [False, True, True, True, True, False]
    reasons = [row["reason"] for row in rows_of(tmp_path / "o.jsonl.rejected.jsonl")]
    object_ = "the line is no object with the two texts of a pair"
    assert reasons == ['no field "second"', '"second" is empty', '"text" is empty', object_]


@pytest.mark.parametrize(
    ("capabilities", "flags", "out", "said"),
    [
        (("classify",), ("--results", "sparse"), "o.jsonl", "the model makes no sparse; it makes: labels (/predict)"),
        (("rerank",), (), "o.jsonl", "scores are of pairs: name the field of the second text with --pair-with"),
        (("sparse",), (), "o.npy", ".npy holds a matrix of dense vectors, not sparse"),
        (("sparse",), ("--pair-with", "second"), "o.jsonl", "--pair-with: sparse are of one text, not of two"),
        (("token-classify",), ("--pair-with", "second"), "o.jsonl", "labels of parts are of one text"),
        (("classify",), ("--prompt", "x"), "o.jsonl", "--prompt is for vectors, not for labels"),
        (("multi-vector",), ("--dimensions", "2"), "o.jsonl", "--dimensions is for dense vectors"),
        (("sparse",), ("--dtype", "float16"), "o.jsonl", "--dtype is for dense vectors and multi-vectors"),
        (("sparse",), ("--overflow", "chunk"), "o.jsonl", "--overflow chunk makes a mean of dense vectors"),
        (("dense",), ("--raw-scores",), "o.jsonl", "--raw-scores is for scores and labels"),
        (("rerank",), ("--pair-with", "second", "--all-scores"), "o.jsonl", "--all-scores is for labels"),
        (("classify",), ("--keep", "label"), "o.jsonl", "'label' would stand twice"),
        (("rerank",), ("--pair-with", "no such"), "o.jsonl", "no row has a field 'no such' (--pair-with)"),
    ],
)
def test_what_does_not_go_together_begins_nothing(
    server: BulkServer,
    tmp_path: Path,
    capabilities: tuple[str, ...],
    flags: tuple[str, ...],
    out: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.capabilities = capabilities
    assert embed(server, tmp_path, *flags, out=out, rows=[{**row, "label": "x"} for row in ROWS]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("results", ["labels,dense", "vectors", "dense,"])
def test_results_that_are_none(server: BulkServer, tmp_path: Path, results: str) -> None:
    with pytest.raises(SystemExit) as exited:
        embed(server, tmp_path, "--results", results)
    assert exited.value.code == 2


def test_lines_of_text_are_no_pairs(server: BulkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    flags = ("-o", str(tmp_path / "o.jsonl"), "--url", server.url, "--pair-with", "second")
    assert main([str(tmp_path / "a.txt"), *flags]) == 2
    assert "--pair-with names a field, and lines of text have none" in capsys.readouterr().err


def test_other_results_do_not_go_on_with_a_file(
    server: BulkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.capabilities = ("dense", "sparse")
    server.fail = lambda items: (403, "enough") if "text 25" in items else None
    assert embed(server, tmp_path) == 1
    assert embed(server, tmp_path, "--results", "sparse") == 2
    said = capsys.readouterr().err
    assert "its results are indices (indices), values (values), not dense vectors" in said
