"""Wherever a run is killed, the next one makes of what is left an output with every row once."""

import itertools
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.bulk_server import DIM, vectors_of
from vecd.client.embed.files import Commit, Journal, OutputFile, OutputFiles, journal_path, npy_header
from vecd.client.embed.inputs import InputSource, RowBatch
from vecd.client.embed.options import EmbedError, EmbedOptions, RunEnded
from vecd.client.embed.parquet import write_parquet
from vecd.client.embed.rows import InputRow, Position
from vecd.client.embed.service import RunModel

FORMATS = ("npy", "jsonl", "parquet")
PARTS = {
    ".npy": (".part", ".rows.npy.part", ".rejected.jsonl.part"),
    ".jsonl": (".part", ".rejected.jsonl.part"),
    ".parquet": (".part", ".fields.part", ".rejected.jsonl.part"),
}
BAD = (3, 4, 9)
NUM_ROWS = 12


MODEL = RunModel(DIM, {}, "identity")


def open_output(out: Path, on_bad_row: str) -> OutputFiles:
    """Where the last life has left it."""
    output = OutputFiles(make_options(out, on_bad_row))
    output.resume([])
    if not output.is_complete:
        output.begin(MODEL)
    return output


def make_options(out: Path, on_bad_row: Any = "blank") -> EmbedOptions:
    return EmbedOptions(files=[], out=out, keep=() if out.suffix == ".npy" else ("id",), on_bad_row=on_bad_row)


def append(output: OutputFiles, numbers: range) -> None:
    """Rows as a run has them answered; those of `BAD` have no text."""
    rows = [InputRow(n + 1, () if n in BAD else (f"text {n}",), "bad" * (n in BAD), (n,)) for n in numbers]
    source = InputSource("/a.txt", "txt", is_stream=False, is_gzip=False)
    batch = RowBatch(source, rows, Position(row=numbers.stop))
    batch.results = vectors_of([f"text {n}" for n in numbers])
    batch.results[list(batch.reasons)] = np.nan
    output.append(batch)


def complete(output: OutputFiles) -> None:
    output.save(replace(output.written, is_complete=True))


def read_rows(out: Path, on_bad_row: str) -> tuple[list[int], np.ndarray]:
    """The row numbers, and the vectors, NaN where there is none."""
    nothing = [None] * DIM
    match out.suffix:
        case ".npy":
            vectors = np.load(out)
            numbers = np.load(f"{out}.rows.npy").tolist() if on_bad_row == "skip" else list(range(len(vectors)))
        case ".jsonl":
            lines = [orjson.loads(line) for line in out.read_bytes().splitlines()]
            assert all(line["id"] == line["row"] for line in lines)
            numbers = [line["row"] for line in lines]
            vectors = np.array([line["embedding"] or nothing for line in lines], np.float32)
        case _:
            table = pyarrow.parquet.read_table(out)
            numbers = table["row"].to_pylist()
            assert table["id"].to_pylist() == numbers
            vectors = np.array([vector or nothing for vector in table["embedding"].to_pylist()], np.float32)
    return numbers, vectors


