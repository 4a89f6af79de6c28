"""A server of several models whose children, files and time are fakes: what happens to one concerns no other."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.supervision import FakeGateway, FakeProcess, num_descriptors, ready, settle
from tests.support.supervisor_bench import WATCHDOG_S, Bench, Models, beat, supervising
from vecd.base.failures import StartFailure
from vecd.base.files import load
from vecd.gateway.config import GatewayConfig
from vecd.launch.workers import WorkerPool
from vecd.shm.control import (
    Activate,
    ChildFailed,
    Discard,
    GatewayStart,
    ModelBroken,
    Prepare,
    Prepared,
    Progress,
    Ready,
    Retired,
    Withdrawn,
    WorkerDown,
    WorkerUp,
)


@pytest.fixture(autouse=True)
def _several(models: Models) -> None:
    """There are two, unless a test changes it."""


@pytest.fixture
def folder(minilm_folder: Path, tmp_path: Path) -> Path:
    """The model in a folder whose files may be touched."""
    (folder := tmp_path / "copy").mkdir()
    for path in minilm_folder.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "config.json").unlink()
    (folder / "config.json").write_bytes((minilm_folder / "config.json").read_bytes())
    return folder


def pools(made: Bench) -> dict[str, WorkerPool]:
    return {worker_pool.model: worker_pool for worker_pool in made.supervisor.reloader.active}


def living(made: Bench) -> dict[str, list[Any]]:
    """The workers of each model."""
    return {
        model: [worker.process for worker in worker_pool.ready.values()] for model, worker_pool in pools(made).items()
    }


def first_worker(made: Bench, model: str) -> int:
    return min(pools(made)[model].ready)


def of_generation(gateway: FakeGateway, generation: int) -> list[str]:
    """The kinds of messages about it, in order."""
    return [type(m).__name__ for m in gateway.sent() if getattr(m, "generation", None) == generation]


# --- start ------------------------------------------------------------------------------------------------------------


async def test_an_assumed_pooling_is_told_at_each_start(folder, tmp_path, models, caplog) -> None:
    async def start(*flags: str) -> list[str]:
        caplog.clear()
        async with supervising(folder, tmp_path, *flags):
            return [record.getMessage() for record in caplog.records if "is assumed" in record.getMessage()]

    with caplog.at_level(logging.WARNING, "vecd.supervisor"):
        assert await start() == []
        (folder / "modules.json").unlink()
        assert [each[:26] for each in await start()] == ["a: no modules.json: mean p", "b: no modules.json: mean p"]
        assert await start("--pooling", "cls") == []


async def test_a_server_is_ready_when_all_its_models_are_connected(bench, models) -> None:
    models["c"] = {"workers": 1}

    async with bench("--gateways", "2", starts=False) as made:
        silent: list[FakeProcess] = []
        assert len(made.fakes.fork_servers) == 3
        assert len(made.fakes.workers) == 5, "all load at the same time"
        made.fakes.on_fork = silent.append
        made.fakes.workers[4].end(1)
        await settle(1)
        for gateway in made.fakes.gateways:
            gateway.inbox.put_nowait(Ready())
        await settle(5)
        assert not made.notifier.said("READY"), "c has no worker"
        for worker in silent:
            ready(worker)
        await settle()
        assert made.notifier.said("READY") == ["READY=1"]
        assert made.status == "STATUS=Serving a, b, c at http://127.0.0.1:8000, 5 workers"
        for gateway in made.fakes.gateways:
            assert gateway.served == {"a": 1, "b": 2, "c": 3}
            [start] = gateway.sent(GatewayStart)
            assert (start.generation, start.num_models) == (1, 3)
            assert sorted((up.generation, up.incarnation.worker) for up in gateway.sent(WorkerUp)) == [
                (1, 0), (1, 1), (2, 2), (2, 3), (3, 4),
            ]  # fmt: skip
        configs = [load(GatewayConfig, prepare.config) for prepare in gateway.sent(Prepare)]
        assert [(config.model, config.model_index, config.first_worker) for config in configs] == [
            ("b", 1, 2), ("c", 2, 4),
        ]  # fmt: skip
        spec = load(GatewayConfig, start.config).shared_metrics
        assert {config.shared_metrics for config in configs} == {spec}, "which all of them write to"
        assert await made.end() == 0


async def test_the_start_says_which_model_loads_what(bench) -> None:
    async with bench(starts=False) as made:
        [gateway] = made.fakes.gateways
        gateway.inbox.put_nowait(Ready())
        made.fakes.on_fork = lambda worker: worker.inbox.put_nowait(Progress("reading"))
        again = Bench(made.folder, made.fakes, made.arguments)
        await settle()
        assert made.fakes.gateways[1].sent(GatewayStart)[0].start_stage == "workers are loading"
        again.fakes.gateways[1].inbox.put_nowait(Ready())
        made.fakes.workers[6].inbox.put_nowait(Progress("warming up"))
        await settle()
        assert made.fakes.gateways[1].sent(Progress)[-1] == Progress("workers are loading: b: warming up")
        assert "STATUS=Starting: a: reading" in again.notifier.said("STATUS=")
        assert again.status == "STATUS=Starting: b: warming up"
        again.supervisor.stop()
        await asyncio.wait([again.task])
        again.close_plans()


async def test_a_model_that_a_gateway_cannot_serve_ends_the_start_and_is_named(bench) -> None:
    async with bench(unprepared="no such ranges") as made:
        with pytest.raises(StartFailure, match=r"^b: no such ranges$"):
            await made.task


# --- deaths -----------------------------------------------------------------------------------------------------------


async def test_a_gateway_that_starts_again_serves_every_model(bench) -> None:
    """Also one that has no worker: its requests are refused as what they are, and not as those of an unknown model."""

    async with bench("--gateways", "2") as made:
        made.fakes.on_fork = lambda worker: None
        for worker in living(made)["b"]:
            worker.end(-9)
        made.fakes.gateways[0].end(1)
        await settle(1)
        again = made.fakes.gateways[2]
        assert again.served == {"a": 1, "b": 2}
        assert [up.generation for up in again.sent(WorkerUp)] == [1, 1]
        made.fakes.on_fork = ready
        for worker in made.fakes.workers[4:]:
            ready(worker)
        await settle(1)
        assert [up.generation for up in again.sent(WorkerUp)] == [1, 1, 2, 2]
        assert of_generation(again, 2) == ["Prepare", "Activate", "WorkerUp", "WorkerUp"]


async def test_a_model_that_keeps_crashing_touches_no_other(bench, caplog) -> None:
    async with bench() as made:
        [gateway] = made.fakes.gateways
        beat(gateway)
        healthy, began_at = living(made)["a"], asyncio.get_running_loop().time()
        made.fakes.on_fork = lambda worker: worker.end(-11)
        for worker in living(made)["b"]:
            worker.end(-11)
        await settle(120)
        assert {broken.generation for broken in gateway.sent(ModelBroken)} == {2}
        assert {down.incarnation.worker for down in gateway.sent(WorkerDown)} == {2, 3}
        assert living(made)["a"] == healthy
        assert made.status.startswith("STATUS=Serving a at http://127.0.0.1:8000, 2 workers; Cannot serve b: worker ")
        lines = [record for record in caplog.records if "no worker stays alive" in record.message]
        assert {line.message[:3] for line in lines} == {"b: "}
        assert lines[0].fields == {"model": "b"}
        now = asyncio.get_running_loop().time()
        assert made.notifier.longest_gap_s(began_at, now) <= WATCHDOG_S / 2, "a restart would end a's requests"
        made.fakes.on_fork = ready
        await settle(60)
        assert made.status == "STATUS=Serving a, b at http://127.0.0.1:8000, 4 workers"


async def test_a_server_without_any_worker_is_restarted_for_an_unknown_reason_alone(bench) -> None:
    async with bench("--start-timeout", "50") as made:
        beat(made.fakes.gateways[0])
        for server in made.fakes.fork_servers:
            server.hangs = True
        for workers in living(made).values():
            for worker in workers:
                worker.end(-9)
        await settle(150)
        at = asyncio.get_running_loop().time()
        pools(made)["a"].broken = "it dies"
        await settle(100)
        assert made.notifier.longest_gap_s(at, at + 100) > 50, "nobody knows what is wrong with b"
        pools(made)["b"].broken = "it dies, too"
        at = asyncio.get_running_loop().time()
        await settle(100)
        assert made.notifier.longest_gap_s(at + 2, at + 100) <= WATCHDOG_S / 2


# --- reload -----------------------------------------------------------------------------------------------------------


async def test_a_reload_replaces_only_the_model_that_has_changed(bench, models) -> None:
    async with bench("--gateways", "2", retires=False) as made:
        before, workers = pools(made), living(made)
        models["b"]["workers"] = 3
        await made.reload()
        assert {model: pool.generation for model, pool in pools(made).items()} == {"a": 1, "b": 3}
        assert pools(made)["a"] is before["a"]
        assert living(made)["a"] == workers["a"]
        assert first_worker(made, "b") == 2
        assert all(worker.is_alive for worker in workers["b"]), "requests of before are not answered yet"
        for gateway in made.fakes.gateways:
            assert gateway.served == {"a": 1, "b": 3}
            gateway.inbox.put_nowait(Retired(2))
        await settle()
        assert not any(worker.is_alive for worker in workers["b"])
        for gateway in made.fakes.gateways:
            assert gateway.sent(Discard) == [Discard(2)]
            assert not gateway.sent(Withdrawn)
        assert (made.reloads.num_done, made.reloads.problems) == (1, [])
        assert [server.is_stopped for server in made.fakes.fork_servers] == [False, True, False]


async def test_a_reload_of_what_has_not_changed_starts_nothing(bench, caplog) -> None:
    caplog.set_level(logging.INFO)

    async with bench() as made:
        before, num_descriptors_before = pools(made), num_descriptors()
        for _ in range(2):
            await made.reload()
        assert pools(made) == before
        assert len(made.fakes.fork_servers) == 2
        assert num_descriptors() == num_descriptors_before
        assert made.reloads.num_done == 2
        assert made.notifier.said("READY") == ["READY=1"] * 3
        assert "reloaded: no model has changed" in caplog.messages


@pytest.mark.parametrize("name", ["config.json", "ranges.npy"])
async def test_a_model_has_changed_if_a_file_of_it_has(bench, models, folder, name: str) -> None:
    (folder.parent / "ranges.npy").write_bytes(b"1")
    models["b"] |= {"model": str(folder), "quantization_ranges": folder.parent / "ranges.npy"}

    async with bench() as made:
        path = folder / name if name == "config.json" else folder.parent / name
        await made.reload()
        assert made.fakes.gateways[0].served == {"a": 1, "b": 2}
        path.write_bytes(path.read_bytes() + b" ")
        await made.reload()
        assert made.fakes.gateways[0].served == {"a": 1, "b": 3}


async def test_a_worker_that_would_read_changed_files_reloads_its_model_alone(bench, models, folder) -> None:
    models["b"] |= {"model": str(folder)}

    async with bench() as made:
        (folder / "config.json").write_bytes((folder / "config.json").read_bytes() + b" ")
        made.fakes.fork_servers[1].is_running = False  # a new one would read them
        living(made)["b"][0].end(-9)
        await settle(1)
        assert made.fakes.gateways[0].served == {"a": 1, "b": 3}


async def test_a_reload_looks_at_once_whether_files_that_had_gone_are_back(bench, models, folder) -> None:
    models["b"] |= {"model": str(folder), "workers": 1}

    async with bench() as made:
        folder.rename(away := folder.with_name("away"))
        made.fakes.fork_servers[1].is_running = False
        living(made)["b"][0].end(-9)
        await settle(100)  # by now it is looked for once a minute
        assert pools(made)["b"].broken
        away.rename(folder)
        await made.reload()
        assert made.reloads.problems == []
        assert pools(made)["b"].broken is None
        assert len(living(made)["b"]) == 1


async def test_a_model_that_grows_gets_other_workers_than_those_of_its_neighbours(bench, models) -> None:
    async with bench() as made:
        models["a"]["workers"] = 3
        await made.reload()
        assert sorted(pools(made)["a"].ready) == [4, 5, 6]
        assert sorted(pools(made)["b"].ready) == [2, 3]
        assert pools(made)["b"].generation == 2
        assert not any(worker.name == "worker 2, life 2" for worker in made.fakes.workers)


async def test_a_model_that_is_no_longer_configured_is_withdrawn(bench, models) -> None:
    async with bench("--gateways", "2", retires=False) as made:
        models["c"] = {}
        await made.reload()
        kept, removed = living(made), living(made)["a"]
        del models["a"]
        await made.reload()
        first, second = made.fakes.gateways
        for gateway in (first, second):
            assert gateway.served == {"b": 2, "c": 3}
            assert gateway.sent(Withdrawn) == [Withdrawn(1)]
            assert not gateway.sent(Discard)
        assert all(worker.is_alive for worker in removed)
        first.inbox.put_nowait(Retired(1))
        second.end(1)
        await settle(1)
        assert first.sent(Discard) == [Discard(1)]
        assert not any(worker.is_alive for worker in removed)
        assert {model: living(made)[model] for model in ("b", "c")} == {model: kept[model] for model in ("b", "c")}
        [start] = made.fakes.gateways[2].sent(GatewayStart)
        assert (start.generation, start.num_models) == (2, 2)
        assert made.fakes.gateways[2].served == {"b": 2, "c": 3}
        assert made.status == "STATUS=Serving b, c at http://127.0.0.1:8000, 4 workers"
        models["d"] = {"workers": 1}
        await made.reload()
        assert first_worker(made, "d") == 0, "which is free again"


async def test_a_gateway_that_starts_while_a_model_is_withdrawn_does_not_wait_for_it(bench, models) -> None:
    async with bench("--gateways", "2") as made:
        made.fakes.on_spawn = lambda gateway: setattr(gateway, "starts", False)
        made.fakes.gateways[1].end(1)
        await settle(1)
        assert made.fakes.gateways[2].sent(GatewayStart)[0].num_models == 2
        made.fakes.on_spawn = lambda gateway: None
        del models["b"]
        await made.reload()
        assert not made.fakes.gateways[2].is_alive
        await settle(5)
        assert made.fakes.gateways[3].sent(GatewayStart)[0].num_models == 1
        assert made.fakes.gateways[3].served == made.fakes.gateways[0].served == {"a": 1}


async def test_a_gateway_that_starts_while_a_model_is_added_starts_again(bench, models) -> None:
    """It would take the new model's name for an unknown one until it has been told of it."""

    async with bench("--gateways", "2") as made:
        made.fakes.on_spawn = lambda gateway: setattr(gateway, "starts", False)
        made.fakes.gateways[1].end(1)
        await settle(1)
        made.fakes.on_spawn = lambda gateway: None
        models["c"] = {}
        await made.reload()
        assert made.fakes.gateways[0].served == {"a": 1, "b": 2, "c": 3}
        assert not made.fakes.gateways[2].is_alive
        await settle(5)
        assert made.fakes.gateways[3].sent(GatewayStart)[0].num_models == 3


