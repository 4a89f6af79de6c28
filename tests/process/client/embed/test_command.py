import errno
import gzip
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet
import pytest

from tests.support.bulk_server import AT_ONCE, DIM, BulkServer, Fail, identity_of, vectors_of
from tests.support.serving import eventually
from vecd.client.embed import run as run_module
from vecd.client.embed.command import main
from vecd.client.embed.results import PROBE

TEXTS = [f"text {n}" for n in range(100)]


class Run:
    """Calls `vecd embed` on lines of a file, ten in a request, one request at a time."""

    def __init__(self, folder: Path, server: BulkServer) -> None:
        self.pace = AT_ONCE
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
        flags = ("--url", self._server.url, "--batch-texts", "10", "--concurrency", "1", *flags)
        return main([*paths, *flags], self.pace)

    def through_pipe(self, pipe: Path, content: str, *flags: str, out: Path | None = None) -> int:
        if not pipe.exists():
            os.mkfifo(pipe)
        data = content.encode()
        write = partial(pipe.write_bytes, gzip.compress(data) if pipe.suffix == ".gz" else data)
        writer = threading.Thread(target=write)
        writer.start()
        code = self(*flags, source=pipe, out=out)
        writer.join()
        return code

    def journal(self) -> Any:
        return orjson.loads(self.out.with_name("v.npy.journal").read_bytes())

    def num_done(self) -> int:
        return self.journal()["commit"]["position"]["row"]

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


def test_text_to_npy(embed, server, tmp_path, capsys):
    assert embed("--api-key", "sesame", "--overflow", "error", "--input-type", "query", "--quiet") == 0
    vectors = np.load(embed.out)
    assert vectors.dtype == np.float32
    check(vectors, TEXTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "v.npy"]
    assert server.headers[0]["Authorization"] == "Bearer sesame"
    priorities = ["interactive" if body["input"] == [PROBE] else "bulk" for body in server.bodies]
    assert [headers["x-vecd-priority"] for headers in server.headers] == priorities
    asked = {"encoding_format": "bytes_only", "output_dtype": "float32", "overflow": "error", "input_type": "query"}
    assert all(body == {**asked, "input": body["input"]} for body in server.bodies)
    told = capsys.readouterr()
    assert told.out == ""
    assert "100 rows (100 in 0:0" in told.err


