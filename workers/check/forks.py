"""Work in forked processes, as workers do it: on an engine that was loaded before.

Owns the forks, the way back of their results, and the words for one that ended without. Knows no engine. Called by
`vecd.workers.check.orders`.

    parent   fork ×N ─── reads "ready" of each ─── opens the gate ─── reads results, reaps
    forked   begin() ─ says "ready" ─ waits at the gate ─────────── work() ─ writes its result, leaves
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn, TextIO, TypeAlias

from vecd.shm.card import ModelError
from vecd.workers.process.kernel import describe_status, die_with_parent, num_threads, volunteer_for_oom_kill

Work: TypeAlias = Callable[[], dict[str, Any]]

_THREADS_TIMEOUT_S = 1.0
_READY = "ready\n"


class WorkerDied(Exception):
    """A forked process ended without a result. The message says how."""


def in_worker(work: Work, *, may_fork: bool) -> dict[str, Any]:
    """The result of `work`, done in a forked process. See `in_workers`."""
    return in_workers(lambda: work, 1, may_fork=may_fork)[0]


def in_workers(begin: Callable[[], Work], num_workers: int, *, may_fork: bool) -> list[dict[str, Any]]:
    """Prepare in each of so many forked processes (`begin`), and when all are prepared, work in all of them at once.

    Where it may not be forked, because the engine is on an accelerator, this process works, alone. Raises WorkerDied
    when one of them is killed, or runs out of memory; ModelError, in one line, for what the work raises.
    """
    if not may_fork:
        return [_or_model_error(begin())]
    _await_single_thread()
    with ExitStack() as stack:
        gate_reader, gate_writer = os.pipe()
        stack.callback(os.close, gate_reader)
        gate = stack.enter_context(os.fdopen(gate_writer, "wb"))
        workers = [_Forked(begin, gate_reader, gate_writer) for _ in range(num_workers)]
        for worker in workers:
            stack.callback(worker.end)
        for worker in workers:
            worker.expect_ready()
        gate.close()
        return [worker.result() for worker in workers]


class _Forked:
    """One forked process, seen from its parent."""

    def __init__(self, begin: Callable[[], Work], gate_reader: int, gate_writer: int) -> None:
        reader, writer = os.pipe()
        parent_pid = os.getpid()
        self._pid: int | None = os.fork()
        if self._pid == 0:
            os.close(reader)
            os.close(gate_writer)
            _live(begin, gate_reader, writer, parent_pid)
        os.close(writer)
        self._answers: TextIO = os.fdopen(reader)

    def expect_ready(self) -> None:
        """Wait until it is prepared. Raises as `result`."""
        line = self._answers.readline()
        if line != _READY:
            self._judge(line)

    def result(self) -> dict[str, Any]:
        """Raises WorkerDied when there is none, ModelError when its work failed."""
        return self._judge(self._answers.readline())

    def _judge(self, line: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(line) if line.endswith("\n") else {"died": True}
        if "died" in answer:
            raise WorkerDied(f"a worker {describe_status(self._reap())}")
        if "error" in answer:
            raise ModelError(answer["error"])
        return answer

    def end(self) -> None:
        """Leave nothing of it behind, whether or not it has been heard to its end."""
        self._answers.close()
        if self._pid is not None:
            os.kill(self._pid, 9)
            self._reap()

    def _reap(self) -> int:
        assert self._pid is not None
        _, status = os.waitpid(self._pid, 0)
        self._pid = None
        return os.waitstatus_to_exitcode(status)


def _live(begin: Callable[[], Work], gate: int, answer_fd: int, parent_pid: int) -> NoReturn:
    """In the forked process: prepare, wait, work, answer, and leave without the parent's clean-up."""
    try:
        die_with_parent(parent_pid)
        volunteer_for_oom_kill()
        with os.fdopen(answer_fd, "w") as answers:
            try:
                work = begin()
                answers.write(_READY)
                answers.flush()
                os.read(gate, 1)  # nothing is ever written: it ends when the gate is closed
                answer = work()
            except Exception as error:
                answer = {"error": _one_line(error)}
            answers.write(json.dumps(answer) + "\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def _or_model_error(work: Work) -> dict[str, Any]:
    try:
        return work()
    except Exception as error:
        raise ModelError(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    if isinstance(error, ModelError):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0]


def _await_single_thread() -> None:
    """transformers does not wait for the end of the threads that it loaded with; a fork would lose them, with whatever
    lock they hold. Raises ModelError when they stay."""
    deadline = time.monotonic() + _THREADS_TIMEOUT_S
    while num_threads() != 1:
        if time.monotonic() >= deadline:
            raise ModelError(f"loading the model has started threads that do not end ({num_threads()})")
        time.sleep(0.01)
