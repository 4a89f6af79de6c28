"""The process that workers are forked from: it has imported torch, and loaded the engine that they share.

Owns the forks, their pidfds and their reaping. Starts no thread: a thread pool does not survive a fork, and a CUDA
context neither, so an engine for an accelerator is left to the workers. Started by the supervisor as a program of its
own, with OMP_NUM_THREADS=1 and the like, because neither importing nor computing must start threads. Ends when the
supervisor is gone, and its workers with it.

What is loaded before the fork, weights laid out anew or cast among it, is in memory once, however many workers there
are: docs/adr/0007-engine-before-fork.md.

Why not multiprocessing's forkserver: its listening socket is a file in /tmp that a kill -9 leaves behind, and it
imports the supervisor's program again.
"""

import gc
import importlib
import logging
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from contextlib import ExitStack
from typing import NoReturn

from vecd.shm import logs
from vecd.shm.card import ModelError
from vecd.shm.control import (
    Channel,
    ChildFailed,
    ForkFailed,
    ForkServerReady,
    ForkServerStart,
    ForkWorker,
    Message,
    Progress,
    WorkerExited,
    WorkerForked,
)
from vecd.shm.wire import Incarnation
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import Engine, Report, load_engine
from vecd.workers.engines.selection_cache import Selection, recall
from vecd.workers.engines.selection_process import SelectionProcess
from vecd.workers.process import main
from vecd.workers.process.kernel import die_with_parent, leave_no_core, num_threads, set_process_name, trace_crashes

log = logging.getLogger("vecd.forkserver")


def serve(channel: Channel) -> int:
    """Fork workers until the supervisor closes the channel or dies; returns the exit code.

    Side effects on the process: it dies with its parent, once it has been told who that is; name, logging, no core
    files, SIGINT, SIGTERM and SIGHUP ignored, SIGCHLD handled.
    """
    set_process_name("vecd-forkserver")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    leave_no_core()
    trace_crashes()
    logs.configure("forkserver", "info", "text", has_thread=False)
    try:
        return _start(channel)
    except ConnectionError:
        return main.EXIT_OK  # the supervisor died in the middle of a message
    except Exception:
        log.exception("the fork server ends by a bug")
        return main.EXIT_INTERNAL_ERROR


def _start(channel: Channel) -> int:
    received = channel.receive()
    if received is None:
        return main.EXIT_OK
    start, _ = received
    assert isinstance(start, ForkServerStart), start
    logs.change(start.log_level, start.log_format)
    # Loading takes long, and nobody looks at the channel meanwhile.
    if not die_with_parent(start.parent_pid):
        return main.EXIT_OK
    try:
        modules, engine = _load(start, lambda stage: channel.send(Progress(stage)))
    except ModelError as error:
        channel.send(ChildFailed(str(error)))
        return main.EXIT_COULD_NOT_START
    if not _is_single_threaded():
        channel.send(ChildFailed(f"loading {', '.join(modules)} started threads, which a fork would lose"))
        return main.EXIT_COULD_NOT_START
    # What is frozen is never looked at by a child's garbage collector, whose marks would copy every page.
    gc.collect()
    gc.freeze()
    server = _ForkServer(channel, engine)
    channel.send(ForkServerReady(modules))
    return server.run()


def _is_single_threaded() -> bool:
    """Whether only this thread is left; transformers does not wait for the end of those that it loaded with."""
    deadline = time.monotonic() + _THREADS_TIMEOUT_S
    while num_threads() != 1:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


_THREADS_TIMEOUT_S = 1.0


def _load(start: ForkServerStart, report: Report) -> tuple[list[str], Engine | None]:
    """The modules that could be imported, and the engine that the workers share. Raises ModelError."""
    if start.config is None:
        return _import(start.modules), None
    config = WorkerConfig.from_json({**start.config, "num_threads": 1})
    with ExitStack() as stack:

        def begin() -> SelectionProcess:
            return stack.enter_context(SelectionProcess(start.choose_command, config))

        # Begun first: it takes longer than importing does. In vain if another server remembers its choice meanwhile.
        begun = begin() if recall(config) is None else None
        modules = _import(start.modules)

        def choose(report: Report) -> Selection:
            return (begun or begin()).result(report)

        return modules, load_engine(config, report, choose)


def _import(modules: list[str]) -> list[str]:
    return [name for name in modules if _can_import(name)]


def _can_import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception as error:  # an import may raise anything; workers try again, and then it matters
        log.warning("%s cannot be imported: %s: %s", name, type(error).__name__, error)
        return False
    return True


class _ForkServer:
    """Side effect of making one: SIGCHLD is handled."""

    def __init__(self, channel: Channel, engine: Engine | None) -> None:
        self._channel = channel
        self._engine = engine
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._watch_children()
        self._selector.register(channel.fileno(), selectors.EVENT_READ)

    def run(self) -> int:
        while True:
            ready = {key.fd for key, _ in self._selector.select()}
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
                self._reap()
            if self._channel.fileno() in ready:
                received = self._channel.receive(0)
                if received is None:
                    return main.EXIT_OK
                self._obey(*received)

    def _watch_children(self) -> None:
        """SIGCHLD becomes readable: the C handler writes to the wake-up descriptor, the Python one does nothing."""
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def _obey(self, message: Message, fds: list[int]) -> None:
        try:
            match message, fds:
                case ForkWorker(), [_, _, _, *_]:
                    self._fork(message, fds)
                case _:
                    log.error("%s with %d descriptors is not for a fork server", type(message).__name__, len(fds))
        finally:
            for fd in fds:
                os.close(fd)

    def _fork(self, order: ForkWorker, fds: list[int]) -> None:
        parent_pid = os.getpid()
        try:
            assert num_threads() == 1, "a thread would be lost in the fork, with whatever lock it holds"
            pid = os.fork()
        except OSError as error:  # too many processes or open files, too little memory
            self._tell_fork_failed(order, error)
            return
        if pid == 0:
            self._become_worker(order, fds, parent_pid)
        # Nobody but us reaps it, and not before the next turn: the pid cannot be another process's yet.
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:  # no descriptor left
            os.kill(pid, signal.SIGKILL)  # nobody could watch it
            self._tell_fork_failed(order, error)
            return
        try:
            self._channel.send(WorkerForked(order.worker, order.life, pid), [pidfd])
        finally:
            os.close(pidfd)

    def _tell_fork_failed(self, order: ForkWorker, error: OSError) -> None:
        log.error("worker %d cannot be forked: %s", order.worker, error)
        self._channel.send(ForkFailed(order.worker, order.life, str(error)))

    def _become_worker(self, order: ForkWorker, fds: list[int], parent_pid: int) -> NoReturn:
        """In the child: leave the fork server behind, live, and leave without its clean-up."""
        code = main.EXIT_INTERNAL_ERROR
        try:
            self._leave_behind()
            control_fd, arena_fd, *address_fds = fds
            code = main.run(
                WorkerConfig.from_json(order.config),
                Incarnation(order.worker, order.life),
                Channel.from_fd(control_fd),
                arena_fd,
                address_fds,
                parent_pid=parent_pid,
                engine=self._engine,
            )
        except BaseException:
            traceback.print_exc()
        finally:
            _leave(code)

    def _leave_behind(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        self._channel.close()
        self._woken.close()
        self._wake.close()

    def _reap(self) -> None:
        """Report every child that has ended; one signal may stand for several."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._channel.send(WorkerExited(pid, os.waitstatus_to_exitcode(status)))


def _leave(code: int) -> NoReturn:
    try:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
