"""`vecd embed` of models that make scores, labels, sparse vectors and vectors of tokens: each row is what the server
answers to a direct request."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pyarrow.parquet
import pytest

from tests.support.multi_vector_checkpoints import TOKEN_DIM, save_bge_m3, save_pylate
from tests.support.score_checkpoints import save_classifier
from tests.support.serving import Server, clean_environment, eventually, running_server
from tests.support.soak.embedding import rows_in
from tests.support.sparse_checkpoints import save_splade
from vecd.client.bulk.command import main

NUM_ROWS = 60
TEXTS = [" ".join(f"w{4 + (7 * row + 3 * place) % 110}" for place in range(1 + row % 9)) for row in range(NUM_ROWS)]
SECONDS = [f"w{4 + row} w{110 - row}" for row in range(NUM_ROWS)]
BLANK = 7
"""The row without a text."""


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    with running_server(str(folder), "--workers", "1", "--dtype", "float32") as server:
        yield server


def rows_of(server: Server, folder: Path, *flags: str, suffix: str = ".parquet") -> list[dict[str, Any]]:
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


def post(server: Server, path: str, **body: Any) -> Any:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    return response.raise_for_status().json()


def check_close(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """In float32: the batches differ."""
    np.testing.assert_allclose(np.array(found, np.float64), np.array(expected, np.float64), atol=2e-6, rtol=2e-5)


def test_scores_of_pairs(tmp_path: Path) -> None:
    save_classifier(tmp_path / "model")
    with serving(tmp_path / "model") as server:
        for suffix, flags, fields in (".jsonl", (), {}), (".parquet", ("--raw-scores",), {"raw_scores": True}):
            rows = rows_of(server, tmp_path, "--pair-with", "second", *flags, suffix=suffix)
            data = post(server, "/score", queries=TEXTS, documents=SECONDS, **fields)["data"]
            check_close([row["score"] for row in rows], without_blank([item["score"] for item in data]))
            assert set(rows[0]) == {"score"}


def test_labels_of_texts_and_pairs(tmp_path: Path) -> None:
    save_classifier(tmp_path / "model", labels=["no", "maybe", "yes"])
    with serving(tmp_path / "model") as server:
        for flags, inputs in (
            ((), [[text] for text in TEXTS]),
            (("--pair-with", "second"), list(zip(TEXTS, SECONDS, strict=True))),
        ):
            expected = without_blank(post(server, "/predict", inputs=inputs))
            rows = rows_of(server, tmp_path, "--all-scores", *flags)
            for row, labels in zip(rows, expected, strict=True):
                assert [each["label"] for each in row["scores"]] == [each["label"] for each in labels]
                check_close([each["score"] for each in row["scores"]], [each["score"] for each in labels])
                assert (row["label"], row["score"]) == tuple(row["scores"][0].values())
            best = rows_of(server, tmp_path, *flags, suffix=".jsonl")
            assert [each["label"] for each in best] == [each["label"] for each in rows]
            assert set(best[0]) == {"label", "score"}


def test_labels_of_parts_of_texts(tmp_path: Path) -> None:
    save_classifier(tmp_path / "model", labels=["O", "B-PER", "I-PER", "B-LOC"], is_of_tokens=True)
    with serving(tmp_path / "model") as server:
        rows = rows_of(server, tmp_path)
        expected = without_blank(post(server, "/predict", inputs=TEXTS))
        assert any(expected)
        for row, entities in zip(rows, expected, strict=True):
            found = [(each["label"], each["start"], each["end"]) for each in row["entities"]]
            assert found == [(each["entity_group"], each["start"], each["end"]) for each in entities]
            check_close([each["score"] for each in row["entities"]], [each["score"] for each in entities])


def test_sparse_vectors(tmp_path: Path) -> None:
    with serving(save_splade(tmp_path / "model")) as server:
        direct = post(server, "/v1/embeddings", input=TEXTS, output="sparse")["data"]
        for suffix in (".parquet", ".jsonl"):
            rows = rows_of(server, tmp_path, suffix=suffix)
            for row, item in zip(rows, without_blank(direct), strict=True):
                assert row["indices"] == item["sparse"]["indices"]
                check_close(row["values"], item["sparse"]["values"])


def test_vectors_of_tokens(tmp_path: Path) -> None:
    with serving(save_pylate(tmp_path / "model", "bert")) as server:
        direct = post(server, "/v1/embeddings", input=TEXTS, output="multi-vector", input_type="query")["data"]
        for suffix in (".parquet", ".jsonl"):
            rows = rows_of(server, tmp_path, "--input-type", "query", suffix=suffix)
            for row, item in zip(rows, without_blank(direct), strict=True):
                assert np.shape(row["embeddings"])[1] == TOKEN_DIM
                check_close(row["embeddings"], item["embeddings"])
            halves = rows_of(server, tmp_path, "--input-type", "query", "--dtype", "float16", suffix=suffix)
            np.testing.assert_allclose(halves[3]["embeddings"], rows[3]["embeddings"], atol=1e-3)
        scores = rows_of(server, tmp_path, "--results", "scores", "--pair-with", "second")
        data = post(server, "/score", queries=TEXTS, documents=SECONDS)["data"]
        check_close([row["score"] for row in scores], without_blank([item["score"] for item in data]))


def test_several_kinds_of_vectors_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_bge_m3(tmp_path / "model")
    with serving(tmp_path / "model") as server:
        rows = rows_of(server, tmp_path, "--results", "multi-vector,dense,sparse")
        assert "writes dense and sparse and multi-vector: " in capsys.readouterr().err
        direct = post(server, "/v1/embeddings", input=TEXTS, output=["dense", "sparse", "multi-vector"])["data"]
        for row, item in zip(rows, without_blank(direct), strict=True):
            check_close(row["embedding"], item["embedding"])
            assert row["indices"] == item["sparse"]["indices"]
            check_close(row["values"], item["sparse"]["values"])
            check_close(row["embeddings"], item["embeddings"])
        assert main([str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "s.npy"), "--url", server.url]) == 1
        check_close(np.delete(np.load(tmp_path / "s.npy"), BLANK, axis=0), [row["embedding"] for row in rows])


def has_gone_on(run: subprocess.Popen[bytes], journal: Path, num_rows: int) -> bool:
    return run.poll() is not None or rows_in(journal) > num_rows


def test_killed_every_score_is_there_once(tmp_path: Path) -> None:
    """The output of a run that was killed, and resumed, is that of one that was not."""
    save_classifier(tmp_path / "model", activation_fn="torch.nn.modules.activation.Sigmoid")
    source, out = tmp_path / "a.jsonl", tmp_path / "out.parquet"
    pairs = [{"text": f"{TEXTS[n % NUM_ROWS]} w{4 + n // NUM_ROWS}", "second": SECONDS[n % 50]} for n in range(3000)]
    source.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    flags = ["--pair-with", "second", "--batch-texts", "4", "--concurrency", "1"]
    with serving(tmp_path / "model") as server:
        command = [sys.executable, "-m", "vecd", "embed", str(source), "-o", str(out), "--url", server.url, *flags]
        journal, num_done = out.with_name(f"{out.name}.journal"), 0
        for _ in range(2):
            with subprocess.Popen(command, stderr=subprocess.PIPE, env=clean_environment(tmp_path, {})) as run:
                eventually(partial(has_gone_on, run, journal, num_done), timeout_s=120)
                assert run.poll() is None
                run.kill()
            assert rows_in(journal) > num_done
            num_done = rows_in(journal)
        last = subprocess.run(
            command, capture_output=True, env=clean_environment(tmp_path, {}), timeout=300, check=False
        )
        assert last.returncode == 0, last.stderr.decode()
        assert f"goes on behind row {num_done:,}" in last.stderr.decode()
        table = pyarrow.parquet.read_table(out)
        assert table["row"].to_pylist() == list(range(len(pairs)))
        direct = []
        for part in (pairs[:1500], pairs[1500:]):
            queries, documents = ([pair[name] for pair in part] for name in ("text", "second"))
            direct += post(server, "/score", queries=queries, documents=documents)["data"]
        check_close(table["score"].to_pylist(), [item["score"] for item in direct])
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.parquet"]


def test_what_the_model_has_not_is_refused_with_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_classifier(tmp_path / "model", labels=["no", "yes", "maybe"])
    (tmp_path / "a.txt").write_text("w4\n")
    with serving(tmp_path / "model") as server:
        for flags, said in (
            (("--results", "sparse"), "the model makes no sparse; it makes: labels (/predict)"),
            (("--prompt", "x"), "--prompt is for vectors, not for labels"),
        ):
            assert main([str(tmp_path / "a.txt"), "-o", str(tmp_path / "o.jsonl"), "--url", server.url, *flags]) == 2
            assert said in capsys.readouterr().err
        assert main([str(tmp_path / "a.txt"), "-o", str(tmp_path / "o.npy"), "--url", server.url]) == 2
        assert ".npy holds a matrix of dense vectors, not labels" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "model"]
