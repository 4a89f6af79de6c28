"""Processes that are killed, stopped and resumed: of workers nobody notices it, of a gateway its own connections do,
and of a supervisor nothing is left."""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.serving import Server, is_alive, running_server
from tests.support.soak.faults import (
    every,
    fork_servers,
    gateways,
    kill_one,
    processes_in,
    wait_until,
    workers,
)
from tests.support.soak.form import ENGINE, LONG, only_long, pick, record
from tests.support.soak.questions import Tenant
from tests.support.soak.traffic import Closed, Connection, Traffic, connect, under_traffic

NUM_GATEWAYS, NUM_WORKERS, BATCH_TIMEOUT_S = 2, 2, 2
DEADLINE_S = NUM_GATEWAYS * BATCH_TIMEOUT_S
"""Of a batch: each gateway may have one before it."""
NUM_CLIENTS = pick(short=8, long=64)
HANG_NOTICED_S = 12.0
GONE_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = "--gateways", str(NUM_GATEWAYS), "--workers", str(NUM_WORKERS), "--batch-timeout", str(BATCH_TIMEOUT_S)
    with running_server(*ENGINE, *flags) as running:
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


@pytest.fixture
def whole(server: Server) -> Server:
    asyncio.run(wait_until(lambda: is_whole(server), 60))
    return server


def resume(process: psutil.Process) -> None:
    if is_alive(process):
        process.resume()


# --- workers: in short, tests/system/faults has the same --------------------------------------------------------


@only_long
def test_a_random_worker_killed_every_second(whole: Server, callers: list[Tenant]):
    rng = random.Random(1)
    traffic, num_killed = under_traffic(
        whole.url, callers, NUM_CLIENTS, lambda _: every(1.0, lambda: kill_one(workers(whole), rng), asyncio.sleep(60))
    )
    record("workers killed every second", clients=NUM_CLIENTS, kills=num_killed, **traffic.tally.figures())
    traffic.tally.assert_all_right()
    assert num_killed >= 50


@only_long
def test_a_stopped_worker_is_replaced_and_its_requests_are_answered(whole: Server, callers: list[Tenant]):
    """SIGSTOP: it neither answers nor dies."""

    async def stop_in_turns(traffic: Traffic) -> list[float]:
        replaced_after_s = []
        for _ in range(10):
            await wait_until(lambda: len(workers(whole)) == NUM_WORKERS, 30)
            replaced_after_s.append(await stop_one(whole))
        return replaced_after_s

    traffic, replaced_after_s = under_traffic(whole.url, callers, NUM_CLIENTS, stop_in_turns)
    figures = {"stops": len(replaced_after_s), "slowest_replacement_s": round(max(replaced_after_s), 2)}
    record("workers stopped", clients=NUM_CLIENTS, deadline_s=DEADLINE_S, **figures, **traffic.tally.figures())
    traffic.tally.assert_all_right()
    assert max(replaced_after_s) <= DEADLINE_S + 1


async def stop_one(server: Server) -> float:
    """Seconds from a worker's stop until it is dead and another has taken its place."""
    before = workers(server)
    before[0].suspend()
    return await wait_until(lambda: not is_alive(before[0]) and bool(set(workers(server)) - set(before)), 60)


@only_long
def test_a_worker_that_goes_on_late_is_never_believed(whole: Server, callers: list[Tenant]):
    """SIGSTOP and SIGCONT around its deadline: its rows come before it is given up, while it is, or after."""
    rng = random.Random(2)

    def pause_one() -> None:
        running = workers(whole)
        if len(running) == NUM_WORKERS:
            victim = rng.choice(running)
            victim.suspend()
            pause_s = rng.choice((0.2, DEADLINE_S - 0.05, DEADLINE_S + 0.05, DEADLINE_S + 0.3))
            asyncio.get_running_loop().call_later(pause_s, resume, victim)

    async def pause_in_turns(traffic: Traffic) -> int:
        num_paused = await every(1.5, pause_one, asyncio.sleep(60))
        await asyncio.sleep(DEADLINE_S + 0.5)
        return num_paused

    traffic, num_paused = under_traffic(whole.url, callers, NUM_CLIENTS, pause_in_turns)
    record("workers that go on late", clients=NUM_CLIENTS, pauses=num_paused, **traffic.tally.figures())
    traffic.tally.assert_all_right()


# --- gateways ---------------------------------------------------------------------------------------------------


def test_gateways_killed_in_turns(whole: Server, callers: list[Tenant]):
    rng = random.Random(3)
    most_lost = 0

    def kill_one_of_two() -> None:
        nonlocal most_lost
        running = gateways(whole)
        if len(running) == NUM_GATEWAYS:
            most_lost += NUM_CLIENTS  # at most, if all happened to be with this one
            kill_one(running, rng)

    interval_s, duration_s = pick(short=(1.0, 1.5), long=(5.0, 60.0))
    traffic, num_killed = under_traffic(
        whole.url, callers, NUM_CLIENTS, lambda _: every(interval_s, kill_one_of_two, asyncio.sleep(duration_s))
    )
    record("gateways killed", clients=NUM_CLIENTS, kills=num_killed, **traffic.tally.figures())
    traffic.tally.assert_none_wrong()
    assert num_killed >= 1
    assert traffic.tally.num_unconnected == 0, "the listening socket outlives gateways"
    assert traffic.tally.num_broken <= most_lost
    assert not traffic.tally.refused


