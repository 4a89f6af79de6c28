from benchmarks import tables
from benchmarks.notebook import Session, Skipped
from benchmarks.page import remarks, render_page


def test_a_page_of_nothing_says_so(session: Session) -> None:
    page = render_page(session, "day-servers.jsonl", "")
    assert page.count("Not measured.") == 7
    assert "session 2026-11-21T12:00:00+00:00" in page
    assert "vecd 0.1.0 |" in page  # and not the package that is not installed


def test_a_table_has_a_line_for_each_server_that_was_measured(session: Session, make_run) -> None:
    for number, rate in ((1, 100.0), (2, 120.0)):
        session.add(make_run("vecd", "short-64", rate, number))
    table = tables.short(session)
    assert "| vecd bfloat16 | – | – | 110 (100–120) | – |" in table
    assert "infinity" not in table


def test_growth_has_the_errors_and_what_memory_came_on_top(session: Session, make_run) -> None:
    session.add(make_run("infinity", "short-64", 100.0, memory_mb=500.0))
    session.add(make_run("infinity", "short-640", 50.0, memory_mb=600.0, errors={"HTTP 429": 3}))
    assert "| infinity | 100 | 50 | 0.5 | 3 | 500 | 100 |" in tables.growth(session)


def test_the_reader_is_told_who_was_left_out_and_why(session: Session) -> None:
    session.add(Skipped(server="vllm", reason="vllm is not on PATH"))
    session.add(Skipped(server="mosec", reason="mosec: nothing for 63 s", round=2))
    session.add(Skipped(server="vecd", reason="vecd: gone", round=1, is_out=False))
    session.add(Skipped(server="llama", reason="it does not cut texts where the model says", workload="mixed"))
    lines = remarks(session)
    assert "vllm was not measured: vllm is not on PATH." in lines
    assert "mosec was not measured from round 2 on: mosec: nothing for 63 s." in lines
    assert "vecd was not measured in the rest of round 1: vecd: gone." in lines
    assert "llama was not measured in mixed lengths: it does not cut texts where the model says." in lines


def test_the_reader_is_told_of_disturbances_errors_and_a_busy_generator(session: Session, make_run) -> None:
    session.add(make_run("vecd", "short-64", 1.0, others_cores=0.5))
    session.add(make_run("vecd", "short-256", 1.0, errors={"HTTP 429": 7}, cpu_share=0.9))
    lines = remarks(session)
    assert "Other programs used over 0.1 cores in 1 of 2 runs, with a median of 0.5." in lines
    assert "vecd bfloat16, short texts, 256 clients: 7 × HTTP 429, of 100 requests." in lines
    assert any("generator itself was busy" in line and "vecd short-256" in line for line in lines)


def test_a_missed_target_is_seen(session: Session, make_run) -> None:
    session.add(make_run("vecd", "short-64", 100.0))
    session.add(make_run("infinity", "short-64", 100.0))
    page = render_page(session, "day-servers.jsonl", "")
    assert "| vecd bfloat16 | short texts, 64 clients: rate ÷ infinity's | 1 × | ≥ 4 | **missed** |" in page


def test_a_page_without_its_plot_says_why(session: Session, make_run) -> None:
    session.add(make_run("vecd", "curve-0.5", 100.0))
    assert "No plot: drawing needs matplotlib." in render_page(session, "", "drawing needs matplotlib")
    assert "![" in render_page(session, "", "")
