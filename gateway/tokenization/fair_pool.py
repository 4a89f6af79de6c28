"""A few threads for work that would block the event loop, shared fairly, a turn at a time.

Owns the threads, and the order of their work: tenants take turns, and the jobs of one tenant are first come, first
served, a turn each. A request waits for one turn at a time, so the callers bound what waits here.

A thread that computes in Python holds the GIL, and an event loop that needs it waits 5 ms at each wake-up. So long work
comes in pieces of at most about 1 ms, and the GIL is released after each. Measured with two threads that parse JSON
without pause, 2 cores: the loop wakes up late by 15 ms (median) and 51 ms (p99) without the release, and by 0.4 and 5
ms with it.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar, cast

from vecd.base.tasks import NoTasks, naming_limit

T = TypeVar("T")
_Turn: TypeAlias = tuple[Future[Any], Callable[[], Any]]

TURN_S = 0.005
"""Of one turn. Short compared with a request, long compared with the hand-over (0.1 ms)."""


class Threads:
    """Use from one event loop. Cancelled work ends with its present turn."""

    def __init__(self, num_threads: int = 2, turn_s: float = TURN_S) -> None:
        """Raises NoTasks."""
        self.num_threads = num_threads
        self._turn_s = turn_s
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Turn]] = {}
        """By tenant; the next tenant comes first. No queue is empty. The event loop adds, the threads take."""
        self._idle: list[SimpleQueue[None]] = []
        """They wake threads. The last one is next: a request whose turns alternate between two threads takes 5 %
        longer."""
        self._is_closed = False
        # Daemons: a process that ends without `close` waits for none.
        self._threads = [threading.Thread(target=self._take_turns, daemon=True) for _ in range(num_threads)]
        try:
            with naming_limit():
                for thread in self._threads:
                    thread.start()
        except NoTasks:
            self.close()
            raise

    async def call(self, function: Callable[[], T], tenant: str = "") -> T:
        """Call a function in a thread: one turn, however long it takes."""
        # No variable: an exception would hold this frame, and through it itself, until the next garbage collection.
        return await asyncio.wrap_future(self._submit(function, tenant))

    async def run(self, steps: Generator[None, None, T], tenant: str = "") -> T:
        """The result of a generator that yields between pieces of work."""
        take_turn = partial(_take_turn, steps, self._turn_s)
        while (result := await self.call(take_turn, tenant)) is None:
            pass
        return result[0]

    def close(self) -> None:
        """Wait for the present turns, and cancel the rest."""
        with self._lock:
            self._is_closed = True
            left, self._waiting = self._waiting, {}
            for idle in self._idle:
                idle.put(None)
        for turns in left.values():
            for future, _ in turns:
                future.cancel()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _submit(self, function: Callable[[], T], tenant: str) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((future, function))
            if self._idle:
                self._idle.pop().put(None)
        return future

    def _take_turns(self) -> None:
        wake: SimpleQueue[None] = SimpleQueue()
        while True:
            with self._lock:
                turn = self._next_turn()
                if turn is None:
                    if self._is_closed:
                        return
                    self._idle.append(wake)
            if turn is None:
                wake.get()
            else:
                _call(turn)
            del turn  # it refers to a request

    def _next_turn(self) -> _Turn | None:
        """The next turn; its tenant goes behind all other tenants. Call with the lock."""
        tenant = next(iter(self._waiting), None)
        if tenant is None:
            return None
        turns = self._waiting.pop(tenant)
        turn = turns.popleft()
        if turns:
            self._waiting[tenant] = turns
        return turn


def _call(turn: _Turn) -> None:
    if not turn[0].set_running_or_notify_cancel():
        return
    future, function = turn
    try:
        result = function()
    except BaseException as error:  # raised where the result is awaited
        future.set_exception(error)
        # See `call`: the exception holds this frame, too.
        del turn, future, function
    else:
        future.set_result(result)


def _take_turn(steps: Generator[None, None, T], turn_s: float) -> tuple[T] | None:
    """Returns the result in a tuple once there is one, else None."""
    end = time.perf_counter() + turn_s
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return (cast(T, stop.value),)
        if time.perf_counter() >= end:
            return None
        time.sleep(0)  # releases the GIL
