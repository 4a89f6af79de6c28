"""vecd against the reference server, under the same load on the same machine: `make bench`.

Owns the order of the measurements, what is recorded of them, and the table for `docs/log.md`. The load is
`client.load`'s, the servers are `benchmarks.servers`'. Called as `python -m benchmarks.compare`.

The servers take turns (vecd, reference, vecd, …), one at a time, so that whatever else the machine does meets both.
A figure is the median of the rounds, with their smallest and largest beside it. The load generator runs on the same
machine and takes its CPU from both alike; how much is recorded with each run.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.cpu import CpuClock
from benchmarks.notebook import Notebook, Run, disturbances, render_table
from benchmarks.servers import Recipe, Server, ServerFailure, reference_recipe, serving, vecd_recipe
from client import bench, report
from client.connection import parse_target
from client.load import Load, Unreachable
from client.payload import RequestShape, render_requests
from client.tally import Result
from client.texts import Lengths, parse_lengths

_RESULTS = Path(__file__).parent / "results"
_TIMEOUT_S = 60.0
_ORDER = ("vecd", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What is done to each server in each round."""

    clients: tuple[int, ...]
    texts_per_request: int
    lengths: Lengths
    warmup_s: float
    duration_s: float

    def loads(self, url: str) -> list[Load]:
        """One load for each number of clients, of the same requests whatever the server."""
        shape = RequestShape(lengths=self.lengths, texts_per_request=self.texts_per_request)
        requests = render_requests(url, shape)
        return [
            Load(
                target=parse_target(url),
                requests=requests,
                texts_per_request=self.texts_per_request,
                clients=clients,
                warmup_s=self.warmup_s,
                duration_s=self.duration_s,
                num_requests=None,
                timeout_s=_TIMEOUT_S,
            )
            for clients in self.clients
        ]

    def describe(self) -> dict[str, Any]:
        return {
            "texts_per_request": self.texts_per_request,
            "lengths": str(self.lengths),
            "encoding_format": "base64",
            "warmup_s": self.warmup_s,
            "duration_s": self.duration_s,
        }


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 compared, 1 a server failed, 2 bad arguments, 130 interrupted."""
    arguments = _make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as an exception: servers are stopped
    experiment = Experiment(
        clients=tuple(int(part) for part in arguments.clients.split(",")),
        texts_per_request=arguments.texts_per_request,
        lengths=arguments.lengths,
        warmup_s=arguments.warmup,
        duration_s=arguments.duration,
    )
    notebook = Notebook(arguments.results, experiment.describe())
    exit_code = 0
    try:
        recipes = [_recipe(name, arguments) for name in _ORDER if arguments.only in (None, name)]
        compare(experiment, recipes, arguments.rounds, notebook)
    except KeyboardInterrupt:
        exit_code = 128 + signal.SIGINT
    except (ServerFailure, Unreachable) as error:
        print(f"benchmarks.compare: {error}", file=sys.stderr)
        exit_code = 1
    if notebook.runs:
        print(f"\n{render_table(notebook.runs)}")
    return exit_code


def compare(experiment: Experiment, recipes: Sequence[Recipe], num_rounds: int, notebook: Notebook) -> None:
    """Measure each server in each round. Side effects: `notebook` has every run as soon as it has ended.

    Raises ServerFailure or Unreachable when a server gives nothing to measure, KeyboardInterrupt on Ctrl-C.
    """
    for round_number in range(1, num_rounds + 1):
        for recipe in recipes:
            print(f"\n{recipe.name}, round {round_number} of {num_rounds}\n{report.heading()}", flush=True)
            with serving(recipe) as server:
                _measure(experiment.loads(server.url), recipe, server, round_number, notebook)


def _measure(loads: Sequence[Load], recipe: Recipe, server: Server, round_number: int, notebook: Notebook) -> None:
    clock = CpuClock(server.session)

    def tell(_: Load, result: Result) -> None:
        run = Run(recipe.name, round_number, result, clock.lap())
        print("\n".join([report.row(result), *report.notes(result), *disturbances(run)]), flush=True)
        if result.ended_early is None:
            notebook.add(run, recipe.command)

    match uvloop.run(bench.run_loads(loads, tell))[-1].ended_early:
        case None:
            return
        case bench.INTERRUPTED:
            raise KeyboardInterrupt
        case reason:
            raise ServerFailure(f"{recipe.name}: {reason}")


def _recipe(name: str, arguments: argparse.Namespace) -> Recipe:
    return vecd_recipe(shlex.split(arguments.vecd_args)) if name == "vecd" else reference_recipe()


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description="Measure vecd and the reference server in turns.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=5, metavar="N", help="turns of each server")
    add("--clients", default="1,16,64", help="connections; each number is a run of its own")
    add("--duration", type=float, default=8.0, metavar="S", help="measured seconds of a run")
    add("--warmup", type=float, default=3.0, metavar="S", help="seconds before that")
    add("--texts-per-request", type=int, default=1, metavar="N", help="inputs in each request")
    add("--lengths", type=parse_lengths, default="10", help="words in a text: a number, or lognormal:MEAN,SIGMA")
    add("--only", choices=_ORDER, help="measure one of them alone")
    add("--vecd-args", default="", metavar="ARGS", help="more flags for `vecd serve`")
    add("--results", type=Path, default=_RESULTS, metavar="FOLDER", help="where the runs are recorded")
    return parser


if __name__ == "__main__":
    sys.exit(main())
