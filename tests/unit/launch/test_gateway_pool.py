"""What each gateway is sent, and when it is started, killed and given up."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.supervision import VIRTUAL_TIME, FakeGateway, Fakes, FakeSocket, settle
from vecd.base.failures import StartFailure
from vecd.gateway.config import ApiKey
from vecd.launch.config.plan import Plan
from vecd.launch.gateways import GatewayPool, Link
from vecd.launch.workers import ReadyWorker, WorkerPool
from vecd.shm.control import (
    ChildFailed,
    CoresGranted,
    CoresHeld,
    CoresWanted,
    Discard,
    Drain,
    GatewayStart,
    Heartbeat,
    Message,
    ModelBroken,
    ModelFiles,
    ModelIdentity,
    NewKeys,
    Prepare,
    Prepared,
    Progress,
    Ready,
    WorkerDown,
    WorkerUp,
)
from vecd.shm.shared_metrics import create_shared_metrics
from vecd.shm.wire import Incarnation

NUM_CORES = 4
KEYS = (ApiKey("first", "0" * 64),)


@pytest.fixture
def anyio_backend() -> Any:
    return VIRTUAL_TIME


class Observed:
    """Has a pool's workers in `pool.ready`, put there by the test."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


class Bench:
    """A gateway pool whose worker pools are filled by hand."""

    def __init__(self, plan: Plan, num_gateways: int) -> None:
        self.fakes = Fakes()
        self.plan = plan
        self.worker_pools: dict[int, WorkerPool] = {}
        self.add_generation(1)
        self.heard: list[Message] = []
        self.metrics_fd = create_shared_metrics(plan.gateway.shared_metrics)
        listening: Any = [FakeSocket()]
        self.pool = GatewayPool(
            num_gateways, listening, self.metrics_fd, self.worker_pools, self.on_message,
            self.fakes.system, NUM_CORES,
        )  # fmt: skip
        self.tasks = [asyncio.create_task(self.pool.supervise(index)) for index in range(num_gateways)]

    def on_message(self, link: Link, message: Message) -> None:
        self.heard.append(message)

    def add_generation(self, generation: int) -> None:
        observer: Any = Observed()
        self.worker_pools[generation] = WorkerPool(generation, self.plan, 2, {}, observer, self.fakes.system)

    def worker_up(self, generation: int, index: int, life: int) -> Incarnation:
        incarnation = Incarnation(index, life)
        process: Any = None
        self.worker_pools[generation].ready[index] = ReadyWorker(incarnation, process, 0, {})
        self.pool.reconcile()
        return incarnation


@pytest.fixture
def bench(planned: Callable[..., Plan]) -> Callable[..., Any]:
    @asynccontextmanager
    async def made(num_gateways: int = 1, **attributes: Any) -> AsyncIterator[Bench]:
        bench = Bench(planned("--workers", "2", "--gateways", "2"), num_gateways)

        def on_spawn(gateway: FakeGateway) -> None:
            for name, value in attributes.items():
                setattr(gateway, name, value)

        bench.fakes.on_spawn = on_spawn
        try:
            await settle()
            yield bench
        finally:
            for task in bench.tasks:
                task.cancel()
            await asyncio.wait(bench.tasks)
            for worker_pool in bench.worker_pools.values():
                worker_pool.close()
            os.close(bench.metrics_fd)
        assert not bench.fakes.living

    return made


# --- reconcile --------------------------------------------------------------------------------------------------------


async def test_a_gateway_is_sent_each_thing_once(bench) -> None:
    async with bench() as made:
        [gateway] = made.fakes.gateways
        made.worker_up(1, 0, 1)
        made.worker_up(1, 1, 1)
        for _ in range(3):
            made.pool.reconcile()
        await settle()
        assert [type(message) for message in gateway.sent()] == [GatewayStart, WorkerUp, WorkerUp]
        assert made.pool.is_connected(made.worker_pools[1])


async def test_a_gateway_is_told_each_change_of_an_identity_before_the_workers(bench) -> None:
    async with bench() as made:
        [gateway] = made.fakes.gateways
        said = [ModelIdentity(1, "", problem="no file"), ModelIdentity(1, 32 * "a"), ModelIdentity(1, "")]
        for identity in said:
            made.worker_pools[1].identity = identity
            for _ in range(2):
                made.pool.reconcile()
        assert gateway.sent(ModelIdentity) == said
        made.worker_pools[1].identity = said[0]
        made.worker_up(1, 0, 1)
        await settle()
        assert gateway.sent(ModelIdentity, WorkerUp)[-2] == said[0]


