"""Latency over throughput, drawn: a curve a server, a point a run.

Owns how it looks. Imports matplotlib only when it draws: it is heavy, and an extra. Measures nothing.
"""

import importlib
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vecd.base.programs import are_installed, not_installed

# Source: the palette of M. Okabe and K. Ito for colour-blind readers, without its yellow, which is too pale here.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLE = {
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left", "legend.frameon"), False),
    **dict.fromkeys(("axes.titlesize", "figure.titlesize"), 11),
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}
_LABELS = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 8}
_TITLE_CHARS = 125


class PlotUnavailable(ValueError):
    """Raised when matplotlib is not installed. The message says how to install it."""


class Point(NamedTuple):
    """One run. Without a latency, where nothing succeeded, it is not drawn."""

    throughput_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    label: str = ""
    """The load, written beside the point of a single curve."""


def require_matplotlib() -> None:
    """Raises PlotUnavailable when nothing could be drawn."""
    if not are_installed("matplotlib"):
        raise PlotUnavailable(f"drawing needs matplotlib, which is {not_installed('vecd[plot]')}")


def draw_latency(curves: Mapping[str, Sequence[Point]], path: Path, title: str) -> None:
    """Write a PNG of p50 and p99, in a panel each, over the achieved throughput.

    `curves` are the runs of each server by its name, joined in the order given: the line of an overloaded server may
    lead back to the left. Raises PlotUnavailable without matplotlib, OSError when `path` cannot be written.
    """
    require_matplotlib()
    drawable = {name: [point for point in points if point.p50_ms and point.p99_ms] for name, points in curves.items()}
    matplotlib, ticker = (importlib.import_module(name) for name in ("matplotlib", "matplotlib.ticker"))
    with matplotlib.rc_context({**_STYLE, "axes.prop_cycle": matplotlib.cycler(color=_COLORS, marker=_MARKERS)}):
        # Not pyplot's, which live until they are closed and may need a display.
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(11.5, 4.6), layout="constrained")
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for panel, percentile in zip(panels, ("p50", "p99"), strict=True):
            for name, points in drawable.items():
                latencies_ms = [getattr(point, f"{percentile}_ms") for point in points]
                panel.plot([point.throughput_per_s for point in points], latencies_ms, label=name)
                if len(drawable) == 1:
                    for point, latency_ms in zip(points, latencies_ms, strict=True):
                        panel.annotate(point.label, (point.throughput_per_s, latency_ms), **_LABELS)
            # Logarithmic: under overload latency is a hundred times that of an idle server.
            panel.set(title=percentile, xlabel="requests/s", yscale="log")
            panel.set_xlim(left=0)
            panel.margins(y=0.15)  # for the labels
            panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=20))
            panel.yaxis.set_minor_locator(ticker.NullLocator())
            panel.yaxis.set_major_formatter("{x:,g}")
            panel.tick_params(labelleft=True)
        panels[0].set_ylabel("latency, ms")
        if len(drawable) > 1:
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.suptitle(textwrap.fill(title, width=_TITLE_CHARS), x=0.01, ha="left")
        figure.savefig(path, format="png", dpi=160, facecolor="white")