def test_fields_are_kept(embed, tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_text(
        '{"body": "one", "id": 7, "tag": null}\n{"body": "", "id": 8}\n{"body": "three", "id": {"a": 1}}\n'
    )
    out = tmp_path / "v.jsonl"
    assert embed("--field", "body", "--keep", "id,tag", source=source, out=out) == 1
    assert "1 row could not be embedded; its vector is null. " in capsys.readouterr().err
    one, two, three = (orjson.loads(line) for line in out.read_bytes().splitlines())
    assert {key: one[key] for key in ("row", "id", "tag")} == {"row": 0, "id": 7, "tag": None}
    assert two == {"row": 1, "id": 8, "tag": None, "embedding": None}
    assert (three["row"], three["id"]) == (2, {"a": 1})
    check(np.array([one["embedding"], three["embedding"]]), ["one", "three"])
    assert embed("--keep", "id", out=tmp_path / "w.parquet") == 0
    table = pyarrow.parquet.read_table(tmp_path / "w.parquet")
    assert table["id"].to_pylist() == [None] * 100, "lines of text have no fields"


def test_parquet_in_and_out(embed, tmp_path):
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


def test_no_rows_at_all(embed, tmp_path):
    embed.write([])
    for suffix in ("npy", "jsonl", "parquet"):
        assert embed(out=tmp_path / f"v.{suffix}") == 0
    assert np.load(embed.out).shape == (0, DIM)
    assert (tmp_path / "v.jsonl").read_bytes() == b""
    assert pyarrow.parquet.read_table(tmp_path / "v.parquet").num_rows == 0


# --- bad rows ---------------------------------------------------------------------------------------------


def refuse(*bad: str, status: int = 400) -> Callable[[list[str]], tuple[int, str] | None]:
    return lambda texts: (status, f"not {len(texts)} such") if set(bad) & set(texts) else None


def when(text: str, act: Callable[[], tuple[int, str] | None]) -> Fail:
    """The server does this when it is asked for that text."""
    return lambda texts: act() if text in texts else None


LINES = [*TEXTS[:13], "", *TEXTS[14:27], "refused", *TEXTS[28:]]
REASONS = {13: "the line is empty", 27: "not 1 such"}


def test_bad_rows_are_blank(embed, server, capsys):
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


def test_bad_rows_are_skipped_and_rows_told(embed, server, capsys):
    server.fail = refuse("refused", status=413)
    embed.write(LINES)
    assert embed("--on-bad-row", "skip") == 0
    rows = np.load(f"{embed.out}.rows.npy")
    assert rows.tolist() == [index for index in range(100) if index not in REASONS]
    check(np.load(embed.out), [LINES[row] for row in rows])
    assert [told["row"] for told in embed.rejected()] == list(REASONS)
    assert "2 rows could not be embedded; they are left out. " in capsys.readouterr().err


def test_a_bad_row_ends_the_run_which_goes_on_as_told(embed, server, capsys):
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


# --- trouble ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 503, 500])
def test_trouble_that_passes(embed, server, status):
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


def test_an_ill_server_rejects_nothing(embed, server, capsys):
    """Not even a row on its own: the server has failed on the probe, too."""

    def fall_ill() -> tuple[int, str]:
        eventually(lambda: embed.num_done() >= 40)
        server.fail = lambda _: (500, "ill")
        return server.fail([])

    server.fail = when("text 50", fall_ill)
    assert embed("--batch-texts", "1", "--retry-for", "2") == 1
    assert "has served nothing for" in capsys.readouterr().err
    num_done = embed.num_done()
    assert 40 <= num_done <= 50
    assert embed.journal()["commit"]["num_rejected"] == 0
    server.fail = lambda texts: None
    server.bodies.clear()
    assert embed() == 0
    check(np.load(embed.out), TEXTS)
    assert server.texts == TEXTS[num_done:]


def test_a_server_that_does_not_come(embed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_module, "AGAIN_S", 0.3)
    url = "http://127.0.0.1:1"
    assert main([str(embed.source), "-o", str(embed.out), "--url", url, "--retry-for", "0.8", "--quiet"], AT_ONCE) == 1
    first, second, *_, last = capsys.readouterr().err.splitlines()
    assert first == f"vecd embed: {url}: Connection refused. Trying again for up to 0.8 s (--retry-for)"
    assert second.startswith(f"vecd embed: still waiting for {url} after 0 s: Connection refused.")
    assert "has served nothing for 1 s: Connection refused; no row is done" in last
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_server_that_does_not_respond_is_told(embed, server, capsys):
    embed.pace = AT_ONCE._replace(first_response_s=0.2)
    server.fail = lambda _: time.sleep(0.6) if len(server.bodies) == 1 else None
    assert embed("--quiet") == 0
    assert f"vecd embed: {server.url}: no response for 0 s. Trying again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "told"), [(401, "answers 401: no; no row is done"), (404, "answers 404: no;"), (400, "refuses: no;")]
)
def test_what_will_never_be_served_is_not_asked_twice(embed, server, status, told, capsys):
    server.fail = lambda _: (status, "no")
    assert embed() == 1
    assert told in capsys.readouterr().err
    assert len(server.bodies) == 1


@pytest.mark.parametrize("batch_texts", ["10", "1"])
def test_vectors_of_two_models_are_never_mixed(embed, server, batch_texts, capsys):
    def change() -> None:
        eventually(lambda: embed.num_done() > 0)
        server.model = "another"

    server.fail = when("text 55", change)
    assert embed("--batch-texts", batch_texts) == 1
    assert f"has another model: its identity is {identity_of('another')}" in capsys.readouterr().err
    assert 0 < embed.num_done() <= 55
    server.fail = lambda texts: None
    assert embed() == 2
    assert "the unfinished run had another model: " in capsys.readouterr().err
    server.model = "made-up"
    assert embed() == 0
    check(np.load(embed.out), TEXTS)


