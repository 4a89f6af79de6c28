"""What elastic cores, the cache of vectors and a gateway's time are worth, by section: `make bench-cores`.

Owns the order of the sections. The turns are in `benchmarks.alone`, `benchmarks.after_load`, `benchmarks.crowds` and
`benchmarks.gateway_time`; findings are recorded as those of `benchmarks.engine`, and shown on the same page. Called as
`python -m benchmarks.cores`.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.after_load import measure_after_load
from benchmarks.alone import Experiment, measure_busy, measure_single
from benchmarks.checkpoints import BUNDLED, SHAPES, NoSuchModel, model_folder
from benchmarks.crowds import measure_cache, measure_load
from benchmarks.engine import RESULTS, parse_names, record
from benchmarks.findings import Finding, Journal
from benchmarks.gateway_time import measure_gateway
from benchmarks.servers import ServerFailure

_GATEWAY_TURNS = 5
"""In those of one client: the kernel counts processor time in steps of 10 ms."""


def _measure_gateway(experiment: Experiment) -> Iterator[Finding]:
    if experiment.base is None:
        raise ServerFailure("no --base FOLDER names a checkout of the commit to compare with")
    yield measure_gateway(experiment.base, experiment.num_rounds, _GATEWAY_TURNS * experiment.turn_s)


SECTIONS = {
    "single": measure_single,
    "busy": measure_busy,
    "after-load": measure_after_load,
    "load": measure_load,
    "cache": measure_cache,
    "gateway": _measure_gateway,
}


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 measured (whatever the figures), 1 a section failed, 2 bad arguments, 130 interrupted."""
    arguments = _make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as an exception: servers are stopped
    try:
        model = model_folder(arguments.model)
    except (NoSuchModel, ServerFailure, subprocess.CalledProcessError) as error:
        print(f"benchmarks.cores: {error}", file=sys.stderr)
        return 2
    name = arguments.model if arguments.model in (BUNDLED, *SHAPES) else model.name
    journal = Journal(arguments.results, name, {"rounds": arguments.rounds, "turn_s": arguments.seconds})
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="vecd-bench-") as folder:
        experiment = Experiment(
            model=model,
            num_rounds=arguments.rounds,
            turn_s=arguments.seconds,
            flags=arguments.flags.split(),
            folder=Path(folder),
            base=arguments.base and arguments.base.resolve(),
            load_s=60 * arguments.minutes,
        )
        exit_code = record(measure(arguments.sections, experiment, failed), journal, arguments.results)
    return exit_code or int(bool(failed))


def measure(sections: list[str], experiment: Experiment, failed: list[str]) -> Iterator[Finding]:
    """Finding by finding. A section that cannot be measured is said on stderr, and added to `failed`."""
    for section in sections:
        try:
            yield from SECTIONS[section](experiment)
        except (ServerFailure, RuntimeError) as error:
            failed.append(section)
            print(f"benchmarks.cores: {section} is left out: {error}", file=sys.stderr, flush=True)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cores",
        description="Measure elastic cores, the cache of vectors and the gateway's processor time, in turns.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    shapes = ", ".join((BUNDLED, *SHAPES))
    add("--model", default=BUNDLED, metavar="MODEL", help=f"a model's folder, or a shape: {shapes}")
    add(
        "--sections",
        type=lambda value: parse_names(value, SECTIONS),
        default=",".join(SECTIONS),
        help="what is measured",
    )
    add("--rounds", type=int, default=15, metavar="N", help="turns of each contender")
    add("--seconds", type=float, default=0.4, metavar="S", help="least length of one client's turn")
    add("--minutes", type=float, default=10.0, metavar="N", help="length of the load of after-load")
    add(
        "--flags",
        default="--threads-per-worker auto",
        help="flags of the server that is measured against one thread per worker; write --flags='…'",
    )
    add("--base", type=Path, metavar="FOLDER", help="a checkout of the commit that the gateway is measured against")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where the findings are recorded")
    return parser


if __name__ == "__main__":
    sys.exit(main())
