"""When a worker is started, restarted, given up and stopped, and what the observer learns of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.support.supervision import VIRTUAL_TIME, FakeProcess, Fakes, num_descriptors, ready, settle
from vecd.base.failures import ChildDied, StartFailure
from vecd.launch.config.plan import Plan
from vecd.launch.workers import Backoff, WorkerPool
from vecd.shm.control import ChildFailed, Progress, Ready
from vecd.shm.wire import Incarnation


@pytest.fixture
def anyio_backend() -> Any:
    return VIRTUAL_TIME


class Observer:
    """Keeps what it is told: the event's name and its last argument, of a worker its incarnation."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def told(worker_pool: Any, *arguments: Any) -> None:
            argument = arguments[-1] if arguments else None
            self.events.append((name.removeprefix("on_"), getattr(argument, "incarnation", argument)))

        return told

    def named(self, name: str) -> list[Any]:
        return [argument for event, argument in self.events if event == name]


class Bench:
    def __init__(self, plan: Plan, fakes: Fakes) -> None:
        self.fakes, self.observer, self.lives = fakes, Observer(), {1: 3}
        observer = cast(Any, self.observer)
        self.pool = WorkerPool(1, plan, 2, self.lives, observer, fakes.system)
        self.task = asyncio.create_task(self.pool.supervise())

    @property
    def fork_server(self) -> Any:
        return self.fakes.fork_servers[0]


@pytest.fixture
def bench(planned: Callable[..., Plan]) -> Callable[..., Any]:
    @asynccontextmanager
    async def made(on_fork: Callable[[FakeProcess], None] = ready, **changes: Any) -> AsyncIterator[Bench]:
        plan = planned("--workers", "2", "--start-timeout", "100")
        plan = replace(plan, **changes)
        fakes = Fakes()
        fakes.on_fork = on_fork
        before = num_descriptors()
        bench = Bench(plan, fakes)
        try:
            await settle()
            yield bench
        finally:
            bench.task.cancel()
            await asyncio.wait([bench.task])
            bench.pool.close()
        assert not fakes.living
        assert bench.fork_server.is_stopped
        assert num_descriptors() == before

    return made


def silent(worker: FakeProcess) -> None:
    pass


async def test_all_workers_get_ready_and_are_numbered_on(bench) -> None:
    async with bench() as made:
        assert made.pool.is_complete
        assert made.observer.named("ready") == [Incarnation(0, 1), Incarnation(1, 4)], "its life 3 was before"
        assert made.lives == {0: 1, 1: 4}


async def test_stages_and_warnings_of_the_start_alone(bench) -> None:
    def slow(worker: FakeProcess) -> None:
        worker.inbox.put_nowait(Progress("loading"))
        worker.inbox.put_nowait(Ready({}, ["slow disk"]))

    async with bench(slow) as made:
        assert made.observer.named("stage") == ["loading"], "of one worker"
        assert made.observer.named("warning") == ["slow disk"]
        made.fakes.workers[0].end(1)
        await settle(5)
        assert made.pool.is_complete
        assert made.observer.named("stage") == ["loading"]
        assert made.observer.named("warning") == ["slow disk"]


async def test_a_worker_that_reports_why_it_cannot_start(bench) -> None:
    """The first one ends the pool; one of a pool that has been ready is tried again."""

    def refuse(worker: FakeProcess) -> None:
        worker.inbox.put_nowait(ChildFailed("no such layer"))

    async with bench(refuse) as made:
        with pytest.raises(StartFailure, match="no such layer"):
            await made.task
    async with bench() as made:
        made.fakes.on_fork = refuse
        made.fakes.workers[0].end(-9)
        await settle(1)
        made.fakes.on_fork = ready
        await settle(5)
        assert made.pool.is_complete


async def test_a_worker_that_hangs_in_its_start_is_killed(bench) -> None:
    async with bench(silent) as made:
        await settle(99)
        assert len(made.fakes.workers) == 2
        await settle(2)
        assert not made.fakes.workers[0].is_alive
        assert len(made.fakes.workers) == 4


async def test_workers_that_die_again_and_again_are_reported_as_broken_and_recover(bench) -> None:
    async with bench() as made:
        made.fakes.on_fork = lambda worker: worker.end(-9)
        for worker in made.fakes.workers[:2]:
            worker.end(-9)
        await settle(60)
        reasons = made.observer.named("broken")
        assert all("dies again and again: at last it was killed by SIGKILL" in reason for reason in reasons)
        assert made.pool.broken == reasons[-1]
        num_before = len(made.fakes.workers)
        await settle(100)
        assert num_before < len(made.fakes.workers) < num_before + 10, "tried now and then"
        made.fakes.on_fork = ready
        await settle(60)
        assert made.pool.is_complete
        assert made.pool.broken is None


