"""How a picture of `vecd top` looks in a given number of columns and lines.

Owns what is shown where, what a narrow or low terminal does without, and how figures are written: short, with their
unit, and of one width where they stand below one another. Needs rich, which is an extra. Figures are those of
`vecd.client.top.figures`.
"""

import math
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from vecd.client.top.figures import Figures

NOTHING = "–"
"""For a figure that is not known."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_TO_ASCII = str.maketrans("–·×…" + _BLOCKS + _EIGHTHS[1:], "-|x~" + "_.-=+*%#" + "...+###")
_LARGE = ((1e9, "G"), (1e6, "M"), (1e4, "k"))

_WIDE = 120
"""Columns from which latency and queue stand side by side."""
_LABEL_COLUMNS = 10
_RATE_COLUMNS = 9
_BAR_COLUMNS = 10
_NAME_COLUMNS = 22
_GAP = 2
_STATE_STYLES = {"ready": "green", "starting": "yellow", "stuck": "red", "down": "red"}
_MODEL_STYLES = {"ready": "green", "loading": "yellow", "draining": "yellow", "failed": "red"}
_FAULT_WORDS = {
    "refused": "refused",
    "expired": "past their deadline",
    "retried": "sequences retried",
    "stuck": "workers stuck",
    "poisoned": "poisonous inputs",
}
_WARN_BUSY, _WARN_ARENA = 0.95, 0.9

_LEAST_IMPORTANT_FIRST = (
    "blank", "stages", "keys", "arena", "cache", "memory", "gateways", "batches", "inputs", "tokens", "latency",
    "workers", "models", "levels", "errors", "queue", "requests",
)  # fmt: skip
"""The sections that a low terminal does without, in this order. "stages" are the latencies of all but the total."""

_Part: TypeAlias = str | tuple[str, str] | Text
"""Of a line; a tuple has the style second."""


class _Section(NamedTuple):
    name: str
    content: RenderableType
    num_lines: int = 1


class _Column(NamedTuple):
    title: str
    cell: Callable[[Any], str | Text]
    shown_from: int = 0
    """Columns that the terminal must have for this one to be shown."""
    justify: Any = "right"


@dataclass(slots=True, kw_only=True)
class Scene:
    """All that one picture shows. A rich renderable, of at most as many lines and columns as it is given."""

    target: str
    interval_s: float
    figures: Figures | None = None
    """None before the first answer."""
    rates: Sequence[tuple[float, float, float]] = ()
    """Past ones: requests, inputs and tokens a second, oldest first."""
    num_restarts: int = 0
    trouble: str | None = None
    """Why there is no newer answer."""
    is_paused: bool = False
    has_keys: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height
        hidden: list[str] = []
        for name in ("", *_LEAST_IMPORTANT_FIRST):
            hidden.append(name)
            sections = [section for section in self._sections(width, height, hidden) if section.name not in hidden]
            if height is None or sum(section.num_lines for section in sections) <= height:
                break
        segments = console.render(Group(*(section.content for section in sections)), options)
        return _as_ascii(segments, console.encoding) if options.ascii_only else segments

    def _sections(self, width: int, height: int | None, hidden: Sequence[str]) -> Iterator[_Section]:
        title = [*self._title_lines()]
        yield _Section("title", Group(*title), len(title))
        if self.figures is not None:
            blank = _Section("blank", "")
            yield from self._rate_sections(self.figures, width)
            yield blank
            yield from _middle_sections(self.figures, width, has_stages="stages" not in hidden)
            yield blank
            if models := self.figures.get("models"):
                yield _table_section("models", _MODEL_COLUMNS, models, width, height and height // 3)
                yield blank
            yield _table_section("workers", _WORKER_COLUMNS, self.figures["workers"], width, height and height // 3)
            yield blank
            yield _table_section("gateways", _GATEWAY_COLUMNS, self.figures["gateways"], width, height and height // 5)
        if self.has_keys:
            yield _Section("keys", _line(("q quit · p pause · + - interval", "dim")))

    def _title_lines(self) -> Iterator[Text]:
        figures = self.figures
        if figures is None:
            yield _line(("vecd top", "bold"))
        else:
            yield _line((f"vecd {figures['version']}", "bold"), f"  {_describe_model(figures)}")
        yield _line(
            (f"every {self.interval_s:g} s", "dim"),
            (f"  up {age(figures['uptime_s'])}" if figures is not None else "", "dim"),
            ("  paused" if self.is_paused else "", "bold yellow"),
            (f"  started again {self.num_restarts}×" if self.num_restarts else "", "yellow"),
            (f"  {self.target}", "cyan"),
        )
        if self.trouble is not None:
            yield _line((self.trouble, "bold red"))
        elif figures is None:
            yield _line(("waiting for the first answer", "dim"))

    def _rate_sections(self, figures: Figures, width: int) -> Iterator[_Section]:
        for index, name in enumerate(("requests", "inputs", "tokens")):
            value = rate(figures[f"{name}_per_s"]).rjust(_RATE_COLUMNS) + " " * _GAP
            columns = width - _LABEL_COLUMNS - len(value)
            trend = sparkline((rates[index] for rates in self.rates), columns) if len(self.rates) > 1 else ""
            yield _Section(name, _labelled(name, (value, "bold"), (trend, "cyan")))


def _as_ascii(segments: Iterable[Segment], encoding: str) -> Iterator[Segment]:
    for text, style, control in segments:
        yield Segment(text.translate(_TO_ASCII).encode(encoding, "replace").decode(encoding), style, control)


# --- lines -----------------------------------------------------------------------------------------------------


def _line(*parts: _Part) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")


def _labelled(label: str, *parts: _Part) -> Text:
    return _line((label.ljust(_LABEL_COLUMNS), "dim"), *parts)


def _describe_model(figures: Figures) -> str:
    if (num := len(figures.get("models", ()))) > 1:
        return f"{num} models"
    model = figures["model"]
    parts = [
        model.get("id") or "?",
        model.get("dimensions") and f"{model['dimensions']} dimensions",
        model.get("max_tokens") and f"{model['max_tokens']} tokens",
        model.get("pooling"),
        figures["dtype"],
        figures["path"],
    ]
    return " · ".join(str(part) for part in parts if part)


def _middle_sections(figures: Figures, width: int, *, has_stages: bool) -> Iterator[_Section]:
    stages, lines = figures["latencies"], _level_sections(figures)
    if width >= _WIDE:
        columns = Table.grid(padding=(0, 4))
        columns.add_row(_table(_STAGE_COLUMNS, stages, width), Group("", *(line.content for line in lines)))
        yield _Section("levels", columns, len(stages) + 1)
    else:
        yield _table_section("latency", _STAGE_COLUMNS, stages if has_stages else stages[-1:], width)
        yield from lines


def _level_sections(figures: Figures) -> list[_Section]:
    queue, batches = figures["queue"], figures["batches"]
    fill = f" · fill {share(batches['mean_fill'])}" if batches["mean_fill"] is not None else ""
    rows, in_use = figures["arena"]["rows"], figures["arena"]["rows_in_use"]
    used = in_use / rows if rows else None
    cores = f"{figures['cpu_cores']:.2f}" if figures["cpu_cores"] is not None else NOTHING
    cache = figures["vector_cache"]
    found = f"{share(cache['hit_share'])} found · {size(cache['bytes'])} of {size(cache['max_bytes'])} in use"
    lines: dict[str, _Part] = {
        "queue": f"oldest {duration(queue['age_s'])} · {number(queue['requests'])} requests · "
        f"{number(queue['sequences'])} sequences · {number(queue['tokens'])} tokens",
        "errors": _errors(figures),
        "batches": f"{rate(batches['per_s'])}{fill} · padding {share(batches['padding_share'])} · "
        f"{number(batches['mean_tokens'])} tokens, {number(batches['mean_sequences'])} sequences each",
        "arena": (
            f"{number(in_use)} of {number(rows)} rows in use ({share(used)})",
            "yellow" if (used or 0) > _WARN_ARENA else "",
        ),
        "cache": found if cache["max_bytes"] else "",
        "memory": f"{size(figures['memory_bytes'])} in {figures['num_processes']} processes, which take {cores} cores",
    }
    return [_Section(label, _labelled(label, text)) for label, text in lines.items() if text]


def _errors(figures: Figures) -> Text:
    parts = [
        Text(f"{error['status']} {rate(error['per_s'])} ({number(error['num'])})", _error_style(error))
        for error in figures["errors"]
    ]
    parts += [Text(f"{number(num)} {_FAULT_WORDS[name]}", "yellow") for name, num in figures["faults"].items()]
    return Text.assemble((" · ", "dim")).join(parts) if parts else Text("none", "green")


def _error_style(error: Figures) -> str:
    if not error["per_s"]:
        return "dim"
    return "bold red" if error["status"] >= 500 else "yellow"


# --- tables ----------------------------------------------------------------------------------------------------


def _busy(worker: Figures) -> Text:
    part = worker["busy_share"]
    return Text.assemble(
        (bar(part, _BAR_COLUMNS), "yellow" if (part or 0) > _WARN_BUSY else "green"), f" {share(part):>5}"
    )


def _loads(model: Figures) -> Text:
    failed = model["failed_loads"]
    return Text.assemble(number(model["loads"]), (f" ({number(failed)} failed)" if failed else "", "yellow"))


def _label(name: str) -> _Column:
    return _Column(name, lambda row: str(row[name]).ljust(_LABEL_COLUMNS - _GAP), justify="left")


_STAGE_COLUMNS = (
    _label("stage"),
    _Column("p50", lambda latency: duration(latency["p50_s"]).rjust(8)),
    _Column("p90", lambda latency: duration(latency["p90_s"]).rjust(8)),
    _Column("p99", lambda latency: duration(latency["p99_s"]).rjust(8)),
)
_MODEL_COLUMNS = (
    _Column("model", lambda model: short(model["model"]), justify="left"),
    _Column("state", lambda model: Text(model["state"], _MODEL_STYLES.get(model["state"], "")), justify="left"),
    _Column("tokens/s", lambda model: number(model["tokens_per_s"])),
    _Column("waiting", lambda model: number(model["queued_tokens"])),
    _Column("requests", lambda model: number(model["requests"]), 64),
    _Column("workers", lambda model: f"{model['workers']} of {model['num_workers']}", 74),
    _Column("memory", lambda model: size(model["memory_bytes"]), 84),
    _Column("loads", _loads, 94),
    _Column("kind", lambda model: model["kind"], 108, justify="left"),
)
_WORKER_COLUMNS = (
    _label("worker"),
    _Column("state", lambda worker: Text(worker["state"], _STATE_STYLES.get(worker["state"], "")), justify="left"),
    _Column("busy", _busy, justify="left"),
    _Column("tokens/s", lambda worker: number(worker["tokens_per_s"])),
    _Column("batches/s", lambda worker: number(worker["batches_per_s"]), 68),
    _Column(
        "restarts", lambda worker: Text(str(worker["num_restarts"]), "yellow" if worker["num_restarts"] else ""), 56
    ),
    _Column("memory", lambda worker: size(worker["memory_bytes"]), 76),
    _Column("CPU", lambda worker: share(worker["cpu_share"]), 84),
    _Column("pid", lambda worker: str(worker["pid"]) if worker["pid"] is not None else NOTHING, 93),
)
_GATEWAY_COLUMNS = (
    _label("gateway"),
    _Column("answers/s", lambda gateway: number(gateway["answered_per_s"])),
    _Column("in hand", lambda gateway: number(gateway["requests"])),
    _Column("connections", lambda gateway: number(gateway["connections"]), 42),
    _Column("memory", lambda gateway: size(gateway["memory_bytes"]), 50),
    _Column("CPU", lambda gateway: share(gateway["cpu_share"]), 58),
    _Column("up", lambda gateway: age(gateway["uptime_s"]), 70),
    _Column("pid", lambda gateway: str(gateway["pid"]) if gateway["pid"] else "away", 80),
)


def _table(columns: Sequence[_Column], rows: Sequence[Figures], width: int) -> Table:
    """Without borders. A column is never wrapped."""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    fitting = [column for column in columns if width >= column.shown_from]
    for column in fitting:
        table.add_column(column.title, justify=column.justify, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(column.cell(row) for column in fitting), style=_row_style(row))
    return table


def _row_style(row: Figures) -> str:
    if row.get("stage") == "total":
        return "bold"
    return "red" if row.get("pid") == 0 else ""  # the process of a gateway that is being replaced


def _table_section(
    name: str, columns: Sequence[_Column], rows: Sequence[Figures], width: int, max_lines: int | None = None
) -> _Section:
    """A table of at most `max_lines` rows, or two. If there are more, the last line says how many."""
    max_lines = len(rows) if max_lines is None else max(2, max_lines)
    num = len(rows) if len(rows) <= max_lines else max_lines - 1
    table = _table(columns, rows[:num], width)
    if num == len(rows):
        return _Section(name, table, 1 + num)
    return _Section(name, Group(table, _line((f"… and {len(rows) - num} more", "dim"))), 2 + num)


# --- figures ---------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Three figures or so: 0.4, 12.5, 1,234, 56.7k."""
    if value is None:
        return NOTHING
    for limit, letter in _LARGE:
        if value >= limit:
            unit = 1e3 if letter == "k" else limit
            return f"{value / unit:.{0 if value / unit >= 100 else 1}f}{letter}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def short(name: str) -> str:
    """A name of at most _NAME_COLUMNS; the end of a longer one, which tells models apart."""
    return name if len(name) <= _NAME_COLUMNS else f"…{name[1 - _NAME_COLUMNS :]}"


