"""Processor time of a short request in the gateway, beside that of an earlier commit's gateway.

Owns the turns. The dummy engine takes next to no time, so what is left is the gateway's. Called by `benchmarks.cores`.
"""

import functools
import itertools
from pathlib import Path

from benchmarks.alone import CHECKOUT, compare
from benchmarks.cpu import Neighbours, await_asleep, process_cpu_s
from benchmarks.findings import Finding
from benchmarks.flood import flood
from benchmarks.loads import SHORT
from benchmarks.machine import commit_of
from benchmarks.requests import gateway_pid
from benchmarks.servers import Server, announcing
from benchmarks.targets import GATEWAY
from benchmarks.turns import alternate
from vecd.base.target import parse_target
from vecd.client.bench.load import RequestShape, render_requests

_CLIENTS = 64
_NUM_TEXTS = 8192
"""All different, so that no two that wait at the same time are the same."""
_DUMMY = ("--gateways", "1", "--workers", "1", "--engine", "dummy")


def measure_gateway(base: Path, num_rounds: int, turn_s: float) -> Finding:
    """`base`: a checkout of the earlier commit. A turn takes `turn_s`, and half a second before it. Raises
    ServerFailure."""
    with (
        announcing(*_DUMMY, checkout=CHECKOUT) as ours,
        announcing(*_DUMMY, checkout=base) as old,
    ):
        sessions = (ours.session, old.session)
        neighbours = Neighbours(sessions)
        turns = {
            "vecd": functools.partial(_turn, ours, sessions, turn_s),
            "base": functools.partial(_turn, old, sessions, turn_s),
        }
        microseconds = alternate(turns, num_rounds)
        others_cores = neighbours.cores()
    return compare(
        "gateway",
        f"processor time of the gateway per request: {_CLIENTS} clients, a short text each",
        microseconds["vecd"],
        f"vecd {commit_of(base) or base.name}",
        microseconds["base"],
        GATEWAY,
        {"others_cores": others_cores},
        unit="µs",
        dtype="dummy",
    )


def _turn(server: Server, sessions: tuple[int, ...], turn_s: float) -> float:
    """Microseconds per request."""
    pid, target = gateway_pid(server), parse_target(server.url)
    requests = itertools.cycle(_requests(server.url))
    await_asleep(sessions)
    flooded = flood(target, requests, _CLIENTS, turn_s, lambda: process_cpu_s(pid))
    return 1e6 * (flooded.after - flooded.before) / flooded.num_responses


@functools.cache
def _requests(url: str) -> list[bytes]:
    shape = RequestShape(lengths=SHORT)
    return list(dict.fromkeys(render_requests(parse_target(url), shape, _NUM_TEXTS)))
