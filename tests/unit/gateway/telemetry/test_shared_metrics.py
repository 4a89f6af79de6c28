import time

import pytest

from vecd.gateway.telemetry.shared_metrics import GONE, SharedMetrics
from vecd.shm.shared_metrics import (
    NUM_BATCHES,
    STATUSES,
    BatchCell,
    Counter,
    Gauge,
    Histogram,
    ServiceKey,
    WorkerCell,
    WorkerKey,
    clear_gauges,
)
from vecd.shm.wire import Incarnation


def test_what_gateways_count_is_added_up_for_each_of_them(shared_metrics_of_all):
    shared_metrics_of_all[0].add(Counter.TOKENS, 30)
    shared_metrics_of_all[1].add(Counter.TOKENS, 12)
    shared_metrics_of_all[1].add(Counter.BATCHES)
    shared_metrics_of_all[0].set(Gauge.QUEUED_TOKENS, 5)
    shared_metrics_of_all[1].set(Gauge.QUEUED_TOKENS, 6)
    for shared_metrics in shared_metrics_of_all:
        assert shared_metrics.total(Counter.TOKENS) == 42
        assert shared_metrics.total(Counter.BATCHES) == 1
        assert shared_metrics.total(Gauge.QUEUED_TOKENS) == 11


def test_a_new_life_counts_on_and_has_nothing_yet(shared_metrics_of_all, board_fd, board_spec):
    shared_metrics_of_all[0].add(Counter.TOKENS, 30)
    shared_metrics_of_all[0].add_answer(1, 200)
    shared_metrics_of_all[0].set(Gauge.CONNECTIONS, 5)
    shared_metrics_of_all[0].observe(Histogram.LOOP_LAG, 0.1)
    successor = SharedMetrics.mapped(board_fd, board_spec, 0)
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


def test_answers_are_counted_by_endpoint_and_status_over_all_gateways(shared_metrics_of_all):
    shared_metrics_of_all[0].add_answer(1, 200)
    shared_metrics_of_all[0].add_answer(1, 429)
    shared_metrics_of_all[1].add_answer(1, 200)
    shared_metrics_of_all[1].add_answer(0, 404)
    for shared_metrics in shared_metrics_of_all:
        assert shared_metrics.answers() == {(1, 200): 2, (1, 429): 1, (0, 404): 1}


@pytest.mark.parametrize(("status", "counted"), [(418, 400), (201, 400), (499, GONE), (511, 500), (599, 500)])
def test_a_status_that_is_not_among_those_known_is_counted_with_its_kind(shared_metrics_of_all, status, counted):
    shared_metrics_of_all[0].add_answer(2, status)
    assert shared_metrics_of_all[1].answers() == {(2, counted): 1}


def test_the_last_endpoint_has_a_cell_for_every_status(shared_metrics_of_all):
    last = len(shared_metrics_of_all[0].ours.answers) // len(STATUSES) - 1
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


SERVICE = ServiceKey(1)


def life_of(worker: int, life: int, service: ServiceKey = SERVICE) -> WorkerKey:
    return WorkerKey(service, Incarnation(worker, life))


def up(shared_metrics: SharedMetrics, worker: int, life: int) -> None:
    shared_metrics.worker_up(life_of(worker, life))


def do_batch(shared_metrics: SharedMetrics, number: int, worker: int, num_tokens: int = 10) -> None:
    shared_metrics.batch_sent(number, worker, 2, num_tokens, 100)
    shared_metrics.batch_done(number, worker, 2, num_tokens, 500, 1)


def test_batches_are_counted_by_worker_and_by_life(shared_metrics_of_all):
    for shared_metrics in shared_metrics_of_all:
        up(shared_metrics, 0, 1)
        up(shared_metrics, 1, 1)
        do_batch(shared_metrics, 1, 0)
        do_batch(shared_metrics, 2, 1)
    for shared_metrics in shared_metrics_of_all:
        up(shared_metrics, 0, 2)
    up(shared_metrics_of_all[0], 0, 2)  # told again, as after its own death
    do_batch(shared_metrics_of_all[0], 3, 0)
    of_all_lives = [shared_metrics_of_all[1].worker_total(worker, WorkerCell.BATCHES) for worker in range(2)]
    assert of_all_lives == [3, 2]
    batches_of = shared_metrics_of_all[1].worker_batches_in
    assert (batches_of(life_of(0, 2)), batches_of(life_of(1, 1))) == (1, 2)
    assert batches_of(life_of(0, 1)) == 0, "nobody asks for a life that is over"


