"""Latency over throughput, drawn: a curve a server, a point a run.

Owns how it looks. Imports matplotlib only when it draws: it is heavy, and an extra. Measures nothing.
"""

import importlib
import importlib.util
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vecd.base.programs import not_installed

# Source: the palette of M. Okabe and K. Ito for colour-blind readers, without its yellow, which is too pale here.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_INK = "#333333"
_STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left", "legend.frameon"), False),
    **dict.fromkeys(("axes.titlesize", "figure.titlesize"), 11),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}
_HALO = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}
_DPI = 160
_TITLE_CHARS_PER_INCH = 11
_LEGEND_COLUMNS = 3
_TICKS_A_DECADE = (1, 2, 5)


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
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotUnavailable(f"drawing needs matplotlib, which is {not_installed('vecd[plot]')}")


def draw_latency(curves: Mapping[str, Sequence[Point]], path: Path, title: str) -> None:
    """Write a PNG of p50 and p99 over the achieved throughput.

    `curves` are the runs of each server by its name, joined in the order given: the line of an overloaded server may
    lead back to the left. One server has both percentiles in one panel, several have a panel for each and a legend.
    Raises PlotUnavailable without matplotlib, OSError when `path` cannot be written.
    """
    require_matplotlib()
    drawable = {name: [point for point in points if point.p50_ms and point.p99_ms] for name, points in curves.items()}
    points = [point for of_server in drawable.values() for point in of_server]
    is_single = len(drawable) == 1
    matplotlib = importlib.import_module("matplotlib")
    with matplotlib.rc_context({**_STYLE, "axes.prop_cycle": matplotlib.cycler(color=_COLORS, marker=_MARKERS)}):
        # Not pyplot's, which live until they are closed and may need a display.
        new_figure = importlib.import_module("matplotlib.figure").Figure
        figure = new_figure(figsize=(7.5 if is_single else 11.5, 4.6), layout="constrained")
        panels = figure.subplots(1, 1 if is_single else 2, sharex=True, sharey=True, squeeze=False)[0]
        for panel, shown in zip(panels, (("p50", "p99"),) if is_single else (("p50",), ("p99",)), strict=True):
            for percentile in shown:
                for name, of_server in drawable.items():
                    latencies = [getattr(point, f"{percentile}_ms") for point in of_server]
                    throughputs = [point.throughput_per_s for point in of_server]
                    panel.plot(throughputs, latencies, label=percentile if is_single else name)
            _scale(panel, points)
            panel.set_xlabel("requests/s")
            panel.set_title("" if is_single else shown[0])
        if is_single:
            _label_points(panels[0], points)
            panels[0].legend(loc="upper left")
        else:
            columns = min(len(drawable), _LEGEND_COLUMNS) or 1
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns)
        panels[0].set_ylabel("latency, ms")
        title = textwrap.fill(title, width=round(figure.get_figwidth() * _TITLE_CHARS_PER_INCH))
        figure.suptitle(title, x=0.01, ha="left")
        figure.savefig(path, format="png", dpi=_DPI, facecolor="white")


def _label_points(panel: Any, points: Sequence[Point]) -> None:
    above = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 8, "bbox": _HALO}
    for point in points:
        panel.annotate(point.label, (point.throughput_per_s, point.p99_ms), **above)


def _scale(panel: Any, points: Sequence[Point]) -> None:
    """Latency is logarithmic: under overload it is a hundred times that of an idle server."""
    ticker = importlib.import_module("matplotlib.ticker")
    panel.set_xlim(0, 1.06 * max((point.throughput_per_s for point in points), default=1.0))
    panel.set_yscale("log")
    lowest = min((point.p50_ms or 0.0 for point in points), default=1.0)
    highest = max((point.p99_ms or 0.0 for point in points), default=10.0)
    panel.set_ylim(lowest / 1.5, highest * 2)  # room for labels above
    panel.yaxis.set_major_locator(ticker.LogLocator(subs=_TICKS_A_DECADE, numticks=20))
    panel.yaxis.set_minor_locator(ticker.NullLocator())
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.tick_params(labelleft=True)