async def test_while_one_serves_the_model_is_not_broken(bench) -> None:
    async with bench() as made:
        made.fakes.on_fork = lambda worker: worker.end(-9)
        made.fakes.workers[0].end(-9)
        await settle(200)
        assert len(made.pool.ready) == 1
        assert not made.observer.named("broken")


async def test_a_fork_that_fails_is_tried_again(bench) -> None:
    async with bench() as made:
        made.fork_server.fork_error = ChildDied("the fork server is gone")
        made.fakes.workers[0].end(-9)
        await settle(1)
        made.fork_server.fork_error = None
        await settle(10)
        assert made.pool.is_complete


async def test_a_stuck_worker_is_killed_once(bench) -> None:
    async with bench() as made:
        worker = made.fakes.workers[0]
        made.pool.kill_stuck(Incarnation(0, 7))
        assert worker.num_aborts == 0, "another life of it"
        for _ in range(3):
            made.pool.kill_stuck(Incarnation(0, 1))
        assert worker.num_aborts == 1
        assert made.pool.ready[0].is_stuck
        await settle()
        assert not made.pool.ready[0].is_stuck


async def test_stop_ends_one_worker_after_the_other(bench) -> None:
    async with bench() as made:
        first, second = made.fakes.workers
        first.is_hard_to_kill = True
        stopping = asyncio.create_task(made.pool.stop())
        await settle(4)
        assert second.is_alive
        await settle(2)
        assert not second.is_alive, "a process that a driver keeps is left alone"
        await stopping
        await settle()
        assert made.task.done()
        assert made.fork_server.is_stopped
        first.end()
        assert not made.pool.ready


async def test_a_pool_that_was_stopped_is_supervised_again(bench) -> None:
    """With lives that go on, and as one that has never been ready: a failure ends it."""

    async with bench() as made:
        await made.pool.stop()
        assert made.task.done()
        assert made.fork_server.is_stopped
        assert not made.pool.is_supervised
        made.fork_server.is_stopped = False
        await made.pool.stop()
        assert made.fork_server.is_stopped, "if it is left over"
        made.fork_server.is_stopped = False
        made.task = asyncio.create_task(made.pool.supervise())
        await settle()
        assert made.observer.named("ready")[2:] == [Incarnation(0, 2), Incarnation(1, 5)]
        await made.pool.stop()
        assert made.fork_server.is_stopped
        made.fork_server.is_stopped = False
        made.fakes.on_fork = lambda worker: worker.inbox.put_nowait(ChildFailed("no such layer"))
        with pytest.raises(StartFailure, match="no such layer"):
            await made.pool.supervise()


def test_no_endpoint_can_be_made(planned: Callable[..., Plan]) -> None:
    fakes = Fakes()
    fakes.endpoint_error, fakes.num_endpoints_before_error = OSError(24, "Too many open files"), 1
    plan = planned()
    before = num_descriptors()
    with pytest.raises(OSError, match="Too many open files"):
        WorkerPool(1, plan, 2, {}, cast(Any, Observer()), fakes.system)
    assert num_descriptors() == before


# --- pauses -----------------------------------------------------------------------------------------------------------


def test_pauses_double_up_to_30_s_and_begin_anew_after_service():
    backoff = Backoff("worker 0")
    pauses = [backoff.delay_after("died", 0.1) for _ in range(5)]
    pauses += [backoff.delay_after("died", None) for _ in range(2000)]
    assert (pauses[:5], pauses[-1]) == ([0.0, 0.5, 1.0, 2.0, 4.0], 30.0), "never given up"
    assert [backoff.delay_after("was killed by SIGKILL", 5.0) for _ in range(3)] == [0.0] * 3


def test_a_child_that_never_was_ready_is_given_up_sooner():
    backoff = Backoff("worker 0")
    backoff.delay_after("died", None)
    backoff.delay_after("died", None)
    with pytest.raises(StartFailure, match=r"worker 0 keeps dying \(3 times\): at last it was killed by SIGILL"):
        backoff.delay_after("was killed by SIGILL", None)


# --- the model's files ------------------------------------------------------------------------------------------------


