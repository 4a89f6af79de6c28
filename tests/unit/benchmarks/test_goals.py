import pytest

from benchmarks.goals import GOALS, Goal
from benchmarks.loads import WORKLOADS
from benchmarks.notebook import Offline, Session
from benchmarks.recipes import SERVERS


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


def test_goals_are_of_servers_that_there_are() -> None:
    assert {one.server for one in GOALS} <= set(SERVERS)
    assert {"short-64", "short-256", "short-640", "mixed"} <= {one.name for one in WORKLOADS}


def test_the_share_of_the_offline_rate_is_that_of_the_servers_own_format(session: Session, make_run) -> None:
    session.add(make_run("vecd-float32", "short-256", 90.0))
    session.add(offline("short", 100.0))
    session.add(offline("short", 900.0, dtype="bfloat16"))
    outcome = goal("vecd-float32", "short texts, 256 clients: share of the workers' offline rate").look(session)
    assert outcome.value == pytest.approx(0.9)
    assert outcome.is_met is True


def test_a_rate_is_compared_with_a_peers(session: Session, make_run) -> None:
    session.add(make_run("vecd-float32", "short-64", 180.0))
    session.add(make_run("infinity", "short-64", 100.0))
    outcome = goal("vecd-float32", "short texts, 64 clients: rate ÷ infinity's").look(session)
    assert outcome.value == pytest.approx(1.8)
    assert outcome.is_met is False
    assert outcome.explanation == "180 vs. 100 texts/s"


def test_one_client_waits_for_the_engine_and_little_more(session: Session, make_run) -> None:
    session.add(make_run("vecd", "short-1", 100.0, p50_ms=5.9))
    session.add(offline("single", 200.0, p50_ms=5.0, dtype="bfloat16"))
    outcome = goal("vecd", "short texts, 1 client: p50 − the engine's own time").look(session)
    assert outcome.value == pytest.approx(0.9)
    assert outcome.is_met is True


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


def test_who_refuses_interactive_requests_has_not_met_it(session: Session, make_run) -> None:
    session.add(make_run("vecd-float32", "interactive", 20.0, p99_ms=10.0))
    session.add(make_run("vecd-float32", "interactive-bulk", 20.0, p99_ms=11.0, errors={"HTTP 429": 2}))
    session.add(offline("mixed", 80.0))
    outcome = goal("vecd-float32", "interactive, under bulk: p99").look(session)
    assert outcome.is_met is False
    assert "2.0% failed" in outcome.explanation


def test_growth_is_in_rate_errors_and_memory(session: Session, make_run) -> None:
    session.add(make_run("vecd", "short-64", 100.0, memory_mb=500.0))
    session.add(make_run("vecd", "short-640", 96.0, memory_mb=540.0, errors={"timeout": 1}))
    rate, errors, memory = (one.look(session) for one in GOALS if one.server == "vecd" and "64 → 640" in one.what)
    assert (rate.is_met, errors.is_met, memory.is_met) == (True, False, True)
    assert memory.value == pytest.approx(40.0)
