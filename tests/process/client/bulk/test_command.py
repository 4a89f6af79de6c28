import errno
import gzip
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet
import pytest

from tests.support.bulk_server import DIM, BulkServer, vectors_of
from vecd.client.bulk import command as command_module
from vecd.client.bulk import progress as progress_module
from vecd.client.bulk import run as run_module
from vecd.client.bulk import service as service_module
from vecd.client.bulk.command import main
from vecd.client.bulk.kinds import PROBE
from vecd.client.bulk.run import _COMMIT_S as COMMIT_S
from vecd.client.bulk.throughput import WORK_S

TEXTS = [f"text {n}" for n in range(100)]


@pytest.fixture
def server() -> Iterator[BulkServer]:
    with BulkServer() as server:
        yield server


@pytest.fixture(autouse=True)
def commit_and_ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_FIRST_COMMIT_S", 0.0)
    monkeypatch.setattr(run_module, "_COMMIT_S", 0.0)
    monkeypatch.setattr(service_module, "_FIRST_PAUSE_S", 0.02)


class Run:
    """Calls `vecd embed` on lines of a file, ten in a request, one request at a time."""

    def __init__(self, folder: Path, server: BulkServer) -> None:
        self.source = folder / "a.txt"
        self.out = folder / "v.npy"
        self._server = server
        self.write(TEXTS)

    def write(self, lines: list[str]) -> None:
        self.source.write_text("".join(f"{line}\n" for line in lines))

    def __call__(
        self, *flags: str, source: Path | None = None, others: Sequence[Path] = (), out: Path | None = None
    ) -> int:
        paths = [str(source or self.source), *map(str, others), "-o", str(out or self.out)]
        return main([*paths, "--url", self._server.url, "--batch-texts", "10", "--concurrency", "1", *flags])

    def journal(self) -> Any:
        return orjson.loads(self.out.with_name("v.npy.journal").read_bytes())

    def rejected(self) -> list[dict[str, Any]]:
        return [orjson.loads(line) for line in Path(f"{self.out}.rejected.jsonl").read_bytes().splitlines()]


@pytest.fixture
def embed(tmp_path: Path, server: BulkServer) -> Run:
    return Run(tmp_path, server)


def check(vectors: np.ndarray, texts: Sequence[str | None]) -> None:
    """Row for row; NaN for None."""
    assert len(vectors) == len(texts)
    expected = vectors_of([text or "" for text in texts])
    expected[[text is None for text in texts]] = np.nan
    np.testing.assert_array_equal(np.asarray(vectors, np.float32), expected)


# --- formats ----------------------------------------------------------------------------------------------


