"""The number of requests under way.

Owns the number, which follows the server: it gets about a second of work, however fast it is. Pure but for the clock.
Called by `vecd.client.bulk.service`.

More would not help: a server that has a second of work never waits for this program, and longer queues hold memory, and
are lost when one of the two dies.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

FEWEST, MOST = 2, 32
_START = 4
_TOO_SHORT_S, _TOO_LONG_S = 1.0, 4.0


class ConcurrencyLimit:
    """Limits concurrent requests: each holds a `permit`."""

    def __init__(self) -> None:
        self.limit = _START
        self.is_fixed = False
        """Whether the limit stays as it is."""
        self.num_running = 0
        self._next = asyncio.Condition()

    def fix(self, limit: int) -> None:
        self.limit = limit
        self.is_fixed = True

    @asynccontextmanager
    async def permit(self) -> AsyncIterator[None]:
        """Wait until a request may start, and learn from the time that it takes."""
        async with self._next:
            await self._next.wait_for(lambda: self.num_running < self.limit)
            self.num_running += 1
        began_at, was_full = time.monotonic(), self.num_running >= self.limit
        try:
            yield
            self.learn(time.monotonic() - began_at, was_full=was_full)
        finally:
            self.num_running -= 1
            async with self._next:
                self._next.notify_all()

    def learn(self, took_s: float, *, was_full: bool) -> None:
        """Adapt to a request that took `took_s`; `was_full`: at its start the limit was reached."""
        if self.is_fixed:
            return
        if took_s < _TOO_SHORT_S and was_full:
            self.limit = min(self.limit + 1, MOST)
        elif took_s > _TOO_LONG_S:
            self.limit = max(self.limit - 1, FEWEST)
