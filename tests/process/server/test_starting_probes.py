"""A server that is still starting: probes get 503 and are no reason for an alarm, requests get 503 and come again."""

import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.serving import clean_environment, eventually, running_server, vecd

_NUM_PROBES = 5
EMBEDDINGS: list[tuple[str, dict[str, Any], Callable[[Any], str]]] = [
    ("/v1/embeddings", {"input": "text"}, lambda body: body["error"]["message"]),
    ("/api/embed", {"model": "any", "input": "text"}, lambda body: body["error"]),
    ("/v2/embed", {"model": "any", "texts": ["text"], "input_type": "search_query"}, lambda body: body["message"]),
]
"""In each dialect: a path, a body, and where the error's message is."""


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


@contextmanager
def _loading_server(folder: Path) -> Iterator[tuple[str, psutil.Process, Path]]:
    """The URL of a server that listens, its fork server, which is stopped for as long as a large model takes to load,
    and the file of its log. It must become ready once the fork server goes on."""
    (folder / "tmp").mkdir()
    port, stderr = _free_port(), folder / "stderr"
    url = f"http://127.0.0.1:{port}"
    with (
        stderr.open("w") as file,
        subprocess.Popen(
            vecd("--port", str(port), "--engine", "weightless", "--workers", "1"),
            env=clean_environment(folder, {}), cwd=folder, stdin=subprocess.DEVNULL, stderr=file,
        ) as process,
    ):  # fmt: skip
        try:
            eventually(lambda: _fork_server(process.pid) is not None)
            loading = _fork_server(process.pid)
            assert loading is not None
            loading.send_signal(signal.SIGSTOP)
            eventually(lambda: _status(f"{url}/health") == 503)
            yield url, loading, stderr
            loading.send_signal(signal.SIGCONT)
            eventually(lambda: _status(f"{url}/health") == 200)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_probes_while_the_model_loads_write_no_line(tmp_path: Path):
    with _loading_server(tmp_path) as (url, _, stderr):
        for path in ("/health", "/ping", "/"):
            for _ in range(_NUM_PROBES):
                assert _status(f"{url}{path}") == 503
    lines = stderr.read_text()
    assert "WARNING" not in lines
    assert "/health" not in lines
    assert " 503 " not in lines


def test_requests_for_embeddings_are_refused_while_the_model_loads(tmp_path: Path):
    with _loading_server(tmp_path) as (url, _, _):
        for path, body, error in EMBEDDINGS:
            response = httpx.post(f"{url}{path}", json=body, timeout=10)
            assert response.status_code == 503
            assert 1 <= int(response.headers["retry-after"]) <= 10
            assert error(response.json()) == f"The server is starting; {httpx.get(f'{url}/health').json()['reason']}"


def test_a_server_that_was_ready_lets_requests_wait_for_a_worker():
    with running_server("--engine", "dummy", "--workers", "1") as server, ThreadPoolExecutor(1) as thread:
        loading, [worker] = _fork_server(server.pid), server.workers()
        assert loading is not None
        loading.send_signal(signal.SIGSTOP)
        worker.kill()
        eventually(lambda: _status(f"{server.url}/health") == 503)
        waiting = thread.submit(server.embed, "text")
        eventually(lambda: httpx.get(f"{server.url}/info").json()["queue"]["requests"] == 1)
        loading.send_signal(signal.SIGCONT)
        assert len(waiting.result(30)) == 1
