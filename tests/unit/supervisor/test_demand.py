"""A server with models that are loaded on demand, whose children, files and time are fakes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.supervision import FakeGateway, FakeProcess, ready, settle
from tests.support.supervisor_bench import WATCHDOG_S, Bench, Models, beat
from vecd.launch.memory import Footprint, MemoryBook
from vecd.shm.control import (
    Activate,
    ChildFailed,
    KeepAlive,
    Message,
    ModelAsked,
    ModelDrained,
    ModelIs,
    ModelUsed,
    ModelWanted,
    WorkerDown,
    WorkerUp,
)
from vecd.shm.wire import Incarnation

DEMAND = {"load": "demand", "workers": 1}


@pytest.fixture(autouse=True)
def _on_demand(models: Models) -> None:
    models["b"] |= DEMAND


@pytest.fixture
def bench(bench: Callable[..., Any]) -> Callable[..., Any]:
    """Whose gateways are healthy."""

    @asynccontextmanager
    async def made(*flags: str, **attributes: Any) -> AsyncIterator[Bench]:
        async with bench(*flags, **attributes) as started:
            for gateway in started.fakes.gateways:
                beat(gateway)
            yield started

    return made


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets every model need 100 bytes, and the server have so many for all."""

    def give(nbytes: int) -> None:
        monkeypatch.setattr(MemoryBook, "expect", lambda book, plan: Footprint(60, 40, 1))
        made = MemoryBook(nbytes, Path("/nowhere"))
        monkeypatch.setattr("vecd.supervisor.MemoryBook", lambda *_: made)

    return give


def say(gateway: FakeGateway, message: Message) -> None:
    gateway.inbox.put_nowait(message)


def states(gateway: FakeGateway, generation: int) -> list[str]:
    return [m.state for m in gateway.sent() if isinstance(m, ModelIs) and m.generation == generation]


def last(gateway: FakeGateway, generation: int) -> ModelIs:
    return [m for m in gateway.sent() if isinstance(m, ModelIs) and m.generation == generation][-1]


async def load(made: Bench, *generations: int, compute_s: float = 0.0) -> None:
    """A request comes for each, and is answered when it is loaded."""
    [gateway] = [gateway for gateway in made.fakes.gateways if gateway.is_alive]
    for generation in generations:
        say(gateway, ModelWanted(generation))
        await settle()
        say(gateway, ModelUsed(generation, compute_s, 0))
    await settle()


# --- start ------------------------------------------------------------------------------------------------------------


async def test_a_server_is_ready_without_what_is_loaded_on_demand(bench, caplog) -> None:
    caplog.set_level(logging.INFO)

    async with bench() as made:
        [gateway] = made.fakes.gateways
        assert made.notifier.said("READY") == ["READY=1"]
        assert made.status == "STATUS=Serving a at http://127.0.0.1:8000, 2 workers; b is unloaded"
        assert len(made.fakes.workers) == 2
        assert gateway.served == {"a": 1, "b": 2}
        assert gateway.sent(ModelIs) == [last(gateway, 2)]
        assert last(gateway, 2).state == "unloaded"
        assert last(gateway, 2).wait_s > 0
        await settle(100)
        assert len(made.fakes.workers) == 2
        say(gateway, ModelWanted(2))
        say(gateway, ModelWanted(2))
        await settle()
        assert states(gateway, 2) == ["unloaded", "loading", "ready"]
        assert [up.generation for up in gateway.sent(WorkerUp)] == [1, 1, 2]
        assert last(gateway, 2).num_loads == 1
        assert made.status == "STATUS=Serving a, b at http://127.0.0.1:8000, 3 workers"
        assert [line for line in caplog.messages if line.startswith("b: ")] == ["b: loaded in 0.0 s, about 46 MB"]


async def test_all_models_may_be_on_demand(bench, models) -> None:
    models["a"] = {**DEMAND}

    async with bench("--gateways", "2") as made:
        assert made.notifier.said("READY") == ["READY=1"]
        assert not made.fakes.workers
        at = asyncio.get_running_loop().time()
        await settle(400)
        assert made.notifier.longest_gap_s(at, at + 400) <= WATCHDOG_S / 2, "nothing is wrong with it"
        first, second = made.fakes.gateways
        say(second, ModelWanted(1))
        await settle()
        for gateway in (first, second):
            assert states(gateway, 1) == ["unloaded", "loading", "ready"]
            assert len(gateway.sent(WorkerUp)) == 1


