"""Counts of values in log-linear buckets: percentiles of any number of values in bounded memory.

Owns the buckets and their precision, three significant digits. Values have any unit; those of `vecd bench` are seconds.
Filled by `vecd.client.bench.result`.

Each doubling has 1,024 buckets, so a bucket is never wider than 1/1,024 of the values in it.
Source: the layout of G. Tene's HdrHistogram.
"""

import math
from collections import Counter

_BUCKETS_PER_DOUBLING = 1024
PRECISION = 1 / _BUCKETS_PER_DOUBLING
"""A percentile is at least the exact one, and above it by at most this share of it."""


class LatencyHistogram:
    """How often each value was recorded, to three significant digits.

    Takes memory for the buckets in use: from a microsecond to an hour, there are 33,000.
    """

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()
        """By the largest value of each bucket."""
        self.max_value = 0.0
        """Exact; 0 when there are none."""
        self._total = 0.0

    def record(self, value: float) -> None:
        """Count `value`; a negative one counts as 0."""
        value = max(value, 0.0)
        self._total += value
        self.max_value = max(self.max_value, value)
        mantissa, exponent = math.frexp(value)  # from a half to 1
        bucket = math.ceil(mantissa * 2 * _BUCKETS_PER_DOUBLING)
        self._counts[math.ldexp(bucket / (2 * _BUCKETS_PER_DOUBLING), exponent)] += 1

    @property
    def count(self) -> int:
        return self._counts.total()

    def percentile(self, percent: float) -> float | None:
        """The value at the nearest rank of `percent` (0–100), to `PRECISION`; None without values. The largest value is
        exact."""
        wanted = max(math.ceil(percent / 100 * self.count), 1)
        for largest, count in sorted(self._counts.items()):
            wanted -= count
            if wanted <= 0:
                return min(largest, self.max_value)
        return None

    @property
    def mean(self) -> float | None:
        return self._total / self.count if self._counts else None
