import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.alone import CHECKOUT
from benchmarks.cpu import Neighbours, await_asleep, process_cpu_s
from benchmarks.flood import flood
from benchmarks.gateway_time import measure_gateway
from benchmarks.loops import BusyLoop
from benchmarks.requests import Exchange
from benchmarks.servers import Server, ServerFailure, announcing
from vecd.base.target import Target, parse_target
from vecd.client.bench.load import RequestShape, render_requests


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with announcing("--engine", "dummy", "--workers", "1", checkout=CHECKOUT) as server:
        yield server


@pytest.fixture
def target(server: Server) -> Target:
    return parse_target(server.url)


def render(target: Target, num_texts: int) -> list[bytes]:
    return render_requests(target, RequestShape(texts=[f"text {number}" for number in range(num_texts)]), num_texts)


def test_an_error_is_noticed(target: Target) -> None:
    requests = render_requests(target, RequestShape(path="/nothing"), 10)
    with closing(Exchange(target)) as exchange, pytest.raises(ServerFailure, match=r"HTTP/1\.1 404"):
        exchange(requests[0])
    with pytest.raises(ServerFailure, match=r"HTTP/1\.1 404"):
        flood(target, itertools.cycle(requests), 4, 60.0, lambda: None)


def test_the_earlier_commit_may_be_this_one() -> None:
    finding = measure_gateway(CHECKOUT, num_rounds=1, turn_s=0.3)
    assert finding.theirs is not None
    assert finding.ours > 0
    assert finding.theirs > 0
    assert finding.peer.startswith("vecd ")


def test_a_busy_loop_runs_until_its_end_and_is_not_asleep() -> None:
    with BusyLoop() as loop:
        assert await_asleep([loop.session]) < 2.0
        neighbours = Neighbours([loop.session])
        others = Neighbours()
        loop.start(2.0)
        await_use(loop.session)
        assert await_asleep([loop.session], timeout_s=0.2) >= 0.2
        assert loop.passes_per_s() > 0
        # Whatever else runs meanwhile, the loop is among the others only where it is not named.
        assert others.cores() - neighbours.cores() > 0.1
        assert await_asleep([loop.session]) < 2.0


def test_a_busy_loop_ends_with_who_has_started_it() -> None:
    program = "import time; from benchmarks.loops import BusyLoop; b = BusyLoop(); b.start(1e9); print(b.session)"
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}  # where PYTHONSAFEPATH is set, too
    command = [sys.executable, "-c", program]
    started = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    pid = int(started.stdout)
    deadline = time.monotonic() + 10
    while _lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def await_use(pid: int) -> None:
    """Return once the process has used the processor."""
    before, deadline = process_cpu_s(pid), time.monotonic() + 10
    while process_cpu_s(pid) == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
