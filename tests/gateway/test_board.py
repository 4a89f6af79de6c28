import os
from itertools import pairwise

import pytest

from gateway.board import Board
from gateway.metrics import render_metrics
from shm.board import BoardSpec, Counter, Gauge, Histogram, create_board

SPEC = BoardSpec(num_gateways=2, num_workers=2)


@pytest.fixture
def board_fd():
    fd = create_board(SPEC)
    yield fd
    os.close(fd)


@pytest.fixture
def boards(board_fd):
    """As two gateways have it."""
    return [Board.mapped(board_fd, SPEC, gateway) for gateway in range(2)]


def test_what_gateways_count_is_added_up_for_each_of_them(boards):
    boards[0].add(Counter.TOKENS, 30)
    boards[1].add(Counter.TOKENS, 12)
    boards[1].add(Counter.BATCHES)
    boards[0].set(Gauge.QUEUED_TOKENS, 5)
    boards[1].set(Gauge.QUEUED_TOKENS, 6)
    for board in boards:
        assert board.total(Counter.TOKENS) == 42
        assert board.total(Counter.BATCHES) == 1
        assert board.total(Gauge.QUEUED_TOKENS) == 11


def test_a_new_life_counts_on_and_has_nothing_yet(boards, board_fd):
    boards[0].add(Counter.TOKENS, 30)
    boards[0].set(Gauge.CONNECTIONS, 5)
    boards[0].observe(Histogram.LOOP_LAG, 0.1)
    successor = Board.mapped(board_fd, SPEC, 0)
    successor.add(Counter.TOKENS, 1)
    assert boards[1].total(Counter.TOKENS) == 31
    assert boards[1].total(Gauge.CONNECTIONS) == 0
    assert sum(boards[1].histogram(Histogram.LOOP_LAG)[0]) == 1


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0.0, 0), (0.0005, 0), (0.00051, 1), (0.003, 3), (2.0, 11), (2.05, 12), (60.0, 12)]
)
def test_a_value_is_counted_in_the_first_bucket_that_is_large_enough(boards, seconds, bucket):
    boards[1].observe(Histogram.LOOP_LAG, seconds)
    counts, sum_s = boards[0].histogram(Histogram.LOOP_LAG)
    assert [index for index, count in enumerate(counts) if count] == [bucket]
    assert sum_s == pytest.approx(seconds)


def test_batches_are_counted_by_worker_and_by_life(boards):
    for board in boards:
        board.worker_up(0, 1)
        board.worker_up(1, 1)
        board.add_batch(0)
        board.add_batch(1)
    for board in boards:
        board.worker_up(0, 2)
    boards[0].worker_up(0, 2)  # told again, as after its own death
    boards[0].add_batch(0)
    assert (boards[1].worker_batches(0), boards[1].worker_batches(1)) == (3, 2)
    assert (boards[1].worker_batches_in(0, 2), boards[1].worker_batches_in(1, 1)) == (1, 2)
    assert boards[1].worker_batches_in(0, 1) == 0, "nobody asks for a life that is over"


def test_polled_gauges_are_asked_for_when_published(boards):
    waiting = [1, 2, 3]
    boards[0].poll({Gauge.QUEUED_SEQUENCES: lambda: len(waiting)})
    assert boards[1].total(Gauge.QUEUED_SEQUENCES) == 0
    boards[0].publish()
    assert boards[1].total(Gauge.QUEUED_SEQUENCES) == 3


def test_a_gateway_cannot_write_to_another_s_row(boards):
    with pytest.raises(TypeError, match="read-only"):
        boards[0].rows[1].counters[0] = 1


# --- /metrics ---------------------------------------------------------------------------------------------------


def metrics_of(board: Board) -> dict[str, float]:
    lines = render_metrics(board, version="1.2", model="m").decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_metrics_are_the_same_from_any_gateway(boards):
    boards[0].add_answer(200)
    boards[1].add_answer(201)
    boards[1].add_answer(429)
    boards[1].add(Counter.COMPUTE_US, 1_500_000)
    boards[0].set(Gauge.CONNECTIONS, 3)
    boards[1].worker_up(1, life=1)
    boards[1].add_batch(1)
    metrics = metrics_of(boards[0])
    assert metrics == metrics_of(boards[1])
    assert metrics['vecd_info{model="m",version="1.2"}'] == 1
    assert metrics['vecd_requests_total{status="2xx"}'] == 2
    assert metrics['vecd_requests_total{status="4xx"}'] == 1
    assert metrics["vecd_compute_seconds_total"] == 1.5
    assert metrics['vecd_connections{gateway="0"}'] == 3
    assert metrics['vecd_worker_batches_total{worker="1"}'] == 1
    assert metrics['vecd_gateway_pid{gateway="1"}'] == os.getpid()
    assert not [name for name in metrics if not name.startswith("vecd_")]


def test_the_buckets_of_a_histogram_include_those_below(boards):
    for seconds in (0.0001, 0.003, 0.003, 5.0):
        boards[0].observe(Histogram.LOOP_LAG, seconds)
    metrics = metrics_of(boards[1])
    buckets = [value for name, value in metrics.items() if name.startswith("vecd_loop_lag_seconds_bucket")]
    assert all(lower <= upper for lower, upper in pairwise(buckets))
    assert metrics['vecd_loop_lag_seconds_bucket{le="0.0005"}'] == 1
    assert metrics['vecd_loop_lag_seconds_bucket{le="0.005"}'] == 3
    assert metrics['vecd_loop_lag_seconds_bucket{le="2.0"}'] == 3
    assert metrics['vecd_loop_lag_seconds_bucket{le="+Inf"}'] == metrics["vecd_loop_lag_seconds_count"] == 4
    assert metrics["vecd_loop_lag_seconds_sum"] == pytest.approx(5.0061)
