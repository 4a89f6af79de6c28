"""A worker process from its start to its end: set up the process, map the arena, load the engine, report ready, serve.

Owns the process: its name, its signals, its exit code. Called by `vecd.workers.process.forkserver` in a newly forked
child.
"""

import gc
import logging
import os
import signal
from collections.abc import Sequence
from typing import Any

from vecd.shm import logs
from vecd.shm.card import ModelError
from vecd.shm.control import Channel, ChildFailed, Message, Progress, WorkerReady
from vecd.shm.views import map_arena
from vecd.shm.wire import Incarnation
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import Engine
from vecd.workers.engines.load import load_engine, set_num_threads
from vecd.workers.process.kernel import (
    die_with_parent,
    private_memory_mb,
    set_process_name,
    trace_crashes,
    volunteer_for_oom_kill,
)
from vecd.workers.process.loop import EngineLost, Loop, connected

log = logging.getLogger("vecd.worker")

EXIT_OK, EXIT_COULD_NOT_START, EXIT_INTERNAL_ERROR = 0, 3, 70


class SupervisorGone(Exception):
    """The supervisor has ended. Ends the worker at any stage, with exit code 0."""


def run(
    config: WorkerConfig,
    incarnation: Incarnation,
    channel: Channel,
    arena_fd: int,
    address_fds: Sequence[int],
    *,
    parent_pid: int | None = None,
    engine: Engine | None = None,
) -> int:
    """Run as `incarnation` until the supervisor ends; returns the exit code.

    `channel` is the worker's end of its control connection, `arena_fd` its arena, `address_fds` the O_PATH descriptors
    of the gateways' ZeroMQ sockets, by the gateway's index; this call owns all of them. `parent_pid` is the fork
    server's; without it, the fork server's death during the fork would not be noticed. `engine` is the engine that the
    fork server has loaded; if it is None, the worker loads its own.

    Side effects on the whole process: name, signal handling, logging, memory priority, torch's threads.
    """
    try:
        _become_worker(config, incarnation, parent_pid if parent_pid is not None else os.getppid())
        _live(config, incarnation, channel, arena_fd, address_fds, engine)
    except SupervisorGone:
        return EXIT_OK
    except ModelError as error:
        log.error("%s", error)
        return _report_cannot_start(channel, str(error))
    except EngineLost as error:
        log.error("%s ends: %s", incarnation, error)
        return EXIT_INTERNAL_ERROR
    except Exception:
        log.exception("%s ends by a bug", incarnation)
        return EXIT_INTERNAL_ERROR
    return EXIT_OK


def _become_worker(config: WorkerConfig, incarnation: Incarnation, parent_pid: int) -> None:
    if not die_with_parent(parent_pid):
        raise SupervisorGone
    set_process_name(f"vecd-worker-{incarnation.worker}")
    # Ctrl-C in a terminal reaches the whole process group, and SIGTERM may reach every process. Only the supervisor
    # acts on them; a worker serves until its control channel ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    volunteer_for_oom_kill()
    trace_crashes()  # the supervisor sends SIGABRT to a worker that is stuck
    logs.configure(f"worker-{incarnation.worker}", config.log_level, config.log_format)


def _live(
    config: WorkerConfig,
    incarnation: Incarnation,
    channel: Channel,
    arena_fd: int,
    address_fds: Sequence[int],
    engine: Engine | None,
) -> None:
    slots = map_arena(arena_fd, config.arena, writable=True)
    os.close(arena_fd)
    if engine is None:
        engine = load_engine(config, lambda stage: _send(channel, Progress(stage)))
    else:
        set_num_threads(config)
    engine.adopt([rows for views in slots for rows in views.rows])
    # Loaded objects stay; the collector need not examine them again between batches.
    gc.collect()
    gc.freeze()
    with connected(address_fds, incarnation) as sockets:
        _send(channel, WorkerReady(_facts(config, engine), engine.warnings))
        Loop(sockets, channel, engine, slots, config.arena, config.card).run()


def _facts(config: WorkerConfig, engine: Engine) -> dict[str, Any]:
    return {
        **engine.facts,
        "pid": os.getpid(),
        "parent_pid": os.getppid(),
        "threads": config.num_threads,
        "private_memory_mb": private_memory_mb(),
    }


def _send(channel: Channel, message: Message) -> None:
    """Raises SupervisorGone when the supervisor has closed the channel."""
    try:
        channel.send(message)
    except ConnectionError:
        raise SupervisorGone from None


def _report_cannot_start(channel: Channel, why: str) -> int:
    try:
        _send(channel, ChildFailed(why))
    except SupervisorGone:
        return EXIT_OK
    return EXIT_COULD_NOT_START
