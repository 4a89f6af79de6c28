"""Where a server finds little: it serves all the same, or says in a line why it does not. It never just hangs."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.serving import Server, clean_environment, eventually, running_server, vecd
from tests.support.soak.connection import connect
from tests.support.soak.faults import workers
from tests.support.soak.form import LONG, pick, record
from tests.support.soak.questions import Tenant
from tests.support.soak.surroundings import (
    as_nobody,
    cgroup,
    with_clock,
    with_limits,
    with_mounts,
    without_variables,
)
from tests.support.soak.traffic import Traffic

START_OR_SAY_S = pick(short=30, long=120)
FLAGS = pick(short=["--engine", "weightless"], long=["--dtype", "float32"])
CACHE_VARIABLES = "VECD_CACHE_DIR", "XDG_CACHE_HOME", "CACHE_DIRECTORY"


@pytest.fixture(scope="module")
def callers(request: pytest.FixtureRequest) -> list[Tenant]:
    """Those whose vectors the engine of FLAGS makes."""
    found: list[Tenant] = request.getfixturevalue("tenants" if LONG else "weightless_tenants")
    return found


@contextmanager
def server_in(command: Sequence[str], *flags: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    with running_server(*FLAGS, *(flags or ("--workers", "1")), env=env, command=command) as server:
        yield server


def assert_serves(server: Server, callers: list[Tenant], num_answers: int = pick(short=10, long=200)) -> Traffic:
    async def trial() -> Traffic:
        async with Traffic(server.url, callers, 4) as traffic:
            await traffic.answers(num_answers)
        return traffic

    traffic = asyncio.run(trial())
    traffic.tally.assert_all_right()
    return traffic


def end_of(command: Sequence[str], folder: Path, *flags: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code of a server that cannot start, and the last line that the supervisor says. A gateway that is being
    started ahead may hit the same limit at the same time, and says so in lines of its own."""
    (folder / "tmp").mkdir()
    done = subprocess.run(
        [*command, *vecd("--port", "0", *FLAGS, "--workers", "1", *flags)],
        env=clean_environment(folder, env or {}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=START_OR_SAY_S,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("vecd: ")]
    assert said, done.stderr
    return done.returncode, said[-1].replace(str(folder), "…")


# --- disks ------------------------------------------------------------------------------------------------------


def test_a_full_disk(callers: list[Tenant], tmp_path: Path):
    """Neither the temporary folder nor the cache takes a byte more."""
    full = tmp_path / "full"
    full.mkdir()
    fill = f"mount -t tmpfs -o size=64k none {full} && (cat /dev/zero > {full}/everything || true) 2>/dev/null"
    env = {"TMPDIR": str(full), "VECD_CACHE_DIR": str(full / "cache")}
    with server_in(with_mounts(fill), env=env) as server:
        assert_serves(server, callers)
    record("surroundings: full disk", outcome="serves")


def test_a_log_that_nobody_can_write(callers: list[Tenant]):
    with server_in(["sh", "-c", 'exec "$@" 2>/dev/full', "sh"]) as server:
        workers(server)[0].kill()  # there is something to log
        assert_serves(server, callers)
    record("surroundings: log on a full disk", outcome="serves")


def test_no_folder_that_can_be_written(callers: list[Tenant], tmp_path: Path):
    """A container with a read-only root and nothing mounted: no home, no cache, no temporary folder."""
    # What is there stays to be read: the interpreter may be.
    read_only = " && ".join(
        f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}" for folder in ("/tmp", "/var/tmp")
    )
    env = {"TMPDIR": "/tmp", "HOME": "/proc", "VECD_CACHE_DIR": "/proc/cache"}
    code, says = end_of(with_mounts(read_only), tmp_path, env=env)
    record("surroundings: nothing can be written", outcome=f"exit code {code}: {says}")
    assert code == 3
    assert "temporary" in says


@pytest.mark.parametrize("home", ["read-only", "none"])
def test_no_home(callers: list[Tenant], home: str):
    command = without_variables(*CACHE_VARIABLES, *(["HOME"] if home == "none" else []))
    env = {"HOME": "/proc"} if home == "read-only" else {}
    with server_in(command, env=env) as server:
        assert_serves(server, callers)
    record(f"surroundings: home {home}", outcome="serves")


def test_a_user_without_an_entry(callers: list[Tenant]):
    """As containers have them: `--user 54321`."""
    env = {"HOME": "", "TMPDIR": "/tmp"}
    with server_in([*as_nobody(), *without_variables(*CACHE_VARIABLES, "HOME")], env=env) as server:
        assert_serves(server, callers)
    record("surroundings: user without an entry", outcome="serves")


