"""Runs work in forked processes, as workers do it: with an engine that was loaded before the fork.

Owns the forks and the way back of their results. Knows no engine. Called by `vecd.workers.check.run` and
`vecd.workers.check.speed`.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from vecd.shm.card import ModelError
from vecd.workers.process.kernel import describe_status, die_with_parent, num_threads, volunteer_for_oom_kill

Work: TypeAlias = Callable[[], Any]

_THREADS_TIMEOUT_S = 1.0


def in_worker(work: Work, *, may_fork: bool) -> Any:
    """The result of `work`, done in a forked process. See `in_workers`."""
    return in_workers(lambda: work, 1, may_fork=may_fork)[0]


def in_workers(prepare: Callable[[], Work], num_workers: int, *, may_fork: bool) -> list[Any]:
    """Fork `num_workers` processes, call `prepare` in each, and when all are prepared, call their work at once.

    An engine on an accelerator does not survive a fork; then this process does the work once. Raises ModelError, in one
    line, for what the work raises, and for a process that died, as when memory runs out.
    """
    if not may_fork:
        return [_call(_call(prepare))]
    _await_single_thread()
    fork = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        workers = []
        for _ in range(num_workers):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_run, args=(prepare, theirs, os.getpid()))
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.kill)
            workers.append((process, stack.enter_context(ours)))
        for worker in workers:
            _receive(*worker)
        for _, connection in workers:
            connection.send("start")
        return [_receive(*worker) for worker in workers]


def _receive(process: Any, connection: "Connection[Any, Any]") -> Any:
    try:
        result = connection.recv()
    except (EOFError, ConnectionError):
        process.join()
        raise ModelError(f"a worker {describe_status(process.exitcode)}") from None
    if isinstance(result, ModelError):
        raise result
    return result


def _run(prepare: Callable[[], Work], connection: "Connection[Any, Any]", parent_pid: int) -> None:
    """In the forked process: prepare, wait for the start, work, send the result."""
    die_with_parent(parent_pid)
    volunteer_for_oom_kill()
    try:
        work = _call(prepare)
        connection.send("ready")
        connection.recv()
        result = _call(work)
    except ModelError as error:
        result = error
    connection.send(result)


def _call(work: Work) -> Any:
    try:
        return work()
    except ModelError:
        raise
    except Exception as error:
        line = f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]
        raise ModelError(line) from error


def _await_single_thread() -> None:
    """transformers does not join the threads that it loads weights with; a fork would lose them and the locks that they
    hold. Raises ModelError when they stay."""
    deadline = time.monotonic() + _THREADS_TIMEOUT_S
    while num_threads() != 1:
        if time.monotonic() >= deadline:
            raise ModelError(f"loading the model has started threads that do not end ({num_threads()})")
        time.sleep(0.01)
