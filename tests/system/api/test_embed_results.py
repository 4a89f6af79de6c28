"""`vecd embed` of models that make scores, labels, sparse vectors and vectors of tokens: each row is what the server
answers to a direct request."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet
import pytest

from tests.support.every_kind import TOKEN_DIM, folders
from tests.support.serving import RunningServer, exact_server
from vecd.client.embed.command import main

NUM_ROWS = 60
TEXTS = [" ".join(f"w{4 + (7 * row + 3 * place) % 110}" for place in range(1 + row % 9)) for row in range(NUM_ROWS)]
SECONDS = [f"w{4 + row} w{110 - row}" for row in range(NUM_ROWS)]
BLANK = 7
"""The row without a text."""


Serve = Callable[[str], RunningServer]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One server, which serves one model after the other: `vecd embed` asks for no model by its name."""
    config = tmp_path_factory.mktemp("config") / "vecd.toml"
    config.write_text("workers = 1")
    with exact_server("--config", str(config)) as server:

        def serve(name: str) -> RunningServer:
            config.write_text(f'workers = 1\nmodel = "{folders()[name]}"')
            assert "reloaded: " in server.reload_outcome()
            return server

        yield serve


def rows_of(server: RunningServer, folder: Path, *flags: str, suffix: str = ".parquet") -> list[dict[str, Any]]:
    """The rows of the output of `TEXTS` and `SECONDS`, that of a row without a text left out."""
    source, out = folder / "a.jsonl", folder / f"out{suffix}"
    texts = [" " if row == BLANK else text for row, text in enumerate(TEXTS)]
    pairs = enumerate(zip(texts, SECONDS, strict=True))
    lines = [{"text": text, "second": second, "id": row} for row, (text, second) in pairs]
    source.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    arguments = [str(source), "-o", str(out), "--url", server.url, "--keep", "id", "--batch-texts", "8", "--restart"]
    assert main([*arguments, "--on-bad-row", "blank", *flags]) == 0
    if suffix == ".parquet":
        rows = pyarrow.parquet.read_table(out).to_pylist()
    else:
        rows = [orjson.loads(line) for line in out.read_bytes().splitlines()]
    assert [row.pop("row") for row in rows] == [row.pop("id") for row in rows] == list(range(NUM_ROWS))
    assert set(rows.pop(BLANK).values()) == {None}
    return rows


def without_blank(values: Sequence[Any]) -> list[Any]:
    return [value for row, value in enumerate(values) if row != BLANK]


