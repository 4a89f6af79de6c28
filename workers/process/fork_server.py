"""The process that workers are forked from, and the one that such processes are forked from.

Owns the forks, their pidfds and their reaping. Starts no thread, because a thread pool does not survive a fork.
"""

import gc
import importlib
import logging
import os
import select
import selectors
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import NoReturn

from vecd.base import logs
from vecd.base.files import load
from vecd.base.programs import return_free_memory
from vecd.base.tasks import NoTasks, naming_limit
from vecd.model.card import ModelError
from vecd.shm.control import (
    Channel,
    ChildFailed,
    ForkFailed,
    ForkServerForked,
    ForkServerReady,
    ForkServerStart,
    ForkWorker,
    Message,
    Progress,
    WorkerExited,
    WorkerForked,
)
from vecd.shm.wire import Incarnation
from vecd.workers.batch import Engine, ReportProgress
from vecd.workers.config import ENGINES_WITHOUT_TORCH, WorkerConfig
from vecd.workers.load import expected_path, load_engine
from vecd.workers.process import worker
from vecd.workers.process.kernel import (
    die_with_parent,
    is_single_threaded,
    leave_no_core,
    num_threads,
    set_process_name,
    trace_crashes,
)
from vecd.workers.process.selection_process import SelectionProcess
from vecd.workers.select import Selection
from vecd.workers.weights import check_headers

# Memory filled before the fork, such as prepacked or cast weights, exists once for all workers
# (docs/adr/0007-engine-before-fork.md).
#
# multiprocessing's forkserver is not used: kill -9 leaves its listening socket in /tmp, and it imports the supervisor's
# program again.

log = logging.getLogger("vecd.forkserver")


def serve(channel: Channel) -> int:
    """Fork workers until the supervisor closes the channel or dies; returns the exit code. Side effects on the process:
    it dies with its parent; those of `run_process`."""
    return run_process("forkserver", lambda: _start(channel))


def run_process(name: str, live: Callable[[], int]) -> int:
    """Make this the process `name`, which forks others, and `live` its life; returns the exit code. Side effects on the
    process: name, logging, no core files, SIGINT, SIGTERM and SIGHUP ignored."""
    set_process_name(f"vecd-{name}")
    worker.leave_signals_to_supervisor()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the parent ignored it, the kernel would reap the children
    leave_no_core()
    trace_crashes()
    logs.configure(name, "info", "text", has_thread=False)
    try:
        return live()
    except ConnectionError:
        return worker.EXIT_OK  # the supervisor died in the middle of a message
    except Exception:
        log.exception("the %s ends by a bug", name)
        return worker.EXIT_INTERNAL_ERROR


def _start(channel: Channel) -> int:
    received = channel.receive()
    if received is None:
        return worker.EXIT_OK
    start, _ = received
    assert isinstance(start, ForkServerStart), start
    logs.change(start.log_level, start.log_format)
    # Loading takes long, and the channel is not read during it.
    if not die_with_parent(start.parent_pid):
        return worker.EXIT_OK
    try:
        modules, engine = _load(start, lambda stage: channel.send(Progress(stage)))
    except (ModelError, NoTasks) as error:
        channel.send(ChildFailed(str(error)))
        return worker.EXIT_COULD_NOT_START
    if not is_single_threaded():
        channel.send(ChildFailed(f"loading {', '.join(modules)} started threads, which a fork would lose"))
        return worker.EXIT_COULD_NOT_START
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
    config = load(WorkerConfig, start.config)
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
        """Of the workers that have not been reaped, by pidfd."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel.fileno(), selectors.EVENT_READ)

    def run(self) -> int:
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._pids:
                    self._reap(key.fd)
                elif (received := self._channel.receive(0)) is None:
                    return worker.EXIT_OK
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
            _live_in_child(lambda: self._run_worker(order, fds, parent_pid))
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

    def _run_worker(self, order: ForkWorker, fds: list[int], parent_pid: int) -> int:
        self._selector.close()
        self._channel.close()
        for pidfd in self._pids:
            os.close(pidfd)
        control_fd, arena_fd, *address_fds = fds
        return worker.run(
            load(WorkerConfig, order.config),
            Incarnation(order.worker, order.life),
            Channel.from_fd(control_fd),
            arena_fd,
            address_fds,
            parent_pid=parent_pid,
            engine=self._engine,
        )

    def _reap(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        pid, status = os.waitpid(self._pids.pop(pidfd), 0)
        self._channel.send(WorkerExited(pid, os.waitstatus_to_exitcode(status)))


def _live_in_child(live: Callable[[], int]) -> NoReturn:
    """Exit with the code of `live`, without the clean-up that is the parent's."""
    code = worker.EXIT_INTERNAL_ERROR
    try:
        code = live()
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


