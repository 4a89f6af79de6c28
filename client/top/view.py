"""How a picture of `vecd top` looks in a given number of columns and lines.

Owns what is shown where, and what a narrow or low terminal does without: the least important first. Needs rich, which
is an extra. Figures are `vecd.client.top.figures`', their words `vecd.client.top.text`'s. Called by
`vecd.client.top.command`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vecd.client.top.figures import ErrorFigures, GatewayFigures, ServerFigures, StageLatency, Trends, WorkerFigures
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All that one picture shows."""

    target: str
    interval_s: float
    figures: ServerFigures | None
    """None before the first answer."""
    trends: Trends
    trouble: str | None = None
    """Why there is no newer answer."""
    is_paused: bool = False
    has_keys: bool = False
    is_ascii: bool = False


class _Section(NamedTuple):
    importance: int
    """The least important is left out first."""
    content: RenderableType
    num_lines: int = 1


class _Column(NamedTuple):
    """One column of a table of workers, gateways or stages."""

    title: str
    cell: Callable[[Any], str | Text]
    min_width: int = 0
    """Columns that the terminal must have for this one to be shown."""
    is_left: bool = False


_STAGE_COLUMNS = (
    _Column("stage", lambda latency: latency.stage.ljust(_LABEL_COLUMNS - _GAP), is_left=True),
    _Column("p50", lambda latency: duration(latency.p50_s).rjust(8)),
    _Column("p90", lambda latency: duration(latency.p90_s).rjust(8)),
    _Column("p99", lambda latency: duration(latency.p99_s).rjust(8)),
)
_WORKER_COLUMNS = (
    _Column("worker", lambda worker: str(worker.worker).ljust(_LABEL_COLUMNS - _GAP), is_left=True),
    _Column("state", lambda worker: Text(worker.state, style=_STATE_STYLES.get(worker.state, "")), is_left=True),
    _Column("busy", lambda worker: worker.busy_share, is_left=True),
    _Column("tokens/s", lambda worker: number(worker.tokens_per_s)),
    _Column("batches/s", lambda worker: number(worker.batches_per_s), 68),
    _Column("restarts", lambda worker: Text(str(worker.num_restarts), "yellow" if worker.num_restarts else ""), 56),
    _Column("memory", lambda worker: size(worker.memory_bytes), 76),
    _Column("CPU", lambda worker: share(worker.cpu_share), 84),
    _Column("pid", lambda worker: str(worker.pid) if worker.pid is not None else NOTHING, 93),
)
_GATEWAY_COLUMNS = (
    _Column("gateway", lambda gateway: str(gateway.gateway).ljust(_LABEL_COLUMNS - _GAP), is_left=True),
    _Column("answers/s", lambda gateway: number(gateway.answered_per_s)),
    _Column("in hand", lambda gateway: number(gateway.requests)),
    _Column("connections", lambda gateway: number(gateway.connections), 42),
    _Column("memory", lambda gateway: size(gateway.memory_bytes), 50),
    _Column("CPU", lambda gateway: share(gateway.cpu_share), 58),
    _Column("up", lambda gateway: age(gateway.uptime_s), 70),
    _Column("pid", lambda gateway: str(gateway.pid) if gateway.pid else "away", 80),
)


def draw(scene: Scene, width: int, height: int | None) -> RenderableType:
    """At most `height` lines of at most `width` columns; with None, as many lines as are needed."""
    width = max(width, _MIN_WIDTH)
    sections: list[_Section] = []
    for has_blanks, has_stages in ((True, True), (False, True), (False, False)):
        sections = _sections(scene, width, height, has_blanks=has_blanks, has_stages=has_stages)
        if height is None or _num_lines(sections) <= height:
            break
    while height is not None and _num_lines(sections) > max(height, _MIN_HEIGHT) and sections[1:]:
        sections.remove(min(sections, key=lambda section: section.importance))
    return Group(*(section.content for section in sections))


def _num_lines(sections: Sequence[_Section]) -> int:
    return sum(section.num_lines for section in sections)


