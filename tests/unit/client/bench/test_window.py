import math

import pytest

from vecd.client.bench.window import Window


def test_a_timed_run_measures_what_ends_inside_it() -> None:
    window = Window(started_at=100, warmup_s=2, duration_s=10)
    assert not window.measures(sent_at=100, ended_at=101.9)
    assert window.measures(sent_at=101, ended_at=102)
    assert window.measures(sent_at=111, ended_at=111.9)
    assert not window.measures(sent_at=111, ended_at=112)


def test_a_timed_run_counts_failures_that_come_after_it() -> None:
    window = Window(started_at=100, warmup_s=2, duration_s=10)
    assert not window.measures_failure(sent_at=100, ended_at=101)
    assert window.measures_failure(sent_at=111, ended_at=141)


def test_a_timed_run_sends_until_it_closes() -> None:
    window = Window(started_at=100, warmup_s=2, duration_s=10)
    assert window.may_send(100)
    assert window.may_send(111.9)
    assert not window.may_send(112)


def test_a_timed_run_is_no_longer_than_it_should_be() -> None:
    window = Window(started_at=100, warmup_s=2, duration_s=10)
    assert [window.elapsed_s(now) for now in (101, 102, 107, 112, 120)] == [0, 0, 5, 10, 10]


def test_a_counted_run_sends_its_number_after_the_warmup() -> None:
    window = Window(started_at=100, warmup_s=2, duration_s=10, num_requests=3)
    assert all(window.may_send(101) for _ in range(5))
    assert [window.may_send(103) for _ in range(5)] == [True, True, True, False, False]
    assert window.closes_at == math.inf


def test_a_counted_run_measures_its_own_requests_alone() -> None:
    window = Window(started_at=100, warmup_s=2, duration_s=10, num_requests=3)
    assert not window.measures(sent_at=101, ended_at=103)
    assert window.measures(sent_at=103, ended_at=999)
    assert window.measures_failure(sent_at=103, ended_at=999)


def test_a_counted_run_lasts_from_its_first_request() -> None:
    window = Window(started_at=100, warmup_s=2, duration_s=10, num_requests=3)
    assert window.elapsed_s(105) == 0
    window.may_send(103)
    window.may_send(104)
    assert window.elapsed_s(108) == 5


def test_an_open_run_measures_what_arrives_inside_it_however_late_it_ends() -> None:
    window = Window(started_at=100, warmup_s=2, duration_s=10, is_by_arrival=True)
    assert not window.measures(sent_at=101.9, ended_at=103)
    assert window.measures(sent_at=102, ended_at=103)
    assert window.measures(sent_at=111.9, ended_at=140)
    assert not window.measures_failure(sent_at=112, ended_at=112)
    assert window.measures_failure(sent_at=111, ended_at=140)


def test_an_open_run_has_the_rate_of_what_ends_inside_it() -> None:
    window = Window(started_at=100, warmup_s=2, duration_s=10, is_by_arrival=True)
    assert window.counts(sent_at=101, ended_at=102)
    assert not window.counts(sent_at=101, ended_at=101.9)
    assert not window.counts(sent_at=111, ended_at=112)


@pytest.mark.parametrize("is_by_arrival", [False, True])
def test_a_counted_run_counts_what_it_measures(is_by_arrival: bool) -> None:
    window = Window(started_at=100, warmup_s=2, duration_s=10, num_requests=3, is_by_arrival=is_by_arrival)
    assert not window.counts(sent_at=101, ended_at=103)
    assert window.counts(sent_at=103, ended_at=999)
    assert not window.measures_failure(sent_at=101, ended_at=103)
