import pytest

from vecd.client.bench import report
from vecd.client.bench.responses import Receipt
from vecd.client.bench.tally import RunResult, Tally


def make_result(
    tally: Tally, *, rate_per_s: float | None = None, cpu_share: float = 0.1, ended_early: str | None = None
) -> RunResult:
    return RunResult.of(
        tally,
        clients=0 if rate_per_s else 4,
        texts_per_request=1,
        elapsed_s=10.0,
        cpu_share=cpu_share,
        ended_early=ended_early,
        rate_per_s=rate_per_s,
    )


def make_tally(num_measured: int = 1000, num_in_window: int = 1000) -> Tally:
    tally = Tally()
    for _ in range(num_measured):
        tally.add_latency(0.005)
    for _ in range(num_in_window):
        tally.add_success(Receipt(1, 12))
    return tally


def test_a_good_run_needs_no_note() -> None:
    assert report.notes(make_result(make_tally())) == []
    assert report.notes(make_result(make_tally(), rate_per_s=100)) == []


def test_a_row_has_a_cell_for_each_column() -> None:
    cells = report.row(make_result(make_tally(), rate_per_s=100)).split()
    assert cells[:2] == ["100", "/s"]
    assert len(cells) - 2 == len(report.heading().replace(" ms", "").replace("own CPU", "own").split()) - 1


@pytest.mark.parametrize(("cpu_share", "is_noted"), [(0.7, False), (0.71, True)])
def test_a_busy_generator_is_said(cpu_share: float, is_noted: bool) -> None:
    notes = report.notes(make_result(make_tally(), cpu_share=cpu_share))
    assert any("generator itself was busy" in note for note in notes) == is_noted


def test_a_late_generator_is_said() -> None:
    tally = make_tally()
    tally.num_late, tally.max_late_ms = 50, 250.0
    (note,) = report.notes(make_result(tally, rate_per_s=100))
    assert "the load generator was late: 5.0% of the requests" in note
    assert "at most 250 ms" in note


def test_a_server_that_does_not_keep_up_is_said() -> None:
    (note,) = report.notes(make_result(make_tally(num_in_window=600), rate_per_s=100))
    assert note == "100.0 requests/s arrived, and 60.0/s were answered"


def test_errors_are_said_by_kind() -> None:
    tally = make_tally()
    tally.add_errors("HTTP 503", "a\n  b", 7)
    assert report.notes(make_result(tally)) == ["7 × HTTP 503: a b"]


def test_figures_that_are_not_there_are_null_and_dashes() -> None:
    result = make_result(Tally())
    fields = report.fields(result)
    assert [fields[name] for name in ("p50_ms", "p999_ms", "mean_ms", "tokens_per_s")] == [None] * 4
    assert report.row(result).count("–") == 6
