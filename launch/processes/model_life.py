"""Whether a model is loaded, and what is to be done about it. Pure: it starts nothing, and knows the time as a number.

Owns the state of each generation's model (`ModelLife`), what is remembered of a model over its generations
(`LoadHistory`), and the rules (`decide`): which model is loaded next, which is unloaded because nobody has used it for
its `keep_alive`, and which makes room for another one. `vecd.launch.processes.residency` carries out what is decided.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vecd.launch.processes.backoff import load_pause_s
from vecd.launch.processes.core_grants import Life
from vecd.launch.processes.eviction import Eviction, Occupant
from vecd.shm.control import UNLOAD_REASONS, ModelIs
from vecd.shm.residence import ModelState

MAX_LOADS = 2
"""At once: a load is mostly one thread that reads."""
_REPORT_S = 1.5
"""Gateways report use once a second: a model that seems idle may have got a request since."""
_MEMORY_WAIT_S = 1.0
"""The time after which a load that waits for memory looks for some again."""
_USE_TIME_CONSTANT_S = 60.0
_SETTLING_S = 5.0
"""After a load, until its memory is measured: the first requests need some, too."""
_FIRST_LOAD_S, _LOAD_BYTES_PER_S = 1.0, 300e6
"""What a load is expected to take until one has been measured."""
_UNPARK_S = 0.5


@dataclass(slots=True)
class LoadHistory:
    """What is remembered of a model over all its generations."""

    num_loads: int = 0
    num_failed_loads: int = 0
    num_unloads: dict[str, int] = field(default_factory=dict)
    load_s: float = 0.0
    """Duration of the last load from files; 0 before the first."""
    is_told: bool = False
    """Gateways are told of its state: it has been something else than ready, or loading at the server's start."""


