"""What several models in one server cost, and what one of them does to the others: `make bench-models`.

Owns the order of the parts. Findings are recorded as those of `benchmarks.engine`, and shown on the same page. Called
as `python -m benchmarks.models`.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.engine import RESULTS, parse_names, record
from benchmarks.findings import Finding, Journal
from benchmarks.one_model import measure_one
from benchmarks.several_experiment import SeveralExperiment
from benchmarks.several_load import measure_fairness_of_several, measure_peers_of_several
from benchmarks.several_memory import measure_memory_of_several
from benchmarks.several_trials import measure_budget, measure_trial

PARTS: Mapping[str, Callable[[SeveralExperiment], Iterator[Finding]]] = {
    "one": measure_one,
    "memory": measure_memory_of_several,
    "fair": measure_fairness_of_several,
    "peers": measure_peers_of_several,
    "trial": measure_trial,
    "budget": measure_budget,
}
_ROUNDS = {"one": 15, "memory": 5, "fair": 5, "peers": 5, "trial": 6, "budget": 1}
_TURN_S = {"one": 1.0, "fair": 5.0, "peers": 10.0}


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 measured (whatever the figures), 1 a part failed, 2 bad arguments, 130 interrupted."""
    arguments = _make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as an exception: servers are stopped
    exit_code = 0
    for part in arguments.part:
        with tempfile.TemporaryDirectory(prefix="vecd-bench-") as name:
            bench = SeveralExperiment(
                num_rounds=arguments.rounds or _ROUNDS[part],
                turn_s=arguments.seconds or _TURN_S.get(part, 0.0),
                duration_s=arguments.duration,
                flags=arguments.flags.split(),
                folder=Path(name),
                against=arguments.against and arguments.against.resolve(),
                sparse=arguments.sparse and arguments.sparse.resolve(),
                budget=arguments.budget,
            )
            experiment = {"rounds": bench.num_rounds, "turn_s": bench.turn_s, "duration_s": bench.duration_s}
            code = record(PARTS[part](bench), Journal(arguments.results, "several", experiment), arguments.results)
        if code > 1:
            return code
        exit_code = exit_code or code
    return exit_code


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description="Measure several models in one server, in turns: against an earlier commit, against infinity, and "
        "while one of them is killed, reloaded and unloaded.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--part", type=lambda value: parse_names(value, PARTS), default=",".join(PARTS), help="what is measured")
    add("--rounds", type=int, metavar="N", help=f"turns of each contender, slices of a trial; without it {_ROUNDS}")
    add("--seconds", type=float, metavar="S", help=f"least length of a turn; without it {_TURN_S}")
    add("--duration", type=float, default=60.0, metavar="S", help="of each disturbance of a trial, over all slices")
    add("--against", type=Path, metavar="FOLDER", help="a checkout of the commit that one model is compared with")
    add("--sparse", type=Path, metavar="FOLDER", help="a sparse model, for trials; without it a reranker is the third")
    add("--budget", type=int, metavar="BYTES", help="--memory-budget of three models; without it measured, for two")
    add("--flags", default="", help="of vecd; write --flags='…'")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where the findings are recorded")
    return parser


if __name__ == "__main__":
    sys.exit(main())
