"""Gateways that are killed and that hang, and everything at once: only their own connections notice."""

import asyncio
import random
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.support.serving import Server, exact_server
from tests.support.soak.connection import Closed, Connection, connect
from tests.support.soak.faults import every, fork_servers, gateways, is_alive, kill_one, wait_until, workers
from tests.support.soak.form import LONG, pick, record
from tests.support.soak.questions import Tenant
from tests.support.soak.traffic import Traffic

NUM_GATEWAYS, NUM_WORKERS = 2, 2
NUM_CLIENTS = pick(short=8, long=64)
HANG_NOTICED_S = 12.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = "--gateways", str(NUM_GATEWAYS), "--workers", str(NUM_WORKERS), "--batch-timeout", "2"
    with exact_server(*flags) as running:
        yield running


def is_whole(server: Server) -> bool:
    """Every gateway is there, and each has met every worker."""
    if len(gateways(server)) < NUM_GATEWAYS:
        return False
    try:
        lines = httpx.get(f"{server.url}/metrics", timeout=5).text.splitlines()
    except httpx.HTTPError:
        return False
    met = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("vecd_workers_ready{")]
    return met == [NUM_WORKERS] * NUM_GATEWAYS


@pytest.fixture(autouse=True)
def whole(server: Server) -> None:
    asyncio.run(wait_until(lambda: is_whole(server), 60))


def test_gateways_killed_in_turns(server: Server, tenants: list[Tenant]):
    rng = random.Random(3)
    most_lost = 0

    def kill_one_of_two() -> None:
        nonlocal most_lost
        running = gateways(server)
        if len(running) == NUM_GATEWAYS:
            most_lost += NUM_CLIENTS  # at most, if all happened to be with this one
            kill_one(running, rng)

    async def trial() -> tuple[Traffic, int]:
        async with Traffic(server.url, tenants, NUM_CLIENTS) as traffic:
            await traffic.answers(5)
            interval_s, duration_s = pick(short=(1.0, 1.5), long=(5.0, 60.0))
            num_killed = await every(interval_s, kill_one_of_two, asyncio.sleep(duration_s))
            await traffic.answers(20)
        return traffic, num_killed

    traffic, num_killed = asyncio.run(trial())
    record("gateways killed", clients=NUM_CLIENTS, kills=num_killed, **traffic.tally.figures())
    traffic.tally.assert_none_wrong()
    assert num_killed >= 1
    assert traffic.tally.num_unconnected == 0, "the listening socket outlives gateways"
    assert traffic.tally.num_broken <= most_lost
    assert not traffic.tally.refused


def test_a_gateway_s_death_is_felt_on_its_own_connections_alone(server: Server, tenants: list[Tenant]):
    """Requests that are under way at the others are answered; and the next connect works at once."""

    async def trial() -> None:
        traffic = Traffic(server.url, tenants, 0)
        kept, lost = await connect_to_each(server)
        victim = server.gateways()[1]
        asking = asyncio.create_task(traffic.ask(kept, traffic.question(tenants[0])))
        victim.kill()
        await asking
        await wait_until(lambda: not is_alive(victim), 10)
        with pytest.raises(Closed):
            await lost.exchange(traffic.question(tenants[0]).render({}))
        async with asyncio.timeout(30):
            fresh = await connect(server.url)
            await traffic.ask(fresh, traffic.question(tenants[1]))
        for connection in (kept, fresh):
            traffic.leave(connection)
        traffic.tally.assert_all_right()
        assert traffic.tally.num_right == 2

    asyncio.run(trial())


async def connect_to_each(server: Server) -> tuple[Connection, Connection]:
    """A connection to gateway 0, and one to gateway 1."""
    found: dict[int, Connection] = {}
    for _ in range(200):
        connection = await connect(server.url)
        answer = await connection.exchange(b"GET /info HTTP/1.1\r\nhost: x\r\n\r\n")
        index = httpx.Response(200, content=answer.body).json()["gateway"]["gateway"]
        if index in found:
            connection.close()
        found.setdefault(index, connection)
        if len(found) == NUM_GATEWAYS:
            return found[0], found[1]
        await asyncio.sleep(0.02)  # who has just started is not known to the other yet
    raise AssertionError("one gateway accepts everything")