def test_little_shared_memory(callers: list[Tenant]):
    """Docker's /dev/shm has 64 MB; here it has nothing."""
    with server_in(with_mounts("mount -t tmpfs -o size=4k none /dev/shm")) as server:
        assert_serves(server, callers)
    record("surroundings: /dev/shm of 4 kB", outcome="serves")


# --- limits -----------------------------------------------------------------------------------------------------


def test_few_descriptors(callers: list[Tenant]):
    """More clients than descriptors: those over the limit are turned away, the others served, and all is well later."""
    with server_in(with_limits(nofile=600)) as server:

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


@pytest.mark.parametrize("limit", [{"nofile": 12}, {"nofile": 24}, {"nofile": 128}, {"fsize": 0}], ids=str)
def test_limits_too_low_to_start(tmp_path: Path, limit: dict[str, int]):
    code, says = end_of(with_limits(**limit), tmp_path)
    [(name, value)] = limit.items()
    record(f"surroundings: {name} {value}", outcome=f"exit code {code}: {says}")
    assert code in (2, 3), says


def test_few_processes(callers: list[Tenant]):
    """A PID limit that lets no worker be forked: told on /health, and over when the limit is."""
    with cgroup("pids") as group, server_in(group.command) as server:
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


def test_too_few_processes_to_start(tmp_path: Path):
    with cgroup("pids") as group:
        group.write("pids.max", 2)
        code, says = end_of(group.command, tmp_path)
    record("surroundings: 2 processes", outcome=f"exit code {code}: {says}")
    assert code == 3


def test_half_as_much_memory_again_as_it_needs(callers: list[Tenant]):
    with cgroup("memory") as group, server_in(group.command) as server:
        assert_serves(server, callers)
        used = group.numbers("memory.stat")
        need = used["rss"] + used.get("mapped_file", 0)
        group.write("memory.limit_in_bytes", int(1.5 * need))
        before = [process.pid for process in server.processes()]
        traffic = assert_serves(server, callers, pick(short=50, long=1000))
        assert [process.pid for process in server.processes()] == before, "the kernel has killed nobody"
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


@pytest.mark.skipif(not LONG, reason="takes minutes: with VECD_SOAK=1")
def test_memory_that_runs_out_under_load(callers: list[Tenant]):
    """A neighbour takes it, whom the kernel spares: it kills workers instead, and nobody's request is lost."""
    with cgroup("memory") as group, server_in(group.command, "--workers", "2") as server:
        assert_serves(server, callers)
        used = group.numbers("memory.stat")
        need_mb = (used["rss"] + used.get("mapped_file", 0)) >> 20
        group.write("memory.limit_in_bytes", int(1.2 * need_mb) << 20)
        deaths_before = num_deaths(server)
        hog = [*group.command, sys.executable, "-c", HOG, str(int(0.5 * need_mb))]

        async def trial() -> Traffic:
            async with Traffic(server.url, callers, 4, headers={"x-vecd-timeout-ms": "20000"}) as traffic:
                for _ in range(3):
                    neighbour = await asyncio.create_subprocess_exec(*hog)
                    await neighbour.wait()
                group.write("memory.limit_in_bytes", -1)
                await asyncio.sleep(20)
                await traffic.answers(50)
            return traffic

        traffic = asyncio.run(trial())
        deaths = num_deaths(server) - deaths_before
        record("surroundings: memory runs out", need_mb=need_mb, worker_deaths=deaths, **traffic.tally.figures())
        traffic.tally.assert_none_wrong()
        assert deaths > 0, "memory has not run out"
        assert httpx.get(f"{server.url}/health").status_code == 200


def num_deaths(server: Server) -> int:
    """Of workers, counted by their lives."""
    return sum(worker["life"] - 1 for worker in server.info()["workers"])


# --- time -------------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps(callers: list[Tenant], tmp_path: Path):
    """Over a year forward, and two back, under load: nothing that waits goes by the clock on the wall."""
    offset = tmp_path / "offset"
    offset.write_text("+0")
    command, env = with_clock(offset)
    with server_in(command, env=env) as server:

        async def trial() -> Traffic:
            async with Traffic(server.url, callers, 4) as traffic:
                for days in (0, 400, -400, 0):
                    offset.write_text(f"{days:+d}d")
                    await traffic.answers(pick(short=20, long=500))
                    answer = await asyncio.to_thread(httpx.get, f"{server.url}/live")
                    said = parsedate_to_datetime(answer.headers["date"]).timestamp()
                    assert abs(said - time.time() - days * 86400) < 3600, "the jump has been made"
            return traffic

        traffic = asyncio.run(trial())
        traffic.tally.assert_all_right()
        assert all(psutil.pid_exists(process.pid) for process in server.processes())
    record("surroundings: clock jumps", **traffic.tally.figures())
