"""Where a server finds little: it serves all the same, or says in a line why it does not. It never just hangs.

In short one server has all surroundings at once in which it serves; in the long form each has one of its own.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

from tests.support.serving import Server, clean_environment, eventually, is_alive, running_server, vecd
from tests.support.soak.faults import workers
from tests.support.soak.form import ENGINE, LONG, only_long, pick, record
from tests.support.soak.questions import Tenant
from tests.support.soak.surroundings import (
    Cgroup,
    as_nobody,
    cgroup,
    with_clock,
    with_limits,
    with_mounts,
    without_variables,
)
from tests.support.soak.traffic import Traffic, connect, under_traffic

START_OR_SAY_S = pick(short=30, long=120)
CACHE_VARIABLES = "XDG_CACHE_HOME", "CACHE_DIRECTORY"
SURROUNDINGS = (
    "pids", "memory", "full disk", "/dev/shm of 4 kB", "600 descriptors", "log on a full disk", "home none",
    "user without an entry",
)  # fmt: skip
"""In the order in which their commands can follow each other."""


class Surrounded(NamedTuple):
    server: Server
    groups: dict[str, Cgroup]


@contextmanager
def surrounded_by(folder: Path, *names: str, workers: int = 1) -> Iterator[Surrounded]:
    command: list[str] = []
    env: dict[str, str] = {}
    groups: dict[str, Cgroup] = {}
    with ExitStack() as stack:
        for name in names:
            with suppress(pytest.skip.Exception) if len(names) > 1 else nullcontext():
                if name in ("pids", "memory"):
                    groups[name] = stack.enter_context(cgroup(name))
                    command += groups[name].command
                else:
                    more_words, more_env = surrounding(name, folder, is_alone=len(names) == 1)
                    command += more_words
                    env |= more_env
        flags = (*ENGINE, "--workers", str(workers))
        yield Surrounded(stack.enter_context(running_server(*flags, env=env, command=command)), groups)


def surrounding(name: str, folder: Path, *, is_alone: bool) -> tuple[list[str], dict[str, str]]:
    """The beginning of the command line, and variables."""
    full = folder / "full"
    homeless = [*CACHE_VARIABLES, *(["VECD_CACHE_DIR"] if is_alone else [])]
    match name:
        case "full disk":  # neither the temporary folder nor the cache takes a byte more
            full.mkdir()
            fill = f"mount -t tmpfs -o size=64k none {full} && (cat /dev/zero > {full}/everything || true) 2>/dev/null"
            return with_mounts(fill), {"TMPDIR": str(full), "VECD_CACHE_DIR": str(full / "cache")}
        case "/dev/shm of 4 kB":  # Docker's has 64 MB
            return with_mounts("mount -t tmpfs -o size=4k none /dev/shm"), {}
        case "600 descriptors":
            return with_limits(nofile=600), {}
        case "log on a full disk":
            return ["sh", "-c", 'exec "$@" 2>/dev/full', "sh"], {}
        case "home read-only":
            return without_variables(*homeless), {"HOME": "/proc"}
        case "home none":
            return without_variables(*homeless, "HOME"), {}
        case "user without an entry":  # as containers have them: `--user 54321`
            words = [*as_nobody(), *without_variables(*homeless, "HOME")]
            return words, {"TMPDIR": "/tmp"} if is_alone else {}
    raise ValueError(name)


@pytest.fixture(scope="module")
def surrounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., AbstractContextManager[Surrounded]]]:
    """A server in surroundings of these names; in short, in all of them, and the same one for all tests."""
    if LONG:
        yield lambda *names: surrounded_by(tmp_path_factory.mktemp("surrounded"), *names)
        return
    with surrounded_by(tmp_path_factory.mktemp("surrounded"), *SURROUNDINGS) as found:
        yield lambda *names: nullcontext(found)


def assert_serves(server: Server, callers: list[Tenant], num_answers: int = pick(short=10, long=200)) -> Traffic:
    async def nothing(traffic: Traffic) -> None:
        pass

    traffic, _ = under_traffic(server.url, callers, 4, nothing, after=num_answers)
    traffic.tally.assert_all_right()
    return traffic


def num_deaths(server: Server) -> int:
    """Of workers, counted by their lives."""
    return sum(worker["life"] - 1 for worker in server.info()["workers"])


# --- where it serves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", pick(short=["all"], long=[*SURROUNDINGS[2:], "home read-only"]))
def test_it_serves(surrounded, callers: list[Tenant], name: str):
    with surrounded(name) as (server, _):
        workers(server)[0].kill()  # there is something to log
        assert_serves(server, callers)
    record(f"surroundings: {name}", outcome="serves")


def test_few_descriptors(surrounded, callers: list[Tenant]):
    """More clients than descriptors: those over the limit are turned away, the others served, and all is well later."""
    with surrounded("600 descriptors") as (server, _):

        async def crowd() -> None:
            connections = [await connect(server.url) for _ in range(150)]
            async with Traffic(server.url, callers, 2) as traffic:
                await asyncio.sleep(pick(short=0.3, long=5.0))
            assert traffic.tally.failures == []
            for connection in connections:
                connection.close()

        asyncio.run(crowd())
        eventually(lambda: sum(gateway["connections"] for gateway in server.info()["gateways"]) < 20, 30)
        assert_serves(server, callers)
    record("surroundings: 600 descriptors, 150 clients", outcome="serves")


def test_few_processes(surrounded, callers: list[Tenant]):
    """A PID limit that lets no worker be forked: told on /health, and over when the limit is."""
    with surrounded("pids") as (server, groups):
        if "pids" not in groups:
            pytest.skip("no control group can be made")
        group = groups["pids"]
        assert_serves(server, callers)
        group.write("pids.max", int(group.read("pids.current")) - 1)
        workers(server)[0].kill()
        eventually(lambda: httpx.get(f"{server.url}/health").status_code == 503, 20)
        time.sleep(pick(short=0.5, long=20.0))
        body = httpx.get(f"{server.url}/health").json()
        assert "worker 0" in body["reason"], body
        answer = httpx.post(
            f"{server.url}/v1/embeddings", json={"input": "a"}, headers={"x-vecd-timeout-ms": "300"}, timeout=30
        )
        assert (answer.status_code, bool(answer.headers["retry-after"])) == (503, True)
        group.write("pids.max", "max")
        eventually(lambda: httpx.get(f"{server.url}/health").status_code == 200, 60)
        assert_serves(server, callers)
    record("surroundings: PID limit", outcome="503 with the reason while it lasts, serves afterwards")


def test_half_as_much_memory_again_as_it_needs(surrounded, callers: list[Tenant]):
    with surrounded("memory") as (server, groups):
        if "memory" not in groups:
            pytest.skip("no control group can be made")
        assert_serves(server, callers)
        need = groups["memory"].used_bytes()
        groups["memory"].write("memory.limit_in_bytes", int(1.5 * need))
        # A worker that could not start waits up to two seconds to be reaped, beside the next one.
        before = list(filter(is_alive, server.processes()))
        traffic = assert_serves(server, callers, pick(short=50, long=1000))
        assert list(filter(is_alive, server.processes())) == before, "the kernel has killed nobody"
        groups["memory"].write("memory.limit_in_bytes", -1)
    record("surroundings: memory of 1.5 times the need", need_mb=need >> 20, **traffic.tally.figures())


HOG = """
import sys, time
held = []
for _ in range(int(sys.argv[1])):
    held.append(b"x" * 2**20)
    time.sleep(0.005)
