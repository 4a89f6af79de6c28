"""A few threads for what would hold up the event loop, shared a turn at a time.

Owns the threads, and the rule by which works of different requests interleave: first come, first served, a turn each.
Knows nothing of what is done in them. Called by `gateway.bodies` and `gateway.tokenizer`.

A thread that computes in Python holds the GIL, and a loop that wants it back waits a whole switch interval (5 ms) at
each wake-up. So long work comes in pieces of at most about 1 ms, and the GIL is let go after each. Measured with two
threads that parse JSON without pause, 2 cores: the loop wakes up late by 15 ms (median) and 51 ms (p99) without letting
go, by 0.4 and 5 ms with it.
"""

import asyncio
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar, cast

T = TypeVar("T")

_TURN_S = 0.005
"""One work's turn. Short beside what a request takes, long beside handing it over (0.1 ms)."""


class Threads:
    """Use from one event loop. What is cancelled ends with the turn it is in."""

    def __init__(self, num_threads: int = 2) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="gateway-work")

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function in a thread: one turn, however long it takes."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    async def run(self, steps: Generator[None, None, T]) -> T:
        """Run a generator that yields between pieces of work, and return what it returns."""
        take_turn = partial(_take_turn, steps)
        while (result := await self.call(take_turn)) is None:
            pass
        return result[0]

    def close(self) -> None:
        """Wait for the turns being taken, and end the threads."""
        self._executor.shutdown(cancel_futures=True)


def _take_turn(steps: Generator[None, None, T]) -> tuple[T] | None:
    """Run pieces for a turn; the result in a tuple, once there is one."""
    end = time.perf_counter() + _TURN_S
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return (cast(T, stop.value),)
        if time.perf_counter() >= end:
            return None
        time.sleep(0)  # lets go of the GIL
