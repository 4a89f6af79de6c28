"""Probes of a server that is still starting: answered 503, and no reason for an alarm."""

import signal
import socket
import subprocess
from pathlib import Path

import httpx
import psutil

from tests.support.serving import clean_environment, eventually, vecd

_NUM_PROBES = 5


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def _status(url: str) -> int | None:
    try:
        return httpx.get(url, timeout=10).status_code
    except httpx.ConnectError:
        return None


def _fork_server(supervisor: int) -> psutil.Process | None:
    """The process that loads the model."""
    children = psutil.Process(supervisor).children()
    return next((child for child in children if "vecd.launch.child forkserver" in " ".join(child.cmdline())), None)


def test_probes_while_the_model_loads_write_no_line(tmp_path: Path):
    """The fork server is stopped, as long as a large model takes to load."""
    (tmp_path / "tmp").mkdir()
    port, stderr = _free_port(), tmp_path / "stderr"
    health = f"http://127.0.0.1:{port}/health"
    with (
        stderr.open("w") as file,
        subprocess.Popen(
            vecd("--port", str(port), "--engine", "weightless", "--workers", "1"),
            env=clean_environment(tmp_path, {}), cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=file,
        ) as process,
    ):  # fmt: skip
        try:
            eventually(lambda: _fork_server(process.pid) is not None)
            loading = _fork_server(process.pid)
            assert loading is not None
            loading.send_signal(signal.SIGSTOP)
            eventually(lambda: _status(health) == 503)
            for path in ("/health", "/ping", "/"):
                for _ in range(_NUM_PROBES):
                    assert _status(f"http://127.0.0.1:{port}{path}") == 503
            loading.send_signal(signal.SIGCONT)
            eventually(lambda: _status(health) == 200)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    lines = stderr.read_text()
    assert "WARNING" not in lines
    assert "/health" not in lines
    assert " 503 " not in lines