def rate(per_s: float | None) -> str:
    return f"{number(per_s)}/s" if per_s is not None else NOTHING


def duration(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    if seconds < 0.1:
        return f"{seconds * 1000:.{2 if seconds < 0.01 else 1}f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.{2 if seconds < 10 else 1}f} s"


def age(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days} d {h} h"
    if hours:
        return f"{h} h {m:02} min"
    return f"{m} min {s:02} s" if m else f"{s} s"


def size(num_bytes: float | None) -> str:
    if num_bytes is None:
        return NOTHING
    mb = num_bytes / 1e6
    return f"{mb / 1000:.1f} GB" if mb >= 1000 else f"{mb:.0f} MB"


def share(part: float | None) -> str:
    if part is None:
        return NOTHING
    percent = 100 * part
    return f"{percent:.{1 if 0 < percent < 9.95 else 0}f} %"


def bar(part: float | None, width: int) -> str:
    """`width` columns, of which the share `part` is full, rounded to an eighth of a column."""
    whole, eighths = divmod(round(min(1.0, max(0.0, part or 0.0)) * width * 8), 8)
    return ("█" * whole + (_EIGHTHS[eighths] if eighths else "")).ljust(width)


def sparkline(values: Iterable[float], width: int) -> str:
    """The last `width` values as blocks, the newest on the right. The highest value has a full block."""
    shown = list(values)[-width:] if width > 0 else []
    highest, last = max(shown, default=0.0), len(_BLOCKS) - 1
    levels = (math.ceil(value / highest * last) if highest > 0 else 0 for value in shown)
    return "".join(_BLOCKS[level] for level in levels).rjust(max(0, width))


# --- the terminal ----------------------------------------------------------------------------------------------

_MAX_KEYS = 64


class Terminal:
    """A context: inside it, the terminal shows `picture` and keys come without Enter."""

    def __init__(self, picture: RenderableType) -> None:
        """Standard output is a terminal. Keys come from standard input, if that is one, too."""
        for name in ("COLUMNS", "LINES"):  # rich would believe them, and they do not change with the terminal
            os.environ.pop(name, None)
        console = Console(force_terminal=True, force_interactive=True, highlight=False, markup=False, emoji=False)
        self._live = Live(
            picture, console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self.keyboard = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._modes: Any = None

    def __enter__(self) -> Self:
        if self.keyboard is not None:
            self._modes = termios.tcgetattr(self.keyboard)
            tty.setcbreak(self.keyboard)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, termios.error):  # a terminal that has gone needs nothing
            self._live.stop()
        with suppress(OSError, termios.error):
            if self.keyboard is not None:
                termios.tcsetattr(self.keyboard, termios.TCSADRAIN, self._modes)

    def draw(self) -> None:
        """Raises OSError when the terminal has gone."""
        self._live.refresh()

    def keys(self) -> str:
        """What has been typed; "" when the terminal has gone."""
        assert self.keyboard is not None
        with suppress(OSError):
            return os.read(self.keyboard, _MAX_KEYS).decode("latin-1")
        return ""

    def stop(self) -> None:
        """Restore the terminal, stop this process as Ctrl-Z does, and take the terminal again when it continues."""
        self.__exit__()
        # Not SIGTSTP, which this program handles. The shell sees no difference.
        os.kill(os.getpid(), signal.SIGSTOP)
        self.__enter__()
