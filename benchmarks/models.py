"""What several models in one server cost, and what one of them does to the others: `make bench-models`.

Owns the parts, their turns and their models. The trials are `benchmarks.trials`'; findings are recorded as those of
`benchmarks.engine`, and shown on the same page. Called as `python -m benchmarks.models`.
"""

import argparse
import itertools
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from safetensors.numpy import load_file

from benchmarks.alone import CHECKOUT, compare, percentile
from benchmarks.callers import Callers, Summary
from benchmarks.checkpoints import save_cross_encoder, save_mirrored
from benchmarks.cpu import Neighbours, await_asleep
from benchmarks.engine import RESULTS, parse_names, record
from benchmarks.fairness import NUM_BULK, RATE_PER_S, beside, interactive_ms
from benchmarks.findings import Finding, Journal, rounded
from benchmarks.flood import flood
from benchmarks.inprocess import DTYPE
from benchmarks.machine import commit_of
from benchmarks.pairs import MIXED, TextSource
from benchmarks.recipes import Unavailable, infinity_of
from benchmarks.requests import Exchange, command, embed, private_mb, session_mb, worker_pids
from benchmarks.servers import Server, ServerFailure, announcing, bundled_model, serving
from benchmarks.several import Canaries, ModelTable, draw_requests, learn_canaries, serving_all, write_config
from benchmarks.targets import (
    AS_BEFORE,
    BESIDE_QUIET,
    GIVEN_BACK_PERCENT,
    MORE_MB,
    NONE_FAILED,
    ONE_LOAD,
    OTHER_MODELS_BULK,
    SEVERAL_MB_FACTOR,
    SEVERAL_MB_MARGIN,
    Target,
    at_most,
)
from benchmarks.trials import Disturb, Stretch, Trial, crowd_out, load_once, memory_of
from benchmarks.turns import alternate, passes_of_turn
from vecd.client.connection import parse_target

_FEW = 32
"""Texts that are asked again and again; the cache of vectors is off."""
_CLIENTS = 32
_REST_S = 2.0
"""A worker gives memory back after a second without a batch."""
_POLL_S = 0.01
_GONE_WITHIN_S = 60.0
_WARMUP_SHARE = 0.25
"""Of a turn beside a peer: before the figures begin."""
_PEER_CLIENTS = {"embed": 16, "rerank": 8}
_NUM_RERANKS = 24
_BULK_REQUESTS = 3
_BUDGET_MODELS = 2.5
"""Of three models of one size, with what workers need while they compute, two fit into a budget of so many."""
_NUM_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Bench:
    """What the parts have in common."""

    num_rounds: int
    turn_s: float
    duration_s: float
    """Of each kind of stretch of a trial, over all its slices."""
    flags: Sequence[str]
    folder: Path
    """For models and caches; gone at the end."""
    against: Path | None
    sparse: Path | None
    budget: int | None
    _made: dict[str, Path] = field(default_factory=dict)

    def model(self, name: str, make: Callable[[Path], Path]) -> Path:
        """A folder below `folder`, made once."""
        if name not in self._made:
            self._made[name] = make(self.folder / "models" / name)
        return self._made[name]

    def copy(self, name: str) -> Path:
        """The bundled model under another path, so that no page of its files is another model's, too."""
        return self.model(name, lambda folder: Path(shutil.copytree(bundled_model(), folder)))

    def reranker(self) -> Path:
        return self.model("reranker", save_cross_encoder)

    def scratch(self, name: str) -> Path:
        """A folder for the configuration and the cache of one kind of server."""
        folder = self.folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder


# --- one model, as before ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Life:
    """A server of one model, from its start to its end."""

    start_s: float
    p50_ms: float
    texts_per_s: float
    memory_mb: float


def measure_one(bench: Bench) -> Iterator[Finding]:
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
    figures: tuple[tuple[str, str, Callable[[_Life], float]], ...] = (
        ("start: exec → ready", "s", lambda life: life.start_s),
        ("1 client, a short text, p50", "ms", lambda life: life.p50_ms),
        (f"{_CLIENTS} clients, short texts", "texts/s", lambda life: life.texts_per_s),
        ("memory in all at rest (PSS)", "MB", lambda life: life.memory_mb),
    )
    for what, unit, figure in figures:
        ours, before = ([figure(life) for life in found[name]] for name in lives)
        if unit == "MB":
            more = statistics.median(our - their for our, their in zip(ours, before, strict=True))
            work = f"one model: {what}, {statistics.median(ours):.0f} MB: more than {theirs}"
            rounds = {"vecd": ours, "peer": before}
            yield _figure("one", work, unit, more, MORE_MB, facts["others_cores"], rounds=rounds)
            continue
        yield compare("models-one", f"one model: {what}", ours, theirs, before, AS_BEFORE, facts, unit=unit)


