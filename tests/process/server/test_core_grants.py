"""Two gateways that share the cores: who has which part of them, and what a death changes."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.support.serving import Server, eventually, running_server

FLAGS = ("--engine", "dummy", "--gateways", "2", "--workers", "2")


@pytest.fixture
def server(minilm_folder) -> Iterator[Server]:
    with running_server(str(minilm_folder), *FLAGS) as server:
        yield server


def granted(*clients: httpx.Client) -> list[int]:
    """The grants of the gateways to which clients are connected, after each has computed a text."""
    for client in clients:
        client.post("/v1/embeddings", json={"input": "a"}).raise_for_status()
    return [client.get("/info").raise_for_status().json()["cores"]["granted"] for client in clients]


def test_cores_follow_the_work_and_come_back_with_a_death(server: Server) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(server.client_of(gateway)) for gateway in (0, 1))
        num_cores = first.get("/info").json()["cores"]["usable"]
        eventually(lambda: granted(first) == [num_cores])
        eventually(lambda: granted(second) == [num_cores], 10)  # the first one has had no work for a while
        part = num_cores // 2
        eventually(lambda: sorted(granted(first, second)) == [part, num_cores - part])
        for _ in range(20):  # both have work, and neither takes from the other
            assert sorted(granted(first, second)) == [part, num_cores - part]
        os.kill(server.gateways()[0].pid, signal.SIGKILL)
        eventually(lambda: granted(second) == [num_cores])
        eventually(lambda: len(server.gateways()) == 2)
        again = stack.enter_context(server.client_of(0))
        eventually(lambda: sorted(granted(again, second)) == [part, num_cores - part])
