"""What came of a trial's requests: each is counted once, under one heading.

Owns the counts, the latencies and what may never be among them. Filled by `traffic`.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_MAX_DETAILS = 20


@dataclass(slots=True)
class Tally:
    """What came of the requests: each is counted once, under one heading."""

    num_right: int = 0
    num_texts: int = 0
    """Of those answered right."""
    refused: Counter[int] = field(default_factory=Counter)
    """By status: 429 and 503, with Retry-After."""
    num_broken: int = 0
    """Whose connection was closed or reset before the answer."""
    num_unconnected: int = 0
    """That found nobody who listens."""
    failures: list[str] = field(default_factory=list)
    """Whatever must never be: another status, a wrong vector, another's answer, none in time, a refusal without
    Retry-After."""
    num_duplicates: int = 0
    """Answers that nobody had asked for."""
    models: list[tuple[float, float, int]] = field(default_factory=list)
    """Of those answered right: when they were sent and answered, by `time.monotonic`, and whose vectors they have."""
    latencies_s: list[float] = field(default_factory=list)
    """Of those answered right."""

    @property
    def num_requests(self) -> int:
        refused = sum(self.refused.values())
        return self.num_right + refused + self.num_broken + self.num_unconnected + len(self.failures)

    def percentile_ms(self, percent: float) -> float:
        return round(float(np.percentile(self.latencies_s, percent)) * 1000, 1) if self.latencies_s else float("nan")

    def figures(self) -> dict[str, Any]:
        """For `form.record`."""
        return {
            "requests": self.num_requests,
            "right": self.num_right,
            "failed_or_wrong": len(self.failures),
            "duplicated": self.num_duplicates,
            "refused": sum(self.refused.values()),
            "broken_connections": self.num_broken,
            "p50_ms": self.percentile_ms(50),
            "p99_ms": self.percentile_ms(99),
            "max_ms": self.percentile_ms(100),
            **({"first_failures": self.failures[:3]} if self.failures else {}),
        }

    def assert_all_right(self) -> None:
        """Every request was answered, once, with its own vectors."""
        others = self.refused, self.num_broken, self.num_unconnected, self.num_duplicates
        assert (self.failures[:_MAX_DETAILS], *others) == ([], Counter(), 0, 0, 0)
        assert self.num_right > 0

    def assert_none_wrong(self) -> None:
        """Whoever was answered was answered right."""
        assert (self.failures[:_MAX_DETAILS], self.num_duplicates) == ([], 0)
        assert self.num_right > 0
