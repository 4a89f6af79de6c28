from pathlib import Path

import orjson
import pytest

from benchmarks.notebook import Measured, Notebook, Offline, Skipped, read_sessions


def test_what_is_written_is_what_is_read(tmp_path: Path, make_run) -> None:
    notebook = Notebook(tmp_path / "results", "make bench", {"num_rounds": 1}, {"cores": 2})
    notebook.add(Measured(server="vecd", version="1", command="vecd serve", environment={"A": "1"}, remark="r"))
    notebook.add(Skipped(server="vllm", reason="vllm is not on PATH"))
    notebook.add(make_run("vecd", "short-1", 100.0))
    notebook.add(
        Offline(
            dtype="float32",
            round=1,
            work="short",
            texts_per_batch=32,
            texts_per_s=1.0,
            tokens_per_s=2.0,
            p50_ms=3.0,
            others_cores=0.0,
        )
    )
    assert read_sessions(notebook.file) == [notebook.session]


def test_a_file_holds_the_sessions_of_a_day(tmp_path: Path, make_run) -> None:
    first = Notebook(tmp_path, "a", {}, {})
    first.session.started_at = "earlier"
    first.file.unlink()
    first._write("session", {"command": "a", "plan": {}, "machine": {}})
    second = Notebook(tmp_path, "b", {}, {})
    second.add(make_run("vecd", "mixed", 5.0))
    assert [session.command for session in read_sessions(second.file)] == ["a", "b"]
    assert second.file.name.endswith("-servers.jsonl")


def test_a_line_of_another_kind_is_refused(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path, "a", {}, {})
    with notebook.file.open("ab") as file:
        file.write(orjson.dumps({"session": notebook.session.started_at, "kind": "poem", "at": ""}))
    with pytest.raises(ValueError, match="poem"):
        read_sessions(notebook.file)
