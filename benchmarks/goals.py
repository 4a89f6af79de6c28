"""What is asked of vecd as a server, and whether a session has shown it.

Owns every target of the comparison with other servers. Another target is another entry. Measures nothing. Called by
`benchmarks.page`. What is asked of the engine alone is in `benchmarks.targets`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.figures import (
    dtype_of,
    latency_ms,
    median,
    num_errors,
    of_rounds,
    offline_of_rounds,
    ratio,
    readable,
    runs_of,
)
from benchmarks.loads import TITLES
from benchmarks.notebook import Session
from benchmarks.targets import Target, at_least, at_most

FLOAT32, DEFAULT = "vecd-float32", "vecd"
_NUM_BATCHES_WAITED = 2
_NUM_P99 = 3.0
_UNLOADED_MARGIN_MS = 1.0
_MARGIN_MB = 50.0
_BULK = "interactive-bulk"
_TOLERABLE_FAILURES = 0.01
"""More than the 99th percentile leaves out."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a session says to a goal."""

    value: float | None
    """None when it has not been measured."""
    target: Target
    explanation: str = ""
    """The figures behind it."""
    is_void: bool = False
    """The figure leaves out so many requests that failed that it meets nothing."""

    @property
    def is_met(self) -> bool | None:
        return None if self.value is None else self.target.is_met_by(self.value) and not self.is_void


@dataclass(frozen=True, slots=True)
class Goal:
    what: str
    server: str
    unit: str
    look: Callable[[Session], Outcome]


def _share_of_offline(server: str, workload: str, work: str, least: float) -> Goal:
    def look(session: Session) -> Outcome:
        served = of_rounds(session, server, workload, "texts_per_s")
        offline = offline_of_rounds(session, dtype_of(session, server) or "", work, "texts_per_s")
        return Outcome(ratio(served, offline), at_least(least), _beside(median(served), median(offline), "texts/s"))

    return Goal(f"{TITLES[workload]}: share of the workers' offline rate", server, "", look)


def _times(server: str, peer: str, workload: str, least: float) -> Goal:
    def look(session: Session) -> Outcome:
        ours = of_rounds(session, server, workload, "texts_per_s")
        theirs = of_rounds(session, peer, workload, "texts_per_s")
        return Outcome(ratio(ours, theirs), at_least(least), _beside(median(ours), median(theirs), "texts/s"))

    return Goal(f"{TITLES[workload]}: rate ÷ {peer}'s", server, "×", look)


def _unloaded(server: str) -> Goal:
    def look(session: Session) -> Outcome:
        served = median(of_rounds(session, server, "short-1", "p50_ms"))
        engine = median(offline_of_rounds(session, dtype_of(session, server) or "", "single", "p50_ms"))
        value = None if served is None or engine is None else served - engine
        return Outcome(value, at_most(_UNLOADED_MARGIN_MS), _beside(served, engine, "ms"))

    return Goal("short texts, 1 client: p50 − the engine's own time", server, "ms", look)


def limit_under_bulk(alone_ms: float, batch_ms: float) -> float:
    """Milliseconds, made of measured ones: three times the p99 without bulk, and two of the batches that are running
    when a request comes."""
    return _NUM_P99 * alone_ms + _NUM_BATCHES_WAITED * batch_ms


def _under_bulk(server: str) -> Goal:
    def look(session: Session) -> Outcome:
        alone, _ = latency_ms(session, server, "interactive", 99)
        beside, _ = latency_ms(session, server, _BULK, 99)
        batch = _batch_ms(session, server)
        limit = None if alone is None or batch is None else limit_under_bulk(alone, batch)
        if limit is None or beside is None or alone is None or batch is None:
            return Outcome(None, at_most(0), "")
        explanation = f"alone {readable(alone)} ms, a batch {readable(batch)} ms{_failures(session, server)}"
        return Outcome(beside, at_most(round(limit, 1)), explanation, _is_void(session, server))

    return Goal("interactive, under bulk: p99", server, "ms", look)


