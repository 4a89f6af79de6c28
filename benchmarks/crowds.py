"""64 clients: what leases of cores must not cost them, and what a cache of vectors is worth to them.

Owns the turns and the texts that come again. Both servers run all the time; what has no turn sleeps. Called by
`benchmarks.cores`.
"""

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import uvloop

from benchmarks.alone import ONE_THREAD, Experiment, compare
from benchmarks.cpu import Neighbours, await_asleep
from benchmarks.findings import Finding
from benchmarks.flood import flood, send_all
from benchmarks.loads import LONG, SHORT, WORKLOADS, make_load
from benchmarks.requests import metrics
from benchmarks.servers import Server, ServerFailure
from benchmarks.targets import BESIDE_BULK, CACHED, UNDER_LOAD
from benchmarks.turns import Figure, alternate
from vecd.base.target import parse_target
from vecd.client.bench import command as bench
from vecd.client.bench.load import Load, RequestShape, render_requests
from vecd.client.bench.report import RunResult
from vecd.client.bench.texts import Lengths, draw_texts

_CLIENTS = 64
_LOAD_WARMUP_S = 1.0
_RATES = {"short-64": 5, "mixed": 8}
"""Workloads of `benchmarks.loads`, and how long a turn is, in those of one client: some times as long as a client
waits."""
_BULK = "interactive-bulk"
_BULK_TURNS = 12
_BULK_TEXTS = 64
"""In a request of the bulk. With 512 of them, as `make bench` has, a run would take many seconds to end."""
_CACHE_FLAGS = ("--vector-cache", "256000000")
_CACHE_METRICS = "vecd_vector_cache"
_CACHE_TURNS = 3
_CACHE_WARMUP_S = 0.5
_SHARE_REPEATED = 0.9
_NUM_REPEATED = 1024
"""Of 64 that wait at the same time, hardly two are the same: what is measured is the cache."""
_MAX_REQUESTS_PER_S = 8000
"""More than the client can send."""
_MEDIUM = Lengths(50)
"""About 64 tokens."""


def measure_load(experiment: Experiment) -> Iterator[Finding]:
    """Rates with short and mixed texts, then the latency of interactive requests beside bulk, against one thread per
    worker. Raises ServerFailure."""
    flags, one_thread = " ".join(experiment.flags), f"vecd {' '.join(ONE_THREAD)}"
    with experiment.serving(*experiment.flags) as ours, experiment.serving(*ONE_THREAD) as single:
        servers = {"vecd": ours, "one thread": single}
        for name, num_turns in _RATES.items():
            run = functools.partial(_run, name=name, duration_s=num_turns * experiment.turn_s)
            results, facts = _take_turns(servers, run, experiment.num_rounds)
            rates = {key: [one.per_s(one.num_texts) for one in of_all] for key, of_all in results.items()}
            work = f"{_CLIENTS} clients, {name.removesuffix('-64')} texts, {flags}"
            target, theirs = UNDER_LOAD, rates["one thread"]
            yield compare("load", work, rates["vecd"], one_thread, theirs, target, facts, unit="texts/s")
        run = functools.partial(_run, name=_BULK, duration_s=_BULK_TURNS * experiment.turn_s)
        results, facts = _take_turns(servers, run, experiment.num_rounds)
        p99 = {key: [_percentile_ms(one) for one in of_all] for key, of_all in results.items()}
        work = f"20 short requests/s beside two clients with {_BULK_TEXTS} long texts per request, p99, {flags}"
        yield compare("load", work, p99["vecd"], one_thread, p99["one thread"], BESIDE_BULK, facts)


def measure_cache(experiment: Experiment) -> Iterator[Finding]:
    """Rates where 90 % of the texts come again, short and longer ones, and where all are different, against a server
    without a cache. Raises ServerFailure."""
    works = (
        (f"{_SHARE_REPEATED:.0%} of short texts come again", Texts(1, SHORT, _SHARE_REPEATED), CACHED),
        (f"{_SHARE_REPEATED:.0%} of texts of about 64 tokens come again", Texts(2, _MEDIUM, _SHARE_REPEATED), CACHED),
        ("short texts, all different", Texts(3, SHORT, 0.0), UNDER_LOAD),
    )
    with experiment.serving(*_CACHE_FLAGS) as ours, experiment.serving() as without:
        servers = {"vecd": ours, "without": without}
        for work, texts, target in works:
            send_all(parse_target(ours.url), _render(ours, texts.repeated), _CLIENTS)
            before = metrics(ours)
            run = functools.partial(_flood, texts=texts, duration_s=_CACHE_TURNS * experiment.turn_s)
            rates, facts = _take_turns(servers, run, experiment.num_rounds)
            told = {name: value - before[name] for name, value in metrics(ours).items() if _CACHE_METRICS in name}
            title = f"{_CLIENTS} clients, {work}, {' '.join(_CACHE_FLAGS)}"
            theirs = rates["without"]
            facts = facts | told
            yield compare("cache", title, rates["vecd"], "vecd without", theirs, target, facts, unit="texts/s")


