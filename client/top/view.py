"""How a picture of `vecd top` looks, in as many columns and lines as there are.

Owns what is shown where, and what is left out of a terminal that is narrow or low: the least important first. Needs
rich, which is an extra; figures are `vecd.client.top.frame`'s, and their words `vecd.client.top.text`'s. Called by
`vecd.client.top.command` and `vecd.client.top.screen`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vecd.client.top.frame import Frame, GatewayFigures, Latency, WorkerFigures
from vecd.client.top.history import Trends
from vecd.client.top.text import NOTHING, age, bar, duration, number, rate, share, size, sparkline

_WIDE = 120
"""Columns from which latency and queue stand side by side."""
_MIN_WIDTH, _MIN_HEIGHT = 20, 4
_LABEL_COLUMNS = 10
_RATE_COLUMNS = 9
_BAR_COLUMNS = 10
_GAP = 2
_STATE_STYLES = {"ready": "green", "starting": "yellow", "stuck": "red", "down": "red"}
_FAULT_WORDS = {
    "refused": "refused",
    "expired": "past their deadline",
    "retried": "sequences retried",
    "stuck": "workers stuck",
    "poisoned": "poisonous inputs",
}
_KEYS = "q quit · p pause · + - interval"
_WARN_BUSY, _WARN_ARENA = 0.95, 0.9


# From how many columns on a table has which of its own; each leaves room for those before.
_WORKER_COLUMNS = {
    "worker": 0, "state": 0, "busy": 0, "tokens/s": 0, "batches/s": 68, "restarts": 56, "memory": 76, "CPU": 84,
    "pid": 93,
}  # fmt: skip
_GATEWAY_COLUMNS = {
    "gateway": 0, "answers/s": 0, "in hand": 0, "connections": 42, "memory": 50, "CPU": 58, "up": 70, "pid": 80
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What there is to be seen at one moment."""

    target: str
    interval_s: float
    frame: Frame | None
    """None before the first answer."""
    trends: Trends
    trouble: str | None = None
    """Why there is no newer answer."""
    is_paused: bool = False
    has_keys: bool = False
    is_ascii: bool = False


@dataclass(frozen=True, slots=True)
class _Section:
    content: RenderableType
    num_lines: int
    importance: int
    """The lowest is left out first."""


def draw(scene: Scene, width: int, height: int | None) -> RenderableType:
    """At most `height` lines of at most `width` columns, or as many lines as it takes."""
    width = max(width, _MIN_WIDTH)
    sections: list[_Section] = []
    for spacing in _Spacing:
        sections = _all_sections(scene, width, height, spacing)
        if height is None or _num_lines(sections) <= height:
            break
    while height is not None and _num_lines(sections) > max(height, _MIN_HEIGHT) and sections[1:]:
        sections.remove(min(sections, key=lambda section: section.importance))
    return Group(*(section.content for section in sections))


def _num_lines(sections: Sequence[_Section]) -> int:
    return sum(section.num_lines for section in sections)


def _all_sections(scene: Scene, width: int, height: int | None, spacing: "_Spacing") -> list[_Section]:
    lines = _title_lines(scene)
    if scene.frame is None:
        lines.append(Text("waiting for the first answer" if scene.trouble is None else "", style="dim"))
    sections = [_Section(Group(*lines), len(lines), 100)]
    if scene.frame is not None:
        sections += _figures(scene, scene.frame, width, height, spacing)
    if scene.has_keys:
        sections.append(_Section(_line(_KEYS, "dim"), 1, 15))
    return sections


class _Spacing(Enum):
    """From the largest to the smallest."""

    WIDE = auto()
    """Empty lines between the parts."""
    DENSE = auto()
    """None."""
    SHORT = auto()
    """Of the stages only the last, which is all of them."""