async def test_a_gateway_is_told_of_changed_files_before_the_workers_and_so_is_its_successor(bench) -> None:
    async with bench() as made:
        [gateway] = made.fakes.gateways
        made.pool.reconcile()
        assert not gateway.sent(ModelFiles), "as loaded"
        for changed in ("a.json has changed", ""):
            made.worker_pools[1].changed_files = changed
            for _ in range(2):
                made.pool.reconcile()
        assert gateway.sent(ModelFiles) == [ModelFiles(1, "a.json has changed"), ModelFiles(1, "")]
        made.worker_pools[1].changed_files = "a.json is missing"
        made.worker_up(1, 0, 1)
        gateway.end(-9)
        await settle(1)
        told = made.fakes.gateways[1].sent(ModelFiles, WorkerUp)
        assert told[0] == ModelFiles(1, "a.json is missing")
        assert len(told) == 2


async def test_gateways_are_told_what_a_start_does_until_the_server_is_ready(bench) -> None:
    async with bench(num_gateways=2) as made:
        first, second = made.fakes.gateways
        made.pool.start_stage = "loading weights"
        for _ in range(2):
            made.pool.reconcile()
        assert first.sent(Progress) == second.sent(Progress) == [Progress("loading weights")]
        second.end(1)
        await settle()
        [during] = made.fakes.gateways[2].sent(GatewayStart)
        assert during.start_stage == "loading weights"
        made.pool.start_stage = None
        first.end(1)
        await settle()
        [afterwards] = made.fakes.gateways[3].sent(GatewayStart)
        assert afterwards.start_stage is None
        assert [gateway.sent(Progress) for gateway in made.fakes.gateways[2:]] == [[], []]


