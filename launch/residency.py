"""Which models are loaded: loads them for the requests that wait, and unloads those that must go.

Owns the state of every model, the tasks that change it, and the `ModelIs` that gateways are sent. The first load of a
model, at the server's start or in a reload, is begun by `vecd.supervisor` or `vecd.launch.reload`, which decide what
its failure means; one that fails here fails for its requests alone.

Messages to gateways (→) and from them (←) when a model is unloaded and is needed again:

    → ModelIs draining   ← ModelDrained   → WorkerDown …   → ModelIs unloaded
    ← ModelWanted   → ModelIs loading   → WorkerUp …   → ModelIs ready
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from vecd.base.failures import StartFailure
from vecd.launch.config.plan import Plan
from vecd.launch.files import FilesHang
from vecd.launch.gateways import GatewayPool, Life, Link, loop_time
from vecd.launch.memory import Footprint, MemoryBook, measured
from vecd.launch.workers import WorkerPool
from vecd.shm.control import UNLOAD_REASONS, KeepAlive, ModelAsked, ModelIs, ModelState, ModelUsed, ModelWanted

# Decides which models make room for one that requests wait for.
#
# A resident model stays for a slice: four times what a load takes, so that loads cost at most a fifth of the time where
# models do not fit together; 5 s at least, and 30 s at most, because clients give up. Idle models go first, those that
# are the cheapest to do without for their memory: (use x seconds of a load) / bytes. A busy one goes only for a load
# that has waited for a slice, and then the longest resident one: such models take turns. It is asked for the load that
# has waited the longest: a later one must not take the memory that this one waits for.

_MIN_SLICE_S, _MAX_SLICE_S = 5.0, 30.0
_RELOADS_PER_SLICE = 4.0


# Whether a model is loaded, and what is to be done about it: `Residency` carries out what is decided.

MAX_LOADS = 2
"""At once: a load is mostly one thread that reads."""
_REPORT_S = 1.5
"""Gateways report use once a second: a model that seems idle may have got a request since."""
_MEMORY_WAIT_S = 1.0
_USE_TIME_CONSTANT_S = 60.0
_SETTLING_S = 5.0
"""After a load, until its memory is measured: the first requests need some, too."""
_MAX_PAUSE_S = 300.0
"""After a load that has failed: 1, 2, 4 … s until another one is tried."""
_FIRST_LOAD_S, _LOAD_BYTES_PER_S = 1.0, 300e6
"""What a load is expected to take until one has been measured."""


@dataclass(slots=True)
class LoadHistory:
    num_loads: int = 0
    num_failed_loads: int = 0
    num_unloads: Counter[str] = field(default_factory=Counter)
    load_s: float = 0.0
    is_told: bool = False
    """Gateways are told of its state: it has been something else than ready, or loading at the server's start."""


