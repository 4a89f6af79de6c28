"""What lives but does nothing any more is found out, and replaced."""

import os
import shutil
import time
from contextlib import suppress

import httpx
import psutil
import pytest

from tests.support.serving import Server, eventually, running_server
from tests.support.soak.form import only_long


def test_a_gateway_that_hangs_is_replaced():
    with running_server("--engine", "weightless", "--workers", "1") as server:
        gateway = server.gateway()
        gateway.suspend()
        [vector] = server.embed("waits in the backlog")
        assert len(vector) == 384
        assert server.gateway().pid != gateway.pid
        assert "has not sent a heartbeat" in server.stderr


@only_long
def test_a_supervisor_that_was_stopped_accuses_nobody():
    with running_server("--engine", "weightless", "--workers", "1") as server:
        gateway = server.gateway()
        psutil.Process(server.pid).suspend()
        try:
            for _ in range(12):
                assert httpx.get(f"{server.url}/health").status_code == 200
                time.sleep(1)
        finally:
            psutil.Process(server.pid).resume()
        time.sleep(2)
        assert server.gateway().pid == gateway.pid
        assert "killed" not in server.stderr


@only_long
def test_a_worker_that_never_stays_alive_makes_a_broken_model_and_not_a_spin():
    with running_server("--engine", "weightless", "--workers", "1") as server:
        seen: set[int] = set()

        def is_broken() -> bool:
            for worker in server.workers():
                seen.add(worker.pid)
                worker.kill()
            return "no worker stays alive" in server.stderr

        eventually(is_broken, 60)
        assert 6 <= len(seen) <= 10
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503
        assert "dies again and again" in health.json()["reason"]
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, timeout=5)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_broken"
        assert int(answer.headers["retry-after"]) > 0
        eventually(lambda: httpx.get(f"{server.url}/health").status_code == 200, 60)
        assert len(server.embed("and back again")) == 1


@pytest.mark.skipif("VECD_SOAK" not in os.environ, reason="compares engines twice: with VECD_SOAK=1")
def test_no_zombie_stays_of_a_fork_server_that_is_killed_while_it_chooses(tmp_path):
    """It has started another process, to compare engines in, which is left to the supervisor."""
    cache = tmp_path / "cache"
    with running_server("--workers", "1", env={"VECD_CACHE_DIR": str(cache)}) as server:
        shutil.rmtree(cache)
        fork_server(server).kill()
        eventually(lambda: is_selecting(server), 60)
        fork_server(server).kill()
        eventually(lambda: httpx.get(f"{server.url}/health").status_code == 200, 120)
        eventually(lambda: psutil.STATUS_ZOMBIE not in [process.status() for process in server.processes()])


def fork_server(server: Server) -> psutil.Process:
    """Not the workers, which have its command line."""
    [found] = [child for child in psutil.Process(server.pid).children() if "forkserver" in child.cmdline()]
    return found


def is_selecting(server: Server) -> bool:
    for process in server.processes():
        with suppress(psutil.Error):
            if "select" in process.cmdline():
                return True
    return False