def test_text_to_npy(embed: Run, server: BulkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert embed("--api-key", "sesame", "--overflow", "error", "--input-type", "query", "--quiet") == 0
    vectors = np.load(embed.out)
    assert vectors.dtype == np.float32
    check(vectors, TEXTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "v.npy"]
    assert server.headers[0]["Authorization"] == "Bearer sesame"
    priorities = ["interactive" if body["input"] == [PROBE] else "bulk" for body in server.bodies]
    assert [headers["x-vecd-priority"] for headers in server.headers] == priorities
    asked = {"encoding_format": "bytes", "output_dtype": "float32", "overflow": "error", "input_type": "query"}
    assert all(body == {**asked, "input": body["input"]} for body in server.bodies)
    told = capsys.readouterr()
    assert told.out == ""
    assert "100 rows (100 in 0:0" in told.err


def test_float16(embed: Run) -> None:
    assert embed("--dtype", "float16") == 0
    vectors = np.load(embed.out)
    assert vectors.dtype == np.float16
    check(vectors, TEXTS)


def test_fields_are_kept(embed: Run, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(
        '{"body": "one", "id": 7, "tag": null}\n{"body": "", "id": 8}\n{"body": "three", "id": {"a": 1}}\n'
    )
    flags = ("--field", "body", "--keep", "id,tag")
    out = tmp_path / "v.jsonl"
    assert embed(*flags, source=source, out=out) == 1
    one, two, three = (orjson.loads(line) for line in out.read_bytes().splitlines())
    assert {key: one[key] for key in ("row", "id", "tag")} == {"row": 0, "id": 7, "tag": None}
    assert two == {"row": 1, "id": 8, "tag": None, "embedding": None}
    assert (three["row"], three["id"]) == (2, {"a": 1})
    check(np.array([one["embedding"], three["embedding"]]), ["one", "three"])


def test_parquet_in_and_out(embed: Run, tmp_path: Path) -> None:
    source, out = tmp_path / "a.parquet", tmp_path / "v.parquet"
    columns = {
        "text": ["zero", None, *TEXTS], "id": range(102), "score": [0.5, None] * 51, "mix": [[1], {"a": 2}, None] * 34,
    }  # fmt: skip
    columns["mix"] = [str(value) for value in columns["mix"]]
    pyarrow.parquet.write_table(pyarrow.table(columns), source, row_group_size=7)
    assert embed("--keep", "id,score,mix", source=source, out=out) == 1
    table = pyarrow.parquet.read_table(out)
    types = {"row": "int64", "id": "int64", "score": "double", "mix": "string"}
    assert {name: str(table.schema.field(name).type) for name in types} == types
    assert table.schema.field("embedding").type == pyarrow.list_(pyarrow.float32(), DIM)
    assert table["id"].to_pylist() == table["row"].to_pylist() == list(range(102))
    assert table["score"].to_pylist() == columns["score"]
    embeddings = table["embedding"].to_pylist()
    assert embeddings[1] is None
    check(np.array([embeddings[0], *embeddings[2:]]), ["zero", *TEXTS])


def test_no_rows_at_all(embed: Run, tmp_path: Path) -> None:
    embed.write([])
    for suffix in ("npy", "jsonl", "parquet"):
        assert embed(out=tmp_path / f"v.{suffix}") == 0
    assert np.load(embed.out).shape == (0, DIM)
    assert (tmp_path / "v.jsonl").read_bytes() == b""
    assert pyarrow.parquet.read_table(tmp_path / "v.parquet").num_rows == 0


# --- bad rows ---------------------------------------------------------------------------------------------


def refuse(*bad: str, status: int = 400) -> Callable[[list[str]], tuple[int, str] | None]:
    return lambda texts: (status, f"not {len(texts)} such") if set(bad) & set(texts) else None


LINES = [*TEXTS[:13], "", *TEXTS[14:27], "refused", *TEXTS[28:]]
REASONS = {13: "the line is empty", 27: "not 1 such"}


def test_bad_rows_are_blank(embed: Run, server: BulkServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.fail = refuse("refused")
    embed.write(LINES)
    assert embed() == 1
    check(np.load(embed.out), [None if index in REASONS else line for index, line in enumerate(LINES)])
    assert embed.rejected() == [
        {"row": row, "file": str(embed.source), "line": row + 1, "reason": reason} for row, reason in REASONS.items()
    ]
    told = f"2 rows could not be embedded; their vectors are NaN. The reasons are in {embed.out}.rejected.jsonl\n"
    assert told in capsys.readouterr().err
    assert embed("--restart", "--on-bad-row", "blank") == 0
    assert told in capsys.readouterr().err


def test_one_bad_row_of_a_format_with_null(embed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    embed.write(["one", ""])
    assert embed(out=tmp_path / "v.jsonl") == 1
    assert "1 row could not be embedded; its vector is null. " in capsys.readouterr().err


def test_bad_rows_are_skipped_and_rows_told(embed: Run, server: BulkServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.fail = refuse("refused", status=413)
    embed.write(LINES)
    assert embed("--on-bad-row", "skip") == 0
    rows = np.load(f"{embed.out}.rows.npy")
    assert rows.tolist() == [index for index in range(100) if index not in REASONS]
    check(np.load(embed.out), [LINES[row] for row in rows])
    assert [told["row"] for told in embed.rejected()] == list(REASONS)
    assert "2 rows could not be embedded; they are left out. " in capsys.readouterr().err


def test_a_bad_row_ends_the_run_which_goes_on_as_told(
    embed: Run, server: BulkServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fail = refuse("refused")
    embed.write(LINES)
    assert embed("--on-bad-row", "fail") == 1
    assert "a.txt, line 14: the line is empty; 10 rows are done" in capsys.readouterr().err
    assert embed("--on-bad-row", "fail") == 1
    assert not embed.out.exists()
    server.bodies.clear()
    assert embed("--on-bad-row", "skip") == 0
    assert np.load(f"{embed.out}.rows.npy").tolist() == [index for index in range(100) if index not in REASONS]
    assert TEXTS[9] not in server.texts


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_fields_that_lines_of_text_do_not_have_are_null(embed: Run, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"v.{suffix}"
    assert embed("--keep", "id", out=out) == 0
    if suffix == "parquet":
        kept = pyarrow.parquet.read_table(out)["id"].to_pylist()
    else:
        kept = [orjson.loads(line)["id"] for line in out.read_bytes().splitlines()]
    assert kept == [None] * 100


# --- trouble ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 429, 502, 503, 504, 500])
def test_trouble_that_passes(embed: Run, server: BulkServer, status: int) -> None:
    troubles = [2]

    def fail(texts: list[str]) -> tuple[int, str] | None:
        if "text 42" not in texts or not troubles[0]:
            return None
        troubles[0] -= 1
        return status, "later"

    server.fail = fail
    assert embed() == 0
    check(np.load(embed.out), TEXTS)
    assert not Path(f"{embed.out}.rejected.jsonl").exists()


def test_a_row_that_makes_the_server_fail_is_told_from_its_neighbours(embed: Run, server: BulkServer) -> None:
    server.fail = refuse("text 5", status=500)
    embed.write(TEXTS[4:7])
    assert embed() == 1
    check(np.load(embed.out), [TEXTS[4], None, TEXTS[6]])


def test_an_ill_server_rejects_nothing(embed: Run, server: BulkServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even a row on its own: the server has failed on the probe, too."""
    is_ill = [False]

    def fail(texts: list[str]) -> tuple[int, str] | None:
        is_ill[0] |= "text 50" in texts
        return (500, "ill") if is_ill[0] else None

    server.fail = fail
    assert embed("--batch-texts", "1", "--retry-for", "0.5") == 1
    assert "has served nothing for" in capsys.readouterr().err
    num_done = embed.journal()["commit"]["position"]["row"]
    assert 40 <= num_done <= 50
    assert embed.journal()["commit"]["num_rejected"] == 0
    server.fail = lambda texts: None
    server.bodies.clear()
    assert embed() == 0
    check(np.load(embed.out), TEXTS)
    assert server.texts == TEXTS[num_done:]


def test_a_server_that_does_not_come(
    embed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "AGAIN_S", 0.3)
    url = "http://127.0.0.1:1"
    assert main([str(embed.source), "-o", str(embed.out), "--url", url, "--retry-for", "0.8", "--quiet"]) == 1
    first, second, *_, last = capsys.readouterr().err.splitlines()
    assert first == f"vecd embed: {url}: Connection refused. Trying again for up to 0.8 s (--retry-for)"
    assert second.startswith(f"vecd embed: still waiting for {url} after 0 s: Connection refused.")
    assert "has served nothing for 1 s: Connection refused; no row is done" in last
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_server_that_does_not_respond_is_told(
    embed: Run, server: BulkServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "_FIRST_RESPONSE_S", 0.2)
    server.fail = lambda _: time.sleep(0.6) if len(server.bodies) == 1 else None
    assert embed("--quiet") == 0
    assert f"vecd embed: {server.url}: no response for 0 s. Trying again" in capsys.readouterr().err


def test_rows_in_flight_are_shown(
    embed: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first request on, and no more than there are."""
    monkeypatch.setattr(command_module, "_PLAIN_S", 0.0)
    assert embed() == 0
    shown = [line for line in capsys.readouterr().err.splitlines() if "in flight" in line]
    assert "0 rows, 10 in flight" in shown[0]
    assert all(" 10 in flight" in line or " 20 in flight" in line for line in shown)


def test_a_kill_loses_about_two_seconds() -> None:
    """What is done since the last commit, and a third more than the work that should be under way."""
    assert COMMIT_S + 4 / 3 * WORK_S < 2


def test_no_more_requests_are_under_way_than_may_be(embed: Run, server: BulkServer) -> None:
    lock, running = threading.Lock(), [0, 0]

    def count(texts: list[str]) -> None:
        with lock:
            running[0] += 1
            running[1] = max(running)
        time.sleep(0.01)
        with lock:
            running[0] -= 1

    server.fail = count
    assert embed("--concurrency", "3", "--batch-texts", "2") == 0
    assert 2 <= running[1] <= 3
    check(np.load(embed.out), TEXTS)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_will_never_be_served_is_not_asked_twice(
    embed: Run, server: BulkServer, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fail = lambda _: (status, "no key")
    assert embed() == 1
    assert f"answers {status}: no key; no row is done" in capsys.readouterr().err
    assert len(server.bodies) == 1


def test_a_request_that_is_refused_whatever_its_texts(
    embed: Run, server: BulkServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.fail = lambda _: (400, "no such prompt")
    assert embed("--prompt-name", "x") == 1
    assert "refuses: no such prompt" in capsys.readouterr().err


@pytest.mark.parametrize("batch_texts", ["10", "1"])
def test_vectors_of_two_models_are_never_mixed(
    embed: Run, server: BulkServer, batch_texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(texts: list[str]) -> None:
        if "text 55" in texts:
            server.model = "another"

    server.fail = fail
    assert embed("--batch-texts", batch_texts) == 1
    assert "has another model than this run began with" in capsys.readouterr().err
    assert 0 < embed.journal()["commit"]["position"]["row"] <= 55
    server.fail = lambda texts: None
    assert embed() == 2
    assert "had another model: other vectors for the same text. --restart" in capsys.readouterr().err
    server.model = "made-up"
    assert embed() == 0
    check(np.load(embed.out), TEXTS)


def test_each_request_brings_the_probe_along(embed: Run, server: BulkServer) -> None:
    """A request for it alone would have the server keep its batches short."""
    embed.write(TEXTS[:99])
    assert embed() == 0
    first, *others = [body["input"] for body in server.bodies]
    assert first == [PROBE]
    assert [texts.index(PROBE) for texts in others] == [10] * 9 + [9]


def test_a_single_text_has_its_probe_at_the_commit(embed: Run, server: BulkServer) -> None:
    """A request of one text may be all that the server takes."""
    embed.write(TEXTS[:11])
    assert embed() == 0
    assert [len(body["input"]) for body in server.bodies if len(body["input"]) > 1] == [11]
    assert [body["input"] for body in server.bodies][-2:] == [[TEXTS[10]], [PROBE]]


def test_a_model_of_other_dimensions(
    embed: Run, server: BulkServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_FIRST_COMMIT_S", 60.0)  # so that no commit finds it first

    def fail(texts: list[str]) -> None:
        if "text 55" in texts:
            server.dim = DIM - 1

    server.fail = fail
    assert embed() == 1
    assert "its vectors have 3 dimensions, not 4; 50 rows are done" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_gone_on(
    embed: Run, server: BulkServer, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(texts: list[str]) -> None:
        if "text 55" in texts:
            os.kill(os.getpid(), number)

    server.fail = fail
    assert embed() == 128 + number
    assert "the same command goes on behind them" in capsys.readouterr().err
    num_done = embed.journal()["commit"]["position"]["row"]
    assert 50 <= num_done < 100
    server.fail = lambda texts: None
    server.bodies.clear()
    assert embed() == 0
    check(np.load(embed.out), TEXTS)
    assert server.texts == TEXTS[num_done:]
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


# --- unfinished runs --------------------------------------------------------------------------------------


@pytest.fixture
def unfinished(embed: Run, server: BulkServer, capsys: pytest.CaptureFixture[str]) -> Run:
    """A run that ended at line 56."""
    embed.write([*TEXTS[:55], "", *TEXTS[56:]])
    assert embed("--on-bad-row", "fail", "--api-key", "sesame") == 1
    capsys.readouterr()
    return embed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dtype", "float16"], "--dtype was 'float32', is 'float16'"),
        (["--overflow", "error"], "--overflow was None, is 'error'"),
        (["--output-format", "jsonl"], "--output-format was 'npy', is 'jsonl'"),
    ],
)
def test_a_run_with_other_settings_does_not_go_on(
    unfinished: Run, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unfinished(*flags) == 2
    assert message in capsys.readouterr().err


def test_an_input_that_has_changed_is_not_gone_on_with(unfinished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with unfinished.source.open("a") as file:
        file.write("more\n")
    assert unfinished() == 2
    assert "a.txt has changed: its size is another" in capsys.readouterr().err
    assert unfinished("--restart") == 1
    assert len(np.load(unfinished.out)) == 101


def test_the_key_is_not_written_down(unfinished: Run, tmp_path: Path) -> None:
    for path in tmp_path.iterdir():
        assert b"sesame" not in path.read_bytes()


def test_a_run_that_has_done_nothing_binds_nobody(embed: Run, server: BulkServer) -> None:
    server.fail = lambda texts: (401, "no key") if "text 0" in texts else None
    assert embed() == 1
    server.fail = lambda texts: None
    assert embed("--dtype", "float16") == 0
    check(np.load(embed.out), TEXTS)


def test_a_full_disk_is_told_with_the_file(
    embed: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", write)
        assert embed() == 1
    assert f"{embed.out}.part: No space left on device" in capsys.readouterr().err
    assert embed() == 0
    check(np.load(embed.out), TEXTS)


def test_an_output_that_exists_is_not_replaced_by_accident(embed: Run, capsys: pytest.CaptureFixture[str]) -> None:
    embed.out.write_bytes(b"precious")
    assert embed() == 2
    assert "v.npy exists; --restart replaces it" in capsys.readouterr().err
    assert embed.out.read_bytes() == b"precious"
    assert embed("--restart") == 0
    check(np.load(embed.out), TEXTS)


def test_a_part_without_a_journal_is_nobodys(embed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "v.npy.part").write_bytes(b"precious")
    assert embed() == 2
    assert "nothing tells what it is" in capsys.readouterr().err
    assert (tmp_path / "v.npy.part").read_bytes() == b"precious"


def test_a_pipe_is_gone_on_with_if_it_gives_the_same_again(
    embed: Run, server: BulkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def through_pipe(lines: list[str], name: str) -> int:
        pipe = tmp_path / "pipe.txt"
        if not pipe.exists():
            os.mkfifo(pipe)
        writer = threading.Thread(target=pipe.write_text, args=["".join(f"{line}\n" for line in lines)])
        writer.start()
        code = embed("--on-bad-row", name, source=pipe)
        writer.join()
        return code

    assert through_pipe([*TEXTS[:55], "", *TEXTS[56:]], "fail") == 1
    assert through_pipe(["other", *TEXTS[1:]], "fail") == 1
    assert "its first 50 rows are not those" in capsys.readouterr().err
    server.bodies.clear()
    assert through_pipe(TEXTS, "fail") == 0
    check(np.load(embed.out), TEXTS)
    assert server.texts == TEXTS[50:]


def test_a_pipe_may_be_compressed(embed: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.txt.gz"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=[gzip.compress(embed.source.read_bytes())])
    writer.start()
    assert embed(source=pipe) == 0
    writer.join()
    check(np.load(embed.out), TEXTS)


# --- flags ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-o", "v.doc"], "none of the suffixes .npy, .jsonl, .parquet"),
        (["-o", "/no/such/v.npy"], "no folder that exists"),
        (["-o", "v.npy", "--keep", "id"], "holds vectors and nothing else"),
        (["-o", "v.jsonl", "--keep", "id,row"], "'row' would stand twice"),
        (["-o", "v.jsonl", "--keep", "id,"], "empty name"),
        (["-o", "v.npy", "--url", "ftp://x"], "neither http"),
        (["-o", "v.npy", "--url", "http://x", "--model", "m"], "started here"),
        (["-o", "v.npy", "--url", "http://x", "--", "--workers", "1"], "started here"),
        (["-o", "v.npy", "--", "--port=80"], "--port=80: where the server listens is chosen here"),
        (["-o", "v.npy", "--batch-texts", "0"], "whole number from 1"),
        (["-o", "v.npy", "--retry-for", "-1"], "seconds above 0"),
        (["-o", "v.npy", "--max"], "unrecognized"),
    ],
)
def test_flags_that_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["a.txt", *flags])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_inputs_that_are_not_what_was_said(embed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found before anything is asked or written."""
    (tmp_path / "a.csv").write_text("id;text\n1;one\n")
    (tmp_path / "b.csv").write_text("")
    (tmp_path / "c.txt.gz").write_text("one\n")
    (tmp_path / "d.parquet").write_text("one\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": [["one"], None]}), tmp_path / "e.parquet")
    (tmp_path / "f.jsonl").write_text('\n{"body": "one"}\n{"Text": "two"}\n')
    (tmp_path / "g.jsonl").write_text("one\ntwo\n")
    (tmp_path / "folder.txt").mkdir()
    told = {
        "a.csv": "its header has no field 'text', it has: id;text",
        "b.csv": "it has no header",
        "c.txt.gz": "cannot be read: Not a gzipped file",
        "d.parquet": "not a parquet file",
        "e.parquet": "its column 'text' holds list<element: string>, not texts",
        "f.jsonl": "no row has a field 'text' (--field); line 2: no field \"text\"",
        "g.jsonl": "no row has a field 'text' (--field); line 1: not JSON",
        "folder.txt": "is a folder, name the files in it",
    }
    for name, message in told.items():
        assert embed(source=tmp_path / name) == 2
        line = capsys.readouterr().err
        assert name in line
        assert message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a.txt", *told])


def test_a_field_is_looked_for_in_all_rows(embed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of JSON lines: one row with the text's field in each file, and one with each field to keep in any."""
    a, b, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "v.jsonl"
    a.write_text('{"id": 1}\n{"text": "one", "id": 2}\n')
    b.write_text('{"text": "two"}\n{"text": "three", "tag": "t"}\n')
    assert embed("--keep", "id,tag,lang", source=a, others=[b], out=out) == 2
    assert "no row has a field 'lang' (--keep)" in capsys.readouterr().err
    assert embed("--keep", "id,tag", "--on-bad-row", "blank", source=a, others=[b], out=out) == 0
    assert [orjson.loads(line)["id"] for line in out.read_bytes().splitlines()] == [1, 2, None, None]
    assert embed("--field", "id", source=a, others=[b], out=tmp_path / "w.jsonl") == 2
    assert "b.jsonl: no row has a field 'id'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("suffix", "lines", "message"),
    [
        ("jsonl", '{"body": "one"}\n' * 50, "no row has a field 'text' (--field); line 1: no field \"text\""),
        ("csv", "id,body\n1,one\n", "its header has no field 'text'"),
    ],
)
@pytest.mark.parametrize("out", ["v.npy", "v.parquet"])
def test_a_field_that_a_stream_does_not_have(
    embed: Run, tmp_path: Path, suffix: str, lines: str, message: str, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows without it may have been committed before the end of the stream is reached; none of them is left."""
    pipe = tmp_path / f"pipe.{suffix}"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=[lines])
    writer.start()
    assert embed(source=pipe, out=tmp_path / out) == 2
    writer.join()
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", pipe.name]


def test_another_stream_without_the_field_costs_no_vectors(
    embed: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def through_pipe(header: str) -> int:
        writer = threading.Thread(target=pipe.write_text, args=["\n".join([header, *TEXTS[:55], " ", *TEXTS[56:]])])
        writer.start()
        code = embed("--on-bad-row", "fail", source=pipe)
        writer.join()
        return code

    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    assert through_pipe("text") == 1
    num_done = embed.journal()["commit"]["position"]["row"]
    assert num_done > 0
    assert through_pipe("body") == 1
    assert "its header has no field 'text'" in capsys.readouterr().err
    assert embed.journal()["commit"]["position"]["row"] == num_done


def test_closed_standard_streams(embed: Run, server: BulkServer, tmp_path: Path) -> None:
    """A file of ours that got their numbers would be read as the input, or be written into."""
    words = f"{sys.executable} -m vecd.client.bulk.command - -o {embed.out} --url {server.url}"
    no_input = subprocess.run(f"{words} <&-", shell=True, capture_output=True, check=False)
    assert (no_input.returncode, b"standard input is closed" in no_input.stderr) == (2, True)
    assert subprocess.run(f"{words} 2>&- < {embed.source}", shell=True, check=False).returncode == 0
    check(np.load(embed.out), TEXTS)


def test_an_input_that_is_the_output(embed: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert embed("--output-format", "npy", out=embed.source) == 2
    assert "is input and output" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["link.txt", "out.npy.rejected.jsonl"])
def test_an_input_that_is_the_output_by_another_name(
    name: str, embed: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A link to it, and a file that a complete output has beside it."""
    out = tmp_path / name.removesuffix(".rejected.jsonl")
    source = embed.source if out.name == name else tmp_path / name
    source.write_text('{"text": "a"}\n')
    if out.name == name:
        out.symlink_to(source)
    before = source.read_bytes()
    flags = ("--output-format", "npy", "--format", "jsonl", "--restart")
    assert embed(*flags, source=source, out=out) == 2
    assert "is input and output" in capsys.readouterr().err
    assert source.read_bytes() == before


def test_the_probe_is_no_row(embed: Run) -> None:
    embed.write([PROBE, "other"])
    assert embed() == 0
    check(np.load(embed.out), [PROBE, "other"])


def test_a_row_with_the_words_of_the_probe_can_be_rejected(embed: Run, server: BulkServer) -> None:
    """The run knows its own probe by having sent it, and not by its text."""
    bad = f"{PROBE} And more."
    server.fail = refuse(bad, status=500)
    embed.write([bad, "other"])
    assert embed("--batch-texts", "1", "--retry-for", "5") == 1
    check(np.load(embed.out), [None, "other"])
    assert [told["row"] for told in embed.rejected()] == [0]
