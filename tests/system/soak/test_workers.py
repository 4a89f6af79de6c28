"""Workers that are killed, that stop and that answer late: nobody's request fails, and nobody's vector is wrong."""

import asyncio
import random
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.serving import Server, exact_server
from tests.support.soak.faults import every, is_alive, kill_one, wait_until, workers
from tests.support.soak.form import LONG, pick, record
from tests.support.soak.questions import Tenant
from tests.support.soak.traffic import Traffic

pytestmark = pytest.mark.skipif(not LONG, reason="in short, tests/system/faults has the same: with VECD_SOAK=1")

NUM_WORKERS = 2
BATCH_TIMEOUT_S = 2
NUM_CLIENTS = pick(short=8, long=64)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with exact_server("--workers", str(NUM_WORKERS), "--batch-timeout", str(BATCH_TIMEOUT_S)) as running:
        yield running


def lives(server: Server) -> list[int]:
    return [worker["life"] for worker in server.info()["workers"]]


def all_are_there(server: Server) -> bool:
    return len(server.info()["workers"]) == NUM_WORKERS


def test_a_random_worker_killed_every_second(server: Server, tenants: list[Tenant]):
    rng = random.Random(1)

    async def trial() -> tuple[Traffic, int]:
        async with Traffic(server.url, tenants, NUM_CLIENTS) as traffic:
            until = asyncio.sleep(pick(short=2.2, long=60.0))
            num_killed = await every(1.0, lambda: kill_one(workers(server), rng), until)
            await traffic.answers(20)
        return traffic, num_killed

    traffic, num_killed = asyncio.run(trial())
    record("workers killed every second", clients=NUM_CLIENTS, kills=num_killed, **traffic.tally.figures())
    traffic.tally.assert_all_right()
    assert num_killed >= pick(short=1, long=50)


def test_a_stopped_worker_is_replaced_and_its_requests_are_answered(server: Server, tenants: list[Tenant]):
    """SIGSTOP: it neither answers nor dies."""
    asyncio.run(wait_until(lambda: all_are_there(server), 60))

    async def trial() -> tuple[Traffic, list[float]]:
        replaced_after_s = []
        async with Traffic(server.url, tenants, NUM_CLIENTS) as traffic:
            await traffic.answers(20)
            for _ in range(pick(short=1, long=10)):
                await wait_until(lambda: len(workers(server)) == NUM_WORKERS, 30)
                replaced_after_s.append(await stop_one(server))
            await traffic.answers(20)
        return traffic, replaced_after_s

    traffic, replaced_after_s = asyncio.run(trial())
    figures = {"stops": len(replaced_after_s), "slowest_replacement_s": round(max(replaced_after_s), 2)}
    record("workers stopped", clients=NUM_CLIENTS, deadline_s=BATCH_TIMEOUT_S, **figures, **traffic.tally.figures())
    traffic.tally.assert_all_right()
    if LONG:
        assert max(replaced_after_s) <= BATCH_TIMEOUT_S + 1


async def stop_one(server: Server) -> float:
    """Seconds from a worker's stop until it is dead and another has taken its place."""
    victim = workers(server)[0]
    before = set(workers(server))
    victim.suspend()
    stopped_at = time.monotonic()

    def is_replaced() -> bool:
        return not is_alive(victim) and bool(set(workers(server)) - before)

    await wait_until(is_replaced, 60)
    return time.monotonic() - stopped_at


def test_a_worker_that_goes_on_late_is_never_believed(server: Server, tenants: list[Tenant]):
    """SIGSTOP and SIGCONT around its deadline: its rows come before it is given up, while it is, or after."""
    rng = random.Random(2)

    def pause_one() -> None:
        running = workers(server)
        if len(running) == NUM_WORKERS:
            victim = rng.choice(running)
            victim.suspend()
            pause_s = rng.choice((0.2, BATCH_TIMEOUT_S - 0.05, BATCH_TIMEOUT_S + 0.05, BATCH_TIMEOUT_S + 0.3))
            asyncio.get_running_loop().call_later(pause_s, resume, victim)

    async def trial() -> tuple[Traffic, int]:
        async with Traffic(server.url, tenants, NUM_CLIENTS) as traffic:
            num_paused = await every(pick(short=1.0, long=1.5), pause_one, asyncio.sleep(pick(short=2.5, long=60.0)))
            await asyncio.sleep(BATCH_TIMEOUT_S + 0.5)
            await traffic.answers(20)
        return traffic, num_paused

    traffic, num_paused = asyncio.run(trial())
    record("workers that go on late", clients=NUM_CLIENTS, pauses=num_paused, **traffic.tally.figures())
    traffic.tally.assert_all_right()


def resume(process: psutil.Process) -> None:
    if is_alive(process):
        process.resume()
