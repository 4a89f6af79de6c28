"""What a run has seen so far, and the figures that come out of it.

Owns latencies, counts and percentiles; every figure has its unit in its name. Reads no clock and opens no
socket. Filled by `client.load`, printed by `client.report`.
"""

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from client.answers import Receipt


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all are not above (nearest rank). NaN when there are none."""
    if not ordered:
        return math.nan
    rank = math.ceil(percent / 100 * len(ordered))
    return ordered[max(rank, 1) - 1]


@dataclass(slots=True)
class Tally:
    """Counts one run's measured requests. Owned by the run; read when it is over."""

    latencies_ms: "array[float]" = field(default_factory=lambda: array("d"))
    """Of the requests that succeeded, in order of their answers."""
    num_texts: int = 0
    num_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    """How many requests failed, by kind."""
    first_details: dict[str, str] = field(default_factory=dict)
    """What the first error of each kind said."""

    def add_success(self, latency_ms: float, receipt: Receipt) -> None:
        self.latencies_ms.append(latency_ms)
        self.num_texts += receipt.num_embeddings
        self.num_tokens += receipt.num_tokens

    def add_errors(self, kind: str, detail: str, count: int = 1) -> None:
        self.errors[kind] += count
        self.first_details.setdefault(kind, detail)


@dataclass(frozen=True, slots=True)
class Latency:
    """Of the requests that succeeded, from wanting to send to having the whole answer; NaN when none did."""

    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, latencies_ms: Sequence[float]) -> "Latency":
        ordered = sorted(latencies_ms)
        return cls(*(percentile(ordered, percent) for percent in (50, 90, 99, 100)))


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one run. Rates are of successes."""

    clients: int
    elapsed_s: float
    """Length of the measured window."""
    num_requests: int
    num_texts: int
    num_tokens: int
    latency: Latency
    errors: dict[str, int]
    first_details: dict[str, str]
    cpu_share: float
    """CPU the load generator itself used, as a share of one core."""
    ended_early: str | None
    """Why the run stopped before its time."""

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
    def num_errors(self) -> int:
        return sum(self.errors.values())

    def _per_second(self, count: int) -> float:
        return count / self.elapsed_s if self.elapsed_s > 0 else 0.0


def summarize(tally: Tally, *, clients: int, elapsed_s: float, cpu_share: float, ended_early: str | None) -> Result:
    """The figures of a finished run."""
    return Result(
        clients=clients,
        elapsed_s=elapsed_s,
        num_requests=len(tally.latencies_ms),
        num_texts=tally.num_texts,
        num_tokens=tally.num_tokens,
        latency=Latency.of(tally.latencies_ms),
        errors=dict(tally.errors.most_common()),
        first_details=tally.first_details,
        cpu_share=cpu_share,
        ended_early=ended_early,
    )