@dataclass(slots=True)
class ModelLife:
    """One generation's model: where it is, and since when. All times are those of the caller's clock, in seconds."""

    generation: int
    model: str
    keep_alive_s: float | None
    is_pinned: bool
    can_park: bool
    """Workers are forked from a process that holds the weights."""
    total_nbytes: int
    """Memory that it needs when it is loaded: predicted or measured."""
    parked_nbytes: int
    """The part of it that stays when it is parked; 0 if it cannot be."""
    request_timeout_s: float
    history: LoadHistory
    since: float
    """When `state` began."""
    state: ModelState = ModelState.UNLOADED
    reason: str = ""
    """As in `ModelIs`."""
    held_nbytes: int = 0
    """Memory that is counted as its own now."""
    wanted_at: float | None = None
    """Since when a load of it waits; None if none does."""
    not_before: float = 0.0
    """After a failure: no load begins earlier."""
    used_at: float = -math.inf
    num_failures: int = 0
    """Of loads in a row."""
    has_begun: bool = False
    """Its load is one of those that `decide` has begun, and not one of the server's start or of a reload."""
    is_complete: bool = False
    """All workers of the load have been ready."""
    is_unparking: bool = False
    asked_to_go: str | None = None
    """By an operator, and it has not begun to: "unload" or "park"."""
    measure_at: float | None = None
    """When its memory is to be measured."""
    is_parking: bool = False
    """Draining: its fork server is to stay."""
    client_keep_alive: bool = False
    """A client has set how long it stays, since it was loaded or wanted."""
    client_keep_alive_s: float | None = None
    _unanswered: dict[Life, tuple[int, float]] = field(default_factory=dict)
    """By gateway: the requests that it had last reported, and when."""
    _use: float = 0.0
    """Core-seconds per second, an exponential mean that ends at `_use_at`."""
    _use_at: float = 0.0

    # --- what is said of it -------------------------------------------------------------------------------------------

    @property
    def is_resident(self) -> bool:
        """Workers of it run, or are being started."""
        return self.state in (ModelState.LOADING, ModelState.READY)

    @property
    def is_held(self) -> bool:
        """It has memory that it could give back at once."""
        return self.state in (ModelState.READY, ModelState.PARKED) and self.held_nbytes > 0

    @property
    def is_waiting(self) -> bool:
        """A load of it is to begin."""
        is_wanted = self.wanted_at is not None and self.asked_to_go is None
        return is_wanted and not self.is_resident and self.state is not ModelState.DRAINING

    @property
    def load_s(self) -> float:
        """Expected seconds of its next load."""
        if self.state is ModelState.PARKED or (self.state is ModelState.LOADING and self.is_unparking):
            return _UNPARK_S
        return self.history.load_s or self._first_load_s

    @property
    def reload_s(self) -> float:
        """What loads of it cost, once it has been loaded: its first load may also have chosen an engine, whose choice
        is remembered."""
        if self.history.num_loads < 2:
            return min(self.history.load_s or math.inf, self._first_load_s)
        return self.history.load_s

    @property
    def _first_load_s(self) -> float:
        return _FIRST_LOAD_S + self.total_nbytes / _LOAD_BYTES_PER_S

    def message(self, ahead_s: float, now: float, *, has_just_gone: bool = False) -> ModelIs:
        """What gateways are told of it. `ahead_s`: expected seconds of the loads before its own. `has_just_gone`: also
        if a load of it waits again, it is told as what it is: an operator waits for that state."""
        history, state, reason, wait_s = self.history, self.state, self.reason, 0.0
        if self.is_waiting and self.not_before <= now and not has_just_gone:
            state, reason = ModelState.LOADING, ""
        if state is ModelState.FAILED:
            wait_s = self.not_before - self.since
        elif state in (ModelState.UNLOADED, ModelState.PARKED, ModelState.LOADING):
            wait_s = ahead_s + self.load_s
        nbytes = self.total_nbytes if state is ModelState.LOADING else self.held_nbytes or self.total_nbytes
        return ModelIs(
            self.generation, state, reason, round(wait_s, 3), nbytes, history.num_loads,
            history.num_failed_loads, round(history.load_s, 3), dict(history.num_unloads),
        )  # fmt: skip

    def occupant(self, now: float) -> Occupant:
        """It as one of those that could make room for another one."""
        is_parked = self.state is ModelState.PARKED
        return Occupant(
            self.model,
            self.held_nbytes,
            0 if is_parked or not self.can_park else max(0, self.held_nbytes - self.parked_nbytes),
            self._use * math.exp(-(now - self._use_at) / _USE_TIME_CONSTANT_S),
            self.reload_s,
            self.num_unanswered(now) > 0 or now - self.used_at < 1.0,
            self.is_pinned,
            math.inf if is_parked else now - self.since,
        )

    def num_unanswered(self, now: float) -> int:
        """Requests for it at all gateways. One that a gateway has not mentioned for as long as a request may take has
        been answered."""
        return sum(num for num, at in self._unanswered.values() if now - at <= self.request_timeout_s)

    def idle_at(self, now: float) -> float | None:
        """From when on it is unloaded because nobody uses it; None: it is in use, or stays for ever."""
        keep_alive_s = self.client_keep_alive_s if self.client_keep_alive else self.keep_alive_s
        if keep_alive_s is None or self.wanted_at is not None or self.num_unanswered(now):
            return None
        return max(self.used_at, self.since) + keep_alive_s + _REPORT_S

    @property
    def why_idle(self) -> str:
        """The reason of an unload at `idle_at`."""
        return "client" if self.client_keep_alive and self.client_keep_alive_s == 0 else "idle"

    # --- what happens to it -------------------------------------------------------------------------------------------

    def want(self, now: float) -> None:
        """A request waits for it."""
        if self.wanted_at is None and not self.is_resident:
            self.wanted_at = now
            self.history.is_told = True

    def keep(self, seconds: float | None) -> None:
        """A client has set how long it stays, until it is unloaded; None: for ever."""
        self.client_keep_alive, self.client_keep_alive_s = True, seconds

    def ask_to_go(self, action: str) -> None:
        """An operator wants it to be unloaded ("unload") or parked ("park")."""
        self.wanted_at = None
        if self.is_resident or (self.state is ModelState.PARKED and action == "unload"):
            self.asked_to_go = action

    def use(self, gateway: Life, compute_s: float, num_requests: int, now: float) -> None:
        """A gateway has used it since its last report."""
        self.used_at = now
        if num_requests:
            self._unanswered[gateway] = num_requests, now
        else:
            self._unanswered.pop(gateway, None)
        faded = self._use * math.exp(-(now - self._use_at) / _USE_TIME_CONSTANT_S)
        self._use, self._use_at = faded + compute_s / _USE_TIME_CONSTANT_S, now

    def forget_gateways(self, living: Iterable[Life]) -> None:
        """Requests of a gateway that has died are over."""
        for gone in self._unanswered.keys() - set(living):
            del self._unanswered[gone]

    def begin_load(self, now: float, *, is_first: bool = False) -> None:
        """`is_first`: with the server's start or in a reload."""
        self.is_unparking = self.state is ModelState.PARKED
        self._become(ModelState.LOADING, "", now)
        self.has_begun, self.is_complete = not is_first, False
        self.history.is_told |= not is_first
        self.held_nbytes, self.wanted_at = self.total_nbytes, None

    def become_ready(self, now: float) -> float:
        """Returns how long the load took."""
        seconds = now - self.since
        self.history.num_loads += 1
        if not self.is_unparking:
            self.history.load_s = seconds
        self.num_failures = 0
        self.measure_at = now + _SETTLING_S
        self._become(ModelState.READY, "", now)
        return seconds

    def fail(self, reason: str, now: float) -> float:
        """Returns for how many seconds it is not loaded again."""
        self.num_failures += 1
        self.history.num_failed_loads += 1
        pause_s = load_pause_s(self.num_failures)
        self.not_before, self.wanted_at, self.held_nbytes = now + pause_s, None, 0
        self.asked_to_go = self.measure_at = None
        self._become(ModelState.FAILED, reason, now)
        return pause_s

    def begin_draining(self, reason: str, now: float, *, parks: bool) -> None:
        assert reason in UNLOAD_REASONS, reason
        self.is_parking = parks and self.can_park
        self.asked_to_go = self.measure_at = None
        self._become(ModelState.DRAINING, reason, now)

    def end_draining(self, now: float) -> None:
        """Its processes have ended, but for the fork server if it is parked."""
        is_parked = self.is_parking
        self.history.num_unloads[self.reason] = self.history.num_unloads.get(self.reason, 0) + 1
        self.held_nbytes = self.parked_nbytes if is_parked else 0
        self.is_parking = False
        self._become(ModelState.PARKED if is_parked else ModelState.UNLOADED, self.reason, now)
        self.client_keep_alive &= is_parked

    def measured(self, total_nbytes: int, parked_nbytes: int) -> None:
        self.total_nbytes, self.parked_nbytes = total_nbytes, parked_nbytes if self.can_park else 0
        if self.is_resident:
            self.held_nbytes = total_nbytes

    def _become(self, state: ModelState, reason: str, now: float) -> None:
        self.state, self.reason, self.since = state, reason, now
        self.history.is_told |= state not in (ModelState.LOADING, ModelState.READY)


