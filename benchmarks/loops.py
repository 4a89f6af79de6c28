"""Busy loops in processes of their own: another program that takes a core, and whether all cores are free.

Owns those processes. A loop multiplies matrices with one thread, which is what a core is wanted for: two threads of one
core (SMT) are slower at it together than each alone. Run as `python -m benchmarks.loops`; started by
`benchmarks.alone`.
"""

import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.cpu import Neighbours
from benchmarks.findings import Finding, rounded
from benchmarks.machine import num_cores
from benchmarks.servers import clean_environment
from benchmarks.targets import CALIBRATION
from benchmarks.turns import median_interval

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_SIZE = 192
"""Three matrices of 144 KiB: in the cache of a core."""
_CALIBRATION_S = 0.25


class BusyLoop:
    """A running process, usable as a context manager, at whose end the process is gone. It waits until it is told."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.loops"],
            cwd=Path(__file__).parents[1],
            env=clean_environment() | _ONE_THREAD,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.passes_per_s()

    def __enter__(self) -> "BusyLoop":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def session(self) -> int:
        return self._process.pid

    def start(self, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def passes_per_s(self) -> float:
        """What the loop that was started last has done; of the process itself, whether it is there. Raises
        RuntimeError when it has ended."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"a busy loop has ended with {self._process.wait()}")
        return float(line)


def calibrate(num_rounds: int) -> Finding:
    """Whether every core is free: the slowest of one loop per core, all at once, ÷ the same loop alone."""
    neighbours = Neighbours()
    with ExitStack() as stack:
        loops = [stack.enter_context(BusyLoop()) for _ in range(num_cores())]
        alone, together = [], []
        for _ in range(num_rounds):
            loops[0].start(_CALIBRATION_S)
            alone.append(loops[0].passes_per_s())
            for loop in loops:
                loop.start(_CALIBRATION_S)
            together.append(min([loop.passes_per_s() for loop in loops]))
    ratios = [slowest / single for slowest, single in zip(together, alone, strict=True)]
    return Finding(
        section="single",
        work=f"calibration: {num_cores()} busy loops at once, the slowest",
        dtype="float32",
        unit="products/s",
        ours=statistics.median(together),
        peer="one alone",
        theirs=statistics.median(alone),
        ratio=statistics.median(ratios),
        interval=median_interval(ratios),
        target=CALIBRATION,
        others_cores=neighbours.cores(),
        details={"rounds": {"vecd": [rounded(rate) for rate in together], "peer": [rounded(rate) for rate in alone]}},
    )


def main() -> None:
    """Loop for the seconds of each line of stdin, and write the passes per second, until it ends."""
    import numpy as np

    matrix = np.ones((_SIZE, _SIZE), np.float32)
    product = np.empty_like(matrix)
    parent = os.getppid()
    print(0.0, flush=True)
    for line in sys.stdin:
        num_passes, started = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - started) < float(line):
            np.matmul(matrix, matrix, out=product)
            num_passes += 1
            if os.getppid() != parent:  # an endless loop must not outlive the benchmark
                return
        print(num_passes / elapsed_s, flush=True)


if __name__ == "__main__":
    main()