def _live(bench: Bench, checkout: Path, cache: Path) -> _Life:
    table = ModelTable("model", Path(bundled_model()))
    flags = ("--dtype", DTYPE, "--cache-dir", str(cache), "--drain-grace", "0", *bench.flags)
    began_at_s = time.perf_counter()
    with announcing(*flags, model=str(table.source), checkout=checkout) as server:
        start_s = time.perf_counter() - began_at_s
        target = parse_target(server.url)
        requests = [table.render(target, texts) for texts in draw_requests(table, _FEW)]
        following = itertools.cycle(requests)
        embed(server, ["a short text"])
        time.sleep(_REST_S)
        memory_mb = session_mb(server)
        with closing(Exchange(target)) as exchange:
            passes = passes_of_turn(lambda: exchange(next(following)), bench.turn_s, warmup_s=0.3)
        rate = flood(target, following, _CLIENTS, bench.turn_s, lambda: None).per_s
    return _Life(start_s, 1000 * statistics.median(passes), rate, memory_mb)


# --- memory -----------------------------------------------------------------------------------------------------


def measure_memory_of_several(bench: Bench) -> Iterator[Finding]:
    """Three models of one size at rest; then what one gives back, and what the second one costs beside a server of its
    own. Raises ServerFailure."""
    tables = [ModelTable(name, bench.copy(name)) for name in ("first", "second", "third")]
    weights_mb = (
        sum(4 * tensor.size for tensor in load_file(Path(bundled_model()) / "model.safetensors").values()) / 1e6
    )
    folder = bench.scratch("memory")
    with serving_all(tables, folder, *bench.flags):
        pass  # a first start compares engines, which needs torch: what is asked is what the next ones cost
    neighbours = Neighbours()
    totals, limits, workers = [], [], []
    for _ in range(bench.num_rounds):
        with serving_all(tables, folder, *bench.flags) as server:
            for table in tables:
                _ask_once(server, table)
            time.sleep(_REST_S)
            totals.append(session_mb(server))
            workers.append(sum(private_mb(pid) for table in tables for pid in worker_pids(server, table.name)))
        limits.append(SEVERAL_MB_FACTOR * len(tables) * weights_mb + SEVERAL_MB_MARGIN + workers[-1])
    yield _figure(
        "memory",
        f"three models of {weights_mb:.0f} MB of weights in one server, at rest (PSS); of it "
        f"{statistics.median(workers):.0f} MB are private to workers",
        "MB",
        statistics.median(totals),
        at_most(round(statistics.median(limits), 1)),
        neighbours.cores(),
        rounds={"vecd": totals, "workers": workers},
    )
    yield from _second_model(bench, tables)
    yield _unloaded(bench, tables)


def _second_model(bench: Bench, tables: Sequence[ModelTable]) -> Iterator[Finding]:
    """A second model that a reload adds, beside a server of its own, in turns."""
    folder, folder_alone = bench.scratch("second"), bench.scratch("alone")

    def added() -> tuple[float, float]:
        with serving_all(tables[:1], folder, *bench.flags) as server:
            _ask_once(server, tables[0])
            time.sleep(_REST_S)
            before_mb = session_mb(server)
            write_config(folder / "vecd.toml", tables[:2])
            began_at_s = time.perf_counter()
            os.kill(server.session, signal.SIGHUP)
            while not _has_answered(server, tables[1]):
                if time.perf_counter() - began_at_s > _GONE_WITHIN_S:
                    raise ServerFailure(f"{tables[1].name} is not served after {_GONE_WITHIN_S:g} s")
                time.sleep(_POLL_S)
            load_s = time.perf_counter() - began_at_s
            time.sleep(_REST_S)
            return load_s, session_mb(server) - before_mb

    def alone() -> tuple[float, float]:
        began_at_s = time.perf_counter()
        with serving_all(tables[1:2], folder_alone, *bench.flags) as server:
            _ask_once(server, tables[1])
            load_s = time.perf_counter() - began_at_s
            time.sleep(_REST_S)
            return load_s, session_mb(server)

    turns = {"added": added, "alone": alone}
    for turn in turns.values():
        turn()  # not counted: the first start compares engines
    neighbours = Neighbours()
    found = alternate(turns, bench.num_rounds)
    facts = {"others_cores": neighbours.cores()}
    for index, (what, unit) in enumerate((("SIGHUP → first answer", "s"), ("memory (PSS) on top", "MB"))):
        ours, theirs = ([one[index] for one in found[name]] for name in turns)
        peer = "a server of its own"
        yield compare(
            "models-memory",
            f"a second model, added by a reload: {what}",
            ours,
            peer,
            theirs,
            AS_BEFORE,
            facts,
            unit=unit,
        )


