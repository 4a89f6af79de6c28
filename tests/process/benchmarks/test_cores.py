import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.alone import CHECKOUT
from benchmarks.cpu import Neighbours, await_asleep, process_cpu_s
from benchmarks.flood import flood, send_all
from benchmarks.gateway_time import measure_gateway
from benchmarks.loops import BusyLoop, calibrate
from benchmarks.requests import Exchange, gateway_pid, metrics
from benchmarks.servers import Server, ServerFailure, announcing
from vecd.client.bench.load import RequestShape, render_requests
from vecd.client.connection import Target, parse_target


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with announcing("--engine", "dummy", "--workers", "1", checkout=CHECKOUT) as server:
        yield server


@pytest.fixture
def target(server: Server) -> Target:
    return parse_target(server.url)


def render(target: Target, num_texts: int) -> list[bytes]:
    return render_requests(target, RequestShape(texts=[f"text {number}" for number in range(num_texts)]), num_texts)


def test_one_client_gets_its_responses(server: Server, target: Target) -> None:
    before = metrics(server)["vecd_batches_total"]
    exchange = Exchange(target)
    for request in render(target, 3):
        exchange(request)
    exchange.close()
    assert metrics(server)["vecd_batches_total"] - before == 3


def test_one_client_notices_an_error(target: Target) -> None:
    exchange = Exchange(target)
    with pytest.raises(ServerFailure, match=r"HTTP/1\.1 404"):
        exchange(render_requests(target, RequestShape(path="/nothing"), 1)[0])
    exchange.close()


def test_a_flood_counts_what_comes_between_its_looks(server: Server, target: Target) -> None:
    pid = gateway_pid(server)
    requests = itertools.cycle(render(target, 100))
    flooded = flood(target, requests, 8, 1.0, lambda: process_cpu_s(pid), warmup_s=0.1)
    assert flooded.num_responses > 0
    assert flooded.elapsed_s == pytest.approx(1.0, rel=0.5)
    assert flooded.after > flooded.before > 0


def test_a_flood_without_enough_requests_is_an_error(target: Target) -> None:
    with pytest.raises(ServerFailure, match="not enough requests"):
        flood(target, iter(render(target, 50)), 4, 60.0, lambda: None)


def test_a_flood_notices_an_error(target: Target) -> None:
    requests = render_requests(target, RequestShape(path="/nothing"), 10)
    with pytest.raises(ServerFailure, match=r"HTTP/1\.1 404"):
        flood(target, itertools.cycle(requests), 4, 60.0, lambda: None)


def test_all_of_some_requests_are_sent_once(server: Server, target: Target) -> None:
    before = metrics(server)["vecd_batch_sequences_sum"]
    send_all(target, render(target, 200), 16)
    assert metrics(server)["vecd_batch_sequences_sum"] - before == 200


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


def test_calibration_compares_loops_at_once_with_one_alone() -> None:
    finding = calibrate(num_rounds=1)
    assert finding.theirs is not None
    assert finding.ratio == pytest.approx(finding.ours / finding.theirs)
    assert f"{len(os.sched_getaffinity(0))} busy loops" in finding.work


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
