import time
from typing import Any

import pytest

from tests.support.dispatching import finished_requests, private_metrics
from vecd.gateway.request import Durations, HttpRequest, RequestTimeline
from vecd.gateway.telemetry.measures import GONE, SharedMetrics
from vecd.shm.shared_metrics import (
    NUM_BATCHES,
    STATUSES,
    BatchCell,
    Counter,
    Gauge,
    Histogram,
    clear_gauges,
)
from vecd.shm.wire import Done, Incarnation


def test_a_new_life_counts_on_and_has_nothing_yet(shared_metrics_of_all, metrics_fd, metrics_spec):
    shared_metrics_of_all[0].add(Counter.TOKENS, 30)
    shared_metrics_of_all[0].add_answer(1, 200)
    shared_metrics_of_all[0].set(Gauge.CONNECTIONS, 5)
    shared_metrics_of_all[0].observe(Histogram.LOOP_LAG, 0.1)
    successor = SharedMetrics.mapped(metrics_fd, metrics_spec, 0)
    successor.add(Counter.TOKENS, 1)
    successor.add_answer(1, 200)
    assert shared_metrics_of_all[1].total(Counter.TOKENS) == 31
    assert shared_metrics_of_all[1].answers() == {(1, 200): 2}
    assert shared_metrics_of_all[1].total(Gauge.CONNECTIONS) == 0
    assert sum(shared_metrics_of_all[1].histogram(Histogram.LOOP_LAG)[0]) == 1


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0.0, 0), (0.0005, 0), (0.00051, 1), (0.003, 3), (2.0, 11), (2.05, 12), (60.0, 12)]
)
def test_a_value_is_counted_in_the_first_bucket_that_is_large_enough(shared_metrics_of_all, seconds, bucket):
    shared_metrics_of_all[1].observe(Histogram.LOOP_LAG, seconds)
    counts, sum_s = shared_metrics_of_all[0].histogram(Histogram.LOOP_LAG)
    assert [index for index, count in enumerate(counts) if count] == [bucket]
    assert sum_s == pytest.approx(seconds)


# --- answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "counted"), [(418, 400), (201, 400), (499, GONE), (511, 500), (599, 500)])
def test_a_status_that_is_not_among_those_known_is_counted_with_its_kind(shared_metrics_of_all, status, counted):
    shared_metrics_of_all[0].add_answer(2, status)
    assert shared_metrics_of_all[1].answers() == {(2, counted): 1}


def test_the_last_endpoint_has_a_cell_for_every_status(shared_metrics_of_all):
    last = len(shared_metrics_of_all[0].ours.own.answers) // len(STATUSES) - 1
    for status in STATUSES:
        shared_metrics_of_all[0].add_answer(last, status)
    assert shared_metrics_of_all[1].answers() == dict.fromkeys(((last, status) for status in STATUSES), 1)
    with pytest.raises(IndexError):
        shared_metrics_of_all[0].add_answer(last + 1, 200)


def test_what_a_gateway_has_answered_is_all_but_those_whose_client_went(shared_metrics_of_all):
    for status in (200, 500, GONE, GONE):
        shared_metrics_of_all[0].add_answer(3, status)
    shared_metrics_of_all[1].add_answer(3, 200)
    assert [shared_metrics_of_all[1].num_answered_by(row) for row in shared_metrics_of_all[1].sections] == [2, 1]


# --- workers and batches ---------------------------------------------------------------------------------------


def do_batch(shared_metrics: SharedMetrics, number: int, worker: int, num_tokens: int = 10) -> None:
    shared_metrics.batch_sent(number, worker, 2, num_tokens, 100)
    shared_metrics.batch_done(worker, 2, num_tokens, Done(0, number, 0, 2, 500, 1))


