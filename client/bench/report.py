"""How a run is reported: a table for people, one JSON object a run for programs, a line while it goes on.

Owns column widths and field names. Measures nothing and opens no socket. Called by `vecd.client.bench.command`,
`vecd.client.bench.run` and the benchmarks.
"""

import math
from typing import Any

from vecd.client.bench.load import Load
from vecd.client.bench.result import LATE_S, RunResult
from vecd.client.bench.window import Window

_COLUMNS = {
    "req/s": "requests_per_s",
    "texts/s": "texts_per_s",
    "tokens/s": "tokens_per_s",
    "p50 ms": "p50_ms",
    "p90 ms": "p90_ms",
    "p99 ms": "p99_ms",
    "p99.9 ms": "p999_ms",
    "max ms": "max_ms",
}
"""By heading, the field that the column shows."""
FIRST_WIDTH = 13
_WIDTH = 10
_BUSY_CPU_SHARE = 0.7
"""From here on the load generator itself may limit the figures."""
_LATE_SHARE = 0.01
"""From here on the generator's own lateness shows in the percentiles."""
_BEHIND_SHARE = 0.95
"""Below this share of the arrivals, a server does not keep up; chance explains a few."""
_BEHIND_REQUESTS = 10


def heading() -> str:
    """The line above the rows."""
    return _line("load", *_COLUMNS, "errors", "own CPU")


def row(result: RunResult) -> str:
    """One run on one line, and one more for the bulk that ran beside it."""
    line = _row(name(result.load), result, f"{result.cpu_share:.0%}")
    return line if result.bulk is None else f"{line}\n{_row(f'+ {result.bulk.load.clients} bulk', result.bulk, '')}"


def _row(name: str, result: RunResult, cpu: str) -> str:
    figures = _figures(result)
    cells = [_number(figures[field]) for field in _COLUMNS.values()]
    return _line(name, *cells, f"{result.errors.total()}", cpu)


def name(load: Load) -> str:
    """ "16 clients" or "200 /s"."""
    if load.rate_per_s is not None:
        return f"{load.rate_per_s:g} /s"
    return f"{load.clients} client{'s' if load.clients != 1 else ''}"


def notes(result: RunResult) -> list[str]:
    """The errors of a row by kind, and why its figures may mislead."""
    lines = _errors(result)
    if result.bulk is not None:
        lines += [f"bulk: {line}" for line in _errors(result.bulk)]
    if (goodput_ms := result.load.goodput_ms) is not None:
        good = f"{result.per_s(result.num_good):.1f} requests/s, {result.share(result.num_good):.1%}"
        lines.append(f"answered within {goodput_ms:g} ms: {good}")
    if result.load.rate_per_s is not None:
        lines += _pace(result)
    if result.ended_early is not None:
        lines.append(f"ended early, after {result.elapsed_s:.1f} s measured: {result.ended_early}")
    if result.cpu_share > _BUSY_CPU_SHARE:
        lines.append("the load generator itself was busy: the server may be faster than this")
    return lines


def _errors(result: RunResult) -> list[str]:
    return [
        f"{count} × {kind}: {' '.join(result.first_details[kind].split())}"
        for kind, count in result.errors.most_common()
    ]


def _pace(result: RunResult) -> list[str]:
    """Whether all arrivals were sent in time, and answered."""
    lines = []
    if (late_share := result.share(result.num_late)) > _LATE_SHARE:
        lines.append(
            f"the load generator was late: {late_share:.1%} of the requests were sent over {LATE_S * 1000:g} ms "
            f"after they arrived, at most {result.max_late_ms:.0f} ms, and the latencies include it"
        )
    num_missing = result.num_offered - result.num_requests
    if num_missing > max(_BEHIND_REQUESTS, (1 - _BEHIND_SHARE) * result.num_offered):
        offered, answered = result.per_s(result.num_offered), result.per_s(result.num_requests)
        lines.append(f"{offered:.1f} requests/s arrived, and {answered:.1f}/s were answered")
    return lines


def fields(result: RunResult) -> dict[str, Any]:
    """The figures of a run as JSON takes them; every name has its unit, and is always there."""
    load, bulk = result.load, result.bulk
    is_open = load.rate_per_s is not None
    has_goodput = load.goodput_ms is not None
    return {
        "mode": "open" if is_open else "closed",
        "clients": None if is_open else load.clients,
        "rate_per_s": load.rate_per_s,
        "elapsed_s": round(result.elapsed_s, 3),
        **_figures(result),
        "goodput_ms": load.goodput_ms,
        "goodput_per_s": round(result.per_s(result.num_good), 2) if has_goodput else None,
        "goodput_share": round(result.share(result.num_good), 5) if has_goodput else None,
        "cpu_share": round(result.cpu_share, 3),
        "late_share": round(result.share(result.num_late), 5) if is_open else None,
        "late_max_ms": round(result.max_late_ms, 3) if is_open else None,
        "ended_early": result.ended_early,
        "bulk": bulk
        and {
            "clients": bulk.load.clients,
            "texts_per_request": bulk.load.shape.texts_per_request,
            "lengths": str(bulk.load.shape.lengths),
            "priority": bulk.load.shape.priority,
            **_figures(bulk),
        },
    }


def _figures(result: RunResult) -> dict[str, Any]:
    return {
        "offered": result.num_offered,
        "requests": result.num_requests,
        "texts": result.num_texts,
        "tokens": result.num_tokens,
        "offered_per_s": round(result.per_s(result.num_offered), 2),
        "requests_per_s": round(result.per_s(result.num_requests), 2),
        "texts_per_s": round(result.per_s(result.num_texts), 2),
        "tokens_per_s": round(result.per_s(result.num_tokens), 1) if result.num_tokens else None,
        **{name: None if ms is None else round(ms, 3) for name, ms in result.latencies_ms().items()},
        "errors": dict(result.errors.most_common()),
    }


def describe_progress(window: Window, result: RunResult, num_waiting: int, now: float) -> str:
    """The load of a run, and how far it is; `num_waiting` requests have no answer yet."""
    if now < window.opens_at:
        return f"{name(result.load)}: warming up"
    elapsed_s, left_s = window.elapsed_s(now), window.closes_at - now
    if left_s <= 0:
        rest = f"waiting for {num_waiting} answers"
    elif left_s < math.inf:
        rest = f"{math.ceil(left_s)} s left"
    else:
        rest = f"{result.num_requests} answered"
    rate = result.num_requests / elapsed_s if elapsed_s > 0 else 0.0
    return f"{name(result.load)}: {rate:,.1f} req/s, {result.errors.total()} errors, {rest}"


def _line(first: str, *others: str) -> str:
    return f"{first:>{FIRST_WIDTH}}" + "".join(f"{cell:>{_WIDTH}}" for cell in others)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
