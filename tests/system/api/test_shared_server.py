"""Runs of `vecd embed` that share one server: it is no run's own, and ends after the last of them."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.support.serving import clean_environment, eventually
from vecd.client.local_server import local_server, runtime_folder

NUM_ROWS, NUM_RUNS = 600, 3
TIMEOUT_S = 120.0


class Runs:
    """Each makes one output of the same lines, so that all outputs are equal in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime = folder / "run"
        self.runtime.mkdir()
        (folder / "in").mkdir()
        (folder / "tmp").mkdir()
        for run in range(NUM_RUNS):
            (folder / "in" / f"{run}.txt").write_text("".join(f"line {n}\n" for n in range(NUM_ROWS)))
        self._environment = clean_environment(folder, {"XDG_RUNTIME_DIR": str(self.runtime)})
        self._begun: list[subprocess.Popen[bytes]] = []

    def start(self, run: int, *serve_flags: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "vecd", "embed", "in", "--output-dir", "out", "--shard", f"{run}/{NUM_RUNS}"]
        slowly = ["--batch-texts", "4", "--concurrency", "1", "--retry-for", "60"]
        with (self.folder / f"stderr-{run}").open("ab") as stderr:
            process = subprocess.Popen(
                [*command, *slowly, "--", *(serve_flags or ("--engine", "dummy", "--workers", "1"))],
                cwd=self.folder,
                env=self._environment,
                stderr=stderr,
                start_new_session=True,
            )
        self._begun.append(process)
        return process

    def said(self, run: int) -> str:
        return (self.folder / f"stderr-{run}").read_text()

    def await_begin(self, *runs: int) -> None:
        journals = [self.folder / "out" / f"{run}.npy.journal" for run in runs]
        eventually(lambda: all(journal.exists() for journal in journals), 60)

    def await_any(self) -> None:
        eventually(lambda: any((self.folder / "out").glob("*.journal")), 60)

    def keepers(self) -> list[psutil.Process]:
        return self._with("vecd.client.local_server")

    def servers(self) -> list[psutil.Process]:
        return self._with("serve")

    def _with(self, word: str) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if word in words and any(str(self.runtime) in each for each in words):
                found.append(process)
        return found

    def check(self) -> None:
        first, *others = [np.load(self.folder / "out" / f"{run}.npy") for run in range(NUM_RUNS)]
        assert first.shape[0] == NUM_ROWS
        assert np.isfinite(first).all()
        assert len(np.unique(first, axis=0)) == NUM_ROWS
        for other in others:
            np.testing.assert_array_equal(first, other)

    def await_nothing(self) -> None:
        """No process, and no file in the runtime folder."""
        eventually(lambda: not self.keepers() and not self.servers(), 60)
        assert list((self.runtime / "vecd").iterdir()) == []

    def end(self) -> None:
        """Kill the runs, and end their server: it would wait for others, which is shown once."""
        for process in self._begun:
            process.kill()
            process.wait()
        for server in self.servers():
            server.terminate()


@pytest.fixture
def runs() -> Iterator[Runs]:
    with tempfile.TemporaryDirectory(prefix="vecd-", dir="/tmp") as name:  # a socket's path has at most 107 bytes
        runs = Runs(Path(name))
        try:
            yield runs
        finally:
            runs.end()
            runs.await_nothing()


def test_the_death_of_the_run_that_started_it_ends_no_other(runs: Runs) -> None:
    first = runs.start(0)
    eventually(lambda: bool(runs.keepers()), 60)
    others = [runs.start(1), runs.start(2)]
    runs.await_begin(0)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    for run, other in enumerate(others, 1):
        assert other.wait(TIMEOUT_S) == 0, runs.said(run)
        assert "1 of 1 outputs complete: 1 made" in runs.said(run)
        assert "Trying again" not in runs.said(run)
    assert len(runs.servers()) == 1, "it lingers"
    (server,) = runs.servers()
    assert runs.start(0).wait(TIMEOUT_S) == 0, runs.said(0)
    assert runs.servers() == [server]
    runs.check()
    runs.await_nothing()


@pytest.mark.parametrize("victim", ["keeper", "server"])
def test_runs_outlive_the_keeper_and_the_server(runs: Runs, victim: str) -> None:
    """All begin at once and start one; when that is killed, they start one more and go on."""
    begun = [runs.start(run) for run in range(NUM_RUNS)]
    runs.await_any()  # on a busy machine, the first may have ended when the last begins
    (server,), (keeper,) = runs.servers(), runs.keepers()
    (keeper if victim == "keeper" else server).kill()
    for run, process in enumerate(begun):
        assert process.wait(TIMEOUT_S) == 0, runs.said(run)
    assert server not in runs.servers()
    assert len(runs.servers()) <= 1
    runs.check()


def test_a_server_that_cannot_start_is_told_to_all(runs: Runs) -> None:
    for run, process in enumerate([runs.start(run, "/no/such/model") for run in range(NUM_RUNS)]):
        assert process.wait(TIMEOUT_S) == 2
        assert "the server did not start" in runs.said(run)
        assert "/no/such/model" in runs.said(run)


def test_a_runtime_folder_of_others_is_refused(runs: Runs) -> None:
    (runs.runtime / "vecd").mkdir(mode=0o755)
    assert runs.start(0).wait(TIMEOUT_S) == 2
    assert f"{runs.runtime}/vecd is not a folder of this user alone" in runs.said(0)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process's own, with a shared server of the dummy engine as `shared_server` starts it."""
    with tempfile.TemporaryDirectory(prefix="vecd-", dir="/tmp") as name:
        for key, value in clean_environment(tmp_path, {"XDG_RUNTIME_DIR": name}).items():
            monkeypatch.setenv(key, value)
        yield Path(name)
        eventually(lambda: not any(name in " ".join(each.info["cmdline"] or []) for each in processes()), 60)


def processes() -> list[psutil.Process]:
    return list(psutil.process_iter(["cmdline"]))


def test_a_folder_that_is_removed_while_the_server_is_used(runtime: Path) -> None:
    """A log-out does so. The caller is told and ends in order; what later callers have there is left to them."""
    with local_server(("--engine", "dummy", "--workers", "1"), shared=True) as (url, why_gone):
        assert why_gone() is None
        key = Path(url).stem
        shutil.rmtree(runtime / "vecd")
        why = why_gone()
        assert why is not None
        assert f"{key}.lock was removed while the shared server was in use" in why
        (runtime / "vecd").mkdir(mode=0o700)
        others = [runtime / "vecd" / f"{key}.{suffix}" for suffix in ("lock", "keeper", "log")]
        for path in others:
            path.touch()
    eventually(lambda: not any(str(runtime) in " ".join(each.info["cmdline"] or []) for each in processes()), 60)
    assert sorted((runtime / "vecd").iterdir()) == sorted(others)
    assert not any(path.read_bytes() for path in others)


def test_a_runtime_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_folder("a.sock") == tmp_path / "vecd"
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert runtime_folder("a.sock") == Path(f"/tmp/vecd-{other}")
