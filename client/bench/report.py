"""What a run has come to, and how it is reported: a table for people, JSON for programs, a line while it goes on.

Owns latencies, counts and percentiles, which requests count, and the check of responses. Every figure has its unit in
its name. Reads no clock and opens no socket.
"""

import functools
import io
import math
import re
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Optional, TypeAlias

import orjson

from vecd.base.files import JsonObject
from vecd.client.bench.load import Load
from vecd.client.http import BadResponse, ServerResponse


class Window:
    """The measured part of a run, after its warm-up.

    `sent_at` is always the moment at which a request should have been sent; in an open loop, that of its arrival.
    - By time, in a closed loop: the requests that *end* inside it. So the rate is right: the window loses the requests
      under way when it closes, and gains those under way when it opened.
    - By time, in an open loop: the requests that *arrive* inside it, however late they end, or an overloaded server's
      slowest answers would be missing. Rates are still counted by end.
    - By number: those requests, and none of the warm-up's, from the start of the first one.
    """

    def __init__(self, load: Load, started_at: float) -> None:
        self._num_left = load.num_requests
        self.opens_at = started_at + load.warmup_s
        self.closes_at = math.inf if self._num_left is not None else self.opens_at + load.duration_s
        """From here on no request starts; infinite for a run by number."""
        self._is_by_start = load.rate_per_s is not None or self._num_left is not None
        self._first_sent_at = math.inf

    def may_send(self, now: float) -> bool:
        """Whether another request may start now. Side effects: a run by number counts it as started."""
        if self._num_left is None or now < self.opens_at:
            return now < self.closes_at
        self._first_sent_at = min(self._first_sent_at, now)
        self._num_left -= 1
        return self._num_left >= 0

    def measures(self, sent_at: float, ended_at: float) -> bool:
        """Whether the latency of a success belongs to the result."""
        return self._contains(sent_at if self._is_by_start else ended_at)

    def measures_failure(self, sent_at: float, ended_at: float) -> bool:
        # One that times out after a closed loop's window closed counts: a server that hangs must not look idle.
        return self._contains(sent_at) if self._is_by_start else ended_at >= self.opens_at

    def counts(self, sent_at: float, ended_at: float) -> bool:
        """Whether a success counts for the rates."""
        return self._contains(ended_at if self._num_left is None else sent_at)

    def _contains(self, moment: float) -> bool:
        return self.opens_at <= moment < self.closes_at

    def elapsed_s(self, now: float) -> float:
        if self._num_left is not None:
            return max(0.0, now - self._first_sent_at)
        return max(0.0, min(now, self.closes_at) - self.opens_at)


# --- the check of a response, for little CPU --------------------------------------------------------------------

_TOTAL_TOKENS = re.compile(rb'"total_tokens"\s*:\s*(\d+)')
# `usage` is the last field of every server seen, and this is more than any of them writes there.
_TAIL_BYTES = 256
_FLOAT32_BYTES = 4
_NPY_MAGIC = b"\x93NUMPY"

ReadResponse: TypeAlias = Callable[[ServerResponse, int], int]
"""Checks that a response 200 has `num_texts` embeddings. Returns its tokens, 0 if the server does not say. Raises
BadResponse when it has not."""


def read_json(response: ServerResponse, num_texts: int) -> int:
    """OpenAI's JSON, with any encoding of the embeddings."""
    body = response.body
    usage = _TOTAL_TOKENS.search(body, max(0, len(body) - _TAIL_BYTES))
    # Once per item, and in nothing else: no value of such a response can hold a quote followed by a colon.
    if usage is not None and body.count(b'"embedding":') == num_texts:
        return int(usage[1])
    try:  # another order or spacing
        fields: JsonObject = orjson.loads(body)
        vectors = [item["embedding"] for item in fields["data"]]
        num_tokens = int((fields.get("usage") or {}).get("total_tokens", 0))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadResponse("not an OpenAI-shaped list of embeddings") from error
    if len(vectors) != num_texts or not all(vectors):
        raise BadResponse(f"{len(vectors)} embeddings for {num_texts} texts")
    return num_tokens