# --- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginLoad:
    life: ModelLife


@dataclass(frozen=True, slots=True)
class BeginUnload:
    life: ModelLife
    reason: str
    """One of UNLOAD_REASONS."""
    parks: bool = False


@dataclass(frozen=True, slots=True)
class RefuseLoad:
    life: ModelLife
    reason: str


@dataclass(frozen=True, slots=True)
class MeasureMemory:
    life: ModelLife


Decision = BeginLoad | BeginUnload | RefuseLoad | MeasureMemory
Choose = Callable[..., Sequence[Eviction] | None]
"""As `vecd.launch.processes.eviction.choose`."""


def decide(
    lives: Sequence[ModelLife], free_nbytes: int | None, choose: Choose, now: float
) -> tuple[list[Decision], float | None]:
    """What is to be done now, and when to ask again if nothing happens before; None: not at all. `lives`: of all
    generations. `free_nbytes`: of the budget, less what all of them hold, may be negative; None: there is no budget.

    Loads begin in the order in which they were first wanted, and none passes one that waits for memory: it would take
    what becomes free for that one.
    """
    decisions: list[Decision] = []
    due: list[float] = []
    for life in lives:
        if life.asked_to_go is not None:
            decisions.append(BeginUnload(life, "operator", life.asked_to_go == "park"))
            continue
        if life.measure_at is not None:
            if life.measure_at <= now:
                decisions.append(MeasureMemory(life))
            else:
                due.append(life.measure_at)
        if life.state in (ModelState.READY, ModelState.PARKED) and (idle_at := life.idle_at(now)) is not None:
            if idle_at <= now:
                decisions.append(BeginUnload(life, life.why_idle))
            else:
                due.append(idle_at)
    num_loads = sum(life.state is ModelState.LOADING and life.has_begun for life in lives)
    waiting = sorted((life for life in lives if life.is_waiting), key=_wanted_at)
    due += [life.not_before for life in waiting if life.not_before > now]
    most_nbytes = (free_nbytes or 0) + held_nbytes(life for life in lives if not life.is_pinned)
    for life in [life for life in waiting if life.not_before <= now]:
        if free_nbytes is not None:
            missing = life.total_nbytes - most_nbytes - (life.held_nbytes if life.is_pinned else 0)
            if missing > 0:
                why = f"no memory: {math.ceil(missing / 2**20)} MB of the budget are missing beside the pinned models"
                decisions.append(RefuseLoad(life, why))
                continue
        if num_loads >= MAX_LOADS:
            break
        if free_nbytes is not None:
            needed = life.total_nbytes - life.held_nbytes - free_nbytes
            if needed > 0:
                leaving = {d.life.generation: d.parks for d in decisions if isinstance(d, BeginUnload)}
                decisions += _make_room(life, needed, lives, leaving, choose, now)
                due.append(now + _MEMORY_WAIT_S)
                break
            free_nbytes -= life.total_nbytes - life.held_nbytes
        decisions.append(BeginLoad(life))
        num_loads += 1
    return decisions, min(due, default=None)