def _sections(scene: Scene, width: int, height: int | None, *, has_blanks: bool, has_stages: bool) -> list[_Section]:
    """From top to bottom. `has_stages`: of the latencies not only the total."""
    title = _title_lines(scene)
    sections = [_Section(100, Group(*title), len(title))]
    if (figures := scene.figures) is not None:
        blank = [_Section(5, Text(""))] if has_blanks else []
        sections += [
            *_rate_sections(scene, figures, width),
            *blank,
            *_middle_sections(figures, width, figures.latencies if has_stages else figures.latencies[-1:]),
            *blank,
            _table_section(75, _worker_columns(scene.is_ascii), figures.workers, width, height and height // 3),
            *blank,
            _table_section(35, _GATEWAY_COLUMNS, figures.gateways, width, height and height // 5),
        ]
    if scene.has_keys:
        sections.append(_Section(15, _line((_KEYS, "dim"))))
    return sections


# --- lines -----------------------------------------------------------------------------------------------------


def _line(*parts: tuple[str, str] | str) -> Text:
    line = Text.assemble(*parts)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _labelled(label: str, *parts: tuple[str, str] | str) -> Text:
    return _line((label.ljust(_LABEL_COLUMNS), "dim"), *parts)


def _title_lines(scene: Scene) -> list[Text]:
    figures = scene.figures
    if figures is None:
        title = [("vecd top", "bold")]
    else:
        title = [(f"vecd {figures.version}", "bold"), (f"  {_describe_model(figures)}", "")]
    where = [(f"every {scene.interval_s:g} s", "dim")]
    if figures is not None:
        where.append((f"  up {age(figures.uptime_s)}", "dim"))
    if scene.is_paused:
        where.append(("  paused", "bold yellow"))
    if scene.trends.num_lives > 1:
        where.append((f"  started again {scene.trends.num_lives - 1}×", "yellow"))
    lines = [_line(*title), _line(*where, (f"  {scene.target}", "cyan"))]
    if scene.trouble is not None:
        lines.append(_line((scene.trouble, "bold red")))
    elif figures is None:
        lines.append(_line(("waiting for the first answer", "dim")))
    return lines


def _describe_model(figures: ServerFigures) -> str:
    model = figures.model
    parts = [
        str(model.get("id") or "?"),
        model.get("dimensions") and f"{model['dimensions']} dimensions",
        model.get("max_tokens") and f"{model['max_tokens']} tokens",
        model.get("pooling"),
        figures.dtype,
        figures.path,
    ]
    return " · ".join(str(part) for part in parts if part)


def _rate_sections(scene: Scene, figures: ServerFigures, width: int) -> list[_Section]:
    columns = width - _LABEL_COLUMNS - _RATE_COLUMNS - _GAP
    rows = (
        (90, "requests", figures.requests_per_s, scene.trends.requests_per_s),
        (50, "inputs", figures.inputs_per_s, scene.trends.inputs_per_s),
        (60, "tokens", figures.tokens_per_s, scene.trends.tokens_per_s),
    )
    sections = []
    for importance, label, per_s, trend in rows:
        blocks = sparkline(trend, columns, is_ascii=scene.is_ascii) if len(trend) > 1 else ""
        value = rate(per_s).rjust(_RATE_COLUMNS) + " " * _GAP
        sections.append(_Section(importance, _labelled(label, (value, "bold"), (blocks, "cyan"))))
    return sections


def _middle_sections(figures: ServerFigures, width: int, stages: Sequence[StageLatency]) -> list[_Section]:
    """Latency, and the lines below or beside it."""
    lines = _level_sections(figures)
    if width < _WIDE:
        return [_Section(70, _latency_table(stages), len(stages) + 1), *lines]
    columns = Table.grid(padding=(0, 4))
    columns.add_row(_latency_table(figures.latencies), Group(Text(""), *(line.content for line in lines)))
    return [_Section(80, columns, len(figures.latencies) + 1)]


def _level_sections(figures: ServerFigures) -> list[_Section]:
    """A line each for queue, errors, batches, arena and memory."""
    queue, batches = figures.queue, figures.batches
    fill = f" · fill {share(batches.mean_fill)}" if batches.mean_fill is not None else ""
    rows, in_use = figures.arena["rows"], figures.arena["rows_in_use"]
    used = in_use / rows if rows else None
    cores = f"{figures.cpu_cores:.2f}" if figures.cpu_cores is not None else NOTHING
    lines = (
        (85, "queue", f"oldest {duration(queue['age_s'])} · {number(queue['requests'])} requests · "
            f"{number(queue['sequences'])} sequences · {number(queue['tokens'])} tokens"),
        (40, "batches", f"{rate(batches.per_s)}{fill} · padding {share(batches.padding_share)} · "
            f"{number(batches.mean_tokens)} tokens, {number(batches.mean_sequences)} sequences each"),
        (20, "arena", (f"{number(in_use)} of {number(rows)} rows in use ({share(used)})",
            "yellow" if (used or 0) > _WARN_ARENA else "")),
        (30, "memory", f"{size(figures.memory_bytes)} in {figures.num_processes} processes, which take {cores} cores"),
    )  # fmt: skip
    sections = [_Section(importance, _labelled(label, text)) for importance, label, text in lines]
    sections.insert(1, _Section(84, _labelled("errors", *_error_parts(figures))))
    return sections


def _error_parts(figures: ServerFigures) -> list[tuple[str, str]]:
    """The rate of each status and its count, then what went wrong inside the server."""
    parts = [
        (f"{error.status} {rate(error.per_s)} ({number(error.num)})", _error_style(error)) for error in figures.errors
    ]
    parts += [(f"{number(num)} {_FAULT_WORDS[name]}", "yellow") for name, num in figures.faults.items()]
    return [piece for part in parts for piece in ((" · ", "dim"), part)][1:] or [("none", "green")]


def _error_style(error: ErrorFigures) -> str:
    if not error.per_s:
        return "dim"
    return "bold red" if error.status >= 500 else "yellow"


# --- tables ----------------------------------------------------------------------------------------------------


def _table(columns: Sequence[_Column], rows: Sequence[Any], style: Callable[[Any], str]) -> Table:
    """Without borders. A column is never wrapped."""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for column in columns:
        justify: Any = "left" if column.is_left else "right"
        table.add_column(column.title, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(column.cell(row) for column in columns), style=style(row))
    return table


def _latency_table(stages: Sequence[StageLatency]) -> Table:
    return _table(_STAGE_COLUMNS, stages, lambda latency: "bold" if latency.stage == "total" else "")


def _table_section(
    importance: int,
    columns: Sequence[_Column],
    rows: Sequence[WorkerFigures] | Sequence[GatewayFigures],
    width: int,
    max_lines: int | None,
) -> _Section:
    """A table of at most `max_lines` rows, or two. If there are more, the last line says how many."""
    max_lines = None if max_lines is None else max(2, max_lines)
    num = len(rows) if max_lines is None or len(rows) <= max_lines else max_lines - 1
    fitting = [column for column in columns if width >= column.min_width]
    # The process of a gateway that is being replaced has no id; a worker's state says the same.
    table = _table(fitting, rows[:num], lambda row: "" if row.pid or isinstance(row, WorkerFigures) else "red")
    more = [_line((f"… and {len(rows) - num} more", "dim"))] if rows[num:] else []
    return _Section(importance, Group(table, *more), 1 + num + len(more))


def _worker_columns(is_ascii: bool) -> list[_Column]:
    """With the bar, whose characters depend on the terminal."""

    def busy(worker: WorkerFigures) -> Text:
        part = worker.busy_share
        style = "yellow" if (part or 0) > _WARN_BUSY else "green"
        return Text.assemble((bar(part, _BAR_COLUMNS, is_ascii=is_ascii), style), f" {share(part):>5}")

    return [column._replace(cell=busy) if column.title == "busy" else column for column in _WORKER_COLUMNS]
