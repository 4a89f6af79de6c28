"""Access to files for an event loop that must not wait for a file system, because a network mount can hang for minutes.

`FileAccess` makes each call in a thread, with a deadline. Owns the threads.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from vecd.base.failures import ConfigurationError
from vecd.base.tasks import NoTasks, naming_limit
from vecd.gateway.config import ApiKey
from vecd.launch.config.keys import load_keys
from vecd.shm.settings import Settings

T = TypeVar("T")

log = logging.getLogger("vecd.supervisor")

TIMEOUT_S = 10.0


class FilesHang(Exception):
    """A file system has not responded in time. The message names the files."""


def _start_daemon(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="files", daemon=True).start()


class FileAccess:
    def __init__(self, start_thread: Callable[[Callable[[], None]], None] = _start_daemon) -> None:
        """`start_thread` calls its argument once, in whatever thread; it raises RuntimeError if it cannot."""
        self._start_thread = start_thread
        self._locks: dict[str, asyncio.Lock] = {}
        self._hanging: set[str] = set()

    async def call(
        self,
        files: str,
        function: Callable[[], T],
        *,
        timeout_s: float = TIMEOUT_S,
        discard: Callable[[T], object] = lambda result: None,
    ) -> T:
        """Call `function` in a thread; returns what it returns, and raises what it raises. `files` names what it reads,
        for messages; there is one thread for each name at a time. Raises FilesHang after `timeout_s`, and at once while
        an earlier call with the same name hangs. `discard` is called with a result that comes too late. Side effect:
        the beginning and the end of a hang are logged."""
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
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[T] = loop.create_future()

        def finish(tell: Callable[[], None]) -> None:
            lock.release()
            if files in self._hanging:
                self._hanging.discard(files)
                log.info("%s: the file system responds again", files)
            tell()

        def work() -> None:
            try:
                tell = partial(ended.set_result, function())
            except BaseException as error:
                tell = partial(ended.set_exception, error)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish, tell)

        try:
            with naming_limit():
                self._start_thread(work)
        except NoTasks as error:
            finish(partial(ended.set_exception, FilesHang(f"{files}: {error}")))
        return ended


# Watches the file of keys, and reads the keys again when it has changed.

_INTERVAL_S = 2.0


async def watch_keys(
    files: FileAccess, current_settings: Callable[[], Settings], on_keys: Callable[[tuple[ApiKey, ...]], None]
) -> None:
    """Until cancelled, look at the file every two seconds. One that cannot be used, or hangs, changes nothing.
    `current_settings` name the file. `on_keys` is called with all keys each time that they have been read again."""
    seen: tuple[Settings, tuple[int, ...]] | None = None  # the settings that named the file, and the version last read
    while True:
        await asyncio.sleep(_INTERVAL_S)
        settings = current_settings()
        path = settings.keys_file
        if path is None:
            continue
        try:
            version = await files.call(str(path), partial(_version, path))
            if seen is not None and seen[0] is settings and seen[1] == version:
                continue
            seen = settings, version
            keys = await files.call(str(path), partial(load_keys, settings))
        except FilesHang:  # which is logged
            seen = None
        except ConfigurationError as error:
            for problem in error.problems:
                log.error("keys not read again, nothing has changed: %s", problem)
        except Exception as error:  # whatever a file may hold; a message might quote it
            log.error("keys not read again, nothing has changed: unexpected %s", type(error).__name__)
        else:
            if current_settings() is settings:  # else a reload has brought keys of its own meanwhile
                on_keys(keys)


def _version(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns
