"""Several gateways on one socket: each has its share of the work, and the death of one is no other's."""

import asyncio
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from tests.support.serving import Load, Server, eventually, exact_server, running_server
from tests.support.texts import make_texts

NUM_CLIENTS = 16


@pytest.fixture(scope="module")
def corpus(reference):
    texts = [text[:400] for text in make_texts(96, seed=3)]
    return texts, reference(texts)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with exact_server("--gateways", "2", "--workers", "2") as running:
        yield running


def metrics_of(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").raise_for_status().text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def has_answered_more(client: httpx.Client, before: dict) -> bool:
    """Whether this client's gateway knows of no request that waits, and that each gateway has answered some since."""
    info = client.get("/info").json()
    gateways = zip(before["gateways"], info["gateways"], strict=True)
    return info["queue"]["requests"] == 0 and all(now["answered"] > then["answered"] for then, now in gateways)


def test_both_serve_and_each_speaks_for_the_whole_server(server, corpus):
    async def answer_many() -> tuple[Load, list[int]]:
        async with Load(server.url, corpus, NUM_CLIENTS) as load:
            await load.answers(150)
            connections = [gateway["connections"] for gateway in server.info()["gateways"]]
        return load, connections

    with server.client_of(0) as first, server.client_of(1) as second:
        for client in (first, second):
            eventually(lambda client=client: client.get("/health").status_code == 200)  # type: ignore[misc]
            client.get("/info")
        load, connections = asyncio.run(answer_many())
        assert load.failures == []
        assert min(connections) >= 3, connections
        clients = [first, second, second]
        before = first.get("/info").json()
        for client in clients:
            assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 200
        # What others have now is published a few times a second.
        eventually(lambda: all(has_answered_more(client, before) for client in clients))
        infos = [client.get("/info").json() for client in (first, second)]
        metrics = [metrics_of(client) for client in (first, second)]
    for info in infos:
        assert [gateway["gateway"] for gateway in info["gateways"]] == [0, 1]
        for then, now in zip(before["gateways"], info["gateways"], strict=True):
            assert now["answered"] > then["answered"]
        assert info["queue"] == {"requests": 0, "sequences": 0, "tokens": 0}
    done = [[(w["worker"], w["life"], w["batches"]) for w in info["workers"]] for info in infos]
    assert sorted(done[0]) == sorted(done[1])
    batches = sum(worker["batches"] for worker in infos[0]["workers"])
    for seen in metrics:
        assert seen["vecd_batches_total"] == batches
        assert seen["vecd_sequences_total"] + seen["vecd_sequences_coalesced_total"] >= load.num_answered
        assert seen['vecd_requests_total{dialect="openai",route="/v1/embeddings",status="200"}'] >= load.num_answered
        assert seen["vecd_requests_in_flight"] == 0
        for index, process in server.gateways().items():
            assert seen[f'vecd_gateway_pid{{gateway="{index}"}}'] == process.pid
            assert seen[f'vecd_workers_ready{{gateway="{index}"}}'] == 2


def test_a_killed_gateway_takes_only_its_own_connections_along(server, corpus):
    async def kill_under_load() -> tuple[Load, int, int]:
        async with Load(server.url, corpus, NUM_CLIENTS) as load:
            await load.answers(50)
            num_connections, index = min((g["connections"] or 99, g["gateway"]) for g in server.info()["gateways"])
            server.gateways()[index].kill()
            await load.answers(100)
        return load, num_connections, index

    before = server.info()
    load, num_connections, killed = asyncio.run(kill_under_load())
    assert len(load.failures) <= num_connections
    assert all("Error(" in failure for failure in load.failures), load.failures  # none is an answer
    eventually(lambda: len(server.gateways()) == 2, 30)
    after = server.info()
    for then, now in zip(before["gateways"], after["gateways"], strict=True):
        assert (then["pid"] != now["pid"]) == (now["gateway"] == killed)
        assert then["answered"] <= now["answered"]
    assert [w["life"] for w in after["workers"]] == [w["life"] for w in before["workers"]], "no worker was disturbed"
    texts, expected = corpus
    with server.client_of(killed) as client:  # the successor serves, from the slots of the dead
        eventually(lambda: client.get("/health").status_code == 200)
        answers = client.post("/v1/embeddings", json={"input": texts}).json()["data"]
    assert np.abs(np.array([answer["embedding"] for answer in answers]) - expected).max() < 1e-5


def test_a_killed_worker_costs_no_request_of_any_gateway(server, corpus):
    async def kill_under_load() -> Load:
        async with Load(server.url, corpus, NUM_CLIENTS) as load:
            for _ in range(2):
                await load.answers(30)
                server.workers()[-1].kill()
            await load.answers(50)
        return load

    load = asyncio.run(kill_under_load())
    assert load.failures == []


# --- without a model --------------------------------------------------------------------------------------------


def weightless(*flags: str):
    return running_server("--engine", "weightless", "--workers", "1", "--gateways", "2", *flags)


def test_sigterm_drains_all_gateways():
    texts = make_texts(16, seed=4)

    async def stop_under_load(server: Server) -> Load:
        corpus = texts, np.array(server.embed(texts), dtype=np.float32)
        async with Load(server.url, corpus, NUM_CLIENTS) as load:
            await load.answers(200)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*load._clients)
        return load

    # The default. Without a grace, a connection that is idle at that moment is closed on a request that is on its way.
    with weightless("--drain-grace", "0.5") as server:
        load = asyncio.run(stop_under_load(server))
        assert server.process.wait(30) == 0
        assert [f"gateway {index} ended with exit code 0" in server.stderr for index in range(2)] == [True, True]
    assert load.failures == []


def test_a_stuck_worker_is_replaced_once_though_both_complain():
    with weightless("--batch-timeout", "1") as server, ThreadPoolExecutor(2) as threads:
        with server.client_of(0) as first, server.client_of(1) as second:
            server.workers()[0].suspend()
            suspended_at = time.monotonic()
            answers = [
                threads.submit(client.post, "/v1/embeddings", json={"input": text})
                for client, text in ((first, "a"), (second, "b"))
            ]
            vectors = [answer.result(30).json()["data"][0]["embedding"] for answer in answers]
            assert time.monotonic() - suspended_at >= 2, "twice the time, for two gateways"
        assert vectors == server.embed(["a", "b"])
        assert server.stderr.count("is stuck and is killed") == 1


def test_metrics_need_the_key_as_the_rest_does():
    with weightless("--api-key", "a key") as server:
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        with httpx.Client(base_url=server.url, headers={"authorization": "Bearer a key"}) as client:
            assert metrics_of(client)["vecd_requests_in_flight"] == 0
            answer = client.get("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
