"""A worker's life: become a worker, map the arena, load the engine, say so, serve.

Owns the process: its name, its signals, its exit code. Called by `vecd.workers.process.forkserver` in a freshly forked
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
from vecd.workers.engine import Engine, load_engine, set_num_threads
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
    """Nobody is left to work for. Ends the worker at any stage, with exit code 0."""


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
    """Live as `incarnation` until the supervisor is gone; returns the exit code.

    `channel` is the worker's end of its control connection, `arena_fd` its arena, `address_fds` the O_PATH
    descriptors of the gateways' ZeroMQ sockets, by their index: all owned by this call. `parent_pid` is the fork
    server's, whose death in the moment of the fork would otherwise go unseen. `engine` is the one that the fork server
    has loaded; without it the worker loads its own.

    Side effects on the whole process: name, signal handling, logging, memory priority, torch's threads.
    """
    try:
        _become_worker(config, incarnation, parent_pid if parent_pid is not None else os.getppid())
        _live(config, incarnation, channel, arena_fd, address_fds, engine)
    except SupervisorGone:
        return EXIT_OK
    except ModelError as error:
        log.error("%s", error)
        return _tell_cannot_start(channel, str(error))
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
    # The terminal's Ctrl-C reaches the whole process group; only the supervisor acts on it. SIGTERM, too,
    # may reach every process; a worker serves until its control channel ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    volunteer_for_oom_kill()
    trace_crashes()  # the supervisor sends SIGABRT to one that is stuck
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
        engine = load_engine(config, lambda stage: _tell(channel, Progress(stage)))
    else:
        set_num_threads(config)
    engine.adopt([rows for views in slots for rows in views.rows])
    # What has been loaded stays: the collector need not walk through it again between batches.
    gc.collect()
    gc.freeze()
    with connected(address_fds, incarnation) as sockets:
        _tell(channel, WorkerReady(_facts(config, engine), engine.warnings))
        Loop(sockets, channel, engine, slots, config.arena, config.card).run()


def _facts(config: WorkerConfig, engine: Engine) -> dict[str, Any]:
    return {
        **engine.facts,
        "pid": os.getpid(),
        "parent_pid": os.getppid(),
        "threads": config.num_threads,
        "private_memory_mb": private_memory_mb(),
    }


def _tell(channel: Channel, message: Message) -> None:
    """Raises SupervisorGone when nobody hears it."""
    try:
        channel.send(message)
    except ConnectionError:
        raise SupervisorGone from None


def _tell_cannot_start(channel: Channel, why: str) -> int:
    try:
        _tell(channel, ChildFailed(why))
    except SupervisorGone:
        return EXIT_OK
    return EXIT_COULD_NOT_START