def _has_answered(server: Server, table: ModelTable) -> bool:
    """Asks by the model's name in the path, which another model never answers."""
    with closing(Exchange(parse_target(server.url))) as exchange:
        request = table.render(parse_target(server.url), ["a short text"])
        path = f"/m/{table.name}/v1/embeddings".encode()
        return exchange.response(request.replace(b"/v1/embeddings", path, 1)).startswith(b"HTTP/1.1 200")


def _ask_once(server: Server, table: ModelTable) -> None:
    with closing(Exchange(parse_target(server.url))) as exchange:
        exchange(table.render(parse_target(server.url), ["a short text"]))


def _unloaded(bench: Bench, tables: Sequence[ModelTable]) -> Finding:
    """What of a third model's memory its unloading gives back."""
    demanded = [replace(table, settings={"load": "demand"}) for table in tables]
    neighbours = Neighbours()
    percents, load_s, model_mb = [], [], []
    for _ in range(bench.num_rounds):
        with serving_all(demanded, bench.scratch("unloaded"), *bench.flags) as server:
            for table in demanded[:2]:
                _ask_once(server, table)
            time.sleep(_REST_S)
            without_mb = session_mb(server)
            began_at_s = time.perf_counter()
            _ask_once(server, demanded[2])
            load_s.append(time.perf_counter() - began_at_s)
            time.sleep(_REST_S)
            with_mb = session_mb(server)
            pids = worker_pids(server, demanded[2].name)
            command(server, demanded[2].name, "unload")
            deadline_s = time.perf_counter() + _GONE_WITHIN_S
            while any(Path(f"/proc/{pid}").exists() for pid in pids):
                if time.perf_counter() > deadline_s:
                    raise ServerFailure(f"{demanded[2].name} has workers {_GONE_WITHIN_S:g} s after its unloading")
                time.sleep(_POLL_S)
            time.sleep(_REST_S)
            model_mb.append(with_mb - without_mb)
            percents.append(100 * (with_mb - session_mb(server)) / model_mb[-1])
    return _figure(
        "memory",
        f"unloading one of three models gives back, of the {statistics.median(model_mb):.0f} MB that its loading took "
        f"(first answer after {statistics.median(load_s):.2f} s)",
        "%",
        statistics.median(percents),
        GIVEN_BACK_PERCENT,
        neighbours.cores(),
        rounds={"percent": percents, "model_mb": model_mb, "load_s": load_s},
    )


# --- fairness ---------------------------------------------------------------------------------------------------


def measure_fairness_of_several(bench: Bench) -> Iterator[Finding]:
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
            requests = [embedder.render(target, one, priority=interactive) for one in draw_requests(embedder, _FEW)]
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


# --- beside infinity --------------------------------------------------------------------------------------------


