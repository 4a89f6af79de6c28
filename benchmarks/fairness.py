"""Rerank of one document beside 1,000: how long it takes, and what is computed for a client that has left.

Owns the turns of the bulk and of the interactive requests. Called by `benchmarks.rerank`; `benchmarks.models` sends the
same beside bulk of another model.

Interactive requests come at random moments, 20 a second, whatever the server does; latency runs from these moments. In
one kind of turn a client sends 1,000 documents with each query, and in the other 32 clients send such documents one by
one: the same tokens, of which a server that serves whole requests would make something else.
"""

import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

from benchmarks.alone import Experiment, compare, percentile
from benchmarks.cpu import Neighbours
from benchmarks.findings import Finding, rounded
from benchmarks.goals import limit_under_bulk
from benchmarks.pairs import MIXED, DocumentLengths, RerankBody, TextSource
from benchmarks.requests import Exchange, info, metrics
from benchmarks.servers import Server, ServerFailure
from benchmarks.targets import CANCELLED_PAIRS, RERANK_BESIDE_BULK, at_most
from benchmarks.turns import Figure, alternate
from vecd.base.target import parse_target

NUM_BULK = 1000
_SHORT = DocumentLengths(25, 0.3, least=10, most=60)
RATE_PER_S = 20.0
_NUM_INTERACTIVE = 8
"""Connections of the interactive requests, each with its share of them."""
_NUM_SINGLE = 32
"""Clients that send bulk one by one."""
_BULK_RUNS_S = 1.5
"""Before the first interactive request."""
_NUM_BODIES = 64
_LEAVES_S = 1.0
"""After so long the client leaves."""
_IDLE_TIMEOUT_S = 60.0
_SEED = 1


def measure_fairness(experiment: Experiment) -> Iterator[Finding]:
    """Latency beside the two kinds of bulk, then pairs after a cancellation. Raises ServerFailure."""
    source = TextSource(experiment.model, _SEED)
    interactive = [source.body(_SHORT, 1) for _ in range(_NUM_BODIES)]
    bulk = [source.body(MIXED, NUM_BULK) for _ in range(3)]
    single = [RerankBody(body.query, [document]) for body in bulk for document in body.documents]
    with experiment.serving(*experiment.flags) as server:
        target = parse_target(server.url)
        sent, sent_singly = ([body.render(target) for body in bodies] for bodies in (bulk, single))
        requests = [body.render(target) for body in interactive]

        def run() -> float:
            return percentile(interactive_ms(server, requests, experiment.turn_s), 99)

        batch_ms: list[float] = []
        turns: dict[str, Callable[[], float]] = {
            "alone": run,
            "1,000": lambda: beside(server, sent, 1, run, batch_ms),
            "single": lambda: beside(server, sent_singly, _NUM_SINGLE, run),
        }
        run()  # not counted: vecd learns how fast it is
        neighbours = Neighbours([server.session])
        p99_ms = alternate(turns, experiment.num_rounds)
        facts = {"others_cores": neighbours.cores(), "batch_ms": rounded(statistics.median(batch_ms))}
        work = f"{RATE_PER_S:g} requests/s of one document beside {NUM_BULK:,} documents in each request, p99"
        singly = f"vecd, beside {_NUM_SINGLE} clients with one document in a request"
        yield compare("fairness", work, p99_ms["1,000"], singly, p99_ms["single"], RERANK_BESIDE_BULK, facts)
        alone_ms = statistics.median(p99_ms["alone"])
        limit_ms = limit_under_bulk(alone_ms, statistics.median(batch_ms))
        yield Finding(
            section="fairness",
            work=f"{work}; {rounded(alone_ms):g} ms alone",
            dtype="float32",
            unit="ms",
            ours=statistics.median(p99_ms["1,000"]),
            target=at_most(round(limit_ms, 1)),
            others_cores=facts["others_cores"],
            details={"rounds": {name: [rounded(one) for one in of_all] for name, of_all in p99_ms.items()}},
        )
        yield _cancelled(server, sent, experiment.num_rounds)


