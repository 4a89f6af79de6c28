from typing import Any

import pytest

from tests.support.loads import make_load
from vecd.client.bench import report
from vecd.client.bench.responses import Receipt
from vecd.client.bench.result import RunResult


def make_result(
    num_measured: int = 1000, num_in_window: int = 1000, rate_per_s: float | None = None, **fields: Any
) -> RunResult:
    result = RunResult(**{"load": make_load(rate_per_s), "elapsed_s": 10.0, "cpu_share": 0.1, **fields})
    for _ in range(num_measured):
        result.add_latency(0.005)
    for _ in range(num_in_window):
        result.add_success(Receipt(1, 12))
    return result


def test_a_good_run_needs_no_note() -> None:
    assert report.notes(make_result()) == []
    assert report.notes(make_result(rate_per_s=100)) == []


def test_a_row_has_a_cell_for_each_column() -> None:
    cells = report.row(make_result(rate_per_s=100)).split()
    assert cells[:2] == ["100", "/s"]
    assert len(cells) - 2 == len(report.heading().replace(" ms", "").replace("own CPU", "own").split()) - 1


@pytest.mark.parametrize(("cpu_share", "is_noted"), [(0.7, False), (0.71, True)])
def test_a_busy_generator_is_said(cpu_share: float, is_noted: bool) -> None:
    notes = report.notes(make_result(cpu_share=cpu_share))
    assert any("generator itself was busy" in note for note in notes) == is_noted


def test_a_late_generator_is_said() -> None:
    (note,) = report.notes(make_result(rate_per_s=100, num_late=50, max_late_ms=250.0))
    assert "the load generator was late: 5.0% of the requests" in note
    assert "at most 250 ms" in note


def test_a_server_that_does_not_keep_up_is_said() -> None:
    (note,) = report.notes(make_result(num_in_window=600, rate_per_s=100))
    assert note == "100.0 requests/s arrived, and 60.0/s were answered"


def test_errors_are_said_by_kind() -> None:
    result = make_result()
    result.add_errors("timeout", "no whole response in time")
    result.add_errors("HTTP 503", "a\n  b", 7)
    assert report.notes(result) == ["7 × HTTP 503: a b", "1 × timeout: no whole response in time"]
    assert list(report.fields(result)["errors"].items()) == [("HTTP 503", 7), ("timeout", 1)]


def test_figures_that_are_not_there_are_null_and_dashes() -> None:
    result = make_result(0, 0)
    fields = report.fields(result)
    assert [fields[name] for name in ("p50_ms", "p999_ms", "mean_ms", "tokens_per_s")] == [None] * 4
    assert report.row(result).count("–") == 6
