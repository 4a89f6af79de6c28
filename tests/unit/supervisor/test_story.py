"""Start, reload, drain and end of a server whose children, files and time are fakes."""

import asyncio
import os
import signal
from hashlib import sha256
from pathlib import Path

import pytest

from tests.support.supervision import num_descriptors, ready, settle
from tests.support.supervisor_bench import WATCHDOG_S, Bench, beat
from vecd.base.failures import StartFailure
from vecd.shm.control import (
    Activate,
    ChildFailed,
    CoresGranted,
    CoresWanted,
    Discard,
    Drain,
    NewKeys,
    Prepare,
    Quarantined,
    ReloadAsked,
    Retired,
    WorkerDown,
    WorkerStuck,
    WorkerUp,
)
from vecd.shm.wire import Incarnation
from vecd.workers.machine import usable_cores


def write(name: str, text: str) -> None:
    """A file in the server's working directory."""
    Path(name).write_text(text)


# --- start ------------------------------------------------------------------------------------------------------------


async def test_a_server_is_ready_when_its_gateways_are_connected_to_all_workers(bench) -> None:
    async with bench("--gateways", "2", connects=False) as made:
        await settle(20)
        assert not made.notifier.said("READY")
        assert made.notifier.said("EXTEND_TIMEOUT_USEC")
        for gateway in made.fakes.gateways:
            gateway.connects = True
            for up in gateway.sent(WorkerUp):
                gateway.on_sent(up)
        await settle()
        assert made.notifier.said("READY") == ["READY=1"]
        assert made.status == "STATUS=Serving model at http://127.0.0.1:8000, 2 workers"
        assert await made.end() == 0


@pytest.mark.parametrize(("is_configuration", "exit_code"), [(False, 3), (True, 2)])
async def test_a_gateway_that_cannot_start_ends_the_server(is_configuration, exit_code, bench) -> None:
    async with bench(starts=False) as made:
        failed = ChildFailed("no such file", is_configuration=is_configuration)
        made.fakes.gateways[0].inbox.put_nowait(failed)
        with pytest.raises(StartFailure, match="no such file") as failure:
            await made.task
        assert failure.value.exit_code == exit_code


async def test_a_worker_that_cannot_start_ends_the_server(bench) -> None:
    async with bench(starts=False) as made:
        made.fakes.on_fork = lambda worker: worker.end(1)
        made.fakes.workers[0].end(1)
        await settle(1)
        await settle(10)
        assert not made.task.done(), "it has been ready"
    made.fakes.on_fork = lambda worker: worker.inbox.put_nowait(ChildFailed("no such layer"))
    again = Bench(made.folder, made.fakes, made.arguments)
    with pytest.raises(StartFailure, match="no such layer"):
        await again.task
    again.close_plans()


async def test_a_server_that_is_still_starting_refuses_a_reload(bench) -> None:
    async with bench(connects=False) as made:
        await made.reload()
        assert made.reloads.problems == ["the server is still starting"]
        assert len(made.fakes.fork_servers) == 1


async def test_a_reload_may_be_requested_as_soon_as_its_socket_listens(bench, monkeypatch) -> None:
    async with bench() as made:
        await made.end()
        again = Bench(made.folder, made.fakes, made.arguments)

        async def listen() -> None:
            again.supervisor.request_reload()

        monkeypatch.setattr(again.reloads, "listen", listen)
        await settle()
        assert again.reloads.problems == ["the server is still starting"]
        assert await again.end() == 0
        again.close_plans()


# --- watch ------------------------------------------------------------------------------------------------------------


