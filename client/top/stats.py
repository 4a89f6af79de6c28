"""What a server says under `/stats`, read and checked.

Owns the answer's shape as `vecd top` needs it: a server may say more, or less of what is marked so. Nothing in it is
trusted: what is no such answer is told by the field's name, and text loses whatever could move a terminal's cursor.
Pure. Called by `vecd.client.top.source`; read by `vecd.client.top.frame`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

_OWN_DIALECT = "vecd"
"""What the server says of itself is asked for by dashboards and probes: no work of anybody's."""
_MAX_ITEMS = 4096
"""Of a list: more workers, gateways or statuses than any server has."""
_MAX_CHARACTERS = 200

STAGES = ("parse", "tokenize", "queue", "compute", "encode", "total")
_TOTALS = ("inputs", "tokens", "padding_tokens", "batches", "sequences")
_MORE_TOTALS = ("refused", "expired", "retried", "stuck", "poisoned", "compute_s")
"""Of servers that count them."""


class NotStats(Exception):
    """Raised when an answer is not that of a vecd's `/stats`; the message says which field is wrong."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Counts by size, of all that there has been."""

    bounds: tuple[float, ...]
    """Upper ones, rising; the last count is of what is above all."""
    counts: tuple[float, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class Worker:
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
class Gateway:
    gateway: int
    pid: int
    """0: it is being started again."""
    uptime_s: float
    connections: float
    requests: float
    """In hand now."""
    answered: float


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    cpu_s: float
    resident_bytes: float
    proportional_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """One answer. Everything but `queue`, `arena` and what is said of the model only grows while a server lives."""

    now_s: float
    version: str
    model: Mapping[str, Any]
    """Text, numbers and truth values, by `/stats`' names."""
    answers: Mapping[int, float]
    """By status: of requests for something, not of what the server says of itself."""
    totals: Mapping[str, float]
    stages: Mapping[str, Distribution]
    batch_fill: Distribution | None
    queue: Mapping[str, float]
    arena: Mapping[str, float]
    workers: tuple[Worker, ...]
    gateways: tuple[Gateway, ...]
    processes: Mapping[str, Process]


Object: TypeAlias = Mapping[str, Any]


def read_stats(body: bytes) -> Stats:
    """Raises NotStats."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise NotStats("no JSON") from error
    if not isinstance(answer, dict):
        raise NotStats("no JSON object")
    totals = _object(answer, "totals")
    return Stats(
        now_s=_number(answer, "now_s"),
        version=_text(_object(answer, "server"), "version") or "?",
        model={name: _shown(value) for name, value in _object(answer, "model").items()},
        answers=_read_answers(answer),
        totals={
            **{name: _number(totals, name) for name in _TOTALS},
            **{name: _number(totals, name, 0) for name in _MORE_TOTALS},
        },
        stages=_read_stages(answer),
        batch_fill=_read_fill(answer.get("batch_fill")),
        queue={name: _number(_object(answer, "queue"), name) for name in ("requests", "sequences", "tokens", "age_s")},
        arena={name: _number(_object(answer, "arena"), name) for name in ("rows", "rows_in_use")},
        workers=tuple(map(_read_worker, _objects(answer, "workers"))),
        gateways=tuple(map(_read_gateway, _objects(answer, "gateways"))),
        processes={
            _shown(name): _read_process(process)
            for name, process in _object(answer, "processes").items()
            if isinstance(process, dict)
        },
    )


def _read_answers(answer: Object) -> dict[int, float]:
    answers: dict[int, float] = {}
    for entry in _objects(answer, "requests"):
        if _text(entry, "dialect") != _OWN_DIALECT:
            status = int(_number(entry, "status"))
            answers[status] = answers.get(status, 0) + _number(entry, "count")
    return answers


def _read_stages(answer: Object) -> dict[str, Distribution]:
    bounds, stages = answer.get("stage_bounds_s"), _object(answer, "stages")
    return {name: _read_distribution(_object(stages, name), bounds, "sum_s", f"stages.{name}") for name in STAGES}


def _read_fill(fill: Any) -> Distribution | None:
    return _read_distribution(fill, fill.get("bounds"), "sum", "batch_fill") if isinstance(fill, dict) else None


def _read_distribution(histogram: Object, bounds: Any, sum_name: str, name: str) -> Distribution:
    limits, counts = _numbers(bounds, f"the bounds of {name}"), _numbers(histogram.get("counts"), f"{name}.counts")
    if len(counts) != len(limits) + 1 or list(limits) != sorted(limits):
        raise NotStats(f"{name}.counts do not fit its bounds")
    return Distribution(limits, counts, _number(histogram, sum_name))


def _read_worker(entry: Object) -> Worker:
    return Worker(
        worker=int(_number(entry, "worker")),
        state=_text(entry, "state") or "?",
        life=int(_number(entry, "life")),
        batches=_number(entry, "batches"),
        tokens=_number(entry, "tokens"),
        busy_s=_number(entry, "busy_s"),
        pid=int(_number(entry, "pid")) if entry.get("pid") is not None else None,
        dtype=_text(entry, "dtype"),
        path=_text(entry, "path"),
    )


def _read_gateway(entry: Object) -> Gateway:
    return Gateway(
        gateway=int(_number(entry, "gateway")),
        pid=int(_number(entry, "pid")),
        uptime_s=_number(entry, "uptime_s"),
        connections=_number(entry, "connections"),
        requests=_number(entry, "requests"),
        answered=_number(entry, "answered"),
    )


def _read_process(entry: Object) -> Process:
    return Process(
        pid=int(_number(entry, "pid")),
        cpu_s=_number(entry, "cpu_s"),
        resident_bytes=_number(entry, "resident_bytes"),
        proportional_bytes=_number(entry, "proportional_bytes"),
    )


# --- one field -------------------------------------------------------------------------------------------------


def _number(found: Object, name: str, default: float | None = None) -> float:
    return _checked_number(found.get(name, default), name)


def _numbers(values: Any, name: str) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) > _MAX_ITEMS:
        raise NotStats(f"{name} is no list of numbers")
    return tuple(_checked_number(value, name) for value in values)


def _checked_number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise NotStats(f"{name} is no number from 0")
    return value


def _text(found: Object, name: str) -> str | None:
    value = found.get(name)
    return _shown(value) if isinstance(value, str) else None


def _object(found: Object, name: str) -> Object:
    value = found.get(name)
    if not isinstance(value, dict) or len(value) > _MAX_ITEMS:
        raise NotStats(f"{name} is no object")
    return value


def _objects(found: Object, name: str) -> Sequence[Object]:
    values = found.get(name)
    if not isinstance(values, list) or len(values) > _MAX_ITEMS or not all(isinstance(value, dict) for value in values):
        raise NotStats(f"{name} is no list of objects")
    return values


def _shown(value: Any) -> Any:
    """Text without what is not printable; what is neither text nor a number nor a truth value becomes None."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else "?" for c in value[:_MAX_CHARACTERS])
    return value if isinstance(value, int | float | bool) else None
