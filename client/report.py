"""How a run is written down: a table for people, one JSON object a run for programs.

Owns column widths and field names. Measures nothing and opens no socket. Called by `client.bench` and
`benchmarks.compare`.
"""

import math
from typing import Any

from client.tally import Result

_COLUMNS = (
    "clients",
    "req/s",
    "texts/s",
    "tokens/s",
    "p50 ms",
    "p90 ms",
    "p99 ms",
    "max ms",
    "errors",
    "own CPU",
)
_WIDTH = 10
_BUSY_CPU_SHARE = 0.7
"""From here on the load generator itself may be what is measured."""


def heading() -> str:
    """The line above the rows."""
    return "".join(f"{name:>{_WIDTH}}" for name in _COLUMNS)


def row(result: Result) -> str:
    """One run on one line."""
    latency = result.latency
    cells = [
        f"{result.clients}",
        *map(_number, (result.requests_per_s, result.texts_per_s, result.tokens_per_s)),
        *map(_number, (latency.p50_ms, latency.p90_ms, latency.p99_ms, latency.max_ms)),
        f"{result.num_errors}",
        f"{result.cpu_share:.0%}",
    ]
    return "".join(f"{cell:>{_WIDTH}}" for cell in cells)


def notes(result: Result) -> list[str]:
    """What a reader must know about a row: its errors by kind, and why its figures may mislead."""
    lines = [
        f"{count} × {kind}: {_one_line(result.first_details.get(kind, ''))}" for kind, count in result.errors.items()
    ]
    if result.ended_early is not None:
        lines.append(f"ended early, after {result.elapsed_s:.1f} s measured: {result.ended_early}")
    if result.cpu_share > _BUSY_CPU_SHARE:
        lines.append("the load generator itself was busy: the server may be faster than this")
    return lines


def fields(result: Result) -> dict[str, Any]:
    """The figures of a run as JSON takes them; every name has its unit."""
    latency = result.latency
    return {
        "clients": result.clients,
        "elapsed_s": round(result.elapsed_s, 3),
        "requests": result.num_requests,
        "texts": result.num_texts,
        "tokens": result.num_tokens,
        "requests_per_s": round(result.requests_per_s, 2),
        "texts_per_s": round(result.texts_per_s, 2),
        "tokens_per_s": round(result.tokens_per_s, 1),
        "p50_ms": _or_null(latency.p50_ms),
        "p90_ms": _or_null(latency.p90_ms),
        "p99_ms": _or_null(latency.p99_ms),
        "max_ms": _or_null(latency.max_ms),
        "errors": result.errors,
        "cpu_share": round(result.cpu_share, 3),
        "ended_early": result.ended_early,
    }


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _or_null(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)


def _one_line(text: str) -> str:
    return " ".join(text.split())
