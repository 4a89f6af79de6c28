"""A session as `docs/benchmarks.md`.

Owns the page's words and tables. Measures nothing and writes no file. Called by `benchmarks.compare`.
"""

import statistics
from collections.abc import Iterable, Sequence

from benchmarks import classes, tables
from benchmarks.figures import num_errors, readable, runs_of, title
from benchmarks.goals import GOALS
from benchmarks.loads import TITLES
from benchmarks.notebook import DISTURBING_CORES, Offline, Run, Session, Skipped
from benchmarks.plots import CURVE_FILE

_BUSY_GENERATOR = 0.7
"""Of a core, as in `vecd.client.bench.report`: from here on the generator itself may be what is measured."""


def render_page(session: Session, results_file: str, why_no_plot: str, engine: str = "") -> str:
    """The whole page.

    `results_file`: where the session's runs are; `why_no_plot`: "" when the plot has been drawn; `engine`: what
    `benchmarks.classes` says.
    """
    parts = [
        _head(session, results_file),
        _section("Targets", _targets(session)),
        _section("One short text per request", tables.short(session)),
        _section("Mixed lengths", tables.mixed(session)),
        _section("A short text while others send bulk", tables.interactive(session)),
        _section("Latency over throughput", _curve(session, why_no_plot)),
        _section("From 64 to 640 clients", tables.growth(session)),
        _section("vecd's engine without a server", tables.offline(session)),
        _section("The servers", tables.servers(session)),
        _section(classes.TITLE, engine),
        _section("Notes on the figures", "\n".join(tables.paragraph(f"- {remark}") for remark in remarks(session))),
    ]
    return "\n\n".join(parts) + "\n"


def _head(session: Session, results_file: str) -> str:
    machine, plan = session.machine, session.plan
    cpu = f"{machine['cpu']} ({machine['class']})" if "class" in machine else machine["cpu"]
    rounds = f"{plan['num_rounds']} round{'s' * (plan['num_rounds'] > 1)}"
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if version)
    return f"""# Benchmarks

`make bench` writes this page and overwrites it; the section on vecd's engine beside other runtimes
is from `make bench-engine`. To change the page, change `benchmarks/`.

The page compares vecd with other servers on one machine. The servers run in turns, one at a time.
Each has the same model (all-MiniLM-L6-v2), the same cores and the same requests over HTTP, with
responses in base64. Before a server is measured, its vectors are compared with vecd's in float32:
the cosine must be at least 0.999. Each figure is the median of the rounds (smallest–largest), and
each ratio is taken within a round. The load generator, `vecd bench`, runs on the same cores as the
server.

| | |
| --- | --- |
| measured | {session.started_at}, {rounds}, {plan["duration_s"]:g} s a run of short texts |
| command | `{session.command}` |
| processor | {cpu}, {machine["cores"]} cores, {machine["memory_gib"]} GiB, Linux {machine["kernel"]} |
| vecd | commit {machine["commit"]} (+: with changes), Python {machine["python"]} |
| packages | {packages} |
| every run | [`{results_file}`](../benchmarks/results/{results_file}), session {session.started_at} |"""


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body or 'Not measured.'}"


def _targets(session: Session) -> str:
    lines = []
    for goal in GOALS:
        outcome = goal.look(session)
        measured = "–" if outcome.value is None else f"{readable(outcome.value)} {goal.unit}".strip()
        target = "–" if outcome.value is None else str(outcome.target)
        verdict = {True: "met", False: "**missed**", None: "not measured"}[outcome.is_met]
        server = title(session, goal.server)
        lines.append([server, goal.what, measured, target, verdict, outcome.explanation or "–"])
    return tables.table(["server", "what", "measured", "target", "", "figures"], lines)


def _curve(session: Session, why_no_plot: str) -> str:
    if not (body := tables.curve(session)):
        return ""
    plot = f"No plot: {why_no_plot}." if why_no_plot else f"![p50 and p99 over requests/s](benchmarks/{CURVE_FILE})"
    return f"{plot}\n\n{body}"


# --- remarks ----------------------------------------------------------------------------------------------


def remarks(session: Session) -> list[str]:
    """What makes the figures less than they look."""
    return [
        *_plan_remarks(session),
        *_skipped(session.skipped),
        _disturbances(session),
        *_errors(session),
        *_busy_generator(session),
    ]


def _plan_remarks(session: Session) -> list[str]:
    if not session.plan["is_quick"]:
        return []
    return ["This was a quick run (`--quick`) of one short round. Its figures only show that everything runs."]


def _skipped(skipped: Iterable[Skipped]) -> list[str]:
    lines = []
    for piece in skipped:
        where = f" in {TITLES.get(piece.workload, piece.workload)}" if piece.workload else ""
        when = ""
        if piece.round:
            when = f" from round {piece.round} on" if piece.is_out else f" in the rest of round {piece.round}"
        lines.append(f"{piece.server} was not measured{where}{when}: {piece.reason}.")
    return list(dict.fromkeys(lines))


def _disturbances(session: Session) -> str:
    all_runs: list[Run | Offline] = [*session.runs, *session.offline]
    disturbed = [run for run in all_runs if run.is_disturbed]
    remark = f"Other programs used over {DISTURBING_CORES:g} cores in {len(disturbed)} of {len(all_runs)} runs"
    if not disturbed:
        return f"{remark}."
    return f"{remark}, with a median of {statistics.median(run.others_cores for run in disturbed):.2g}."


def _errors(session: Session) -> list[str]:
    """A line for each server and workload with errors, all rounds together."""
    lines = []
    for server, workload in sorted({(run.server, run.workload) for run in session.runs}):
        runs = runs_of(session, server, workload)
        if counts := num_errors(runs):
            offered = sum(run.figures["offered"] for run in runs)
            listed = ", ".join(f"{count:,} × {kind}" for kind, count in counts.items())
            lines.append(
                f"{title(session, server)}, {TITLES.get(workload, workload)}: {listed}, of {offered:,} requests."
            )
    return lines


def _busy_generator(session: Session) -> list[str]:
    busy = [run for run in session.runs if run.figures["cpu_share"] > _BUSY_GENERATOR]
    names: Sequence[str] = sorted({f"{run.server} {run.workload}" for run in busy})
    return [f"The load generator itself was busy, so the server may be faster: {', '.join(names)}."] if names else []
