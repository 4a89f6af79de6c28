"""vecd's engine against other runtimes on one core, and what its workers cost: `make bench-engine`.

Owns the order of the measurements and the pinned process in which engines meet. What is asked of vecd is
`benchmarks.targets`', the engines are measured by `benchmarks.duels`, servers by `benchmarks.memory` and
`benchmarks.lives`. Called as `python -m benchmarks.engine`.

The engines run in a process of their own, on one core and with one thread: what a worker has. torch reads both when it
is imported, so this module never imports it, and that process sets them first. Servers are started from here, because
they would inherit the one core.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.findings import Finding, Journal, render_findings, render_line
from benchmarks.lives import measure_deaths, measure_starts
from benchmarks.memory import measure_memory
from benchmarks.servers import ServerFailure, bundled_model
from benchmarks.targets import CONTESTS

_RESULTS = Path(__file__).parent / "results"
_PARTS = ("engine", "memory", "deaths", "starts")
_GROUPS = {"server": _PARTS[1:]}
ENVIRONMENT = {
    # Of a process that has one core.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # openvino.convert_model reports its use to its makers unless it is told that it runs in CI.
    "CI": "true",
}


class EnginesFailed(Exception):
    """Raised when the engines' process has ended early. It has said why on stderr."""


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 measured (whatever the figures), 1 something failed, 2 bad arguments, 130 interrupted."""
    arguments = _make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as an exception: servers are stopped
    experiment = {"rounds": arguments.rounds, "turn_s": arguments.seconds, "kills": arguments.kills}
    journal = Journal(arguments.results, experiment)
    exit_code = 0
    try:
        for finding in measure(arguments):
            journal.add(finding)
            print(render_line(finding), flush=True)
    except KeyboardInterrupt:
        exit_code = 128 + signal.SIGINT
    except (EnginesFailed, ServerFailure) as error:
        print(f"benchmarks.engine: {error}", file=sys.stderr)
        exit_code = 1
    if journal.findings:
        print(f"\n{render_findings(journal.findings)}")
    return exit_code


def measure(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Everything that is asked for, finding by finding. Raises EnginesFailed or ServerFailure."""
    parts = _GROUPS.get(arguments.only, (arguments.only,)) if arguments.only else _PARTS
    # One folder for what outlives a process of the benchmark, gone at the end. A cache of its own for each part: what
    # one has found out must not be what another measures.
    with tempfile.TemporaryDirectory(prefix="vecd-bench-") as name:
        folders = {part: Path(name) / part for part in _PARTS}
        for folder in folders.values():
            folder.mkdir(mode=0o700)
        if "engine" in parts:
            yield from measure_engines(arguments, folders["engine"])
        if "memory" in parts:
            yield from measure_memory(arguments.dtypes, folders["memory"])
        if "deaths" in parts:
            yield measure_deaths(arguments.kills, folders["deaths"])
        if "starts" in parts:
            yield measure_starts(arguments.rounds, folders["starts"])


def measure_engines(arguments: argparse.Namespace, folder: Path) -> Iterator[Finding]:
    """What the pinned process finds. Side effect: the process is gone when this ends. Raises EnginesFailed."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_pinned, args=(sender, arguments, folder), daemon=True)
    process.start()
    sender.close()  # the process has its own, so that its end is the end of the pipe
    try:
        while True:
            yield receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode != 0:
            raise EnginesFailed(f"the engines' process has ended with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        receiver.close()


def _measure_pinned(sender: Connection, arguments: argparse.Namespace, folder: Path) -> None:
    os.sched_setaffinity(0, {arguments.core})
    os.environ.update(ENVIRONMENT)
    from benchmarks.duels import Duels  # loads torch, which must not be before this

    Duels(Path(bundled_model()), folder, arguments.rounds, arguments.seconds, sender.send).fight(arguments.dtypes)


def _parse_dtypes(value: str) -> Sequence[str]:
    dtypes = value.split(",")
    if unknown := [dtype for dtype in dtypes if dtype not in CONTESTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(CONTESTS)}")
    return dtypes


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description="Measure vecd's engine and other runtimes in turns on one core, and vecd's workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--dtypes", type=_parse_dtypes, default=",".join(CONTESTS), help="number formats, in this order")
    add("--rounds", type=int, default=5, metavar="N", help="turns of each engine, and starts of the server")
    add("--seconds", type=float, default=1.0, metavar="S", help="least length of an engine's turn")
    add("--kills", type=int, default=7, metavar="N", help="deaths of a worker")
    add("--only", choices=[*_PARTS, *_GROUPS], help="measure one part alone; server is all but engine")
    add("--core", type=int, default=max(os.sched_getaffinity(0)), metavar="N", help="where the engines run")
    add("--results", type=Path, default=_RESULTS, metavar="FOLDER", help="where the findings are recorded")
    return parser


if __name__ == "__main__":
    sys.exit(main())