@dataclass(slots=True)
class ModelLife:
    """One generation's model: where it is, and since when. All times are in seconds of the caller's clock."""

    pool: WorkerPool
    total_nbytes: int
    """Memory that it needs when it is loaded: predicted or measured."""
    history: LoadHistory
    since: float
    state: ModelState = ModelState.UNLOADED
    reason: str = ""
    held_nbytes: int = 0
    wanted_at: float | None = None
    not_before: float = 0.0
    used_at: float = -math.inf
    num_failures: int = 0
    has_begun: bool = False
    """Its load was begun by `decide`, and not by the server's start or a reload."""
    is_complete: bool = False
    is_asked_to_go: bool = False
    measure_at: float | None = None
    client_keep_alive: bool = False
    client_keep_alive_s: float | None = None
    _unanswered: dict[Life, tuple[int, float]] = field(default_factory=dict)
    """By gateway: the requests that it had last reported, and when."""
    _use: float = 0.0
    """Core-seconds per second, an exponential mean that ends at `_use_at`."""
    _use_at: float = 0.0
    load: "asyncio.Task[None] | None" = None
    unload: "asyncio.Task[None] | None" = None

    # --- what is said of it -------------------------------------------------------------------------------------------

    @property
    def model(self) -> str:
        return self.pool.model

    @property
    def is_pinned(self) -> bool:
        return self.pool.plan.gateway.pinned

    @property
    def is_resident(self) -> bool:
        """Workers of it run, or are being started."""
        return self.state in (ModelState.LOADING, ModelState.READY)

    @property
    def is_waiting(self) -> bool:
        return self.wanted_at is not None and not self.is_resident and self.state is not ModelState.DRAINING

    @property
    def load_s(self) -> float:
        return self.history.load_s or self._first_load_s

    @property
    def reload_s(self) -> float:
        """Of its loads but the first, which may also have chosen an engine."""
        if self.history.num_loads < 2:
            return min(self.history.load_s or math.inf, self._first_load_s)
        return self.history.load_s

    @property
    def _first_load_s(self) -> float:
        return _FIRST_LOAD_S + self.total_nbytes / _LOAD_BYTES_PER_S

    def message(self, ahead_s: float, now: float, *, has_just_gone: bool = False) -> ModelIs:
        """What gateways are told of it. `ahead_s`: expected seconds of the loads before its own. `has_just_gone`: an
        operator waits for that state, so it is told even if a load waits again."""
        history, state, reason, wait_s = self.history, self.state, self.reason, 0.0
        if self.is_waiting and self.not_before <= now and not has_just_gone:
            state, reason = ModelState.LOADING, ""
        if state is ModelState.FAILED:
            wait_s = self.not_before - self.since
        elif state in (ModelState.UNLOADED, ModelState.LOADING):
            wait_s = ahead_s + self.load_s
        nbytes = self.total_nbytes if state is ModelState.LOADING else self.held_nbytes or self.total_nbytes
        return ModelIs(
            self.pool.generation, state, reason, round(wait_s, 3), nbytes, history.num_loads,
            history.num_failed_loads, round(history.load_s, 3), dict(history.num_unloads),
        )  # fmt: skip

    def is_busy(self, now: float) -> bool:
        return self.num_unanswered(now) > 0 or now - self.used_at < 1.0

    def recent_use(self, now: float) -> float:
        """Core-seconds per second."""
        return self._use * math.exp(-(now - self._use_at) / _USE_TIME_CONSTANT_S)

    def num_unanswered(self, now: float) -> int:
        """At all gateways. One that a gateway has not mentioned for as long as a request may take has been answered."""
        return sum(num for num, at in self._unanswered.values() if now - at <= self.pool.plan.settings.request_timeout)

    def idle_at(self, now: float) -> float | None:
        """When it is unloaded because it is not used; None: it is in use, or stays for ever."""
        keep_alive_s = self.client_keep_alive_s if self.client_keep_alive else self.pool.plan.gateway.keep_alive_s
        if keep_alive_s is None or self.wanted_at is not None or self.num_unanswered(now):
            return None
        return max(self.used_at, self.since) + keep_alive_s + _REPORT_S

    @property
    def why_idle(self) -> str:
        return "client" if self.client_keep_alive and self.client_keep_alive_s == 0 else "idle"

    # --- what happens to it -------------------------------------------------------------------------------------------

    def want(self, now: float) -> None:
        if self.wanted_at is None and not self.is_resident:
            self.wanted_at = now
            self.history.is_told = True

    def keep(self, seconds: float | None) -> None:
        """A client has set how long it stays; None: for ever."""
        self.client_keep_alive, self.client_keep_alive_s = True, seconds

    def ask_to_go(self) -> None:
        self.wanted_at = None
        self.is_asked_to_go |= self.is_resident

    def use(self, gateway: Life, compute_s: float, num_requests: int, now: float) -> None:
        self.used_at = now
        if num_requests:
            self._unanswered[gateway] = num_requests, now
        else:
            self._unanswered.pop(gateway, None)
        self._use, self._use_at = self.recent_use(now) + compute_s / _USE_TIME_CONSTANT_S, now

    def forget_gateways(self, living: Iterable[Life]) -> None:
        living = set(living)
        self._unanswered = {life: each for life, each in self._unanswered.items() if life in living}

    def begin_load(self, now: float, *, is_first: bool = False) -> None:
        """`is_first`: with the server's start or in a reload."""
        self._become(ModelState.LOADING, "", now)
        self.has_begun, self.is_complete = not is_first, False
        self.history.is_told |= not is_first
        self.held_nbytes, self.wanted_at = self.total_nbytes, None

    def become_ready(self, now: float) -> float:
        """Returns how long the load took."""
        seconds = now - self.since
        self.history.num_loads += 1
        self.history.load_s = seconds
        self.num_failures = 0
        self.measure_at = now + _SETTLING_S
        self._become(ModelState.READY, "", now)
        return seconds

    def fail(self, reason: str, now: float) -> float:
        """Returns for how many seconds it is not loaded again."""
        self.num_failures += 1
        self.history.num_failed_loads += 1
        pause_s = min(_MAX_PAUSE_S, 2.0 ** min(16, self.num_failures - 1))
        self.not_before, self.wanted_at, self.held_nbytes = now + pause_s, None, 0
        self.is_asked_to_go, self.measure_at = False, None
        self._become(ModelState.FAILED, reason, now)
        return pause_s

    def begin_draining(self, reason: str, now: float) -> None:
        assert reason in UNLOAD_REASONS, reason
        self.is_asked_to_go, self.measure_at = False, None
        self._become(ModelState.DRAINING, reason, now)

    def end_draining(self, now: float) -> None:
        self.history.num_unloads[self.reason] += 1
        self.held_nbytes, self.client_keep_alive = 0, False
        self._become(ModelState.UNLOADED, self.reason, now)

    def measured(self, total_nbytes: int) -> None:
        self.total_nbytes = total_nbytes
        if self.is_resident:
            self.held_nbytes = total_nbytes

    def _become(self, state: ModelState, reason: str, now: float) -> None:
        self.state, self.reason, self.since = state, reason, now
        self.history.is_told |= state not in (ModelState.LOADING, ModelState.READY)