def read_bytes(response: ServerResponse, num_texts: int) -> int:
    """Bare float32 rows of one length. Without the dimensions in a header, any length that fits is accepted."""
    body = response.body
    if body[:1] == b"{":
        with suppress(ValueError):
            orjson.loads(body)
            raise BadResponse("JSON instead of bytes")  # from a server that does not know this encoding
    row_bytes = _FLOAT32_BYTES * (response.num_dimensions or len(body) // (_FLOAT32_BYTES * num_texts))
    if not body or len(body) != num_texts * row_bytes:
        raise BadResponse(f"{len(body)} bytes are not {num_texts} rows of float32")
    return response.num_tokens or 0


def read_npy(response: ServerResponse, num_texts: int) -> int:
    """A NumPy file with a row for each text."""
    body = response.body
    if not body.startswith(_NPY_MAGIC) or len(body) < 12:
        raise BadResponse("not a NumPy file")
    start = 10 + int.from_bytes(body[8:10], "little") if body[6] == 1 else 12 + int.from_bytes(body[8:12], "little")
    if (num_rows := _num_rows(bytes(body[:start]), len(body) - start)) != num_texts:
        raise BadResponse(f"{num_rows} embeddings for {num_texts} texts")
    return response.num_tokens or 0


@functools.lru_cache(maxsize=64)
def _num_rows(header: bytes, num_bytes: int) -> int:
    """Of a NumPy file. Those of one server are alike, so each is parsed once. Raises BadResponse."""
    import numpy as np  # not to show the flags

    try:
        array = np.load(io.BytesIO(header + bytes(num_bytes)))
    except (ValueError, EOFError) as error:
        raise BadResponse("not a NumPy file of rows") from error
    if array.ndim != 2 or array.nbytes != num_bytes or not num_bytes:
        raise BadResponse(f"{num_bytes} bytes for an array of shape {array.shape}")
    return len(array)


READERS: dict[str, ReadResponse] = {"base64": read_json, "float": read_json, "bytes": read_bytes, "npy": read_npy}


# --- figures ----------------------------------------------------------------------------------------------------

_SHARES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}
LATE_S = 0.01
"""A request of an open loop that is sent later than this after its arrival is counted as late."""


@dataclass(slots=True, kw_only=True)
class RunResult:
    """The requests of one loop. Owned by the run until it is over. Rates are of successes."""

    load: Load
    latencies: "array[float]" = field(default_factory=lambda: array("d"))
    """Seconds, of the measured requests that succeeded: from the moment of sending to the whole response."""
    num_requests: int = 0
    """Successes that ended inside the window, from which rates are computed; `num_tokens` likewise."""
    num_tokens: int = 0
    """0 when the server does not say."""
    errors: Counter[str] = field(default_factory=Counter)
    first_details: dict[str, str] = field(default_factory=dict)
    """The message of the first error of each kind."""
    delays: "array[float]" = field(default_factory=lambda: array("d"))
    """Seconds from arrival to sending, of the requests of an open loop for which it took longer than LATE_S. Latencies
    include them."""

    # Set when the run is over.
    elapsed_s: float = 0.0
    cpu_share: float = 0.0
    """CPU that the load generator itself used, as a share of one core."""
    ended_early: str | None = None
    bulk: Optional["RunResult"] = None

    def add_errors(self, kind: str, detail: str, count: int = 1) -> None:
        self.errors[kind] += count
        self.first_details.setdefault(kind, detail)

    def latencies_ms(self) -> dict[str, float | None]:
        """Percentiles by the nearest rank, the largest, and the mean; None when nothing succeeded."""
        if not self.latencies:
            return dict.fromkeys([*_SHARES, "mean_ms"])
        import numpy as np  # not while a run goes on, nor to show the flags

        values_ms = np.frombuffer(self.latencies) * 1000
        percentiles = np.quantile(values_ms, list(_SHARES.values()), method="inverted_cdf")
        return {**dict(zip(_SHARES, percentiles.tolist(), strict=True)), "mean_ms": float(values_ms.mean())}

    @property
    def num_offered(self) -> int:
        """Measured requests, successes and errors."""
        return len(self.latencies) + self.errors.total()

    @property
    def num_good(self) -> int:
        """Successes within the load's `goodput_ms`."""
        return sum(latency_s * 1000 <= (self.load.goodput_ms or math.inf) for latency_s in self.latencies)

    @property
    def max_delay_ms(self) -> float:
        return 1000 * max(self.delays, default=0.0)

    @property
    def num_texts(self) -> int:
        return self.num_requests * self.load.shape.texts_per_request

    def per_s(self, count: int) -> float:
        """`count` a second of the measured window; 0.0 when there was none."""
        return count / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def share(self, count: int) -> float:
        """`count` ÷ all measured requests, errors included; 0.0 without requests."""
        return count / self.num_offered if self.num_offered else 0.0


