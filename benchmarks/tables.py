"""The tables of `docs/benchmarks.md`: a line for each server that was measured.

Owns columns and number formats. Each function returns Markdown, or "" when nothing of it was measured. Called by
`benchmarks.page`.
"""

import textwrap
from collections.abc import Callable, Sequence

from benchmarks.figures import (
    OfRounds,
    latency_ms,
    median,
    num_errors,
    of_rounds,
    offline_of_rounds,
    ratio,
    readable,
    runs_of,
    spread,
    title,
)
from benchmarks.goals import FLOAT32
from benchmarks.loads import TOKENS_PER_TEXT, WORKLOADS
from benchmarks.notebook import Session

Row = Sequence[str]
_SHORT_CLIENTS = (1, 16, 64, 256)
_WORKS = {
    "short": "short, as with 256 clients",
    "mixed": "mixed lengths",
    "single": "one short text at a time, one core",
}


def short(session: Session) -> str:
    columns = ["server", *(f"{clients} client{'s' * (clients > 1)}" for clients in _SHORT_CLIENTS)]

    def row(of: Callable[[str], str]) -> list[str]:
        return [of(f"short-{clients}") for clients in _SHORT_CLIENTS]

    rates = _lines(
        session, lambda server: row(lambda name: spread_cell(of_rounds(session, server, name, "requests_per_s")))
    )
    latencies = _lines(session, lambda server: row(lambda name: _latency(session, server, name)))
    if not rates:
        return ""
    return "\n\n".join(
        [
            f"Each text has ten words, {TOKENS_PER_TEXT['short']:g} tokens on average. The loop is closed. Requests/s:",
            table(columns, rates),
            "p50 / p99, ms:",
            table(columns, latencies),
        ]
    )


def mixed(session: Session) -> str:
    reference = of_rounds(session, FLOAT32, "mixed", "texts_per_s")

    def row(server: str) -> list[str]:
        texts = of_rounds(session, server, "mixed", "texts_per_s")
        tokens = {number: rate * TOKENS_PER_TEXT["mixed"] for number, rate in texts.items()}
        latency = _latency(session, server, "mixed")
        return [spread_cell(texts), cell(median(tokens)), latency, cell(ratio(reference, texts), "×")]

    lines = _lines(session, row)
    intro = (
        "The lengths are log-normal, with 100 tokens on average (sigma 0.8, at most 256). 32 clients send 8 texts per "
        "request in a closed loop. Not every server counts tokens, so tokens/s are texts/s times the average length."
    )
    columns = ["server", "texts/s", "tokens/s", "p50 / p99, ms", "vecd float32 ÷ this"]
    return f"{paragraph(intro)}\n\n{table(columns, lines)}" if lines else ""


def interactive(session: Session) -> str:
    def row(server: str) -> list[str]:
        bulk = {
            run.round: run.figures["bulk"]["requests"]
            for run in runs_of(session, server, "interactive-bulk")
            if run.figures["bulk"]
        }
        both = [_latency(session, server, name) for name in ("interactive", "interactive-bulk")]
        return [*both, _answered(session, server), cell(median(bulk))]

    lines = _lines(session, row)
    intro = (
        "20 requests/s of one short text arrive at random moments (open loop). They first run alone, and then while "
        "two clients send 512 texts of 128 tokens each without pause. “>” marks a lower bound: too many requests had "
        "no response 10 s after the end of the run. “Bulk responses” counts the bulk requests of 512 texts that were "
        "completed within the run."
    )
    columns = ["server", "alone: p50 / p99, ms", "under bulk: p50 / p99, ms", "completed", "bulk responses"]
    return f"{paragraph(intro)}\n\n{table(columns, lines)}" if lines else ""


def curve(session: Session) -> str:
    shares = [workload for workload in WORKLOADS if workload.capacity_share is not None]

    def row(server: str) -> list[str]:
        return [_curve_cell(session, server, workload.name) for workload in shares]

    lines = _lines(session, row)
    intro = (
        "Requests with one short text arrive at random moments (open loop). The columns are shares of the rate that "
        "the same server has with 256 clients. Each cell has completed requests/s: p50 / p99, ms, from one run."
    )
    columns = ["server", *(f"{one.capacity_share:g} ×" for one in shares)]
    return f"{paragraph(intro)}\n\n{table(columns, lines)}" if lines else ""


