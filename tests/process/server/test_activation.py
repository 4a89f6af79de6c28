"""The server beside systemd, without systemd: sockets that are handed over, and what it says of itself.

A socket that is handed over stays open when the server ends. What connects meanwhile waits for the next life; nobody is
refused, and no request is lost.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.serving import START_TIMEOUT_S, STOP_TIMEOUT_S, clean_environment, command_line, eventually
from vecd.base.kernel import die_with_parent

MAX_WAITING = 50
FLAGS = ["--engine", "dummy", "--workers", "1"]
needs_soak = pytest.mark.skipif("VECD_SOAK" not in os.environ, reason="takes seconds: with VECD_SOAK=1")
# What systemd does between fork and exec.
HAND_OVER = """
import os, sys
fds, notify, flags = [int(fd) for fd in sys.argv[1].split(",") if fd], sys.argv[2], sys.argv[3:]
for number, fd in enumerate([os.dup(fd) for fd in fds], start=3):
    os.dup2(fd, number)
    os.set_inheritable(number, True)
os.environ.update(LISTEN_FDS=str(len(fds)), LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES="vecd:admin")
os.environ.update(NOTIFY_SOCKET=notify, WATCHDOG_USEC="2000000")
os.execv(sys.executable, [sys.executable, "-m", "vecd", "serve", *flags])
"""


class Systemd:
    """Hands sockets over, and hears what the server says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"{folder}/notify")
        (folder / "tmp").mkdir()

    def close(self) -> None:
        self._socket.close()

    def forget(self) -> None:
        """What has been said so far, and not been listened to."""
        self._socket.setblocking(False)
        with suppress(BlockingIOError):
            while self._socket.recv(4096):
                pass

    def until_said(self, line: str, within_s: float = START_TIMEOUT_S) -> list[str]:
        """Its lines since the last time, up to this one's message. Raises TimeoutError."""
        deadline = time.monotonic() + within_s
        said: list[str] = []
        while not any(line in heard for heard in said):
            self._socket.settimeout(max(0.1, deadline - time.monotonic()))
            said += self._socket.recv(4096).decode().split("\n")
        self.said += said
        return said

    def start(self, *sockets: socket.socket, flags: Sequence[str] = FLAGS) -> "subprocess.Popen[bytes]":
        fds = [sock.fileno() for sock in sockets]
        with (self.folder / "stderr").open("ab") as stderr:
            return subprocess.Popen(
                [sys.executable, "-c", HAND_OVER, ",".join(map(str, fds)), f"{self.folder}/notify", *flags],
                pass_fds=fds,
                stderr=stderr,
                cwd=self.folder,
                env={**clean_environment(self.folder, {}), "PYTHONPATH": str(Path(__file__).parents[3])},
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 (runs no Python that takes a lock)
            )

    @contextmanager
    def server(self, *sockets: socket.socket, flags: Sequence[str] = FLAGS) -> Iterator["subprocess.Popen[bytes]"]:
        """One that is ready, and is stopped."""
        process = self.start(*sockets, flags=flags)
        try:
            self.until_said("READY=1")
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_TIMEOUT_S) == 0, (self.folder / "stderr").read_text()
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    with closing(Systemd(tmp_path)) as listener:
        yield listener


@contextmanager
def listening(path: Path | None = None) -> Iterator[socket.socket]:
    """What systemd has made: TCP, or a unix socket with this path."""
    with socket.socket(socket.AF_INET if path is None else socket.AF_UNIX) as sock:
        sock.bind(("127.0.0.1", 0) if path is None else str(path))
        sock.listen(1000)
        yield sock


def ask(public: socket.socket, text: str) -> int:
    """The number of vectors that come back. However long it takes, on a connection of its own."""
    connection = HTTPConnection("vecd")
    connection.sock = socket.socket(public.family)
    connection.sock.settimeout(START_TIMEOUT_S)
    connection.sock.connect(public.getsockname())
    connection.request("POST", "/v1/embeddings", json.dumps({"input": text}))
    answer = connection.getresponse()
    assert answer.status == 200
    vectors = json.loads(answer.read())["data"]
    connection.close()
    return len(vectors)


