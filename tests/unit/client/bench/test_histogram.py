import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecd.client.bench.histogram import PRECISION, LatencyHistogram

MAX_VALUE = (1 << 42) - 1
"""In nanoseconds, 73 minutes: longer than any timeout."""

# Of all magnitudes alike: uniform integers would nearly all be of the largest.
VALUES = st.integers(0, MAX_VALUE.bit_length()).flatmap(lambda bits: st.integers(0, min((1 << bits) - 1, MAX_VALUE)))
PERCENTS = st.sampled_from([0, 1, 50, 90, 99, 99.9, 100]) | st.floats(0, 100)


def histogram_of(values: Sequence[int]) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for value in values:
        histogram.record(value)
    return histogram


def exact(values: Sequence[int], percent: float) -> int:
    """The nearest rank."""
    return sorted(values)[max(math.ceil(percent / 100 * len(values)), 1) - 1]


@given(st.lists(VALUES, min_size=1, max_size=200), PERCENTS)
def test_percentiles_are_exact_to_the_precision_and_never_too_small(values: list[int], percent: float) -> None:
    wanted = exact(values, percent)
    estimate = histogram_of(values).percentile(percent)
    assert estimate is not None
    assert wanted <= estimate <= wanted * (1 + PRECISION)


@given(st.lists(VALUES, min_size=1))
def test_count_mean_and_maximum_are_exact(values: list[int]) -> None:
    histogram = histogram_of(values)
    assert histogram.count == len(values)
    assert histogram.mean == pytest.approx(sum(values) / len(values))
    assert histogram.max_value == histogram.percentile(100) == max(values)


@given(st.lists(VALUES, min_size=1), PERCENTS, PERCENTS)
def test_percentiles_grow_with_the_percent(values: list[int], one: float, other: float) -> None:
    histogram = histogram_of(values)
    low, high = (histogram.percentile(percent) for percent in sorted((one, other)))
    assert low is not None
    assert high is not None
    assert low <= high


def test_without_values_there_is_nothing() -> None:
    assert (LatencyHistogram().percentile(50), LatencyHistogram().mean, LatencyHistogram().max_value) == (None, None, 0)


def test_a_negative_value_counts_as_0_and_none_is_too_large() -> None:
    histogram = histogram_of([-5, MAX_VALUE * 10, MAX_VALUE * 10, MAX_VALUE * 20])
    assert histogram.percentile(25) == 0
    assert MAX_VALUE * 10 <= (histogram.percentile(50) or 0) <= MAX_VALUE * 10 * (1 + PRECISION)
    assert histogram.percentile(100) == histogram.max_value == MAX_VALUE * 20
    assert histogram.count == 4


@pytest.mark.parametrize("value", [0, 1, 2047, 2048, 2049, 4095, 4096, MAX_VALUE - 1, MAX_VALUE])
def test_the_edges_of_buckets(value: int) -> None:
    histogram = histogram_of([value, MAX_VALUE])
    estimate = histogram.percentile(50)
    assert estimate is not None
    assert value <= estimate <= value * (1 + PRECISION)