@pytest.mark.skipif(not LONG, reason="takes 12 s: with VECD_SOAK=1")
def test_a_hung_gateway_is_replaced(server: Server, tenants: list[Tenant]):
    """SIGSTOP: its connections stand still until the supervisor has noticed; those of the other go on."""

    async def trial() -> tuple[Traffic, float, int, int]:
        async with Traffic(server.url, tenants, NUM_CLIENTS) as traffic:
            await traffic.answers(NUM_CLIENTS)
            info = server.info()
            victim = psutil.Process(info["gateways"][0]["pid"])
            victim.suspend()
            num_before = traffic.tally.num_right
            replaced_after_s = await wait_until(
                lambda: not is_alive(victim) and len(gateways(server)) == NUM_GATEWAYS, 60
            )
            num_meanwhile = traffic.tally.num_right - num_before
            await traffic.answers(20)
        return traffic, replaced_after_s, num_meanwhile, info["gateways"][0]["connections"]

    traffic, replaced_after_s, num_meanwhile, num_connections = asyncio.run(trial())
    figures = {"replaced_after_s": round(replaced_after_s, 1), "answered_meanwhile": num_meanwhile}
    record(
        "a gateway stopped", clients=NUM_CLIENTS, its_connections=num_connections, **figures, **traffic.tally.figures()
    )
    traffic.tally.assert_none_wrong()
    assert traffic.tally.num_broken <= num_connections
    assert num_meanwhile > 10 * NUM_CLIENTS // 2, "the other gateway goes on"
    assert replaced_after_s <= HANG_NOTICED_S + 1


class Misfortune:
    """One fault after the other, at random."""

    def __init__(self, server: Server) -> None:
        self._server, self._random = server, random.Random(4)
        self.counts: dict[str, int] = {}

    def strike(self) -> None:
        kinds = {
            "worker killed": lambda: kill_one(workers(self._server), self._random),
            "worker paused": lambda: self._pause(workers(self._server)),
            "gateway killed": lambda: kill_one(gateways(self._server), self._random),
            "gateway paused": lambda: self._pause(gateways(self._server)),
            "fork server killed": lambda: kill_one(fork_servers(self._server), self._random),
        }
        kind = self._random.choices(list(kinds), weights=(5, 3, 2, 2, 1))[0]
        self.counts[kind] = self.counts.get(kind, 0) + 1
        kinds[kind]()

    def _pause(self, processes: list[psutil.Process]) -> None:
        """For a moment, or until somebody notices."""
        if processes:
            victim = self._random.choice(processes)
            victim.suspend()
            loop = asyncio.get_running_loop()
            loop.call_later(self._random.choice((0.1, 1.0, 1.9, 2.1)), self._resume, victim)

    @staticmethod
    def _resume(process: psutil.Process) -> None:
        if is_alive(process):
            process.resume()


def test_two_tenants_never_meet_whatever_happens(server: Server, tenants: list[Tenant]):
    """All faults at once; each vector is compared with those of its own text, and a wrong one with everybody's."""
    misfortune = Misfortune(server)

    async def trial() -> Traffic:
        async with Traffic(server.url, tenants, NUM_CLIENTS) as traffic:
            interval_s, duration_s = pick(short=(0.6, 2.5), long=(1.0, 120.0))
            await every(interval_s, misfortune.strike, asyncio.sleep(duration_s))
            await asyncio.sleep(2.2)  # whatever was paused goes on
            await traffic.answers(20)
        return traffic

    started_at = time.monotonic()
    traffic = asyncio.run(trial())
    duration_s = round(time.monotonic() - started_at)
    faults = {"faults": sum(misfortune.counts.values()), "by_kind": misfortune.counts}
    record("two tenants, all faults", clients=NUM_CLIENTS, duration_s=duration_s, **faults, **traffic.tally.figures())
    traffic.tally.assert_none_wrong()
    assert traffic.tally.num_unconnected == 0