@dataclass(slots=True)
class Texts:
    """Texts of which a share comes again and again. The others are never the same, nor are those of another seed."""

    seed: int
    lengths: Lengths
    share_repeated: float
    repeated: list[str] = field(init=False)
    _random: random.Random = field(init=False, default_factory=lambda: random.Random(0))
    _num_drawn: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.repeated = [self._draw() for _ in range(_NUM_REPEATED if self.share_repeated else 0)]

    def draw(self, num_texts: int) -> list[str]:
        return [
            self._random.choice(self.repeated) if self._random.random() < self.share_repeated else self._draw()
            for _ in range(num_texts)
        ]

    def _draw(self) -> str:
        self._num_drawn += 1
        # The numbers make it a text of its own: of 60,000 words there are no more runs than that.
        return f"{self.seed} {self._num_drawn} {draw_texts(1, self.lengths, self._num_drawn)[0]}"


def _take_turns(
    servers: Mapping[str, Server], run: Callable[[Server], Figure], num_rounds: int
) -> tuple[dict[str, list[Figure]], dict[str, float]]:
    """What `run` returns of each server, round by round, and what others used meanwhile."""
    sessions = [server.session for server in servers.values()]

    def turn(server: Server) -> Figure:
        await_asleep(sessions)
        return run(server)

    neighbours = Neighbours(sessions)
    figures = alternate({name: functools.partial(turn, server) for name, server in servers.items()}, num_rounds)
    return figures, {"others_cores": neighbours.cores()}


def _run(server: Server, name: str, duration_s: float) -> RunResult:
    """Raises ServerFailure for any error."""
    [result] = uvloop.run(bench.run_loads([_make_load(server, name, duration_s)], lambda _: None))
    if result.ended_early == bench.INTERRUPTED:
        raise KeyboardInterrupt
    if result.errors or result.ended_early:
        raise ServerFailure(f"{name}: {result.ended_early or dict(result.errors)}")
    return result


def _make_load(server: Server, name: str, duration_s: float) -> Load:
    """That of `make bench`, but for its clients, who are as many for each rate, and the size of its bulk."""
    [workload] = [one for one in WORKLOADS if one.name == name]
    clients = _CLIENTS if workload.clients else 0
    workload = replace(workload, clients=clients, texts_per_request=1, warmup_s=_LOAD_WARMUP_S, length_factor=1.0)
    load = make_load(workload, server.url, duration_s, None)
    if load.bulk is None:
        return load
    shape = RequestShape(lengths=LONG, texts_per_request=_BULK_TEXTS)
    return replace(load, bulk=replace(load.bulk, shape=shape, requests=render_requests(load.target, shape, 16)))


def _percentile_ms(result: RunResult) -> float:
    """The 99th. Raises ServerFailure without a response."""
    milliseconds = result.latencies_ms()["p99_ms"]
    if milliseconds is None:
        raise ServerFailure(f"{_BULK}: no response")
    return milliseconds


def _flood(server: Server, texts: Texts, duration_s: float) -> float:
    """Texts per second. Raises ServerFailure."""
    num_requests = round((_CACHE_WARMUP_S + duration_s) * _MAX_REQUESTS_PER_S)
    requests = iter(_render(server, texts.draw(num_requests)))
    return flood(parse_target(server.url), requests, _CLIENTS, duration_s, lambda: None, _CACHE_WARMUP_S).per_s


def _render(server: Server, texts: Sequence[str]) -> list[bytes]:
    """Requests of one text each, in their order."""
    target = parse_target(server.url)
    return [request for text in texts for request in render_requests(target, RequestShape(texts=[text]), 1)]