time.sleep(5)
"""
"""Fills so many megabytes, and holds them for a while."""


@only_long
def test_memory_that_runs_out_under_load(callers: list[Tenant], tmp_path: Path):
    """A neighbour takes it, whom the kernel spares: it kills workers instead, and nobody's request is lost."""
    with surrounded_by(tmp_path, "memory", workers=2) as (server, groups):
        group = groups["memory"]
        assert_serves(server, callers)
        need_mb = group.used_bytes() >> 20
        group.write("memory.limit_in_bytes", int(1.2 * need_mb) << 20)
        deaths_before = num_deaths(server)
        hog = [*group.command, sys.executable, "-c", HOG, str(int(0.5 * need_mb))]

        async def be_hogged(traffic: Traffic) -> None:
            for _ in range(3):
                neighbour = await asyncio.create_subprocess_exec(*hog)
                await neighbour.wait()
            group.write("memory.limit_in_bytes", -1)
            await asyncio.sleep(20)

        headers = {"x-vecd-timeout-ms": "20000"}
        traffic, _ = under_traffic(server.url, callers, 4, be_hogged, before=0, after=50, headers=headers)
        deaths = num_deaths(server) - deaths_before
        record("surroundings: memory runs out", need_mb=need_mb, worker_deaths=deaths, **traffic.tally.figures())
        traffic.tally.assert_none_wrong()
        assert deaths > 0, "memory has not run out"
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_clock_that_jumps(callers: list[Tenant], tmp_path: Path):
    """Over a year forward, and two back, under load: nothing that waits goes by the clock on the wall."""
    offset = tmp_path / "offset"
    offset.write_text("+0")
    with running_server(*ENGINE, "--workers", "1", env=with_clock(offset)) as server:

        async def jump(traffic: Traffic) -> None:
            for days in (0, 400, -400, 0):
                offset.write_text(f"{days:+d}d")
                await traffic.answers(pick(short=20, long=500))
                answer = await asyncio.to_thread(httpx.get, f"{server.url}/live")
                said = parsedate_to_datetime(answer.headers["date"]).timestamp()
                assert abs(said - time.time() - days * 86400) < 3600, "the jump has been made"

        traffic, _ = under_traffic(server.url, callers, 4, jump, before=0, after=0)
        traffic.tally.assert_all_right()
        assert all(psutil.pid_exists(process.pid) for process in server.processes())
    record("surroundings: clock jumps", **traffic.tally.figures())


