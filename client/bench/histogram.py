"""Counts of values in log-linear buckets: percentiles of any number of values in bounded memory.

Owns the buckets and their precision, three significant digits. Values are whole numbers, for `vecd bench` nanoseconds.
Filled by `vecd.client.bench.result`.

Buckets are 1 wide up to 2,047, then 2 wide up to 4,095, 4 wide up to 8,191 and so on: each doubling has 1,024 of them,
so a bucket is never wider than 1/1,024 of the values in it.
Source: the layout of G. Tene's HdrHistogram.
"""

import math
from collections import Counter

_SUB_BITS = 10
PRECISION = 1 / (1 << _SUB_BITS)
"""A percentile is at least the exact one, and above it by at most this share of it."""


class LatencyHistogram:
    """How often each value was recorded, to three significant digits.

    Takes memory for the buckets in use: from a microsecond to an hour, in nanoseconds, there are 33,000.
    """

    __slots__ = ("_counts", "count", "max_value", "total")

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        """By the largest value of each bucket."""
        self.count = 0
        self.total = 0
        """Sum of the values, exact."""
        self.max_value = 0
        """Exact; 0 when there are none."""

    def record(self, value: int) -> None:
        """Count `value`; a negative one counts as 0."""
        value = max(value, 0)
        self.count += 1
        self.total += value
        self.max_value = max(self.max_value, value)
        num_dropped_bits = max(value.bit_length() - _SUB_BITS - 1, 0)
        self._counts[value | ((1 << num_dropped_bits) - 1)] += 1

    def percentile(self, percent: float) -> int | None:
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
        return self.total / self.count if self.count else None
