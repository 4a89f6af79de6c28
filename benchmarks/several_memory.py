"""What several models in one server cost in memory, what one more costs, and what one gives back.

Owns the turns, in each of which a server is started anew. Called by `benchmarks.models`.
"""

import os
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from safetensors.numpy import load_file

from benchmarks.alone import compare
from benchmarks.cpu import Neighbours
from benchmarks.findings import Finding
from benchmarks.requests import Exchange, command, private_mb, session_mb, worker_pids
from benchmarks.servers import Server, ServerFailure, bundled_model
from benchmarks.several import ModelTable, serving_all, write_config
from benchmarks.several_experiment import REST_S, SeveralExperiment, figure
from benchmarks.targets import (
    AS_BEFORE,
    GIVEN_BACK_PERCENT,
    SEVERAL_MB_FACTOR,
    SEVERAL_MB_MARGIN,
    at_most,
)
from benchmarks.turns import alternate
from vecd.base.target import parse_target

_POLL_S = 0.01
_GONE_WITHIN_S = 60.0


def measure_memory_of_several(bench: SeveralExperiment) -> Iterator[Finding]:
    """Three models of one size at rest; then what one gives back, and what one more costs beside a server of its
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
            time.sleep(REST_S)
            totals.append(session_mb(server))
            workers.append(sum(private_mb(pid) for table in tables for pid in worker_pids(server, table.name)))
        limits.append(SEVERAL_MB_FACTOR * len(tables) * weights_mb + SEVERAL_MB_MARGIN + workers[-1])
    yield figure(
        "memory",
        f"three models of {weights_mb:.0f} MB of weights in one server, at rest (PSS); of it "
        f"{statistics.median(workers):.0f} MB are private to workers",
        "MB",
        statistics.median(totals),
        at_most(round(statistics.median(limits), 1)),
        neighbours.cores(),
        rounds={"vecd": totals, "workers": workers},
    )
    yield from _one_more_model(bench, tables)
    yield _unloaded(bench, tables)


def _one_more_model(bench: SeveralExperiment, tables: Sequence[ModelTable]) -> Iterator[Finding]:
    """A further model that a reload adds to two others, beside a server of its own, in turns."""
    folder, folder_alone = bench.scratch("added"), bench.scratch("alone")
    *others, added = tables

    def one_more() -> tuple[float, float]:
        with serving_all(others, folder, *bench.flags) as server:
            for table in others:
                _ask_once(server, table)
            time.sleep(REST_S)
            before_mb = session_mb(server)
            write_config(folder / "vecd.toml", tables)
            began_at_s = time.perf_counter()
            os.kill(server.session, signal.SIGHUP)
            while not _has_answered(server, added):
                if time.perf_counter() - began_at_s > _GONE_WITHIN_S:
                    raise ServerFailure(f"{added.name} is not served after {_GONE_WITHIN_S:g} s")
                time.sleep(_POLL_S)
            load_s = time.perf_counter() - began_at_s
            time.sleep(REST_S)
            return load_s, session_mb(server) - before_mb

    def alone() -> tuple[float, float]:
        began_at_s = time.perf_counter()
        with serving_all([added], folder_alone, *bench.flags) as server:
            _ask_once(server, added)
            load_s = time.perf_counter() - began_at_s
            time.sleep(REST_S)
            return load_s, session_mb(server)

    turns = {"one more": one_more, "alone": alone}
    for turn in turns.values():
        turn()  # not counted: the first start compares engines
    neighbours = Neighbours()
    found = alternate(turns, bench.num_rounds)
    facts = {"others_cores": neighbours.cores()}
    for index, (what, unit) in enumerate((("SIGHUP → first answer", "s"), ("memory (PSS) on top", "MB"))):
        ours, theirs = ([one[index] for one in found[name]] for name in turns)
        work = f"a third model of one size, added by a reload: {what}"
        yield compare("models-memory", work, ours, "a server of its own", theirs, AS_BEFORE, facts, unit=unit)


def _has_answered(server: Server, table: ModelTable) -> bool:
    """Asks by the model's name in the path, which another model never answers."""
    with closing(Exchange(parse_target(server.url))) as exchange:
        request = table.render(parse_target(server.url), ["a short text"])
        path = f"/m/{table.name}/v1/embeddings".encode()
        return exchange.response(request.replace(b"/v1/embeddings", path, 1)).startswith(b"HTTP/1.1 200")


def _ask_once(server: Server, table: ModelTable) -> None:
    with closing(Exchange(parse_target(server.url))) as exchange:
        exchange(table.render(parse_target(server.url), ["a short text"]))


def _unloaded(bench: SeveralExperiment, tables: Sequence[ModelTable]) -> Finding:
    """What of a third model's memory its unloading gives back."""
    demanded = [replace(table, settings={"load": "demand"}) for table in tables]
    neighbours = Neighbours()
    percents, load_s, model_mb = [], [], []
    for _ in range(bench.num_rounds):
        with serving_all(demanded, bench.scratch("unloaded"), *bench.flags) as server:
            for table in demanded[:2]:
                _ask_once(server, table)
            time.sleep(REST_S)
            without_mb = session_mb(server)
            began_at_s = time.perf_counter()
            _ask_once(server, demanded[2])
            load_s.append(time.perf_counter() - began_at_s)
            time.sleep(REST_S)
            with_mb = session_mb(server)
            pids = worker_pids(server, demanded[2].name)
            command(server, demanded[2].name, "unload")
            deadline_s = time.perf_counter() + _GONE_WITHIN_S
            while any(Path(f"/proc/{pid}").exists() for pid in pids):
                if time.perf_counter() > deadline_s:
                    raise ServerFailure(f"{demanded[2].name} has workers {_GONE_WITHIN_S:g} s after its unloading")
                time.sleep(_POLL_S)
            time.sleep(REST_S)
            model_mb.append(with_mb - without_mb)
            percents.append(100 * (with_mb - session_mb(server)) / model_mb[-1])
    return figure(
        "memory",
        f"unloading one of three models gives back, of the {statistics.median(model_mb):.0f} MB that its loading took "
        f"(first answer after {statistics.median(load_s):.2f} s)",
        "%",
        statistics.median(percents),
        GIVEN_BACK_PERCENT,
        neighbours.cores(),
        rounds={"percent": percents, "model_mb": model_mb, "load_s": load_s},
    )
