"""How vecd forms its batches while it is under load, from two looks at its `/info`.

Owns the moments of the looks. Called by `benchmarks.compare`.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType

from benchmarks.requests import batches_of_workers
from benchmarks.servers import Server, ServerFailure

_MARGIN = 0.1
"""Of the measured time that is left out at both of its ends."""


class BatchRate:
    """Around a run: `with BatchRate(…) as rate: run; rate.per_s`. Side effect: a thread that sleeps meanwhile."""

    def __init__(self, server: Server, warmup_s: float, duration_s: float) -> None:
        self._count: Callable[[], int] = lambda: sum(batches_of_workers(server))
        self._waits_s = (warmup_s + _MARGIN * duration_s, (1 - 2 * _MARGIN) * duration_s)
        self._ended = threading.Event()
        self._looks: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "BatchRate":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def per_s(self) -> float | None:
        """Batches a second of all workers; None when a look is missing or a worker has died in between."""
        if len(self._looks) < 2:
            return None
        (then, before), (now, after) = self._looks
        return (after - before) / (now - then) if after > before else None

    def _look(self) -> None:
        for wait_s in self._waits_s:
            if self._ended.wait(wait_s):
                return
            try:
                self._looks.append((time.perf_counter(), self._count()))
            except ServerFailure:
                return