def check_whole(out: Path, on_bad_row: str, num_rows: int = NUM_ROWS) -> None:
    """Every row once, in order, with its own vector; beside it nothing but what belongs there."""
    numbers, vectors = read_rows(out, on_bad_row)
    skipped = BAD if on_bad_row == "skip" else ()
    assert numbers == [n for n in range(num_rows) if n not in skipped]
    good = [index for index, n in enumerate(numbers) if n not in BAD]
    np.testing.assert_array_equal(vectors[good], vectors_of([f"text {numbers[index]}" for index in good]))
    assert np.isnan(np.delete(vectors, good, axis=0)).all()
    told = [orjson.loads(line)["row"] for line in out.with_name(out.name + ".rejected.jsonl").read_bytes().splitlines()]
    assert told == [n for n in BAD if n < num_rows]
    companions = {".rejected.jsonl", *([".rows.npy"] if out.suffix == ".npy" and on_bad_row == "skip" else [])}
    assert {path.name for path in out.parent.iterdir()} == {out.name, *(out.name + name for name in companions)}


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(),
    format=st.sampled_from(FORMATS),
    on_bad_row=st.sampled_from(["blank", "skip"]),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8),
)
def test_killed_anywhere_every_row_is_there_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, format: str, on_bad_row: str, sizes: list[int]
) -> None:
    """Each life appends some batches, commits some of them, and dies; what it wrote behind its last commit may be there
    in full, in part, or not at all, in each file by itself."""
    out = tmp_path_factory.mktemp("out") / f"v.{format}"
    for _ in range(data.draw(st.integers(0, 3), "kills")):
        live(out, on_bad_row, sizes, data, dies=True)
    live(out, on_bad_row, sizes, data, dies=False)
    check_whole(out, on_bad_row)


def live(out: Path, on_bad_row: str, sizes: list[int], data: st.DataObject, *, dies: bool) -> None:
    with closing(open_output(out, on_bad_row)) as output:
        batches = itertools.cycle(sizes)
        num_batches = data.draw(st.integers(0, 6), "batches") if dies else 1000
        while (start := output.written.position.row) < NUM_ROWS and num_batches:
            num_batches -= 1
            append(output, range(start, min(start + next(batches), NUM_ROWS)))
            if dies and data.draw(st.booleans(), "commits"):
                output.save(output.written)
        if not dies:
            complete(output)
            output.finish()
            output.forget()
            return
    for suffix, safe, most in zip(
        PARTS[out.suffix], output.journal.commit.lengths, output.written.lengths, strict=True
    ):
        part = out.with_name(out.name + suffix)
        length = data.draw(st.integers(safe, most), "left")
        part.write_bytes(part.read_bytes()[:length])
    journal_path(out).with_name(out.name + ".journal.new").write_bytes(b'{"half of')


class Killed(BaseException):
    """Nothing that is meant for errors catches it."""


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("on_bad_row", ["blank", "skip"])
def test_killed_at_any_step_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, on_bad_row: str
) -> None:
    """Before each rename, removal and write in turn; then once more in the next life, at the same step of that one."""
    steps = [(Path, "rename"), (Path, "unlink"), (OutputFile, "write"), (OutputFile, "cut"), (OutputFile, "sync")]
    for num_steps in itertools.count(1):
        folder = tmp_path / str(num_steps)
        folder.mkdir()
        out = folder / f"v.{format}"
        with closing(open_output(out, on_bad_row)) as output:
            append(output, range(NUM_ROWS))
            complete(output)
        deaths = 0
        for limit in (num_steps, num_steps, 1000):
            with monkeypatch.context() as patch, closing(open_output(out, on_bad_row)) as output:
                left = [limit]
                for owner, name in steps:
                    patch.setattr(owner, name, counted(getattr(owner, name), left))
                try:
                    output.finish()
                except Killed:
                    deaths += 1
        journal_path(out).unlink()
        check_whole(out, on_bad_row)
        if not deaths:
            break
    assert num_steps > 5


def counted(step: Any, left: list[int]) -> Any:
    def run(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] <= 0:
            raise Killed
        return step(*arguments, **options)

    return run


def test_parts_that_are_shorter_than_the_journal_says_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "v.npy"
    with closing(open_output(out, "blank")) as output:
        append(output, range(2))
        output.save(output.written)
        (tmp_path / "v.npy.part").write_bytes(b"short")
    with closing(OutputFiles(make_options(out))) as output:
        output.resume([])
        with pytest.raises(EmbedError, match=r"v\.npy\.part has 5 bytes, the journal knows of 160: --restart"):
            output.begin(MODEL)
    replace(output.journal, commit=replace(output.journal.commit, is_complete=True)).save(journal_path(out))
    with closing(open_output(out, "blank")) as output, pytest.raises(EmbedError, match=r"v\.npy was complete, and is"):
        output.finish()