def _times_shorter(server: str, peer: str, least: float) -> Goal:
    def look(session: Session) -> Outcome:
        ours, _ = latency_ms(session, server, _BULK, 99)
        theirs, is_bound = latency_ms(session, peer, _BULK, 99)
        value = theirs / ours if ours and theirs else None
        explanation = f"{_beside(ours, theirs, 'ms')}{' or more' * is_bound}{_failures(session, server)}"
        return Outcome(value, at_least(least), explanation, _is_void(session, server))

    return Goal(f"interactive, under bulk: {peer}'s p99 ÷ this", server, "×", look)


def _growth(server: str) -> Sequence[Goal]:
    def rate(session: Session) -> Outcome:
        after = of_rounds(session, server, "short-640", "texts_per_s")
        before = of_rounds(session, server, "short-64", "texts_per_s")
        return Outcome(ratio(after, before), at_least(0.95), _beside(median(after), median(before), "texts/s"))

    def errors(session: Session) -> Outcome:
        runs = runs_of(session, server, "short-640")
        return Outcome(float(num_errors(runs).total()) if runs else None, at_most(0))

    def memory(session: Session) -> Outcome:
        after = of_rounds(session, server, "short-640", "memory_mb")
        before = of_rounds(session, server, "short-64", "memory_mb")
        grown = median({number: after[number] - before[number] for number in after if number in before})
        return Outcome(grown, at_most(_MARGIN_MB), _beside(median(after), median(before), "MB"))

    return (
        Goal("64 → 640 clients: rate ÷ that of 64", server, "×", rate),
        Goal("64 → 640 clients: errors", server, "", errors),
        Goal("64 → 640 clients: more memory", server, "MB", memory),
    )


def _is_void(session: Session, server: str) -> bool:
    return _failed_share(session, server) > _TOLERABLE_FAILURES


def _failures(session: Session, server: str) -> str:
    share = _failed_share(session, server)
    return f", {share:.1%} failed" if share else ""


def _failed_share(session: Session, server: str) -> float:
    runs = runs_of(session, server, _BULK)
    offered = sum(run.figures["offered"] for run in runs)
    return num_errors(runs).total() / offered if offered else 0.0


def _batch_ms(session: Session, server: str) -> float | None:
    """How long a full batch takes: what a worker has learned of itself, or else what the engine did offline."""
    offline = median(offline_of_rounds(session, dtype_of(session, server) or "", "mixed", "tokens_per_s"))
    times = []
    for run in runs_of(session, server, _BULK):
        limit = run.info.get("limits", {}).get("max_batch_tokens")
        workers = run.info.get("workers", [])
        for worker in workers:
            rate = worker.get("tokens_per_s") or (offline and offline / len(workers))
            tokens = worker.get("batch_tokens") or limit
            if rate and tokens:
                times.append(1000 * tokens / rate)
    return median(dict(enumerate(times)))


def _beside(ours: float | None, theirs: float | None, unit: str) -> str:
    if ours is None or theirs is None:
        return ""
    return f"{readable(ours)} vs. {readable(theirs)} {unit}"


GOALS: Sequence[Goal] = (
    _share_of_offline(FLOAT32, "short-256", "short", 0.85),
    _share_of_offline(DEFAULT, "short-256", "short", 0.70),
    _times(FLOAT32, "infinity", "short-64", 1.9),
    _times(FLOAT32, "fastapi", "short-64", 5),
    _times(DEFAULT, "infinity", "short-64", 4),
    _times(DEFAULT, "fastapi", "short-64", 11),
    _share_of_offline(FLOAT32, "mixed", "mixed", 0.95),
    _share_of_offline(DEFAULT, "mixed", "mixed", 0.95),
    _times(FLOAT32, "infinity", "mixed", 3.2),
    _times(DEFAULT, "infinity", "mixed", 9),
    _unloaded(FLOAT32),
    _unloaded(DEFAULT),
    _under_bulk(FLOAT32),
    _under_bulk(DEFAULT),
    _times_shorter(FLOAT32, "infinity", 10),
    _times_shorter(DEFAULT, "infinity", 10),
    *_growth(FLOAT32),
    *_growth(DEFAULT),
)
