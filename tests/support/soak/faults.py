"""What trials do to a server's processes, and what they see of them.

Owns the finding of processes by what they are, even while some of them come and go. Every function takes a server and
is right at the moment of its return only.
"""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.serving import Server, command_line, is_alive
from tests.support.soak.injection import sitecustomize

_GONE = (psutil.NoSuchProcess, psutil.AccessDenied)


def injecting(switch: Path) -> dict[str, str]:
    """The environment of a server whose engine misbehaves on the ids of `injection` while the file `switch` exists."""
    path = os.pathsep.join([str(Path(sitecustomize.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "TRIAL_FAULTS": str(switch)}


def _named(server: Server, kind: str) -> list[psutil.Process]:
    found = []
    with suppress(*_GONE):
        for child in psutil.Process(server.pid).children():
            with suppress(*_GONE):
                if f"vecd.child {kind}" in command_line(child) and is_alive(child):
                    found.append(child)
    return found


def gateways(server: Server) -> list[psutil.Process]:
    return _named(server, "gateway")


def fork_servers(server: Server) -> list[psutil.Process]:
    return [child for child in _named(server, "forkserver") if not _is_worker(child)]


def workers(server: Server) -> list[psutil.Process]:
    """Those that run, of every generation."""
    return [child for child in _named(server, "") if _is_worker(child)]


def _is_worker(process: psutil.Process) -> bool:
    """It has the command line of the process that it was forked from."""
    with suppress(*_GONE):
        return process.name().startswith("vecd-worker")
    return False


def processes_in(folder: Path) -> list[psutil.Process]:
    """Processes, wherever in the tree they are now, that were started with this folder in their environment."""
    found = []
    mark = str(folder).encode()
    for process in psutil.process_iter():
        with suppress(OSError, *_GONE):
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes() and is_alive(process):
                found.append(process)
    return found


def own_memory_bytes(process: psutil.Process) -> int:
    """Anonymous and shared memory that is resident; pages of files come and go as the kernel likes."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


async def every(interval_s: float, do: Callable[[], None], until: Awaitable[object]) -> int:
    """Do something again and again until something else is over; returns how often."""
    over = asyncio.ensure_future(until)
    num_done = 0
    while not over.done():
        await asyncio.wait((over,), timeout=interval_s)
        if not over.done():
            do()
            num_done += 1
    await over
    return num_done


def kill_one(processes: list[psutil.Process], rng: random.Random) -> None:
    """SIGKILL for one of them, if there is any."""
    if processes:
        with suppress(*_GONE):
            rng.choice(processes).kill()


async def wait_until(condition: Callable[[], bool], timeout_s: float) -> float:
    """Seconds until it was so. Raises AssertionError when it is not in time."""
    started_at = time.monotonic()
    while not condition():
        assert time.monotonic() - started_at < timeout_s, f"not within {timeout_s:g} s"
        await asyncio.sleep(0.02)
    return time.monotonic() - started_at
