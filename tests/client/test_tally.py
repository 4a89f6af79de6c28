import math

import pytest

from client.answers import Receipt
from client.tally import Latency, Result, Tally, percentile, summarize


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1), (1, 1), (50, 50), (50.5, 51), (99, 99), (99.9, 100), (100, 100)]
)
def test_percentiles_are_values_that_were_seen(percent: float, value: float) -> None:
    assert percentile(range(1, 101), percent) == value


def test_of_a_single_value_all_percentiles_are_it() -> None:
    assert Latency.of([7.0]) == Latency(7.0, 7.0, 7.0, 7.0)


def test_the_order_of_latencies_does_not_matter() -> None:
    assert Latency.of([3.0, 1.0, 2.0]) == Latency(2.0, 3.0, 3.0, 3.0)


def test_without_values_there_is_no_percentile() -> None:
    assert math.isnan(percentile([], 50))


def summary_of(tally: Tally, elapsed_s: float = 2.0) -> Result:
    return summarize(tally, clients=1, elapsed_s=elapsed_s, cpu_share=0.1, ended_early=None)


def test_rates_are_of_successes() -> None:
    tally = Tally()
    for _ in range(10):
        tally.add_success(5.0, Receipt(num_embeddings=3, num_tokens=60))
    tally.add_errors("HTTP 503", "full", 4)
    result = summary_of(tally)
    assert (result.requests_per_s, result.texts_per_s, result.tokens_per_s) == (5.0, 15.0, 300.0)
    assert result.num_errors == 4


def test_errors_are_counted_by_kind_and_the_first_of_each_is_kept() -> None:
    tally = Tally()
    for kind, detail in [("timeout", "a"), ("HTTP 503", "b"), ("timeout", "c")]:
        tally.add_errors(kind, detail)
    result = summary_of(tally)
    assert result.errors == {"timeout": 2, "HTTP 503": 1}
    assert result.first_details == {"timeout": "a", "HTTP 503": "b"}


def test_a_run_that_ended_before_it_began_has_no_rate() -> None:
    assert summary_of(Tally(), elapsed_s=0.0).requests_per_s == 0.0
