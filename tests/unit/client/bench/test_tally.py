import math
import sys

import pytest

from vecd.client.bench.histogram import LatencyHistogram
from vecd.client.bench.responses import Receipt
from vecd.client.bench.tally import LatencySummary, RunResult, Tally


def test_of_a_single_latency_all_figures_are_it() -> None:
    tally = Tally()
    tally.add_latency(0.0071)
    assert LatencySummary.of(tally.latencies) == pytest.approx([7.1] * 6)


def test_without_latencies_there_are_no_figures() -> None:
    assert all(map(math.isnan, LatencySummary.of(LatencyHistogram())))


def test_memory_does_not_grow_with_the_requests() -> None:
    def size_of(tally: Tally) -> int:
        return sys.getsizeof(tally.latencies._counts) + sys.getsizeof(tally.errors) + sys.getsizeof(tally.first_details)

    tally = Tally()
    tally.add_errors("timeout", "")
    before = size_of(tally)
    for i in range(20_000):
        tally.add_latency(i / 1000)
        tally.add_success(Receipt(1, 1))
        tally.add_errors("timeout", f"{i}")
    assert size_of(tally) == before


def summary_of(tally: Tally, elapsed_s: float = 2.0) -> RunResult:
    return RunResult.of(tally, clients=1, texts_per_request=3, elapsed_s=elapsed_s, cpu_share=0.1, ended_early=None)


def test_rates_are_of_successes() -> None:
    tally = Tally()
    for _ in range(10):
        tally.add_success(Receipt(num_embeddings=3, num_tokens=60))
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


def test_goodput_is_a_share_of_everything_that_was_asked() -> None:
    tally = Tally(goodput_ms=50)
    for latency_s in (0.01, 0.05, 0.051, 3.0):
        tally.add_latency(latency_s)
    tally.add_errors("HTTP 429", "full", 4)
    result = summary_of(tally)
    assert (result.num_offered, result.num_good) == (8, 2)
    assert (result.goodput_share, result.goodput_per_s, result.goodput_ms) == (0.25, 1.0, 50)


def test_a_run_without_requests_has_no_shares() -> None:
    result = summary_of(Tally())
    assert (result.goodput_share, result.late_share) == (0.0, 0.0)
