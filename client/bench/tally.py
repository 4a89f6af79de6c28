"""What a run has seen so far, and the figures that come out of it.

Owns latencies, counts and percentiles, in memory that does not grow with the requests; every figure has its unit in its
name. Reads no clock and opens no socket. Filled by `vecd.client.bench.stream`, printed by `vecd.client.bench.report`.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from vecd.client.bench.answers import Receipt
from vecd.client.bench.histogram import Histogram

_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000
LATE_S = 0.01
"""An open loop's request sent so long after its arrival is counted as late."""

Mode: TypeAlias = Literal["closed", "open"]


@dataclass(slots=True)
class Tally:
    """Counts one stream's requests. Owned by the run; read when it is over."""

    goodput_s: float = math.inf
    """A success is good when its latency is at most this."""
    latencies: Histogram = field(default_factory=Histogram)
    """Nanoseconds, of the measured requests that succeeded."""
    num_good: int = 0
    num_requests: int = 0
    """Successes that ended inside the window, as `num_texts` and `num_tokens`: what rates are of."""
    num_texts: int = 0
    num_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """How many requests failed, by kind."""
    first_details: dict[str, str] = field(default_factory=dict)
    """What the first error of each kind said."""
    num_late: int = 0
    """How many requests the generator itself sent late; only in an open loop."""
    max_late_s: float = 0.0

    def add_latency(self, latency_s: float) -> None:
        """Of a measured request that succeeded."""
        self.latencies.record(round(latency_s * _NS_PER_S))
        if latency_s <= self.goodput_s:
            self.num_good += 1

    def add_answer(self, receipt: Receipt) -> None:
        """Of a success that ended inside the window."""
        self.num_requests += 1
        self.num_texts += receipt.num_embeddings
        self.num_tokens += receipt.num_tokens

    def add_errors(self, kind: str, detail: str, count: int = 1) -> None:
        self.errors[kind] += count
        self.first_details.setdefault(kind, detail)


@dataclass(frozen=True, slots=True)
class Latency:
    """Of the requests that succeeded, from wanting to send to having the whole answer; NaN when none did.

    To three significant digits, the largest exactly (`vecd.client.bench.histogram`).
    """

    p50_ms: float
    p90_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    mean_ms: float

    @classmethod
    def of(cls, latencies: Histogram) -> "Latency":
        """The figures of `latencies`, which are nanoseconds."""
        percentiles = (latencies.percentile(percent) for percent in (50, 90, 99, 99.9, 100))
        return cls(*(_in_ms(value) for value in (*percentiles, latencies.mean)))


def _in_ms(value_ns: float | None) -> float:
    return math.nan if value_ns is None else value_ns / _NS_PER_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The figures of one run. Rates are of successes."""

    mode: Mode
    clients: int
    """How many asked in turns; 0 in an open loop."""
    rate_per_s: float | None
    """The arrivals asked for in an open loop; None in a closed one."""
    texts_per_request: int
    elapsed_s: float
    """Length of the measured window."""
    num_requests: int
    """Successes that ended inside the window, as `num_texts` and `num_tokens`."""
    num_texts: int
    num_tokens: int
    """0 when the server does not tell."""
    num_good: int
    """Successes within `goodput_ms`."""
    goodput_ms: float | None
    latencies: Histogram
    """Nanoseconds, of the measured requests that succeeded. Those of several runs can be merged."""
    errors: dict[str, int]
    first_details: dict[str, str]
    cpu_share: float
    """CPU the load generator itself used, as a share of one core."""
    num_late: int
    """Requests of an open loop that were sent well after their intended arrival. Latencies include it."""
    max_late_ms: float
    ended_early: str | None
    """Why the run stopped before its time."""
    bulk: "Result | None" = None
    """What ran beside."""

    @property
    def latency(self) -> Latency:
        """Worked out anew at every call: keep it."""
        return Latency.of(self.latencies)

    @property
    def num_errors(self) -> int:
        return sum(self.errors.values())

    @property
    def num_offered(self) -> int:
        """Measured requests, whatever became of them."""
        return self.latencies.count + self.num_errors

    @property
    def offered_per_s(self) -> float:
        return self._per_second(self.num_offered)

    @property
    def requests_per_s(self) -> float:
        return self._per_second(self.num_requests)

    @property
    def texts_per_s(self) -> float:
        return self._per_second(self.num_texts)

    @property
    def tokens_per_s(self) -> float:
        return self._per_second(self.num_tokens)

    @property
    def goodput_per_s(self) -> float:
        return self._per_second(self.num_good)

    @property
    def goodput_share(self) -> float:
        """Of all measured requests, errors included; 0.0 when there were none."""
        return self.num_good / self.num_offered if self.num_offered else 0.0

    @property
    def late_share(self) -> float:
        return self.num_late / self.num_offered if self.num_offered else 0.0

    def _per_second(self, count: int) -> float:
        return count / self.elapsed_s if self.elapsed_s > 0 else 0.0


def summarize(
    tally: Tally,
    *,
    clients: int,
    texts_per_request: int,
    elapsed_s: float,
    cpu_share: float,
    ended_early: str | None,
    rate_per_s: float | None = None,
    bulk: Result | None = None,
) -> Result:
    """The figures of a finished run."""
    return Result(
        mode="closed" if rate_per_s is None else "open",
        clients=clients,
        rate_per_s=rate_per_s,
        texts_per_request=texts_per_request,
        elapsed_s=elapsed_s,
        num_requests=tally.num_requests,
        num_texts=tally.num_texts,
        num_tokens=tally.num_tokens,
        num_good=tally.num_good,
        goodput_ms=None if tally.goodput_s == math.inf else tally.goodput_s * 1000,
        latencies=tally.latencies,
        errors=dict(tally.errors.most_common()),
        first_details=tally.first_details,
        cpu_share=cpu_share,
        num_late=tally.num_late,
        max_late_ms=tally.max_late_s * 1000,
        ended_early=ended_early,
        bulk=bulk,
    )
