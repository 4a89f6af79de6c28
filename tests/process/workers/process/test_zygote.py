"""Real processes: a zygote, the fork servers that are forked from it, their workers, and the ways in which each ends.

This process plays the supervisor.
"""

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.checkpoints import worker_config
from tests.support.workers import BATCH, DIM, DUMMY, as_message
from vecd.base.failures import ChildDied
from vecd.base.files import dump
from vecd.base.kernel import adopt_orphans
from vecd.launch.children import ForkServer, Process, reap_orphans
from vecd.shm.arena import create_arena
from vecd.shm.control import ForkServerStart, ForkWorker, Ready
from vecd.shm.views import Rows, map_arena
from vecd.shm.wire import Done, Incarnation
from vecd.workers.config import WorkerConfig, modules_to_preload
from vecd.workers.dummy import dummy_vectors

DEADLINE_S = 60.0
PR_SET_CHILD_SUBREAPER = 36

_strangers: set[psutil.Process] = set()
"""Children of this process from before the test, such as servers of other tests, which run for long."""


@pytest.fixture
async def zygote() -> AsyncIterator[ForkServer]:
    """At the end nothing is left of it, nor of what was forked from it."""
    adopt_orphans()
    _strangers.clear()
    _strangers.update(psutil.Process().children())
    made = ForkServer()
    yield made
    try:
        await made.stop()
        await until(lambda: not relatives())
    finally:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """`module(code)`: the names of the modules to import, which are one with this code."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))

    def make(code: str) -> list[str]:
        (tmp_path / "strange_module.py").write_text(code)
        return ["strange_module"]

    return make


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


def relatives() -> list[psutil.Process]:
    """This process's descendants that are processes of the product, and that the test has begun. Orphans that have
    ended are reaped before, as the supervisor does every now and then."""
    reap_orphans()
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child not in _strangers:
            with suppress(psutil.NoSuchProcess):
                found += [child, *child.children(recursive=True)]
    return [process for process in found if _name(process).startswith("vecd-")]


def _name(process: psutil.Process) -> str:
    """Empty for one that has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def order(modules: list[str] | None = None, config: WorkerConfig | None = None) -> ForkServerStart:
    """Of a fork server for dummy engines, unless there is a configuration."""
    shared = dump(config) if config else None
    return ForkServerStart(os.getpid(), modules or [], shared)


def fork_server(zygote: ForkServer, modules: list[str] | None = None, timeout_s: float = DEADLINE_S) -> ForkServer:
    return ForkServer(order(modules), timeout_s, lambda stage: None, zygote)


@dataclass
class Worker:
    process: Process
    who: Incarnation
    slots: list[Rows]
    facts: dict[str, Any]


async def fork(server: ForkServer, endpoint: Any, index: int, config: WorkerConfig = DUMMY) -> Worker:
    """A worker that is ready."""
    arena_fd = create_arena(config.arena)
    slots = map_arena(arena_fd, config.arena, writable=False)[0].rows
    who = Incarnation(index, 1)
    process = await server.fork(str(who), ForkWorker(who, dump(config)), [arena_fd, endpoint.address_fd])
    os.close(arena_fd)
    ready = await process.await_ready(DEADLINE_S)
    assert isinstance(ready, Ready)
    return Worker(process, who, slots, ready.facts)


async def end(*ended: Worker | ForkServer) -> None:
    for each in ended:
        if isinstance(each, ForkServer):
            await each.stop()
        else:
            with each.process:
                each.process.kill()
                await each.process.ended()


def assert_computes(worker: Worker, gateway: Any) -> None:
    gateway.meet(worker.who)
    gateway.send(worker.who, as_message(BATCH))
    assert isinstance(gateway.receive(worker.who), Done)
    assert np.array_equal(worker.slots[0][:2], dummy_vectors(BATCH, DIM))


def sockets(pid: int) -> set[str]:
    return {link for fd in Path(f"/proc/{pid}/fd").iterdir() if (link := os.readlink(fd)).startswith("socket:")}


# --- a life -----------------------------------------------------------------------------------------------------


