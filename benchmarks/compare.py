"""vecd and other servers under the same load on the same machine: `make bench`.

Owns the order of the measurements and the command line. What is measured is `benchmarks.loads`', of whom
`benchmarks.recipes`', the load generator's own part `client`'s; what comes out of it goes to `benchmarks.notebook`, and
from there to `docs/benchmarks.md`. Called as `python -m benchmarks.compare`.

The servers take turns, round by round, one at a time, so that whatever else the machine does meets all of them. In its
turn a server is started once and does all workloads. A server that is not here, fails, or embeds something else is left
out, and the page says why. The load generator runs on the same machine and takes its CPU from all alike; how much is
recorded with each run.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.classes import read_records, render
from benchmarks.loads import GROUPS, Plan
from benchmarks.machine import describe_machine
from benchmarks.notebook import Notebook, Session, read_sessions
from benchmarks.page import render_page
from benchmarks.plots import draw_curves
from benchmarks.recipes import SERVERS, Kitchen
from benchmarks.rounds import Comparison
from benchmarks.servers import ServerFailure

_ROOT = Path(__file__).parents[1]
_RESULTS = Path(__file__).parent / "results"
_PAGE = _ROOT / "docs" / "benchmarks.md"
_QUICK_FOLDER = _ROOT / ".bench"
_DURATION_S, _QUICK_S = 4.0, 1.0
_OURS = {"vecd", "vecd-float32"}
_EXIT_INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 compared (whatever the figures, whoever was left out), 1 vecd itself failed, 2 bad arguments,
    130 interrupted."""
    arguments = _make_parser().parse_args(argv)
    page = arguments.page or (_QUICK_FOLDER / _PAGE.name if arguments.quick else _PAGE)
    results = arguments.results or (_QUICK_FOLDER / _RESULTS.name if arguments.quick else _RESULTS)
    if arguments.page_from is not None:
        write_page(read_sessions(arguments.page_from)[-1], arguments.page_from.name, page)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as an exception: servers are stopped
    plan = _make_plan(arguments)
    print(
        f"{len(plan.servers)} servers, {plan.num_rounds} rounds: about {plan.estimate_s() / 60:.0f} minutes", flush=True
    )
    notebook = Notebook(results, _describe_command(argv), asdict(plan), describe_machine())
    kitchen = Kitchen(vecd_arguments=shlex.split(arguments.vecd_args), gguf=arguments.gguf)
    exit_code = 0
    try:
        Comparison(plan, kitchen, notebook).run()
        exit_code = 1 if {piece.server for piece in notebook.session.skipped} & _OURS else 0
    except KeyboardInterrupt:
        exit_code = _EXIT_INTERRUPTED
    except ServerFailure as error:
        print(f"benchmarks.compare: {error}", file=sys.stderr)
        exit_code = 1
    if notebook.session.runs:
        write_page(notebook.session, notebook.file.name, page)
    return exit_code


def write_page(session: Session, results_file: str, page: Path) -> None:
    """Side effects: `page` and the folder of the same name beside it are written."""
    why_no_plot = draw_curves(session, page.with_suffix(""))
    page.write_text(render_page(session, results_file, why_no_plot, render(read_records(_RESULTS))))
    print(f"wrote {page}")


def _make_plan(arguments: argparse.Namespace) -> Plan:
    is_quick = arguments.quick
    return Plan(
        servers=arguments.only,
        groups=arguments.workloads,
        num_rounds=arguments.rounds or (1 if is_quick else 5),
        duration_s=arguments.duration or (_QUICK_S if is_quick else _DURATION_S),
        is_quick=is_quick,
    )


def _describe_command(argv: Sequence[str] | None) -> str:
    """As a reader can repeat it; names without folders."""
    words = sys.argv[1:] if argv is None else argv
    return shlex.join(
        ["python", "-m", "benchmarks.compare", *(Path(word).name if "/" in word else word for word in words)]
    )


def _names(value: str, known: Sequence[str]) -> list[str]:
    names = value.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
    return [name for name in known if name in names]  # in their own order


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description="Measure vecd and other servers in turns, and write docs/benchmarks.md.",
    )
    add = parser.add_argument
    servers, groups = tuple(SERVERS), GROUPS
    add(
        "--only",
        type=lambda value: _names(value, servers),
        default=",".join(servers),
        help=f"these of {', '.join(servers)}",
    )
    add(
        "--workloads",
        type=lambda value: _names(value, groups),
        default=",".join(groups),
        help=f"these of {', '.join(groups)}",
    )
    add("--rounds", type=int, metavar="N", help="turns of each server (default: 5, with --quick 1)")
    add(
        "--duration",
        type=float,
        metavar="S",
        help=f"measured seconds; some workloads take a multiple (default: {_DURATION_S:g}, with --quick {_QUICK_S:g})",
    )
    add("--quick", action="store_true", help="one short round, to see that everything works")
    add("--vecd-args", default="", metavar="ARGS", help="more flags for `vecd serve`")
    add("--gguf", type=Path, metavar="FILE", help="all-MiniLM-L6-v2 for llama.cpp's server")
    add(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="where the runs are recorded (default: benchmarks/results/, with --quick .bench/results/)",
    )
    add(
        "--page",
        type=Path,
        metavar="FILE",
        help="where they are summed up (default: docs/benchmarks.md, with --quick .bench/benchmarks.md)",
    )
    add("--page-from", type=Path, metavar="FILE", help="measure nothing: write the page of this file's last session")
    return parser


if __name__ == "__main__":
    sys.exit(main())
