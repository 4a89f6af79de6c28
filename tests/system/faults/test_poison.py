"""Inputs that end or fail their worker, and an input of many clients at the same time: no other request is harmed, and
none is computed more often than it has to be. Without a model."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.support.serving import Load, Server, eventually, running_server
from tests.support.soak.faults import injecting
from tests.support.soak.injection.sitecustomize import CRASH, KILL, RAISE, SLEEP
from tests.support.texts import make_texts

NUM_CLIENTS = 64
GOOD = [101, 2000, 102]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    switch = tmp_path_factory.mktemp("switch") / "on"
    flags = ("--engine", "dummy", "--workers", "2", "--batch-timeout", "1")
    with running_server(*flags, env=injecting(switch)) as server:
        switch.touch()
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    """With both workers."""
    eventually(lambda: len(running.info()["workers"]) == 2, 60)
    return running


def embed(server: Server, *inputs: list[int]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/embeddings", json={"input": inputs}, timeout=60)


# --- beside others ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [KILL, RAISE], ids=["ends its worker", "fails in the model"])
def test_an_input_that_fails_takes_only_its_own_request_along(server: Server, word: int) -> None:
    texts = make_texts(16, seed=4)
    corpus = texts, np.array(server.embed(texts), dtype=np.float32)
    bad = [GOOD, GOOD, [101, word, 102], GOOD]

    async def send_beside_others() -> tuple[Load, list[httpx.Response]]:
        async with Load(server.url, corpus, num_clients=6) as load:
            await load.answers(10)
            answers = [await asyncio.to_thread(embed, server, *bad)]
            await load.answers(20)
            answers += [await asyncio.to_thread(embed, server, *inputs) for inputs in (bad, [GOOD, GOOD])]
        return load, answers

    load, answers = asyncio.run(send_beside_others())
    assert load.failures == []
    assert [answer.status_code for answer in answers] == [500, 500, 200]
    if word != RAISE:  # that may be the model's fault, and is tried each time
        assert ["input[2]" in answer.text for answer in answers[:2]] == [True, True], "and it is known now"


# --- of many clients at the same time ---------------------------------------------------------------------------


def totals(server: Server) -> dict[str, float]:
    return httpx.get(f"{server.url}/stats", timeout=10).json()["totals"]


def num_lives(server: Server) -> int:
    return sum(worker["life"] for worker in server.info()["workers"])


def grown(server: Server, before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in totals(server).items()}


def embed_by_all(server: Server, threads: ThreadPoolExecutor, *ids: int) -> list[Future[httpx.Response]]:
    """When this returns, they are all in progress."""
    responses = [threads.submit(embed, server, [101, *ids, 102]) for _ in range(NUM_CLIENTS)]
    eventually(lambda: server.info()["queue"]["requests"] == NUM_CLIENTS or responses[-1].done())
    return responses


def test_an_input_of_many_clients_is_computed_a_few_times(server: Server) -> None:
    before = totals(server)
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        responses = [each.result() for each in embed_by_all(server, threads, 2000, SLEEP)]
    assert {response.status_code for response in responses} == {200}
    [(vector, num_tokens)] = {
        (tuple(response.json()["data"][0]["embedding"]), response.json()["usage"]["total_tokens"])
        for response in responses
    }
    assert (len(vector), num_tokens) == (384, 4)
    after = grown(server, before)
    assert after["sequences"] <= NUM_CLIENTS // 8
    assert after["sequences"] + after["coalesced"] == NUM_CLIENTS == after["inputs"]


def test_a_worker_that_is_killed_meanwhile_loses_none(server: Server) -> None:
    before, killed = totals(server), server.workers()
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        responses = embed_by_all(server, threads, 2001, SLEEP)
        for worker in killed:
            worker.kill()
        assert {response.result().status_code for response in responses} == {200}
    after = grown(server, before)
    assert after["retried"] <= 2
    assert after["sequences"] + after["coalesced"] == NUM_CLIENTS
    assert server.workers() != killed
    assert server.info()["queue"] == {"requests": 0, "sequences": 0, "tokens": 0}


def test_all_that_wait_for_an_input_that_kills_are_told_so_and_cost_no_more_workers(server: Server) -> None:
    before, lives = totals(server), num_lives(server)
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        responses = [threads.submit(embed, server, [101, 2002, CRASH, 102]) for _ in range(NUM_CLIENTS)]
        errors = [response.result() for response in responses]
    assert {response.status_code for response in errors} == {500}
    assert {response.json()["error"]["code"] for response in errors} == {"poison_input"}
    eventually(lambda: len(server.info()["workers"]) == 2, 60)
    assert num_lives(server) == lives + 3, "as many deaths as for one request"
    assert grown(server, before)["poisoned"] == 1
