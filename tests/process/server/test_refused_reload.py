"""A reload that is refused half-way: some workers of the new generation were ready, and all of them are ended."""

import signal
from pathlib import Path

import httpx
import pytest

from tests.support.serving import Server, eventually, running_server
from tests.support.soak.faults import injecting

NUM_REQUESTS = 3
TWO_TEXTS = ["one for each of two idle workers", "and the other"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "vecd.toml"
    path.write_text("workers = 2")
    return path


def restarts(server: Server) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    found = [line.split() for line in lines if line.startswith("vecd_worker_restarts_total")]
    return {name: float(number) for name, number in found}


def test_what_is_shown_of_living_workers_is_theirs(config: Path, tmp_path: Path):
    """The workers of the discarded generation have the same indexes."""
    env = injecting(tmp_path / "faults")
    with running_server("--engine", "weightless", "--config", str(config), env=env) as server:
        for _ in range(NUM_REQUESTS):
            server.embed(TWO_TEXTS)
        before = len(server.stderr)
        (tmp_path / "faults.starts").mkdir()
        config.write_text("workers = 2\nstart-timeout = 5")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: "nothing has changed" in server.stderr[before:], 60)
        assert (tmp_path / "faults.starts" / "first").exists(), "one of the new workers was ready"
        for _ in range(NUM_REQUESTS):
            server.embed(TWO_TEXTS)
        workers = server.info()["workers"]
        assert [worker["life"] for worker in workers] == [1, 1]
        assert [worker["batches"] for worker in workers] == [2 * NUM_REQUESTS] * 2
        stats = httpx.get(f"{server.url}/stats").json()
        assert [worker["life"] for worker in stats["workers"]] == [1, 1]
        assert set(restarts(server).values()) == {0}
