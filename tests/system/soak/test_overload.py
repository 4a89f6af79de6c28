"""Twice as much as the server can do: it goes on doing as much as it can, and tells the others when to come back."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from tests.support.serving import Server, exact_server
from tests.support.soak.faults import own_memory_bytes
from tests.support.soak.form import LONG, pick, record
from tests.support.soak.questions import Tenant
from tests.support.soak.traffic import Arrivals, Traffic

pytestmark = pytest.mark.skipif(not LONG, reason="measures, which needs a quiet machine: with VECD_SOAK=1")

NUM_CLIENTS = 32
GOOD_S = 1.0
"""An answer within this of its request's arrival is good; requests say so themselves."""
MIN_GOODPUT = 0.95
MAX_GROWTH = 0.05


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with exact_server() as running:
        yield running


def test_twice_the_capacity(server: Server, tenants: list[Tenant]):
    """Capacity: what a closed loop gets, before and after; goodput: answers within a second of their arrival."""
    headers = {"x-vecd-timeout-ms": str(round(GOOD_S * 1000))}

    async def capacity_per_s(duration_s: float) -> tuple[float, Traffic]:
        async with Traffic(server.url, tenants, NUM_CLIENTS, max_texts=1) as traffic:
            await traffic.answers(NUM_CLIENTS)
            num_before, started_at = traffic.tally.num_right, time.monotonic()
            await asyncio.sleep(duration_s)
            rate = (traffic.tally.num_right - num_before) / (time.monotonic() - started_at)
        return rate, traffic

    async def overload(rate_per_s: float) -> tuple[Arrivals, float, list[dict[int, int]]]:
        arrivals = Arrivals(
            server.url, tenants, NUM_CLIENTS, max_texts=1, headers=headers, rate_per_s=rate_per_s, good_s=GOOD_S
        )
        samples = []
        async with arrivals:
            await asyncio.sleep(pick(short=1.0, long=5.0))
            num_before, started_at = arrivals.num_good, time.monotonic()
            for _ in range(4):
                samples.append(memory(server))
                await asyncio.sleep(pick(short=0.7, long=15.0))
            goodput = (arrivals.num_good - num_before) / (time.monotonic() - started_at)
            samples.append(memory(server))
        return arrivals, goodput, samples

    before_per_s, first = asyncio.run(capacity_per_s(pick(short=1.5, long=15.0)))
    arrivals, goodput_per_s, samples = asyncio.run(overload(2 * before_per_s))
    after_per_s, last = asyncio.run(capacity_per_s(pick(short=0.5, long=15.0)))
    capacity = (before_per_s + after_per_s) / 2
    growth = max(samples[-1][pid] / samples[0][pid] - 1 for pid in samples[0])
    record(
        "overload",
        capacity_per_s=[round(before_per_s, 1), round(after_per_s, 1)],
        offered_per_s=round(2 * before_per_s, 1),
        goodput_per_s=round(goodput_per_s, 1),
        goodput_of_capacity=round(goodput_per_s / capacity, 3),
        most_growth_percent=round(100 * growth, 2),
        refused_by_status={str(status): number for status, number in arrivals.tally.refused.items()},
        **arrivals.tally.figures(),
    )
    for traffic in (first, last):
        traffic.tally.assert_all_right()
    arrivals.tally.assert_none_wrong()  # which has every refusal with a Retry-After
    assert arrivals.tally.refused
    assert (arrivals.tally.num_broken, arrivals.tally.num_unconnected) == (0, 0)
    if LONG:
        assert goodput_per_s >= MIN_GOODPUT * capacity
        assert growth < MAX_GROWTH


def memory(server: Server) -> dict[int, int]:
    return {process.pid: own_memory_bytes(process) for process in server.processes()}
