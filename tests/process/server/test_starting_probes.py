"""A server that is still starting: probes get 503 and are no reason for an alarm, requests get 503 and come again."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.serving import clean_environment, command_line, eventually, vecd

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
    return next((child for child in children if "vecd.child forkserver" in command_line(child)), None)


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
            vecd("--port", str(port), "--engine", "dummy", "--workers", "1"),
            env=clean_environment(folder, {}), cwd=folder, stdin=subprocess.DEVNULL, stderr=file,
        ) as process,
    ):  # fmt: skip
        try:
            eventually(lambda: _fork_server(process.pid) is not None)
            loading = _fork_server(process.pid)
            assert loading is not None
            loading.send_signal(signal.SIGSTOP)
            eventually(lambda: _status(f"{url}/health") == 503)
            eventually(lambda: "workers are loading" in httpx.get(f"{url}/health", timeout=10).text)
            yield url, loading, stderr
            loading.send_signal(signal.SIGCONT)
            eventually(lambda: _status(f"{url}/health") == 200)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_probes_write_no_line_and_requests_are_refused_while_the_model_loads(tmp_path: Path):
    with _loading_server(tmp_path) as (url, _, stderr):
        for path in ("/health", "/ping", "/", "/v2/health/ready"):
            for _ in range(_NUM_PROBES):
                assert _status(f"{url}{path}") == 503
        lines = stderr.read_text()
        for path, body, error in EMBEDDINGS:
            response = httpx.post(f"{url}{path}", json=body, timeout=10)
            assert response.status_code == 503
            assert 1 <= int(response.headers["retry-after"]) <= 10
            assert error(response.json()) == f"The server is starting; {httpx.get(f'{url}/health').json()['reason']}"
    assert not [each for each in ("WARNING", "/health", " 503 ") if each in lines]


_SLOW_PLAN = """
import os, sys, time
from vecd.launch.config import plan
card_of = plan.card_of

def wait(*arguments):
    while not os.path.exists("go on"):
        time.sleep(0.02)
    return card_of(*arguments)

plan.card_of = wait
from vecd.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_server_that_reads_its_model_for_long_says_so_and_then_serves(tmp_path: Path):
    (tmp_path / "tmp").mkdir()
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", _SLOW_PLAN, *vecd("--port", str(port), "--engine", "dummy", "--workers", "1")[3:]]
    with subprocess.Popen(command, env=clean_environment(tmp_path, {}), cwd=tmp_path) as process:
        try:

            def has(status: int, reason: str | None) -> bool:
                with suppress(httpx.TransportError):
                    answer = httpx.get(f"{url}/health", timeout=10)
                    return (answer.status_code, answer.json().get("reason")) == (status, reason)
                return False

            eventually(lambda: has(503, "finding and reading the model"))
            (tmp_path / "go on").touch()
            eventually(lambda: has(200, None))
            assert httpx.post(f"{url}/v1/embeddings", json={"input": "text"}).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_server_that_downloads_its_model_says_so_and_leaves_nothing(tmp_path: Path, end: signal.Signals):
    """The hub accepts connections, and never answers."""
    (tmp_path / "tmp").mkdir()
    path = tmp_path / "socket"
    with (
        socket.create_server(("127.0.0.1", 0)) as hub,
        subprocess.Popen(
            vecd("some/model", "--uds", str(path)), cwd=tmp_path, stderr=subprocess.DEVNULL,
            env=clean_environment(tmp_path, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}"}),
        ) as process,
        httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://vecd", timeout=10) as client,
    ):  # fmt: skip
        try:

            def reason() -> str:
                with suppress(httpx.TransportError):
                    return str(client.get("/health").json()["reason"])
                return ""

            eventually(lambda: reason() == "finding some/model in the hub's cache or on the hub")
            assert client.get("/live").status_code == 200
            assert client.get("/v2/health/live").json() == {"live": True}
            ready = client.get("/v2/health/ready")
            assert (ready.status_code, ready.json()) == (503, {"ready": False, "reason": reason()})
            for where, body, error in EMBEDDINGS:
                response = client.post(where, json=body)
                assert response.status_code == 503
                assert 1 <= int(response.headers["retry-after"]) <= 10
                assert error(response.json()).startswith("The server is starting; finding some/model")
            assert client.post("/v1/embeddings", json={"input": "text " * 1_000_000}).status_code == 503
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(end)
            process.wait(30)
            eventually(lambda: not any(child.is_running() for child in children))
            assert not path.exists()
            assert os.listdir(tmp_path / "tmp") == []
        finally:
            process.kill()
