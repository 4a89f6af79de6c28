from pathlib import Path

import orjson
import pytest

from benchmarks import compare, tables
from benchmarks.figures import DRAIN_MS, latency_ms, num_errors, of_rounds, ratio, spread
from benchmarks.goals import GOALS, Goal
from benchmarks.notebook import Measured, Notebook, Offline, Session, Skipped, read_sessions
from benchmarks.page import render_page


def test_what_is_written_is_what_is_read(tmp_path: Path, make_run) -> None:
    """A file holds the sessions of a day; a line of another kind is refused."""
    notebook = Notebook(tmp_path / "results", "make bench", {"num_rounds": 1}, {"cores": 2})
    notebook.add(Measured(server="vecd", version="1", command="vecd serve", environment={"A": "1"}, remark="r"))
    notebook.add(Skipped(server="vllm", reason="vllm is not on PATH"))
    notebook.add(make_run("vecd", "short-1", 100.0))
    notebook.add(offline("short", 1.0))
    assert read_sessions(notebook.file) == [notebook.session]
    assert notebook.file.name.endswith("-servers.jsonl")
    with notebook.file.open("ab") as file:
        next_one = {"session": "next", "kind": "session", "at": "", "command": "b", "plan": {}, "machine": {}}
        file.write(orjson.dumps(next_one, option=orjson.OPT_APPEND_NEWLINE))
    assert [session.command for session in read_sessions(notebook.file)] == ["make bench", "b"]
    with notebook.file.open("ab") as file:
        file.write(orjson.dumps({"session": "next", "kind": "poem", "at": ""}))
    with pytest.raises(ValueError, match="poem"):
        read_sessions(notebook.file)


def test_a_figure_is_the_median_of_the_rounds(session: Session, make_run) -> None:
    for number, rate in enumerate((10.0, 30.0, 20.0), 1):
        session.add(make_run("vecd", "mixed", rate, number))
    assert spread(of_rounds(session, "vecd", "mixed", "texts_per_s")) == (20.0, 10.0, 30.0)
    assert spread(of_rounds(session, "vecd", "short-1", "texts_per_s")) is None


def test_a_ratio_is_taken_within_each_round() -> None:
    assert ratio({1: 10.0, 2: 100.0, 3: 7.0}, {1: 5.0, 2: 50.0}) == pytest.approx(2.0)
    assert ratio({1: 10.0}, {2: 5.0}) is None


def test_requests_without_an_answer_bound_the_percentiles_that_they_are_in(session: Session, make_run) -> None:
    """And refusals do not."""
    session.add(make_run("infinity", "interactive-bulk", 1.0, errors={"unanswered": 30}, p50_ms=700.0, p99_ms=900.0))
    assert latency_ms(session, "infinity", "interactive-bulk", 99) == (DRAIN_MS, True)
    assert latency_ms(session, "infinity", "interactive-bulk", 50) == (700.0, False)
    session.add(make_run("mosec", "interactive-bulk", 1.0, errors={"HTTP 429": 30}, p99_ms=900.0))
    assert latency_ms(session, "mosec", "interactive-bulk", 99) == (900.0, False)
    assert num_errors(session.runs).total() == 60


def goal(server: str, what: str) -> Goal:
    [found] = (one for one in GOALS if one.server == server and one.what == what)
    return found


def offline(work: str, texts_per_s: float, p50_ms: float = 5.0, dtype: str = "float32") -> Offline:
    return Offline(
        dtype=dtype,
        round=1,
        work=work,
        texts_per_batch=32,
        texts_per_s=texts_per_s,
        tokens_per_s=100.0 * texts_per_s,
        p50_ms=p50_ms,
        others_cores=0.0,
    )


def test_nothing_is_met_or_missed_that_was_not_measured(session: Session) -> None:
    assert {one.look(session).is_met for one in GOALS} - {None} == set()


