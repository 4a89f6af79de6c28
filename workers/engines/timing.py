"""How fast engines compute batches of several classes, and which one is the fastest in all.

Owns the classes, the clock and the rules. The clock is that of the process, which computes with one thread, because
other programs disturb it less. Called by `vecd.workers.engines.torch.selection` and `vecd.workers.engines.load`, once
for each model, version and processor.
"""

import math
import time
from collections.abc import Mapping
from typing import TypeAlias

from vecd.shm.card import ModelCard
from vecd.workers.engine import Engine, PackedBatch
from vecd.workers.engines.parity import random_batch, vectors_of

Times: TypeAlias = dict[str, dict[str, float]]
"""By class and name of an engine: milliseconds of the fastest of several batches."""

_CLASSES: dict[str, tuple[int, ...]] = {
    "1 x 12": (12,),
    "1 x 64": (64,),
    "8 x 59": (59,) * 8,
    "16 mixed": (6, 9, 12, 12, 15, 19, 23, 28, 35, 43, 54, 67, 84, 105, 140, 190),
}
"""Lengths in tokens: few rows, tens, hundreds; one run of equal lengths, and many."""

_BUDGET_S, _INT8_BUDGET_S = 2.0, 0.5
_ROUNDS = 9

_WORTH = 1.05
"""How much faster another engine must be than the first: that one needs the least memory, and starts first."""

_WORTH_OF_INT8 = 1.1
"""How much faster than float32 it must be, because it is less exact."""


def take_times(engines: Mapping[str, Engine], card: ModelCard, budget_s: float = _BUDGET_S) -> Times:
    """Measure engines in turns, in about `budget_s`. A class that would take longer is left out; the first one is
    always measured. Raises what an engine raises."""
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
        taken: dict[str, list[float]] = {path: [] for path in engines}
        for _ in rounds:
            for path, engine in engines.items():
                taken[path].append(_take_s(engine, batch, card.row_dim))
        times[name] = {path: max(1e-6, min(all_s)) * 1e3 for path, all_s in taken.items()}
        s_per_token = sum(map(min, taken.values())) / num_tokens
    return times


def _take_s(engine: Engine, batch: PackedBatch, dim: int) -> float:
    started_at = time.process_time()
    vectors_of(engine, batch, dim)
    return time.process_time() - started_at


def fastest(times: Times) -> str:
    """The path of the fastest engine in the geometric mean of the classes; the first one unless another is clearly
    faster."""
    first, *others = next(iter(times.values()))
    speeds = {path: speed_beside(times, path, first) for path in others}
    best = max(speeds, key=speeds.__getitem__, default=first)
    return best if speeds.get(best, 0) >= _WORTH else first


def speed_beside(times: Times, path: str, other: str) -> float:
    """How many times as fast as the engine of the path `other`: the geometric mean of the classes."""
    ratios = [of_class[other] / of_class[path] for of_class in times.values()]
    return math.prod(ratios) ** (1 / len(ratios))


def why_slow(card: ModelCard, int8: Engine, float32: Engine) -> str:
    """Why int8 is not worth its loss of precision on this processor; empty if it is."""
    ratio = speed_of_int8(card, int8, float32)
    return "" if ratio >= _WORTH_OF_INT8 else f"it is {ratio:.2f} times as fast as float32 on this processor"


def speed_of_int8(card: ModelCard, int8: Engine, float32: Engine) -> float:
    times = take_times({"float32": float32, "int8": int8}, card, _INT8_BUDGET_S)
    return speed_beside(times, "int8", "float32")


def in_words(times: Times) -> str:
    """For the log and reports: "lean 1.21 x fused (1 x 12: 5.0 against 7.1 ms; …)"; empty without a rival."""
    chosen = fastest(times)
    lines = []
    for path in next(iter(times.values())):
        if path != chosen:
            classes = "; ".join(f"{name}: {ms[chosen]:.1f} against {ms[path]:.1f} ms" for name, ms in times.items())
            lines.append(f"{chosen} is {speed_beside(times, chosen, path):.2f} times as fast as {path} ({classes})")
    return ", ".join(lines)
