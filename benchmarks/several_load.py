"""Two models of one server at the same time: interactive requests beside bulk, and both beside infinity.

Owns the turns. The bulk and the interactive requests are those of `benchmarks.fairness`. Called by `benchmarks.models`.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

from benchmarks.alone import compare, percentile
from benchmarks.callers import Callers, Summary
from benchmarks.cpu import Neighbours, await_asleep
from benchmarks.fairness import NUM_BULK, RATE_PER_S, beside, interactive_ms
from benchmarks.findings import Finding, rounded
from benchmarks.pairs import MIXED, TextSource
from benchmarks.recipes import Unavailable, infinity_of
from benchmarks.servers import Server, ServerFailure, serving
from benchmarks.several import ModelTable, draw_requests, learn_canaries, serving_all
from benchmarks.several_experiment import FEW, SeveralExperiment
from benchmarks.targets import (
    AS_BEFORE,
    OTHER_MODELS_BULK,
)
from benchmarks.turns import alternate
from vecd.base.target import parse_target

_WARMUP_SHARE = 0.25
"""Of a turn beside a peer: before the figures begin."""
_PEER_CLIENTS = {"embed": 16, "rerank": 4}
_NUM_RERANKS = 48
_NUM_RERANKED = 8
"""Documents of a request: few, so that many responses come in a turn, also from a server that computes 50 a second."""
_BULK_REQUESTS = 3


def measure_fairness_of_several(bench: SeveralExperiment) -> Iterator[Finding]:
    """Interactive embeddings beside bulk of a reranker and beside bulk of their own model, in two pairs of priorities.
    Raises ServerFailure."""
    embedder, reranker = ModelTable("embed", bench.copy("first")), ModelTable("rerank", bench.reranker(), "rerank")
    names = [embedder.name, reranker.name]
    source = TextSource(reranker.source, seed=2)
    bodies = [source.body(MIXED, NUM_BULK) for _ in range(_BULK_REQUESTS)]
    pairs = [(body.query, *body.documents) for body in bodies]
    texts = [[f"{body.query} {document}" for document in body.documents] for body in bodies]
    with serving_all([embedder, reranker], bench.scratch("fair"), *bench.flags) as server:
        target = parse_target(server.url)
        for interactive, bulk in (("interactive", "bulk"), ("normal", "normal")):
            requests = [embedder.render(target, one, priority=interactive) for one in draw_requests(embedder, FEW)]
            run = partial(interactive_ms, server, requests, bench.turn_s)
            own = [embedder.render(target, one, priority=bulk) for one in texts]
            other = [reranker.render(target, one, priority=bulk) for one in pairs]
            turns: dict[str, Callable[[], list[float]]] = {
                "alone": run,
                "other": partial(beside, server, other, 1, run, models=names),
                "own": partial(beside, server, own, 1, run, models=names),
            }
            for turn in turns.values():
                turn()  # not counted: vecd learns how fast it is
            neighbours = Neighbours([server.session])
            found = alternate(turns, bench.num_rounds)
            facts = {"others_cores": neighbours.cores()}
            for percent in (50, 99):
                ms = {name: [percentile(one, percent) for one in of_all] for name, of_all in found.items()}
                alone = rounded(statistics.median(ms["alone"]))
                work = (
                    f"{RATE_PER_S:g} {interactive} embeddings/s beside {NUM_BULK:,} {bulk} pairs of a reranker in each "
                    f"request, p{percent}; {alone:g} ms alone"
                )
                peer = f"beside {NUM_BULK:,} {bulk} texts of their own model"
                facts_of = facts | {"alone_ms": [rounded(one) for one in ms["alone"]]}
                yield compare("models-fair", work, ms["other"], peer, ms["own"], OTHER_MODELS_BULK, facts_of)


def measure_peers_of_several(bench: SeveralExperiment) -> Iterator[Finding]:
    """Requests per second and p99 of an embedder and a reranker that are asked at the same time, beside infinity with
    the same two. Raises ServerFailure, also when infinity cannot be had or answers something else."""
    tables = [ModelTable("embed", bench.copy("first")), ModelTable("rerank", bench.reranker(), "rerank")]
    source = TextSource(tables[1].source, seed=3)
    bodies = [source.body(MIXED, _NUM_RERANKED) for _ in range(_NUM_RERANKS)]
    texts: dict[str, Sequence[Sequence[str]]] = {
        "embed": draw_requests(tables[0], FEW),
        "rerank": [(body.query, *body.documents) for body in bodies],
    }
    folder = bench.scratch("peers")
    canaries = [learn_canaries(table, texts[table.name], folder, *bench.flags) for table in tables]
    try:
        recipe = infinity_of(*(str(table.source) for table in tables), names=[table.name for table in tables])
    except Unavailable as error:
        raise ServerFailure(f"peers: {error}") from error
    with serving_all(tables, folder, *bench.flags) as ours, serving(recipe) as theirs:
        servers = {"vecd": ours, "infinity": theirs}
        sessions = [server.session for server in servers.values()]

        def turn(server: Server, turn_s: float) -> dict[str, Summary]:
            await_asleep(sessions)
            with ExitStack() as stack:
                callers = {
                    one.table.name: stack.enter_context(
                        Callers(server, one.questions(server), _PEER_CLIENTS[one.table.name])
                    )
                    for one in canaries
                }
                time.sleep(_WARMUP_SHARE * turn_s)
                began_at_s = time.perf_counter()
                time.sleep(turn_s)
                ended_at_s = time.perf_counter()
            found = {name: each.between(began_at_s, ended_at_s) for name, each in callers.items()}
            if problems := [problem for of_one in found.values() for problem in of_one.failures]:
                raise ServerFailure(f"peers: {server.url}: {problems[0]}")
            if silent := [name for name, of_one in found.items() if not of_one.num_right]:
                raise ServerFailure(f"peers: {server.url}: no response of {silent[0]} in a turn of {turn_s:g} s")
            return found

        for server in servers.values():
            turn(server, bench.turn_s)  # not counted: vecd learns how fast it is
        neighbours = Neighbours(sessions)
        found = alternate(
            {name: partial(turn, server, bench.turn_s) for name, server in servers.items()}, bench.num_rounds
        )
        facts = {"others_cores": neighbours.cores(), "remark": recipe.remark}
    title = f"infinity {recipe.version}"
    for table in tables:
        documents = f" with {_NUM_RERANKED} documents in a request" if table.kind == "rerank" else ""
        clients = f"{table.name}: {_PEER_CLIENTS[table.name]} clients{documents}, both models at once"
        ours_of, theirs_of = ([of_all[table.name] for of_all in found[name]] for name in servers)
        rates = [one.per_s for one in ours_of], [one.per_s for one in theirs_of]
        yield compare("models-peers", clients, rates[0], title, rates[1], AS_BEFORE, facts, unit="requests/s")
        p99 = [one.p99_ms for one in ours_of], [one.p99_ms for one in theirs_of]
        yield compare("models-peers", f"{clients}, p99", p99[0], title, p99[1], AS_BEFORE, facts)
