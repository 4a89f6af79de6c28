"""A server with a model that is loaded on demand, and goes when it is not used; the other one goes on meanwhile."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.serving import Server, eventually, running_server


@pytest.fixture(scope="module")
def server(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("demand") / "vecd.toml"
    config.write_text(
        f'[models.a]\nsource = "{minilm_folder}"\nworkers = 1\n'
        f'[models.b]\nsource = "{minilm_folder}"\nworkers = 2\nload = "demand"\nkeep-alive = "2"\n'
    )
    with running_server("--engine", "dummy", "--gateways", "2", "--config", str(config)) as server:
        yield server


def embed(server: Server, model: str) -> int:
    body = {"input": "text"}
    return httpx.post(f"{server.url}/m/{model}/v1/embeddings", json=body, timeout=60).status_code


def state(server: Server, model: str = "b") -> str:
    return str(httpx.get(f"{server.url}/m/{model}/health", timeout=10).json()["state"])


def num(server: Server, line: str) -> int:
    return server.stderr.count(line)


def test_it_is_loaded_once_for_all_that_wait_and_goes_and_comes_again(server: Server) -> None:
    assert state(server) == "unloaded"
    processes_before = len(server.processes())
    with ThreadPoolExecutor(32) as threads:
        assert Counter(threads.map(lambda _: embed(server, "b"), range(64))) == {200: 64}
    assert num(server, "b: loaded in") == 1
    assert state(server) == "ready"
    eventually(lambda: state(server) == "unloaded")
    assert num(server, "b: unloaded in") == 1
    assert len(server.processes()) == processes_before
    assert embed(server, "b") == 200
    assert num(server, "b: loaded in") == 2


def test_no_request_fails_while_it_is_loaded_and_its_processes_are_killed(server: Server) -> None:
    eventually(lambda: state(server) == "unloaded")
    served = {process.pid for process in server.processes()}
    with ThreadPoolExecutor(4) as threads:
        requests = [threads.submit(lambda model: [embed(server, model) for _ in range(40)], model) for model in "abab"]
        num_killed = 0
        while not all(request.done() for request in requests):
            for process in server.processes():
                with suppress(psutil.NoSuchProcess):  # the zygote forks twice
                    if process.pid not in served and num_killed < 2 and not process.children():
                        process.kill()  # the fork server in its load, or a worker
                        served.add(process.pid)
                        num_killed += 1
        assert num_killed == 2
        for request in requests:
            assert Counter(request.result()) == {200: 40}