async def test_no_worker_reads_another_model_than_the_others(bench) -> None:
    """On a processor a worker is forked from what the fork server has read; a new fork server reads anew."""

    async with bench(model_files=frozenset()) as made:
        made.fakes.workers[0].end(-9)
        await settle(1)
        assert made.pool.is_complete, "forked, without a look at the files"
        made.fork_server.is_running = False
        made.fakes.workers[-1].end(-9)
        await settle(30)
        assert made.observer.named("model_changed")
        assert not made.pool.is_complete
        assert not made.observer.named("broken"), "the other one serves"
        made.fakes.workers[1].end(-9)
        await settle(1)
        assert made.observer.named("broken") == ["the model's files have changed; it is being read anew"]


async def test_changed_files_are_logged_once_with_the_model(
    bench, caplog: pytest.LogCaptureFixture, monkeypatch
) -> None:
    said = ["", "a.json has changed", "a.json has changed", "a.json is missing", ""]

    monkeypatch.setattr(Plan, "changed_files", lambda plan: said.pop(0))

    async with bench() as made:
        with caplog.at_level("INFO", "vecd.supervisor"):
            await made.pool.look_at_files()
            await asyncio.gather(made.pool.look_at_files(), made.pool.look_at_files())
            await made.pool.look_at_files()
            await made.pool.look_at_files()
        lines = [record.getMessage() for record in caplog.records]
        assert [line for line in lines if "a.json has changed" in line and made.pool.model in line] == lines[:1]
        assert ["is missing" in line for line in lines] == [False, True, False]
        assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]


async def test_files_are_looked_at_before_a_death_is_reported_but_not_for_long(bench, monkeypatch) -> None:
    monkeypatch.setattr(Plan, "changed_files", lambda plan: "model.safetensors has changed")

    async with bench() as made:
        seen: list[str] = []
        monkeypatch.setattr(made.observer, "on_down", lambda pool, worker, why: seen.append(pool.changed_files))
        made.fakes.workers[0].end(-7)
        await settle(0.1)
        assert seen == ["model.safetensors has changed"]
        made.fakes.threads.hangs = True
        made.fakes.workers[1].end(-7)
        await settle(1.5)
        assert len(seen) == 2
        made.fakes.threads.release()


async def test_a_worker_that_has_read_the_model_is_announced_after_a_look_at_its_files(bench) -> None:
    async with bench() as made:

        async def look() -> None:
            made.observer.events.append(("look", None))

        made.pool.before_ready = look
        made.observer.events.clear()
        made.fakes.workers[0].end(-9)
        await settle(1)
        assert [name for name, _ in made.observer.events] == ["down", "ready"], "forked from what was read before"
        made.observer.events.clear()
        made.fork_server.is_running = False
        made.fakes.workers[1].end(-9)
        await settle(1)
        assert [name for name, _ in made.observer.events] == ["down", "look", "ready"]


async def test_a_model_on_a_mount_that_hangs_keeps_the_rest_going(bench) -> None:
    async with bench() as made:
        made.fakes.threads.hangs = True
        made.fork_server.is_running = False
        made.fakes.workers[0].end(-9)
        made.fakes.workers[1].end(-9)
        await settle(60)  # a loop that waited for the file would not come here
        assert made.fakes.threads.num_hanging == 1, "for both workers, and all their tries"
        [reason, *_] = made.observer.named("broken")
        assert "the file system has not responded within 10 s" in reason
        made.fakes.threads.release()
        await settle(120)
        assert made.pool.is_complete
        assert made.pool.broken is None


async def test_one_of_several_models_has_workers_of_its_own_numbers_and_is_named(bench, planned, caplog) -> None:
    def slow(worker: FakeProcess) -> None:
        worker.inbox.put_nowait(Progress("loading"))
        worker.inbox.put_nowait(Ready({}, ["slow disk"]))

    gateway = replace(planned().gateway, model="b", first_worker=4)
    async with bench(slow, is_only_model=False, gateway=gateway) as made:
        assert made.observer.named("ready") == [Incarnation(4, 1), Incarnation(5, 1)]
        assert sorted(made.pool.ready) == [4, 5]
        assert made.pool.is_complete
        assert made.observer.named("stage") == ["b: loading"], "of its first worker"
        assert made.observer.named("warning") == ["b: slow disk"]
        made.pool.kill_stuck(Incarnation(5, 1))
        await settle(1)
        assert made.observer.named("ready")[2:] == [Incarnation(5, 2)]
        assert [record.message for record in caplog.records] == [
            "b: worker 5 (life 1) is stuck and is killed", "b: worker 5 (life 1) was killed by SIGABRT",
        ]  # fmt: skip
        assert {record.fields["model"] for record in caplog.records} == {"b"}
    with pytest.raises(StartFailure, match=r"^b: worker [45] keeps dying"):
        async with bench(lambda worker: worker.end(1), is_only_model=False, gateway=gateway) as made:
            await made.task