# --- where it cannot start --------------------------------------------------------------------------------------


def end_of(command: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code of a server that cannot start, and the last line that the supervisor says. A gateway that is being
    started ahead may hit the same limit at the same time, and says so in lines of its own."""
    (folder / "tmp").mkdir()
    done = subprocess.run(
        [*command, *vecd("--port", "0", *ENGINE, "--workers", "1")],
        env=clean_environment(folder, env or {}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=START_OR_SAY_S,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("vecd: ")]
    assert said, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, said[-1].replace(str(folder), "…")


@pytest.mark.parametrize("limit", [{"nofile": 12}, {"nofile": 128}, {"fsize": 0}], ids=str)
def test_limits_too_low_to_start(tmp_path: Path, limit: dict[str, int]):
    code, says = end_of(with_limits(**limit), tmp_path)
    [(name, value)] = limit.items()
    record(f"surroundings: {name} {value}", outcome=f"exit code {code}: {says}")
    assert code in (2, 3), says


def test_no_folder_that_can_be_written(tmp_path: Path):
    """A container with a read-only root and nothing mounted: no home, no cache, no temporary folder."""
    # What is there stays to be read: the interpreter may be.
    read_only = " && ".join(
        f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}" for folder in ("/tmp", "/var/tmp")
    )
    env = {"TMPDIR": "/tmp", "HOME": "/proc", "VECD_CACHE_DIR": "/proc/cache"}
    code, says = end_of(with_mounts(read_only), tmp_path, env)
    record("surroundings: nothing can be written", outcome=f"exit code {code}: {says}")
    assert code == 3
    assert "temporary" in says


def test_too_few_processes_to_start(tmp_path: Path):
    with cgroup("pids") as group:
        group.write("pids.max", 2)
        code, says = end_of(group.command, tmp_path)
    record("surroundings: 2 processes", outcome=f"exit code {code}: {says}")
    assert code == 3
