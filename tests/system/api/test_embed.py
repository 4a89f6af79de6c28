"""`vecd embed` as people start it: beside a server that runs, and with one of its own."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.support.serving import RunningServer, Server, clean_environment, eventually, is_alive
from tests.support.shared_servers import DUMMY, shared_server
from tests.support.soak.embedding import kill_twice_and_compare
from tests.support.texts import make_texts
from vecd.client.embed.command import main


@pytest.fixture(scope="module")
def dummy() -> RunningServer:
    return shared_server(*DUMMY)


def test_killed_twice_every_row_is_there_once(dummy: Server, tmp_path: Path) -> None:
    kill_twice_and_compare(dummy, tmp_path)


def test_the_bundled_model(server: Server, tmp_path: Path) -> None:
    texts = [" ".join(text.split()).replace("\x00", "") for text in make_texts(30)]
    source, out = tmp_path / "a.txt", tmp_path / "v.npy"
    source.write_text("\n".join(texts) + "\n", encoding="utf-8")
    assert main([str(source), "-o", str(out), "--url", server.url, "--on-bad-row", "blank"]) == 0
    vectors = np.load(out)
    asked = [row for row, text in enumerate(texts) if text]
    assert np.flatnonzero(np.isfinite(vectors).all(axis=1)).tolist() == asked
    direct = np.array(server.embed([texts[row] for row in asked]))
    assert (vectors[asked] * direct).sum(axis=1).min() > 0.999  # of length 1; batches differ, and may be bfloat16


def test_standard_input_through_a_server_of_its_own(tmp_path: Path) -> None:
    """Killed while it waits for more, its server goes, too; the same input again is embedded whole."""
    out = tmp_path / "v.npy"
    (tmp_path / "tmp").mkdir()
    own_server = ["--", "--engine", "dummy", "--workers", "1"]
    command = [sys.executable, "-m", "vecd", "embed", "-", "-o", str(out), *own_server]
    environment = clean_environment(tmp_path, {})
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as first:
        assert first.stdin is not None
        first.stdin.write(b"one\ntwo\n")
        first.stdin.flush()
        eventually(lambda: first.poll() is not None or out.with_name("v.npy.journal").exists(), timeout_s=120)
        family = psutil.Process(first.pid).children(recursive=True)
        assert len(family) >= 3
        first.kill()
    eventually(lambda: not any(map(is_alive, family)), timeout_s=60)

    lines = b"one\ntwo\n\nfour\n"
    second = subprocess.run(command, input=lines, capture_output=True, env=environment, timeout=180, check=False)
    assert second.returncode == 1, second.stderr.decode()
    assert b"1 row could not be embedded; its vector is NaN" in second.stderr
    vectors = np.load(out)
    assert np.isnan(vectors).all(axis=1).tolist() == [False, False, True, False]
    assert sorted(path.name for path in tmp_path.glob("v*")) == ["v.npy", "v.npy.rejected.jsonl"]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_server_that_cannot_start_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    command = [sys.executable, "-m", "vecd", "embed", "a.txt", "-o", "v.npy", "--model", "/no/such/model"]
    environment = clean_environment(tmp_path, {})
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, env=environment, timeout=120, check=False)
    assert done.returncode == 2
    assert b"the server did not start" in done.stderr
    assert b"/no/such/model" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "tmp"] == ["a.txt"]