async def test_workers_of_two_fork_servers_compute(zygote, endpoint, gateway):
    servers = [fork_server(zygote) for _ in range(2)]
    assert zygote.pids() == [], "it is started when it is needed"
    workers = await asyncio.gather(*(fork(server, endpoint, index) for index, server in enumerate(servers)))
    for worker in workers:
        assert_computes(worker, gateway)
    [pid], pids = zygote.pids(), [server.pids()[0] for server in servers]
    assert [worker.facts["parent_pid"] for worker in workers] == pids
    names = {process.pid: process.name() for process in psutil.Process().children()}
    assert [names.get(each) for each in (pid, *pids)] == ["vecd-zygote", "vecd-forkserver", "vecd-forkserver"]
    held = [sockets(each) for each in (pid, *pids, *(worker.process.pid for worker in workers))]
    assert sum(map(len, held)) == len(set.union(*held)), "each is held by one process"
    assert len(held[0]) == len(held[1]) == 1
    await end(*workers, *servers)


async def test_signals_are_left_to_the_supervisor(zygote, endpoint, gateway):
    servers = [fork_server(zygote) for _ in range(2)]
    first = await fork(servers[0], endpoint, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for pid in (*zygote.pids(), *servers[0].pids()):
            os.kill(pid, number)
    os.kill(first.process.pid, signal.SIGINT)
    pids = zygote.pids()
    second = await fork(servers[1], endpoint, 1)
    assert zygote.pids() == pids
    assert first.facts["parent_pid"] in servers[0].pids()
    assert_computes(first, gateway)
    await end(first, second, *servers)


# --- every end --------------------------------------------------------------------------------------------------


async def test_a_killed_zygote_takes_nothing_along(zygote, endpoint, gateway):
    first = fork_server(zygote)
    worker = await fork(first, endpoint, 0)
    [zygote_pid], pids = zygote.pids(), first.pids()
    os.kill(zygote_pid, signal.SIGKILL)
    await until(lambda: not zygote.pids())
    await asyncio.sleep(0.1)
    assert not psutil.pid_exists(zygote_pid), "reaped"
    assert_computes(worker, gateway)
    second_worker = await fork(first, endpoint, 1)
    assert first.pids() == pids, "the fork server goes on, too"

    second = fork_server(zygote)
    third_worker = await fork(second, endpoint, 2)
    assert zygote.pids() != [zygote_pid]
    assert_computes(third_worker, gateway)
    await end(worker, second_worker, third_worker, first, second)


async def test_a_killed_fork_server_takes_its_workers_along(zygote, endpoint, module):
    """At whatever stage they are in, and where they are stopped."""
    code = "import time; from vecd.workers.process import worker; load = worker.load_engine\n"
    code += "worker.load_engine = lambda *of: load(*of) if of[0].num_threads == 1 else time.sleep(300)"
    server = fork_server(zygote, module(code))
    ready, stopped = await fork(server, endpoint, 0), await fork(server, endpoint, 1)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    arena_fd = create_arena(DUMMY.arena)
    loading = replace(DUMMY, num_threads=2)
    starting = await server.fork(
        "worker 2", ForkWorker(Incarnation(2, 1), dump(loading)), [arena_fd, endpoint.address_fd]
    )
    os.close(arena_fd)
    os.kill(server.pids()[0], signal.SIGKILL)
    with starting, pytest.raises(ChildDied, match=r"^was killed by SIGKILL while starting$"):
        await starting.await_ready(DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        assert [await worker.process.ended() for worker in (ready, stopped)] == ["was killed by SIGKILL"] * 2
    await end(ready, stopped, server)


async def test_a_crash_of_a_fork_server_leaves_the_other_alone(zygote, endpoint, gateway, caplog):
    servers = [fork_server(zygote) for _ in range(2)]
    workers = await asyncio.gather(*(fork(server, endpoint, index) for index, server in enumerate(servers)))
    [zygote_pid], [crashing], [other] = zygote.pids(), servers[0].pids(), servers[1].pids()
    os.kill(crashing, signal.SIGSEGV)
    async with asyncio.timeout(DEADLINE_S):
        assert await workers[0].process.ended() == "was killed by SIGKILL", "a worker dies with its fork server"
    await until(lambda: not servers[0].pids())
    assert "the fork server was killed by SIGSEGV" in caplog.messages
    assert_computes(workers[1], gateway)

    again = await fork(servers[0], endpoint, 2)
    assert_computes(again, gateway)
    assert crashing not in servers[0].pids()
    assert (zygote.pids(), servers[1].pids()) == ([zygote_pid], [other])
    await end(*workers, again, *servers)


# What plays the supervisor that is killed; its arguments are configurations, the second of which may be null, and the
# modules that fork servers import.
_SUPERVISOR = """
import asyncio, json, os, sys
from vecd.base.files import load
from vecd.launch.children import ForkServer
from vecd.shm.arena import create_arena
from vecd.shm.control import ForkServerStart, ForkWorker
from vecd.shm.wire import Incarnation
from vecd.workers.config import WorkerConfig
from vecd.base.kernel import adopt_orphans

async def main():
    adopt_orphans()
    zygote, (dummy, shared, modules) = ForkServer(), map(json.loads, sys.argv[1:])
    arena = load(WorkerConfig, dummy).arena
    held = []
    for index, config in enumerate([None, shared]):
        server = ForkServer(ForkServerStart(os.getpid(), modules, config), 60, lambda stage: None, zygote)
        worker = await server.fork("worker", ForkWorker(Incarnation(index, 1), dummy), [create_arena(arena), 0])
        held += [server, worker]
        await worker.await_ready(60)
    await asyncio.sleep(300)

asyncio.run(main())
"""
_HANGING_COMPARISON = (
    "from vecd.base import programs; real = programs.self_command\n"
    "programs.self_command = lambda kind: [*real(kind)[:-3], '-c', HANG] if kind == 'select' else real(kind)\n"
    "HANG = 'import sys, time; from vecd.shm.control import Channel; from vecd.base.kernel import *; '\n"
    "HANG += 'order, _ = Channel.from_fd(int(sys.argv[1])).receive(); die_with_parent(order.parent_pid); '\n"
    "HANG += 'set_process_name(\"vecd-select\"); time.sleep(300)'"
)


@pytest.mark.parametrize("hangs", [False, True], ids=["ready", "while a model is loaded"])
def test_the_end_of_the_supervisor_ends_everything(checkpoint, hangs, module):
    config = dump(worker_config(checkpoint("bert"), cache_dir=None)) if hangs else None
    modules = module(_HANGING_COMPARISON) if hangs else []
    arguments = map(json.dumps, (dump(DUMMY), config, modules))
    supervisor = subprocess.Popen([sys.executable, "-P", "-c", _SUPERVISOR, *arguments])
    expected = ["forkserver", "forkserver", "worker-0", "zygote", "select" if hangs else "worker-1"]
    names: list[str] = []
    deadline = time.monotonic() + DEADLINE_S
    while names != sorted(f"vecd-{name}" for name in expected):
        assert time.monotonic() < deadline, names
        assert supervisor.poll() is None
        processes = psutil.Process(supervisor.pid).children(recursive=True)
        with suppress(psutil.NoSuchProcess):  # what is between two forks ends soon
            names = sorted(process.name() for process in processes)
        time.sleep(0.01)
    supervisor.kill()
    supervisor.wait()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive


async def test_a_fork_server_that_is_given_up_ends(zygote, endpoint, module):
    server = fork_server(zygote, module("import time; time.sleep(1)"))
    waiting = asyncio.create_task(fork(server, endpoint, 0))
    await until(zygote.pids)
    waiting.cancel()
    await server.stop()
    await asyncio.wait([waiting])
    other = fork_server(zygote)
    worker = await fork(other, endpoint, 1)  # forked after the one that was given up
    await until(lambda: [_name(child) for child in relatives()].count("vecd-forkserver") == 1)
    await end(worker, other)


# --- what goes wrong before the fork ----------------------------------------------------------------------------


def failing_once(name: str, code: str, *, calls_before: int = 0) -> str:
    """Python that makes a function of `os` fail when it is called after so many calls, and never again."""
    return (
        "import errno, os\n"
        f"left = {calls_before}\n"
        f"def fail(*arguments, real=os.{name}):\n"
        "    global left\n"
        "    left -= 1\n"
        "    if left == -1:\n"
        f"        raise OSError(errno.{code}, os.strerror(errno.{code}))\n"
        "    return real(*arguments)\n"
        f"os.{name} = fail"
    )


@pytest.mark.parametrize(
    "failure",
    [
        failing_once("fork", "EAGAIN"),
        failing_once("fork", "EAGAIN", calls_before=1),
        failing_once("pidfd_open", "EAGAIN"),
    ],
    ids=["the first fork", "the second", "the descriptor"],
)
async def test_a_fork_that_fails_is_reported(zygote, endpoint, module, failure):
    server = fork_server(zygote, module(failure))
    with pytest.raises(
        ChildDied, match=r"^the fork server cannot be started: the zygote cannot fork: (no more threads|\[Errno 11\])"
    ):
        await fork(server, endpoint, 0)
    await until(lambda: [_name(child) for child in relatives()] == ["vecd-zygote"])


async def test_after_a_fork_that_failed_the_next_is_tried(zygote, endpoint, module):
    server = fork_server(zygote, module(failing_once("fork", "EAGAIN")))
    with pytest.raises(ChildDied):
        await fork(server, endpoint, 0)
    pids = zygote.pids()
    worker = await fork(server, endpoint, 0)
    assert zygote.pids() == pids
    await end(worker, server)


async def test_an_import_that_hangs_costs_the_others_no_more_than_its_deadline(zygote, endpoint, module):
    hanging, other = fork_server(zygote, module("import time; time.sleep(300)"), timeout_s=2.0), fork_server(zygote)
    first = asyncio.create_task(fork(hanging, endpoint, 0))
    await until(zygote.pids)
    hanging_pids = zygote.pids()
    worker = await fork(other, endpoint, 1)
    assert zygote.pids() != hanging_pids
    with pytest.raises(ChildDied, match="cannot be started: the zygote has not forked it after 2 s, and is killed"):
        await first
    await end(worker, other)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os; os._exit(5)", "the zygote died"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(300,), daemon=True).start()",
            "the zygote cannot fork: its imports started threads, which a fork would lose",
        ),
    ],
    ids=["it ends", "it starts a thread"],
)
async def test_a_model_whose_import_ends_the_zygote_leaves_the_others_alone(zygote, endpoint, module, code, says):
    ready, harmful, other = fork_server(zygote), fork_server(zygote, module(code)), fork_server(zygote)
    worker = await fork(ready, endpoint, 0)
    with pytest.raises(ChildDied, match=f"^the fork server cannot be started: {says}$"):
        await fork(harmful, endpoint, 1)
    await until(lambda: not zygote.pids())
    second = await fork(other, endpoint, 2)
    assert worker.facts["parent_pid"] in ready.pids()
    await end(worker, second, ready, other)