async def test_a_gateway_that_starts_again_learns_the_states(bench) -> None:
    async with bench("--gateways", "2") as made:
        first, second = made.fakes.gateways
        second.end(1)
        await settle(1)
        assert made.fakes.gateways[2].served == {"a": 1, "b": 2}
        assert states(made.fakes.gateways[2], 2) == ["unloaded"]
        say(first, ModelWanted(2))
        await settle()
        made.fakes.gateways[2].end(1)
        await settle(1)
        assert states(made.fakes.gateways[3], 2) == ["ready"]
        assert [up.generation for up in made.fakes.gateways[3].sent(WorkerUp)] == [1, 1, 2]


# --- loads ------------------------------------------------------------------------------------------------------------


async def test_two_loads_at_a_time_in_the_order_of_arrival(bench, models) -> None:
    models.update({name: {**DEMAND} for name in "cde"})

    async with bench() as made:
        [gateway] = made.fakes.gateways
        made.fakes.on_fork = lambda worker: None
        for generation in (5, 3, 2, 4):
            say(gateway, ModelWanted(generation))
            await settle(0.1)
        loading = made.fakes.workers[2:]
        assert [worker.name for worker in loading] == ["worker 5 (life 1)", "worker 3 (life 1)"]
        assert states(gateway, 4) == ["unloaded", "loading"], "it will be, and requests wait"
        assert last(gateway, 4).wait_s > last(gateway, 5).wait_s
        ready(loading[1])
        await settle()
        assert [worker.name for worker in made.fakes.workers[4:]] == ["worker 2 (life 1)"]
        ready(loading[0])
        await settle()
        assert [worker.name for worker in made.fakes.workers[5:]] == ["worker 4 (life 1)"]


async def test_a_load_that_fails_fails_alone_and_is_tried_again_later(bench, caplog) -> None:
    async with bench() as made:
        [gateway] = made.fakes.gateways
        made.fakes.on_fork = lambda worker: worker.inbox.put_nowait(ChildFailed("no such layer"))
        say(gateway, ModelWanted(2))
        await settle()
        assert states(gateway, 2) == ["unloaded", "loading", "failed"]
        failed = last(gateway, 2)
        assert (failed.reason, failed.wait_s, failed.num_failed_loads) == ("no such layer", 1.0, 1)
        assert made.status.endswith("2 workers; b is failed: no such layer")
        say(gateway, ModelWanted(2))
        await settle(0.5)
        assert len(made.fakes.workers) == 3, "a second has not passed"
        await settle(1)
        assert len(made.fakes.workers) == 4
        assert last(gateway, 2).wait_s == 2.0
        await settle(100)
        assert len(made.fakes.workers) == 4, "nobody wants it"
        assert "b: cannot be loaded, and is not tried again for 1 s: no such layer" in caplog.messages
        made.fakes.on_fork = ready
        await load(made, 2)
        assert last(gateway, 2).state == "ready"
        assert not made.task.done()


async def test_a_worker_that_keeps_dying_ends_no_load_in_which_another_is_ready(bench, models) -> None:
    models["b"]["workers"] = 2

    async with bench() as made:
        [gateway] = made.fakes.gateways
        deaths: list[int] = []

        def only_the_first(worker: FakeProcess) -> None:
            if worker.name.startswith("worker 2"):
                ready(worker)
            else:
                deaths.append(1)
                worker.end(-9)

        made.fakes.on_fork = only_the_first
        say(gateway, ModelWanted(2))
        await settle(60)
        assert last(gateway, 2).state == "ready"
        assert len(deaths) > 3
        assert not made.task.done()


