"""What comes of a reload reaches whoever asked for it."""

import os
import subprocess
import sys
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


def test_another_process_is_left_alone(folder, capsys):
    """SIGHUP ends whoever does not know it."""
    ReloadResult({"RUNTIME_DIRECTORY": str(folder)})
    with subprocess.Popen(["sleep", "60"]) as other:
        assert main([str(other.pid)]) == 3
        assert other.poll() is None
        other.kill()
    assert f"is of process {os.getpid()}, not of {other.pid}" in capsys.readouterr().err