def _figures(scene: Scene, frame: Frame, width: int, height: int | None, spacing: _Spacing) -> list[_Section]:
    """All of them, from top to bottom."""
    rates = _rate_lines(scene, frame, width)
    facts = [_queue_line(frame), _errors_line(frame), _batches_line(frame), _arena_line(frame), _memory_line(frame)]
    if width >= _WIDE:
        latency = _latency_table(frame.latencies)
        columns = Table.grid(padding=(0, 4))
        columns.add_row(latency, Group(Text(""), *facts))
        middle = [_Section(columns, len(frame.latencies) + 1, 80)]
    else:
        stages = frame.latencies[-1:] if spacing is _Spacing.SHORT else frame.latencies
        middle = [
            _Section(_latency_table(stages), len(stages) + 1, 70),
            *(_Section(line, 1, importance) for line, importance in zip(facts, (85, 84, 40, 20, 30), strict=True)),
        ]
    blank = [_Section(Text(""), 1, 5)] if spacing is _Spacing.WIDE else []
    return [
        *(_Section(line, 1, importance) for line, importance in zip(rates, (90, 50, 60), strict=True)),
        *blank,
        *middle,
        *blank,
        _worker_section(frame.workers, width, height, scene.is_ascii),
        *blank,
        _gateway_section(frame.gateways, width, height),
    ]


# --- lines -----------------------------------------------------------------------------------------------------


def _line(text: str | Text, style: str = "") -> Text:
    line = Text(text, style=style) if isinstance(text, str) else text
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _title_lines(scene: Scene) -> list[Text]:
    title = Text.assemble((f"vecd {scene.frame.version}" if scene.frame is not None else "vecd top", "bold"))
    if scene.frame is not None:
        title.append(f"  {_describe_model(scene.frame)}")
    where = Text.assemble((f"every {scene.interval_s:g} s", "dim"))
    if scene.frame is not None:
        where.append(f"  up {age(scene.frame.uptime_s)}", style="dim")
    if scene.is_paused:
        where.append("  paused", style="bold yellow")
    if scene.trends.num_lives > 1:
        where.append(f"  started again {scene.trends.num_lives - 1}×", style="yellow")
    where.append(f"  {scene.target}", style="cyan")
    lines = [_line(title), _line(where)]
    if scene.trouble is not None:
        lines.append(_line(scene.trouble, "bold red"))
    return lines


def _describe_model(frame: Frame) -> str:
    model = frame.model
    parts = [str(model.get("id") or "?")]
    if model.get("dimensions"):
        parts.append(f"{model['dimensions']} dimensions")
    if model.get("max_tokens"):
        parts.append(f"{model['max_tokens']} tokens")
    if model.get("pooling"):
        parts.append(str(model["pooling"]))
    parts += [part for part in (frame.dtype, frame.path) if part]
    return " · ".join(parts)


def _labelled(label: str, *parts: tuple[str, str] | str) -> Text:
    return _line(Text.assemble((label.ljust(_LABEL_COLUMNS), "dim"), *parts))


def _rate_lines(scene: Scene, frame: Frame, width: int) -> list[Text]:
    columns = width - _LABEL_COLUMNS - _RATE_COLUMNS - _GAP
    rows = (
        ("requests", frame.requests_per_s, scene.trends.requests_per_s),
        ("inputs", frame.inputs_per_s, scene.trends.inputs_per_s),
        ("tokens", frame.tokens_per_s, scene.trends.tokens_per_s),
    )
    return [
        _labelled(
            label,
            (rate(per_s).rjust(_RATE_COLUMNS) + " " * _GAP, "bold"),
            (sparkline(row, columns, is_ascii=scene.is_ascii) if len(row) > 1 else "", "cyan"),
        )
        for label, per_s, row in rows
    ]


def _queue_line(frame: Frame) -> Text:
    queue = frame.queue
    return _labelled(
        "queue",
        f"oldest {duration(queue['age_s'])} · {number(queue['requests'])} requests · "
        f"{number(queue['sequences'])} sequences · {number(queue['tokens'])} tokens",
    )


def _errors_line(frame: Frame) -> Text:
    """The rate of each status, and how many there have been."""
    line = _labelled("errors")
    parts = [
        (f"{error.status} {rate(error.per_s)} ({number(error.num)})", _error_style(error.status, error.per_s))
        for error in frame.errors
    ]
    parts += [(f"{number(num)} {_FAULT_WORDS[name]}", "yellow") for name, num in frame.faults.items()]
    for part in parts[:1]:
        line.append(*part)
    for part in parts[1:]:
        line.append(" · ", "dim").append(*part)
    if not parts:
        line.append("none", "green")
    return line


def _error_style(status: int, per_s: float | None) -> str:
    if not per_s:
        return "dim"
    return "bold red" if status >= 500 else "yellow"


def _batches_line(frame: Frame) -> Text:
    batches = frame.batches
    fill = f" · fill {share(batches.mean_fill)}" if batches.mean_fill is not None else ""
    return _labelled(
        "batches",
        f"{rate(batches.per_s)}{fill} · padding {share(batches.padding_share)} · "
        f"{number(batches.mean_tokens)} tokens, {number(batches.mean_sequences)} sequences each",
    )


