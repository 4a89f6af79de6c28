"""One model beside another checkout: what a server of several may not cost whoever has one.

Owns the turns, in each of which a server is started anew. Called by `benchmarks.models`.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.alone import CHECKOUT, compare
from benchmarks.cpu import Neighbours
from benchmarks.findings import Finding
from benchmarks.flood import flood
from benchmarks.inprocess import DTYPE
from benchmarks.machine import commit_of
from benchmarks.requests import Exchange, embed, session_mb
from benchmarks.servers import ServerFailure, announcing, bundled_model
from benchmarks.several import ModelTable, draw_requests
from benchmarks.several_experiment import FEW, REST_S, SeveralExperiment, figure
from benchmarks.targets import (
    AS_BEFORE,
    MORE_MB,
)
from benchmarks.turns import alternate, passes_of_turn
from vecd.base.target import parse_target

_CLIENTS = 32


@dataclass(frozen=True, slots=True)
class _Life:
    """A server of one model, from its start to its end."""

    start_s: float
    p50_ms: float
    texts_per_s: float
    memory_mb: float


def measure_one(bench: SeveralExperiment) -> Iterator[Finding]:
    """Start, one client, many clients and memory of one model, each server in its turn started anew. Raises
    ServerFailure, also without another checkout."""
    if bench.against is None:
        raise ServerFailure("one: no --against FOLDER names a checkout of the commit to compare with")
    theirs = f"vecd {commit_of(bench.against)}"
    lives: dict[str, Callable[[], _Life]] = {
        "vecd": partial(_live, bench, CHECKOUT, bench.scratch("ours")),
        theirs: partial(_live, bench, bench.against, bench.scratch("theirs")),
    }
    for live in lives.values():
        live()  # not counted: the first start compares engines
    neighbours = Neighbours()
    found = alternate(lives, bench.num_rounds)
    facts = {"others_cores": neighbours.cores()}
    of_lives: tuple[tuple[str, str, Callable[[_Life], float]], ...] = (
        ("start: exec → ready", "s", lambda life: life.start_s),
        ("1 client, a short text, p50", "ms", lambda life: life.p50_ms),
        (f"{_CLIENTS} clients, short texts", "texts/s", lambda life: life.texts_per_s),
        ("memory in all at rest (PSS)", "MB", lambda life: life.memory_mb),
    )
    for what, unit, of_life in of_lives:
        ours, before = ([of_life(life) for life in found[name]] for name in lives)
        if unit == "MB":
            more = statistics.median(our - their for our, their in zip(ours, before, strict=True))
            work = f"one model: {what}, {statistics.median(ours):.0f} MB: more than {theirs}"
            rounds = {"vecd": ours, "peer": before}
            yield figure("one", work, unit, more, MORE_MB, facts["others_cores"], rounds=rounds)
            continue
        yield compare("models-one", f"one model: {what}", ours, theirs, before, AS_BEFORE, facts, unit=unit)


def _live(bench: SeveralExperiment, checkout: Path, cache: Path) -> _Life:
    table = ModelTable("model", Path(bundled_model()))
    flags = ("--dtype", DTYPE, "--cache-dir", str(cache), "--drain-grace", "0", *bench.flags)
    began_at_s = time.perf_counter()
    with announcing(*flags, model=str(table.source), checkout=checkout) as server:
        start_s = time.perf_counter() - began_at_s
        target = parse_target(server.url)
        requests = [table.render(target, texts) for texts in draw_requests(table, FEW)]
        following = itertools.cycle(requests)
        embed(server, ["a short text"])
        time.sleep(REST_S)
        memory_mb = session_mb(server)
        with closing(Exchange(target)) as exchange:
            passes = passes_of_turn(lambda: exchange(next(following)), bench.turn_s, warmup_s=0.3)
        rate = flood(target, following, _CLIENTS, bench.turn_s, lambda: None).per_s
    return _Life(start_s, 1000 * statistics.median(passes), rate, memory_mb)
