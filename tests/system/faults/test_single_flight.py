"""Many clients that send the same input at the same time: it is computed once, and no death of a worker loses any."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.serving import Server, eventually, running_server
from tests.support.soak.faults import injecting
from tests.support.soak.injection.sitecustomize import CRASH, SLEEP

NUM_CLIENTS = 64


@pytest.fixture
def server(tmp_path: Path):
    """With a worker that takes its time for SLEEP, and dies of CRASH."""
    switch = tmp_path / "on"
    with running_server("--engine", "dummy", "--workers", "1", env=injecting(switch)) as server:
        switch.touch()
        yield server


def embed(server: Server, *ids: int) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json={"input": [101, *ids, 102]}, timeout=60)


def totals(server: Server) -> dict[str, float]:
    return httpx.get(f"{server.url}/stats", timeout=10).json()["totals"]


def embed_by_all(server: Server, threads: ThreadPoolExecutor, *ids: int) -> list[Future[httpx.Response]]:
    """When this returns, they are all in progress."""
    responses = [threads.submit(embed, server, *ids) for _ in range(NUM_CLIENTS)]
    eventually(lambda: server.info()["queue"]["requests"] == NUM_CLIENTS or responses[-1].done())
    return responses


def test_an_input_of_many_clients_is_computed_a_few_times(server: Server):
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        responses = [each.result() for each in embed_by_all(server, threads, 2000, SLEEP)]
    assert {response.status_code for response in responses} == {200}
    [(vector, num_tokens)] = {
        (tuple(response.json()["data"][0]["embedding"]), response.json()["usage"]["total_tokens"])
        for response in responses
    }
    assert (len(vector), num_tokens) == (384, 4)
    after = totals(server)
    assert after["sequences"] <= NUM_CLIENTS // 8
    assert after["sequences"] + after["coalesced"] == NUM_CLIENTS == after["inputs"]


def test_a_worker_that_is_killed_meanwhile_loses_none(server: Server):
    before = server.workers()
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        responses = embed_by_all(server, threads, 2001, SLEEP)
        for worker in before:
            worker.kill()
        assert {response.result().status_code for response in responses} == {200}
    after = totals(server)
    assert after["retried"] <= 2
    assert after["sequences"] + after["coalesced"] == NUM_CLIENTS
    assert server.workers() != before
    assert server.info()["queue"] == {"requests": 0, "sequences": 0, "tokens": 0}


def test_all_that_wait_for_an_input_that_kills_are_told_so_and_cost_no_more_workers(server: Server):
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        responses = [threads.submit(embed, server, 2002, CRASH) for _ in range(NUM_CLIENTS)]
        errors = [response.result() for response in responses]
    assert {response.status_code for response in errors} == {500}
    assert {response.json()["error"]["code"] for response in errors} == {"poison_input"}
    deadline = time.monotonic() + 60
    while httpx.get(f"{server.url}/health", timeout=10).status_code != 200 and time.monotonic() < deadline:
        time.sleep(0.1)
    [worker] = server.info()["workers"]
    assert worker["life"] == 1 + 3, "as many deaths as for one request"
    assert totals(server)["poisoned"] == 1
