"""How a picture of `vecd top` looks in a given number of columns and lines.

Owns what is shown where, what a narrow or low terminal does without, and how a figure is written, by the unit in its
name. Needs rich, which is an extra. Figures are those of `vecd.client.top.figures`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from vecd.client.top.figures import Figures

NOTHING = "–"
"""For a figure that is not known."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_LABEL_COLUMNS = 10
_BAR_COLUMNS = 10
_ANY_WIDTH = 10_000
_STATE_STYLES = {
    "ready": "green",
    **dict.fromkeys(("starting", "loading", "draining"), "yellow"),
    **dict.fromkeys(("stuck", "down", "failed"), "red"),
}
_FAULT_WORDS = {
    "refused": "refused",
    "expired": "past their deadline",
    "retried": "sequences retried",
    "stuck": "workers stuck",
    "poisoned": "poisonous inputs",
}


_MOST_IMPORTANT_FIRST = (
    "title", "requests", "queue", "errors", "models", "workers", "latency", "rates", "batches", "gateways", "levels",
    "keys", "blank",
)  # fmt: skip
"""A low terminal does without the last lines of this order. Each line of a part stands one place behind the one before,
so that tables share what there is."""
_LINES = (
    ("batches", "batches", "{per_s}/s · fill {mean_fill} · padding {padding_share} · {mean_tokens} "
     "tokens, {mean_sequences} sequences each"),
    ("arena", "arena", "{rows_in_use} of {rows} rows in use"),
    ("cache", "vector_cache", "{hit_share} found · {bytes} of {max_bytes} in use"),
    ("memory", "", "{memory_bytes} in {num_processes} processes, which take {cpu_cores} cores"),
)  # fmt: skip
"""Label, the figures' part, and what is said of it."""
_STAGE_COLUMNS = {"stage": "stage", "p50": "p50_s", "p90": "p90_s", "p99": "p99_s"}
_USAGE = {"memory": "memory_bytes", "CPU": "cpu_share"}
_TABLES = {
    "models": {
        "model": "model", "state": "state", "tokens/s": "tokens_per_s", "waiting": "queued_tokens",
        "requests": "requests", "ready": "workers", "workers": "num_workers", "memory": "memory_bytes",
        "loads": "loads", "failed": "failed_loads", "kind": "kind",
    },
    "workers": {
        "worker": "worker", "state": "state", "busy": "busy_share", "tokens/s": "tokens_per_s",
        "restarts": "num_restarts", "batches/s": "batches_per_s", **_USAGE, "pid": "pid",
    },
    "gateways": {
        "gateway": "gateway", "answers/s": "answered_per_s", "in hand": "requests", "connections": "connections",
        **_USAGE, "up": "uptime_s", "pid": "pid",
    },
}  # fmt: skip
"""By the figures' part, the figure of each column by its title, from the most important one on."""


@dataclass(slots=True, kw_only=True)
class Scene:
    """All that one picture shows. A rich renderable, of at most as many lines and columns as it is given."""

    target: str
    interval_s: float
    figures: Figures | None = None
    """None before the first answer."""
    rates: Sequence[tuple[float, float, float]] = ()
    """Past ones: requests, inputs and tokens a second, oldest first."""
    trouble: str | None = None
    """Why there is no newer answer."""
    is_paused: bool = False
    has_keys: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [
            (_MOST_IMPORTANT_FIRST.index(name) + place, line)
            for name, content in self._parts(options.max_width)
            for place, line in enumerate(_lines_of(content, console, options))
        ]
        by_rank = sorted(range(len(lines)), key=lambda index: lines[index][0])
        for index in sorted(by_rank[: options.height]):
            yield from lines[index][1]
            yield Segment.line()

    def _parts(self, width: int) -> Iterator[tuple[str, RenderableType]]:
        """Each with its name in `_MOST_IMPORTANT_FIRST`."""
        figures = self.figures
        title = f"vecd {figures['version']}" if figures is not None else "vecd top"
        yield "title", _line((title, "bold"), f"  {_describe_model(figures)}" if figures is not None else "")
        uptime = f"  up {written('uptime_s', figures['uptime_s'])}" if figures is not None else ""
        paused = "  paused" if self.is_paused else ""
        every = f"every {self.interval_s:g} s{uptime}"
        yield "title", _line((every, "dim"), (paused, "bold yellow"), (f"  {self.target}", "cyan"))
        if self.trouble is not None:
            yield "title", _line((self.trouble, "bold red"))
        elif figures is None:
            yield "title", _line(("waiting for the first answer", "dim"))
        if figures is not None:
            yield from self._figure_parts(figures, width)
        if self.has_keys:
            yield "keys", _line(("q quit · p pause · + - interval", "dim"))

    def _figure_parts(self, figures: Figures, width: int) -> Iterator[tuple[str, RenderableType]]:
        for index, name in enumerate(("requests", "inputs", "tokens")):
            value = f"{written('per_s', figures[f'{name}_per_s'])}/s".rjust(9) + "  "
            trend = sparkline([rates[index] for rates in self.rates], width - _LABEL_COLUMNS - len(value))
            yield "rates" if index else "requests", _labelled(name, (value, "bold"), (trend, "cyan"))
        yield "blank", ""
        *stages, total = figures["latencies"]
        yield "latency", _table(_STAGE_COLUMNS, [total, *stages])
        oldest = "oldest {age_s} · {requests} requests · {sequences} sequences · {tokens} tokens"
        yield "queue", _labelled("queue", _said(oldest, figures["queue"]))
        yield "errors", _labelled("errors", _errors(figures))
        for label, part, words in _LINES:
            if part != "vector_cache" or figures[part]["max_bytes"]:
                described = _labelled(label, _said(words, figures[part] if part else figures))
                yield "batches" if part == "batches" else "levels", described
        for part, columns in _TABLES.items():
            if rows := figures.get(part):
                yield "blank", ""
                yield part, _table(columns, rows, part)


