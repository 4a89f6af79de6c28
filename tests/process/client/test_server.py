"""`vecd.Server` lives as long as it is used, and never longer than the process that started it."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import vecd
from tests.support.serving import eventually, is_alive

ARGUMENTS = {"engine": "dummy", "workers": 1}
_HOLD = """
import sys, threading, time, vecd
server = vecd.Server(engine="dummy", workers=1)
if sys.argv[1] == "thread":
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
else:
    server.start()
server.embed("a")
print(server.pid, server.url, flush=True)
if sys.argv[1] == "exit":
    sys.exit()
if sys.argv[1] == "raise":
    raise RuntimeError
if sys.argv[1] == "drop":
    del server
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    eventually(lambda: not list(tmp_path.glob("vecd-*")))


def tree_of(server: vecd.Server) -> list[psutil.Process]:
    assert server.pid is not None
    guard = psutil.Process(server.pid)
    return [guard, *guard.children(recursive=True)]


def have_ended(processes: list[psutil.Process]) -> bool:
    return not any(map(is_alive, processes))


def test_it_ends_with_its_block_and_can_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of other servers does not matter. A forked process does not end it."""
    others = {"VECD_URL": "http://h:1", "VECD_PORT": "1", "VECD_UDS": "/none/sock", "VECD_API_KEY": "k"}
    for name, value in others.items():
        monkeypatch.setenv(name, value)
    server = vecd.Server(**ARGUMENTS)  # type: ignore[arg-type]
    server.close()
    with pytest.raises(vecd.VecdError, match="start it first"):
        pickle.dumps(server)
    with server:
        folder = Path(server.url.removeprefix("unix:")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert server.embed(["a", "b"]).shape == (2, 384)
        with pytest.raises(vecd.AuthenticationError):
            vecd.Client(server.url, api_key="other").embed("a")
        processes = tree_of(server)
        assert len(processes) >= 4  # guard, supervisor, gateway, fork server
    assert have_ended(processes)
    assert not folder.exists()
    with pytest.raises(vecd.ServerUnavailable, match="has not been started"):
        server.embed("a")

    assert server.start().start() is server
    copy = pickle.loads(pickle.dumps(server))
    assert type(copy) is vecd.Client
    assert copy.embed("a").shape == (1, 384)
    processes = tree_of(server)
    child = os.fork()
    if not child:
        try:
            server.embed("a")
            server.close()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert server.embed("a").shape == (1, 384)
    server.close()
    server.close()
    assert have_ended(processes)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"nonsense": 3}, "nonsense"),
        ({"engine": "dummy", "model": "/no/such/model"}, "no/such/model"),
        ({**ARGUMENTS, "start_timeout": 0.01}, "not ready in time"),
    ],
)
def test_what_cannot_start_says_why(flags: dict[str, object], said: str) -> None:
    with pytest.raises(vecd.ServerNotStarted, match=said):
        vecd.Server(**flags).start()  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["main", "thread"])
def test_it_ends_with_its_process_however_that_dies(how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        guard_pid, url = holder.stdout.readline().split()
        guard = psutil.Process(int(guard_pid))
        processes = [guard, *guard.children(recursive=True)]
        # The thread that has started it may have ended: the server has not.
        assert vecd.Client(url).embed("a").shape == (1, 384)
        holder.send_signal(signal.SIGKILL)
    eventually(lambda: have_ended(processes))


@pytest.mark.parametrize("how", ["exit", "raise", "drop"])
def test_it_ends_when_nothing_uses_it_any_more(how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        guard_pid = int(holder.stdout.readline().split()[0])
        eventually(lambda: not psutil.pid_exists(guard_pid))


@pytest.mark.parametrize(("killed", "told"), [(0, "has ended with -9"), (1, "has ended")])
def test_it_ends_with_its_guard_and_is_not_waited_for_when_it_dies(killed: int, told: str) -> None:
    with vecd.Server(**ARGUMENTS) as server:  # type: ignore[arg-type]
        processes = tree_of(server)
        folder = Path(server.url.removeprefix("unix:")).parent
        processes[killed].kill()
        eventually(lambda: have_ended(processes))
        with pytest.raises(vecd.ServerUnavailable, match=told):
            server.embed("a")
    assert not folder.exists()
