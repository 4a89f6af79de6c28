"""Access to files for an event loop that must not wait for a file system.

A call on a file of a network mount can hang for minutes. `FileAccess` makes it in a thread, with a deadline, so that
the supervisor's loop goes on: heartbeats, watchdog notifications, restarts and the drain do not depend on any mount.
Owns the threads. Called by `vecd.launch.processes` and `vecd.supervisor`.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from vecd.shm.tasks import NoTasks, naming_limit

T = TypeVar("T")

log = logging.getLogger("vecd.supervisor")

TIMEOUT_S = 10.0
"""Far longer than a file system that works takes to open and read a file of a few MiB."""


class FilesHang(Exception):
    """A file system has not responded in time. The message names the files."""


def _start_daemon(work: Callable[[], None]) -> None:
    """Start a thread that does not keep the process from ending."""
    threading.Thread(target=work, name="files", daemon=True).start()


class FileAccess:
    def __init__(self, start_thread: Callable[[Callable[[], None]], None] = _start_daemon) -> None:
        """`start_thread` calls its argument once, in whatever thread; it raises RuntimeError if it cannot."""
        self._start_thread = start_thread
        self._locks: dict[str, asyncio.Lock] = {}
        """Each held for as long as a thread runs."""
        self._hanging: set[str] = set()

    async def call(
        self,
        files: str,
        function: Callable[[], T],
        *,
        timeout_s: float = TIMEOUT_S,
        discard: Callable[[T], object] = lambda result: None,
    ) -> T:
        """Call `function` in a thread; returns what it returns, and raises what it raises.

        `files` names what it reads, for messages. There is at most one thread for each name: a call waits for the one
        before. Raises FilesHang after `timeout_s`, and at once as long as an earlier call with the same name hangs.
        `discard` is called with a result that comes after the caller has stopped waiting.
        Side effect: the first of several calls that hang is logged, and so is the end of its hanging.
        """
        if files in self._hanging:
            raise FilesHang(f"{files}: the file system still does not respond")
        lock = self._locks.setdefault(files, asyncio.Lock())
        try:
            async with asyncio.timeout(timeout_s):
                await lock.acquire()
                ended = self._start(function, lock, files)
                try:
                    await asyncio.wait([ended])  # unlike awaiting it, neither cancels it nor raises its error
                except BaseException:
                    ended.add_done_callback(lambda _: ended.exception() or discard(ended.result()))
                    raise
        except TimeoutError:  # of this deadline
            if files not in self._hanging and lock.locked():
                self._hanging.add(files)
                log.error("%s: the file system has not responded within %g s", files, timeout_s)
            raise FilesHang(f"{files}: the file system has not responded within {timeout_s:g} s") from None
        return ended.result()

    def _start(self, function: Callable[[], T], lock: asyncio.Lock, files: str) -> "asyncio.Future[T]":
        """The function's result or error. Side effect: the lock is released at its end."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[T] = loop.create_future()

        def finish(result: Any, error: BaseException | None) -> None:
            lock.release()
            if files in self._hanging:
                self._hanging.discard(files)
                log.info("%s: the file system responds again", files)
            if error is None:
                ended.set_result(result)
            else:
                ended.set_exception(error)

        def work() -> None:
            result, error = None, None
            try:
                result = function()
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish, result, error)

        try:
            with naming_limit():
                self._start_thread(work)
        except NoTasks as error:
            finish(None, FilesHang(f"{files}: {error}"))
        return ended