# --- decisions --------------------------------------------------------------------------------------------------------


class Decision(NamedTuple):
    action: Literal["load", "unload", "refuse", "measure"]
    life: ModelLife
    reason: str = ""


def decide(lives: Sequence[ModelLife], free_nbytes: int | None, now: float) -> tuple[list[Decision], float | None]:
    """What is to be done now, and when to ask again if nothing happens before; None: not at all. `free_nbytes`: of the
    budget, less what all of them hold, may be negative; None: there is no budget. Loads begin in the order in which
    they were first wanted. None passes one that waits for memory: it would take what becomes free for that one."""
    decisions: list[Decision] = []
    due: list[float] = []

    def at(time: float | None, decision: Decision) -> None:
        if time is not None and time <= now:
            decisions.append(decision)
        elif time is not None:
            due.append(time)

    for life in lives:
        if life.is_asked_to_go:
            decisions.append(Decision("unload", life, "operator"))
            continue
        at(life.measure_at, Decision("measure", life))
        if life.state is ModelState.READY:
            at(life.idle_at(now), Decision("unload", life, life.why_idle))
    num_loads = sum(life.state is ModelState.LOADING and life.has_begun for life in lives)
    waiting = sorted((life for life in lives if life.is_waiting), key=lambda life: life.wanted_at or 0.0)
    due += [life.not_before for life in waiting if life.not_before > now]
    most_nbytes = (free_nbytes or 0) + held_nbytes(life for life in lives if not life.is_pinned)
    for life in [life for life in waiting if life.not_before <= now]:
        if free_nbytes is not None and (missing := life.total_nbytes - most_nbytes) > 0:
            why = f"no memory: {math.ceil(missing / 2**20)} MB of the budget are missing beside the pinned models"
            decisions.append(Decision("refuse", life, why))
            continue
        if num_loads >= MAX_LOADS:
            break
        if free_nbytes is not None:
            if (needed := life.total_nbytes - free_nbytes) > 0:
                leaving = [each.life for each in decisions if each.action == "unload"]
                decisions += _make_room(life, needed, lives, leaving, now)
                due.append(now + _MEMORY_WAIT_S)
                break
            free_nbytes -= life.total_nbytes
        decisions.append(Decision("load", life))
        num_loads += 1
    return decisions, min(due, default=None)