def held_nbytes(lives: Iterable[ModelLife]) -> int:
    """Memory of models. Of one that is being replaced, which has two generations for a moment, the larger counts."""
    largest: dict[str, int] = {}
    for life in lives:
        largest[life.model] = max(largest.get(life.model, 0), life.held_nbytes)
    return sum(largest.values())


def _wanted_at(life: ModelLife) -> float:
    assert life.wanted_at is not None
    return life.wanted_at


def _make_room(
    life: ModelLife,
    needed: int,
    lives: Sequence[ModelLife],
    leaving: Mapping[int, bool],
    choose: Choose,
    now: float,
) -> list[BeginUnload]:
    """Whom to unload for a load that needs so many bytes more than are free; nobody while enough is on its way out.
    `leaving`: by generation, those that are about to go, and whether they are parked. One that is being replaced gives
    nothing back, and stays."""
    num_generations = Counter(each.model for each in lives)
    going = {each.generation: each.is_parking for each in lives if each.state is ModelState.DRAINING}
    going.update(leaving)
    resident: dict[str, ModelLife] = {}
    for each in lives:
        if each.generation in going:
            needed -= each.held_nbytes - (each.parked_nbytes if going[each.generation] else 0)
        elif each is not life and num_generations[each.model] == 1 and each.is_held:
            resident[each.model] = each
    if needed <= 0:
        return []
    assert life.wanted_at is not None
    occupants = [each.occupant(now) for each in resident.values()]
    chosen = choose(occupants, needed, waited_s=now - life.wanted_at, reload_s=life.reload_s) or []
    return [BeginUnload(resident[each.model], "memory", each.parks) for each in chosen]