def test_a_batch_is_counted_for_its_worker_and_for_all(shared_metrics_of_all):
    up(shared_metrics_of_all[0], 1, 1)
    shared_metrics_of_all[0].batch_sent(1, 1, 5, 600, 2400)
    shared_metrics_of_all[0].batch_done(1, 1, 5, 600, 7000, 24)
    shared_metrics = shared_metrics_of_all[1]
    assert [shared_metrics.total(c) for c in (Counter.BATCHES, Counter.SEQUENCES, Counter.TOKENS)] == [1, 5, 600]
    assert [shared_metrics.total(c) for c in (Counter.COMPUTE_US, Counter.PADDING_TOKENS)] == [7000, 24]
    cells = (WorkerCell.BATCHES, WorkerCell.SEQUENCES, WorkerCell.TOKENS, WorkerCell.COMPUTE_US)
    assert [shared_metrics.worker_total(1, cell) for cell in cells] == [1, 5, 600, 7000]
    assert [shared_metrics.worker_total(0, cell) for cell in cells] == [0, 0, 0, 0]
    assert shared_metrics.histogram(Histogram.BATCH_FILL)[1] == pytest.approx(0.25)
    assert shared_metrics.histogram(Histogram.BATCH_TOKENS)[1] == 600
    assert shared_metrics.histogram(Histogram.BATCH_SEQUENCES)[1] == 5


def test_a_worker_is_known_from_its_first_life_on_and_its_life_is_the_newest_anybody_heard_of(shared_metrics_of_all):
    assert shared_metrics_of_all[0].known_workers() == []
    up(shared_metrics_of_all[1], 1, 4)
    assert shared_metrics_of_all[0].known_workers() == [1]
    up(shared_metrics_of_all[0], 1, 3)
    assert shared_metrics_of_all[0].worker_life(1) == 4


def numbers(shared_metrics: SharedMetrics, since_ns: int = 0) -> list[tuple[int, int]]:
    """Gateway and number."""
    return [(batch[0], batch[1 + BatchCell.NUMBER]) for batch in shared_metrics.recent_batches(since_ns)]


def test_batches_under_way_and_of_late_are_remembered_in_the_order_they_were_sent(shared_metrics_of_all):
    before = time.monotonic_ns()
    shared_metrics_of_all[0].batch_sent(1, 0, 2, 20, 100)
    shared_metrics_of_all[1].batch_sent(1, 1, 3, 30, 100)
    shared_metrics_of_all[0].batch_done(1, 0, 2, 20, 555, 0)
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
    shared_metrics_of_all[0].batch_lost(7)
    [batch] = shared_metrics_of_all[1].recent_batches(0)
    assert batch[1 + BatchCell.DONE_NS] > 0
    assert batch[1 + BatchCell.COMPUTE_US] == 0
    assert shared_metrics_of_all[1].total(Counter.BATCHES) == 0
    assert numbers(shared_metrics_of_all[1], time.monotonic_ns()) == []


def test_what_comes_late_for_a_batch_that_is_forgotten_changes_no_other(shared_metrics_of_all):
    shared_metrics_of_all[0].batch_sent(1, 0, 2, 20, 100)
    shared_metrics_of_all[0].batch_sent(1 + NUM_BATCHES, 1, 3, 30, 100)
    shared_metrics_of_all[0].batch_lost(1)
    shared_metrics_of_all[0].batch_done(1, 0, 2, 20, 555, 0)
    [batch] = shared_metrics_of_all[1].recent_batches(0)
    assert batch[:5] == (0, 1 + NUM_BATCHES, 1, 3, 30)
    assert batch[1 + BatchCell.DONE_NS] == 0
    assert shared_metrics_of_all[1].total(Counter.BATCHES) == 1, "but it was embedded"


def test_so_many_are_remembered_and_no_more(shared_metrics_of_all):
    for number in range(1, 3 * NUM_BATCHES):
        do_batch(shared_metrics_of_all[0], number, 0)
    assert [number for _, number in numbers(shared_metrics_of_all[1])] == list(range(2 * NUM_BATCHES, 3 * NUM_BATCHES))


def test_batches_of_a_gateway_s_former_life_are_forgotten(shared_metrics_of_all, board_fd, board_spec):
    shared_metrics_of_all[0].batch_sent(1, 0, 2, 20, 100)
    shared_metrics_of_all[1].batch_sent(1, 0, 2, 20, 100)
    successor = SharedMetrics.mapped(board_fd, board_spec, 0)
    assert numbers(shared_metrics_of_all[1]) == [(1, 1)]
    successor.batch_sent(1, 0, 2, 20, 100)
    assert numbers(shared_metrics_of_all[1]) == [(1, 1), (0, 1)]


def test_batches_of_a_dead_gateway_that_has_no_successor_yet_are_not_under_way(
    shared_metrics_of_all, board_fd, board_spec
):
    shared_metrics_of_all[0].batch_sent(1, 0, 2, 20, 100)
    clear_gauges(board_fd, board_spec, 0)
    assert numbers(shared_metrics_of_all[1]) == []


# --- gauges ----------------------------------------------------------------------------------------------------


def test_polled_gauges_are_asked_for_when_published(shared_metrics_of_all):
    waiting = [1, 2, 3]
    shared_metrics_of_all[0].poll({Gauge.QUEUED_SEQUENCES: lambda: len(waiting)})
    assert shared_metrics_of_all[1].total(Gauge.QUEUED_SEQUENCES) == 0
    shared_metrics_of_all[0].publish()
    assert shared_metrics_of_all[1].total(Gauge.QUEUED_SEQUENCES) == 3


def test_a_gateway_cannot_write_to_another_s_row(shared_metrics_of_all):
    with pytest.raises(TypeError, match="read-only"):
        shared_metrics_of_all[0].sections[1].counters[0] = 1