def check_close(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """In float32: the batches differ."""
    np.testing.assert_allclose(np.array(found, np.float64), np.array(expected, np.float64), atol=2e-6, rtol=2e-5)


def test_scores_of_pairs(serve: Serve, tmp_path: Path) -> None:
    server = serve("scores")
    for suffix, flags, fields in (".jsonl", (), {}), (".parquet", ("--raw-scores",), {"raw_scores": True}):
        rows = rows_of(server, tmp_path, "--pair-with", "second", *flags, suffix=suffix)
        data = server.post("/score", queries=TEXTS, documents=SECONDS, **fields)["data"]
        check_close([row["score"] for row in rows], without_blank([item["score"] for item in data]))
        assert set(rows[0]) == {"score"}


def test_labels_of_texts_and_pairs(serve: Serve, tmp_path: Path) -> None:
    server = serve("labels")
    for flags, inputs in (
        ((), [[text] for text in TEXTS]),
        (("--pair-with", "second"), list(zip(TEXTS, SECONDS, strict=True))),
    ):
        expected = without_blank(server.post("/predict", inputs=inputs))
        rows = rows_of(server, tmp_path, "--all-scores", *flags)
        for row, labels in zip(rows, expected, strict=True):
            assert [each["label"] for each in row["scores"]] == [each["label"] for each in labels]
            check_close([each["score"] for each in row["scores"]], [each["score"] for each in labels])
            assert (row["label"], row["score"]) == tuple(row["scores"][0].values())
        best = rows_of(server, tmp_path, *flags, suffix=".jsonl")
        assert [each["label"] for each in best] == [each["label"] for each in rows]
        assert set(best[0]) == {"label", "score"}


def test_labels_of_parts_of_texts(serve: Serve, tmp_path: Path) -> None:
    server = serve("entities")
    rows = rows_of(server, tmp_path)
    expected = without_blank(server.post("/predict", inputs=TEXTS))
    assert any(expected)
    for row, entities in zip(rows, expected, strict=True):
        found = [(each["label"], each["start"], each["end"]) for each in row["entities"]]
        assert found == [(each["entity_group"], each["start"], each["end"]) for each in entities]
        check_close([each["score"] for each in row["entities"]], [each["score"] for each in entities])


def test_sparse_vectors(serve: Serve, tmp_path: Path) -> None:
    server = serve("splade")
    direct = server.post("/v1/embeddings", input=TEXTS, output="sparse")["data"]
    for suffix in (".parquet", ".jsonl"):
        rows = rows_of(server, tmp_path, suffix=suffix)
        for row, item in zip(rows, without_blank(direct), strict=True):
            assert row["indices"] == item["sparse"]["indices"]
            check_close(row["values"], item["sparse"]["values"])


def test_vectors_of_tokens(serve: Serve, tmp_path: Path) -> None:
    server = serve("pylate")
    direct = server.post("/v1/embeddings", input=TEXTS, output="multi-vector", input_type="query")["data"]
    for suffix in (".parquet", ".jsonl"):
        rows = rows_of(server, tmp_path, "--input-type", "query", suffix=suffix)
        for row, item in zip(rows, without_blank(direct), strict=True):
            assert np.shape(row["embeddings"])[1] == TOKEN_DIM
            check_close(row["embeddings"], item["embeddings"])
        halves = rows_of(server, tmp_path, "--input-type", "query", "--dtype", "float16", suffix=suffix)
        np.testing.assert_allclose(halves[3]["embeddings"], rows[3]["embeddings"], atol=1e-3)
    scores = rows_of(server, tmp_path, "--results", "scores", "--pair-with", "second")
    data = server.post("/score", queries=TEXTS, documents=SECONDS)["data"]
    check_close([row["score"] for row in scores], without_blank([item["score"] for item in data]))


def test_several_kinds_of_vectors_in_one_run(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve("m3")
    rows = rows_of(server, tmp_path, "--results", "multi-vector,dense,sparse")
    assert "writes dense and sparse and multi-vector: " in capsys.readouterr().err
    direct = server.post("/v1/embeddings", input=TEXTS, output=["dense", "sparse", "multi-vector"])["data"]
    for row, item in zip(rows, without_blank(direct), strict=True):
        check_close(row["embedding"], item["embedding"])
        assert row["indices"] == item["sparse"]["indices"]
        check_close(row["values"], item["sparse"]["values"])
        check_close(row["embeddings"], item["embeddings"])
    assert main([str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "s.npy"), "--url", server.url]) == 1
    check_close(np.delete(np.load(tmp_path / "s.npy"), BLANK, axis=0), [row["embedding"] for row in rows])


def test_what_the_model_has_not_is_refused_with_what_it_has(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("w4\n")
    server = serve("labels")
    for flags, said in (
        (("--results", "sparse"), "the model makes no sparse; it makes: labels (/predict)"),
        (("--prompt", "x"), "--prompt is for vectors, not for labels"),
    ):
        assert main([str(tmp_path / "a.txt"), "-o", str(tmp_path / "o.jsonl"), "--url", server.url, *flags]) == 2
        assert said in capsys.readouterr().err
    assert main([str(tmp_path / "a.txt"), "-o", str(tmp_path / "o.npy"), "--url", server.url]) == 2
    assert ".npy holds a matrix of dense vectors, not labels" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]
