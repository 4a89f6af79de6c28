"""One client that is alone: on an idle machine, beside peers in process, and while another program takes a core.

Owns the turns. Both servers run all the time, one with `--threads-per-worker 1`, and what has no turn sleeps. Before
a turn of the server that lends cores the machine rests, because to it the turn of another is a foreign load. Called by
`benchmarks.cores`.
"""

import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cpu import Neighbours, await_asleep
from benchmarks.findings import Finding, rounded
from benchmarks.inprocess import DTYPE, PEERS, InProcess
from benchmarks.loops import BusyLoop, calibrate
from benchmarks.machine import num_cores
from benchmarks.requests import Exchange, metrics
from benchmarks.servers import Server, announcing
from benchmarks.targets import BUSY, ELASTIC, HTTP_MARGIN_MS, IN_PROCESS, LEASED_PERCENT, Target
from benchmarks.turns import alternate, median_interval, paired_ratios, passes_of_turn
from benchmarks.workload import texts_of
from vecd.base.target import parse_target
from vecd.client.bench.load import RequestShape, render_requests
from vecd.model.card import read_card

LENGTHS = (12, 64, 200)
"""Tokens of the one text of a request."""
ONE_THREAD = ("--threads-per-worker", "1")
CHECKOUT = Path(__file__).parents[1]
_NUM_TEXTS = 16
_WARMUP_S = 0.2
REST_S = 2.2
"""vecd looks for foreign load once a second, at the last second: after two looks it has seen an idle machine."""
LEARNING_S = 3.0
"""Before the rounds: how many threads pay is learned from batches."""
_BUSY_TURNS = 3
"""A turn on a busy machine, in those of an idle one: a 95th percentile takes more requests than a median."""
_ENDLESS_S = 1e9
_LEASED, _BATCHES = "vecd_batches_leased_total", "vecd_batches_total"
"""Batches that were computed with more than one thread, and all."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """What the sections have in common."""

    model: Path
    num_rounds: int
    turn_s: float
    flags: Sequence[str]
    """Of the server that is measured against one thread per worker."""
    folder: Path
    """For the servers' cache."""
    base: Path | None = None
    """A checkout of the commit that the gateway is measured against."""
    load_s: float = 600.0
    """Length of the load after which a lone client is measured."""

    def serving(self, *flags: str) -> AbstractContextManager[Server]:
        cache = ("--cache-dir", str(self.folder))
        return announcing("--dtype", DTYPE, *cache, *flags, model=str(self.model), checkout=CHECKOUT)


@dataclass(slots=True)
class Turns:
    """Those of one length of text."""

    sessions: Sequence[int]
    """Of all contenders, which must sleep before a turn begins."""
    settled_s: list[float] = field(default_factory=list)
    """How long the threads of the turn before still ran."""

    def of_server(self, server: Server, texts: Sequence[str], turn_s: float, rest_s: float = 0.0) -> list[float]:
        target = parse_target(server.url)
        requests = render_requests(target, RequestShape(texts=texts), len(texts))
        self._settle(rest_s)
        with closing(Exchange(target)) as exchange:
            next_request = functools.partial(next, itertools.cycle(requests))
            return passes_of_turn(lambda: exchange(next_request()), turn_s, _WARMUP_S)

    def of_peer(self, peer: InProcess, num_tokens: int, turn_s: float) -> list[float]:
        self._settle(0.0)
        return peer.turn(num_tokens, _WARMUP_S, turn_s)

    def _settle(self, rest_s: float) -> None:
        self.settled_s.append(await_asleep(self.sessions))
        time.sleep(rest_s)


def measure_single(experiment: Experiment) -> Iterator[Finding]:
    """Calibration, then for each length vecd against one thread per worker and against each peer. Raises ServerFailure
    and RuntimeError. A peer that cannot be had is said on stderr, and left out."""
    yield calibrate(experiment.num_rounds)
    card = read_card(experiment.model)
    with ExitStack() as stack:
        ours = stack.enter_context(experiment.serving(*experiment.flags))
        single = stack.enter_context(experiment.serving(*ONE_THREAD))
        peers = list(_start_peers(stack, experiment.model))
        sessions = (ours.session, single.session, *(peer.session for peer in peers))
        for num_tokens in LENGTHS:
            variants = {peer.name: peer.choose(num_tokens) for peer in peers}
            texts = texts_of(card, _NUM_TEXTS, num_tokens)
            turns, turn_s = Turns(sessions), experiment.turn_s
            contenders: dict[str, Callable[[], list[float]]] = {
                "vecd": functools.partial(turns.of_server, ours, texts, turn_s, REST_S),
                "one thread": functools.partial(turns.of_server, single, texts, turn_s),
                **{peer.name: functools.partial(turns.of_peer, peer, num_tokens, turn_s) for peer in peers},
            }
            turns.of_server(ours, texts, LEARNING_S, REST_S)
            neighbours, before = Neighbours(sessions), metrics(ours)
            passes = alternate(contenders, experiment.num_rounds)
            share = leased_percent(before, metrics(ours))
            facts = {
                "others_cores": neighbours.cores(),
                "leased_percent": share,
                "longest_settling_ms": rounded(1000 * max(turns.settled_s)),
            }
            p50 = {name: [1000 * statistics.median(of_one) for of_one in of_all] for name, of_all in passes.items()}
            work = f"1 client over HTTP, a text of {num_tokens} tokens, p50, {_describe(experiment.flags)}"
            if share is not None:
                work += f" ({share:.0f} % of its batches with more than one thread)"
            one_thread = f"vecd {_describe(ONE_THREAD)}"
            yield compare("single", work, p50["vecd"], one_thread, p50["one thread"], ELASTIC[num_tokens], facts)
            for name, variant in variants.items():
                title = f"{name} {DTYPE} in process, {num_cores()} threads, + {HTTP_MARGIN_MS:g} ms"
                theirs = [of_round + HTTP_MARGIN_MS for of_round in p50[name]]
                yield compare("single", work, p50["vecd"], title, theirs, IN_PROCESS, facts | {"variant": variant})


