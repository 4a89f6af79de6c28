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
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.cpu import Neighbours
from benchmarks.findings import Finding, rounded
from benchmarks.requests import embed, worker_pid
from benchmarks.servers import Server, ServerFailure, announcing, bundled_model, clean_environment
from benchmarks.standin import StandIn
from benchmarks.targets import DEATH_S, FIRST_START_S, SECOND_START_S
from benchmarks.turns import median_interval, paired_ratios

_TEXTS = ("The vector daemon answers this.",)
_LIFE_S = 2.0
"""Between two deaths. A worker that dies within 1 s of being ready is restarted late, and later each time
(`supervisor.Restarts`)."""
_DTYPE = "float32"


def measure_deaths(model: Path, num_kills: int, folder: Path) -> Finding:
    """From kill -9 of the only worker until its replacement has answered. Raises ServerFailure."""
    neighbours = Neighbours()
    with announcing("--workers", "1", "--dtype", _DTYPE, "--cache-dir", str(folder), model=str(model)) as server:
        embed(server, _TEXTS)
        seconds = [_die(server) for _ in range(num_kills)]
    return Finding(
        section="deaths",
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


def measure_starts(model: Path, export: Path | None, num_rounds: int, folder: Path) -> Iterator[Finding]:
    """From exec to the first answer: of vecd, of `import onnxruntime`, and of ONNX Runtime with the model, in turns.

    `export`: what ONNX Runtime starts with; None for the import alone. `folder` becomes the cache, empty at first.
    Raises ServerFailure.
    """
    neighbours = Neighbours()
    flags = ("--dtype", _DTYPE, "--cache-dir", str(folder))
    first, _ = _start(flags, model)
    yield Finding(
        section="starts",
        work="first start: exec → first answer",
        dtype=_DTYPE,
        unit="s",
        ours=first,
        target=FIRST_START_S if str(model) == bundled_model() else None,
        others_cores=neighbours.cores(),
    )
    _import_onnxruntime()  # fills the kernel's cache: not one of the rounds
    neighbours = Neighbours()
    starts, imports, sessions = [], [], []
    for _ in range(num_rounds):
        imports.append(_import_onnxruntime())
        starts.append(_start(flags, model))
        if export is not None:
            with StandIn(export) as stand_in:
                sessions.append(stand_in.start_s)
    others_cores = neighbours.cores()
    answers = [answered for answered, _ in starts]
    beyond = [answered - imported for answered, imported in zip(answers, imports, strict=True)]
    details = {"ready_s": [rounded(ready) for _, ready in starts]}
    if sessions:
        ratios = paired_ratios(sessions, answers)
        yield Finding(
            section="starts",
            work="second start: exec → first answer",
            dtype=_DTYPE,
            unit="s",
            ours=statistics.median(answers),
            peer="onnxruntime float32, a session and its first vector",
            theirs=statistics.median(sessions),
            ratio=statistics.median(ratios),
            interval=median_interval(ratios),
            others_cores=others_cores,
            details=details | _rounds(answers, sessions),
        )
    yield Finding(
        section="starts",
        work="second start, less `import onnxruntime`",
        dtype=_DTYPE,
        unit="s",
        ours=statistics.median(beyond),
        peer="`import onnxruntime` itself:",
        theirs=statistics.median(imports),
        target=SECOND_START_S,
        others_cores=others_cores,
        details=details | _rounds(answers, imports),
    )


def _rounds(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, dict[str, list[float]]]:
    return {"rounds": {"vecd": [rounded(of_one) for of_one in ours], "peer": [rounded(of_one) for of_one in theirs]}}


def _start(flags: Sequence[str], model: Path) -> tuple[float, float]:
    """Seconds until the first answer, and of these until it said that it was ready."""
    started = time.perf_counter()
    with announcing(*flags, model=str(model)) as server:
        ready = time.perf_counter()
        embed(server, _TEXTS)
        return time.perf_counter() - started, ready - started


def _import_onnxruntime() -> float:
    environment = clean_environment() | {"ORT_DISABLE_TELEMETRY": "1"}
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import onnxruntime"], check=True, env=environment)
    return time.perf_counter() - started
