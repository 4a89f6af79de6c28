"""The process that workers are forked from. It has loaded the engine that they share, and what that needs.

Owns the forks, their pidfds and their reaping. Starts no thread, because a thread pool does not survive a fork; a CUDA
context does not survive it either, so each worker loads an engine for an accelerator by itself. The supervisor starts
this process as a program of its own, with OMP_NUM_THREADS=1 and the like, because neither an import nor a computation
may start threads; or the zygote forks it, which was started so (`vecd.workers.process.zygote`). It ends when the
supervisor ends, and its workers end with it.

Memory filled before the fork, such as prepacked or cast weights, exists once for all workers
(docs/adr/0007-engine-before-fork.md).

multiprocessing's forkserver is not used: kill -9 leaves its listening socket in /tmp, and it imports the supervisor's
program again.
"""

import gc
import importlib
import logging
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
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
from vecd.shm.free_memory import return_free_memory
from vecd.shm.tasks import NoTasks, naming_limit
from vecd.shm.wire import Incarnation
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import Engine, ReportProgress
from vecd.workers.engines.load import expected_path, load_engine
from vecd.workers.engines.selection_cache import Selection
from vecd.workers.process import main
from vecd.workers.process.kernel import (
    die_with_parent,
    is_single_threaded,
    leave_no_core,
    num_threads,
    set_process_name,
    trace_crashes,
)
from vecd.workers.process.preload import ENGINES_WITHOUT_TORCH
from vecd.workers.process.selection_process import SelectionProcess
from vecd.workers.weights import check_headers

log = logging.getLogger("vecd.forkserver")


def serve(channel: Channel) -> int:
    """Fork workers until the supervisor closes the channel or dies; returns the exit code.

    Side effects on the process: it dies with its parent, once a message has named that; those of `run_process`.
    """
    return run_process("forkserver", lambda: _start(channel))


def run_process(name: str, live: Callable[[], int]) -> int:
    """Make this the process `name`, which forks others, and `live` its life; returns the exit code.

    Side effects on the process: name, logging, no core files, SIGINT, SIGTERM and SIGHUP ignored.
    """
    set_process_name(f"vecd-{name}")
    main.leave_signals_to_supervisor()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the parent ignored it, the kernel would reap the children
    leave_no_core()
    trace_crashes()
    logs.configure(name, "info", "text", has_thread=False)
    try:
        return live()
    except ConnectionError:
        return main.EXIT_OK  # the supervisor died in the middle of a message
    except Exception:
        log.exception("the %s ends by a bug", name)
        return main.EXIT_INTERNAL_ERROR


def _start(channel: Channel) -> int:
    received = channel.receive()
    if received is None:
        return main.EXIT_OK
    start, _ = received
    assert isinstance(start, ForkServerStart), start
    logs.change(start.log_level, start.log_format)
    # Loading takes long, and the channel is not read during it.
    if not die_with_parent(start.parent_pid):
        return main.EXIT_OK
    try:
        modules, engine = _load(start, lambda stage: channel.send(Progress(stage)))
    except (ModelError, NoTasks) as error:
        channel.send(ChildFailed(str(error)))
        return main.EXIT_COULD_NOT_START
    if not is_single_threaded():
        channel.send(ChildFailed(f"loading {', '.join(modules)} started threads, which a fork would lose"))
        return main.EXIT_COULD_NOT_START
    # A child's garbage collector skips frozen objects; its marks would copy every page.
    gc.collect()
    gc.freeze()
    server = _ForkServer(channel, engine)
    channel.send(ForkServerReady(modules))
    return server.run()


def _load(start: ForkServerStart, report: ReportProgress) -> tuple[list[str], Engine | None]:
    """The imported modules, and the engine that the workers share. Raises ModelError and NoTasks."""
    if start.config is None:
        return import_modules(start.modules), None
    config = WorkerConfig.from_json(start.config)
    check_headers(config.card)
    with ExitStack() as stack:

        def start_selection() -> SelectionProcess:
            return stack.enter_context(SelectionProcess(start.selection_command, replace(config, num_threads=1)))

        path = expected_path(config)
        # Started before the imports, because it takes longer. Not needed if another server remembers one meanwhile.
        process = start_selection() if path is None else None
        modules = [] if path in ENGINES_WITHOUT_TORCH else import_modules(start.modules)

        def select(report: ReportProgress) -> Selection:
            return (process or start_selection()).result(report)

        engine = load_engine(config, report, select)
        if config.num_threads > 1:
            engine.use_threads(0)
        return_free_memory()  # of weights that were converted and then laid out anew
        return modules, engine


def import_modules(modules: list[str]) -> list[str]:
    """Import them; returns the names of those that could be imported."""
    imported = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # anything; if a worker needs the module, the worker's own error ends its start
            log.warning("%s cannot be imported: %s: %s", name, type(error).__name__, error)
        else:
            imported.append(name)
    return imported


class _ForkServer:
    def __init__(self, channel: Channel, engine: Engine | None) -> None:
        self._channel = channel
        self._engine = engine
        self._pids: dict[int, int] = {}
        """Of the workers that have not been reaped, by pidfd, which is readable once the worker has ended."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel.fileno(), selectors.EVENT_READ)

    def run(self) -> int:
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._pids:
                    self._reap(key.fd)
                elif (received := self._channel.receive(0)) is None:
                    return main.EXIT_OK
                else:
                    self._handle(*received)

    def _handle(self, message: Message, fds: list[int]) -> None:
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
            with naming_limit():
                pid = os.fork()
        except OSError as error:  # too many processes or open files, too little memory
            self._report_fork_failed(order, error)
            return
        if pid == 0:
            self._become_worker(order, fds, parent_pid)
        # Only this process reaps it: until then the pid is this child's.
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:  # no descriptor left
            os.kill(pid, signal.SIGKILL)  # it could not be watched
            os.waitpid(pid, 0)
            self._report_fork_failed(order, error)
            return
        self._pids[pidfd] = pid
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._channel.send(WorkerForked(order.worker, order.life, pid), [pidfd])

    def _report_fork_failed(self, order: ForkWorker, error: OSError) -> None:
        log.error("worker %d cannot be forked: %s", order.worker, error)
        self._channel.send(ForkFailed(order.worker, order.life, str(error)))

    def _become_worker(self, order: ForkWorker, fds: list[int], parent_pid: int) -> NoReturn:
        """In the child: close the fork server's descriptors, run the worker, and exit without the parent's clean-up."""
        code = main.EXIT_INTERNAL_ERROR
        try:
            self._close_in_child()
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
            exit_at_once(code)

    def _close_in_child(self) -> None:
        self._selector.close()
        self._channel.close()
        for pidfd in self._pids:
            os.close(pidfd)

    def _reap(self, pidfd: int) -> None:
        """Report a worker that has ended."""
        self._selector.unregister(pidfd)
        os.close(pidfd)
        pid, status = os.waitpid(self._pids.pop(pidfd), 0)
        self._channel.send(WorkerExited(pid, os.waitstatus_to_exitcode(status)))


def exit_at_once(code: int) -> NoReturn:
    """Exit from a forked child, without the clean-up that is its parent's."""
    try:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