async def test_a_model_is_added_when_each_gateway_serves_those_there_are(bench, models) -> None:
    """A gateway that was started again counts the models that it waits for, and not which they are."""

    async with bench("--gateways", "2") as made:
        made.fakes.on_fork = lambda worker: None
        models["c"] = {"workers": 1}
        await made.reload()
        made.fakes.on_spawn = lambda gateway: setattr(gateway, "slow_generations", {2})
        made.fakes.gateways[1].end(1)
        await settle(1)
        again = made.fakes.gateways[2]
        ready(made.fakes.workers[4])
        await settle(5)
        assert [activate.generation for activate in again.sent(Activate)] == []
        again.inbox.put_nowait(Prepared(2))
        await settle(1)
        assert [activate.generation for activate in again.sent(Activate)] == [2, 3]
        assert made.reloads.problems == []


async def test_models_come_go_and_change_in_one_reload(bench, models) -> None:
    async with bench("--gateways", "2", retires=False) as made:
        made.fakes.on_fork = lambda worker: None
        kept = living(made)
        models["c"] = {"workers": 1}
        models["d"] = {"workers": 1}
        models["b"]["request_timeout"] = 20.0
        del models["a"]
        await made.reload()
        new = made.fakes.workers[4:]
        assert len(new) == 4, "all at once"
        for worker in new[:3]:
            ready(worker)
        await settle(1)
        for gateway in made.fakes.gateways:
            assert gateway.served == {"a": 1, "b": 2}, "nothing before all are connected"
            assert not gateway.sent(Activate)[1:]
        made.fakes.gateways[1].end(1)
        ready(new[3])
        await settle(1)
        for gateway in (made.fakes.gateways[0], made.fakes.gateways[2]):
            assert gateway.served == {"b": 3, "c": 4, "d": 5}
        assert all(worker.is_alive for worker in kept["a"] + kept["b"])
        made.fakes.gateways[0].inbox.put_nowait(Retired(1))
        await settle()
        assert all(worker.is_alive for worker in kept["a"]), "the other gateway has requests of it"
        made.fakes.gateways[2].inbox.put_nowait(Retired(1))
        await settle()
        assert not any(worker.is_alive for worker in kept["a"]), "whatever b does"
        assert all(worker.is_alive for worker in kept["b"])
        assert made.reloads.num_done == 0


