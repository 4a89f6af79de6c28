"""Requests of random shapes, very many of them: every vector right, and no process grows.

Against the engine without a model, whose vectors `tenants` computes.
"""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import psutil
import pytest

from tests.support.canaries import WORD
from tests.support.serving import Server, running_server
from tests.support.soak.connection import Closed, connect
from tests.support.soak.faults import own_memory_bytes, wait_until
from tests.support.soak.form import LONG, pick, record
from tests.support.soak.questions import Tenant
from tests.support.soak.traffic import Traffic

NUM_REQUESTS = pick(short=2_000, long=200_000)
NUM_WARMUP = pick(short=200, long=20_000)
NUM_CLIENTS = pick(short=8, long=32)
MAX_GROWTH = 0.03


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("--engine", "weightless", "--workers", "2") as running:
        yield running


def test_a_great_many_requests_of_random_shapes(server: Server, weightless_tenants: list[Tenant]):
    async def trial() -> tuple[Traffic, dict[int, tuple[int, int]], dict[int, tuple[int, int]]]:
        async with Traffic(server.url, weightless_tenants, NUM_CLIENTS, max_texts=12) as traffic:
            rude = asyncio.create_task(be_rude(server.url, weightless_tenants))
            await until_answered(traffic, NUM_WARMUP)
            before = memory_and_descriptors(server)
            await until_answered(traffic, NUM_REQUESTS)
            after = memory_and_descriptors(server)
            rude.cancel()
            with suppress(asyncio.CancelledError):
                await rude
        return traffic, before, after

    traffic, before, after = asyncio.run(trial())
    growth = max(after[pid][0] / before[pid][0] - 1 for pid in before)
    more_descriptors = max(after[pid][1] - before[pid][1] for pid in before)
    figures = {"most_growth_percent": round(100 * growth, 2), "more_descriptors": more_descriptors}
    figures["requests_per_s"] = round(traffic.tally.num_right / traffic.elapsed_s)
    record("random shapes", clients=NUM_CLIENTS, **figures, **traffic.tally.figures())
    traffic.tally.assert_all_right()
    assert set(after) == set(before), "no process has died"
    asyncio.run(wait_until(lambda: server.info()["queue"]["requests"] == 0, 30))
    if LONG:
        assert growth < MAX_GROWTH
        assert more_descriptors <= 2  # a connection that is just being closed or opened


async def until_answered(traffic: Traffic, num: int) -> None:
    deadline = time.monotonic() + 1800
    while traffic.tally.num_right < num:
        assert not traffic.tally.failures, traffic.tally.failures
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def memory_and_descriptors(server: Server) -> dict[int, tuple[int, int]]:
    return {process.pid: (own_memory_bytes(process), process.num_fds()) for process in server.processes()}


async def be_rude(url: str, tenants: list[Tenant]) -> None:
    """Requests that are cut off, left alone, or wrong, between the others."""
    rng = random.Random(6)
    traffic = Traffic(url, tenants, 0, max_texts=40)
    while True:
        connection = await connect(url)
        question = traffic.question(tenants[0])
        request = question.render({})
        match rng.randrange(3):
            case 0:  # the client goes away in the middle of its request
                connection._transport.write(request[: rng.randrange(len(request))])
            case 1:  # … before the answer
                connection._transport.write(request)
                await asyncio.sleep(rng.uniform(0, 0.01))
            case _:
                body = json.dumps({"input": rng.choice((5, [], [None], {"a": WORD}, [[-1]]))}).encode()
                head = f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
                try:
                    assert (await connection.exchange(head.encode() + body)).status == 400
                except Closed as error:
                    raise AssertionError("a bad request was not answered") from error
        connection.close()
        await asyncio.sleep(0.02)


def test_own_memory_is_what_a_process_has_filled():
    own = psutil.Process()
    before = own_memory_bytes(own)
    filled = np.ones(64 * 2**20, dtype=np.uint8)
    assert own_memory_bytes(own) - before > filled.nbytes // 2