def interactive_ms(server: Server, requests: Sequence[bytes], duration_s: float) -> list[float]:
    """Milliseconds of each of `requests`, which come at random moments, `RATE_PER_S` a second, and begin anew after the
    last one. Raises ServerFailure."""
    target = parse_target(server.url)
    following = itertools.cycle(requests)

    def arrivals(seed: int) -> list[float]:
        rng, due_s, found = random.Random(seed), time.perf_counter(), []
        end_s = due_s + duration_s
        with closing(Exchange(target)) as exchange:
            while (due_s := due_s + rng.expovariate(RATE_PER_S / _NUM_INTERACTIVE)) < end_s:
                time.sleep(max(0.0, due_s - time.perf_counter()))
                exchange(next(following))
                found.append(1000 * (time.perf_counter() - due_s))
        return found

    with ThreadPoolExecutor(_NUM_INTERACTIVE) as threads:
        return [one for of_thread in threads.map(arrivals, range(_NUM_INTERACTIVE)) for one in of_thread]


def beside(
    server: Server,
    requests: Sequence[bytes],
    num_clients: int,
    run: Callable[[], Figure],
    batch_ms: list[float] | None = None,
    models: Sequence[str] = ("",),
) -> Figure:
    """What `run` returns while a bulk of `requests` is sent, after which all `models` are idle. Adds to `batch_ms` how
    long a batch took on average. Raises ServerFailure."""
    with _bulk(server, requests, num_clients):
        time.sleep(_BULK_RUNS_S)
        before = metrics(server)
        figure = run()
        after = metrics(server)
    if batch_ms is not None:
        seconds, num = (after[name] - before[name] for name in ("vecd_compute_seconds_total", "vecd_batches_total"))
        batch_ms.append(1000 * seconds / num)
    _await_idle(server, models)
    return figure


@contextmanager
def _bulk(server: Server, requests: Sequence[bytes], num_clients: int) -> Iterator[None]:
    """Clients that send their next request once they have the response, until the end. They leave without the last.
    Raises ServerFailure when one of them had none before."""
    target = parse_target(server.url)
    following = itertools.cycle(requests)
    exchanges = [Exchange(target) for _ in range(num_clients)]
    has_ended = threading.Event()

    def send(exchange: Exchange) -> None:
        with closing(exchange):
            try:
                while not has_ended.is_set():
                    exchange(next(following))
            except (ServerFailure, OSError):
                if not has_ended.is_set():
                    raise

    with ThreadPoolExecutor(num_clients) as threads:
        sending = [threads.submit(send, exchange) for exchange in exchanges]
        try:
            yield
        finally:
            has_ended.set()
            for exchange in exchanges:
                exchange.abort()
    for each in sending:
        each.result()


def _cancelled(server: Server, requests: Sequence[bytes], num_rounds: int) -> Finding:
    """Pairs that are computed after the client has left."""
    neighbours = Neighbours([server.session])
    num_before, num_after = [], []
    for _ in range(num_rounds):
        began = _num_pairs(server)
        with _bulk(server, requests, 1):
            time.sleep(_LEAVES_S)
            left = _num_pairs(server)
        _await_idle(server)
        num_before.append(left - began)
        num_after.append(_num_pairs(server) - left)
    return Finding(
        section="fairness",
        work=f"a client leaves {_LEAVES_S:g} s after a request with {NUM_BULK:,} documents: pairs computed then",
        dtype="float32",
        unit="pairs",
        ours=statistics.median(num_after),
        target=CANCELLED_PAIRS,
        others_cores=neighbours.cores(),
        details={"rounds": {"before": num_before, "after": num_after}},
    )


def _num_pairs(server: Server) -> float:
    return metrics(server)["vecd_sequences_total"]


def _await_idle(server: Server, models: Sequence[str] = ("",)) -> None:
    """Return once nothing waits for `models` and no batch is computed. Raises ServerFailure when it takes too long."""
    deadline_s = time.perf_counter() + _IDLE_TIMEOUT_S
    while metrics(server)["vecd_in_flight_tokens"] or any(info(server, name)["queue"]["sequences"] for name in models):
        if time.perf_counter() > deadline_s:
            raise ServerFailure(f"vecd has work {_IDLE_TIMEOUT_S:g} s after its clients have left")
        time.sleep(0.05)