def growth(session: Session) -> str:
    def row(server: str) -> list[str]:
        before, after = (of_rounds(session, server, f"short-{clients}", "requests_per_s") for clients in (64, 640))
        if not after:
            return ["–"] * 6
        small, large = (of_rounds(session, server, f"short-{clients}", "memory_mb") for clients in (64, 640))
        grown = {number: large[number] - small[number] for number in large if number in small}
        errors = num_errors(runs_of(session, server, "short-640")).total()
        rates = [cell(median(before)), cell(median(after)), cell(ratio(after, before))]
        return [*rates, f"{errors}", cell(median(small)), cell(median(grown))]

    lines = _lines(session, row)
    intro = (
        "Each request has one short text, and the loop is closed. Memory covers all processes of the server, with "
        "shared pages counted once, 2 s after the run (with `--quick` at once). A run with 256 clients came before "
        "both, so that no batch size was new."
    )
    columns = ["server", "64: req/s", "640: req/s", "ratio", "errors", "memory at 64, MB", "after 640 more, MB"]
    return f"{paragraph(intro)}\n\n{table(columns, lines)}" if lines else ""


def offline(session: Session) -> str:
    if not session.offline:
        return ""
    formats = dict.fromkeys(one.dtype for one in session.offline)
    lines = [[dtype, name, *_offline_cells(session, dtype, work)] for dtype in formats for work, name in _WORKS.items()]
    intro = (
        "One process runs on each core, all at once. The batches have the same number of texts as the server's own. "
        "Rates are the sums of all processes."
    )
    columns = ["number format", "texts", "texts per batch", "texts/s", "tokens/s", "batch p50, ms"]
    return f"{paragraph(intro)}\n\n{table(columns, lines)}"


def _offline_cells(session: Session, dtype: str, work: str) -> list[str]:
    figures = ("texts_per_batch", "texts_per_s", "tokens_per_s", "p50_ms")
    return [cell(median(offline_of_rounds(session, dtype, work, figure))) for figure in figures]


def servers(session: Session) -> str:
    lines = [
        [
            title(session, one.server),
            one.version or "–",
            one.remark or "–",
            f"`{_command(one.command, one.environment)}`",
        ]
        for one in session.measured
    ]
    return table(["server", "version", "what it is", "command"], lines) if lines else ""


# --- cells ------------------------------------------------------------------------------------------------


def table(columns: Row, lines: Sequence[Row]) -> str:
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def paragraph(text: str) -> str:
    """`text` in lines of at most 100 characters; the further lines of a list item are indented."""
    indent = "  " * text.startswith("- ")
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def cell(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{readable(value)}{unit}"


def spread_cell(figures: OfRounds) -> str:
    if (found := spread(figures)) is None:
        return "–"
    middle, least, most = map(readable, found)
    return middle if len(figures) == 1 else f"{middle} ({least}–{most})"


def _lines(session: Session, row: Callable[[str], list[str]]) -> list[list[str]]:
    """A line for each server that has a figure in it."""
    lines = [[title(session, one.server), *row(one.server)] for one in session.measured]
    return [line for line in lines if any(set(cell) & set("0123456789") for cell in line[1:])]


def _latency(session: Session, server: str, workload: str) -> str:
    cells = []
    for percent in (50, 99):
        value, is_bound = latency_ms(session, server, workload, percent)
        cells.append("–" if value is None else f"{'> ' * is_bound}{readable(value)}")
    return " / ".join(cells)


def _answered(session: Session, server: str) -> str:
    runs = runs_of(session, server, "interactive-bulk")
    offered = sum(run.figures["offered"] for run in runs)
    return f"{1 - num_errors(runs).total() / offered:.0%}" if offered else "–"


def _curve_cell(session: Session, server: str, workload: str) -> str:
    rate = median(of_rounds(session, server, workload, "requests_per_s"))
    return "–" if rate is None else f"{readable(rate)}: {_latency(session, server, workload)}"


def _command(command: str, environment: dict[str, str]) -> str:
    return " ".join([*(f"{name}={value}" for name, value in environment.items()), command])
