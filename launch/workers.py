"""The workers of one generation: started, restarted when they die, stopped one by one.

Owns the fork server, the ZeroMQ endpoints, the arenas, and a coroutine for each worker, which runs one incarnation
after the other. Knows no gateway: what gateways must learn goes to a `WorkerObserver`. A pool may be stopped and
supervised again (`vecd.launch.residency`): it is the same generation, and its endpoints stay.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from vecd.base.failures import ChildDied, StartFailure, first_of
from vecd.base.files import dump
from vecd.launch.children import Process, System
from vecd.launch.config.plan import Plan
from vecd.launch.files import FilesHang
from vecd.model.files import source_of
from vecd.shm.arena import create_arena
from vecd.shm.control import ForkServerStart, ForkWorker, ModelIdentity, ModelIs, ModelState, Ready
from vecd.shm.wire import Incarnation
from vecd.workers.config import modules_to_preload

# Decides how long to wait before a child that died is restarted, and when to give up.
#
# The first restart is at once, the next after 0.5, 1, 2 … 30 s, until a child has been ready for a while. One that dies
# again and again without ever having been ready ends the server. One that has been ready does not: a request may kill
# it, and ending the server would fail all other requests. It then counts as broken, and is restarted every 30 s. A load
# of a model that has failed is tried again after 1, 2, 4 … 300 s, if there is a request for it then.

_MAX_DEATHS_BEFORE_READY = 3
_QUICK_LIFE_S = 0.25
"""A child that was ready for less has died quickly. With 1 s, killing a random one of two workers each second made both
wait, and after a minute the model counted as broken."""
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 30.0

_DEATHS_OF_BROKEN = 6


@dataclass(slots=True)
class Backoff:
    name: str
    has_been_ready: bool = False
    num_quick_deaths: int = 0

    @property
    def is_broken(self) -> bool:
        return self.num_quick_deaths >= _DEATHS_OF_BROKEN

    def delay_after(self, reason: str, ready_for_s: float | None) -> float:
        """Seconds to wait before the next restart, after a process that was ready for `ready_for_s`, or never (None).
        Raises StartFailure when the child has died too often without ever having been ready."""
        if ready_for_s is not None:
            self.has_been_ready = True
            if ready_for_s >= _QUICK_LIFE_S:
                self.num_quick_deaths = 0
        self.num_quick_deaths += 1
        if not self.has_been_ready and self.num_quick_deaths >= _MAX_DEATHS_BEFORE_READY:
            raise StartFailure(f"{self.name} keeps dying ({self.num_quick_deaths} times): at last it {reason}")
        if self.num_quick_deaths == 1:
            return 0.0
        return min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(16, self.num_quick_deaths - 2))


log = logging.getLogger("vecd.supervisor")

_DYING_TIMEOUT_S = 5.0
_MODEL_CHANGED_INTERVALS_S = 5.0, 60.0
_LOOK_AFTER_DEATH_S = 0.25
"""The most that the news of a death waits for a look at the model's files, which takes a millisecond."""


