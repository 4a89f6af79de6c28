import sys

import pytest

from tests.support.loads import make_load
from vecd.client.bench.responses import Receipt
from vecd.client.bench.result import RunResult


def make_result(goodput_ms: float | None = None, elapsed_s: float = 2.0) -> RunResult:
    return RunResult(load=make_load(goodput_ms=goodput_ms), elapsed_s=elapsed_s)


def test_of_a_single_latency_all_figures_are_it() -> None:
    result = make_result()
    result.add_latency(0.0071)
    assert list(result.latencies_ms().values()) == pytest.approx([7.1] * 6)


def test_without_latencies_there_are_no_figures() -> None:
    assert set(make_result().latencies_ms().values()) == {None}


def test_memory_does_not_grow_with_the_requests() -> None:
    def size_of(result: RunResult) -> int:
        return sum(map(sys.getsizeof, (result.latencies._counts, result.errors, result.first_details)))

    result = make_result()
    sizes = []
    for repetition in range(3):
        for i in range(44_000):  # from a microsecond to an hour
            result.add_latency(1e-6 * 1.0005 ** (i + repetition / 3))
            result.add_success(Receipt(1, 1))
            result.add_errors("timeout", f"{i}")
        sizes.append(size_of(result))
    assert sizes[0] == sizes[1] == sizes[2] < 1 << 21
    assert len(result.latencies._counts) < 34_000


def test_rates_are_of_successes() -> None:
    result = make_result()
    for _ in range(10):
        result.add_success(Receipt(num_embeddings=3, num_tokens=60))
    result.add_errors("HTTP 503", "full", 4)
    assert [result.per_s(num) for num in (result.num_requests, result.num_texts, result.num_tokens)] == [
        5.0,
        15.0,
        300.0,
    ]
    assert result.errors.total() == 4


def test_errors_are_counted_by_kind_and_the_first_of_each_is_kept() -> None:
    result = make_result()
    for kind, detail in [("timeout", "a"), ("HTTP 503", "b"), ("timeout", "c")]:
        result.add_errors(kind, detail)
    assert result.errors == {"timeout": 2, "HTTP 503": 1}
    assert result.first_details == {"timeout": "a", "HTTP 503": "b"}


def test_a_run_that_ended_before_it_began_has_no_rate() -> None:
    assert make_result(elapsed_s=0.0).per_s(5) == 0.0


def test_goodput_is_a_share_of_everything_that_was_asked() -> None:
    result = make_result(goodput_ms=50)
    for latency_s in (0.01, 0.05, 0.051, 3.0):
        result.add_latency(latency_s)
    result.add_errors("HTTP 429", "full", 4)
    assert (result.num_offered, result.num_good) == (8, 2)
    assert (result.share(result.num_good), result.per_s(result.num_good)) == (0.25, 1.0)


def test_a_run_without_requests_has_no_shares() -> None:
    assert make_result().share(0) == 0.0
