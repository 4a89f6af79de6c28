"""What comes of a reload reaches whoever asked for it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vecd.launch.systemd.reload_command import ReloadResult, main

# Takes a signal for a wish, and says after a while what came of it, as the supervisor does.
SERVER = """
import signal, sys, time
from vecd.launch.systemd.reload_command import ReloadResult
outcome, problems = ReloadResult(), sys.argv[1:]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
print("ready", flush=True)
signal.sigwait([signal.SIGHUP])
outcome.requested()
if problems == ["end"]:
    sys.exit()
outcome.done(1, problems)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    return tmp_path


def reload(*problems: str) -> int:
    command = [sys.executable, "-c", SERVER, *problems]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == "ready\n"
            return main([str(server.pid)])
        finally:
            server.kill()


def test_a_reload_that_is_done(folder):
    assert reload() == 0


def test_one_that_is_refused_says_why(folder, capsys):
    assert reload("port: cannot be changed", "model: there is none") == 2
    assert capsys.readouterr().err == "port: cannot be changed\nmodel: there is none\n"


def test_a_server_that_ends_meanwhile(folder, capsys):
    assert reload("end") == 3
    assert "has ended meanwhile" in capsys.readouterr().err


def test_what_was_asked_for_before_is_not_taken_for_ours(folder):
    """A reload that began before ours was asked for may have read the configuration of before."""
    outcome = ReloadResult({"RUNTIME_DIRECTORY": str(folder)})
    outcome.requested()
    codes: list[int] = []
    was_asked = threading.Event()

    def on_signal(*_: object) -> None:
        outcome.requested()
        was_asked.set()

    signal.signal(signal.SIGHUP, on_signal)
    try:
        asking = threading.Thread(target=lambda: codes.append(main([str(os.getpid())])))
        asking.start()
        assert was_asked.wait(10)
        outcome.done(1)
        asking.join(0.2)
        assert asking.is_alive()
        outcome.done(2, ["refused"])
        asking.join(10)
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert codes == [2]


def test_nothing_is_written_without_a_folder_and_nothing_left_in_one(tmp_path):
    outcome = ReloadResult({})
    outcome.requested()
    outcome.done(1)
    outcome.close()
    outcome = ReloadResult({"RUNTIME_DIRECTORY": str(tmp_path)})
    assert len(list(tmp_path.iterdir())) == 1
    outcome.close()
    assert not list(tmp_path.iterdir())


def test_another_process_is_left_alone(folder, capsys):
    """SIGHUP ends whoever does not know it."""
    ReloadResult({"RUNTIME_DIRECTORY": str(folder)})
    with subprocess.Popen(["sleep", "60"]) as other:
        assert main([str(other.pid)]) == 3
        assert other.poll() is None
        other.kill()
    assert f"is of process {os.getpid()}, not of {other.pid}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["none", "file"])
def test_a_folder_that_is_gone_is_no_reason_to_end(name, tmp_path):
    (tmp_path / "file").touch()
    outcome = ReloadResult({"RUNTIME_DIRECTORY": f"{tmp_path}/{name}"})
    outcome.done(1)
    outcome.close()


@pytest.mark.parametrize("arguments", [[], ["x"], ["0"], ["9" * 20], ["9" * 5000], ["-5"], ["2", "3"]])
def test_bad_arguments(arguments, capsys):
    assert main(arguments) == 2
    assert "usage: vecd reload PID" in capsys.readouterr().err


def test_without_the_folder_there_is_nothing_to_wait_for(monkeypatch, capsys):
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    assert main([str(os.getpid())]) == 2
    assert "RUNTIME_DIRECTORY is not set" in capsys.readouterr().err


def test_no_server_has_been_there(folder, capsys):
    assert main([str(os.getpid())]) == 3
    assert "no server has written" in capsys.readouterr().err