def test_rates_are_compared_with_the_engines_in_the_servers_own_format_and_with_a_peers(session, make_run) -> None:
    session.add(make_run("vecd-float32", "short-256", 90.0))
    session.add(make_run("vecd-float32", "short-64", 180.0))
    session.add(make_run("infinity", "short-64", 100.0))
    session.add(make_run("vecd", "short-1", 100.0, p50_ms=5.9))
    session.add(offline("short", 100.0))
    session.add(offline("short", 900.0, dtype="bfloat16"))
    session.add(offline("single", 200.0, p50_ms=5.0, dtype="bfloat16"))
    for server, what, value, is_met in (
        ("vecd-float32", "short texts, 256 clients: share of the workers' offline rate", 0.9, True),
        ("vecd-float32", "short texts, 64 clients: rate ÷ infinity's", 1.8, False),
        ("vecd", "short texts, 1 client: p50 − the engine's own time", 0.9, True),
    ):
        outcome = goal(server, what).look(session)
        assert outcome.value == pytest.approx(value)
        assert outcome.is_met is is_met


def test_interactive_requests_may_wait_for_two_batches(session: Session, make_run) -> None:
    what = "interactive, under bulk: p99"
    session.add(make_run("vecd-float32", "interactive", 20.0, p99_ms=10.0))
    session.add(make_run("vecd-float32", "interactive-bulk", 20.0, p99_ms=700.0))
    session.add(offline("mixed", 80.0))  # 8,000 tokens/s of two workers: 2,000 tokens take half a second
    outcome = goal("vecd-float32", what).look(session)
    assert (str(outcome.target), outcome.is_met) == ("≤ 1030", True)
    for worker in session.runs[1].info["workers"]:
        worker |= {"tokens_per_s": 4000.0, "batch_tokens": 400}
    outcome = goal("vecd-float32", what).look(session)
    assert (str(outcome.target), outcome.is_met) == ("≤ 230", False)
    session.add(make_run("vecd-float32", "interactive-bulk", 20.0, 2, p99_ms=11.0, errors={"HTTP 429": 4}))
    outcome = goal("vecd-float32", what).look(session)
    assert outcome.is_void, "who refuses requests has not met it"
    assert "2.0% failed" in outcome.explanation


def test_growth_is_in_rate_errors_and_memory(session: Session, make_run) -> None:
    session.add(make_run("vecd", "short-64", 100.0, memory_mb=500.0))
    session.add(make_run("vecd", "short-640", 96.0, memory_mb=540.0, errors={"timeout": 1}))
    rate, errors, memory = (one.look(session) for one in GOALS if one.server == "vecd" and "64 → 640" in one.what)
    assert (rate.is_met, errors.is_met, memory.is_met) == (True, False, True)
    assert memory.value == pytest.approx(40.0)


def test_a_page_has_who_was_measured_and_what_was_missed(session: Session, make_run) -> None:
    session.add(make_run("vecd", "short-64", 100.0))
    assert "infinity" not in tables.short(session)
    session.add(make_run("vecd", "short-64", 120.0, 2))
    session.add(make_run("infinity", "short-64", 100.0))
    assert "| vecd bfloat16 | – | – | 110 (100–120) | – |" in tables.short(session)
    page = render_page(session, "day-servers.jsonl", "")
    assert "| vecd bfloat16 | short texts, 64 clients: rate ÷ infinity's | 1 × | ≥ 4 | **missed** |" in page


def test_a_page_can_be_written_again_without_measuring(tmp_path: Path, session, make_run, capsys) -> None:
    notebook = Notebook(tmp_path / "results", "make bench", session.plan, session.machine)
    for piece in session.measured:
        notebook.add(piece)
    notebook.add(make_run("vecd", "short-1", 123.0))
    page = tmp_path / "benchmarks.md"
    assert compare.main(["--page-from", str(notebook.file), "--page", str(page)]) == 0
    assert "| vecd bfloat16 | 123 |" in page.read_text()
    with pytest.raises(SystemExit):
        compare.main(["--only", "vecd,ollama"])
    assert "ollama" in capsys.readouterr().err