def test_a_sample_is_sent_once(embed, server):
    """A request for it alone, again and again, would have the server keep its batches short."""
    embed.write(TEXTS[:11])
    assert embed() == 0
    assert [body["input"] for body in server.bodies] == [[PROBE], TEXTS[:10], [TEXTS[10]]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_gone_on(embed, server, number, capsys):
    server.fail = when("text 55", lambda: os.kill(os.getpid(), number))
    assert embed() == 128 + number
    assert "the same command goes on behind them" in capsys.readouterr().err
    num_done = embed.num_done()
    assert 50 <= num_done < 100
    server.fail = lambda texts: None
    server.bodies.clear()
    assert embed() == 0
    check(np.load(embed.out), TEXTS)
    assert server.texts == TEXTS[num_done:]
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


# --- unfinished runs --------------------------------------------------------------------------------------


def test_an_unfinished_run_goes_on_only_as_it_was(embed, tmp_path, capsys):
    embed.write([*TEXTS[:55], "", *TEXTS[56:]])
    assert embed("--on-bad-row", "fail", "--api-key", "sesame") == 1
    assert not [path for path in tmp_path.iterdir() if b"sesame" in path.read_bytes()]
    for flag, was, now in (
        ("--dtype", "'float32'", "float16"), ("--overflow", "None", "error"), ("--output-format", "'npy'", "jsonl")
    ):  # fmt: skip
        assert embed(flag, now) == 2
        assert f"{flag} was {was}, is {now!r}" in capsys.readouterr().err
    with embed.source.open("a") as file:
        file.write("more\n")
    assert embed() == 2
    assert "a.txt has changed: its size is another" in capsys.readouterr().err
    assert embed("--restart") == 1
    assert len(np.load(embed.out)) == 101


def test_a_run_that_has_done_nothing_binds_nobody(embed, server):
    server.fail = lambda texts: (401, "no key") if "text 0" in texts else None
    assert embed() == 1
    server.fail = lambda texts: None
    assert embed("--dtype", "float16") == 0
    vectors = np.load(embed.out)
    assert vectors.dtype == np.float16
    check(vectors, TEXTS)


def test_a_run_of_an_older_version_goes_on_if_it_knew_the_identity(embed, server, capsys):
    """Its journal has more of the model."""
    server.fail = lambda texts: (401, "no key") if "text 50" in texts else None
    assert embed() == 1
    journal, path = embed.journal(), embed.out.with_name("v.npy.journal")
    older = {**journal, "version": 2}
    older["model"] |= {"facts": {}, "probe": [0.5]}
    server.fail = lambda texts: None
    path.write_bytes(orjson.dumps({**older, "model": {**older["model"], "identity": None}}))
    assert embed() == 2
    assert ", and the unfinished run knew none. --restart begins anew" in capsys.readouterr().err
    path.write_bytes(orjson.dumps(older))
    server.bodies.clear()
    assert embed() == 0
    assert server.texts[0] == "text 50"
    check(np.load(embed.out), TEXTS)


def test_a_full_disk_is_told_with_the_file(embed, capsys, monkeypatch):
    def write(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", write)
        assert embed() == 1
    assert f"{embed.out}.part: No space left on device" in capsys.readouterr().err
    assert embed() == 0
    check(np.load(embed.out), TEXTS)


@pytest.mark.parametrize(
    ("name", "told"), [("v.npy", "v.npy exists; --restart replaces it"), ("v.npy.part", "nothing tells what it is")]
)
def test_what_exists_is_not_replaced_by_accident(embed, tmp_path, name, told, capsys):
    (tmp_path / name).write_bytes(b"precious")
    assert embed() == 2
    assert told in capsys.readouterr().err
    assert (tmp_path / name).read_bytes() == b"precious"
    assert embed("--restart") == 0
    check(np.load(embed.out), TEXTS)


def test_a_pipe_is_gone_on_with_if_it_gives_the_same_again(embed, server, tmp_path, capsys):
    pipe = tmp_path / "pipe.txt.gz"
    assert embed.through_pipe(pipe, "\n".join([*TEXTS[:55], "", *TEXTS[56:]]), "--on-bad-row", "fail") == 1
    assert embed.through_pipe(pipe, "\n".join(["other", *TEXTS[1:]])) == 1
    assert "its first 50 rows are not those" in capsys.readouterr().err
    server.bodies.clear()
    assert embed.through_pipe(pipe, "\n".join(TEXTS)) == 0
    check(np.load(embed.out), TEXTS)
    assert server.texts == TEXTS[50:]


# --- flags ------------------------------------------------------------------------------------------------


def test_a_field_is_looked_for_in_all_rows(embed, tmp_path, capsys):
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


@pytest.mark.parametrize("out", ["v.npy", "v.parquet"])
def test_a_field_that_a_stream_does_not_have(embed, tmp_path, out, capsys):
    """Rows without it may have been committed before the end of the stream is reached; none of them is left."""
    assert embed.through_pipe(tmp_path / "pipe.jsonl", '{"body": "one"}\n' * 50, out=tmp_path / out) == 2
    assert "no row has a field 'text' (--field); line 1: no field \"text\"" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "pipe.jsonl"]


def test_another_stream_without_the_field_costs_no_vectors(embed, tmp_path, capsys):
    pipe, lines = tmp_path / "pipe.csv", [*TEXTS[:55], " ", *TEXTS[56:]]
    assert embed.through_pipe(pipe, "\n".join(["text", *lines]), "--on-bad-row", "fail") == 1
    num_done = embed.num_done()
    assert num_done > 0
    assert embed.through_pipe(pipe, "\n".join(["body", *lines]), "--on-bad-row", "fail") == 1
    assert "its header has no field 'text'" in capsys.readouterr().err
    assert embed.num_done() == num_done


def test_closed_standard_streams(embed, server, tmp_path):
    """A file of ours that got their numbers would be read as the input, or be written into."""
    words = f"{sys.executable} -m vecd embed - -o {embed.out} --url {server.url}"
    no_input = subprocess.run(f"{words} <&-", shell=True, capture_output=True, check=False)
    assert (no_input.returncode, b"standard input is closed" in no_input.stderr) == (2, True)
    assert subprocess.run(f"{words} 2>&- < {embed.source}", shell=True, check=False).returncode == 0
    check(np.load(embed.out), TEXTS)


@pytest.mark.parametrize("name", ["a.txt", "link.txt", "out.npy.rejected.jsonl"])
def test_no_input_is_the_output(name, embed, capsys, tmp_path):
    """Nor a link to it, nor a file that a complete output has beside it."""
    out = tmp_path / name.removesuffix(".rejected.jsonl")
    source = tmp_path / name if out.name != name else embed.source
    if name == "link.txt":
        out.symlink_to(source)
    source.write_text('{"text": "a"}\n')
    flags = ("--output-format", "npy", "--format", "jsonl", "--restart")
    assert embed(*flags, source=source, out=out) == 2
    assert "is input and output" in capsys.readouterr().err
    assert source.read_text() == '{"text": "a"}\n'


def test_rows_with_the_words_of_the_probe(embed, server):
    """The run knows its own probe by having sent it, and not by its text: such a row has its vector, or is rejected."""
    bad = f"{PROBE} And more."
    server.fail = refuse(bad, status=500)
    embed.write([PROBE, bad, "other"])
    assert embed("--batch-texts", "1", "--retry-for", "5") == 1
    check(np.load(embed.out), [PROBE, None, "other"])
    assert [told["row"] for told in embed.rejected()] == [1]
