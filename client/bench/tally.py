"""What a run has counted so far, and the figures that come out of it.

Owns latencies, counts and percentiles, in memory that does not grow with the requests; every figure has its unit in its
name. Reads no clock and opens no socket. Filled by `vecd.client.bench.stream`, printed by `vecd.client.bench.report`.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from vecd.client.bench.histogram import LatencyHistogram
from vecd.client.bench.responses import Receipt

_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000
LATE_S = 0.01
"""A request of an open loop that is sent later than this after its arrival is counted as late."""

LoopMode: TypeAlias = Literal["closed", "open"]


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts the requests of one stream. Owned by the run, read when it is over."""

    goodput_ms: float | None = None
    """A success is good when its latency is at most this."""
    latencies: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Nanoseconds, of the measured requests that succeeded."""
    num_good: int = 0
    """Successes within `goodput_ms`."""
    num_requests: int = 0
    """Successes that ended inside the window, from which rates are computed; `num_texts` and `num_tokens` likewise."""
    num_texts: int = 0
    num_tokens: int = 0
    """0 when the server does not say."""
    errors: Counter[str] = field(default_factory=Counter)
    """How many requests failed, by kind."""
    first_details: dict[str, str] = field(default_factory=dict)
    """The message of the first error of each kind."""
    num_late: int = 0
    """Requests of an open loop that were sent well after their arrival. Latencies include the delay."""
    max_late_ms: float = 0.0

    def add_latency(self, latency_s: float) -> None:
        """Count the latency of a measured request that succeeded."""
        self.latencies.record(round(latency_s * _NS_PER_S))
        if self.goodput_ms is None or latency_s * 1000 <= self.goodput_ms:
            self.num_good += 1

    def add_success(self, receipt: Receipt) -> None:
        """Count a success that ended inside the window."""
        self.num_requests += 1
        self.num_texts += receipt.num_embeddings
        self.num_tokens += receipt.num_tokens

    def add_errors(self, kind: str, detail: str, count: int = 1) -> None:
        self.errors[kind] += count
        self.first_details.setdefault(kind, detail)

    def add_late(self, late_s: float) -> None:
        self.num_late += 1
        self.max_late_ms = max(self.max_late_ms, late_s * 1000)


class LatencySummary(NamedTuple):
    """Latencies of the requests that succeeded, from the moment of sending to the whole response; NaN when none did.

    To three significant digits, the largest exactly (`vecd.client.bench.histogram`).
    """

    p50_ms: float
    p90_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    mean_ms: float

    @classmethod
    def of(cls, latencies: LatencyHistogram) -> Self:
        """The figures of `latencies`, which are nanoseconds."""
        values = [*(latencies.percentile(percent) for percent in (50, 90, 99, 99.9, 100)), latencies.mean]
        return cls(*(math.nan if value is None else value / _NS_PER_MS for value in values))


@dataclass(slots=True, kw_only=True)
class RunResult(Tally):
    """The figures of one run. Rates are of successes."""

    clients: int
    """Clients of a closed loop; 0 in an open one."""
    rate_per_s: float | None = None
    """The rate of arrivals in an open loop; None in a closed one."""
    texts_per_request: int
    elapsed_s: float
    """Length of the measured window."""
    cpu_share: float
    """CPU that the load generator itself used, as a share of one core."""
    ended_early: str | None
    """Why the run stopped before its time."""
    bulk: "RunResult | None" = None
    """The figures of the bulk that ran beside."""

    @classmethod
    def of(cls, tally: Tally, **run: Any) -> Self:
        """The figures of a finished run; `run` are the fields that `tally` has not."""
        counted = {each.name: getattr(tally, each.name) for each in fields(tally)}
        return cls(**{**counted, "errors": Counter(dict(tally.errors.most_common()))}, **run)

    @property
    def mode(self) -> LoopMode:
        return "closed" if self.rate_per_s is None else "open"

    @property
    def latency(self) -> LatencySummary:
        """Computed anew at every access: keep it."""
        return LatencySummary.of(self.latencies)

    @property
    def num_errors(self) -> int:
        return self.errors.total()

    @property
    def num_offered(self) -> int:
        """Measured requests, successes and errors."""
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
        """Good requests ÷ all measured requests, errors included; 0.0 without requests."""
        return self.num_good / self.num_offered if self.num_offered else 0.0

    @property
    def late_share(self) -> float:
        return self.num_late / self.num_offered if self.num_offered else 0.0

    def _per_second(self, count: int) -> float:
        return count / self.elapsed_s if self.elapsed_s > 0 else 0.0
