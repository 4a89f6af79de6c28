"""The process that others are forked from: the workers of a model, or the fork servers of several models.

Owns the forks. Starts no thread, because a thread pool does not survive a fork.
"""

import gc
import importlib
import logging
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from typing import NoReturn

from vecd.base import logs
from vecd.base.files import load
from vecd.base.kernel import (
    die_with_parent,
    is_single_threaded,
    leave_no_core,
    leave_signals_to_parent,
    num_threads,
    set_process_name,
    trace_crashes,
)
from vecd.base.programs import return_free_memory
from vecd.base.tasks import NoTasks, naming_limit
from vecd.model.card import ModelError
from vecd.shm.control import (
    Channel,
    ChildFailed,
    Forked,
    ForkServerStart,
    ForkWorker,
    Message,
    Progress,
    Ready,
)
from vecd.workers.batch import Engine, ReportProgress
from vecd.workers.config import ENGINES_WITHOUT_TORCH, WorkerConfig
from vecd.workers.load import check_headers, expected_path, load_engine
from vecd.workers.process import worker
from vecd.workers.process.selection_process import SelectionProcess
from vecd.workers.select import Selection

# Memory filled before the fork, such as prepacked or cast weights, exists once for all workers
# (docs/adr/0007-engine-before-fork.md). In a server of several models, the process that their fork servers are forked
# from (the zygote) has imported what their engines need, and holds no weights: an import is paid for once, and the
# processes of all models share the pages of the libraries. It imports a module when the first model needs it, so there
# is no torch in it before that.
#
# multiprocessing's forkserver is not used: kill -9 leaves its listening socket in /tmp, and it imports the supervisor's
# program again.
#
# What is forked outlives the process that it was forked from, and dies with the supervisor, which watches and reaps it
# as its own child: a process in between forks it and ends, and the supervisor adopts orphans
# (`vecd.base.kernel.adopt_orphans`). The supervisor kills the workers of a fork server that has died.

log = logging.getLogger("vecd.forkserver")


def serve(channel: Channel, name: str = "forkserver") -> int:
    """Fork until the supervisor closes the channel or dies; returns the exit code. Side effects on the process: it dies
    with its parent; name, logging, no core files; SIGINT, SIGTERM and SIGHUP are ignored."""
    set_process_name(f"vecd-{name}")
    leave_signals_to_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the parent ignored it, the kernel would reap the children
    leave_no_core()
    trace_crashes()
    logs.configure(name, "info", "text", has_thread=False)
    try:
        return _obey(channel)
    except ConnectionError:
        return worker.EXIT_OK  # the supervisor died in the middle of a message
    except Exception:
        log.exception("the %s ends by a bug", name)
        return worker.EXIT_INTERNAL_ERROR


def _obey(channel: Channel) -> int:
    engine: Engine | None = None
    parents = 0, os.getpid()
    for order, fds in _orders(channel):
        if isinstance(order, ForkServerStart):
            logs.change(order.log_level, order.log_format)
            parents = order.parent_pid, os.getpid()
            if not die_with_parent(order.parent_pid):  # loading takes long, and the channel is not read during it
                break
        match order, fds:
            case ForkServerStart(), []:
                try:
                    modules, engine = _load(order, lambda stage: channel.send(Progress(stage)))
                    if not is_single_threaded():
                        raise ModelError(f"loading {', '.join(modules)} started threads, which a fork would lose")
                except (ModelError, NoTasks) as error:
                    channel.send(ChildFailed(str(error)))
                    return worker.EXIT_COULD_NOT_START
                _freeze()
                channel.send(Ready({"modules": modules}))
            case ForkServerStart(), [_]:
                with closing(Channel.from_fd(fds.pop())) as control:
                    _import_for(order)
                    if not is_single_threaded():
                        _report_not_forked(control, "its imports started threads, which a fork would lose")
                        return worker.EXIT_COULD_NOT_START  # the next process may not need them
                    _freeze()
                    _fork("vecd-forkserver", channel, control, partial(serve, control))
            case ForkWorker(), [_, arena_fd, _, *_]:
                with closing(Channel.from_fd(fds.pop(0))) as control:
                    live = partial(worker.run, order, control, arena_fd, fds[1:], parents, engine)
                    _fork(f"vecd-worker-{order.incarnation.worker}", channel, control, live)
            case _:
                log.error("%s with %d descriptors is not for this process", type(order).__name__, len(fds))
    return worker.EXIT_OK


