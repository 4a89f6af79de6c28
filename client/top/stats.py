"""A server's `/stats`, read and checked.

Owns the shape of the answer as far as `vecd top` needs it: more fields are allowed, and some may be missing. Nothing in
the answer is trusted: a wrong field is reported by its name, and text loses characters that could move a terminal's
cursor. Pure. Called by `vecd.client.top.source`; read by `vecd.client.top.figures`.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, get_type_hints

import orjson

_OWN_DIALECT = "vecd"
"""Requests of dashboards and probes, which are not counted as work."""
_MAX_ITEMS = 4096
"""Length of a list: more workers, gateways or statuses than any server has."""
_MAX_CHARACTERS = 200

STAGES = ("parse", "tokenize", "queue", "compute", "encode", "total")
_TOTALS = ("inputs", "tokens", "padding_tokens", "batches", "sequences")
_OPTIONAL_TOTALS = ("refused", "expired", "retried", "stuck", "poisoned", "compute_s")

_T = TypeVar("_T")
_Object: TypeAlias = Mapping[str, Any]


class NotStats(Exception):
    """Raised when an answer is not that of `/stats`. The message names the wrong field."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram since the start of the server."""

    bounds: tuple[float, ...]
    """Upper bounds, rising. The last count is of the values above all of them."""
    counts: tuple[float, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class WorkerStats:
    worker: int
    state: str
    life: int
    """1 for the first."""
    batches: float
    tokens: float
    busy_s: float
    pid: int | None
    dtype: str | None
    path: str | None


@dataclass(frozen=True, slots=True)
class GatewayStats:
    gateway: int
    pid: int
    """0 while the process is being replaced."""
    uptime_s: float
    connections: float
    requests: float
    """Under way now."""
    answered: float


@dataclass(frozen=True, slots=True)
class ProcessStats:
    pid: int
    cpu_s: float
    resident_bytes: float
    proportional_bytes: float
    """0 where the kernel does not say which pages are shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """One answer. All but `queue`, `arena` and `model` only grows while a server lives."""

    now_s: float
    version: str
    model: Mapping[str, Any]
    """Text, numbers and booleans, by the names in `/stats`."""
    answers: Mapping[int, float]
    """By status, of requests for work."""
    totals: Mapping[str, float]
    stages: Mapping[str, Distribution]
    batch_fill: Distribution | None
    queue: Mapping[str, float]
    arena: Mapping[str, float]
    workers: tuple[WorkerStats, ...]
    gateways: tuple[GatewayStats, ...]
    processes: Mapping[str, ProcessStats]


def read_stats(body: bytes) -> Stats:
    """Raises NotStats."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise NotStats("no JSON") from error
    if not isinstance(answer, dict):
        raise NotStats("no JSON object")
    totals, stages, queue, arena = (_object(answer, name) for name in ("totals", "stages", "queue", "arena"))
    stage_bounds, fill = answer.get("stage_bounds_s"), answer.get("batch_fill")
    answers: Counter[int] = Counter()
    for entry in _objects(answer, "requests"):
        if _text(entry, "dialect") != _OWN_DIALECT:
            answers[_whole(entry, "status")] += _whole(entry, "count")
    return Stats(
        now_s=_number(answer, "now_s"),
        version=_text(_object(answer, "server"), "version"),
        model={name: _shown(value) for name, value in _object(answer, "model").items()},
        answers=answers,
        totals={name: _number(totals, name) for name in _TOTALS}
        | {name: _number({name: 0, **totals}, name) for name in _OPTIONAL_TOTALS},
        stages={name: _distribution(_object(stages, name), stage_bounds, "sum_s", f"stages.{name}") for name in STAGES},
        batch_fill=_distribution(fill, fill.get("bounds"), "sum", "batch_fill") if isinstance(fill, dict) else None,
        queue={name: _number(queue, name) for name in ("requests", "sequences", "tokens", "age_s")},
        arena={name: _number(arena, name) for name in ("rows", "rows_in_use")},
        workers=tuple(_read(WorkerStats, entry) for entry in _objects(answer, "workers")),
        gateways=tuple(_read(GatewayStats, entry) for entry in _objects(answer, "gateways")),
        processes={
            _shown(name): _read(ProcessStats, entry)
            for name, entry in _object(answer, "processes").items()
            if isinstance(entry, dict)
        },
    )


def _distribution(histogram: _Object, bounds: Any, sum_name: str, name: str) -> Distribution:
    limits, counts = _numbers(bounds, f"the bounds of {name}"), _numbers(histogram.get("counts"), f"{name}.counts")
    if len(counts) != len(limits) + 1 or list(limits) != sorted(limits):
        raise NotStats(f"{name}.counts do not fit its bounds")
    return Distribution(limits, counts, _number(histogram, sum_name))


# --- one field -------------------------------------------------------------------------------------------------


def _read(kind: Callable[..., _T], entry: _Object) -> _T:
    """A `kind` of the fields that have its names, each checked by its type."""
    return kind(**{name: _READERS[hint](entry, name) for name, hint in get_type_hints(kind).items()})


def _number(entry: _Object, name: str) -> float:
    return _checked_number(entry.get(name), name)


def _whole(entry: _Object, name: str) -> int:
    return int(_number(entry, name))


def _text(entry: _Object, name: str) -> str:
    return _text_or_none(entry, name) or "?"


def _text_or_none(entry: _Object, name: str) -> str | None:
    value = entry.get(name)
    return _shown(value) if isinstance(value, str) else None


_READERS: dict[Any, Callable[[_Object, str], Any]] = {
    float: _number,
    int: _whole,
    str: _text,
    str | None: _text_or_none,
    int | None: lambda entry, name: _whole(entry, name) if entry.get(name) is not None else None,
}


def _numbers(values: Any, name: str) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) > _MAX_ITEMS:
        raise NotStats(f"{name} is no list of numbers")
    return tuple(_checked_number(value, name) for value in values)


def _checked_number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise NotStats(f"{name} is no number from 0")
    return value


def _object(entry: _Object, name: str) -> _Object:
    value = entry.get(name)
    if not isinstance(value, dict) or len(value) > _MAX_ITEMS:
        raise NotStats(f"{name} is no object")
    return value


def _objects(entry: _Object, name: str) -> Sequence[_Object]:
    values = entry.get(name)
    if not isinstance(values, list) or len(values) > _MAX_ITEMS or not all(isinstance(value, dict) for value in values):
        raise NotStats(f"{name} is no list of objects")
    return values


def _shown(value: Any) -> Any:
    """Text with ? for what is not printable; None for what is neither text nor a number nor a boolean."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "?" for c in value[:_MAX_CHARACTERS])
    return value if isinstance(value, int | float | bool) else None