def test_a_worker_is_known_from_its_first_life_on_and_its_life_is_the_newest_anybody_heard_of(shared_metrics_of_all):
    assert shared_metrics_of_all[0].known_workers() == []
    shared_metrics_of_all[1].note_life(Incarnation(1, 4))
    assert shared_metrics_of_all[0].known_workers() == [1]
    shared_metrics_of_all[0].note_life(Incarnation(1, 3))
    assert shared_metrics_of_all[0].worker_life(1) == 4


def numbers(shared_metrics: SharedMetrics, since_ns: int = 0) -> list[tuple[int, int]]:
    """Gateway and number."""
    return [(batch[0], batch[1 + BatchCell.NUMBER]) for batch in shared_metrics.recent_batches(since_ns)]


def test_batches_under_way_and_of_late_are_remembered_in_the_order_they_were_sent(shared_metrics_of_all):
    before = time.monotonic_ns()
    shared_metrics_of_all[0].batch_sent(1, 0, 2, 20, 100)
    shared_metrics_of_all[1].batch_sent(1, 1, 3, 30, 100)
    shared_metrics_of_all[0].batch_done(0, 2, 20, Done(0, 1, 0, 2, 555))
    [done, under_way] = shared_metrics_of_all[1].recent_batches(before)
    assert done[:5] == (0, 1, 0, 2, 20)
    assert before < done[5] <= done[6]
    assert done[7] == 555
    assert under_way[:5] == (1, 1, 1, 3, 30)
    assert under_way[6] == 0
    assert numbers(shared_metrics_of_all[0], time.monotonic_ns()) == [(1, 1)], (
        "what was answered before is not asked for"
    )


def test_a_lost_batch_is_over_without_having_been_computed(shared_metrics_of_all):
    shared_metrics_of_all[0].batch_sent(7, 0, 2, 20, 100)
    shared_metrics_of_all[0].end_batch(7)
    [batch] = shared_metrics_of_all[1].recent_batches(0)
    assert batch[1 + BatchCell.DONE_NS] > 0
    assert batch[1 + BatchCell.COMPUTE_US] == 0
    assert shared_metrics_of_all[1].total(Counter.BATCHES) == 0
    assert numbers(shared_metrics_of_all[1], time.monotonic_ns()) == []


def test_what_comes_late_for_a_batch_that_is_forgotten_changes_no_other(shared_metrics_of_all):
    shared_metrics_of_all[0].batch_sent(1, 0, 2, 20, 100)
    shared_metrics_of_all[0].batch_sent(1 + NUM_BATCHES, 1, 3, 30, 100)
    shared_metrics_of_all[0].end_batch(1)
    shared_metrics_of_all[0].batch_done(0, 2, 20, Done(0, 1, 0, 2, 555))
    [batch] = shared_metrics_of_all[1].recent_batches(0)
    assert batch[:5] == (0, 1 + NUM_BATCHES, 1, 3, 30)
    assert batch[1 + BatchCell.DONE_NS] == 0
    assert shared_metrics_of_all[1].total(Counter.BATCHES) == 1, "but it was embedded"


def test_so_many_are_remembered_and_no_more(shared_metrics_of_all):
    for number in range(1, 3 * NUM_BATCHES):
        do_batch(shared_metrics_of_all[0], number, 0)
    assert [number for _, number in numbers(shared_metrics_of_all[1])] == list(range(2 * NUM_BATCHES, 3 * NUM_BATCHES))


def test_batches_of_a_gateway_s_former_life_are_forgotten(shared_metrics_of_all, metrics_fd, metrics_spec):
    shared_metrics_of_all[0].batch_sent(1, 0, 2, 20, 100)
    shared_metrics_of_all[1].batch_sent(1, 0, 2, 20, 100)
    successor = SharedMetrics.mapped(metrics_fd, metrics_spec, 0)
    assert numbers(shared_metrics_of_all[1]) == [(1, 1)]
    successor.batch_sent(1, 0, 2, 20, 100)
    assert numbers(shared_metrics_of_all[1]) == [(1, 1), (0, 1)]