def held_nbytes(lives: Iterable[ModelLife]) -> int:
    """Memory of models. Of one that is being replaced, which has two generations for a moment, the larger counts."""
    largest: dict[str, int] = {}
    for life in lives:
        largest[life.model] = max(largest.get(life.model, 0), life.held_nbytes)
    return sum(largest.values())


def _make_room(
    life: ModelLife, needed: int, lives: Sequence[ModelLife], leaving: Sequence[ModelLife], now: float
) -> list[Decision]:
    """Whom to unload for a load that needs `needed` bytes more than are free; none while enough is on its way out.
    `leaving`: those that are about to go. One that is being replaced gives nothing back, and stays."""
    num_generations = Counter(each.model for each in lives)
    resident = []
    for each in lives:
        if each.state is ModelState.DRAINING or each in leaving:
            needed -= each.held_nbytes
        elif each.state is ModelState.READY and each.held_nbytes and num_generations[each.model] == 1:
            resident.append(each)
    if needed <= 0:
        return []
    return [Decision("unload", each, "memory") for each in choose(resident, needed, life, now) or ()]


def choose(resident: Iterable[ModelLife], needed_nbytes: int, load: ModelLife, now: float) -> list[ModelLife] | None:
    """Which models to unload so that at least `needed_nbytes` become free, beyond what is free or will be, for a load
    that waits. Empty if nothing is needed; None: no choice suffices now, and a later call may find one."""
    assert load.wanted_at is not None
    waited_s, reload_s = now - load.wanted_at, load.reload_s
    movable = [each for each in resident if not each.is_pinned and now - each.since >= slice_s(each, reload_s)]
    idle = sorted((each for each in movable if not each.is_busy(now)), key=lambda each: _cost(each, now))
    busy = sorted(
        (each for each in movable if each.is_busy(now) and waited_s > slice_s(each, reload_s)),
        key=lambda each: each.since,
    )
    chosen: list[ModelLife] = []
    spare_nbytes = -needed_nbytes
    for each in (*idle, *busy):
        if spare_nbytes >= 0:
            break
        chosen.append(each)
        spare_nbytes += each.held_nbytes
    if spare_nbytes < 0:
        return None
    for each in reversed(chosen.copy()):  # one that is not needed beside the later ones stays
        if each.held_nbytes <= spare_nbytes:
            chosen.remove(each)
            spare_nbytes -= each.held_nbytes
    return chosen


def slice_s(life: ModelLife, reload_s: float) -> float:
    """For which `life` stays, whatever waits, and a load that takes `reload_s` waits until a busy one goes."""
    return min(_MAX_SLICE_S, max(_MIN_SLICE_S, _RELOADS_PER_SLICE * max(life.reload_s, reload_s)))


def _cost(life: ModelLife, now: float) -> tuple[float, float]:
    """What doing without it costs for each byte; among equals, the longest resident costs least."""
    return life.recent_use(now) * life.reload_s / max(1, life.held_nbytes), life.since


log = logging.getLogger("vecd.supervisor")


