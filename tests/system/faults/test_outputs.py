"""Rows of tokens, vectors before the norm, inputs in chunks: right beside each other, and when workers die."""

import random
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from threading import Event
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from tests.support.serving import Server, exact_server
from tests.support.texts import make_texts

Rows = list[NDArray[np.float32]]
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with exact_server("--overflow", "chunk") as running:
        yield running


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


def test_what_is_asked_for_fits_together(server: Server) -> None:
    """This model's vector is the mean of its tokens' states, brought to length 1."""
    texts = ["a cat", "", *[text[:200] for text in make_texts(4, seed=3)]]
    with httpx.Client(timeout=60) as http:
        states = rows_of_tokens(server, http, texts)
        means = np.stack(unnormalized(server, http, texts))
    assert len({len(rows) for rows in states}) > 2
    np.testing.assert_allclose(means, [rows.mean(axis=0) for rows in states], atol=1e-5, rtol=0)
    vectors = np.array(server.embed(texts))
    np.testing.assert_allclose(means / np.linalg.norm(means, axis=1, keepdims=True), vectors, atol=1e-5, rtol=0)


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
    before = metrics_of(server)["sequences_total"]
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        wait_until(lambda: metrics_of(server)["sequences_total"] > before)
        assert metrics_of(server)["queued_sequences"] > 0
    wait_until(lambda: all(metrics_of(server)[name] == 0 for name in IN_USE))
    assert metrics_of(server)["sequences_total"] < before + num_chunks
    assert server.embed(["a"]) == server.embed(["a"])


def metrics_of(server: Server) -> dict[str, float]:
    """Those without labels, of all gateways."""
    lines = [line.split() for line in httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()]
    return {name.removeprefix("vecd_"): float(value) for name, value, *_ in lines if "{" not in name and name != "#"}


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
                kill_one(server)
            wait_for(num_right, 12, asking)
        finally:
            stop.set()
        for each in asking:
            each.result()
    # The other worker may have given all of these answers before the killed one was replaced.
    wait_until(lambda: max(worker["life"] for worker in server.info()["workers"]) > 1)


def wait_for(num_right: list[int], more: int, asking: list[Any]) -> None:
    """Until so many more answers were right, or one was not."""
    target, deadline = sum(num_right) + more, time.monotonic() + DEADLINE_S
    while sum(num_right) < target and not any(each.done() for each in asking):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_one(server: Server) -> None:
    for worker in server.workers()[-1:]:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
