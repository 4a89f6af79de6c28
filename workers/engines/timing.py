"""How fast engines of several number formats compute batches of several classes, and whether a format is worth it.

Owns the classes, the clock and the rule. The clock is that of the process, which computes with one thread, because
other programs disturb it less. Called by `vecd.workers.engines.selection`, once for each model, version and processor.
"""

import math
import time
from collections.abc import Mapping
from typing import TypeAlias

from vecd.shm.card import ModelCard
from vecd.workers.engine import Engine, PackedBatch
from vecd.workers.engines.parity import random_batch, vectors_of

Times: TypeAlias = dict[str, dict[str, float]]
"""By class and number format: milliseconds of the fastest of several batches."""

_CLASSES: dict[str, tuple[int, ...]] = {
    "1 x 12": (12,),
    "1 x 64": (64,),
    "8 x 59": (59,) * 8,
    "16 mixed": (6, 9, 12, 12, 15, 19, 23, 28, 35, 43, 54, 67, 84, 105, 140, 190),
}
"""Lengths in tokens: few rows, tens, hundreds; one run of equal lengths, and many."""

_BUDGET_S = 2.0
_ROUNDS = 9

_WORTH = 1.1
"""How much faster than float32 another format must be, because it is less exact."""


def take_times(engines: Mapping[str, Engine], card: ModelCard, budget_s: float = _BUDGET_S) -> Times:
    """Measure engines, by their format, in turns and in about `budget_s`. A class that would take longer is left out;
    the first one is always measured. Raises what an engine raises."""
    times: Times = {}
    ends_at = time.process_time() + budget_s
    s_per_token = 0.0
    for name, lengths in _CLASSES.items():
        batch = random_batch(card, lengths)
        num_tokens, left_s = int(batch.lengths.sum()), ends_at - time.process_time()
        if times and s_per_token * num_tokens * 2 > left_s:  # once to warm up, once for the clock
            break
        round_s = sum(_take_s(engine, batch, card.row_dim) for engine in engines.values())
        share_s = (ends_at - time.process_time()) / (len(_CLASSES) - len(times))
        rounds = range(max(1, min(_ROUNDS, int(share_s / max(1e-6, round_s)))))
        taken: dict[str, list[float]] = {dtype: [] for dtype in engines}
        for _ in rounds:
            for dtype, engine in engines.items():
                taken[dtype].append(_take_s(engine, batch, card.row_dim))
        times[name] = {dtype: max(1e-6, min(all_s)) * 1e3 for dtype, all_s in taken.items()}
        s_per_token = sum(map(min, taken.values())) / num_tokens
    return times


def _take_s(engine: Engine, batch: PackedBatch, dim: int) -> float:
    started_at = time.process_time()
    vectors_of(engine, batch, dim)
    return time.process_time() - started_at


def is_worth_it(times: Times, dtype: str) -> bool:
    """Whether a format is so much faster than float32 that it makes up for its loss of precision."""
    return speed_beside(times, dtype, "float32") >= _WORTH


def speed_beside(times: Times, dtype: str, other: str) -> float:
    """How many times as fast as in the format `other`: the geometric mean of the classes."""
    ratios = [of_class[other] / of_class[dtype] for of_class in times.values()]
    return math.prod(ratios) ** (1 / len(ratios))


def in_words(times: Times) -> str:
    """For the log and reports: "bfloat16 is 1.21 times as fast as float32 (1 x 12: 5.0 against 7.1 ms; …)"; empty if
    nothing was measured."""
    shorter = [dtype for dtype in next(iter(times.values()), {}) if dtype != "float32"]
    return ", ".join(f"{dtype} is {_beside(times, dtype)}" for dtype in shorter)


def _beside(times: Times, dtype: str) -> str:
    classes = "; ".join(f"{name}: {ms[dtype]:.1f} against {ms['float32']:.1f} ms" for name, ms in times.items())
    return f"{speed_beside(times, dtype, 'float32'):.2f} times as fast as float32 ({classes})"