class Residency:
    def __init__(
        self,
        gateway_pool: GatewayPool,
        memory: MemoryBook,
        start_task: "Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]",
    ) -> None:
        self._files = gateway_pool.files
        self._gateway_pool = gateway_pool
        self._memory = memory
        self._start_task = start_task
        self._lives: dict[int, ModelLife] = {}
        self._histories: dict[str, LoadHistory] = {}

    # --- the generations ----------------------------------------------------------------------------------------------

    async def add(self, worker_pool: WorkerPool, *, is_loaded: bool) -> None:
        """`is_loaded`: the caller supervises its workers until they are stopped for the first time; otherwise it is
        loaded when it is needed. Raises FilesHang or OSError if its files cannot be read."""
        plan = worker_pool.plan
        expected = await self._files.call(plan.card.folder, lambda: self._memory.expect(plan))
        now = loop_time()
        life = self._lives[worker_pool.generation] = ModelLife(
            worker_pool, expected.total, self._histories.setdefault(worker_pool.model, LoadHistory()), now
        )
        life.history.is_told |= not is_loaded
        if is_loaded:
            life.begin_load(now, is_first=True)
        self._tell(life)

    def stays_loaded(self, plan: Plan) -> bool:
        """Whether a new generation with this plan is to be loaded before it takes over."""
        generation = self._gateway_pool.active.get(plan.gateway.model)
        if generation is None:
            return not plan.gateway.is_loaded_on_demand
        return self._lives[generation].is_resident

    async def forget(self, generation: int) -> None:
        """The caller ends the generation, and removes its worker pool after this."""
        if (life := self._lives.pop(generation, None)) is not None:
            await _cancel(life.unload)
            await self._cancel_load(life)
        self._gateway_pool.changed.set()

    def state(self, generation: int) -> ModelState:
        return self._lives[generation].state

    def description(self, generation: int) -> str:
        life = self._lives[generation]
        return f"failed: {life.reason}" if life.state is ModelState.FAILED else life.state

    # --- events -------------------------------------------------------------------------------------------------------

    def on_message(self, link: Link, message: ModelWanted | ModelUsed | ModelAsked | KeepAlive) -> None:
        if (life := self._lives.get(message.generation)) is None:
            return
        now = loop_time()
        match message:
            case ModelUsed():
                life.use(link.life, message.compute_s, message.num_requests, now)
            case KeepAlive():
                life.keep(message.seconds)
            case ModelAsked(action="unload"):
                life.ask_to_go()
                self._tell(life)
            case _:
                if isinstance(message, ModelAsked):
                    life.not_before = min(life.not_before, now)
                life.want(now)
                self._tell(life)
        self._gateway_pool.changed.set()

    def on_worker_ready(self, worker_pool: WorkerPool) -> bool:
        """Returns whether this is part of a load that was begun here."""
        if (life := self._lives.get(worker_pool.generation)) is None:
            return False  # it is being ended
        if life.state is ModelState.LOADING:
            seconds = life.become_ready(loop_time())
            if life.has_begun:
                mb = life.held_nbytes >> 20
                worker_pool.log.info("loaded in %.1f s%s", seconds, f", about {mb} MB" if mb else "")
            if self._memory.budget is None and len(self._lives) == 1 and not life.history.is_told:
                life.measure_at = None  # nothing depends on it
            self._tell(life)
        is_part = life.has_begun and not life.is_complete
        life.is_complete |= worker_pool.is_complete
        return is_part

    # --- decisions and what follows -----------------------------------------------------------------------------------

    async def run(self) -> None:
        changed = self._gateway_pool.changed
        while True:
            changed.clear()
            due = self._act()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await changed.wait()

    def _act(self) -> float | None:
        now, free_nbytes = loop_time(), None
        for life in self._lives.values():
            life.forget_gateways(link.life for link in self._gateway_pool.ready_links)
        if self._memory.budget is not None:
            held = held_nbytes(self._lives.values())
            free_nbytes = self._memory.budget - self._memory.server_nbytes - held
        decisions, due = decide(list(self._lives.values()), free_nbytes, now)
        for action, life, reason in decisions:
            match action:
                case "load":
                    life.begin_load(now)
                    self._tell(life)
                    life.load = self._start_task(self._load(life))
                case "unload":
                    life.begin_draining(reason, now)
                    self._tell(life)
                    life.unload = self._start_task(self._unload(life))
                case "refuse":
                    self._fail(life, reason)
                case "measure":
                    life.measure_at = None
                    self._start_task(self._measure(life))
        return due

    async def _load(self, life: ModelLife) -> None:
        pool = life.pool
        try:
            if why := await pool.why_read_anew():
                raise StartFailure(why)
            await pool.supervise(needs_all=False)
        except (StartFailure, FilesHang, OSError) as error:
            reason = str(error).removeprefix(pool.prefix)
        except Exception as error:
            log.exception("internal error in a load")
            reason = f"unexpected {type(error).__name__}"
        else:
            return
        self._gateway_pool.withdraw_workers(pool.generation, reason)
        self._fail(life, reason)

    def _fail(self, life: ModelLife, reason: str) -> None:
        if life.pool.generation in self._lives and life.state is not ModelState.DRAINING:
            pause_s = life.fail(reason, loop_time())
            life.pool.log.error("cannot be loaded, and is not tried again for %g s: %s", pause_s, reason)
            self._tell(life)

    async def _unload(self, life: ModelLife) -> None:
        pool, began_at, timeout_s = life.pool, loop_time(), life.pool.plan.settings.batch_timeout
        held = f", about {life.held_nbytes >> 20} MB before" if life.held_nbytes >> 20 else ""
        try:
            await self._gateway_pool.until(lambda: self._gateway_pool.is_drained(pool.generation), timeout_s)
        except TimeoutError:
            pool.log.warning("a gateway still has batches after %g s, which are given up", timeout_s)
        await self._cancel_load(life)
        await pool.stop()
        self._gateway_pool.withdraw_workers(pool.generation, f"unloaded: {life.reason}")
        life.end_draining(loop_time())
        pool.log.info("%s in %.1f s%s: %s", life.state, loop_time() - began_at, held, life.reason)
        life.unload = None
        self._tell(life, has_just_gone=True)
        self._tell(life)

    async def _cancel_load(self, life: ModelLife) -> None:
        """One that supervises its workers ends with these."""
        if not life.pool.is_supervised:
            await _cancel(life.load)
        life.load = None

    # --- memory -------------------------------------------------------------------------------------------------------

    async def _measure(self, life: ModelLife) -> None:
        """Replace what was expected, unless not all workers are there. Workers that have not computed a full batch yet
        will need more, so that they count with what was expected at least."""
        ready_at, pool = life.since, life.pool
        if not pool.is_complete:
            return
        pids, workers = pool.pids(), [worker.process.pid for worker in pool.ready.values()]

        def measure() -> Footprint | None:
            if (footprint := measured(pids, workers)) is not None:
                expected = self._memory.expect(pool.plan)
                footprint = replace(footprint, per_worker=max(footprint.per_worker, expected.per_worker))
                self._memory.remember(pool.plan, footprint)
            return footprint

        with suppress(FilesHang, OSError):
            footprint = await self._files.call("the memory of models", measure)
            if footprint is not None and life.state is ModelState.READY and life.since == ready_at:
                life.measured(footprint.total)
                life.history.is_told = True
                self._tell(life)

    # --- gateways -----------------------------------------------------------------------------------------------------

    def _tell(self, life: ModelLife, *, has_just_gone: bool = False) -> None:
        if life.history.is_told and life.pool.generation in self._lives:
            life.pool.state = life.message(self._ahead_s(life), loop_time(), has_just_gone=has_just_gone)
        self._gateway_pool.reconcile()

    def _ahead_s(self, life: ModelLife) -> float:
        if not life.is_waiting:
            return 0.0
        waiting = (each for each in self._lives.values() if each.is_waiting)
        before = [each.load_s for each in waiting if (each.wanted_at or 0.0) < (life.wanted_at or -math.inf)]
        return sum(before) / 2


async def _cancel(task: "asyncio.Task[None] | None") -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
