"""When a worker is started, restarted, given up and stopped, and what the observer learns of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.support.supervision import FakeProcess, Fakes, num_descriptors, ready, run, settle
from vecd.launch.base.exit_codes import ChildDied, StartFailure
from vecd.launch.config.plan import Plan
from vecd.launch.processes.worker_pool import WorkerPool
from vecd.shm.control import ChildFailed, Progress, WorkerReady
from vecd.shm.wire import Incarnation


class Observer:
    """Keeps what it is told: the event's name and its argument."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_ready(self, worker_pool: Any, worker: Any) -> None:
        self.events.append(("ready", worker.incarnation))

    def on_down(self, worker_pool: Any, worker: Any, reason: str) -> None:
        self.events.append(("down", reason))

    def on_broken(self, worker_pool: Any, reason: str) -> None:
        self.events.append(("broken", reason))

    def on_model_changed(self, worker_pool: Any) -> None:
        self.events.append(("model changed", None))

    def on_stage(self, worker_pool: Any, stage: str) -> None:
        self.events.append(("stage", stage))

    def on_warning(self, worker_pool: Any, warning: str) -> None:
        self.events.append(("warning", warning))

    def named(self, name: str) -> list[Any]:
        return [argument for event, argument in self.events if event == name]


class Bench:
    def __init__(self, plan: Plan, fakes: Fakes, *, is_only_model: bool) -> None:
        self.fakes, self.observer, self.lives = fakes, Observer(), {1: 3}
        self.pool = WorkerPool(1, plan, 2, self.lives, self.observer, fakes.system, is_only_model=is_only_model)
        self.task = asyncio.create_task(self.pool.supervise())

    @property
    def fork_server(self) -> Any:
        return self.fakes.fork_servers[0]


@pytest.fixture
def bench(planned: Callable[..., Plan]) -> Callable[..., Any]:
    @asynccontextmanager
    async def made(
        on_fork: Callable[[FakeProcess], None] = ready, *, is_only_model: bool = True, **changes: Any
    ) -> AsyncIterator[Bench]:
        plan = planned("--workers", "2", "--start-timeout", "100")
        plan = replace(plan, **changes)
        fakes = Fakes()
        fakes.on_fork = on_fork
        before = num_descriptors()
        bench = Bench(plan, fakes, is_only_model=is_only_model)
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


def test_all_workers_get_ready_and_are_numbered_on(bench) -> None:
    async def test() -> None:
        async with bench() as made:
            assert made.pool.is_complete
            assert made.observer.named("ready") == [Incarnation(0, 1), Incarnation(1, 4)], "its life 3 was before"
            assert made.lives == {0: 1, 1: 4}

    run(test())


def test_a_dead_worker_is_reported_and_restarted(bench) -> None:
    async def test() -> None:
        async with bench() as made:
            await settle(5)
            made.fakes.workers[0].end(-11)
            await settle()
            assert [name for name, _ in made.observer.events[2:]] == ["down", "ready"]
            assert made.observer.named("ready")[-1] == Incarnation(0, 2)
            assert made.pool.is_complete

    run(test())


def test_stages_and_warnings_of_the_start_alone(bench) -> None:
    def slow(worker: FakeProcess) -> None:
        worker.inbox.put_nowait(Progress("loading"))
        worker.inbox.put_nowait(WorkerReady({}, ["slow disk"]))

    async def test() -> None:
        async with bench(slow) as made:
            assert made.observer.named("stage") == ["loading"], "of one worker"
            assert made.observer.named("warning") == ["slow disk"]
            made.fakes.workers[0].end(1)
            await settle(5)
            assert made.pool.is_complete
            assert made.observer.named("stage") == ["loading"]
            assert made.observer.named("warning") == ["slow disk"]

    run(test())


def test_a_worker_that_reports_why_it_cannot_start(bench) -> None:
    """The first one ends the pool; one of a pool that has been ready is tried again."""

    def refuse(worker: FakeProcess) -> None:
        worker.inbox.put_nowait(ChildFailed("no such layer"))

    async def test() -> None:
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

    run(test())


def test_a_worker_that_never_gets_ready_ends_the_pool(bench) -> None:
    async def test() -> None:
        async with bench(lambda worker: worker.end(1)) as made:
            await settle(10)
            with pytest.raises(StartFailure, match=r"worker \d keeps dying \(3 times\)"):
                await made.task

    run(test())


def test_a_worker_that_hangs_in_its_start_is_killed(bench) -> None:
    async def test() -> None:
        async with bench(silent) as made:
            await settle(99)
            assert len(made.fakes.workers) == 2
            await settle(2)
            assert not made.fakes.workers[0].is_alive
            assert len(made.fakes.workers) == 4

    run(test())


def test_workers_that_die_again_and_again_are_reported_as_broken_and_recover(bench) -> None:
    async def test() -> None:
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

    run(test())


def test_while_one_serves_the_model_is_not_broken(bench) -> None:
    async def test() -> None:
        async with bench() as made:
            made.fakes.on_fork = lambda worker: worker.end(-9)
            made.fakes.workers[0].end(-9)
            await settle(200)
            assert len(made.pool.ready) == 1
            assert not made.observer.named("broken")

    run(test())