async def test_files_that_have_changed_are_reloaded_and_not_mixed(bench, models, minilm_folder, tmp_path) -> None:
    (folder := tmp_path / "copy").mkdir()
    for path in minilm_folder.iterdir():
        (folder / path.name).symlink_to(path)
    models["b"]["model"] = str(folder)

    async with bench() as made:
        [gateway] = made.fakes.gateways
        (folder / "config.json").unlink()
        (folder / "config.json").write_bytes((minilm_folder / "config.json").read_bytes() + b" ")
        say(gateway, ModelWanted(2))
        await settle(0.5)
        assert states(gateway, 2)[-1] == "failed"
        assert last(gateway, 2).reason == "the model's files have changed; it is being read anew"
        assert gateway.served == {"a": 1, "b": 3}
        assert len(made.fakes.workers) == 2
        assert states(gateway, 3) == ["unloaded"]
        await load(made, 3)
        assert states(gateway, 3) == ["unloaded", "loading", "ready"]


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_it_goes_when_nobody_has_used_it_for_its_keep_alive(bench, models, caplog) -> None:
    caplog.set_level(logging.INFO)
    models["b"]["keep_alive"] = "10"

    async with bench() as made:
        [gateway] = made.fakes.gateways
        await load(made, 2)
        worker = made.fakes.workers[-1]
        await settle(8)
        say(gateway, ModelUsed(2, 0.5, 1))
        await settle(60)
        assert worker.is_alive, "a request is unanswered"
        say(gateway, ModelUsed(2, 0.5, 0))
        await settle(9)
        assert worker.is_alive
        await settle(4)
        assert not worker.is_alive
        assert made.fakes.fork_servers[1].is_stopped
        assert states(gateway, 2)[-2:] == ["draining", "unloaded"]
        assert last(gateway, 2).num_unloads == {"idle": 1}
        assert gateway.sent(WorkerDown) == [WorkerDown(Incarnation(2, 1), "unloaded: idle", is_planned=True)]
        kinds = [type(m) for m in gateway.sent(ModelIs, WorkerDown)][-3:]
        assert kinds == [ModelIs, WorkerDown, ModelIs]
        assert "b: unloaded in 0.0 s, about 46 MB before: idle" in caplog.messages
        assert made.status.endswith("b is unloaded")
        await load(made, 2)
        assert made.fakes.workers[-1].name == "worker 2 (life 2)"
        assert states(gateway, 2)[-2:] == ["loading", "ready"]


async def test_no_worker_ends_before_the_gateways_have_their_batches(bench, models) -> None:
    models["b"]["keep_alive"] = "1"
    models["b"]["batch_timeout"] = 30.0

    async with bench("--gateways", "2") as made:
        first, second = made.fakes.gateways
        second.has_batches = True
        say(first, ModelWanted(2))
        await settle(5)
        worker = made.fakes.workers[-1]
        assert states(second, 2)[-1] == "draining"
        say(first, ModelWanted(2))
        await settle(10)
        assert worker.is_alive
        say(second, ModelDrained(2))
        await settle()
        assert not worker.is_alive
        assert states(first, 2)[-4:] == ["draining", "unloaded", "loading", "ready"]
        await settle(3)
        again = made.fakes.workers[-1]
        assert states(second, 2)[-1] == "draining"
        await settle(20)
        second.end(-9)
        await settle()
        assert not again.is_alive, "those of a gateway that has died are not waited for"


async def test_a_gateway_that_never_drains_is_not_waited_for(bench, models) -> None:
    models["b"] |= {"keep_alive": "1", "batch_timeout": 30.0}

    async with bench() as made:
        made.fakes.gateways[0].has_batches = True
        await load(made, 2)
        await settle(29)
        assert made.fakes.workers[-1].is_alive
        await settle(5)
        assert not made.fakes.workers[-1].is_alive
        assert states(made.fakes.gateways[0], 2)[-1] == "unloaded"


async def test_a_client_may_set_how_long_it_stays(bench) -> None:
    async with bench() as made:
        [gateway] = made.fakes.gateways
        await load(made, 2)
        say(gateway, KeepAlive(2, 0))
        await settle(3)
        assert last(gateway, 2).num_unloads == {"client": 1}
        say(gateway, KeepAlive(2, None))
        await load(made, 2)
        await settle(400)
        assert last(gateway, 2).state == "ready"
        say(gateway, ModelAsked(2, "unload"))
        await settle()
        await load(made, 2)
        await settle(400)
        assert last(gateway, 2).num_unloads == {"client": 1, "operator": 1, "idle": 1}, "it was set for that load"


async def test_an_operator_unloads_and_loads_any_model(bench) -> None:
    async with bench() as made:
        [gateway] = made.fakes.gateways
        say(gateway, ModelAsked(1, "unload"))
        await settle()
        assert states(gateway, 1) == ["draining", "unloaded"]
        assert not [worker for worker in made.fakes.workers if worker.is_alive]
        assert made.fakes.fork_servers[0].is_stopped
        assert last(gateway, 1).nbytes > 0
        await settle(1000)
        say(gateway, ModelAsked(1, "load"))
        await settle()
        assert states(gateway, 1)[2:] == ["loading", "ready"]
        say(gateway, ModelAsked(1, "unload"))
        await settle()
        assert states(gateway, 1)[-2:] == ["draining", "unloaded"]
        assert last(gateway, 1).num_unloads == {"operator": 2}
        say(gateway, ModelAsked(2, "unload"))
        await settle()
        assert last(gateway, 2).num_unloads == {}
        assert made.status == "STATUS=Serving at http://127.0.0.1:8000; a is unloaded; b is unloaded"


