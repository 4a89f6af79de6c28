"""Counts of values in log-linear buckets: percentiles of any number of values in constant memory.

Owns the buckets and their precision, three significant digits. Values are whole numbers, for `vecd bench` nanoseconds.
Filled by `vecd.client.bench.tally`.

Buckets are 1 wide up to 2,047, then 2 wide up to 4,095, 4 wide up to 8,191 and so on: each doubling has 1,024 of them,
so a bucket is never wider than 1/1,024 of the values in it.
Source: the layout of G. Tene's HdrHistogram.
"""

import math
from array import array

_SUB_BITS = 10
_SUB_BUCKETS = 1 << _SUB_BITS
PRECISION = 1 / _SUB_BUCKETS
"""A percentile is at least the exact one, and above it by at most this share of it."""
MAX_VALUE = (1 << 42) - 1
"""Larger values count as this one, except in `max_value` and `mean`. In nanoseconds it is 73 minutes."""
_NUM_BUCKETS = (MAX_VALUE.bit_length() - _SUB_BITS + 1) * _SUB_BUCKETS


class LatencyHistogram:
    """How often each value was recorded, to three significant digits. Takes 264 KiB for any number of values."""

    __slots__ = ("_counts", "count", "max_value", "total")

    def __init__(self) -> None:
        self._counts = array("Q", bytes(8 * _NUM_BUCKETS))
        self.count = 0
        self.total = 0
        """Sum of the values, exact."""
        self.max_value = 0
        """Exact; 0 when there are none."""

    def record(self, value: int) -> None:
        """Count `value`; a negative one counts as 0."""
        if value < 0:
            value = 0
        self.count += 1
        self.total += value
        if value > self.max_value:
            self.max_value = value
        # The inverse of `_end_of`, written out: this runs once a request.
        if value > MAX_VALUE:
            value = MAX_VALUE
        shift = value.bit_length() - _SUB_BITS - 1
        self._counts[value if shift <= 0 else (shift << _SUB_BITS) + (value >> shift)] += 1

    def percentile(self, percent: float) -> int | None:
        """The value at the nearest rank of `percent` (0–100), to `PRECISION`; None without values. The largest value is
        exact."""
        if not self.count:
            return None
        wanted = min(max(math.ceil(percent / 100 * self.count), 1), self.count)
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen >= wanted:
                # The last bucket holds what is above its own end, too.
                return self.max_value if seen == self.count else _end_of(bucket)
        raise AssertionError("counts and count differ")

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


def _end_of(bucket: int) -> int:
    """The largest value that falls into `bucket`."""
    if bucket < 2 * _SUB_BUCKETS:
        return bucket
    shift = (bucket >> _SUB_BITS) - 1
    return ((bucket - (shift << _SUB_BITS) + 1) << shift) - 1
