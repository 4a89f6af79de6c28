import mmap
import os
from itertools import groupby, pairwise

import pytest

from vecd.gateway.errors import ApiError
from vecd.shm.shared_metrics import (
    STATUSES,
    Counter,
    Gauge,
    Histogram,
    Section,
    SharedMetricsSpec,
    clear_gauges,
    create_shared_metrics,
    cut_sections,
)

SPEC = SharedMetricsSpec(num_gateways=3, num_workers=2)


@pytest.fixture
def metrics_fd():
    fd = create_shared_metrics(SPEC)
    yield fd
    os.close(fd)


def sections_of(fd: int) -> list[Section]:
    return cut_sections(memoryview(mmap.mmap(fd, SPEC.nbytes)).cast("q"), SPEC)


def cells_of(section: Section) -> list[memoryview]:
    own = section.own
    return [own.counters, own.gauges, own.answers, *own.histograms, *section.workers, *section.batches]


def test_every_cell_is_a_piece_of_memory_of_its_own(metrics_fd):
    parts = [part for section in sections_of(metrics_fd) for part in cells_of(section)]
    values = iter(range(1, 1_000_000))
    written = [[next(values) for _ in part] for part in parts]
    for part, numbers in zip(parts, written, strict=True):
        for index, number in enumerate(numbers):
            part[index] = number
    assert [list(part) for part in parts] == written
    assert [list(part) for section in sections_of(metrics_fd) for part in cells_of(section)] == written


def test_rows_share_no_line_of_a_cache():
    for num_workers in range(1, 20):
        assert SharedMetricsSpec(2, num_workers).section_cells * 8 % 64 == 0


def test_a_dead_gateway_s_gauges_are_cleared_and_nothing_else(metrics_fd):
    sections = sections_of(metrics_fd)
    for section in sections:
        for cells in cells_of(section):
            for index in range(len(cells)):
                cells[index] = 7
    clear_gauges(metrics_fd, SPEC, 1)
    assert not any(sections[1].gauges)
    rest = [
        cells
        for section in sections
        for cells in cells_of(section)
        if not (section is sections[1] and cells is section.own.gauges)
    ]
    assert all(value == 7 for cells in rest for value in cells)


def test_nobody_can_truncate_the_shared_metrics(metrics_fd):
    with pytest.raises(PermissionError):
        os.ftruncate(metrics_fd, 0)


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