async def test_an_operator_may_end_a_load(bench) -> None:
    async with bench() as made:
        [gateway] = made.fakes.gateways
        made.fakes.on_fork = lambda worker: None
        say(gateway, ModelWanted(2))
        await settle(1)
        say(gateway, ModelAsked(2, "unload"))
        await settle()
        assert not made.fakes.workers[-1].is_alive
        assert states(gateway, 2)[-1] == "unloaded"


# --- memory -----------------------------------------------------------------------------------------------------------


async def test_a_load_that_waits_for_memory_gets_it_from_the_one_that_is_used_least(bench, models, budget) -> None:
    budget(300)
    models["a"]["pinned"] = True
    models.update({name: {**DEMAND} for name in "cd"})

    async with bench() as made:
        [gateway] = made.fakes.gateways
        await load(made, 3, compute_s=1.0)
        await load(made, 2, compute_s=20.0)
        say(gateway, ModelWanted(4))
        await settle(2)
        assert states(gateway, 4)[-1] == "loading", "both are younger than their slices"
        assert len(made.fakes.workers) == 4
        await settle(20)
        assert states(gateway, 4)[-1] == "ready"
        assert states(gateway, 3)[-1] == "unloaded"
        assert last(gateway, 3).num_unloads == {"memory": 1}
        assert states(gateway, 2)[-1] == "ready"


async def test_what_can_never_fit_fails_and_holds_nothing_up(bench, models, budget) -> None:
    budget(150)
    models["a"]["pinned"] = True

    async with bench() as made:
        [gateway] = made.fakes.gateways
        await load(made, 2)
        assert last(gateway, 2).state == "failed"
        assert last(gateway, 2).reason.startswith("no memory: 1 MB of the budget are missing")


# --- reload -----------------------------------------------------------------------------------------------------------


async def test_a_reload_loads_only_what_is_loaded(bench, models) -> None:
    models["c"] = {**DEMAND}

    async with bench() as made:
        [gateway] = made.fakes.gateways
        await load(made, 3)
        num_workers = len(made.fakes.workers)
        for name in "bc":
            models[name]["batch_timeout"] = 7.0
        models["d"] = {**DEMAND}
        await made.reload()
        assert gateway.served == {"a": 1, "b": 4, "c": 5, "d": 6}
        assert [worker.name for worker in made.fakes.workers[num_workers:]] == ["worker 3 (life 2)"]
        assert [states(gateway, generation)[-1] for generation in (4, 5, 6)] == ["unloaded", "ready", "unloaded"]
        assert last(gateway, 5).num_loads == 2
        assert sorted(message.generation for message in gateway.sent(Activate)) == [2, 3, 4, 5, 6]
        await load(made, 4)
        assert states(gateway, 4)[-1] == "ready"


async def test_a_model_that_was_loaded_at_the_start_and_went_is_reloaded_without_workers(bench, models) -> None:
    del models["b"]

    async with bench() as made:
        [gateway] = made.fakes.gateways
        say(gateway, ModelAsked(1, "unload"))
        await settle()
        await made.reload()
        assert gateway.served == {"a": 2}
        assert len(made.fakes.workers) == 2
        assert states(gateway, 2) == ["unloaded"]
        assert made.reloads.problems == []
        await load(made, 2)
        assert states(gateway, 2)[-1] == "ready"


async def test_a_reload_during_a_load_waits_for_the_requests_of_the_old_generation(bench, models) -> None:
    async with bench(retires=False) as made:
        [gateway] = made.fakes.gateways
        made.fakes.on_fork = lambda worker: None
        say(gateway, ModelWanted(2))
        await settle(1)
        models["b"]["batch_timeout"] = 7.0
        await made.reload()
        for worker in made.fakes.workers[2:]:
            ready(worker)
        await settle(1)
        assert gateway.served == {"a": 1, "b": 3}
        assert (states(gateway, 2)[-1], states(gateway, 3)[-1]) == ("ready", "ready")
