"""`vecd.gateway.telemetry.on_finished` and `vecd.gateway.types.timeline`: what is counted of a request that is over."""

from typing import Any

import pytest

from vecd.gateway.telemetry.on_finished import FinishedRequests
from vecd.gateway.telemetry.shared_metrics import GONE, SharedMetrics
from vecd.gateway.types.messages import HttpRequest
from vecd.gateway.types.timeline import Durations, RequestTimeline
from vecd.shm.shared_metrics import Counter, Histogram


def request(**noted: Any) -> HttpRequest:
    made = HttpRequest("POST", "/v1/embeddings", b"", {}, 1, True, "id")
    for name, value in noted.items():
        setattr(made.timeline, name, value)
    return made


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


def test_an_answered_embedding_request_is_counted_with_its_stages():
    shared_metrics = SharedMetrics.private()
    FinishedRequests(shared_metrics).on_finished(200, request(**EMBEDDED))
    assert shared_metrics.answers() == {(3, 200): 1}
    assert shared_metrics.total(Counter.INPUTS) == 2
    assert shared_metrics.total(Counter.INPUT_TOKENS) == 7
    counts, sum_s = shared_metrics.histogram(Histogram.COMPUTE)
    assert sum(counts) == 1
    assert sum_s == pytest.approx(0.016)
    assert sum(shared_metrics.histogram(Histogram.TOTAL)[0]) == 1


@pytest.mark.parametrize(
    ("status", "noted"), [(200, {"endpoint": 1}), (429, {"num_inputs": 2}), (503, EMBEDDED), (GONE, EMBEDDED)]
)
def test_what_was_not_embedded_and_answered_has_no_stages(status, noted):
    shared_metrics = SharedMetrics.private()
    FinishedRequests(shared_metrics).on_finished(status, request(**noted))
    assert shared_metrics.answers() == {(noted.get("endpoint", 0), status): 1}
    assert shared_metrics.total(Counter.INPUTS) == 0
    assert sum(shared_metrics.histogram(Histogram.TOTAL)[0]) == 0


def test_a_request_that_was_not_understood_goes_nowhere():
    shared_metrics = SharedMetrics.private()
    finished = FinishedRequests(shared_metrics)
    finished.listeners.append(lambda *heard: pytest.fail("nothing is known of it"))
    finished.on_finished(400, None)
    assert shared_metrics.answers() == {(0, 400): 1}


def test_listeners_are_told_after_it_is_counted():
    shared_metrics, heard = SharedMetrics.private(), []
    finished, over = FinishedRequests(shared_metrics), request()
    finished.listeners.append(lambda *told: heard.append((*told, shared_metrics.answers())))
    finished.on_finished(404, over)
    [(status, told, finished_at, answers)] = heard
    assert (status, told, answers) == (404, over, {(0, 404): 1})
    assert finished_at > 0


def test_a_listener_that_fails_harms_neither_the_request_nor_the_next_listener(caplog):
    """What raised here would have the connection write a second answer behind the first."""

    def fail(*told: object) -> None:
        raise ValueError("what a " + "caller sent")

    shared_metrics, heard = SharedMetrics.private(), []
    finished = FinishedRequests(shared_metrics)
    finished.listeners += [fail, lambda *told: heard.append(told)]
    finished.on_finished(200, request())
    assert len(heard) == 1
    assert "ValueError" in caplog.text
    assert "what a caller sent" not in caplog.text
