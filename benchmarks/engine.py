"""vecd's engine against other runtimes, with any model, and what a server costs: `make bench-engine`.

Owns the order of the measurements and the pinned process in which engines meet. What is asked of vecd is
`benchmarks.targets`', the engines are measured by `benchmarks.duels`, servers by `benchmarks.clients`,
`benchmarks.memory` and `benchmarks.lives`; `benchmarks.classes` writes docs/benchmarks.md's part. Called as
`python -m benchmarks.engine`.

The engines run in a process of their own, on one core and with one thread: what a worker has. torch reads both when it
is imported, so this module never imports it, and that process sets them first. Servers are started from here, because
they would inherit the one core.
"""

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.checkpoints import BUNDLED, SHAPES, NoSuchModel, model_folder
from benchmarks.classes import read_records, update_page
from benchmarks.clients import measure_clients
from benchmarks.findings import Finding, Journal, render_findings, render_line
from benchmarks.lives import measure_deaths, measure_starts
from benchmarks.memory import measure_memory
from benchmarks.servers import ServerFailure
from benchmarks.targets import CONTESTS
from vecd.workers.machine import this_processor

RESULTS = Path(__file__).parent / "results"
_PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
SECTIONS = ("equal", "mixed", "clients", "starts", "memory", "deaths")
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_CLIENTS_TURNS = 8
"""A turn of 64 clients, in those of an engine: all of them have to be served several times."""
ENVIRONMENT = {
    # Of a process that has one core.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # openvino.convert_model reports its use to its makers unless it is told that it runs in CI.
    "CI": "true",
    # onnxruntime reports its use to its makers unless it is told not to before it is imported.
    "ORT_DISABLE_TELEMETRY": "1",
}


class EnginesFailed(Exception):
    """Raised when the engines' process has ended early. It has said why on stderr."""


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 measured (whatever the figures), 1 something failed, 2 bad arguments, 130 interrupted."""
    arguments = _make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as an exception: servers are stopped
    try:
        model = model_folder(arguments.model)
    except (NoSuchModel, ServerFailure, subprocess.CalledProcessError) as error:
        print(f"benchmarks.engine: {error}", file=sys.stderr)
        return 2
    experiment = {name: vars(arguments)[name] for name in ("rounds", "kills", "clock")}
    experiment["turn_s"] = arguments.seconds
    name = arguments.model if arguments.model in (BUNDLED, *SHAPES) else model.name
    return record(measure(arguments, model), Journal(arguments.results, name, experiment), arguments.results)


def record(findings: Iterable[Finding], journal: Journal, results: Path) -> int:
    """Write each finding down as soon as it is made, and the page when `results` is its folder. Returns the exit
    code."""
    exit_code = 0
    try:
        for finding in findings:
            journal.add(finding)
            print(render_line(finding), flush=True)
    except KeyboardInterrupt:
        exit_code = 128 + signal.SIGINT
    except (EnginesFailed, ServerFailure, RuntimeError) as error:
        print(f"benchmarks.engine: {error}", file=sys.stderr)
        exit_code = 1
    if journal.findings:
        print(f"\n{render_findings(journal.findings)}")
        if results == RESULTS:
            update_page(_PAGE, read_records(RESULTS))
    return exit_code


def measure(arguments: argparse.Namespace, model: Path) -> Iterator[Finding]:
    """Everything that is asked for, finding by finding. Raises EnginesFailed, ServerFailure or RuntimeError."""
    sections = arguments.sections
    exports = _export(model) if {"equal", "mixed", "clients", "starts", "memory"} & set(sections) else []
    export = exports[0] if exports else None
    # One folder for what outlives a process of the benchmark, gone at the end. A cache of its own for each part: what
    # one has found out must not be what another measures.
    with tempfile.TemporaryDirectory(prefix="vecd-bench-") as name:
        folders = {part: Path(name) / part for part in ("engine", *SECTIONS)}
        for folder in folders.values():
            folder.mkdir(mode=0o700)
        if {"equal", "mixed"} & set(sections):
            yield from measure_engines(arguments, model, folders["engine"])
        if "clients" in sections and exports:
            duration_s = _CLIENTS_TURNS * arguments.seconds
            yield measure_clients(model, exports, arguments.rounds, duration_s, folders["clients"])
        if "starts" in sections:
            yield from measure_starts(model, export, arguments.rounds, folders["starts"])
        if "memory" in sections:
            yield from measure_memory(model, export, arguments.dtypes, folders["memory"])
        if "deaths" in sections:
            yield measure_deaths(model, arguments.kills, folders["deaths"])


def _export(model: Path) -> list[Path]:
    """The model's ONNX files, the plain one first; none where it cannot be exported, which is said on stderr."""
    try:
        folder = exported_elsewhere(model)
    except RuntimeError as error:
        print(f"benchmarks.engine: no ONNX Runtime to compare with: {error}", file=sys.stderr)
        return []
    return sorted(folder.glob("*.onnx"), key=lambda file: (file.stem != "sdpa", file.name))


def exported_elsewhere(model: Path) -> Path:
    """`benchmarks.exports.exported`, in a process of its own, which imports torch. Raises RuntimeError."""
    command = [sys.executable, "-m", "benchmarks.exports", str(model)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    return Path(done.stdout.strip().rpartition("\n")[2])


def measure_engines(arguments: argparse.Namespace, model: Path, folder: Path) -> Iterator[Finding]:
    """What the pinned process finds. Side effect: the process is gone when this ends. Raises EnginesFailed."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_pinned, args=(sender, arguments, model, folder), daemon=True)
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


def _measure_pinned(sender: Connection, arguments: argparse.Namespace, model: Path, folder: Path) -> None:
    os.sched_setaffinity(0, {arguments.core})
    os.environ.update(ENVIRONMENT)
    from benchmarks.duels import Duels  # loads torch, which must not be before this

    clock = _CLOCKS[arguments.clock]
    duels = Duels(model, folder, arguments.sections, arguments.rounds, arguments.seconds, sender.send, clock)
    duels.fight(arguments.dtypes)


def parse_names(value: str, known: Collection[str]) -> Sequence[str]:
    names = value.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
    return names


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description="Measure vecd's engine and other runtimes in turns on one core, and vecd's workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    native = ["float32", "bfloat16"] if this_processor().has_bfloat16 else ["float32"]
    shapes = ", ".join((BUNDLED, *SHAPES))
    add("--model", default=BUNDLED, metavar="MODEL", help=f"a model's folder, or a shape: {shapes}")
    add(
        "--sections",
        type=lambda value: parse_names(value, SECTIONS),
        default=",".join(SECTIONS),
        help="what is measured",
    )
    add("--dtypes", type=lambda value: parse_names(value, CONTESTS), default=",".join(native), help="number formats")
    add("--rounds", type=int, default=9, metavar="N", help="turns of each engine, and starts of the server")
    add("--seconds", type=float, default=0.5, metavar="S", help="least length of an engine's turn")
    add("--kills", type=int, default=7, metavar="N", help="deaths of a worker")
    add("--clock", choices=[*_CLOCKS], default="wall", help="of the engines; cpu where other programs run")
    add("--core", type=int, default=max(os.sched_getaffinity(0)), metavar="N", help="where the engines run")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where the findings are recorded")
    return parser


if __name__ == "__main__":
    sys.exit(main())
