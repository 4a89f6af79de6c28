"""Real Ray nodes on loopback, each a tree of processes that can be killed whole, for trials of vecd on Ray.

Owns the environment that Ray is installed into (its pins do not go with vecd's), the nodes' processes, and the folders
that they write to. The servers that nodes start are the checkout's, run by this Python: VECD_COMMAND. Whatever a
cluster has started has ended when it is left; nothing of other programs is touched.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from tests.support.serving import cache_folder, command_line, is_alive
from vecd.base.kernel import die_with_parent
from vecd.client.ray.start import environment

ROOT = Path(__file__).parents[2]
_PINS = ROOT / "tests" / "system" / "fleet" / "ray-requirements.txt"
_INSTALL_TIMEOUT_S = 600.0
_START_TIMEOUT_S = 90.0
_STORE_BYTES = 100 << 20
"""Of each node's object store: 78 MiB is the least that Ray takes."""


def ray_python() -> Path:
    """The Python of an environment that has Ray: made once from exact pins, in build/fleet, and kept.

    Raises CalledProcessError when it cannot be installed.
    """
    digest = hashlib.sha256(_PINS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = ROOT / "build" / "fleet" / f"ray-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists():
            shutil.rmtree(folder, ignore_errors=True)
            # With a PYTHONPATH, pip takes what it finds there for installed.
            env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
            run = partial(subprocess.run, check=True, env=env, timeout=_INSTALL_TIMEOUT_S, cwd=folder.parent)
            run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
            pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--quiet", "install"]
            run([*pip, "--no-compile", "--no-deps", "--requirement", str(_PINS)])
            (folder / "installed").touch()
    return folder / "bin" / "python"


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


@dataclass(eq=False)
class Node:
    """A node's processes: `ray start`, and all that come of it."""

    process: "subprocess.Popen[bytes]"
    folder: Path
    """Of its temporary files, and where its servers meet those who share them."""

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """All that live, whoever their parent is: they have inherited this node's XDG_RUNTIME_DIR."""
        return [each for each in psutil.process_iter() if _runtime_folder(each) == str(self.folder) and is_alive(each)]

    def supervisors(self) -> list[psutil.Process]:
        """The `vecd serve` of this node, without the guard that started it, which names it in its own arguments."""
        lines = {each: command_line(each) for each in self.processes()}
        return [each for each, line in lines.items() if "vecd serve" in line and " guard " not in line]

    def kill(self) -> None:
        """As the power failing: every process at once, none with a last word."""
        processes = self.processes()
        for each in processes:  # before any can start another
            with suppress(psutil.NoSuchProcess):
                each.suspend()
        deadline = time.monotonic() + 10
        while processes and time.monotonic() < deadline:
            for each in processes:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            processes = self.processes()
        self.process.wait()


class RayCluster:
    """A head without work and nodes that offer `{"vecd": 1}`."""

    def __init__(self, folder: Path, extra: Mapping[str, str]) -> None:
        self.folder = folder
        self.python = ray_python()
        self.nodes: list[Node] = []
        self.port = free_port()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("VECD_", "RAY_", "PYTEST"))},
            "PYTHONPATH": str(ROOT),
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_ADDRESS": f"127.0.0.2:{self.port}",
            "RAY_DEDUP_LOGS": "0",
            "HF_HUB_OFFLINE": "1",
            "VECD_CACHE_DIR": cache_folder(),
            "VECD_DRAIN_GRACE": "0",
            "VECD_COMMAND": f"{sys.executable} -P -m vecd",
            **extra,
        }
        self.head = self._start(
            *("--head", f"--port={self.port}", f"--temp-dir={folder / 'r'}", "--include-dashboard=false"),
            *("--num-cpus=2", f"--ray-client-server-port={free_port()}"),
        )

    def add_nodes(self, num_nodes: int = 1) -> None:
        """Nodes for one vecd each. They take 5 to 12 s."""
        flags = (f"--address=127.0.0.2:{self.port}", "--num-cpus=2", "--resources", json.dumps({"vecd": 1}))
        for _ in range(num_nodes):  # of several that start at the same time, Ray gives most up
            self.nodes.append(self._start(*flags))

    def driver(self, *arguments: str, log: str = "driver") -> "subprocess.Popen[bytes]":
        """A program that runs in Ray's environment, with its output in `<log>.log` of the cluster's folder."""
        with (self.folder / f"{log}.log").open("ab") as file:
            return subprocess.Popen(
                [str(self.python), *arguments],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 (runs no Python that takes a lock)
            )

    def log(self, name: str = "driver") -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _start(self, *flags: str, num_tries: int = 2) -> Node:
        """A node that is ready. On a busy machine Ray gives up after 30 s; then another is tried."""
        node = self._begin_node(flags)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while "Ray runtime started" not in node.log:
            if node.process.poll() is not None or time.monotonic() > deadline:
                node.kill()
                assert num_tries > 1, f"a Ray node did not start: {node.log}"
                return self._start(*flags, num_tries=num_tries - 1)
            time.sleep(0.1)
        return node

    def _begin_node(self, flags: tuple[str, ...]) -> Node:
        number = len(list(self.folder.glob("n*")))
        folder = self.folder / f"n{number}"
        folder.mkdir()
        # A node's own address, since Ray takes 127.0.0.1 for no address; own ports, since Ray listens on all addresses.
        ports = ("--dashboard-agent-listen-port", "--dashboard-agent-grpc-port", "--runtime-env-agent-port")
        command = [
            str(self.python.parent / "ray"), "start", "--block", f"--node-ip-address=127.0.0.{number + 2}", *flags,
            "--min-worker-port=0", "--max-worker-port=0", f"--object-store-memory={_STORE_BYTES}",
            *(f"{port}={free_port()}" for port in (*ports, "--metrics-export-port")),
        ]  # fmt: skip
        with (folder / "log").open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**self.environment, "TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 (runs no Python that takes a lock)
            )
        return Node(process, folder)

    def close(self) -> None:
        """Kill what still runs. Asserts that nothing is left."""
        everything = [*self.nodes, self.head]
        for node in everything:
            node.kill()
        left = [command_line(each) for node in everything for each in node.processes()]
        assert not left, left


def _serve_environment(folder: Path) -> dict[str, str]:
    """vecd's, with files and ports that are this cluster's alone."""
    ports = ("HAPROXY_METRICS_PORT", "HAPROXY_STATS_PORT", "FALLBACK_PROXY_HTTP_PORT", "FALLBACK_PROXY_GRPC_PORT")
    return {**environment(folder), **{f"RAY_SERVE_{name}": str(free_port()) for name in ports}}


@contextmanager
def ray_cluster(num_nodes: int, *, with_serve: bool = False) -> Iterator[RayCluster]:
    """A cluster with this many nodes. `with_serve`: in the environment that Ray Serve needs."""
    # Not pytest's folder, whose path is too long for Ray's sockets.
    folder = Path(tempfile.mkdtemp(prefix="vr-"))
    try:
        cluster = RayCluster(folder, _serve_environment(folder / "h") if with_serve else {})
        try:
            cluster.add_nodes(num_nodes)
            yield cluster
        finally:
            cluster.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)  # what has been written meanwhile by processes that were ending


def _runtime_folder(process: psutil.Process) -> str | None:
    with suppress(psutil.Error):  # it has ended, or is another user's
        return process.environ().get("XDG_RUNTIME_DIR")
    return None
