"""`vecd.Server` lives as long as it is used, and never longer than the process that started it."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import vecd
from tests.support.serving import eventually

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
    return not [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def test_it_ends_with_its_block() -> None:
    with vecd.Server(**ARGUMENTS) as server:  # type: ignore[arg-type]
        folder = Path(server.url.removeprefix("unix:")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert server.embed(["a", "b"]).shape == (2, 384)
        processes = tree_of(server)
        assert len(processes) >= 4  # guard, supervisor, gateway, fork server
    assert have_ended(processes)
    assert not folder.exists()
    with pytest.raises(vecd.ServerUnavailable, match="has not been started"):
        server.embed("a")


def test_the_environment_of_other_servers_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "VECD_URL": "http://h:1",
        "VECD_PORT": "1",
        "VECD_UDS": "/none/sock",
        "VECD_API_KEY": "k",
    }.items():
        monkeypatch.setenv(name, value)
    with vecd.Server(**ARGUMENTS) as server:  # type: ignore[arg-type]
        assert server.embed("a").shape == (1, 384)
        with pytest.raises(vecd.AuthenticationError):
            vecd.Client(server.url, api_key="other").embed("a")


def test_it_can_be_started_and_closed_any_number_of_times() -> None:
    server = vecd.Server(**ARGUMENTS)  # type: ignore[arg-type]
    server.close()
    for _ in range(2):
        assert server.start().start() is server
        processes = tree_of(server)
        assert server.embed("a").shape == (1, 384)
        server.close()
        server.close()
        assert have_ended(processes)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"nonsense": 3}, "nonsense"),
        ({"workers": "many"}, "workers"),
        ({"engine": "dummy", "model": "/no/such/model"}, "no/such/model"),
    ],
)
def test_what_cannot_start_says_why(flags: dict[str, object], said: str) -> None:
    with pytest.raises(vecd.ServerNotStarted, match=said):
        vecd.Server(**flags).start()  # type: ignore[arg-type]


def test_a_start_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(vecd.ServerNotStarted, match="not ready in time"):
        vecd.Server(**ARGUMENTS, start_timeout=0.01).start()  # type: ignore[arg-type]


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


def test_it_ends_with_its_guard() -> None:
    with vecd.Server(**ARGUMENTS) as server:  # type: ignore[arg-type]
        processes = tree_of(server)
        folder = Path(server.url.removeprefix("unix:")).parent
        processes[0].kill()
        eventually(lambda: have_ended(processes))
        with pytest.raises(vecd.ServerUnavailable, match="has ended with -9"):
            server.embed("a")
    assert not folder.exists()


def test_a_server_that_dies_is_not_waited_for() -> None:
    with vecd.Server(**ARGUMENTS) as server:  # type: ignore[arg-type]
        processes = tree_of(server)
        processes[1].kill()
        eventually(lambda: have_ended(processes))
        with pytest.raises(vecd.ServerUnavailable, match="has ended"):
            server.embed("a")


def test_a_forked_process_does_not_end_it() -> None:
    with vecd.Server(**ARGUMENTS) as server:  # type: ignore[arg-type]
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


def test_a_worker_gets_a_client_of_it() -> None:
    import pickle

    with pytest.raises(vecd.VecdError, match="start it first"):
        pickle.dumps(vecd.Server(**ARGUMENTS))  # type: ignore[arg-type]
    with vecd.Server(**ARGUMENTS) as server:  # type: ignore[arg-type]
        copy = pickle.loads(pickle.dumps(server))
        assert type(copy) is vecd.Client
        assert copy.embed("a").shape == (1, 384)