def _lines_of(content: RenderableType, console: Console, options: ConsoleOptions) -> list[list[Segment]]:
    """A table that is too wide loses its last columns."""
    if isinstance(content, Table):
        wide = options.update_width(_ANY_WIDTH)
        while len(content.columns) > 1 and Measurement.get(console, wide, content).maximum > options.max_width:
            content.columns.pop()
    return console.render_lines(content, options.reset_height(), pad=False)


def _line(*words: str | tuple[str, str] | Text) -> Text:
    """A tuple has the style second."""
    return Text.assemble(*words, no_wrap=True, overflow="ellipsis")


def _labelled(label: str, *words: str | tuple[str, str] | Text) -> Text:
    return _line((label.ljust(_LABEL_COLUMNS), "dim"), *words)


def _said(words: str, figures: Figures) -> str:
    return words.format_map({name: written(name, value) for name, value in figures.items()})


def _describe_model(figures: Figures) -> str:
    if (num := len(figures.get("models", ()))) > 1:
        return f"{num} models"
    model = figures["model"]
    sizes = {"dimensions": "dimensions", "max_tokens": "tokens"}
    said = [f"{model[name]} {words}" for name, words in sizes.items() if model.get(name)]
    parts = [model.get("id") or "?", *said, model.get("pooling"), figures["dtype"], figures["path"]]
    return " · ".join(str(part) for part in parts if part)


def _errors(figures: Figures) -> Text:
    parts = []
    for error in figures["errors"]:
        style = "dim" if not error["per_s"] else "bold red" if error["status"] >= 500 else "yellow"
        parts.append(Text(_said("{status} {per_s}/s ({num})", error), style))
    parts += [Text(f"{num:,} {_FAULT_WORDS[name]}", "yellow") for name, num in figures["faults"].items()]
    return Text(" · ", "dim").join(parts) if parts else Text("none", "green")


def _table(columns: dict[str, str], rows: Sequence[Figures], counted: str = "") -> Table:
    """Without borders. `counted`: what the rows are; their number is shown where there are several."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for place, title in enumerate(columns):
        is_text = not place or isinstance(rows[0][columns[title]], str)
        shown = f"{len(rows)} {counted}" if counted and not place and len(rows) > 1 else title
        min_width = 8 if counted and place else _LABEL_COLUMNS - 2
        table.add_column(shown, no_wrap=True, justify="left" if is_text else "right", min_width=min_width)
    for row in rows:
        # The process of a gateway that is being replaced has pid 0.
        style = "bold" if row.get("stage") == "total" else "red" if row.get("pid") == 0 else ""
        table.add_row(*(_cell(name, row[name]) for name in columns.values()), style=style)
    return table


def _cell(name: str, value: Any) -> Text:
    words = written(name, value)
    if name == "busy_share":
        bar = "█" * round(_BAR_COLUMNS * (value or 0))
        return Text.assemble((bar.ljust(_BAR_COLUMNS), "yellow" if (value or 0) > 0.95 else "green"), f" {words:>6}")
    has_failed = name in ("num_restarts", "failed_loads") and value > 0
    return Text(words, "yellow" if has_failed else _STATE_STYLES.get(words, ""))


# --- figures ---------------------------------------------------------------------------------------------------


def written(name: str, value: Any) -> str:
    """A figure in words, by the end of its name."""
    match name.rpartition("_")[2]:
        case _ if value is None:
            return NOTHING
        case _ if not isinstance(value, int | float) or name in ("pid", "status"):
            return str(value)
        case "share" | "fill":
            return f"{value:.1%}"
        case "bytes":
            return f"{value / 1e6:,.0f} MB"
        case "s" if name == "uptime_s":
            return str(timedelta(seconds=int(value)))
        case "s" if not name.endswith("per_s"):
            return f"{1000 * value:,.{2 if value < 0.01 else 0}f} ms"
    return f"{value:,.{0 if value >= 100 or value == int(value) else 2}f}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as blocks, the newest on the right. The highest value has a full block."""
    shown = values[-width:] if width > 0 else []
    highest, last = max(shown, default=0.0), len(_BLOCKS) - 1
    levels = (math.ceil(value / highest * last) if highest > 0 else 0 for value in shown)
    return "".join(_BLOCKS[level] for level in levels).rjust(max(0, width))
