"""Contenders take turns in one process, round by round: whatever else the machine does meets all of them.

Owns the clock and the order. Knows nothing of engines. Called by `benchmarks.duels`,
`benchmarks.alone` and `benchmarks.crowds`.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

Pass: TypeAlias = Callable[[], object]
"""Does the whole work once."""
Clock: TypeAlias = Callable[[], float]
Key = TypeVar("Key")
Figure = TypeVar("Figure")

CONFIDENCE = 0.9
_FAR_BEHIND = (1.5, 1.1)
"""Of a contender's shortest pass so far to the shortest of all: after the first look, which has a model's laziest
initialisation in it, and after the second."""


def take_turns(
    contenders: Mapping[str, Pass], num_rounds: int, turn_s: float, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of one pass of each contender, one figure per round: the median of the passes of its turn.

    A turn takes at least `turn_s` and at least one pass.
    """

    def turn_of(run: Pass) -> Callable[[], float]:
        return lambda: _turn(run, turn_s, clock)

    return alternate({name: turn_of(run) for name, run in contenders.items()}, num_rounds)


def alternate(turns: Mapping[str, Callable[[], Figure]], num_rounds: int) -> dict[str, list[Figure]]:
    """What each contender's turns return, one figure per round.

    Each round begins with the next contender, so that nobody always follows the same one.
    """
    names = list(turns)
    figures: dict[str, list[Figure]] = {name: [] for name in names}
    for round_number in range(num_rounds):
        first = round_number % len(names)
        for name in names[first:] + names[:first]:
            figures[name].append(turns[name]())
    return figures


def fastest(candidates: Mapping[Key, Pass], clock: Clock = time.perf_counter) -> Key:
    """Whose shortest pass is the shortest. A quick look: what disturbs a pass only ever makes it longer.

    After each look only those that are not far behind get another.
    """
    best = {key: _timed(run, clock) for key, run in candidates.items()}
    for far_behind in _FAR_BEHIND:
        limit = far_behind * min(best.values())
        for key in [key for key, seconds in best.items() if seconds <= limit]:
            best[key] = min(best[key], _timed(candidates[key], clock))
    return min(best, key=lambda key: best[key])


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours ÷ theirs within each round: a slow minute of the machine cancels out."""
    return [our / their for our, their in zip(ours, theirs, strict=True)]


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest pair of order statistics with the median between them at a confidence of 90 %.

    None for fewer than five values: not even all of their range has that confidence. Assumes nothing of the values'
    distribution: each falls below the median with a probability of one half.
    """
    ordered = sorted(values)
    if 1 - 2 * _binomial(len(ordered), 0) < CONFIDENCE:
        return None
    # How many values may be left out at each end.
    left_out = 0
    while 1 - 2 * _binomial(len(ordered), left_out + 1) >= CONFIDENCE:
        left_out += 1
    return ordered[left_out], ordered[-1 - left_out]


def _binomial(num_values: int, most: int) -> float:
    """The probability that at most `most` of the values fall below the median."""
    return sum(math.comb(num_values, count) for count in range(most + 1)) / 2.0**num_values


def passes_of_turn(run: Pass, turn_s: float, warmup_s: float = 0.0, clock: Clock = time.perf_counter) -> list[float]:
    """Seconds of each pass of one turn, at least one, after at least one of the warm-up, which is not counted."""
    end = clock() + warmup_s
    run()  # not counted: it brings weights and code back into the caches that the others have used
    while clock() < end:
        run()
    passes: list[float] = []
    end = clock() + turn_s
    while not passes or clock() < end:
        passes.append(_timed(run, clock))
    return passes


def _turn(run: Pass, turn_s: float, clock: Clock) -> float:
    return statistics.median(passes_of_turn(run, turn_s, clock=clock))


def _timed(run: Pass, clock: Clock) -> float:
    started = clock()
    run()
    return clock() - started
