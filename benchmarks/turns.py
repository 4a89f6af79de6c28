"""Contenders take turns in one process, round by round: whatever else the machine does meets all of them.

Owns the clock and the order. Knows nothing of engines. Called by `benchmarks.duels`.
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

CONFIDENCE = 0.9
_FAR_BEHIND = (1.5, 1.1)
"""Of a contender's shortest pass so far to the shortest of all: after the first look, which has a model's laziest
initialisation in it, and after the second."""


def take_turns(
    contenders: Mapping[str, Pass], num_rounds: int, turn_s: float, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of one pass of each contender, one figure per round: the median of the passes of its turn.

    A turn takes at least `turn_s` and at least one pass. Each round begins with the next contender, so that nobody
    always follows the same one.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(num_rounds):
        first = round_number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(_turn(contenders[name], turn_s, clock))
    return seconds


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


def _turn(run: Pass, turn_s: float, clock: Clock) -> float:
    run()  # not counted: it brings weights and code back into the caches that the others have used
    passes: list[float] = []
    end = clock() + turn_s
    while not passes or clock() < end:
        passes.append(_timed(run, clock))
    return statistics.median(passes)


def _timed(run: Pass, clock: Clock) -> float:
    started = clock()
    run()
    return clock() - started