def measure_peers_of_several(bench: Bench) -> Iterator[Finding]:
    """Requests per second and p99 of an embedder and a reranker that are asked at the same time, beside infinity with
    the same two. Raises ServerFailure, also when infinity cannot be had or answers something else."""
    tables = [ModelTable("embed", bench.copy("first")), ModelTable("rerank", bench.reranker(), "rerank")]
    source = TextSource(tables[1].source, seed=3)
    bodies = [source.body(MIXED) for _ in range(_NUM_RERANKS)]
    texts: dict[str, Sequence[Sequence[str]]] = {
        "embed": draw_requests(tables[0], _FEW),
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
            return found

        for server in servers.values():
            turn(server, 1.0)
        neighbours = Neighbours(sessions)
        found = alternate(
            {name: partial(turn, server, bench.turn_s) for name, server in servers.items()}, bench.num_rounds
        )
        facts = {"others_cores": neighbours.cores(), "remark": recipe.remark}
    title = f"infinity {recipe.version}"
    for table in tables:
        clients = f"{table.name}: {_PEER_CLIENTS[table.name]} clients, both models at once"
        ours_of, theirs_of = ([of_all[table.name] for of_all in found[name]] for name in servers)
        rates = [one.per_s for one in ours_of], [one.per_s for one in theirs_of]
        yield compare("models-peers", clients, rates[0], title, rates[1], AS_BEFORE, facts, unit="requests/s")
        p99 = [one.p99_ms for one in ours_of], [one.p99_ms for one in theirs_of]
        yield compare("models-peers", f"{clients}, p99", p99[0], title, p99[1], AS_BEFORE, facts)


# --- trials -----------------------------------------------------------------------------------------------------


def canaries_of(bench: Bench) -> list[Canaries]:
    """Of an embedder, another one with other vectors, and a sparse model if there is one, else a reranker."""
    third = ModelTable("rerank", bench.reranker(), "rerank")
    if bench.sparse is not None:
        third = ModelTable("sparse", bench.sparse, "sparse")
    mirrored = bench.model("mirrored", save_mirrored)
    tables = [ModelTable("embed", Path(bundled_model())), ModelTable("mirrored", mirrored), third]
    folder = bench.scratch("canaries")
    return [
        learn_canaries(table, draw_requests(table, _FEW, seed), folder, *bench.flags)
        for seed, table in enumerate(tables)
    ]


def measure_trial(bench: Bench) -> Iterator[Finding]:
    """The others while the workers of one model are killed, while it is reloaded, and while it is unloaded and loaded
    again. Raises ServerFailure."""
    trial = Trial(
        canaries=canaries_of(bench),
        victim="mirrored",
        num_clients=4,
        pause_s=0.05,
        settle_s=2.0,
        stretch_s=bench.duration_s,
        num_slices=bench.num_rounds,
        folder=bench.scratch("trial"),
        flags=bench.flags,
    )
    neighbours = Neighbours()
    disturbances: Mapping[str, Disturb] = {
        "killed each second": trial.kill,
        "reloaded": trial.reload,
        "unloaded and loaded again": trial.unload,
    }
    for name, disturb in disturbances.items():
        stretches = trial.run({name: disturb})
        yield from judge_trial(trial, name, stretches, neighbours.cores())


def judge_trial(
    trial: Trial, name: str, stretches: Mapping[str, Sequence[Stretch]], others_cores: float
) -> Iterator[Finding]:
    """What the stretches of one disturbance say of each of the other models."""
    quiet, disturbed = stretches["quiet"], stretches[name]
    num_done = sum(stretch.num_done for stretch in disturbed)
    for model in (canaries.table.name for canaries in trial.canaries):
        summaries = [stretch.models[model] for stretch in disturbed]
        bad = [failure for summary in summaries for failure in summary.failures]
        num_bad = len(bad) + sum(summary.num_refused for summary in summaries)
        num = num_bad + sum(summary.num_right for summary in summaries)
        work = f"{trial.victim} is {name} ({num_done} times): requests of {model} that failed, of {num:,}"
        yield _figure("trial", work, "requests", num_bad, NONE_FAILED, others_cores, failures=bad[:5])
        if model != trial.victim:
            work = f"{trial.victim} is {name}: p99 of {model}"
            calm, busy = ([stretch.models[model].p99_ms for stretch in of] for of in (quiet, disturbed))
            facts = {"others_cores": others_cores}
            yield compare("models-trial", work, busy, "quiet stretches of the run", calm, BESIDE_QUIET, facts)


def measure_budget(bench: Bench) -> Iterator[Finding]:
    """Three models on demand with memory for two, then many requests at once for one that is not loaded. Raises
    ServerFailure."""
    canaries = canaries_of(bench)
    folder = bench.scratch("budget")
    budget = bench.budget
    if budget is None:
        server_mb, model_mb = memory_of(canaries[0].table, folder, *bench.flags)
        budget = round(1e6 * (server_mb + _BUDGET_MODELS * model_mb))
    neighbours = Neighbours()
    crowded = crowd_out(canaries, budget, 4, bench.duration_s, folder, *bench.flags)
    others_cores = neighbours.cores()
    what = f"three models on demand, {budget / 1e6:.0f} MB, {bench.duration_s:g} s"
    for name, summary in crowded.models.items():
        num_bad = summary.num_refused + len(summary.failures)
        work = f"{what}: requests of {name} without an answer, of {num_bad + summary.num_right:,}"
        problems = summary.failures[:5]
        yield _figure("budget", work, "requests", num_bad, NONE_FAILED, others_cores, failures=problems)
        longest_s = summary.max_ms / 1000
        yield _figure("budget", f"{what}: longest wait of a request of {name}", "s", longest_s, None, others_cores)
    yield _figure("budget", f"{what}: loads", "loads/min", crowded.loads_per_min, None, others_cores)
    num_loads = load_once(canaries[0], _NUM_AT_ONCE, folder, *bench.flags)
    work = f"{_NUM_AT_ONCE:,} requests at once for a model that is not loaded: loads"
    yield _figure("budget", work, "loads", num_loads, ONE_LOAD, others_cores)


def _figure(
    part: str, work: str, unit: str, ours: float, target: Target | None, others_cores: float, **details: object
) -> Finding:
    """A finding without a peer."""
    return Finding(
        section=f"models-{part}",
        work=work,
        dtype=DTYPE,
        unit=unit,
        ours=ours,
        target=target,
        others_cores=others_cores,
        details=details,
    )


# --- the command ------------------------------------------------------------------------------------------------

PARTS: Mapping[str, Callable[[Bench], Iterator[Finding]]] = {
    "one": measure_one,
    "memory": measure_memory_of_several,
    "fair": measure_fairness_of_several,
    "peers": measure_peers_of_several,
    "trial": measure_trial,
    "budget": measure_budget,
}
_ROUNDS = {"one": 15, "memory": 5, "fair": 5, "peers": 5, "trial": 6, "budget": 1}
_TURN_S = {"one": 1.0, "fair": 5.0, "peers": 8.0}


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 measured (whatever the figures), 1 a part failed, 2 bad arguments, 130 interrupted."""
    arguments = _make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as an exception: servers are stopped
    exit_code = 0
    with tempfile.TemporaryDirectory(prefix="vecd-bench-") as name:
        (Path(name) / "models").mkdir()
        for part in arguments.part:
            bench = Bench(
                num_rounds=arguments.rounds or _ROUNDS[part],
                turn_s=arguments.seconds or _TURN_S.get(part, 0.0),
                duration_s=arguments.duration,
                flags=arguments.flags.split(),
                folder=Path(name),
                against=arguments.against and arguments.against.resolve(),
                sparse=arguments.sparse and arguments.sparse.resolve(),
                budget=arguments.budget,
            )
            journal = Journal(arguments.results, "several", {"rounds": bench.num_rounds, "turn_s": bench.turn_s})
            code = record(PARTS[part](bench), journal, arguments.results)
            if code > 1:
                return code
            exit_code = exit_code or code
    return exit_code


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description="Measure several models in one server, in turns: against an earlier commit, against infinity, and "
        "while one of them is killed, reloaded and unloaded.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--part", type=lambda value: parse_names(value, PARTS), default=",".join(PARTS), help="what is measured")
    add("--rounds", type=int, metavar="N", help=f"turns of each contender, slices of a trial; without it {_ROUNDS}")
    add("--seconds", type=float, metavar="S", help=f"least length of a turn; without it {_TURN_S}")
    add("--duration", type=float, default=60.0, metavar="S", help="of each disturbance of a trial, over all slices")
    add("--against", type=Path, metavar="FOLDER", help="a checkout of the commit that one model is compared with")
    add("--sparse", type=Path, metavar="FOLDER", help="a sparse model, for trials; without it a reranker is the third")
    add("--budget", type=int, metavar="BYTES", help="--memory-budget of three models; without it measured, for two")
    add("--flags", default="", help="of vecd; write --flags='…'")
    add("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where the findings are recorded")
    return parser


if __name__ == "__main__":
    sys.exit(main())