async def test_what_gateways_report_reaches_workers_and_other_gateways(bench) -> None:
    async with bench("--gateways", "2") as made:
        first, second = made.fakes.gateways
        first.inbox.put_nowait(WorkerStuck(Incarnation(0, 1)))
        first.inbox.put_nowait(Quarantined("m", "ab"))
        first.inbox.put_nowait(CoresWanted(1))
        await settle()
        assert first.sent(CoresGranted) == [CoresGranted(usable_cores())]
        assert not second.sent(CoresGranted)
        assert made.fakes.workers[0].num_aborts == 1
        assert second.sent(Quarantined) == [Quarantined("m", "ab")]
        assert not first.sent(Quarantined)
        [down] = first.sent(WorkerDown)
        assert not down.has_crashed, "it was killed for hanging, and by no input"
        made.fakes.workers[1].end(-signal.SIGSEGV)
        await settle(1)
        made.fakes.workers[2].was_stopped = True
        second.inbox.put_nowait(WorkerStuck(Incarnation(0, 2)))
        await settle(1)
        assert [down.has_crashed for down in second.sent(WorkerDown)] == [False, True, None]
        assert [up.incarnation.life for up in second.sent(WorkerUp)] == [1, 1, 2, 2, 3]
        assert made.status.endswith("2 workers")


async def test_keys_are_read_again_when_their_file_changes(bench) -> None:
    write("keys.toml", entry("first"))
    async with bench("--keys-file", "keys.toml") as made:
        [gateway] = made.fakes.gateways
        beat(gateway)
        await settle(5)
        assert not gateway.sent(NewKeys)
        write("keys.toml", entry("first") + entry("second"))
        await settle(3)
        [message] = gateway.sent(NewKeys)
        assert [key["name"] for key in message.keys] == ["first", "second"]
        write("keys.toml", "this is no TOML")
        await settle(10)
        assert len(gateway.sent(NewKeys)) == 1
        write("keys.toml", entry("second"))
        await settle(3)
        assert [key["name"] for key in gateway.sent(NewKeys)[1].keys] == ["second"]


def entry(name: str) -> str:
    return f'[[keys]]\nname = "{name}"\nsha256 = "{sha256(name.encode()).hexdigest()}"\n'


async def test_a_keys_file_that_hangs_stops_nothing(bench, caplog) -> None:
    """Watchdog, heartbeats, restarts and drain go on; there are one thread and one line for each of the files."""

    write("keys.toml", entry("first"))
    async with bench("--keys-file", "keys.toml") as made:
        [gateway] = made.fakes.gateways
        await settle(5)
        beat(gateway, 200)
        loop = asyncio.get_running_loop()
        made.fakes.threads.hangs = True
        began_at = loop.time()
        write("keys.toml", entry("second"))
        await settle(30)
        made.fakes.workers[0].end(-9)
        await settle(30)
        assert made.notifier.longest_gap_s(began_at, loop.time()) <= WATCHDOG_S / 2
        assert len(made.fakes.workers) == 3, "restarted"
        assert gateway.is_alive
        assert made.fakes.threads.num_hanging == 2
        hanging = {f"{made.folder}/keys.toml", made.supervisor.plan.card.folder}
        assert sorted(r.message for r in caplog.records if "file system" in r.message) == sorted(
            f"{path}: the file system has not responded within 10 s" for path in hanging
        )
        assert not gateway.sent(NewKeys)
        made.fakes.threads.release()
        await settle(5)
        assert [key["name"] for key in gateway.sent(NewKeys)[0].keys] == ["second"]
        made.fakes.threads.hangs = True
        await settle(5)
        assert await made.end() == 0


# --- reload -----------------------------------------------------------------------------------------------------------


async def test_a_reload_replaces_one_generation_by_another(bench) -> None:
    async with bench("--gateways", "2", retires=False) as made:
        old = list(made.fakes.workers)
        made.config.write_text("workers = 3\n")
        made.fakes.on_fork = lambda worker: None
        await made.reload(5)
        assert made.generations == [1, 1], "no new worker is ready"
        assert made.notifier.said("RELOADING")
        for worker in made.fakes.workers[2:]:
            ready(worker)
        await settle()
        assert made.generations == [2, 2]
        assert all(worker.is_alive for worker in old), "requests of before are not answered yet"
        for gateway in made.fakes.gateways:
            assert [type(message) for message in gateway.sent(Prepare, Activate)] == [Prepare, Activate]
            gateway.inbox.put_nowait(Retired(1))
        await settle()
        assert not any(worker.is_alive for worker in old)
        assert all(gateway.sent(Discard) == [Discard(1)] for gateway in made.fakes.gateways)
        assert [server.is_stopped for server in made.fakes.fork_servers] == [True, False]
        assert (len(made.reloads.results), made.reloads.num_done, made.reloads.problems) == (1, 1, [])
        assert made.notifier.said("READY") == ["READY=1", "READY=1"]
        assert made.status == "STATUS=Serving model at http://127.0.0.1:8000, 3 workers"
        lives = {worker.name for worker in made.fakes.workers}
        assert len(lives) == len(made.fakes.workers), "no incarnation comes twice"


