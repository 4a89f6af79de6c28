"""How a run is written down: a table for people, one JSON object a run for programs.

Owns column widths and field names. Measures nothing and opens no socket. Called by `vecd.client.bench.command` and the
benchmarks.
"""

import math
from typing import Any

from vecd.client.bench.load import Load
from vecd.client.bench.tally import LATE_S, Result

_COLUMNS = (
    "load",
    "req/s",
    "texts/s",
    "tokens/s",
    "p50 ms",
    "p90 ms",
    "p99 ms",
    "p99.9 ms",
    "max ms",
    "errors",
    "own CPU",
)
FIRST_WIDTH = 13
_WIDTH = 10
_BUSY_CPU_SHARE = 0.7
"""From here on the load generator itself may be what is measured."""
_LATE_SHARE = 0.01
"""From here on the generator's own lateness is in the percentiles people look at."""
_BEHIND_SHARE = 0.95
"""Below this share of what arrived, a server is said not to keep up; chance alone explains a few."""
_BEHIND_REQUESTS = 10


def heading() -> str:
    """The line above the rows."""
    return _line(*_COLUMNS)


def row(result: Result) -> str:
    """One run on one line, and one more for the bulk that ran beside it."""
    latency = result.latency
    line = _line(
        name(result),
        *map(_number, (result.requests_per_s, result.texts_per_s, result.tokens_per_s or math.nan)),
        *map(_number, (latency.p50_ms, latency.p90_ms, latency.p99_ms, latency.p999_ms, latency.max_ms)),
        f"{result.num_errors}",
        f"{result.cpu_share:.0%}",
    )
    return line if result.bulk is None else f"{line}\n{_bulk_row(result.bulk)}"


def _bulk_row(bulk: Result) -> str:
    latency = bulk.latency
    return _line(
        f"+ {bulk.clients} bulk",
        *map(_number, (bulk.requests_per_s, bulk.texts_per_s, bulk.tokens_per_s or math.nan)),
        *map(_number, (latency.p50_ms, latency.p90_ms, latency.p99_ms, latency.p999_ms, latency.max_ms)),
        f"{bulk.num_errors}",
        "",
    )


def name(run: Result | Load) -> str:
    """What is asked for in a run: "16 clients" or "200 /s"."""
    if run.rate_per_s is not None:
        return f"{run.rate_per_s:g} /s"
    return f"{run.clients} client{'s' if run.clients != 1 else ''}"


def notes(result: Result) -> list[str]:
    """What a reader must know about a row: its errors by kind, and why its figures may mislead."""
    lines = _errors(result)
    if result.bulk is not None:
        lines += [f"bulk: {line}" for line in _errors(result.bulk)]
    if result.goodput_ms is not None:
        share = f"{result.goodput_per_s:.1f} requests/s, {result.goodput_share:.1%}"
        lines.append(f"answered within {result.goodput_ms:g} ms: {share}")
    if result.mode == "open":
        lines += _pace(result)
    if result.ended_early is not None:
        lines.append(f"ended early, after {result.elapsed_s:.1f} s measured: {result.ended_early}")
    if result.cpu_share > _BUSY_CPU_SHARE:
        lines.append("the load generator itself was busy: the server may be faster than this")
    return lines


def _errors(result: Result) -> list[str]:
    return [
        f"{count} × {kind}: {_one_line(result.first_details.get(kind, ''))}" for kind, count in result.errors.items()
    ]


def _pace(result: Result) -> list[str]:
    """Whether what was asked for was sent, and answered."""
    lines = []
    if result.late_share > _LATE_SHARE:
        lines.append(
            f"the load generator was late: {result.late_share:.1%} of the requests were sent over {LATE_S * 1000:g} ms "
            f"after they arrived, at most {result.max_late_ms:.0f} ms, and the latencies include it"
        )
    num_missing = result.num_offered - result.num_requests
    if num_missing > max(_BEHIND_REQUESTS, (1 - _BEHIND_SHARE) * result.num_offered):
        lines.append(f"{result.offered_per_s:.1f} requests/s arrived, and {result.requests_per_s:.1f}/s were answered")
    return lines


def fields(result: Result) -> dict[str, Any]:
    """The figures of a run as JSON takes them; every name has its unit, and is always there."""
    is_open = result.mode == "open"
    has_goodput = result.goodput_ms is not None
    return {
        "mode": result.mode,
        "clients": None if is_open else result.clients,
        "rate_per_s": result.rate_per_s,
        "elapsed_s": round(result.elapsed_s, 3),
        **_figures(result),
        "goodput_ms": result.goodput_ms,
        "goodput_per_s": round(result.goodput_per_s, 2) if has_goodput else None,
        "goodput_share": round(result.goodput_share, 5) if has_goodput else None,
        "cpu_share": round(result.cpu_share, 3),
        "late_share": round(result.late_share, 5) if is_open else None,
        "late_max_ms": round(result.max_late_ms, 3) if is_open else None,
        "ended_early": result.ended_early,
        "bulk": None if result.bulk is None else _bulk_fields(result.bulk),
    }


def _bulk_fields(bulk: Result) -> dict[str, Any]:
    return {"clients": bulk.clients, "texts_per_request": bulk.texts_per_request, **_figures(bulk)}


def _figures(result: Result) -> dict[str, Any]:
    latency = result.latency
    return {
        "offered": result.num_offered,
        "requests": result.num_requests,
        "texts": result.num_texts,
        "tokens": result.num_tokens,
        "offered_per_s": round(result.offered_per_s, 2),
        "requests_per_s": round(result.requests_per_s, 2),
        "texts_per_s": round(result.texts_per_s, 2),
        "tokens_per_s": round(result.tokens_per_s, 1) if result.num_tokens else None,
        "p50_ms": _or_null(latency.p50_ms),
        "p90_ms": _or_null(latency.p90_ms),
        "p99_ms": _or_null(latency.p99_ms),
        "p999_ms": _or_null(latency.p999_ms),
        "max_ms": _or_null(latency.max_ms),
        "mean_ms": _or_null(latency.mean_ms),
        "errors": result.errors,
    }


def _line(first: str, *others: str) -> str:
    return f"{first:>{FIRST_WIDTH}}" + "".join(f"{cell:>{_WIDTH}}" for cell in others)


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _or_null(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)


def _one_line(text: str) -> str:
    return " ".join(text.split())
