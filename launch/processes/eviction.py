"""Decides which models make room for one that requests wait for. Pure.

A resident model stays for a slice at least: four times what a load takes, and 5 s at least, so that loads cost at most
a fifth of the time where models do not fit together; but not longer than 30 s, because clients give up. Idle models go
first, those that are the cheapest to do without for the memory that they give back: (use x seconds of a load) / bytes.
A busy one goes only for a load that has waited for a slice, and then the longest resident one: such models take turns.
Called by `vecd.launch.processes.residency`, for the load that has waited the longest: a later one must not take the
memory that this one waits for.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MIN_SLICE_S, _MAX_SLICE_S = 5.0, 30.0
_RELOADS_PER_SLICE = 4.0


@dataclass(frozen=True, slots=True)
class Occupant:
    """A model whose memory is in use: ready or parked."""

    model: str
    nbytes: int
    """What unloading it gives back."""
    parked_nbytes: int
    """What parking it gives back, at most `nbytes`; 0 if it is parked."""
    use: float
    """Recent core-seconds per second, 0 or more."""
    reload_s: float
    """Expected seconds of a load."""
    is_busy: bool
    """Requests for it are unanswered, or it was used in the last second."""
    is_pinned: bool
    resident_s: float
    """Since it became ready."""


@dataclass(frozen=True, slots=True)
class Eviction:
    model: str
    parks: bool
    """The workers end, the fork server stays; False: all of it ends."""


def choose(
    occupants: Iterable[Occupant], needed_nbytes: int, *, waited_s: float, reload_s: float
) -> list[Eviction] | None:
    """Whom to unload or park so that at least `needed_nbytes` become free, for a load that has waited for `waited_s`
    and takes `reload_s`. Empty if nothing is needed; None: no choice suffices now, and a later call may find one.
    `needed_nbytes`: beyond what is free, and beyond what models that are draining will give back."""
    movable = [each for each in occupants if not each.is_pinned and each.resident_s >= slice_s(each, reload_s)]
    idle = sorted((each for each in movable if not each.is_busy), key=_cost)
    busy = sorted(
        (each for each in movable if each.is_busy and waited_s > slice_s(each, reload_s)),
        key=lambda each: -each.resident_s,
    )
    chosen = _sufficient([*idle, *busy], needed_nbytes)
    return None if chosen is None else _evictions(chosen, needed_nbytes)


def slice_s(occupant: Occupant, reload_s: float) -> float:
    """Seconds for which `occupant` stays, whoever waits, and for which a load that takes `reload_s` waits until a busy
    model goes."""
    return min(_MAX_SLICE_S, max(_MIN_SLICE_S, _RELOADS_PER_SLICE * max(occupant.reload_s, reload_s)))


def _cost(occupant: Occupant) -> tuple[float, float]:
    """What doing without it costs for each byte; among equals, the longest resident costs least."""
    return occupant.use * occupant.reload_s / max(1, occupant.nbytes), -occupant.resident_s


def _sufficient(candidates: Sequence[Occupant], needed_nbytes: int) -> list[Occupant] | None:
    """The first that give back enough, less those that are not needed beside the later ones; None: all do not."""
    chosen: list[Occupant] = []
    spare_nbytes = -needed_nbytes
    for each in candidates:
        if spare_nbytes >= 0:
            break
        chosen.append(each)
        spare_nbytes += each.nbytes
    if spare_nbytes < 0:
        return None
    for each in reversed(chosen.copy()):
        if each.nbytes <= spare_nbytes:
            chosen.remove(each)
            spare_nbytes -= each.nbytes
    return chosen


def _evictions(chosen: Sequence[Occupant], needed_nbytes: int) -> list[Eviction]:
    """In the order of `chosen`, the last of which are parked as far as that suffices."""
    spare_nbytes = sum(each.nbytes for each in chosen) - needed_nbytes
    parked: set[str] = set()
    for each in reversed(chosen):
        kept_nbytes = each.nbytes - each.parked_nbytes
        if each.parked_nbytes and kept_nbytes <= spare_nbytes:
            parked.add(each.model)
            spare_nbytes -= kept_nbytes
    return [Eviction(each.model, each.model in parked) for each in chosen]