def test_a_fork_that_fails_is_tried_again(bench) -> None:
    async def test() -> None:
        async with bench() as made:
            made.fork_server.fork_error = ChildDied("the fork server is gone")
            made.fakes.workers[0].end(-9)
            await settle(1)
            made.fork_server.fork_error = None
            await settle(10)
            assert made.pool.is_complete

    run(test())


def test_a_stuck_worker_is_killed_once(bench) -> None:
    async def test() -> None:
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

    run(test())


def test_stop_ends_one_worker_after_the_other(bench) -> None:
    async def test() -> None:
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

    run(test())


def test_a_pool_that_was_stopped_is_supervised_again(bench) -> None:
    """With lives that go on, and as one that has never been ready: a failure ends it."""

    async def test() -> None:
        async with bench() as made:
            await made.pool.stop(keeps_fork_server=True)
            assert made.task.done()
            assert not made.fork_server.is_stopped
            assert not made.pool.is_supervised
            made.task = asyncio.create_task(made.pool.supervise())
            await settle()
            assert made.observer.named("ready")[2:] == [Incarnation(0, 2), Incarnation(1, 5)]
            await made.pool.stop()
            assert made.fork_server.is_stopped
            made.fork_server.is_stopped = False
            made.fakes.on_fork = lambda worker: worker.inbox.put_nowait(ChildFailed("no such layer"))
            with pytest.raises(StartFailure, match="no such layer"):
                await made.pool.supervise()

    run(test())


def test_no_endpoint_can_be_made(planned: Callable[..., Plan]) -> None:
    fakes = Fakes()
    before = num_descriptors()
    made: list[Any] = []

    def endpoint() -> Any:
        if made:
            raise OSError(24, "Too many open files")
        made.append(fakes._endpoint())
        return made[0]

    plan = planned()
    before = num_descriptors()
    with pytest.raises(OSError, match="Too many open files"):
        WorkerPool(1, plan, 2, {}, Observer(), replace(fakes.system, make_endpoint=endpoint))
    assert num_descriptors() == before


# --- the model's files ------------------------------------------------------------------------------------------------


def test_no_worker_reads_another_model_than_the_others(bench) -> None:
    """On a processor a worker is forked from what the fork server has read; a new fork server reads anew."""

    async def test() -> None:
        async with bench(model_files=frozenset()) as made:
            made.fakes.workers[0].end(-9)
            await settle(1)
            assert made.pool.is_complete, "forked, without a look at the files"
            made.fork_server.is_running = False
            made.fakes.workers[-1].end(-9)
            await settle(30)
            assert made.observer.named("model changed")
            assert not made.pool.is_complete
            assert not made.observer.named("broken"), "the other one serves"
            made.fakes.workers[1].end(-9)
            await settle(1)
            assert made.observer.named("broken") == ["the model's files have changed; it is being read anew"]

    run(test())


def test_why_no_worker_comes_says_what_is_missing(bench, monkeypatch) -> None:
    async def test() -> None:
        async with bench(model_files=frozenset()) as made:
            made.fork_server.is_running = False
            for worker in list(made.fakes.workers):
                worker.end(-9)
            await settle(1)
            assert made.observer.named("broken") == ["the model's folder is missing; it is being read anew"]

    monkeypatch.setattr(Plan, "changed_files", lambda plan: "the model's folder is missing")
    run(test())


def test_changed_files_are_logged_once_with_the_model(bench, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    said = ["", "a.json has changed", "a.json has changed", "a.json is missing", ""]

    async def test() -> None:
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

    monkeypatch.setattr(Plan, "changed_files", lambda plan: said.pop(0))
    run(test())


def test_files_are_looked_at_before_a_death_is_reported_but_not_for_long(bench, monkeypatch) -> None:
    async def test() -> None:
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

    monkeypatch.setattr(Plan, "changed_files", lambda plan: "model.safetensors has changed")
    run(test())


def test_a_worker_that_has_read_the_model_is_announced_after_a_look_at_its_files(bench) -> None:
    async def test() -> None:
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

    run(test())


def test_a_model_on_a_mount_that_hangs_keeps_the_rest_going(bench) -> None:
    async def test() -> None:
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

    run(test())


def test_a_restart_that_reads_no_file_is_not_held_up_by_one(bench) -> None:
    async def test() -> None:
        async with bench() as made:
            made.fakes.threads.hangs = True
            made.fakes.workers[0].end(-9)
            await settle(1)
            assert made.pool.is_complete
            assert made.fakes.threads.num_hanging == 1, "the look whether its death may be the files'"

    run(test())


def test_one_of_several_models_has_workers_of_its_own_numbers_and_is_named(bench, planned, caplog) -> None:
    def slow(worker: FakeProcess) -> None:
        worker.inbox.put_nowait(Progress("loading"))
        worker.inbox.put_nowait(WorkerReady({}, ["slow disk"]))

    async def test() -> None:
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

    run(test())
