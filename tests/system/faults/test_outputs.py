"""Rows of tokens, vectors before the norm, inputs in chunks: right beside each other, and when workers die."""

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
    deadline = time.monotonic() + DEADLINE_S
    while max(worker["life"] for worker in server.info()["workers"]) == 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
