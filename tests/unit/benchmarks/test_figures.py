import pytest

from benchmarks.figures import DRAIN_MS, dtype_of, latency_ms, num_errors, of_rounds, ratio, readable, spread, title
from benchmarks.notebook import Session


def test_a_figure_is_the_median_of_the_rounds(session: Session, make_run) -> None:
    for number, rate in enumerate((10.0, 30.0, 20.0), 1):
        session.add(make_run("vecd", "mixed", rate, number))
    assert spread(of_rounds(session, "vecd", "mixed", "texts_per_s")) == (20.0, 10.0, 30.0)
    assert spread(of_rounds(session, "vecd", "short-1", "texts_per_s")) is None


def test_a_ratio_is_taken_within_each_round() -> None:
    assert ratio({1: 10.0, 2: 100.0, 3: 7.0}, {1: 5.0, 2: 50.0}) == pytest.approx(2.0)
    assert ratio({1: 10.0}, {2: 5.0}) is None


def test_requests_without_an_answer_bound_the_percentiles_that_they_are_in(session: Session, make_run) -> None:
    session.add(make_run("infinity", "interactive-bulk", 1.0, errors={"unanswered": 30}, p50_ms=700.0, p99_ms=900.0))
    assert latency_ms(session, "infinity", "interactive-bulk", 99) == (DRAIN_MS, True)
    assert latency_ms(session, "infinity", "interactive-bulk", 50) == (700.0, False)


def test_a_refusal_is_no_latency(session: Session, make_run) -> None:
    session.add(make_run("mosec", "interactive-bulk", 1.0, errors={"HTTP 429": 30}, p99_ms=900.0))
    assert latency_ms(session, "mosec", "interactive-bulk", 99) == (900.0, False)
    assert num_errors(session.runs).total() == 30


def test_vecd_is_named_by_the_format_it_has_chosen(session: Session, make_run) -> None:
    session.add(make_run("vecd", "mixed", 1.0))
    session.add(make_run("infinity", "mixed", 1.0))
    assert (title(session, "vecd"), dtype_of(session, "vecd")) == ("vecd bfloat16", "bfloat16")
    assert (title(session, "infinity"), dtype_of(session, "infinity")) == ("infinity", None)


@pytest.mark.parametrize(
    ("value", "text"), [(0.8512, "0.851"), (12.34, "12.3"), (216.04, "216"), (999.6, "999.6"), (12345.6, "12,346")]
)
def test_numbers_are_readable(value: float, text: str) -> None:
    assert readable(value) == text
