"""64 clients over HTTP with texts of equal lengths, against ONNX Runtime in process, used as TEI does.

Owns the load and the turns. With equal lengths packing saves nothing, and a server of padded batches is at its best.
Called by `benchmarks.engine`, in a process that may use every core.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks.cpu import Neighbours
from benchmarks.findings import Finding, rounded
from benchmarks.servers import Server, ServerFailure, announcing
from benchmarks.standin import BATCH_SIZE, StandIn
from benchmarks.targets import CLIENTS_RATIO
from benchmarks.turns import median_interval, paired_ratios
from benchmarks.workload import texts_of
from vecd.base.target import parse_target
from vecd.client.bench import command as bench
from vecd.client.bench.load import Load, RequestShape, render_requests
from vecd.model.card import read_card

_CLIENTS = 64
_NUM_TEXTS = 8 * _CLIENTS
"""More than there are clients: identical texts in progress at the same time would be computed once."""
_TOKENS = 59
_TIMES_SERVED = 3
"""Each client, at least, in a turn: whole batches end together, and a turn must not be of one or two of them."""
_DTYPE = "float32"
_TIMEOUT_S = 120.0
_LOOK_S = 1.0
"""At each export, to find the fastest."""


def measure_clients(model: Path, exports: Sequence[Path], num_rounds: int, duration_s: float, folder: Path) -> Finding:
    """`exports`: the model's ONNX files, of which the fastest is measured. `duration_s`: of a turn, at least.

    `folder` is for the server's cache. Raises ServerFailure and RuntimeError.
    """
    export = max(exports, key=_look)
    texts = texts_of(read_card(model), _NUM_TEXTS, _TOKENS)
    ours, theirs = [], []
    with announcing("--dtype", _DTYPE, "--cache-dir", str(folder), model=str(model)) as server, StandIn(export) as peer:
        duration_s = _long_enough(server, texts, duration_s)
        neighbours = Neighbours()
        for number in range(num_rounds):
            # The process that has no turn waits on a pipe, and uses nothing.
            if number % 2:
                theirs.append(peer.texts_per_s(_TOKENS, duration_s))
            ours.append(_serve(server, texts, duration_s))
            if not number % 2:
                theirs.append(peer.texts_per_s(_TOKENS, duration_s))
        others_cores = neighbours.cores()
    ratios = paired_ratios(ours, theirs)
    return Finding(
        section="clients",
        work=f"{_CLIENTS} clients over HTTP, a text of {_TOKENS} tokens each",
        dtype=_DTYPE,
        unit="texts/s",
        ours=statistics.median(ours),
        peer=f"onnxruntime {_DTYPE} in process, batches of {BATCH_SIZE}, all cores",
        theirs=statistics.median(theirs),
        ratio=statistics.median(ratios),
        interval=median_interval(ratios),
        target=CLIENTS_RATIO,
        others_cores=others_cores,
        details={
            "rounds": {"vecd": [rounded(rate) for rate in ours], "peer": [rounded(rate) for rate in theirs]},
            "variant": export.stem,
        },
    )


def _look(export: Path) -> float:
    with StandIn(export) as peer:
        return peer.texts_per_s(_TOKENS, _LOOK_S)


def _long_enough(server: Server, texts: Sequence[str], duration_s: float) -> float:
    """`duration_s`, or what it takes to serve all clients several times. Side effect: the server has learned how fast
    it is. Raises ServerFailure."""
    while not (rate := _serve(server, texts, duration_s)):
        duration_s *= 2
    return max(duration_s, _TIMES_SERVED * _CLIENTS / rate)


def _serve(server: Server, texts: Sequence[str], duration_s: float) -> float:
    """Texts per second, after a second that is not counted. Raises ServerFailure for any error."""
    target = parse_target(server.url)
    shape = RequestShape(texts=texts)
    load = Load(
        target=target,
        shape=shape,
        requests=render_requests(target, shape),
        clients=_CLIENTS,
        warmup_s=1.0,
        duration_s=duration_s,
        timeout_s=_TIMEOUT_S,
    )
    [result] = uvloop.run(bench.run_loads([load], lambda _: None))
    if result.ended_early == bench.INTERRUPTED:
        raise KeyboardInterrupt
    if result.errors or result.ended_early:
        raise ServerFailure(f"{_CLIENTS} clients: {result.ended_early or dict(result.errors)}")
    return result.per_s(result.num_texts)
