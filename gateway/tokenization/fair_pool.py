"""A few threads for what would hold up the event loop, shared a turn at a time.

Owns the threads, and the rule by which works of different requests interleave: tenants take turns, and the works of one
tenant are first come, first served, a turn each. Knows nothing of what is done in them. Called by
`vecd.gateway.api.bodies` and `vecd.gateway.tokenization.tokenizer`.

What waits is bounded by its callers, since a request waits for one turn at a time: those that are tokenized by
`vecd.gateway.admission.admission`, bodies that are parsed by `vecd.gateway.api.bodies`.

A thread that computes in Python holds the GIL, and a loop that wants it back waits a whole switch interval (5 ms) at
each wake-up. So long work comes in pieces of at most about 1 ms, and the GIL is let go after each. Measured with two
threads that parse JSON without pause, 2 cores: the loop wakes up late by 15 ms (median) and 51 ms (p99) without letting
go, by 0.4 and 5 ms with it.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

T = TypeVar("T")

_TURN_S = 0.005
"""One work's turn. Short beside what a request takes, long beside handing it over (0.1 ms)."""


class Threads:
    """Use from one event loop. What is cancelled ends with the turn it is in."""

    def __init__(self, num_threads: int = 2) -> None:
        self.num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="gateway-work")
        self._waiting = _Turns()

    async def call(self, function: Callable[[], T], tenant: str = "") -> T:
        """Call a function in a thread: one turn, however long it takes. `tenant` is whose it is; any string."""
        # In no variable: what is raised would hold this frame, and by it itself, until the collector comes.
        return await asyncio.wrap_future(self._submit(function, tenant))

    async def run(self, steps: Generator[None, None, T], tenant: str = "") -> T:
        """Run a generator that yields between pieces of work, and return what it returns."""
        take_turn = partial(_take_turn, steps)
        while (result := await self.call(take_turn, tenant)) is None:
            pass
        return result[0]

    def close(self) -> None:
        """Wait for the turns being taken, and end the threads. Who waits for a turn is cancelled."""
        self._executor.shutdown(cancel_futures=True)
        while (turn := self._waiting.take()) is not None:
            turn[0].cancel()

    def _submit(self, function: Callable[[], T], tenant: str) -> Future[T]:
        future: Future[T] = Future()
        self._waiting.add(tenant, (future, function))
        # For each turn that waits once, but not for this very one: whose it is shows when a thread is free.
        self._executor.submit(self._take_next)
        return future

    def _take_next(self) -> None:
        _call(self._waiting.take())


_Turn: TypeAlias = tuple[Future[Any], Callable[[], Any]]


class _Turns:
    """What waits for a thread. Added to by the loop, taken from by the threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_tenant: dict[str, deque[_Turn]] = {}
        """The tenant whose turn it is comes first. None is empty."""

    def add(self, tenant: str, turn: _Turn) -> None:
        with self._lock:
            self._by_tenant.setdefault(tenant, deque()).append(turn)

    def take(self) -> _Turn | None:
        """The next turn, of which the tenant's next one comes after all other tenants'; None when nothing waits."""
        with self._lock:
            tenant = next(iter(self._by_tenant), None)
            if tenant is None:
                return None
            turns = self._by_tenant.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._by_tenant[tenant] = turns
            return turn


def _call(turn: _Turn | None) -> None:
    if turn is None or not turn[0].set_running_or_notify_cancel():
        return
    future, function = turn
    try:
        result = function()
    except BaseException as error:  # it is raised where the result is awaited
        future.set_exception(error)
        # See `call`: what is raised holds this frame, too.
        del turn, future, function
    else:
        future.set_result(result)


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
