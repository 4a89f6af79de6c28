"""A worker process from its start to its end: set up the process, map the arena, load the engine, report ready, serve.

Owns the process: its signals, its exit code.
"""

import gc
import logging
import os
from collections.abc import Sequence

from vecd.base import logs
from vecd.base.files import load
from vecd.base.kernel import (
    die_with_parent,
    leave_signals_to_parent,
    outlive_sent_faults,
    trace_crashes,
    volunteer_for_oom_kill,
)
from vecd.base.tasks import ZMQ_THREADS, NoTasks, require_threads
from vecd.model.card import ModelError
from vecd.shm.control import Channel, ChildFailed, ForkWorker, Progress, Ready
from vecd.shm.views import map_arena
from vecd.workers.batch import Engine
from vecd.workers.config import WorkerConfig
from vecd.workers.load import load_engine
from vecd.workers.machine import private_memory_mb
from vecd.workers.process.loop import EngineLost, Loop, connected

log = logging.getLogger("vecd.worker")

EXIT_OK, EXIT_COULD_NOT_START, EXIT_INTERNAL_ERROR = 0, 3, 70


def run(
    order: ForkWorker,
    channel: Channel,
    arena_fd: int,
    address_fds: Sequence[int],
    parents: tuple[int, int],
    engine: Engine | None,
) -> int:
    """Run until the supervisor ends; returns the exit code. Owns `channel`, the worker's end of its control connection,
    `arena_fd`, and `address_fds`, the O_PATH descriptors of the gateways' ZeroMQ sockets. `parents`: the pids of the
    supervisor, whose death during the fork would not be noticed otherwise, and of the fork server. `engine`: None if
    the worker loads its own.

    Side effects on the whole process: signal handling, logging, memory priority, torch's threads.
    """
    try:
        if not die_with_parent(parents[0]):
            return EXIT_OK
        leave_signals_to_parent()
        volunteer_for_oom_kill()
        outlive_sent_faults()
        trace_crashes()  # the supervisor sends SIGABRT to a worker that is stuck
        config = load(WorkerConfig, order.config)
        logs.configure(f"worker-{order.incarnation.worker}", config.log_level, config.log_format)
        slots = map_arena(arena_fd, config.arena, writable=True)
        os.close(arena_fd)
        try:
            require_threads(ZMQ_THREADS + config.num_threads - 1)
            if engine is None:
                engine = load_engine(config, lambda stage: channel.send(Progress(stage)))
            engine.use_threads(config.num_threads)
        except (ModelError, NoTasks) as error:
            log.error("%s", error)
            channel.send(ChildFailed(str(error)))
            return EXIT_COULD_NOT_START
        engine.adopt([rows for views in slots for rows in views.rows])
        choices: Sequence[int] = [config.num_threads]
        if config.max_threads > 1:
            # At most one worker of a server has weights of its own.
            choices = engine.allow_leases(config.max_threads, may_copy_weights=order.incarnation.worker == 0)
        # Loaded objects stay; the collector need not examine them again between batches.
        gc.collect()
        gc.freeze()
        facts = {
            **engine.facts,
            "pid": os.getpid(),
            "parent_pid": parents[1],
            "threads": config.num_threads,
            "thread_choices": list(choices),
            "private_memory_mb": private_memory_mb(),
        }
        with connected(address_fds, order.incarnation) as sockets:
            channel.send(Ready(facts, engine.warnings))
            Loop(sockets, channel, engine, slots, config.arena, config.card).run()
        return EXIT_OK
    except ConnectionError:
        return EXIT_OK  # the supervisor has closed the control channel
    except EngineLost as error:
        log.error("%s ends: %s", order.incarnation, error)
        return EXIT_INTERNAL_ERROR
    except Exception:
        log.exception("%s ends by a bug", order.incarnation)
        return EXIT_INTERNAL_ERROR