def test_batches_of_a_dead_gateway_that_has_no_successor_yet_are_not_under_way(
    shared_metrics_of_all, metrics_fd, metrics_spec
):
    shared_metrics_of_all[0].batch_sent(1, 0, 2, 20, 100)
    clear_gauges(metrics_fd, metrics_spec, 0)
    assert numbers(shared_metrics_of_all[1]) == []


# --- gauges ----------------------------------------------------------------------------------------------------


def test_a_gateway_cannot_write_to_another_s_row(shared_metrics_of_all):
    with pytest.raises(TypeError, match="read-only"):
        shared_metrics_of_all[0].sections[1].own.counters[0] = 1


def request(**noted: Any) -> HttpRequest:
    made = HttpRequest("POST", "/v1/embeddings", b"", {}, 1, True, "id")
    for name, value in noted.items():
        setattr(made.timeline, name, value)
    return made


# --- a request that is over --------------------------------------------------------------------------------------

EMBEDDED = {
    "endpoint": 3,
    "num_inputs": 2,
    "num_tokens": 7,
    "arrived_at": 10.0,
    "parsed_at": 10.001,
    "entered_at": 10.003,
    "tokenized_at": 10.007,
    "sent_at": 10.015,
    "done_at": 10.031,
}


def record_of(**noted: Any) -> RequestTimeline:
    return request(**{**EMBEDDED, **noted}).timeline


def test_where_the_time_went():
    durations = record_of().durations(10.063)
    assert durations == pytest.approx(Durations(0.001, 0.004, 0.010, 0.016, 0.032, 0.063))
    assert sum(durations[:-1]) == pytest.approx(durations.total_s)


def test_what_was_computed_while_the_rest_was_tokenized_waited_for_nothing():
    durations = record_of(sent_at=10.004).durations(10.063)
    assert durations.queue_s == pytest.approx(0.002), "at the door alone"
    assert durations.compute_s == pytest.approx(0.027)


def test_an_answered_embedding_request_is_counted_with_its_stages(shared_metrics_of_all):
    ours, other = shared_metrics_of_all
    for done_at in (10.031, 10.016):
        finished_requests(ours).on_finished(200, request(**{**EMBEDDED, "done_at": done_at}))
    assert other.answers() == {(3, 200): 2}
    assert (other.total(Counter.INPUTS), other.total(Counter.INPUT_TOKENS)) == (4, 14)
    assert not any(ours.histogram(Histogram.COMPUTE)[0]), "only the event loop counts: a thread renders /metrics"
    ours.publish()
    counts, sum_s = other.histogram(Histogram.COMPUTE)
    assert {Histogram.COMPUTE.bounds[place]: num for place, num in enumerate(counts) if num} == {0.001: 1, 0.02: 1}
    assert sum_s == pytest.approx(0.017)
    assert sum(other.histogram(Histogram.TOTAL)[0]) == 2


@pytest.mark.parametrize(
    ("status", "noted"),
    [(200, {"endpoint": 1}), (429, {"num_inputs": 2}), (503, EMBEDDED), (GONE, EMBEDDED), (400, {})],
)
def test_what_was_not_embedded_and_answered_has_no_stages(status, noted):
    shared_metrics = private_metrics()
    finished_requests(shared_metrics).on_finished(status, request(**noted) if noted else None)
    assert shared_metrics.answers() == {(noted.get("endpoint", 0), status): 1}
    assert shared_metrics.total(Counter.INPUTS) == 0
    assert sum(shared_metrics.histogram(Histogram.TOTAL)[0]) == 0


def test_a_log_that_fails_harms_no_request(caplog, monkeypatch):
    """What raised here would have the connection write a second answer behind the first."""

    def fail(*told: object) -> None:
        raise ValueError("what a " + "caller sent")

    finished = finished_requests(private_metrics())
    monkeypatch.setattr(finished, "log", fail)
    finished.on_finished(200, request())
    assert "ValueError" in caplog.text
    assert "what a caller sent" not in caplog.text
