"""What a proxy in front of nodes costs, and what more nodes bring, on loopback and with the dummy engine.

Owns two figures, each measured in turns of a round, as the median of the rounds with its 90 % interval:

- `hop`: the proxy's processor time per request ÷ that of the gateways behind it in the same turn, for HAProxy and
  Envoy.
- `scaling`: requests per second of 1, 2 and 4 nodes of 20 ms a text each behind HAProxy, ÷ N times that of one node in
  the same round. It shows routing and balancing alone: these nodes sleep, where others would share a machine's cores.

    python -m benchmarks.fleet                                  both, in 5 minutes
    python -m benchmarks.fleet --sections hop --rounds 12       one, in more rounds
    python -m benchmarks.fleet --output findings.jsonl          also a line of JSON for each finding

Prints a line for each finding. Exits 1 when a target is missed. The processes are those of `tests.support.fleet`.
"""

import argparse
import functools
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cpu import Neighbours, process_cpu_s
from benchmarks.findings import Finding, rounded
from benchmarks.flood import flood
from benchmarks.loads import SHORT
from benchmarks.targets import Target, at_least, at_most
from benchmarks.turns import alternate, median_interval, paired_ratios
from tests.support.fleet import DUMMY, Envoy, HAProxy, Proxy, running_fleet
from vecd.base.target import parse_target
from vecd.client.bench.load import RequestShape, render_requests

_HOP_CLIENTS, _HOP_NODES = 32, 2
_HOP_SHARES: dict[type[Proxy], Target | None] = {HAProxy: at_most(0.4), Envoy: None}
_NODES = (1, 2, 4)
_CLIENTS_PER_NODE = 32
_MS_PER_TEXT = 20
_SCALING = at_least(0.97)
_NUM_TEXTS = 4096


@dataclass(frozen=True, slots=True)
class _HopTurn:
    """Microseconds of processor time per request."""

    proxy: float
    gateways: float


def measure_hop(make_proxy: type[Proxy], num_rounds: int, turn_s: float) -> Finding:
    """The proxy's processor time beside that of the gateways. Raises ServerFailure."""
    with running_fleet(make_proxy, _HOP_NODES, *DUMMY) as proxy:
        pids = [node.gateway().pid for node in proxy.nodes]
        neighbours = Neighbours(_sessions(proxy))
        requests = itertools.cycle(_requests(proxy.url))

        def turn() -> _HopTurn:
            def look() -> tuple[float, float]:
                return process_cpu_s(proxy.pid), sum(map(process_cpu_s, pids))

            flooded = flood(parse_target(proxy.url), requests, _HOP_CLIENTS, turn_s, look)
            spans = zip(flooded.before, flooded.after, strict=True)
            return _HopTurn(*(1e6 * (after - before) / flooded.num_responses for before, after in spans))

        turns = [turn() for _ in range(num_rounds)]
        others_cores = neighbours.cores()
    ours, theirs = [turn.proxy for turn in turns], [turn.gateways for turn in turns]
    ratios = paired_ratios(ours, theirs)
    return Finding(
        section="hop",
        work=f"{make_proxy.NAME}'s processor time per request, {_HOP_CLIENTS} clients, a short text each",
        dtype="dummy",
        unit="µs",
        ours=statistics.median(ours),
        peer="the gateways behind it",
        theirs=statistics.median(theirs),
        ratio=statistics.median(ratios),
        interval=median_interval(ratios),
        target=_HOP_SHARES[make_proxy],
        others_cores=others_cores,
        details={"rounds": {"proxy": [rounded(one) for one in ours], "gateways": [rounded(one) for one in theirs]}},
    )


def measure_scaling(num_rounds: int, turn_s: float) -> list[Finding]:
    """The rate of each number of nodes beside N times that of one. Raises ServerFailure."""
    with ExitStack() as stack:
        slow = (*DUMMY, "--dummy-ms-per-text", str(_MS_PER_TEXT))
        fleets = {number: stack.enter_context(running_fleet(HAProxy, number, *slow)) for number in _NODES}
        neighbours = Neighbours([session for proxy in fleets.values() for session in _sessions(proxy)])
        turns = {str(number): functools.partial(_rate, proxy, turn_s) for number, proxy in fleets.items()}
        rates = alternate(turns, num_rounds)
        others_cores = neighbours.cores()
    findings = []
    for number in _NODES[1:]:
        ours, theirs = rates[str(number)], [number * rate for rate in rates[str(_NODES[0])]]
        ratios = paired_ratios(ours, theirs)
        findings.append(
            Finding(
                section="scaling",
                work=f"{number} nodes of {_MS_PER_TEXT} ms a text, {_CLIENTS_PER_NODE} clients a node",
                dtype="dummy",
                unit="requests/s",
                ours=statistics.median(ours),
                peer=f"{number} × one node",
                theirs=statistics.median(theirs),
                ratio=statistics.median(ratios),
                interval=median_interval(ratios),
                target=_SCALING,
                others_cores=others_cores,
                details={"rounds": {name: [rounded(one) for one in of_all] for name, of_all in rates.items()}},
            )
        )
    return findings


def _rate(proxy: Proxy, turn_s: float) -> float:
    num_clients = _CLIENTS_PER_NODE * len(proxy.nodes)
    requests = itertools.cycle(_requests(proxy.url))
    return flood(parse_target(proxy.url), requests, num_clients, turn_s, lambda: None, warmup_s=1.0).per_s


@functools.cache
def _requests(url: str) -> list[bytes]:
    """All different, so that no two that wait at the same time are the same."""
    return list(dict.fromkeys(render_requests(parse_target(url), RequestShape(lengths=SHORT), _NUM_TEXTS)))


def _sessions(proxy: Proxy) -> list[int]:
    return [proxy.pid, *(node.pid for node in proxy.nodes)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sections", default="hop,scaling", help="hop, scaling, or both: hop,scaling")
    parser.add_argument("--rounds", type=int, default=10, help="(10)")
    parser.add_argument("--turn-s", type=float, default=4.0, help="seconds of a turn, after its warm-up (4)")
    parser.add_argument("--output", type=Path, help="a file to which findings are added as JSON")
    options = parser.parse_args(arguments)
    sections = options.sections.split(",")
    findings: list[Finding] = []
    if "hop" in sections:
        findings += [measure_hop(make_proxy, options.rounds, options.turn_s) for make_proxy in _HOP_SHARES]
    if "scaling" in sections:
        findings += measure_scaling(options.rounds, options.turn_s)
    for finding in findings:
        print(_line(finding), flush=True)
        if options.output is not None:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finding.to_json()) + "\n")
    return 1 if any(finding.is_met is False for finding in findings) else 0


def _line(finding: Finding) -> str:
    met = {True: "met", False: "missed", None: "no target"}[finding.is_met]
    interval = "" if finding.interval is None else f" ({finding.interval[0]:.3f} to {finding.interval[1]:.3f})"
    return (
        f"{finding.work}: {finding.ours:.1f} {finding.unit}; {finding.peer}: {finding.theirs:.1f}; "
        f"ratio {finding.ratio:.3f}{interval}, target {finding.target or '-'}: {met}; "
        f"others used {finding.others_cores:.2f} cores"
    )


if __name__ == "__main__":
    sys.exit(main())
