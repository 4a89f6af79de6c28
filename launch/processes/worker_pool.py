"""The workers of one generation: started, restarted when they die, stopped one by one.

Owns the fork server, the ZeroMQ endpoints that its workers are connected to, their arenas, and a coroutine for each
worker, which supervises it: it runs one incarnation after the other. Knows no gateway: what gateways must learn of a
worker goes to a `WorkerObserver`. Called by `vecd.supervisor`, which has one pool for each model, and two during its
reload. Pools share nothing but the count of lives: what happens to one model's workers concerns no other model. A pool
may be stopped and supervised again (`vecd.launch.processes.residency`): it is the same generation, and its endpoints
stay.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from vecd.launch.base.exit_codes import ChildDied, StartFailure, first_of
from vecd.launch.base.programs import self_command
from vecd.launch.config.plan import Plan
from vecd.launch.processes.backoff import Backoff
from vecd.launch.processes.children import Process, System
from vecd.launch.processes.file_access import FilesHang
from vecd.shm.arena import create_arena
from vecd.shm.control import ForkServerStart, ModelIdentity, WorkerReady
from vecd.shm.model_files import source_of
from vecd.shm.wire import Incarnation
from vecd.workers.process.preload import modules_to_preload

log = logging.getLogger("vecd.supervisor")

_DYING_TIMEOUT_S = 5.0
_MODEL_CHANGED_INTERVALS_S = 5.0, 60.0
_LOOK_AFTER_DEATH_S = 0.25
"""The most that the news of a worker's death waits for a look at the model's files, which takes a millisecond."""


@dataclass(slots=True)
class ReadyWorker:
    """What every gateway must learn of an incarnation that is ready."""

    incarnation: Incarnation
    process: Process
    arena_fd: int
    facts: dict[str, Any]
    is_stuck: bool = False
    """A gateway has reported so, and it is being killed for it."""


class ModelLog(logging.LoggerAdapter[logging.Logger]):
    """The supervisor's log, whose lines name the model if the server has several."""

    def __init__(self, model: str | None) -> None:
        super().__init__(log)
        self._model = model

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        if self._model is None:
            super().log(level, msg, *args, **kwargs)
        else:
            self.logger.log(level, f"%s: {msg}", self._model, *args, extra={"fields": {"model": self._model}}, **kwargs)


class WorkerObserver(Protocol):
    """Receives what happens to a pool's workers."""

    def on_ready(self, worker_pool: "WorkerPool", worker: ReadyWorker) -> None: ...

    def on_down(self, worker_pool: "WorkerPool", worker: ReadyWorker, reason: str) -> None:
        """It has been ready, and is dead."""

    def on_broken(self, worker_pool: "WorkerPool", reason: str) -> None:
        """No worker is ready, and one has died again and again."""

    def on_model_changed(self, worker_pool: "WorkerPool") -> None:
        """The model's files have changed since the pool was made, and a worker is about to read them."""

    def on_stage(self, worker_pool: "WorkerPool", stage: str) -> None:
        """The fork server, or the first worker, has begun a stage of its start, before any worker was ready."""

    def on_warning(self, worker_pool: "WorkerPool", warning: str) -> None: ...


