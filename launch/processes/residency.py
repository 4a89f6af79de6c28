"""Which models are loaded: loads them for the requests that wait, and unloads or parks those that must go.

Owns the state of every model and its changes, the tasks that carry them out, and the `ModelIs` that gateways are sent.
What is to be done is decided in `vecd.launch.processes.model_life`, whenever a message has come, something has ended,
or a time is over. A load or the end of a model runs in a task of its own: it holds up no message, and no other model.
The first load of a model, at the server's start or in a reload, is begun by `vecd.supervisor` or
`vecd.launch.processes.reload`, which decide what its failure means; one that fails here fails for its requests alone.

Messages to gateways (→) and from them (←) when a model is unloaded and is needed again:

    → ModelIs draining   ← ModelDrained   → WorkerDown …   → ModelIs unloaded
    ← ModelWanted   → ModelIs loading   → WorkerUp …   → ModelIs ready
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from vecd.launch.base.exit_codes import StartFailure
from vecd.launch.config.plan import Plan
from vecd.launch.memory.book import MemoryBook
from vecd.launch.memory.footprint import Footprint, measured
from vecd.launch.processes.eviction import choose
from vecd.launch.processes.file_access import FileAccess, FilesHang
from vecd.launch.processes.gateway_pool import GatewayPool, Link
from vecd.launch.processes.model_life import (
    BeginLoad,
    BeginUnload,
    LoadHistory,
    MeasureMemory,
    ModelLife,
    RefuseLoad,
    decide,
    held_nbytes,
)
from vecd.launch.processes.worker_pool import WorkerPool
from vecd.shm.control import KeepAlive, Message, ModelAsked, ModelIs, ModelUsed, ModelWanted
from vecd.shm.residence import ModelState

log = logging.getLogger("vecd.supervisor")


class Residency:
    def __init__(
        self,
        worker_pools: Mapping[int, WorkerPool],
        states: dict[int, ModelIs],
        gateway_pool: GatewayPool,
        files: FileAccess,
        memory: MemoryBook,
        start_task: "Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]",
        changed: asyncio.Event,
        on_model_changed: Callable[[WorkerPool], None],
        on_state: Callable[[], None],
    ) -> None:
        """`worker_pools`, by generation, is the supervisor's. `states`, of generations whose state gateways are told,
        is written here and read by `gateway_pool`. `changed` is set whenever a gateway or its link has changed.
        `on_model_changed` is called before a load whose files are not those of its plan; it reloads. `on_state` is
        called after each change."""
        self._worker_pools = worker_pools
        self._states = states
        self._gateway_pool = gateway_pool
        self._files = files
        self._memory = memory
        self._start_task = start_task
        self._changed = changed
        self._on_model_changed = on_model_changed
        self._on_state = on_state
        self._lives: dict[int, ModelLife] = {}
        self._histories: dict[str, LoadHistory] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """By generation: the load that was begun here, until its workers are stopped."""
        self._ending: dict[int, asyncio.Task[None]] = {}
        self._wakes = asyncio.Event()

    # --- the generations ----------------------------------------------------------------------------------------------

    async def add(self, worker_pool: WorkerPool, *, is_loaded: bool) -> None:
        """Begin with a generation. `is_loaded`: the caller supervises its workers until they are stopped for the first
        time; otherwise it is loaded when it is needed. Raises FilesHang or OSError if its files cannot be read."""
        plan = worker_pool.plan
        expected = await self._files.call(plan.card.folder, lambda: self._memory.expect(plan))
        now = _now()
        can_park = plan.workers[0].device == "cpu"
        life = self._lives[worker_pool.generation] = ModelLife(
            worker_pool.generation, worker_pool.model, plan.gateway.keep_alive_s, plan.gateway.is_pinned, can_park,
            expected.total, expected.parked if can_park else 0, plan.settings.request_timeout,
            self._histories.setdefault(worker_pool.model, LoadHistory()), now,
        )  # fmt: skip
        life.history.is_told |= not is_loaded
        if is_loaded:
            life.begin_load(now, is_first=True)
        self._tell(life)

    def stays_loaded(self, plan: Plan) -> bool:
        """Whether a new generation with this plan is to be loaded before it takes over: if the one before is, or if
        there is none and it is to be loaded at the start."""
        generation = self._gateway_pool.active.get(plan.gateway.model)
        if generation is None:
            return not plan.gateway.loads_on_demand
        return self._lives[generation].is_resident

    async def forget(self, generation: int) -> None:
        """Leave a generation as it is. The caller ends it, and removes its worker pool after this."""
        self._lives.pop(generation, None)
        self._states.pop(generation, None)
        if (ending := self._ending.pop(generation, None)) is not None:
            ending.cancel()
            await asyncio.wait([ending])
        await self._cancel_load(generation)
        self._wakes.set()

    def state(self, generation: int) -> ModelState:
        return self._lives[generation].state

    def description(self, generation: int) -> str:
        """Its state, and why it has failed if it has."""
        life = self._lives[generation]
        return f"failed: {life.reason}" if life.state is ModelState.FAILED else life.state

    # --- events -------------------------------------------------------------------------------------------------------

    def on_message(self, link: Link, message: Message) -> bool:
        """Returns whether it was for this object. One about a generation that has ended is ignored."""
        if not isinstance(message, ModelWanted | ModelUsed | ModelAsked | KeepAlive):
            return False
        if (life := self._lives.get(message.generation)) is not None:
            self._on_message(life, link, message)
        return True

    def _on_message(self, life: ModelLife, link: Link, message: Message) -> None:
        now = _now()
        match message:
            case ModelWanted():
                self._want(life)
            case ModelUsed():
                life.use(link.life, message.compute_s, message.num_requests, now)
            case KeepAlive():
                life.keep(message.seconds)
            case ModelAsked(action="load"):
                life.not_before = min(life.not_before, now)
                self._want(life)
            case ModelAsked():
                life.ask_to_go(message.action)
                self._tell(life)
        self._wakes.set()

    def _want(self, life: ModelLife) -> None:
        life.want(_now())
        self._tell(life)

    def on_gateways_changed(self) -> None:
        """A gateway may have died, with its requests."""
        for life in self._lives.values():
            life.forget_gateways(link.life for link in self._gateway_pool.ready_links)
        self._wakes.set()

    def on_worker_ready(self, worker_pool: WorkerPool) -> bool:
        """Returns whether this is part of a load that was begun here."""
        if (life := self._lives.get(worker_pool.generation)) is None:
            return False  # it is being ended
        if life.state is ModelState.LOADING:
            seconds = life.become_ready(_now())
            if life.has_begun:
                mb = life.held_nbytes >> 20
                worker_pool.log.info("loaded in %.1f s%s", seconds, f", about {mb} MB" if mb else "")
            if self._memory.budget is None and len(self._lives) == 1 and not life.history.is_told:
                life.measure_at = None  # nothing depends on it
            self._tell(life)
            self._wakes.set()
        is_part = life.has_begun and not life.is_complete
        life.is_complete |= worker_pool.is_complete
        return is_part

    # --- decisions and what follows -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled, load and unload what is to be. Sleeps while nothing happens and nothing is due."""
        while True:
            self._wakes.clear()
            due = self._act()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._wakes.wait()

    def _act(self) -> float | None:
        now, free_nbytes = _now(), None
        if self._memory.budget is not None:
            held = held_nbytes(self._lives.values())
            free_nbytes = self._memory.budget - self._memory.server_nbytes - held
        decisions, due = decide(list(self._lives.values()), free_nbytes, choose, now)
        for decision in decisions:
            match decision:
                case BeginLoad(life):
                    life.begin_load(now)
                    self._tell(life)
                    self._tasks[life.generation] = self._start_task(self._load(life))
                case BeginUnload(life, reason, parks):
                    self._begin_unload(life, reason, parks=parks)
                case RefuseLoad(life, reason):
                    self._refuse(life, reason)
                case MeasureMemory(life):
                    life.measure_at = None
                    self._start_task(self._measure(life, self._worker_pools[life.generation]))
        return due

    async def _load(self, life: ModelLife) -> None:
        """Supervise the workers of a load from its beginning until they are stopped."""
        worker_pool = self._worker_pools[life.generation]
        plan = worker_pool.plan
        try:
            if worker_pool.reads_model and await self._files.call(plan.card.folder, plan.model_has_changed):
                self._on_model_changed(worker_pool)
                raise StartFailure(f"{worker_pool.why_read_anew}; it is being read anew")
            await worker_pool.supervise(needs_all=False)
        except (StartFailure, FilesHang, OSError) as error:
            reason = str(error).removeprefix(worker_pool.prefix)
        except Exception as error:
            log.exception("internal error in a load")
            reason = f"unexpected {type(error).__name__}"
        else:
            return
        self._gateway_pool.withdraw_workers(life.generation, reason)
        self._fail(life, reason)

    def _refuse(self, life: ModelLife, reason: str) -> None:
        """It cannot be loaded. If it was parked, its weights go."""
        worker_pool = self._worker_pools[life.generation]
        self._fail(life, reason)
        if worker_pool.pids() and not worker_pool.is_supervised:
            self._start_task(worker_pool.stop())

    def _fail(self, life: ModelLife, reason: str) -> None:
        if life.generation not in self._lives or life.state is ModelState.DRAINING:
            return
        pause_s = life.fail(reason, _now())
        self._worker_pools[life.generation].log.error(
            "cannot be loaded, and is not tried again for %g s: %s", pause_s, reason
        )
        self._tell(life)
        self._wakes.set()

    def _begin_unload(self, life: ModelLife, reason: str, *, parks: bool) -> None:
        life.begin_draining(reason, _now(), parks=parks)
        self._tell(life)
        self._ending[life.generation] = self._start_task(self._unload(life))

    async def _unload(self, life: ModelLife) -> None:
        """Let the gateways finish what is at the workers, and end these."""
        worker_pool, began_at = self._worker_pools[life.generation], _now()
        held_mb = life.held_nbytes >> 20
        await self._await_drained(worker_pool)
        await self._cancel_load(life.generation)
        await worker_pool.stop(keeps_fork_server=life.is_parking)
        self._gateway_pool.withdraw_workers(life.generation, f"unloaded: {life.reason}")
        life.end_draining(_now())
        worker_pool.log.info(
            "%s in %.1f s%s: %s", life.state, _now() - began_at, f", about {held_mb} MB before" if held_mb else "",
            life.reason,
        )  # fmt: skip
        del self._ending[life.generation]
        self._tell(life, has_just_gone=True)
        self._tell(life)
        self._wakes.set()

    async def _cancel_load(self, generation: int) -> None:
        """End a load that still looks at the files. One that supervises its workers ends with these."""
        task = self._tasks.pop(generation, None)
        if task is not None and not self._worker_pools[generation].is_supervised:
            task.cancel()
            await asyncio.wait([task])

    async def _await_drained(self, worker_pool: WorkerPool) -> None:
        """Wait for every gateway, as long as a batch may take."""
        timeout_s = worker_pool.plan.settings.batch_timeout
        try:
            async with asyncio.timeout(timeout_s):
                while not self._gateway_pool.is_drained(worker_pool.generation):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            worker_pool.log.warning("a gateway still has batches after %g s, which are given up", timeout_s)

    # --- memory -------------------------------------------------------------------------------------------------------

    async def _measure(self, life: ModelLife, worker_pool: WorkerPool) -> None:
        """Replace what was expected by what it needs, unless not all of it is there. Workers that have not computed a
        full batch yet will need more, so that they count with what was expected at least."""
        ready_at = life.since
        if not worker_pool.is_complete:
            return
        pids, workers = worker_pool.pids(), [worker.process.pid for worker in worker_pool.ready.values()]

        def measure() -> Footprint | None:
            if (footprint := measured(pids, workers)) is not None:
                expected = self._memory.expect(worker_pool.plan)
                footprint = replace(footprint, per_worker=max(footprint.per_worker, expected.per_worker))
                self._memory.remember(worker_pool.plan, footprint)
            return footprint

        with suppress(FilesHang, OSError):
            footprint = await self._files.call("the memory of models", measure)
            if footprint is not None and life.state is ModelState.READY and life.since == ready_at:
                life.measured(footprint.total, footprint.parked)
                life.history.is_told = True
                self._tell(life)
                self._wakes.set()

    # --- gateways -----------------------------------------------------------------------------------------------------

    def _tell(self, life: ModelLife, *, has_just_gone: bool = False) -> None:
        """Let gateways know of a change, if they are told of this model at all. `has_just_gone`: as in `message`."""
        if life.history.is_told and life.generation in self._lives:
            self._states[life.generation] = life.message(self._ahead_s(life), _now(), has_just_gone=has_just_gone)
        self._gateway_pool.reconcile()
        self._changed.set()
        self._on_state()

    def _ahead_s(self, life: ModelLife) -> float:
        """Expected seconds of the loads that begin before one that waits."""
        if not life.is_waiting:
            return 0.0
        wanted_at = life.wanted_at or -math.inf
        before = [
            each.load_s for each in self._lives.values() if each.is_waiting and (each.wanted_at or 0.0) < wanted_at
        ]
        return sum(before) / 2


def _now() -> float:
    """Seconds, by the clock that timeouts go by."""
    return asyncio.get_running_loop().time()