async def test_requests_that_never_end_do_not_hold_up_a_reload_for_ever(bench) -> None:
    async with bench("--request-timeout", "20", retires=False) as made:
        beat(made.fakes.gateways[0])
        await made.reload(24)
        assert made.fakes.workers[0].is_alive
        await settle(2)
        assert not made.fakes.workers[0].is_alive
        assert made.generations == [2]


REFUSED = {
    "nonsense": ("this is no TOML", "cannot be read"),
    "a fixed setting": ("workers = 2\nport = 9", "port: cannot be changed while serving"),
    "workers": ("workers = 1000", "at most 64 without a restart"),
    "keys": ('keys-file = "nowhere.toml"', "nowhere.toml: cannot be read"),
    "open files": ("", "open files: the limit is 100"),
    "endpoint": ("", "Too many open files"),
    "gateway": ("", "no such certificate"),
    "worker": ("", "no such layer"),
    "slow": ("start-timeout = 30", "not connected to all new workers within 30 s"),
    "gateways": ("", "gateways have died 3 times meanwhile"),
    "hang": ("", "the file system has not responded within 10 s"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_refused_reload_changes_nothing_and_leaks_nothing(bench, case, monkeypatch) -> None:
    text, problem = REFUSED[case]

    async with bench() as made:
        await made.reload()
        assert made.generations == [2]
        await settle(1)
        workers, gateway = [w for w in made.fakes.workers if w.is_alive], made.fakes.gateways[0]
        beat(gateway)
        before, num_servers = num_descriptors(), len(made.fakes.fork_servers)
        made.config.write_text(text)
        match case:
            case "open files":
                monkeypatch.setattr("vecd.launch.config.plan.max_open_files", lambda: 100)
            case "endpoint":
                made.fakes.endpoint_error = OSError(24, "Too many open files")
            case "gateway":
                gateway.unprepared = "no such certificate"
            case "worker":
                made.fakes.on_fork = lambda worker: worker.inbox.put_nowait(ChildFailed("no such layer"))
            case "slow" | "gateways":
                made.fakes.on_fork = lambda worker: None
            case "hang":
                made.fakes.threads.hangs = True
        made.supervisor.request_reload()
        for _ in range(3 if case == "gateways" else 0):
            await settle(2)
            made.fakes.gateways[-1].end(1)
        await settle(60)
        if case == "hang":
            made.fakes.threads.release()
            await settle(1)
        assert problem in "; ".join(made.reloads.problems)
        assert problem in made.status
        assert made.generations == [2]
        assert [worker for worker in made.fakes.workers if worker.is_alive] == workers
        assert not [s for s in made.fakes.fork_servers[num_servers:] if s.is_running and not s.is_stopped]
        assert num_descriptors() == before
        # And what was wrong is no hindrance for the next one.
        monkeypatch.undo()
        made.fakes.endpoint_error, made.fakes.on_fork, gateway.unprepared = None, ready, ""
        made.config.write_text("workers = 2\n")
        os.chdir(made.folder)
        await made.reload()
        assert made.generations[0] > 2
        assert "not reloaded" not in made.status
        assert num_descriptors() == before


async def test_a_model_that_changes_during_a_reload_is_reloaded_again(bench, monkeypatch) -> None:
    changes = [True, False]
    monkeypatch.setattr("vecd.launch.config.plan.Plan.model_has_changed", lambda plan: changes.pop(0))

    async with bench() as made:
        await made.reload()
        assert made.generations == [3], "the second was a mixture, and refused"
        assert not changes
        assert not made.supervisor.reloader.problems


async def test_keys_of_the_new_configuration_come_with_it(bench) -> None:
    write("keys.toml", entry("first"))
    write("others.toml", entry("second"))
    async with bench(config='keys-file = "keys.toml"\n') as made:
        [gateway] = made.fakes.gateways
        made.config.write_text('keys-file = "others.toml"\n')
        made.fakes.on_fork = lambda worker: None
        await made.reload()
        assert not gateway.sent(NewKeys), "not before"
        write("others.toml", entry("third"))
        for worker in made.fakes.workers[-1:]:
            ready(worker)
        for worker in made.fakes.workers:
            if worker.inbox.empty():
                ready(worker)
        await settle()
        assert [key["name"] for key in gateway.sent(NewKeys)[0].keys] == ["third"], "as they are now"
        assert made.generations == [2]


async def test_requests_during_a_reload_are_done_by_one_more(bench) -> None:
    async with bench() as made:
        [gateway] = made.fakes.gateways
        made.fakes.on_fork = lambda worker: None
        await made.reload()
        for _ in range(3):
            gateway.inbox.put_nowait(ReloadAsked())
        await settle()
        assert (len(made.reloads.results), made.reloads.num_done) == (4, 0)
        made.fakes.on_fork = ready
        for worker in made.fakes.workers[2:]:
            ready(worker)
        await settle()
        assert made.generations == [3]
        assert (len(made.reloads.results), made.reloads.num_done, made.reloads.problems) == (4, 4, [])


# --- drain and end ----------------------------------------------------------------------------------------------------


async def test_a_drain_waits_for_gateways_and_keeps_their_workers_running(bench) -> None:
    async with bench("--drain-timeout", "20", "--drain-grace", "1", drains=False) as made:
        [gateway] = made.fakes.gateways
        beat(gateway)
        made.supervisor.stop()
        await settle(5)
        assert gateway.sent(Drain) == [Drain(21, 1)]
        assert made.socket.is_closed
        assert made.notifier.said("STOPPING") == ["STOPPING=1"]
        made.fakes.workers[0].end(-9)
        await settle(1)
        assert len(made.fakes.workers) == 3
        assert not made.task.done()
        gateway.end(0)
        assert await made.task == 0
        assert len(made.fakes.gateways) == 1
        assert not made.fakes.living


async def test_an_interrupt_ends_with_130_before_the_server_is_ready_and_with_0_afterwards(bench) -> None:
    async with bench(starts=False) as made:
        made.supervisor.interrupt()
        assert await made.task == 130
    async with bench() as made:
        beat(made.fakes.gateways[0])
        made.supervisor.interrupt()
        assert await made.task == 0


async def test_a_gateway_that_does_not_finish_is_killed(bench) -> None:
    async with bench("--drain-timeout", "20", "--drain-grace", "1", drains=False) as made:
        beat(made.fakes.gateways[0])
        made.supervisor.stop()
        await settle(22.9)
        assert made.fakes.gateways[0].is_alive
        assert await made.task == 0
        assert asyncio.get_running_loop().time() < 24


async def test_a_second_signal_ends_at_once(bench) -> None:
    async with bench(drains=False) as made:
        made.supervisor.stop()
        await settle(1)
        made.supervisor.stop()
        await asyncio.wait([made.task], timeout=0.1)
        assert made.task.done()
        assert not made.fakes.living


@pytest.mark.parametrize("stage", ["reading", "starting", "retiring"])
async def test_a_drain_in_the_middle_of_a_reload_ends_both_generations(bench, stage: str) -> None:
    async with bench(retires=False) as made:
        made.fakes.threads.hangs = stage == "reading"
        if stage == "starting":
            made.fakes.on_fork = lambda worker: None
        await made.reload()
        assert made.generations == [2 if stage == "retiring" else 1]
        assert await made.end() == 0
        assert asyncio.get_running_loop().time() < 10, "nothing was waited for"
        made.supervisor.request_reload()
        assert not made.fakes.living
        made.fakes.threads.release()
        await settle(1)