async def test_a_zygote_that_cannot_be_started_is_reported(zygote, endpoint, monkeypatch, tmp_path):
    missing = str(tmp_path / "missing")  # in a folder of this test's own: nothing else makes it
    monkeypatch.setattr("vecd.base.programs.self_command", lambda _: [missing])
    with pytest.raises(ChildDied, match=r"^the fork server .*: the zygote cannot be started: \[Errno 2\]"):
        await fork(fork_server(zygote), endpoint, 0)
    assert zygote.pids() == []


# --- with models ------------------------------------------------------------------------------------------------


def maps(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text()


async def test_torch_is_imported_once_and_when_a_model_needs_it(zygote, endpoint, minilm, checkpoint, tmp_path):
    """The lean engine has the bundled model's reference vectors and needs no torch; a model that is compared does."""
    lean = worker_config(minilm, cache_dir=tmp_path)
    fused = worker_config(checkpoint("bert"), cache_dir=tmp_path, engine="fused")
    modules = modules_to_preload("bert", "auto")

    def start(config: WorkerConfig) -> ForkServer:
        return ForkServer(order(modules, config), DEADLINE_S, lambda stage: None, zygote)

    servers = [start(lean), start(fused)]
    first = await fork(servers[0], endpoint, 0, lean)
    [pid] = zygote.pids()
    assert first.facts["path"] == "lean"
    assert maps(pid, "onnxruntime")
    assert not maps(pid, "libtorch")

    second = await fork(servers[1], endpoint, 1, fused)
    assert second.facts["path"] == "fused"
    assert zygote.pids() == [pid]
    assert maps(pid, "libtorch")
    assert not any(maps(each, "libtorch") for each in (*servers[0].pids(), first.process.pid))
    assert psutil.Process(pid).num_threads() == 1
    await end(first, second, *servers)
