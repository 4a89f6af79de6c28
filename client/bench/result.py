"""What the requests of a run have come to: counts, latencies, and the figures that follow from them.

Owns latencies, counts and percentiles, in memory that does not grow with the requests; every figure has its unit in its
name. Reads no clock and opens no socket. Filled by `vecd.client.bench.stream` and `vecd.client.bench.run`, printed by
`vecd.client.bench.report`.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Optional

from vecd.client.bench.histogram import LatencyHistogram
from vecd.client.bench.load import Load
from vecd.client.bench.responses import Receipt

_PERCENTS = {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99, "p999_ms": 99.9, "max_ms": 100}
LATE_S = 0.01
"""A request of an open loop that is sent later than this after its arrival is counted as late."""


@dataclass(slots=True, kw_only=True)
class RunResult:
    """The requests of one loop. Owned by the run until it is over. Rates are of successes."""

    load: Load
    """What was sent."""
    latencies: LatencyHistogram = field(default_factory=LatencyHistogram)
    """Seconds, of the measured requests that succeeded: from the moment of sending to the whole response."""
    num_good: int = 0
    """Successes within the load's `goodput_ms`; all without it."""
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

    # Set when the run is over.
    elapsed_s: float = 0.0
    """Length of the measured window."""
    cpu_share: float = 0.0
    """CPU that the load generator itself used, as a share of one core."""
    ended_early: str | None = None
    """Why the run stopped before its time."""
    bulk: Optional["RunResult"] = None
    """The figures of the load's bulk."""

    def add_latency(self, latency_s: float) -> None:
        """Count the latency of a measured request that succeeded."""
        self.latencies.record(latency_s)
        if self.load.goodput_ms is None or latency_s * 1000 <= self.load.goodput_ms:
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

    def latencies_ms(self) -> dict[str, float | None]:
        """Percentiles, largest and mean, to three significant digits, the largest exactly; None when nothing
        succeeded."""
        found = {name: self.latencies.percentile(percent) for name, percent in _PERCENTS.items()}
        figures = {**found, "mean_ms": self.latencies.mean}
        return {name: None if value is None else value * 1000 for name, value in figures.items()}

    @property
    def num_offered(self) -> int:
        """Measured requests, successes and errors."""
        return self.latencies.count + self.errors.total()

    def per_s(self, count: int) -> float:
        """`count` a second of the measured window; 0.0 when there was none."""
        return count / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def share(self, count: int) -> float:
        """`count` ÷ all measured requests, errors included; 0.0 without requests."""
        return count / self.num_offered if self.num_offered else 0.0