def test_a_gateway_s_death_is_felt_on_its_own_connections_alone(whole: Server, callers: list[Tenant]):
    """Requests that are under way at the others are answered; and the next connect works at once."""

    async def trial() -> None:
        traffic = Traffic(whole.url, callers, 0)
        kept, lost = await connect_to_each(whole)
        victim = whole.gateways()[1]
        asking = asyncio.create_task(traffic.ask(kept, traffic.question(callers[0])))
        victim.kill()
        await asking
        await wait_until(lambda: not is_alive(victim), 10)
        with pytest.raises(Closed):
            await lost.exchange(traffic.question(callers[0]).render({}))
        async with asyncio.timeout(30):
            fresh = await connect(whole.url)
            await traffic.ask(fresh, traffic.question(callers[1]))
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


@only_long
def test_a_hung_gateway_is_replaced(whole: Server, callers: list[Tenant]):
    """SIGSTOP: its connections stand still until the supervisor has noticed; those of the other go on."""

    async def stop_one_gateway(traffic: Traffic) -> tuple[float, int, int]:
        info = whole.info()
        victim = psutil.Process(info["gateways"][0]["pid"])
        victim.suspend()
        num_before = traffic.tally.num_right
        replaced_after_s = await wait_until(lambda: not is_alive(victim) and len(gateways(whole)) == NUM_GATEWAYS, 60)
        return replaced_after_s, traffic.tally.num_right - num_before, info["gateways"][0]["connections"]

    traffic, (replaced_after_s, num_meanwhile, num_connections) = under_traffic(
        whole.url, callers, NUM_CLIENTS, stop_one_gateway, before=NUM_CLIENTS
    )
    record(
        "a gateway stopped",
        clients=NUM_CLIENTS,
        its_connections=num_connections,
        replaced_after_s=round(replaced_after_s, 1),
        answered_meanwhile=num_meanwhile,
        **traffic.tally.figures(),
    )
    traffic.tally.assert_none_wrong()
    assert traffic.tally.num_broken <= num_connections
    assert num_meanwhile > 10 * NUM_CLIENTS // 2, "the other gateway goes on"
    assert replaced_after_s <= HANG_NOTICED_S + 1


def test_two_tenants_never_meet_whatever_happens(whole: Server, callers: list[Tenant]):
    """All faults at once; each vector is compared with those of its own text, and a wrong one with everybody's."""
    rng = random.Random(4)
    counts: Counter[str] = Counter()

    def pause(processes: list[psutil.Process]) -> None:
        """One of them, for a moment, or until somebody notices."""
        if processes:
            victim = rng.choice(processes)
            victim.suspend()
            asyncio.get_running_loop().call_later(rng.choice((0.1, 1.0, 1.9, 2.1)), resume, victim)

    def strike() -> None:
        faults = {
            "worker killed": (5, lambda: kill_one(workers(whole), rng)),
            "worker paused": (3, lambda: pause(workers(whole))),
            "gateway killed": (2, lambda: kill_one(gateways(whole), rng)),
            "gateway paused": (2, lambda: pause(gateways(whole))),
            "fork server killed": (1, lambda: kill_one(fork_servers(whole), rng)),
        }
        [name] = rng.choices(list(faults), weights=[weight for weight, _ in faults.values()])
        counts[name] += 1
        faults[name][1]()

    async def strike_in_turns(traffic: Traffic) -> None:
        interval_s, duration_s = pick(short=(0.6, 2.5), long=(1.0, 120.0))
        await every(interval_s, strike, asyncio.sleep(duration_s))
        await asyncio.sleep(2.2)  # whatever was paused goes on

    started_at = time.monotonic()
    traffic, _ = under_traffic(whole.url, callers, NUM_CLIENTS, strike_in_turns, before=0)
    figures = {"duration_s": round(time.monotonic() - started_at), "faults": counts.total(), "by_kind": counts}
    record("two tenants, all faults", clients=NUM_CLIENTS, **figures, **traffic.tally.figures())
    traffic.tally.assert_none_wrong()
    assert traffic.tally.num_unconnected == 0


# --- the supervisor ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_gateways", pick(short=[2], long=[1, 2]))
def test_nothing_is_left_of_a_server_whose_supervisor_is_killed_under_load(callers: list[Tenant], num_gateways: int):
    """No process, no socket, no shared memory."""
    shm_before = set(os.listdir("/dev/shm"))
    flags = ("--workers", "2", "--gateways", str(num_gateways))
    with running_server(*ENGINE, *flags, must_exit_cleanly=False) as server:
        processes = processes_in(server.folder)
        assert {process.pid for process in processes} == {process.pid for process in server.processes()}
        assert len(processes) == 1 + num_gateways + 1 + 2, "supervisor, gateways, fork server, workers"
        assert len(memfds_of(server.folder)) >= 2, "an arena, and the shared metrics"

        async def kill_supervisor() -> tuple[Traffic, float]:
            async with Traffic(server.url, callers, NUM_CLIENTS, pause_s=0.01) as traffic:
                await traffic.answers(20)
                server.process.kill()
                server.process.wait(10)
                gone_after_s = await wait_until(lambda: not any(map(is_alive, processes)), 30)
            return traffic, gone_after_s

        traffic, gone_after_s = asyncio.run(kill_supervisor())
        assert processes_in(server.folder) == []
        assert memfds_of(server.folder) == []
        assert os.listdir(server.folder / "tmp") == []
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            asyncio.run(connect(server.url))
    assert not [name for name in set(os.listdir("/dev/shm")) - shm_before if "vecd" in name]
    record("supervisor killed", gateways=num_gateways, gone_after_s=round(gone_after_s, 2), **traffic.tally.figures())
    traffic.tally.assert_none_wrong()
    if LONG:
        assert gone_after_s <= GONE_WITHIN_S


def memfds_of(folder: Path) -> list[str]:
    """Of processes that belong to this folder's server."""
    found = []
    for process in processes_in(folder):
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            target = os.readlink(descriptor)
            if target.startswith("/memfd:"):
                found.append(f"{process.pid}: {target}")
    return found
