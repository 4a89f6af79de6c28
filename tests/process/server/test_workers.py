"""A server whose workers are not all there: those of a reload that is refused half-way, and one that is gone."""

import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.serving import Server, eventually, running_server
from tests.support.soak.faults import injecting

NUM_REQUESTS = 3
TWO_TEXTS = ["one for each of two idle workers", "and the other"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    config = folder / "vecd.toml"
    config.write_text("workers = 2")
    with running_server("--engine", "dummy", "--config", str(config), env=injecting(folder / "faults")) as server:
        yield server


def restarts(server: Server) -> set[float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return {float(line.split()[1]) for line in lines if line.startswith("vecd_worker_restarts_total")}


def test_what_is_shown_of_living_workers_is_theirs(server: Server, folder: Path) -> None:
    """The workers of the discarded generation, some of which were ready, have the same indexes."""
    for _ in range(NUM_REQUESTS):
        server.embed(TWO_TEXTS)
    (folder / "faults.starts").mkdir()
    (folder / "vecd.toml").write_text("workers = 2\nstart-timeout = 5")
    assert "nothing has changed" in server.reload_outcome()
    assert (folder / "faults.starts" / "first").exists(), "one of the new workers was ready"
    for _ in range(NUM_REQUESTS):
        server.embed(TWO_TEXTS)
    workers = server.info()["workers"]
    assert [worker["life"] for worker in workers] == [1, 1]
    assert [worker["batches"] for worker in workers] == [2 * NUM_REQUESTS] * 2
    stats = httpx.get(f"{server.url}/stats").json()
    assert [worker["life"] for worker in stats["workers"]] == [1, 1]
    assert restarts(server) == {0}


def test_a_server_that_was_ready_lets_requests_wait_for_a_worker(server: Server, folder: Path) -> None:
    workers, loading = server.workers(), server.fork_server()
    loading.send_signal(signal.SIGSTOP)
    shutil.rmtree(folder / "faults.starts")
    for worker in workers:
        worker.kill()
    eventually(lambda: httpx.get(f"{server.url}/health").status_code == 503)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(server.embed, "text")
        eventually(lambda: server.info()["queue"]["requests"] == 1)
        loading.send_signal(signal.SIGCONT)
        assert len(waiting.result(30)) == 1
