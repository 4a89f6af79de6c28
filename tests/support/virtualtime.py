"""An event loop in which waiting takes no time: for tests of timers and deadlines.

When nothing is ready to run, its clock jumps to the next timer. It starts at 0.0 s.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    _now = 0.0
    _ready: Any
    _scheduled: Any

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready:
            due = (timer.when() for timer in self._scheduled if not timer.cancelled())
            self._now = max(self._now, min(due, default=self._now))
        super()._run_once()  # type: ignore[misc]


def run_in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(test())