REFUSED: dict[str, tuple[Models, str]] = {
    "worker": ({"c": {}}, "c: no such layer"),
    "gateway": ({"c": {}}, "c: no such ranges"),
    "slow": ({"c": {"start_timeout": 30.0}}, "c: the gateways were not connected to all new workers within 30 s"),
    "workers": ({"c": {"workers": 61}}, "workers of c: 61 given, at most 60 without a restart"),
    "endpoint": ({"c": {}}, "Too many open files"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_one_model_that_cannot_be_served_refuses_the_whole_reload(bench, models, case: str) -> None:
    tables, problem = REFUSED[case]

    async with bench() as made:
        [gateway] = made.fakes.gateways
        beat(gateway)
        before, workers, descriptors = pools(made), living(made), num_descriptors()
        models["a"]["request_timeout"] = 20.0  # which could be served
        models.update(tables)

        def on_fork(worker: FakeProcess) -> None:
            if not worker.name.startswith("worker 4"):
                ready(worker)
            elif case == "worker":
                worker.inbox.put_nowait(ChildFailed("no such layer"))

        if case in ("worker", "slow"):
            made.fakes.on_fork = on_fork
        if case == "gateway":
            gateway.unprepared = "no such ranges"
            models["a"].clear()
        if case == "endpoint":
            made.fakes.endpoint_error = OSError(24, "Too many open files")
            made.fakes.num_endpoints_before_error = 1  # that of a
        await made.reload(60)
        assert problem in "; ".join(made.reloads.problems)
        assert problem in made.status
        assert pools(made) == before
        assert living(made) == workers
        assert gateway.served == {"a": 1, "b": 2}
        assert not gateway.sent(Withdrawn)
        assert len([worker for worker in made.fakes.workers if worker.is_alive]) == 4
        assert num_descriptors() == descriptors
        made.fakes.endpoint_error, made.fakes.on_fork, gateway.unprepared = None, ready, ""
        for name in tables:
            del models[name]
        models["c"] = {}
        await made.reload()
        assert list(gateway.served) == ["a", "b", "c"]
        assert "not reloaded" not in made.status


async def test_one_model_more_and_one_less(bench, models) -> None:
    del models["b"]

    async with bench() as made:
        [gateway] = made.fakes.gateways
        await made.reload()
        assert gateway.served == {"a": 2}, "the only model is always replaced"
        models["b"] = {}
        await made.reload()
        assert gateway.served == {"a": 2, "b": 3}
        del models["a"]
        await made.reload()
        assert gateway.served == {"b": 3}
        await made.reload()
        assert gateway.served == {"b": 4}


async def test_the_only_model_may_get_another_name(bench, models) -> None:
    del models["b"]

    async with bench(config="workers = 40\n") as made:
        del models["a"]
        models["z"] = {}
        await made.reload()
        [gateway] = made.fakes.gateways
        assert gateway.served == {"z": 2}
        kinds = [type(message) for message in gateway.sent(Activate, Withdrawn, Discard)]
        assert kinds == [Activate, Withdrawn, Discard], "at no time there was none"
        assert len([worker for worker in made.fakes.workers if worker.is_alive]) == 40
