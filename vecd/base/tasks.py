"""Threads that exist before they are needed, and what is said when a thread or a process cannot be had.

A thread that is started by a request would fail that request at the limit on tasks; so a process starts its threads
before it says that it is ready.
"""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

ZMQ_THREADS = 2
_EXIT_S = 1.0


class NoTasks(OSError):
    def __init__(self) -> None:
        super().__init__(
            "no more threads or processes can be started: the limit on tasks (pids.max of the cgroup, TasksMax of the "
            "service, ulimit -u) or on memory (ulimit -v) is reached; a server needs 14 tasks at least"
        )


@contextmanager
def naming_limit() -> Iterator[None]:
    """Raise NoTasks for a thread or a process that the kernel does not let the block start."""
    try:
        yield
    except BlockingIOError:
        raise NoTasks from None
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise NoTasks from None


class Pool(ThreadPoolExecutor):
    """Its threads exist from the beginning to the end."""

    def __init__(self, num_threads: int, name: str) -> None:
        """Raises NoTasks unless all threads can be started; then none is left."""
        super().__init__(num_threads, thread_name_prefix=name)
        are_all_there = threading.Barrier(num_threads)
        try:
            with naming_limit():  # each call holds a thread, so the next one needs another
                calls = [self.submit(are_all_there.wait) for _ in range(num_threads)]
        except NoTasks:
            are_all_there.abort()
            self.shutdown()
            raise
        wait(calls)


def require_threads(num: int) -> None:
    """Raise NoTasks unless `num` threads can be started now. For libraries that abort the process otherwise."""
    before = len(os.listdir("/proc/self/task"))
    Pool(num, "required").shutdown()
    deadline = time.monotonic() + _EXIT_S
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
        time.sleep(0.0005)  # a thread is joined a little before the kernel no longer counts it
