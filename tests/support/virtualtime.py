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
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


def run_in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(test())
