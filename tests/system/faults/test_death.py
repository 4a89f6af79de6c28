"""Whatever dies of a server with a model, no accepted request goes unanswered, no vector is another's, and nothing is
left behind. One server with two gateways and two workers, in which all that has died lives again for the next test."""

import asyncio
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Event
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.serving import Load, Server, eventually, exact_server
from tests.support.soak.faults import kill_one, workers
from tests.support.soak.form import only_long
from tests.support.texts import make_texts

Rows = list[NDArray[np.float32]]
NUM_CLIENTS = 16
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def corpus(reference):
    texts = [text[:200] for text in make_texts(96, seed=3)]
    return texts, reference(texts)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--gateways", "2", "--workers", "2", "--overflow", "chunk", "--batch-timeout", "3600")
    with exact_server(*flags) as running:
        yield running


@pytest.fixture(autouse=True)
def _is_whole_again(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        whole = request.getfixturevalue("server")
        eventually(lambda: is_whole(whole), 60)
        for gateway in (0, 1):
            with whole.client_of(gateway) as client:
                eventually(lambda client=client: client.get("/health").status_code == 200, 30)  # type: ignore[misc]


def is_whole(server: Server) -> bool:
    """Whether all that has died lives again. A gateway lists a worker that has just died with its fork server, and a
    new one is a process before it is a worker: those that are listed must be those that there are.
    """
    listed = [worker["pid"] for worker in server.info()["workers"]]
    return len(server.gateways()) == 2 == len(listed) and sorted(listed) == sorted(w.pid for w in workers(server))


def metrics_of(client: httpx.Client) -> dict[str, float]:
    """Of all gateways; what others have is published a few times a second."""
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
            _, index = min((g["connections"] or 99, g["gateway"]) for g in server.info()["gateways"])
            gateway = server.gateways()[index]
            num_connections = len(gateway.net_connections())  # what /info says may be older than a fifth of a second
            gateway.kill()
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


def test_a_killed_fork_server_is_replaced(server, corpus):
    texts, expected = corpus
    fork_server = server.fork_server()
    fork_server.kill()
    [vector] = server.embed(texts[2])
    assert np.abs(np.array(vector) - expected[2]).max() < 1e-5
    fork_server.wait(30)  # its workers live until its memory is given back, and may have answered


def test_a_worker_that_is_told_to_abort_says_where_it_is(server, corpus):
    """As one that is stuck is told."""
    texts, expected = corpus
    before = len(server.stderr)
    server.workers()[0].send_signal(signal.SIGABRT)
    [vector] = server.embed(texts[4])
    assert np.abs(np.array(vector) - expected[4]).max() < 1e-5
    eventually(lambda: "Fatal Python error: Aborted" in server.stderr[before:])
    assert "workers/process/loop.py" in server.stderr[before:]
    eventually(lambda: "was killed by SIGABRT" in server.stderr[before:])


def test_no_request_fails_while_workers_are_replaced_by_a_reload(server, corpus):
    async def reload_under_load() -> Load:
        async with Load(server.url, corpus, NUM_CLIENTS) as load:
            await load.answers(50)
            outcome = await asyncio.to_thread(server.reload_outcome)
            assert "reloaded: " in outcome, outcome
            await load.answers(50)
        return load

    num_before, before = len(server.processes()), [worker["life"] for worker in server.info()["workers"]]
    load = asyncio.run(reload_under_load())
    assert load.failures == []
    assert min(worker["life"] for worker in server.info()["workers"]) > min(before)
    eventually(lambda: len(server.processes()) == num_before)


# --- rows of tokens, vectors before the norm, inputs in chunks ------------------------------------------------------


def rows_of_tokens(server: Server, http: httpx.Client, texts: list[str]) -> Rows:
    return _arrays(http.post(f"{server.url}/embed_all", json={"inputs": texts}))


def unnormalized(server: Server, http: httpx.Client, texts: list[str]) -> Rows:
    return _arrays(http.post(f"{server.url}/embed", json={"inputs": texts, "normalize": False}))


def chunked(server: Server, http: httpx.Client, texts: list[str]) -> Rows:
    """The texts, and one that is too long for the model."""
    return _arrays(http.post(f"{server.url}/embed", json={"inputs": [*texts, " ".join(make_texts(6, seed=9))]}))


def _arrays(answer: httpx.Response) -> Rows:
    assert answer.status_code == 200, answer.text
    return [np.array(rows, dtype=np.float32) for rows in answer.json()]


CALLS: list[Callable[[Server, httpx.Client, list[str]], Rows]] = [rows_of_tokens, unnormalized, chunked]


def test_a_long_text_has_the_mean_of_its_chunks_weighted_by_their_tokens(server: Server) -> None:
    """As vLLM's chunked processing has it, but that each chunk has its special tokens, and the mean has length 1."""
    text = "a cat and a dog " * 50 + "the price of bread in the nineteenth century " * 40
    with httpx.Client(base_url=server.url, timeout=60) as http:
        [mean] = _arrays(http.post("/embed", json={"inputs": text}))
        first, *ids, last = http.post("/tokenize", json={"inputs": text}).json()[0]
        size = server.info()["max_input_length"] - 2
        parts = [[item["id"] for item in ids[start : start + size]] for start in range(0, len(ids), size)]
        whole = [[first["id"], *part, last["id"]] for part in parts]
        vectors = np.array([item["data"] for item in http.post("/pooling", json={"input": whole}).json()["data"]])
    assert (len(parts), len(parts[-1])) == (3, 62), "so that a mean without weights would differ"
    expected = np.average(vectors, axis=0, weights=[len(part) for part in parts])
    np.testing.assert_allclose(mean, expected / np.linalg.norm(expected), atol=1e-5, rtol=0)


IN_USE = ("requests_in_flight", "queued_sequences", "queued_tokens", "in_flight_tokens", "arena_rows_in_use")


def test_a_client_that_leaves_amid_the_chunks_of_a_text_leaves_nothing_behind(server: Server) -> None:
    num_chunks = 400
    size = server.info()["max_input_length"] - 2
    words = random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=size * num_chunks)  # no two chunks are the same
    body = b'{"inputs":"%b"}' % " ".join(words).encode()
    with httpx.Client(base_url=server.url, timeout=10) as client:

        def metric(name: str) -> float:
            return metrics_of(client)[f"vecd_{name}"]

        before = metric("sequences_total")
        with socket.create_connection(("127.0.0.1", server.port)) as leaving:
            leaving.sendall(b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            eventually(lambda: metric("sequences_total") > before and metric("queued_sequences") > 0, DEADLINE_S)
        eventually(lambda: all(metric(name) == 0 for name in IN_USE), DEADLINE_S)
        assert metric("sequences_total") < before + num_chunks


def test_no_worker_s_death_loses_a_row_or_counts_a_chunk_twice(server: Server) -> None:
    """Of all kinds at once; each answer is the one that was given before anything died."""
    sets = [[text[:200] for text in make_texts(3, seed=seed)] for seed in range(4)]
    cases = [(call, texts) for texts in sets for call in CALLS]
    stop, turns = Event(), count()
    num_right = [0] * 4

    def ask(client: int, expected: list[Rows]) -> None:
        with httpx.Client(timeout=60) as http:
            while not stop.is_set():
                case = next(turns) % len(cases)
                call, texts = cases[case]
                for found, right in zip(call(server, http, texts), expected[case], strict=True):
                    np.testing.assert_allclose(found, right, atol=1e-5, rtol=0)
                num_right[client] += 1

    with httpx.Client(timeout=60) as http, ThreadPoolExecutor(4) as pool:
        expected = [call(server, http, texts) for call, texts in cases]
        assert all(abs(np.linalg.norm(rows[-1]) - 1) < 1e-5 for rows in expected[2::3])
        asking = [pool.submit(ask, client, expected) for client in range(4)]
        try:
            for _ in range(3):
                wait_for(num_right, 8, asking)
                kill_one(workers(server), random.Random(0))
            wait_for(num_right, 12, asking)
        finally:
            stop.set()
        for each in asking:
            each.result()


def wait_for(num_right: list[int], more: int, asking: list[Any]) -> None:
    """Until so many more answers were right, or one was not."""
    target, deadline = sum(num_right) + more, time.monotonic() + DEADLINE_S
    while sum(num_right) < target and not any(each.done() for each in asking):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- only in make soak: servers of their own --------------------------------------------------------------------


@only_long
def test_a_worker_that_hangs_while_the_gateway_is_replaced_is_replaced_too(corpus):
    texts, expected = corpus
    with exact_server("--workers", "1", "--batch-timeout", "1") as server:
        server.workers()[0].suspend()
        server.gateway().kill()
        [vector] = server.embed(texts[5])
        assert np.abs(np.array(vector) - expected[5]).max() < 1e-5


@only_long
def test_every_process_gets_sigterm_and_the_requests_are_still_answered(corpus):
    """As a process group's signal does, or a careless pkill."""
    texts, expected = corpus
    with exact_server("--workers", "2") as server, ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(server.embed, texts[n:]) for n in range(4)]
        # All four: one that had not connected yet would come too late.
        eventually(lambda: server.info()["queue"]["requests"] == 4)
        for process in server.processes():
            process.terminate()
        for n, answer in enumerate(answers):
            assert np.abs(np.array(answer.result(60)) - expected[n:]).max() < 1e-5
        assert server.process.wait(30) == 0
        assert "killed" not in server.stderr


def test_sigterm_in_the_middle_of_a_reload_ends_everything(server):
    """In good order, and this file's server with it."""
    before = server.stderr.count("reloading")
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: server.stderr.count("reloading") > before)
    time.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