def _arena_line(frame: Frame) -> Text:
    rows, in_use = frame.arena["rows"], frame.arena["rows_in_use"]
    part = in_use / rows if rows else None
    text = f"{number(in_use)} of {number(rows)} rows in use ({share(part)})"
    return _labelled("arena", (text, "yellow" if (part or 0) > _WARN_ARENA else ""))


def _memory_line(frame: Frame) -> Text:
    cores = f"{frame.cpu_cores:.2f}" if frame.cpu_cores is not None else NOTHING
    return _labelled(
        "memory", f"{size(frame.memory_bytes)} in {frame.num_processes} processes, which take {cores} cores"
    )


# --- tables ----------------------------------------------------------------------------------------------------


def _table(columns: Sequence[str], *, num_left: int) -> Table:
    """Without lines; all but the first `num_left` columns are figures. A column is never wrapped."""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < num_left else "right", no_wrap=True, overflow="ellipsis")
    return table


def _latency_table(latencies: Sequence[Latency]) -> Table:
    table = _table(("stage", "p50", "p90", "p99"), num_left=1)
    for latency in latencies:
        table.add_row(
            Text(latency.stage.ljust(_LABEL_COLUMNS - _GAP)),
            *(duration(value).rjust(8) for value in (latency.p50_s, latency.p90_s, latency.p99_s)),
            style="bold" if latency.stage == "total" else "",
        )
    return table


def _shown_rows(num: int, height: int | None, most: int) -> int:
    """How many of `num` rows there is room for, of a part of the screen of `most` lines; one says how many more."""
    return num if height is None or num <= most else max(0, most - 1)


def _more(num: int) -> list[Text]:
    return [_line(f"… and {num} more", "dim")] if num else []


def _worker_section(workers: Sequence[WorkerFigures], width: int, height: int | None, is_ascii: bool) -> _Section:
    names = _fitting(_WORKER_COLUMNS, width)
    table = _table(names, num_left=3)
    num = _shown_rows(len(workers), height, max(2, (height or 0) // 3))
    for worker in workers[:num]:
        cells: dict[str, str | Text] = {
            "worker": str(worker.worker).ljust(_LABEL_COLUMNS - _GAP),
            "state": Text(worker.state, style=_STATE_STYLES.get(worker.state, "")),
            "busy": _busy(worker.busy_share, is_ascii),
            "tokens/s": number(worker.tokens_per_s),
            "batches/s": number(worker.batches_per_s),
            "restarts": Text(str(worker.num_restarts), style="yellow" if worker.num_restarts else ""),
            "memory": size(worker.memory_bytes),
            "CPU": share(worker.cpu_share),
            "pid": str(worker.pid) if worker.pid is not None else NOTHING,
        }
        table.add_row(*(cells[name] for name in names))
    more = _more(len(workers) - num)
    return _Section(Group(table, *more), num + 1 + len(more), 75)


def _fitting(columns: Mapping[str, int], width: int) -> list[str]:
    return [name for name, needed in columns.items() if width >= needed]


def _busy(part: float | None, is_ascii: bool) -> Text:
    style = "yellow" if (part or 0) > _WARN_BUSY else "green"
    return Text.assemble((bar(part, _BAR_COLUMNS, is_ascii=is_ascii), style), f" {share(part):>5}")


def _gateway_section(gateways: Sequence[GatewayFigures], width: int, height: int | None) -> _Section:
    names = _fitting(_GATEWAY_COLUMNS, width)
    table = _table(names, num_left=1)
    num = _shown_rows(len(gateways), height, max(2, (height or 0) // 5))
    for gateway in gateways[:num]:
        cells = {
            "gateway": str(gateway.gateway).ljust(_LABEL_COLUMNS - _GAP),
            "answers/s": number(gateway.answered_per_s),
            "in hand": number(gateway.requests),
            "connections": number(gateway.connections),
            "memory": size(gateway.memory_bytes),
            "CPU": share(gateway.cpu_share),
            "up": age(gateway.uptime_s),
            "pid": str(gateway.pid) if gateway.pid else "away",
        }
        table.add_row(*(cells[name] for name in names), style="" if gateway.pid else "red")
    more = _more(len(gateways) - num)
    return _Section(Group(table, *more), num + 1 + len(more), 35)
