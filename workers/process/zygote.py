"""The process that fork servers are forked from, in a server of several models.

It has imported what their engines need, and holds no weights: an import is paid for once, and the processes of all
models share the pages of the libraries. It imports a module when the first fork server needs it, so there is no torch
in it before a model needs torch. Like a fork server, it starts no thread.

A fork server must outlive the zygote, and die with the supervisor. So it becomes the supervisor's own child: a process
in between forks it and ends, and the supervisor adopts orphans (`vecd.workers.process.kernel.adopt_orphans`). From then
on it is what it is without a zygote, for itself, for the kernel and for the supervisor.
"""

import gc
import logging
import os
import select
import traceback
from contextlib import closing, suppress

from vecd.shm import logs
from vecd.shm.control import Channel, ForkServerForked, ForkServerStart
from vecd.shm.tasks import naming_limit
from vecd.workers.config import WorkerConfig
from vecd.workers.engines.load import expected_path
from vecd.workers.process import forkserver, main
from vecd.workers.process.kernel import die_with_parent, is_single_threaded
from vecd.workers.process.preload import ENGINES_WITHOUT_TORCH

log = logging.getLogger("vecd.zygote")


def serve(channel: Channel) -> int:
    """Fork fork servers until the supervisor closes the channel or dies; returns the exit code.

    Side effects on the process: it dies with its parent, once an order has named that; those of
    `vecd.workers.process.forkserver.run_process`.
    """
    return forkserver.run_process("zygote", lambda: _run(channel))


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
                        return main.EXIT_COULD_NOT_START  # the next zygote may not need them
                    _fork(control, channel)
            case message, fds:
                log.error("%s with %d descriptors is not for a zygote", type(message).__name__, len(fds))
                for fd in fds:
                    os.close(fd)
    return main.EXIT_OK


def _import_for(order: ForkServerStart) -> None:
    """Import what the fork server is going to need. That does nothing if it has been imported for another one."""
    path = None
    if order.config is not None:
        try:
            path = expected_path(WorkerConfig.from_json({**order.config, "num_threads": 1}))
        except Exception as error:  # of this model alone, whose fork server is going to meet it, and report it
            log.info("the engine of a model is not known before it is loaded: %s: %s", type(error).__name__, error)
    forkserver.import_modules([ENGINES_WITHOUT_TORCH[path]] if path in ENGINES_WITHOUT_TORCH else order.modules)
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
    code = main.EXIT_INTERNAL_ERROR
    try:
        channel.close()
        code = _fork_orphan(control)
    except BaseException:
        traceback.print_exc()
    finally:
        forkserver.exit_at_once(code)


def _fork_orphan(control: Channel) -> int:
    """In the process in between: fork the fork server, and end. Returns the exit code of the one and of the other."""
    try:
        between = os.pidfd_open(os.getpid())
        with naming_limit():
            pid = os.fork()
    except OSError as error:
        _report_not_forked(control, str(error))
        return main.EXIT_COULD_NOT_START
    if pid != 0:
        return main.EXIT_OK
    # The supervisor is the parent once the process in between is dead. A fork server that asked to die with its parent
    # before would die now.
    select.select([between], [], [])
    os.close(between)
    own = os.pidfd_open(os.getpid())
    with suppress(ConnectionError):  # the supervisor has given it up, and `serve` ends at once
        control.send(ForkServerForked(os.getpid()), [own])
    os.close(own)
    return forkserver.serve(control)


def _report_not_forked(control: Channel, error: str) -> None:
    log.error("a fork server cannot be forked: %s", error)
    with suppress(OSError):  # the supervisor has given it up
        control.send(ForkServerForked(0, error))
