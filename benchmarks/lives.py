"""How long nobody is answered: after the only worker's death, and after the server's start.

Owns the two experiments and what is counted of them: seconds until a request that is sent at once has its answer.
Called by `benchmarks.engine`, in a process that may use every core, as the servers it starts may.
"""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu import Neighbours
from benchmarks.findings import Finding, rounded
from benchmarks.requests import embed, worker_pid
from benchmarks.servers import Server, ServerFailure, announcing, clean_environment
from benchmarks.targets import DEATH_S, START_RATIO
from benchmarks.turns import paired_ratio

_TEXTS = ("The vector daemon answers this.",)
_LIFE_S = 2.0
"""Between two deaths. A worker that dies within 1 s of being ready is restarted late, and later each time
(`supervisor.Restarts`)."""
_DTYPE = "float32"


def measure_deaths(num_kills: int, folder: Path) -> Finding:
    """From kill -9 of the only worker until its replacement has answered. Raises ServerFailure."""
    neighbours = Neighbours()
    with announcing("--workers", "1", "--dtype", _DTYPE, "--cache-dir", str(folder)) as server:
        embed(server, _TEXTS)
        seconds = [_die(server) for _ in range(num_kills)]
    return Finding(
        work=f"kill -9 of the only worker → next answer (worst {max(seconds):.2f} s)",
        dtype=_DTYPE,
        unit="s",
        ours=statistics.median(seconds),
        target=DEATH_S,
        others_cores=neighbours.cores(),
        details={"rounds": {"vecd": [rounded(of_one) for of_one in seconds]}, "worst_s": rounded(max(seconds))},
    )


def _die(server: Server) -> float:
    time.sleep(_LIFE_S)
    victim = worker_pid(server, 0)
    started = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    embed(server, _TEXTS)
    seconds = time.perf_counter() - started
    if worker_pid(server, 0) == victim:
        raise ServerFailure("vecd's worker outlived a kill -9")
    return seconds


def measure_starts(num_rounds: int, folder: Path) -> Finding:
    """From exec to the first answer, in turns with `import torch`. `folder` becomes the cache. Raises ServerFailure."""
    neighbours = Neighbours()
    flags = ("--dtype", _DTYPE, "--cache-dir", str(folder))
    first, _ = _start(flags)  # fills the cache, and the kernel's: not one of the rounds
    _import_torch()
    starts: list[tuple[float, float]] = []
    imports: list[float] = []
    for _ in range(num_rounds):
        imports.append(_import_torch())
        starts.append(_start(flags))
    answers = [answered for answered, _ in starts]
    details: dict[str, Any] = {
        "rounds": {"vecd": [rounded(of_one) for of_one in answers], "peer": [rounded(of_one) for of_one in imports]},
        "ready_s": [rounded(ready) for _, ready in starts],
        "first_start_s": rounded(first),
    }
    return Finding(
        work="exec → first answer, second start",
        dtype=_DTYPE,
        unit="s",
        ours=statistics.median(answers),
        peer='python -c "import torch"',
        theirs=statistics.median(imports),
        ratio=paired_ratio(answers, imports),
        target=START_RATIO,
        others_cores=neighbours.cores(),
        details=details,
    )


def _start(flags: Sequence[str]) -> tuple[float, float]:
    """Seconds until the first answer, and of these until it said that it was ready."""
    started = time.perf_counter()
    with announcing(*flags) as server:
        ready = time.perf_counter()
        embed(server, _TEXTS)
        return time.perf_counter() - started, ready - started


def _import_torch() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=clean_environment())
    return time.perf_counter() - started
