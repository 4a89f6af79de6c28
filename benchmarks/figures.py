"""Medians and ratios of what a session has measured.

Owns how rounds become one figure. Reads no file and draws nothing. Called by `benchmarks.goals`, `.page` and `.plots`.

A figure is the median of the rounds. A ratio is taken within each round, and is the median of these: a slow minute of
the machine cancels out of it.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from benchmarks.notebook import Offline, Run, Session

DRAIN_MS = 10_000.0
"""So long after its end a run waits for answers (`vecd.client.bench.run`)."""

OfRounds: TypeAlias = Mapping[int, float]
"""Round → figure. Rounds in which there is none are missing."""


def of_rounds(session: Session, server: str, workload: str, name: str) -> OfRounds:
    """`name`: one of a run's figures (`vecd.client.bench.report.fields`), or a field of the run ("memory_mb")."""
    found = {}
    for run in runs_of(session, server, workload):
        value = run.figures[name] if name in run.figures else getattr(run, name)
        if value is not None:
            found[run.round] = float(value)
    return found


def runs_of(session: Session, server: str, workload: str) -> list[Run]:
    return [run for run in session.runs if (run.server, run.workload) == (server, workload)]


def offline_of_rounds(session: Session, dtype: str, work: str, name: str) -> OfRounds:
    return {one.round: float(getattr(one, name)) for one in offline_of(session, dtype, work)}


def offline_of(session: Session, dtype: str, work: str) -> list[Offline]:
    return [one for one in session.offline if (one.dtype, one.work) == (dtype, work)]


def dtype_of(session: Session, server: str) -> str | None:
    """The number format in which vecd's workers say that they run; None for peers."""
    for run in session.runs:
        if run.server == server and run.info.get("workers"):
            return str(run.info["workers"][0].get("dtype"))
    return None


def title(session: Session, server: str) -> str:
    """A server's name, for vecd with the number format that its workers have chosen."""
    dtype = dtype_of(session, server)
    return f"vecd {dtype}" if dtype else server


def median(figures: OfRounds) -> float | None:
    return statistics.median(figures.values()) if figures else None


def spread(figures: OfRounds) -> tuple[float, float, float] | None:
    """Median, smallest, largest."""
    values = figures.values()
    return (statistics.median(values), min(values), max(values)) if values else None


def ratio(ours: OfRounds, theirs: OfRounds) -> float | None:
    """Over the rounds that both have; None without one."""
    ratios = [ours[number] / theirs[number] for number in ours if theirs.get(number)]
    return statistics.median(ratios) if ratios else None


def latency_ms(session: Session, server: str, workload: str, percent: int) -> tuple[float | None, bool]:
    """p50 or p99, and whether it is only known to be at least that.

    The generator does not wait forever: where more requests than the percentile leaves out got no answer, the
    percentile is among those, and they had waited at least `DRAIN_MS`.
    """
    figures, is_bound = {}, False
    for run in runs_of(session, server, workload):
        if _gave_up_share(run) > 1 - percent / 100:
            figures[run.round], is_bound = DRAIN_MS, True
        elif (value := run.figures[f"p{percent}_ms"]) is not None:
            figures[run.round] = value
    return median(figures), is_bound


def num_errors(runs: Iterable[Run]) -> Counter[str]:
    """By kind."""
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(run.figures["errors"])
    return counts


def _gave_up_share(run: Run) -> float:
    gave_up = sum(run.figures["errors"].get(kind, 0) for kind in ("unanswered", "timeout"))
    return gave_up / run.figures["offered"] if run.figures["offered"] else 0.0


def readable(value: float) -> str:
    """Three or four significant digits, and never 1.2e+04."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.4g}"
