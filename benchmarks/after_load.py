"""A lone short text after a start, and after minutes of load from several sides, beside the engine in process.

Owns the load and the two moments. What vecd has learned about threads while others sent requests must not decide how a
client that is alone is served. Called by `benchmarks.cores`.
"""

import functools
import statistics
from collections.abc import Iterator
from dataclasses import replace

import uvloop

from benchmarks.alone import LEARNING_S, REST_S, Experiment, Turns, compare, leased_percent
from benchmarks.cpu import Neighbours
from benchmarks.findings import Finding, rounded
from benchmarks.inprocess import OURS, InProcess
from benchmarks.loads import MIXED, SHORT
from benchmarks.machine import num_cores
from benchmarks.requests import info, metrics
from benchmarks.servers import Server, ServerFailure
from benchmarks.targets import AFTER_LOAD, ENGINE_FACTOR, ENGINE_MARGIN_MS
from benchmarks.turns import alternate
from benchmarks.workload import texts_of
from vecd.base.target import parse_target
from vecd.client.bench import command as bench
from vecd.client.bench.load import Load, RequestShape, render_requests
from vecd.model.card import read_card

_NUM_TOKENS, _NUM_TEXTS = 12, 16
_SHORT_PER_S, _MIXED_CLIENTS = 20.0, 1
"""For each core: short texts that come at random moments, and clients that send texts of mixed lengths one after the
other. Batches then meet most of the time, and some are alone."""
_NUM_MIXED_REQUESTS = 512
_TIMEOUT_S = 60.0


def measure_after_load(experiment: Experiment) -> Iterator[Finding]:
    """The p50 of one client after a start, and after `experiment.load_s` seconds of load, against the engine with all
    cores in process. Raises ServerFailure and RuntimeError."""
    texts = texts_of(read_card(experiment.model), _NUM_TEXTS, _NUM_TOKENS)
    with experiment.serving(*experiment.flags) as ours, InProcess(OURS, experiment.model) as engine:
        engine.choose(_NUM_TOKENS)
        sessions = (ours.session, engine.session)
        for moment, load_s in (("a start", 0.0), (f"{experiment.load_s / 60:g} min of load", experiment.load_s)):
            if load_s:
                _load(ours, load_s)
            turns = Turns(sessions)
            contenders = {
                "vecd": functools.partial(turns.of_server, ours, texts, experiment.turn_s, REST_S),
                "engine": functools.partial(turns.of_peer, engine, _NUM_TOKENS, experiment.turn_s),
            }
            turns.of_server(ours, texts, LEARNING_S, REST_S)
            neighbours, before = Neighbours(sessions), metrics(ours)
            passes = alternate(contenders, experiment.num_rounds)
            p50 = {name: [1000 * statistics.median(of_one) for of_one in of_all] for name, of_all in passes.items()}
            allowed = [ENGINE_FACTOR * of_round + ENGINE_MARGIN_MS for of_round in p50["engine"]]
            facts = {
                "others_cores": neighbours.cores(),
                "leased_percent": (share := leased_percent(before, metrics(ours))),
                "engine_ms": [rounded(of_round) for of_round in p50["engine"]],
                "learned": info(ours)["cores"]["learned"],
            }
            work = f"after {moment}: 1 client over HTTP, a text of {_NUM_TOKENS} tokens, p50"
            if share is not None:
                work += f" ({share:.0f} % of its batches with more than one thread)"
            title = (
                f"{ENGINE_FACTOR:g} × the engine with {num_cores()} threads in process "
                f"({statistics.median(p50['engine']):.2f} ms) + {ENGINE_MARGIN_MS:g} ms"
            )
            yield compare("after-load", work, p50["vecd"], title, allowed, AFTER_LOAD, facts)


def _load(server: Server, duration_s: float) -> None:
    """Raises ServerFailure for any error."""
    [result] = uvloop.run(bench.run_loads([mixed_load(server, duration_s)], lambda _: None))
    if result.ended_early == bench.INTERRUPTED:
        raise KeyboardInterrupt
    if result.errors or result.ended_early:
        raise ServerFailure(f"the load: {result.ended_early or dict(result.errors)}")


def mixed_load(server: Server, duration_s: float) -> Load:
    """Short texts at random moments, beside clients with texts of mixed lengths."""
    target = parse_target(server.url)
    short, mixed = RequestShape(lengths=SHORT), RequestShape(lengths=MIXED)
    load = Load(
        target=target,
        shape=short,
        requests=render_requests(target, short),
        clients=0,
        rate_per_s=_SHORT_PER_S * num_cores(),
        max_connections=1024,
        warmup_s=0.0,
        duration_s=duration_s,
        timeout_s=_TIMEOUT_S,
    )
    requests = render_requests(target, mixed, _NUM_MIXED_REQUESTS)
    clients = _MIXED_CLIENTS * num_cores()
    return replace(load, bulk=replace(load, shape=mixed, requests=requests, clients=clients, rate_per_s=None))
