"""How the supervisor's side of a fork server copes with one that does not start."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.serving import eventually
from tests.support.workers import DUMMY
from vecd.base import programs
from vecd.base.failures import ChildDied, StartFailure
from vecd.base.files import dump
from vecd.launch import children
from vecd.launch.children import ForkServer, Process, spawn
from vecd.shm.control import ForkServerStart, ForkWorker
from vecd.shm.wire import Incarnation

ORDER = ForkWorker(Incarnation(0, 1), dump(DUMMY))
NUM_WORKERS = 4


async def fork_all(server: ForkServer) -> list[BaseException]:
    """What becomes of workers that are wanted at the same time."""
    forks = (server.fork(f"worker {index}", ORDER, [0]) for index in range(NUM_WORKERS))
    return [error for error in await asyncio.gather(*forks, return_exceptions=True) if isinstance(error, BaseException)]


def fork_server(
    monkeypatch: pytest.MonkeyPatch, code: str, start_timeout_s: float = 60.0
) -> tuple[ForkServer, list[str]]:
    """One whose process runs `code`, with `channel` for its control channel; and the stages it reports."""
    code = f"channel = Channel.from_fd(int(sys.argv[1])); channel.receive(); {code}"
    command = [sys.executable, "-c", f"import os, sys, time; from vecd.shm.control import *; {code}"]
    monkeypatch.setattr(programs, "self_command", lambda _: command)
    stages: list[str] = []
    return ForkServer(ForkServerStart(os.getpid(), []), start_timeout_s, stages.append), stages


def test_workers_share_a_start_and_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    server, stages = fork_server(monkeypatch, "channel.send(Progress('loading')); sys.exit(7)")
    errors = asyncio.run(fork_all(server))
    assert stages == ["loading"], "it was started once"
    assert [str(error) for error in errors] == ["the fork server ended with exit code 7 while loading"] * NUM_WORKERS
    assert all(isinstance(error, ChildDied) for error in errors)


async def test_one_that_dies_before_it_is_told_anything_is_named_with_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn_and_wait(name: str, kind: str) -> Process:
        process = spawn(name, kind)
        os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOWAIT)
        return process

    monkeypatch.setattr(programs, "self_command", lambda _: [sys.executable, "-c", "import sys; sys.exit(7)"])
    monkeypatch.setattr(children, "spawn", spawn_and_wait)
    [error, *_] = await fork_all(ForkServer(ForkServerStart(os.getpid(), []), 60))
    assert str(error) == "the fork server ended with exit code 7 while starting"


async def test_the_next_try_is_another_start(monkeypatch: pytest.MonkeyPatch) -> None:
    server, stages = fork_server(monkeypatch, "channel.send(Progress('loading')); sys.exit(7)")
    await fork_all(server)
    await fork_all(server)
    assert stages == ["loading", "loading"]


async def test_hundreds_of_workers_are_ordered_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were all orders sent at once, the channel would fill."""
    reply = "Channel.from_fd(fds.pop(0)).send(Forked(os.getpid()), [os.pidfd_open(os.getpid())])"
    code = (
        "channel.send(Ready())\n"
        "while (received := channel.receive()) is not None:\n"
        f"    order, fds = received; {reply}; list(map(os.close, fds))"
    )
    server, _ = fork_server(monkeypatch, "exec(" + repr(code) + ")")
    arena_fd = os.memfd_create("arena")
    forks = (server.fork(f"worker {index}", ORDER, [arena_fd]) for index in range(600))
    forked = await asyncio.gather(*forks, return_exceptions=True)
    os.close(arena_fd)
    assert [one for one in forked if isinstance(one, BaseException)] == []
    for process in forked:
        assert not isinstance(process, BaseException)
        process.close()
    await server.stop()


async def test_a_worker_that_begins_when_its_fork_server_is_dead_dies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "channel.send(Ready()); control, parent = Channel.from_fd(channel.receive()[1][0]), os.getpid()\n"
        "if os.fork(): os._exit(1)\n"
        "while os.getppid() == parent: time.sleep(0.01)\n"
        "time.sleep(0.2); control.send(Forked(os.getpid()), [os.pidfd_open(os.getpid())]); time.sleep(300)"
    )
    server, _ = fork_server(monkeypatch, f"exec({code!r})")
    async with asyncio.timeout(60):
        with await server.fork("worker 0", ORDER, [0]) as worker:
            await worker.died()


async def test_a_worker_that_is_killed_before_it_begins_is_no_death_of_its_fork_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = (
        "channel.send(Ready())\n"
        "while (received := channel.receive()) is not None:\n"
        "    list(map(os.close, received[1]))\n"
        "    if received[0].incarnation.worker: os._exit(1)"
    )
    server, _ = fork_server(monkeypatch, f"exec({code!r})")
    async with asyncio.timeout(60):
        with pytest.raises(ChildDied, match=r"^it died before it began$"):
            await server.fork("worker 0", ORDER, [0])
        assert server.pids()
        with pytest.raises(ChildDied, match=r"^the fork server died$"):
            await server.fork("worker 1", replace(ORDER, incarnation=Incarnation(1, 1)), [0])
        assert not server.pids()


async def test_ctrl_c_is_left_to_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends it to all processes."""
    monkeypatch.setattr(programs, "self_command", lambda _: [sys.executable, "-c", "import time; time.sleep(60)"])
    with spawn("the gateway", "gateway") as process:
        status = Path(f"/proc/{process.pid}/status").read_text()  # noqa: ASYNC240 (it is in memory)
        [blocked] = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk:")]
        process.kill()
        await process.ended()
    assert blocked == 1 << (signal.SIGINT - 1)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_one_that_is_too_slow_is_killed_and_named_with_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    server, _ = fork_server(monkeypatch, "channel.send(Progress('comparing')); time.sleep(300)", start_timeout_s=1.5)
    [error, *_] = asyncio.run(fork_all(server))
    assert str(error) == "the fork server was still comparing after 1.5 s"
    assert server.pids() == []


def test_what_cannot_be_helped_by_another_start_is_said_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    server, _ = fork_server(monkeypatch, "channel.send(ChildFailed('no such layer'))")
    errors = asyncio.run(fork_all(server))
    assert [type(error) for error in errors] == [StartFailure] * NUM_WORKERS


async def test_a_start_ends_with_the_supervisor_though_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    server, stages = fork_server(monkeypatch, "channel.send(Progress(str(os.getpid()))); time.sleep(300)")
    waiting = asyncio.create_task(fork_all(server))
    async with asyncio.timeout(60):
        while not stages:
            await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    await server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(int(stages[0]), 0)


def test_children_do_not_inherit_keys(monkeypatch):
    monkeypatch.setenv("VECD_API_KEY", "a-secret")
    monkeypatch.setenv("VECD_API_KEYS", "name=another-secret")
    monkeypatch.setenv("HF_TOKEN", "hf_a-secret")

    with spawn("gateway", "gateway") as process:
        # Empty for a moment after the child has been started.
        eventually(lambda: Path(f"/proc/{process.pid}/environ").read_text() != "")
        found = Path(f"/proc/{process.pid}/environ").read_text()
    assert "PATH=" in found
    assert "secret" not in found
