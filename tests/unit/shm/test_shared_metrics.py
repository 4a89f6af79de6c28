import mmap
import os
from itertools import groupby, pairwise

import pytest

from vecd.shm.shared_metrics import (
    MAX_ENDPOINTS,
    NUM_BATCHES,
    STATUSES,
    BatchCell,
    Counter,
    Gauge,
    Histogram,
    Row,
    SharedMetricsSpec,
    TeiCounter,
    TeiHistogram,
    WorkerCell,
    clear_gauges,
    create_shared_metrics,
    cut_rows,
)

SPEC = SharedMetricsSpec(num_gateways=3, num_workers=2)


@pytest.fixture
def board_fd():
    fd = create_shared_metrics(SPEC)
    yield fd
    os.close(fd)


def rows_of(fd: int) -> list[Row]:
    return cut_rows(memoryview(mmap.mmap(fd, SPEC.nbytes)).cast("q"), SPEC)


def cells_of(row: Row) -> list[memoryview]:
    ours = [row.counters, row.gauges, row.answers, *row.histograms]
    return [*ours, row.tei_counters, *row.tei_histograms, *row.workers, *row.batches]


def test_every_cell_is_a_piece_of_memory_of_its_own(board_fd):
    parts = [part for row in rows_of(board_fd) for part in cells_of(row)]
    values = iter(range(1, 1_000_000))
    written = [[next(values) for _ in part] for part in parts]
    for part, numbers in zip(parts, written, strict=True):
        for index, number in enumerate(numbers):
            part[index] = number
    assert [list(part) for part in parts] == written
    assert [list(part) for row in rows_of(board_fd) for part in cells_of(row)] == written


def test_there_is_a_cell_for_everything():
    [row] = cut_rows(memoryview(bytearray(SharedMetricsSpec(1, 5).nbytes)).cast("q"), SharedMetricsSpec(1, 5))
    assert (len(row.counters), len(row.gauges)) == (len(Counter), len(Gauge))
    assert len(row.answers) == MAX_ENDPOINTS * len(STATUSES)
    assert [len(cells) for cells in row.histograms] == [len(h.bounds) + 2 for h in Histogram]
    assert len(row.tei_counters) == len(TeiCounter)
    assert [len(cells) for cells in row.tei_histograms] == [len(h.bounds) + 2 for h in TeiHistogram]
    assert [len(cells) for cells in row.workers] == [len(WorkerCell)] * 5
    assert [len(cells) for cells in row.batches] == [len(BatchCell)] * NUM_BATCHES


def test_rows_share_no_line_of_a_cache():
    for num_workers in range(1, 20):
        assert SharedMetricsSpec(2, num_workers).row_cells * 8 % 64 == 0


def test_a_dead_gateway_s_gauges_are_cleared_and_nothing_else(board_fd):
    rows = rows_of(board_fd)
    for row in rows:
        for cells in cells_of(row):
            for index in range(len(cells)):
                cells[index] = 7
    clear_gauges(board_fd, SPEC, 1)
    assert not any(rows[1].gauges)
    rest = [cells for row in rows for cells in cells_of(row) if not (row is rows[1] and cells is row.gauges)]
    assert all(value == 7 for cells in rest for value in cells)


def test_nobody_can_truncate_a_board(board_fd):
    with pytest.raises(PermissionError):
        os.ftruncate(board_fd, 0)


@pytest.mark.parametrize("kind", [Counter, Gauge, Histogram])
def test_what_is_counted_is_a_metric_of_its_own_with_words_for_it(kind):
    names = [(one.metric, *getattr(one, "labels", {}).values()) for one in kind]
    assert len(set(names)) == len(names)
    assert all(one.help for one in kind)
    assert [int(one) for one in kind] == list(range(len(kind)))


@pytest.mark.parametrize("kind", [Counter, Histogram])
def test_those_of_one_metric_stand_together_and_are_told_apart_by_the_same_labels(kind):
    metrics = [metric for metric, _ in groupby(kind, lambda one: one.metric)]
    assert len(set(metrics)) == len(metrics)
    for _, members in groupby(kind, lambda one: one.metric):
        assert len({(tuple(one.labels), one.help, getattr(one, "bounds", ())) for one in members}) == 1


def test_bounds_rise_and_statuses_are_of_http():
    for histogram in Histogram:
        assert all(lower < upper for lower, upper in pairwise(histogram.bounds))
    assert list(STATUSES) == sorted(set(STATUSES))
    assert all(100 <= status < 600 for status in STATUSES)
    assert {400, 500} <= set(STATUSES), "where others are counted"


def test_tei_s_buckets_are_its_own():
    """Source: text-embeddings-inference's prometheus.rs."""
    durations = TeiHistogram.REQUEST_DURATION.bounds
    assert len(durations) == 35
    assert durations[0] == pytest.approx(1.5e-5)
    assert durations[-1] == pytest.approx(1e-5 * 1.5**35)
    assert TeiHistogram.REQUEST_INPUT_LENGTH.bounds[-1] == 2**19
    assert (TeiHistogram.BATCH_NEXT_SIZE.bounds[0], TeiHistogram.BATCH_NEXT_SIZE.bounds[-1]) == (1, 4096)
    assert TeiHistogram.BATCH_NEXT_TOKENS.bounds[-1] == 2**20


def test_every_counter_of_tei_s_is_a_metric_of_its_own():
    names = [(counter.metric, *counter.labels.values()) for counter in TeiCounter]
    assert len(set(names)) == len(names)
