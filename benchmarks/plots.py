"""The plots of `docs/benchmarks.md`.

Owns which points are drawn; how they look is `vecd.client.bench.plot`'s. Called by `benchmarks.compare`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.figures import runs_of, title
from benchmarks.loads import WORKLOADS
from benchmarks.notebook import Session
from vecd.client.bench.plot import PlotUnavailable, Point, draw_latency

CURVE_FILE = "latency.png"


def draw_curves(session: Session, folder: Path) -> str:
    """Write `latency.png` into `folder`. Returns why there is none, or ""."""
    curves = {title(session, measured.server): curve(session, measured.server) for measured in session.measured}
    drawable = {name: points for name, points in curves.items() if points}
    if not drawable:
        return "the curve was not measured"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        draw_latency(drawable, folder / CURVE_FILE, "One short text per request, open loop")
    except PlotUnavailable as error:
        return str(error)
    return ""


def curve(session: Session, server: str) -> Sequence[Point]:
    """A point for each share of the server's capacity, from the least."""
    points = []
    for workload in WORKLOADS:
        if workload.capacity_share is not None:
            points += [_point(run.figures) for run in runs_of(session, server, workload.name)]
    return points


def _point(figures: Mapping[str, float | None]) -> Point:
    return Point(figures["requests_per_s"] or 0.0, figures["p50_ms"], figures["p99_ms"])