def test_two_runs_cannot_have_one_output(tmp_path: Path) -> None:
    first = OutputFiles(make_options(tmp_path / "v.npy"))
    with pytest.raises(EmbedError, match="another vecd embed"):
        OutputFiles(make_options(tmp_path / "v.npy"))
    first.close()
    OutputFiles(make_options(tmp_path / "v.npy")).close()


@pytest.mark.parametrize("then", ["append", "check", "finish"])
def test_a_run_ends_when_another_that_no_lock_keeps_away_writes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Without that, what the first run appends next would lie behind a hole of zeros."""
    monkeypatch.setattr(OutputFile, "lock", lambda self: True)  # as where locks are each machine's own
    out = tmp_path / "v.npy"
    first = open_output(out, "blank")
    append(first, range(6))
    second = open_output(out, "blank")
    steps: dict[str, Callable[[], object]] = {
        "append": lambda: append(first, range(6, NUM_ROWS)), "check": first.check, "finish": first.finish,
    }  # fmt: skip
    with pytest.raises(RunEnded, match=r"v\.npy\.part has 128 bytes where this run wrote 224: another run writes it"):
        steps[then]()
    append(second, range(NUM_ROWS))
    complete(second)
    second.finish()
    second.forget()
    first.close()
    second.close()
    check_whole(out, "blank")


@pytest.mark.parametrize("shape", [(0,), (3, 4), (10**12, 10**5)])
def test_headers_are_numpys(tmp_path: Path, shape: tuple[int, ...]) -> None:
    header = npy_header("float16", shape)
    assert len(header) == len(npy_header("int64", (0,)))
    path = tmp_path / "v.npy"
    path.write_bytes(header + bytes(2 * 12))
    with path.open("rb") as file:
        assert np.lib.format.read_magic(file) == (1, 0)
        assert np.lib.format.read_array_header_1_0(file) == (shape, False, np.dtype("<f2"))
    if shape == (3, 4):
        assert np.load(path).shape == shape


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"version": 2}', b'{"version": 4}', b'{"version": 5}', b"\xff"]
)
def test_journals_that_cannot_be_read_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "v.npy.journal").write_bytes(content)
    with pytest.raises(EmbedError, match="--restart"):
        Journal.load(tmp_path / "v.npy.journal")


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "v.npy.journal"
    commit = Commit(Position(1, 2, 3, 4, "digest"), (5, 6), 7, 8, is_complete=True)
    journal = Journal({"dtype": "float32"}, "skip", [{"path": "/a"}], {"dim": 4, "probe": [0.5]}, commit)
    journal.save(path)
    assert Journal.load(path) == journal
    older = path.read_bytes().replace(b'"num_written"', b'"num_tokens": 9, "num_written"')
    path.write_bytes(older.replace(b'"version": 4', b'"version": 3').replace(b',\n      "num_bytes": 0', b""))
    assert b"num_bytes" not in path.read_bytes()
    assert Journal.load(path) == journal, "as an older version has written it"
    assert Journal.load(tmp_path / "other") is None


def test_lines_of_an_older_version_are_of_the_same_rows(tmp_path: Path) -> None:
    """An unfinished run may have lines of both."""
    lines, vectors, out = (tmp_path / name for name in ("lines", "vectors", "v.parquet"))
    lines.write_bytes(b'[0,true,"a"]\n{"row":1,"id":"b","embedding":false}\n{"row":2,"id":"c","embedding":true}\n')
    vectors.write_bytes(np.arange(6, dtype="<f4").tobytes())
    write_parquet(lines, out, ["id"], {"embedding": "vector 2"}, "float32", vectors)
    columns = pyarrow.parquet.read_table(out).to_pydict()
    assert columns == {"row": [0, 1, 2], "id": ["a", "b", "c"], "embedding": [[0, 1], None, [4, 5]]}
