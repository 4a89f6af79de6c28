"""What a server costs in memory at rest, and what one more worker does after it has worked.

Owns the load that workers are given before they are looked at, and which one is: the last, which is the one more.
Called by `benchmarks.engine`.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.cpu import Neighbours
from benchmarks.findings import Finding
from benchmarks.requests import batches_of_workers, embed, private_mb, session_mb, worker_pid
from benchmarks.servers import Server, ServerFailure, announcing, bundled_model
from benchmarks.standin import StandIn
from benchmarks.targets import CONTESTS, MEMORY_MB, WORKER_MB
from benchmarks.workload import MIXED_WORDS, is_large
from vecd.client.bench.texts import draw_texts
from vecd.model.card import read_card

_NUM_WORKERS = 2
_NUM_TEXTS = 1024
_TEXTS_PER_REQUEST = 32
_NUM_LARGE_TEXTS, _LARGE_TEXTS_PER_REQUEST = 64, 4
"""Of a model of which a worker does hundreds of tokens a second."""
_CLIENTS = 2 * _NUM_WORKERS
"""So many requests at a time that every worker always has a batch."""
_MIN_BATCHES = 8
_REST_S = 2.0
"""A worker gives memory back after a second without a batch."""


def measure_memory(model: Path, export: Path | None, dtypes: Sequence[str], folder: Path) -> Iterator[Finding]:
    """Yields three findings for each format. `folder` is for the servers' cache.

    `export`: what ONNX Runtime is looked at with; None for vecd alone. Raises ServerFailure.
    """
    is_small, is_bundled = not is_large(read_card(model)), str(model) == bundled_model()
    for dtype in dtypes:
        neighbours = Neighbours()
        of_workers = ("--workers", str(_NUM_WORKERS), "--threads-per-worker", "1")
        flags = (*of_workers, "--dtype", dtype, "--cache-dir", str(folder))
        with announcing(*flags, model=str(model)):
            pass  # a first start compares engines, which needs torch: what is asked is what the next ones cost
        with announcing(*flags, model=str(model)) as server:
            yield from _at_rest(server, export, dtype, is_asked=is_bundled and dtype == "float32")
            _occupy(server, is_small)
            batches = batches_of_workers(server)
            under_load = _private(server)
            time.sleep(_REST_S)
            private = _private(server)
        if min(batches) < (_MIN_BATCHES if is_small else 1):
            raise ServerFailure(f"a worker has hardly worked: {batches} batches")
        yield Finding(
            section="memory",
            work=f"private memory of worker {_NUM_WORKERS - 1} of {_NUM_WORKERS} after {batches[-1]} batches and "
            f"{_REST_S:g} s of rest (just after the last batch {under_load[-1]:.0f} MB)",
            dtype=dtype,
            unit="MB",
            ours=private[-1],
            target=CONTESTS[dtype].memory_mb if is_bundled else None,
            others_cores=neighbours.cores(),
            details={
                "private_mb": [round(mb, 1) for mb in private],
                "under_load_mb": [round(mb, 1) for mb in under_load],
                "batches": batches,
            },
        )


def _at_rest(server: Server, export: Path | None, dtype: str, *, is_asked: bool) -> Iterator[Finding]:
    """All processes of the server, pages that they share counted once, and one process of ONNX Runtime; then what is
    the last worker's alone."""
    neighbours = Neighbours()
    embed(server, ["a short text"])
    time.sleep(_REST_S)
    ours, private, theirs = session_mb(server), _private(server), None
    if export is not None:
        with StandIn(export) as stand_in:
            theirs = stand_in.memory_mb()
    others_cores = neighbours.cores()
    yield Finding(
        section="memory",
        work=f"memory in all at rest (PSS), second start, {_NUM_WORKERS} workers of one thread",
        dtype=dtype,
        unit="MB",
        ours=ours,
        peer="" if theirs is None else "onnxruntime float32, one session in a process",
        theirs=theirs,
        target=MEMORY_MB if is_asked else None,
        others_cores=others_cores,
    )
    yield Finding(
        section="memory",
        work=f"private memory of worker {_NUM_WORKERS - 1} of {_NUM_WORKERS} at rest, second start",
        dtype=dtype,
        unit="MB",
        ours=private[-1],
        target=WORKER_MB if is_asked else None,
        others_cores=others_cores,
        details={"private_mb": [round(mb, 1) for mb in private]},
    )


def _private(server: Server) -> list[float]:
    return [private_mb(worker_pid(server, worker)) for worker in range(_NUM_WORKERS)]


def _occupy(server: Server, is_small: bool) -> None:
    num_texts, size = (_NUM_TEXTS, _TEXTS_PER_REQUEST) if is_small else (_NUM_LARGE_TEXTS, _LARGE_TEXTS_PER_REQUEST)
    texts = draw_texts(num_texts, MIXED_WORDS, seed=0)
    requests = [texts[start : start + size] for start in range(0, num_texts, size)]
    with ThreadPoolExecutor(_CLIENTS) as pool:
        list(pool.map(lambda request: embed(server, request), requests))
