import mmap
import os
from itertools import groupby, pairwise

import pytest

from vecd.gateway.types.errors import ApiError
from vecd.shm.shared_metrics import (
    MAX_ENDPOINTS,
    NUM_BATCHES,
    STATUSES,
    BatchCell,
    Counter,
    Gauge,
    Histogram,
    Section,
    SharedMetricsSpec,
    TeiCounter,
    TeiHistogram,
    WorkerCell,
    clear_gauges,
    create_shared_metrics,
    cut_sections,
)

SPEC = SharedMetricsSpec(num_gateways=3, num_workers=2)


@pytest.fixture
def board_fd():
    fd = create_shared_metrics(SPEC)
    yield fd
    os.close(fd)


def sections_of(fd: int) -> list[Section]:
    return cut_sections(memoryview(mmap.mmap(fd, SPEC.nbytes)).cast("q"), SPEC)


def cells_of(section: Section) -> list[memoryview]:
    ours = [section.counters, section.gauges, section.answers, *section.histograms]
    return [*ours, section.tei_counters, *section.tei_histograms, *section.workers, *section.batches]


def test_every_cell_is_a_piece_of_memory_of_its_own(board_fd):
    parts = [part for section in sections_of(board_fd) for part in cells_of(section)]
    values = iter(range(1, 1_000_000))
    written = [[next(values) for _ in part] for part in parts]
    for part, numbers in zip(parts, written, strict=True):
        for index, number in enumerate(numbers):
            part[index] = number
    assert [list(part) for part in parts] == written
    assert [list(part) for section in sections_of(board_fd) for part in cells_of(section)] == written


def test_there_is_a_cell_for_everything():
    [section] = cut_sections(memoryview(bytearray(SharedMetricsSpec(1, 5).nbytes)).cast("q"), SharedMetricsSpec(1, 5))
    assert (len(section.counters), len(section.gauges)) == (len(Counter), len(Gauge))
    assert len(section.answers) == MAX_ENDPOINTS * len(STATUSES)
    assert [len(cells) for cells in section.histograms] == [len(h.bounds) + 2 for h in Histogram]
    assert len(section.tei_counters) == len(TeiCounter)
    assert [len(cells) for cells in section.tei_histograms] == [len(h.bounds) + 2 for h in TeiHistogram]
    assert [len(cells) for cells in section.workers] == [len(WorkerCell)] * 5
    assert [len(cells) for cells in section.batches] == [len(BatchCell)] * NUM_BATCHES


def test_rows_share_no_line_of_a_cache():
    for num_workers in range(1, 20):
        assert SharedMetricsSpec(2, num_workers).section_cells * 8 % 64 == 0


def test_a_dead_gateway_s_gauges_are_cleared_and_nothing_else(board_fd):
    sections = sections_of(board_fd)
    for section in sections:
        for cells in cells_of(section):
            for index in range(len(cells)):
                cells[index] = 7
    clear_gauges(board_fd, SPEC, 1)
    assert not any(sections[1].gauges)
    rest = [
        cells
        for section in sections
        for cells in cells_of(section)
        if not (section is sections[1] and cells is section.gauges)
    ]
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


def test_every_status_of_an_error_has_a_cell():
    def kinds_of(error):
        return [error, *(each for kind in error.__subclasses__() for each in kinds_of(kind))]

    assert {kind.status for kind in kinds_of(ApiError) if "status" in vars(kind)} <= set(STATUSES)


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
