"""The speed of int8 on this processor, measured, because it depends on its instructions.

Called by `vecd.workers.engines.load` and `vecd.workers.engines.torch.selection` before int8 is selected.
"""

import time

import numpy as np

from vecd.shm.card import ModelCard
from vecd.workers.engine import Engine
from vecd.workers.engines.lean.engine import LeanEngine
from vecd.workers.engines.parity import random_batch

_MIN_RATIO = 1.1
"""int8 is less exact, so a gain within the noise of a measurement is none."""

_BATCHES = ((12,), (64,), (24,) * 8)
"""Tokens of the sequences: a short text, a paragraph, a batch. 0.25 s in both types for all-MiniLM-L6-v2."""

_MIN_ROUNDS, _MAX_ROUNDS, _MEASURING_S = 2, 5, 0.3


def why_slow(card: ModelCard, int8: Engine, float32: Engine | None = None) -> str:
    """Why `int8` is not worth its loss of precision: a line for the log; empty if it is `_MIN_RATIO` times as fast.
    `float32`: the lean engine in float32, if there is one already."""
    ratio = speed_ratio(card, int8, float32 or LeanEngine(card))
    return "" if ratio >= _MIN_RATIO else f"it is {ratio:.2f} times as fast as float32 on this processor"


def speed_ratio(card: ModelCard, int8: Engine, float32: Engine) -> float:
    """float32's processor time divided by int8's, the mean over `_BATCHES`. Both take turns, and each one's shortest
    time counts, because other programs may run."""
    ratios = []
    for lengths in _BATCHES:
        batch = random_batch(card, lengths)
        rows = np.empty((batch.num_rows, card.dim), dtype=np.float32)
        times: dict[Engine, list[float]] = {float32: [], int8: []}
        started_at = time.perf_counter()
        for round_ in range(_MAX_ROUNDS):
            if round_ >= _MIN_ROUNDS and time.perf_counter() - started_at > _MEASURING_S / len(_BATCHES):
                break
            for engine, measured in times.items():
                began_at = time.process_time()
                engine.embed(batch, rows)
                measured.append(time.process_time() - began_at)
        ratios.append(min(times[float32]) / max(1e-9, min(times[int8])))
    return float(np.mean(ratios))
