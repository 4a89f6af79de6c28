"""Runs work in forked processes, as workers do it: with an engine that was loaded before the fork.

Owns the forks and the way back of their results. Knows no engine. Called by `vecd.workers.check.run` and
`vecd.workers.check.speed`.
"""

import multiprocessing
import os
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import torch

from vecd.shm.card import ModelError, one_line
from vecd.workers.config import WorkerConfig
from vecd.workers.process.kernel import (
    describe_status,
    die_with_parent,
    is_single_threaded,
    num_threads,
    volunteer_for_oom_kill,
)

Work: TypeAlias = Callable[[], Any]


def in_workers(config: WorkerConfig, prepare: Callable[[], Work], num_workers: int = 1) -> list[Any]:
    """Fork `num_workers` processes, call `prepare` in each, and when all are prepared, call their work at once.

    An engine on an accelerator does not survive a fork; then this process does the work once. Raises ModelError, in one
    line, for what the work raises, and for a process that died, as when memory runs out.
    """
    if config.device != "cpu":
        return [_call(_call(prepare))]
    if not is_single_threaded():  # a fork would lose the threads, and the locks that they hold
        raise ModelError(f"loading the model has started threads that do not end ({num_threads()})")
    fork = multiprocessing.get_context("fork")
    with ExitStack() as stack:
        workers = []
        for _ in range(num_workers):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_run, args=(config, prepare, theirs, os.getpid()))
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


def _run(
    config: WorkerConfig, prepare: Callable[[], Work], connection: "Connection[Any, Any]", parent_pid: int
) -> None:
    """In the forked process: prepare, wait for the start, work, send the result."""
    die_with_parent(parent_pid)
    volunteer_for_oom_kill()
    torch.set_num_threads(config.num_threads)
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
    except Exception as error:  # a model may raise anything
        raise ModelError(one_line(error)) from error