@dataclass(slots=True)
class ReadyWorker:
    incarnation: Incarnation
    process: Process
    arena_fd: int
    facts: dict[str, Any]
    is_stuck: bool = False


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
    def on_ready(self, worker_pool: "WorkerPool", worker: ReadyWorker) -> None: ...

    def on_down(self, worker_pool: "WorkerPool", worker: ReadyWorker, reason: str) -> None:
        """It has been ready, and is dead."""

    def on_broken(self, worker_pool: "WorkerPool", reason: str) -> None:
        """No worker is ready, and one has died again and again."""

    def on_model_changed(self, worker_pool: "WorkerPool", why: str) -> None:
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
    ) -> None:
        """`lives` counts each worker's incarnations, by index, over all generations: an incarnation never comes twice.
        Raises OSError without descriptors for the endpoints.
        """
        self.generation = generation
        self.plan = plan
        self.model = plan.gateway.model
        self.log = ModelLog(None if plan.is_only_model else self.model)
        self.prefix = "" if plan.is_only_model else f"{self.model}: "
        """What messages about it to the operator begin with."""
        self.ready: dict[int, ReadyWorker] = {}
        self.broken: str | None = None
        """Why there is no use in waiting for a worker; None while there is."""
        self.failure = ""
        """Why the generation cannot take over."""
        self.identity: ModelIdentity | None = None
        """Set by `vecd.launch.identities`; None until it is known."""
        self.state: ModelIs | None = None
        """What gateways are told; None if that is nothing. Set by `vecd.launch.residency`."""
        self.changed_files = ""
        self.before_ready: Callable[[], Awaitable[None]] | None = None
        """Awaited before a worker is announced that has read the model's files."""
        self._first_worker = plan.gateway.first_worker
        self._lives = lives
        self._observer = observer
        self._files = system.files
        self._has_been_ready = False
        self._looks_again = asyncio.Event()
        self._fork_server = system.fork_server(
            _fork_server_start(plan), plan.settings.start_timeout, self._on_load_stage
        )
        self._endpoints: list[tuple[socket.socket, int]] = []
        try:
            for _ in range(num_gateways):
                self._endpoints.append(system.make_endpoint())
        except OSError:
            self.close()
            raise
        self._supervised: list[asyncio.Task[None]] = []
        self._needs_all = True
        self._has_ended = asyncio.Event()
        self._has_ended.set()

    @property
    def is_complete(self) -> bool:
        return len(self.ready) == len(self.plan.workers)

    @property
    def is_unloaded(self) -> bool:
        return self.state is not None and self.state.state not in (ModelState.LOADING, ModelState.READY)

    def zmq_listening(self, gateway: int) -> int:
        return self._endpoints[gateway][0].fileno()

    def pids(self) -> list[int]:
        return [*self._fork_server.pids(), *(worker.process.pid for worker in self.ready.values())]

    async def supervise(self, *, needs_all: bool = True) -> None:
        """Keep all workers running until cancelled, or until `stop` has ended them; then it may be called again. On the
        way out none of their processes is left. Raises StartFailure when one cannot start, if none has been ready since
        this was called, and when one keeps dying that has never been, where `needs_all`, or where none has been
        ready."""
        await self._has_ended.wait()
        self._has_ended.clear()
        self._has_been_ready = False
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
                await self._fork_server.stop()
            finally:
                self._has_ended.set()

    async def stop(self) -> None:
        """End the workers one by one; with the last of them `supervise` returns. A process that a driver keeps from
        dying is not waited for."""
        if not self.is_supervised:
            await self._fork_server.stop()  # a second cancellation may have ended `supervise` before it had
        for task in self._supervised:
            task.cancel()
            await asyncio.wait([task])
        with suppress(TimeoutError):
            async with asyncio.timeout(_DYING_TIMEOUT_S):
                await self._has_ended.wait()

    @property
    def is_supervised(self) -> bool:
        return not self._has_ended.is_set()

    @property
    def reads_model(self) -> bool:
        return self.plan.workers[0].device != "cpu" or not self._fork_server.pids()

    def close(self) -> None:
        for listening, address in self._endpoints:
            listening.close()
            os.close(address)
        self._endpoints.clear()

    def kill_stuck(self, incarnation: Incarnation) -> None:
        """Kill a worker that a gateway has reported as stuck. First it is asked to write where it hangs."""
        for worker in self.ready.values():
            if worker.incarnation == incarnation and not worker.is_stuck:
                worker.is_stuck = True
                worker.process.abort()
                why = "stopped" if worker.process.was_stopped else "stuck"
                self.log.error("%s is %s and is killed", incarnation, why)

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

    async def why_read_anew(self) -> str:
        """Why the model is read anew before a process may read its files; "" if they are those of the plan. Raises
        FilesHang."""
        if not await self._files.call(self.plan.card.folder, self.plan.model_has_changed):
            return ""
        why = self.changed_files or "the model's files have changed"
        self._observer.on_model_changed(self, why)
        return f"{why}; it is being read anew"

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
        """Wait while a new worker would read other files than the running ones have read, or would hang with them: a
        reload replaces the pool."""
        interval_s, longest_s = _MODEL_CHANGED_INTERVALS_S
        while self._has_been_ready and self.reads_model:
            try:
                if not (reason := await self.why_read_anew()):
                    return
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
        """Returns how it ended, and for how many seconds it had been ready. Raises StartFailure when it reports that it
        cannot start, before any has ever been ready."""
        try:
            arena_fd = create_arena(self.plan.gateway.arena)
        except OSError as error:
            return f"has no memory for its arena of {self.plan.gateway.arena.nbytes} bytes: {error.strerror}", None
        try:
            try:
                config = dump(self.plan.workers[incarnation.worker - self._first_worker])
                order = ForkWorker(incarnation, config)
                fds = [arena_fd, *(address for _, address in self._endpoints)]
                reads_model = self.reads_model
                process = await self._fork_server.fork(str(incarnation), order, fds)
            except ChildDied as error:
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
        """A process that a driver keeps from dying is not waited for."""
        try:
            async with asyncio.timeout(_DYING_TIMEOUT_S):
                await worker.process.ended()
        except TimeoutError:
            self.log.error("%s does not die, and is left alone", worker.incarnation)

    async def _await_ready(self, process: Process) -> Ready:
        is_first = process.name == str(Incarnation(self._first_worker, 1))  # a line per stage, and none for restarts
        on_stage = self._on_load_stage if is_first else lambda stage: None
        try:
            ready = await process.await_ready(self.plan.settings.start_timeout, on_stage)
        except StartFailure as failure:
            if not self._has_been_ready:
                raise
            raise ChildDied(f"cannot start: {failure}") from failure
        if not self._has_been_ready:
            for warning in ready.warnings:
                self._observer.on_warning(self, f"{self.prefix}{warning}")
        return ready

    # --- what the operator sees -----------------------------------------------------------------------------

    def _on_load_stage(self, stage: str) -> None:
        if not self._has_been_ready:
            self._observer.on_stage(self, f"{self.prefix}{stage}")


def _fork_server_start(plan: Plan) -> ForkServerStart:
    """Workers share an engine for processors; one for a GPU each worker loads itself."""
    config = plan.workers[0]
    modules = [] if config.is_dummy else modules_to_preload(plan.card.model_type, config.engine)
    shared = dump(config) if config.device == "cpu" and not config.is_dummy else None
    return ForkServerStart(os.getpid(), modules, shared, config.log_level, config.log_format)
