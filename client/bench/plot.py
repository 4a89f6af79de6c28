"""Latency over throughput, drawn: a curve a server, a point a run.

Owns how it looks. Imports matplotlib only when it draws: it is heavy, and an extra. Measures nothing. Called by
`vecd.client.bench.command` and the benchmarks.
"""

import importlib
import importlib.util
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from vecd.client.bench.tally import RunResult

# Source: the palette of M. Okabe and K. Ito for colour-blind readers, without its yellow, which is too pale here.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_INK = "#333333"
_HALO = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6}
_DPI = 160
_TITLE_CHARS_PER_INCH = 11
_LEGEND_COLUMNS = 3
_TICKS_A_DECADE = (1, 2, 5)


class PlotUnavailable(Exception):
    """Raised when matplotlib is not installed. The message says how to install it."""


class Point(NamedTuple):
    """One run."""

    throughput_per_s: float
    p50_ms: float
    p99_ms: float
    label: str = ""
    """The load, written beside the point of a single curve."""

    @classmethod
    def of(cls, result: RunResult, label: str = "") -> Self:
        """The point of `result`, over its requests a second. Not drawable where nothing succeeded."""
        latency = result.latency
        return cls(result.requests_per_s, latency.p50_ms, latency.p99_ms, label)

    @property
    def is_drawable(self) -> bool:
        return all(map(math.isfinite, self[:3])) and min(self.p50_ms, self.p99_ms) > 0


def require_matplotlib() -> None:
    """Raises PlotUnavailable when nothing could be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotUnavailable("drawing needs matplotlib: pip install 'vecd[plot]'")


def draw_latency(
    curves: Mapping[str, Sequence[Point]], path: Path, title: str, *, throughput: str = "requests/s"
) -> None:
    """Write a PNG of p50 and p99 over the achieved throughput.

    `curves` are the runs of each server by its name, joined in the order given: the line of an overloaded server may
    lead back to the left. One server has both percentiles in one panel, several have a panel for each and a legend.
    Raises PlotUnavailable without matplotlib, OSError when `path` cannot be written.
    """
    drawable = {name: [point for point in points if point.is_drawable] for name, points in curves.items()}
    figure = _new_figure(width=7.5 if len(drawable) == 1 else 11.5)
    if len(drawable) == 1:
        axes = [figure.add_subplot()]
        _draw_single(axes[0], *drawable.values())
    else:
        axes = list(figure.subplots(1, 2, sharex=True, sharey=True))
        columns = min(len(drawable), _LEGEND_COLUMNS) or 1
        for panel, percentile in zip(axes, ("p50", "p99"), strict=True):
            _draw_panel(panel, drawable, percentile)
        figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=columns)
    for panel in axes:
        _dress(panel, drawable, throughput)
    axes[0].set_ylabel("latency, ms")
    title = textwrap.fill(title, width=round(figure.get_figwidth() * _TITLE_CHARS_PER_INCH))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=_INK)
    figure.savefig(path, format="png", dpi=_DPI, facecolor="white")


def _new_figure(width: float) -> Any:
    """Drawn by Agg, without a display and without pyplot's figures that live until they are closed."""
    require_matplotlib()
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(width, 4.6), layout="constrained")
    importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


def _draw_single(panel: Any, points: Sequence[Point]) -> None:
    _draw_curve(panel, points, "p99", "p99_ms", 1)
    _draw_curve(panel, points, "p50", "p50_ms", 0)
    for point in points:
        place = (point.throughput_per_s, point.p99_ms)
        above = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center"}
        panel.annotate(point.label, place, **above, fontsize=8, color=_INK, bbox=_HALO)
    panel.legend(frameon=False, loc="upper left")


def _draw_panel(panel: Any, curves: Mapping[str, Sequence[Point]], percentile: str) -> None:
    for index, (name, points) in enumerate(curves.items()):
        _draw_curve(panel, points, name, f"{percentile}_ms", index)
    panel.set_title(percentile, fontsize=11, color=_INK)


def _draw_curve(panel: Any, points: Sequence[Point], label: str, latency: str, index: int) -> None:
    """`latency`: the field of `Point`; `index` chooses colour and marker."""
    panel.plot(
        [point.throughput_per_s for point in points],
        [getattr(point, latency) for point in points],
        color=_COLORS[index % len(_COLORS)],
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=5,
        linewidth=1.8,
        label=label,
    )


def _dress(panel: Any, curves: Mapping[str, Sequence[Point]], throughput: str) -> None:
    """Axes, ticks and grid. Latency is logarithmic: under overload it is a hundred times that of an idle server."""
    ticker = importlib.import_module("matplotlib.ticker")
    points = [point for of_server in curves.values() for point in of_server]
    panel.set_xlabel(throughput)
    panel.set_xlim(0, 1.06 * max((point.throughput_per_s for point in points), default=1.0))
    panel.set_yscale("log")
    lowest = min((point.p50_ms for point in points), default=1.0)
    highest = max((point.p99_ms for point in points), default=10.0)
    panel.set_ylim(lowest / 1.5, highest * 2)  # room for labels above
    panel.yaxis.set_major_locator(ticker.LogLocator(subs=_TICKS_A_DECADE, numticks=20))
    panel.yaxis.set_minor_locator(ticker.NullLocator())
    panel.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.tick_params(labelleft=True, colors=_INK, length=0)
    panel.grid(color="#DDDDDD", linewidth=0.7)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