async def test_cores_come_back_from_a_gateway_that_confirms_a_smaller_grant_or_dies(bench) -> None:
    async with bench(num_gateways=2) as made:
        first, second = made.fakes.gateways
        for gateway, message in (
            (first, CoresWanted(NUM_CORES)), (second, CoresWanted(NUM_CORES)), (first, CoresHeld(NUM_CORES // 2)),
        ):  # fmt: skip
            gateway.inbox.put_nowait(message)
            await settle()
        assert first.sent(CoresGranted) == [CoresGranted(NUM_CORES), CoresGranted(NUM_CORES // 2)]
        assert second.sent(CoresGranted) == [CoresGranted(NUM_CORES // 2)]
        first.end(-9)
        await settle()
        assert second.sent(CoresGranted)[1:] == [CoresGranted(NUM_CORES)]


async def test_a_gateway_that_starts_later_ends_up_knowing_the_same(bench) -> None:
    """Whatever has happened before, and in whatever order: generations, workers, keys."""

    async with bench(num_gateways=2) as made:
        first, second = made.fakes.gateways
        made.worker_up(1, 0, 1)
        made.add_generation(2)
        made.worker_up(2, 0, 2)
        made.pool.keys = KEYS
        made.pool.reconcile()
        await settle()
        second.end(1)
        await settle()
        third = made.fakes.gateways[2]
        [start] = third.sent(GatewayStart)
        assert start.epoch == 2
        assert [key["name"] for key in start.config["keys"]] == ["first"], "it starts with the keys of now"
        assert len(first.sent(NewKeys)) == 1
        assert not third.sent(NewKeys)
        assert third.sent(WorkerUp) == first.sent(WorkerUp)
        [prepare] = third.sent(Prepare)
        assert prepare.generation == 2
        assert prepare.config["keys"] == start.config["keys"]


async def test_the_workers_of_a_generation_come_after_it_is_prepared(bench) -> None:
    async with bench(unprepared="no such file") as made:
        [gateway] = made.fakes.gateways
        made.add_generation(2)
        made.worker_up(2, 0, 2)
        await settle()
        assert len(gateway.sent(Prepare)) == 1
        assert not gateway.sent(WorkerUp)
        assert made.heard == [Prepared(2, "no such file")], "which is for the supervisor"
        gateway.inbox.put_nowait(Prepared(2))
        await settle()
        assert [message.generation for message in gateway.sent(WorkerUp)] == [2]


async def test_what_is_discarded_is_forgotten_and_who_serves_it_is_killed(bench) -> None:
    async with bench(num_gateways=2) as made:
        first, second = made.fakes.gateways
        second.connects = False
        made.add_generation(2)
        made.worker_up(2, 0, 2)
        await settle()
        made.pool.active["model"] = 2
        made.pool.reconcile()
        await settle()
        made.worker_pools.pop(1).close()
        made.pool.discard(1)
        assert first.sent(Discard) == [Discard(1)]
        assert not second.is_alive, "it has no other generation"
        await settle()
        [start] = made.fakes.gateways[2].sent(GatewayStart)
        assert start.generation == 2


async def test_a_dead_worker_is_reported_to_those_that_knew_of_it(bench) -> None:
    async with bench(num_gateways=2) as made:
        first, second = made.fakes.gateways
        incarnation = made.worker_up(1, 0, 1)
        await settle()
        del made.worker_pools[1].ready[0]
        second.end(1)
        await settle()
        made.pool.send_down(WorkerDown(incarnation, "was killed", has_crashed=True))
        assert first.sent(WorkerDown) == [WorkerDown(Incarnation(0, 1), "was killed", True)]
        assert not made.fakes.gateways[2].sent(WorkerUp, WorkerDown)
        made.pool.send_down(WorkerDown(incarnation, "was killed", has_crashed=True))
        assert len(first.sent(WorkerDown)) == 1
        made.worker_up(1, 0, 2)
        assert [message.incarnation.life for message in first.sent(WorkerUp)] == [1, 2]


async def test_a_broken_model_is_reported_once_and_again_when_it_breaks_again(bench) -> None:
    async with bench() as made:
        [gateway] = made.fakes.gateways
        made.worker_pools[1].broken = "dies again and again"
        for _ in range(3):
            made.pool.reconcile()
        assert gateway.sent(ModelBroken) == [ModelBroken(1, "dies again and again")]
        made.worker_pools[1].broken = None
        incarnation = made.worker_up(1, 0, 1)
        del made.worker_pools[1].ready[0]
        made.pool.send_down(WorkerDown(incarnation, "died", has_crashed=False))
        made.worker_pools[1].broken = "dies again and again"
        made.pool.reconcile()
        assert len(gateway.sent(ModelBroken)) == 2


# --- supervision ------------------------------------------------------------------------------------------------------


async def test_a_gateway_that_never_gets_ready_ends_the_server(bench) -> None:
    async with bench(starts=False) as made:
        for _ in range(3):
            made.fakes.gateways[-1].end(1)
            await settle(1)
        with pytest.raises(StartFailure, match=r"the gateway keeps dying \(3 times\)"):
            await made.tasks[0]


async def test_a_gateway_that_reports_why_it_cannot_start(bench) -> None:
    """The first one ends the server; one of a server that has served does not."""

    async with bench(starts=False) as made:
        made.fakes.gateways[0].inbox.put_nowait(Ready())
        await settle(1)
        made.fakes.gateways[0].end(-9)
        await settle()
        again = made.fakes.gateways[1]
        again.inbox.put_nowait(ChildFailed("no certificate"))
        await settle()
        again.end(3)
        await settle(1)
        assert len(made.fakes.gateways) == 3
    async with bench(starts=False) as made:
        made.fakes.gateways[0].inbox.put_nowait(ChildFailed("no certificate"))
        with pytest.raises(StartFailure, match="no certificate"):
            await made.tasks[0]


async def test_a_gateway_that_does_not_get_ready_in_time_is_killed(bench, caplog) -> None:
    async with bench(starts=False) as made:
        await settle(59)
        assert made.fakes.gateways[0].is_alive
        await settle(2)
        assert not made.fakes.gateways[0].is_alive
        assert len(made.fakes.gateways) == 2
        assert [record.message for record in caplog.records] == ["the gateway was still starting after 60 s"]


async def test_a_gateway_without_heartbeats_is_killed(bench) -> None:
    async with bench(num_gateways=2) as made:
        watching = asyncio.create_task(made.pool.watch_heartbeats())
        silent, lively = made.fakes.gateways
        for _ in range(12):
            lively.inbox.put_nowait(Heartbeat())
            await settle(1)
        assert silent.num_aborts == 1
        assert lively.is_alive
        watching.cancel()


async def test_a_gateway_that_does_not_read_is_killed(bench) -> None:
    async with bench() as made:
        [gateway] = made.fakes.gateways
        gateway.channel.error = BlockingIOError()
        made.worker_up(1, 0, 1)
        assert not gateway.is_alive
        await settle()
        assert len(made.fakes.gateways[1].sent(WorkerUp)) == 1


async def test_no_process_can_be_started(bench) -> None:
    async with bench() as made:
        made.fakes.spawn_error = OSError("no memory")
        made.fakes.gateways[0].end(1)
        await settle(20)
        assert made.pool.num_deaths > 3
        made.fakes.spawn_error = None
        await settle(40)
        assert made.fakes.gateways[-1].is_alive


async def test_nothing_is_restarted_during_a_drain(bench) -> None:
    async with bench(num_gateways=2, drains=False) as made:
        for _ in range(2):  # after the second death a restart waits
            made.fakes.gateways[-1].end(1)
            await settle()
        late: list[FakeGateway] = []
        made.fakes.on_spawn = late.append
        made.pool.drain(Drain(30, 0))
        await settle()
        assert made.fakes.gateways[0].sent(Drain) == [Drain(30, 0)]
        made.fakes.gateways[0].end(0)
        await settle(60)
        assert not made.fakes.living
        assert not late
        assert all(task.done() for task in made.tasks)


async def test_a_gateway_that_gets_ready_during_a_drain_drains(bench) -> None:
    async with bench(starts=False) as made:
        made.pool.drain(Drain(30, 0))
        [gateway] = made.fakes.gateways
        assert not gateway.sent(Drain)
        gateway.inbox.put_nowait(Ready())
        await settle()
        assert gateway.sent(Drain) == [Drain(30, 0)]