def name(load: Load) -> str:
    """ "16 clients" or "200 /s"."""
    if load.rate_per_s is not None:
        return f"{load.rate_per_s:g} /s"
    return f"{load.clients} client{'s' if load.clients != 1 else ''}"


def fields(result: RunResult) -> JsonObject:
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
        "late_share": round(result.share(len(result.delays)), 5) if is_open else None,
        "late_max_ms": round(result.max_delay_ms, 3) if is_open else None,
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


def _figures(result: RunResult) -> JsonObject:
    counts = {"offered": result.num_offered, "requests": result.num_requests, "texts": result.num_texts}
    return {
        **counts,
        "tokens": result.num_tokens,
        **{f"{name}_per_s": round(result.per_s(count), 2) for name, count in counts.items()},
        "tokens_per_s": round(result.per_s(result.num_tokens), 1) if result.num_tokens else None,
        **{name: None if ms is None else round(ms, 3) for name, ms in result.latencies_ms().items()},
        "errors": dict(result.errors.most_common()),
    }


# --- the table --------------------------------------------------------------------------------------------------

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
    return _line("load", *_COLUMNS, "errors", "own CPU")


def row(result: RunResult) -> str:
    """One run on one line, and one more for the bulk that ran beside it."""
    line = _row(name(result.load), result, f"{result.cpu_share:.0%}")
    return line if result.bulk is None else f"{line}\n{_row(f'+ {result.bulk.load.clients} bulk', result.bulk, '')}"


def _row(name: str, result: RunResult, cpu: str) -> str:
    figures = _figures(result)
    cells = [_number(figures[field]) for field in _COLUMNS.values()]
    return _line(name, *cells, f"{result.errors.total()}", cpu)


def _line(first: str, *others: str) -> str:
    return f"{first:>{FIRST_WIDTH}}" + "".join(f"{cell:>{_WIDTH}}" for cell in others)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def notes(result: RunResult) -> list[str]:
    load, lines = result.load, _errors(result)
    if result.bulk is not None:
        lines += [f"bulk: {line}" for line in _errors(result.bulk)]
    if load.goodput_ms is not None:
        good = f"{result.per_s(result.num_good):.1f} requests/s, {result.share(result.num_good):.1%}"
        lines.append(f"answered within {load.goodput_ms:g} ms: {good}")
    if (late_share := result.share(len(result.delays))) > _LATE_SHARE:
        lines.append(
            f"the load generator was late: {late_share:.1%} of the requests were sent over {LATE_S * 1000:g} ms "
            f"after they arrived, at most {result.max_delay_ms:.0f} ms, and the latencies include it"
        )
    num_missing = result.num_offered - result.num_requests
    if load.rate_per_s is not None and num_missing > max(_BEHIND_REQUESTS, (1 - _BEHIND_SHARE) * result.num_offered):
        offered, answered = result.per_s(result.num_offered), result.per_s(result.num_requests)
        lines.append(f"{offered:.1f} requests/s arrived, and {answered:.1f}/s were answered")
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