class WorkerPool:
    def __init__(
        self,
        generation: int,
        plan: Plan,
        num_gateways: int,
        lives: dict[int, int],
        observer: WorkerObserver,
        system: System,
        *,
        is_only_model: bool = True,
    ) -> None:
        """`lives` counts each worker's incarnations, by index, over all generations: an incarnation never comes twice.
        `is_only_model`: the server has no other model, and messages need not name this one.

        Raises OSError without descriptors for the endpoints.
        """
        self.generation = generation
        self.plan = plan
        self.model = plan.gateway.model
        """Its name."""
        self.log = ModelLog(None if is_only_model else self.model)
        self.prefix = "" if is_only_model else f"{self.model}: "
        """What messages about it to the operator begin with."""
        self.ready: dict[int, ReadyWorker] = {}
        """By the worker's index, which no worker of another model has."""
        self.broken: str | None = None
        """Why there is no use in waiting for a worker; None while there is."""
        self.identity: ModelIdentity | None = None
        """Of the model that it serves; None until it is known. Set by `vecd.launch.processes.identities`."""
        self.changed_files = ""
        """As `Plan.changed_files` last said; see `look_at_files`."""
        self.before_ready: Callable[[], Awaitable[None]] | None = None
        """Awaited before a worker is announced that has read the model's files. Set by `vecd.supervisor`."""
        self._first_worker = plan.gateway.first_worker
        self._lives = lives
        self._observer = observer
        self._files = system.files
        self._has_been_ready = False
        self._looks_again = asyncio.Event()
        """Set for a moment, see `look_again`."""
        timeout_s = plan.settings.start_timeout
        self._fork_server = system.fork_server(_fork_server_start(plan), timeout_s, self._on_load_stage)
        self._endpoints: list[tuple[socket.socket, int]] = []
        try:
            for _ in range(num_gateways):
                self._endpoints.append(system.make_endpoint())
        except OSError:
            self.close()
            raise
        self._supervised: list[asyncio.Task[None]] = []
        """For each worker."""
        self._keeps_fork_server = False
        self._needs_all = True
        self._has_ended = asyncio.Event()
        """`supervise` is not running."""
        self._has_ended.set()

    @property
    def is_complete(self) -> bool:
        return len(self.ready) == len(self.plan.workers)

    def zmq_listening(self, gateway: int) -> int:
        """The descriptor of the socket on which this pool's workers connect to a gateway."""
        return self._endpoints[gateway][0].fileno()

    def pids(self) -> list[int]:
        """Of all its processes."""
        return [*self._fork_server.pids(), *(worker.process.pid for worker in self.ready.values())]

    async def supervise(self, *, needs_all: bool = True) -> None:
        """Keep all workers running until cancelled, or until `stop` has ended them; then it may be called again. On the
        way out none of their processes is left, but for the fork server if `stop` keeps it. Raises StartFailure when
        one cannot start, if none has been ready since this was called, and when one keeps dying that has never been,
        where `needs_all`, or where none has been ready."""
        await self._has_ended.wait()
        self._has_ended.clear()
        self._has_been_ready = self._keeps_fork_server = False
        self._needs_all = needs_all
        self.broken = None
        self._supervised.clear()
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(self._first_worker, self._first_worker + len(self.plan.workers)):
                    self._supervised.append(group.create_task(self._supervise_worker(index)))
        except BaseExceptionGroup as failures:
            failure = first_of(failures)
            if isinstance(failure, StartFailure):
                failure = type(failure)(f"{self.prefix}{failure}")
            raise failure from None
        finally:
            try:
                if not self._keeps_fork_server:
                    await self._fork_server.stop()
            finally:
                self._has_ended.set()

    async def stop(self, *, keeps_fork_server: bool = False) -> None:
        """End the workers one by one; with the last of them `supervise` returns. `keeps_fork_server`: the weights stay
        in memory, and the next `supervise` forks from them; a later `stop` ends the fork server, too. A process that a
        driver keeps from dying is not waited for."""
        self._keeps_fork_server = keeps_fork_server
        was_supervised = self.is_supervised
        for task in self._supervised:
            task.cancel()
            await asyncio.wait([task])
        if not was_supervised and not keeps_fork_server:
            await self._fork_server.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(_DYING_TIMEOUT_S):
                await self._has_ended.wait()

    @property
    def is_supervised(self) -> bool:
        """Whether `supervise` is running."""
        return not self._has_ended.is_set()

    @property
    def reads_model(self) -> bool:
        """Whether a new worker reads the model's files, by itself or by a new fork server."""
        return self.plan.workers[0].device != "cpu" or not self._fork_server.pids()

    def close(self) -> None:
        """Close the endpoints, once no gateway is sent them any more."""
        for listening, address in self._endpoints:
            listening.close()
            os.close(address)
        self._endpoints.clear()

    def kill_stuck(self, incarnation: Incarnation) -> None:
        """Kill a worker that a gateway has reported as stuck. First it is asked to write where it hangs."""
        worker = self.ready.get(incarnation.worker)
        if worker is not None and worker.incarnation == incarnation and not worker.is_stuck:
            self.log.error("%s is stuck and is killed", incarnation)
            worker.is_stuck = True
            worker.process.abort()

    def look_again(self) -> None:
        """Look at once at the model's files, if workers wait for them to be what they were."""
        self._looks_again.set()
        self._looks_again.clear()

    async def look_at_files(self) -> None:
        """Compare the model's files with those that were loaded. Side effect: `changed_files` says it, and the log, if
        it is another. A file system that does not respond changes nothing."""
        folder = self.plan.card.folder
        try:
            found = await self._files.call(folder, self.plan.changed_files)
        except FilesHang:  # which is logged
            return
        if found != self.changed_files:
            self.changed_files = found
            level = logging.WARNING if found else logging.INFO
            state = f"not as loaded: {found}" if found else "as loaded again"
            fields = {"fields": {"model": self.model}}
            log.log(level, "the files of %s in %s are %s", self.model, source_of(folder), state, extra=fields)

    @property
    def why_read_anew(self) -> str:
        """Why a reload is due, once a worker was about to read other files than those that were loaded."""
        return self.changed_files or "the model's files have changed"

    # --- supervision of a worker ----------------------------------------------------------------------------

    async def _supervise_worker(self, index: int) -> None:
        backoff = Backoff(f"worker {index}")
        while True:
            await self._until_model_is_ours()
            self._lives[index] = self._lives.get(index, 0) + 1
            incarnation = Incarnation(index, self._lives[index])
            reason, ready_for_s = await self._run(incarnation)
            self.log.error("%s %s", incarnation, reason)
            backoff.has_been_ready |= self._has_been_ready and not self._needs_all
            delay_s = backoff.delay_after(reason, ready_for_s)
            if backoff.is_broken and not self.ready:
                self._is_broken(f"worker {index} dies again and again: at last it {reason}")
            await asyncio.sleep(delay_s)

    async def _until_model_is_ours(self) -> None:
        """Wait while a new worker would read other files than the running ones have read: a reload replaces the pool.
        Files that hang are waited for, too: the worker would hang in its start."""
        interval_s, longest_s = _MODEL_CHANGED_INTERVALS_S
        while self._has_been_ready and self.reads_model:
            try:
                if not await self._files.call(self.plan.card.folder, self.plan.model_has_changed):
                    return
                self._observer.on_model_changed(self)
                reason = f"{self.why_read_anew}; it is being read anew"
            except FilesHang as error:
                reason = str(error)
            if not self.ready:  # requests can go to no worker, and none will come
                self._is_broken(reason)
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._looks_again.wait()
            interval_s = min(2 * interval_s, longest_s)

    def _is_broken(self, reason: str) -> None:
        if self.broken != reason:
            self.broken = reason
            self._observer.on_broken(self, reason)

    async def _run(self, incarnation: Incarnation) -> tuple[str, float | None]:
        """Run one incarnation to its end; returns how it ended, and for how many seconds it had been ready.

        Raises StartFailure when it reports that it cannot start, before any has ever been ready.
        """
        try:
            arena_fd = create_arena(self.plan.gateway.arena)
        except OSError as error:
            return f"has no memory for its arena of {self.plan.gateway.arena.nbytes} bytes: {error.strerror}", None
        try:
            try:
                config = self.plan.workers[incarnation.worker - self._first_worker]
                addresses = [address for _, address in self._endpoints]
                reads_model = self.reads_model
                process = await self._fork_server.fork(incarnation, config, arena_fd, addresses)
            except (ChildDied, OSError) as error:
                return f"could not be forked: {error}", None
            with process:
                try:
                    ready = await self._await_ready(process)
                except ChildDied as error:
                    return str(error), None
                if reads_model and self.before_ready is not None:
                    await self.before_ready()
                return await self._run_ready(ReadyWorker(incarnation, process, arena_fd, ready.facts))
        finally:
            os.close(arena_fd)

    async def _run_ready(self, worker: ReadyWorker) -> tuple[str, float]:
        self.ready[worker.incarnation.worker] = worker
        self._has_been_ready = True
        self.broken = None
        clock = asyncio.get_running_loop().time
        ready_at = clock()
        self._observer.on_ready(self, worker)
        try:
            await worker.process.died()
        except asyncio.CancelledError:
            worker.process.kill()
            await self._reap_killed(worker)
            raise
        finally:
            del self.ready[worker.incarnation.worker]
        ready_for_s = clock() - ready_at
        reason = await worker.process.ended()
        # Gateways blame inputs only while the files are as loaded. A mount that hangs does not hold the restart up.
        self._look = asyncio.create_task(self.look_at_files())
        await asyncio.wait([self._look], timeout=_LOOK_AFTER_DEATH_S)
        self._observer.on_down(self, worker, reason)
        return reason, ready_for_s

    async def _reap_killed(self, worker: ReadyWorker) -> None:
        """Wait until the fork server, which may go next, has reaped it. A process that a driver keeps from dying is not
        waited for."""
        try:
            async with asyncio.timeout(_DYING_TIMEOUT_S):
                await worker.process.ended()
        except TimeoutError:
            self.log.error("%s does not die, and is left alone", worker.incarnation)

    async def _await_ready(self, process: Process) -> WorkerReady:
        """What the worker reports of itself. Raises StartFailure or ChildDied, which says why it did not get ready."""
        try:
            ready = await process.await_ready(
                self.plan.settings.start_timeout, lambda stage: self._on_worker_stage(process, stage)
            )
        except StartFailure as failure:
            if not self._has_been_ready:
                raise
            raise ChildDied(f"cannot start: {failure}") from failure
        assert isinstance(ready, WorkerReady), ready
        if not self._has_been_ready:
            for warning in ready.warnings:
                self._observer.on_warning(self, f"{self.prefix}{warning}")
        return ready

    # --- what the operator sees -----------------------------------------------------------------------------

    def _on_worker_stage(self, process: Process, stage: str) -> None:
        """One line per stage, not per worker, and none for restarts."""
        if process.name == str(Incarnation(self._first_worker, 1)):
            self._observer.on_stage(self, f"{self.prefix}{stage}")

    def _on_load_stage(self, stage: str) -> None:
        if not self._has_been_ready:
            self._observer.on_stage(self, f"{self.prefix}{stage}")


def _fork_server_start(plan: Plan) -> ForkServerStart:
    """The fork server's configuration. Workers share an engine for processors, which it loads; one for a GPU each
    worker loads itself."""
    config = plan.workers[0]
    level, log_format = config.log_level, config.log_format
    if config.is_dummy:
        return ForkServerStart(os.getpid(), [], log_level=level, log_format=log_format)
    modules = modules_to_preload(plan.card.model_type, config.engine)
    shared = config.to_json() if config.device == "cpu" else None
    return ForkServerStart(os.getpid(), modules, shared, self_command("select"), level, log_format)