@pytest.mark.parametrize(
    ("kind", "gateways"),
    [("tcp", 2), pytest.param("tcp", 1, marks=needs_soak), pytest.param("unix", 1, marks=needs_soak)],
)
def test_nobody_is_refused_or_cut_over_a_restart(kind, gateways, systemd, tmp_path):
    """Whenever it connects: what is not served by this life is by the next."""
    # Not 0, as in other tests: who has just connected must have the time to send a request.
    flags = [*FLAGS, "--gateways", str(gateways), "--drain-grace", "0.2"]
    with listening(tmp_path / "s" if kind == "unix" else None) as public, ThreadPoolExecutor(MAX_WAITING) as threads:
        with systemd.server(public, flags=flags) as process:
            assert ask(public, "before") == 1
            process.send_signal(signal.SIGTERM)
            answers: list[Future[int]] = []
            while process.poll() is None:
                if len(answers) < MAX_WAITING - 10:
                    answers.append(threads.submit(ask, public, "meanwhile"))
                time.sleep(0.01)
        answers += [threads.submit(ask, public, "afterwards") for _ in range(10)]
        with systemd.server(public):
            assert all(answer.result(START_TIMEOUT_S) == 1 for answer in answers)


def test_a_port_beside_a_socket_is_refused(systemd, tmp_path):
    with listening() as public:
        process = systemd.start(public, flags=[*FLAGS, "--port", "9000"])
        assert process.wait(START_TIMEOUT_S) == 2
        assert "vecd: port: given, but the public socket is systemd's" in (tmp_path / "stderr").read_text()
        systemd.until_said("STATUS=Cannot start: port: given")


# --- one server for all of these, in this order -----------------------------------------------------------------


@dataclass
class Service:
    systemd: Systemd
    process: "subprocess.Popen[bytes]"
    admin_url: str
    serving: str
    """Its status while all is well."""

    @property
    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if child.name().startswith("vecd-worker")]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """By a unix socket, beside one for operators."""
    folder = tmp_path_factory.mktemp("service")
    path = folder / "public"
    with closing(Systemd(folder)) as systemd, listening(path) as public, listening() as admin:
        admin_url = f"http://127.0.0.1:{admin.getsockname()[1]}"
        serving = f"STATUS=Serving all-MiniLM-L6-v2 at unix:{path}, 1 worker"
        with systemd.server(public, admin) as process:
            assert ask(public, "Hello, world") == 1
            yield Service(systemd, process, admin_url, serving)
        said = systemd.until_said("STOPPING=1")
        assert any(line.startswith("STATUS=Stopping") for line in said)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))  # it is for the next life: neither the file nor the socket is gone


def test_it_says_how_it_starts(service):
    said = service.systemd.said
    assert "STATUS=Starting: making a dummy engine" in said
    assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in said)
    assert said[said.index("READY=1") + 1] == service.serving
    service.systemd.until_said("WATCHDOG=1")


def test_no_child_speaks_for_the_service_or_listens_for_it(service):
    public = f"{service.systemd.folder}/public"
    inode = next(line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines() if line.endswith(public))
    listeners = []
    for child in psutil.Process(service.process.pid).children(recursive=True):
        assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS"} & child.environ().keys()
        if f"socket:[{inode}]" in [os.readlink(path) for path in Path(f"/proc/{child.pid}/fd").iterdir()]:
            listeners.append(command_line(child))
    assert ["vecd.child gateway" in listener for listener in listeners] == [True]


def test_the_admin_socket_is_handed_over_too(service):
    assert httpx.get(f"{service.admin_url}/metrics").status_code == 200


def test_a_reload(service):
    with reloading(service) as asking:
        said = service.systemd.until_said("READY=1")
        assert asking.wait(START_TIMEOUT_S) == 0
    assert said.index("RELOADING=1") < said.index("READY=1")
    assert said[-1] == service.serving


def test_a_reload_that_is_refused(service):
    (service.systemd.folder / ".env").write_text("VECD_MAX_TOKENS=9999\n")
    with reloading(service) as asking:
        said = service.systemd.until_said("READY=1")
        assert asking.wait(START_TIMEOUT_S) == 2
        assert asking.stderr is not None
        assert b"9999 given, the model takes at most 256" in asking.stderr.read()
    assert said[-1].startswith(f"{service.serving}; not reloaded: --max-tokens: 9999 given")


def test_a_worker_that_is_gone(service):
    [worker] = service.workers
    worker.kill()
    service.systemd.until_said("0 of 1 worker")
    service.systemd.until_said(service.serving)


@needs_soak
def test_a_supervisor_that_is_stopped_is_not_alive(service):
    """Nobody else says that it is."""
    service.process.send_signal(signal.SIGSTOP)
    eventually(lambda: psutil.Process(service.process.pid).status() == psutil.STATUS_STOPPED)
    service.systemd.forget()
    with pytest.raises(TimeoutError):
        service.systemd.until_said("WATCHDOG=1", within_s=1.5)  # three times as often as it says so
    service.process.send_signal(signal.SIGCONT)
    service.systemd.until_said("WATCHDOG=1")


def reloading(service: Service) -> "subprocess.Popen[bytes]":
    """`vecd reload`, under way."""
    command = [sys.executable, "-m", "vecd", "reload", str(service.process.pid)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)
