"""What one more worker costs in memory, after it has worked.

Owns the load that workers are given before they are looked at, and which one is: the last, which is the one more.
Called by `benchmarks.engine`.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.cpu import Neighbours
from benchmarks.findings import Finding
from benchmarks.requests import batches_of_workers, embed, private_mb, worker_pid
from benchmarks.servers import Server, ServerFailure, announcing
from benchmarks.targets import CONTESTS
from benchmarks.workload import MIXED_WORDS
from vecd.client.bench.texts import draw_texts

_NUM_WORKERS = 2
_NUM_TEXTS = 1024
_TEXTS_PER_REQUEST = 32
_CLIENTS = 2 * _NUM_WORKERS
"""So many requests at a time that every worker always has a batch."""
_MIN_BATCHES = 8
_REST_S = 2.0
"""A worker gives memory back after a second without a batch."""


def measure_memory(dtypes: Sequence[str], folder: Path) -> Iterator[Finding]:
    """Yields a finding for each format. `folder` is for the servers' cache. Raises ServerFailure."""
    for dtype in dtypes:
        neighbours = Neighbours()
        flags = ("--workers", str(_NUM_WORKERS), "--dtype", dtype, "--cache-dir", str(folder))
        with announcing(*flags) as server:
            _occupy(server)
            batches = batches_of_workers(server)
            under_load = _private(server)
            time.sleep(_REST_S)
            private = _private(server)
        if min(batches) < _MIN_BATCHES:
            raise ServerFailure(f"a worker has hardly worked: {batches} batches")
        yield Finding(
            work=f"private memory of worker {_NUM_WORKERS - 1} of {_NUM_WORKERS} after {batches[-1]} batches and "
            f"{_REST_S:g} s of rest (just after the last batch {under_load[-1]:.0f} MB)",
            dtype=dtype,
            unit="MB",
            ours=private[-1],
            target=CONTESTS[dtype].memory_mb,
            others_cores=neighbours.cores(),
            details={
                "private_mb": [round(mb, 1) for mb in private],
                "under_load_mb": [round(mb, 1) for mb in under_load],
                "batches": batches,
            },
        )


def _private(server: Server) -> list[float]:
    return [private_mb(worker_pid(server, worker)) for worker in range(_NUM_WORKERS)]


def _occupy(server: Server) -> None:
    texts = draw_texts(_NUM_TEXTS, MIXED_WORDS, seed=0)
    requests = [texts[start : start + _TEXTS_PER_REQUEST] for start in range(0, _NUM_TEXTS, _TEXTS_PER_REQUEST)]
    with ThreadPoolExecutor(_CLIENTS) as pool:
        list(pool.map(lambda request: embed(server, request), requests))