def _orders(channel: Channel) -> Iterator[tuple[Message, list[int]]]:
    """What the supervisor orders, until it closes the channel or dies: with descriptors, of which those that are left
    are closed afterwards."""
    while (received := channel.receive()) is not None:
        yield received
        for fd in received[1]:
            os.close(fd)


def _freeze() -> None:
    """A child's garbage collector skips frozen objects; its marks would copy every page."""
    gc.collect()
    gc.freeze()


def _load(start: ForkServerStart, report: ReportProgress) -> tuple[list[str], Engine | None]:
    """The imported modules, and the engine that the workers share. Raises ModelError and NoTasks."""
    if start.config is None:
        return import_modules(start.modules), None
    config = load(WorkerConfig, start.config)
    check_headers(config.card)
    with ExitStack() as stack:

        def start_selection() -> SelectionProcess:
            return stack.enter_context(SelectionProcess(replace(config, num_threads=1)))

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


def _import_for(order: ForkServerStart) -> None:
    """Import what the fork server will need. That does nothing if it has been imported for another one."""
    path = None
    if order.config is not None:
        try:
            path = expected_path(load(WorkerConfig, {**order.config, "num_threads": 1}))
        except Exception as error:  # of this model alone, whose fork server is going to meet it, and report it
            log.info("the engine of a model is not known before it is loaded: %s: %s", type(error).__name__, error)
    import_modules([ENGINES_WITHOUT_TORCH[path]] if path in ENGINES_WITHOUT_TORCH else order.modules)


def _fork(name: str, channel: Channel, control: Channel, live: Callable[[], int]) -> None:
    """Fork the process `name`, which becomes a child of the supervisor, and whose life is `live`. `channel`: of this
    process; `control`: of the new one, through which it says that it has begun."""
    try:
        assert num_threads() == 1, "a thread would be lost in the fork, with whatever lock it holds"
        with naming_limit():
            pid = os.fork()
    except OSError as error:  # too many processes or open files, too little memory
        _report_not_forked(control, str(error))
        return
    if pid != 0:
        os.waitpid(pid, 0)  # it forks, and ends
        return
    _live_in_child(lambda: _fork_orphan(name, channel, control, live))


def _fork_orphan(name: str, channel: Channel, control: Channel, live: Callable[[], int]) -> int:
    """In the process in between: fork the one that is wanted, and end. Returns the exit code of the one and of the
    other."""
    set_process_name(name)
    channel.close()
    die_with_parent(os.getppid())  # which is killed if this takes too long
    try:
        between = os.pidfd_open(os.getpid())
        with naming_limit():
            pid = os.fork()
    except OSError as error:
        _report_not_forked(control, str(error))
        return worker.EXIT_COULD_NOT_START
    if pid != 0:
        return worker.EXIT_OK
    # The supervisor is the parent once the process in between is dead. One that asked to die with its parent before
    # would die now.
    select.select([between], [], [])
    os.close(between)
    own = os.pidfd_open(os.getpid())
    with suppress(ConnectionError):  # the supervisor has given it up, and `live` ends at once
        control.send(Forked(os.getpid()), [own])
    os.close(own)
    return live()


def _report_not_forked(control: Channel, error: str) -> None:
    log.error("a process cannot be forked: %s", error)
    with suppress(OSError):  # the supervisor has given it up
        control.send(Forked(0, error))


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
