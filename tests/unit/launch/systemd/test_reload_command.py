"""What comes of a reload reaches whoever asked for it."""

import os
import signal
import threading
from pathlib import Path

import pytest

from vecd.launch.systemd.reload_command import ReloadResult, main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    return tmp_path


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
