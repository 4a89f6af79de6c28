"""How a signal ends the coroutine of a run in order, and what runs in threads beside it.

Knows nothing of what runs. Called by `vecd.client.bulk.command`, `vecd.client.bulk.folder` and `vecd.client.bulk.run`.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def until_interrupted(work: Coroutine[Any, Any, None]) -> int:
    """Await `work`, which SIGINT and SIGTERM cancel. Returns the signal that has done so, or 0.

    Raises what `work` raises, unless it was interrupted. Side effects: a second signal does what it does by default.
    """
    loop, task, number = asyncio.get_running_loop(), asyncio.ensure_future(work), 0

    def restore() -> None:  # uvloop would keep the handlers after its end
        for each in _SIGNALS:
            loop.remove_signal_handler(each)

    def interrupt(received: int) -> None:
        nonlocal number
        number = received
        restore()
        task.cancel()

    for each in _SIGNALS:
        loop.add_signal_handler(each, interrupt, each)
    try:
        await asyncio.wait({task})
        if not number:
            await task
    finally:
        restore()
    return number


async def in_thread(call: Callable[[], _T], name: str) -> _T:
    """What `call` returns or raises. The thread is a daemon: a process that ends does not wait for it."""
    found: Future[_T] = Future()
    found.set_running_or_notify_cancel()

    def run() -> None:
        try:
            found.set_result(call())
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(found)