# The process that fork servers are forked from, in a server of several models.
#
# It has imported what their engines need, and holds no weights: an import is paid for once, and the processes of all
# models share the pages of the libraries. It imports a module when the first fork server needs it, so there is no torch
# in it before a model needs torch. Like a fork server, it starts no thread.
#
# A fork server must outlive the zygote, and die with the supervisor. So it becomes the supervisor's own child: a
# process in between forks it and ends, and the supervisor adopts orphans (`vecd.workers.process.kernel.adopt_orphans`).
# From then on it is what it is without a zygote, for itself, for the kernel and for the supervisor.

zygote_log = logging.getLogger("vecd.zygote")


def serve_zygote(channel: Channel) -> int:
    """Fork fork servers until the supervisor closes the channel or dies; returns the exit code. Side effects on the
    process: as of `serve`."""
    return run_process("zygote", lambda: _run(channel))


def _run(channel: Channel) -> int:
    while (received := channel.receive()) is not None:
        match received:
            case ForkServerStart() as order, [control_fd]:
                logs.change(order.log_level, order.log_format)
                if not die_with_parent(order.parent_pid):
                    break
                with closing(Channel.from_fd(control_fd)) as control:
                    _import_for(order)
                    if not is_single_threaded():
                        _report_not_forked(control, "its imports started threads, which a fork would lose")
                        return worker.EXIT_COULD_NOT_START  # the next zygote may not need them
                    _fork(control, channel)
            case message, fds:
                zygote_log.error("%s with %d descriptors is not for a zygote", type(message).__name__, len(fds))
                for fd in fds:
                    os.close(fd)
    return worker.EXIT_OK


def _import_for(order: ForkServerStart) -> None:
    """Import what the fork server will need. That does nothing if it has been imported for another one."""
    path = None
    if order.config is not None:
        try:
            path = expected_path(load(WorkerConfig, {**order.config, "num_threads": 1}))
        except Exception as error:  # of this model alone, whose fork server is going to meet it, and report it
            zygote_log.info(
                "the engine of a model is not known before it is loaded: %s: %s", type(error).__name__, error
            )
    import_modules([ENGINES_WITHOUT_TORCH[path]] if path in ENGINES_WITHOUT_TORCH else order.modules)
    # A child's garbage collector skips frozen objects; its marks would copy every page.
    gc.collect()
    gc.freeze()


def _fork(control: Channel, channel: Channel) -> None:
    """Fork a fork server, which becomes a child of the supervisor. `channel` is the zygote's."""
    try:
        with naming_limit():
            pid = os.fork()
    except OSError as error:  # too many processes, too little memory
        _report_not_forked(control, str(error))
        return
    if pid != 0:
        os.waitpid(pid, 0)  # it forks, and ends
        return
    _live_in_child(lambda: _fork_orphan(control, channel))


def _fork_orphan(control: Channel, channel: Channel) -> int:
    """In the process in between: fork the fork server, and end. Returns the exit code of the one and of the other."""
    channel.close()
    try:
        between = os.pidfd_open(os.getpid())
        with naming_limit():
            pid = os.fork()
    except OSError as error:
        _report_not_forked(control, str(error))
        return worker.EXIT_COULD_NOT_START
    if pid != 0:
        return worker.EXIT_OK
    # The supervisor is the parent once the process in between is dead. A fork server that asked to die with its parent
    # before would die now.
    select.select([between], [], [])
    os.close(between)
    own = os.pidfd_open(os.getpid())
    with suppress(ConnectionError):  # the supervisor has given it up, and `serve` ends at once
        control.send(ForkServerForked(os.getpid()), [own])
    os.close(own)
    return serve(control)


def _report_not_forked(control: Channel, error: str) -> None:
    zygote_log.error("a fork server cannot be forked: %s", error)
    with suppress(OSError):  # the supervisor has given it up
        control.send(ForkServerForked(0, error))