def measure_busy(experiment: Experiment) -> Iterator[Finding]:
    """For each length the 95th percentile against one thread per worker; then how many batches had more than one.
    Raises ServerFailure and RuntimeError."""
    card = read_card(experiment.model)
    with (
        experiment.serving(*experiment.flags) as ours,
        experiment.serving(*ONE_THREAD) as single,
        BusyLoop() as other_program,
    ):
        sessions = (ours.session, single.session)
        texts = {num_tokens: texts_of(card, _NUM_TEXTS, num_tokens) for num_tokens in LENGTHS}
        other_program.start(_ENDLESS_S)
        # The first second, in which vecd finds out, does not count.
        for server in (ours, single):
            Turns(sessions).of_server(server, texts[LENGTHS[0]], 1.0, REST_S)
        before = metrics(ours)
        for num_tokens in LENGTHS:
            turns, turn_s = Turns(sessions), _BUSY_TURNS * experiment.turn_s
            contenders = {
                "vecd": functools.partial(turns.of_server, ours, texts[num_tokens], turn_s),
                "one thread": functools.partial(turns.of_server, single, texts[num_tokens], turn_s),
            }
            neighbours = Neighbours((*sessions, other_program.session))
            passes = alternate(contenders, experiment.num_rounds)
            facts = {"others_cores": neighbours.cores()}
            p95 = {name: [1000 * percentile(of_one, 95) for of_one in of_all] for name, of_all in passes.items()}
            facts["passes_per_turn"] = statistics.median(map(len, passes["vecd"]))
            work = f"a core taken by a busy loop: 1 client, a text of {num_tokens} tokens, p95"
            title = f"{work}, {_describe(experiment.flags)}"
            yield compare("busy", title, p95["vecd"], f"vecd {_describe(ONE_THREAD)}", p95["one thread"], BUSY, facts)
        share = leased_percent(before, after := metrics(ours))
        num_batches = after[_BATCHES] - before[_BATCHES]
    if share is None:
        print(f"benchmarks.cores: no share of batches with more threads: vecd has no {_LEASED}", file=sys.stderr)
        return
    yield Finding(
        section="busy",
        work=f"a core taken by a busy loop: batches with more than one thread, of {num_batches:g}",
        dtype=DTYPE,
        unit="%",
        ours=share,
        target=LEASED_PERCENT,
        others_cores=neighbours.cores(),
    )


def compare(
    section: str,
    work: str,
    ours: Sequence[float],
    peer: str,
    theirs: Sequence[float],
    target: Target,
    facts: Mapping[str, object],
    unit: str = "ms",
    dtype: str = DTYPE,
) -> Finding:
    """A finding of one figure per round: of times, or of rates, whose unit ends with "/s". `facts` has
    `others_cores`."""
    ratios = paired_ratios(ours, theirs) if unit.endswith("/s") else paired_ratios(theirs, ours)
    details = dict(facts)
    others_cores = float(str(details.pop("others_cores")))
    return Finding(
        section=section,
        work=work,
        dtype=dtype,
        unit=unit,
        ours=statistics.median(ours),
        peer=peer,
        theirs=statistics.median(theirs),
        ratio=statistics.median(ratios),
        interval=median_interval(ratios),
        target=target,
        others_cores=others_cores,
        details=details
        | {"rounds": {"vecd": [rounded(one) for one in ours], "peer": [rounded(one) for one in theirs]}},
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """At the nearest rank; `values` must not be empty."""
    return sorted(values)[max(math.ceil(percent / 100 * len(values)), 1) - 1]


def leased_percent(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Of the batches between two looks at the metrics, those that had more than one thread; None where vecd does not
    say, or there was none."""
    num_batches = after[_BATCHES] - before[_BATCHES]
    if _LEASED not in after or not num_batches:
        return None
    return 100 * (after[_LEASED] - before[_LEASED]) / num_batches


def _start_peers(stack: ExitStack, model: Path) -> Iterator[InProcess]:
    for name in PEERS:
        try:
            yield stack.enter_context(InProcess(name, model))
        except RuntimeError as error:
            print(f"benchmarks.cores: {error}: it is left out", file=sys.stderr)


def _describe(flags: Sequence[str]) -> str:
    return " ".join(flags)
