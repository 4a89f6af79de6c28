"""The speed of engines in one worker and in several, and the memory that a worker needs for itself.

Owns the batches, the clock, and the turns in which dtypes, batches and numbers of workers are measured. Called by
`vecd.workers.check.run`; each measurement runs in processes forked for it.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vecd.shm.batch_limits import FULL_BATCH_S, MAX_BATCH_TOKENS
from vecd.workers.check.forks import in_workers
from vecd.workers.check.order import USED_MEMORY, Order
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import Engine, PackedBatch, ReportProgress
from vecd.workers.engines.parity import random_batch
from vecd.workers.process.kernel import kilobytes, private_memory_mb

_ROUNDS = 5
_SHORT_TOKENS, _LONG_TOKENS = 24, 256
_LARGER_BATCHES = (4096, 8192)
_MAX_SEQUENCES = 512
_PILOT_TOKENS, _PILOT_S = 256, 0.1


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """One thing to measure, in turns with others."""

    engine: Engine
    text_tokens: int
    batch_tokens: int
    """The requested size of the batch; whole texts come close to it."""
    num_workers: int = 1

    def batch(self, config: WorkerConfig) -> PackedBatch:
        """Of random ids: they have no influence on speed. No more texts than the rows of a slot are enough for."""
        rows_of_one = random_batch(config.card, [self.text_tokens]).num_rows
        most = min(_MAX_SEQUENCES, config.arena.rows_per_slot // rows_of_one)
        num_texts = max(1, min(most, self.batch_tokens // self.text_tokens))
        return random_batch(config.card, [self.text_tokens] * num_texts)


def measure(order: Order, engines: Sequence[Engine], room_mb: int, report: ReportProgress) -> dict[str, Any]:
    """Measure engines in turns, so that a disturbance affects all; the first one, which is served, also in several
    workers at once. `room_mb`: memory for workers. Raises ModelError when an engine cannot be measured."""
    of_served, *of_others = [_cases(order, engine, may_be_larger=engine is engines[0]) for engine in engines]
    private_mb = max(_turn(order, case, _PILOT_S)["private_mb"] for case in of_served)
    longest, cases = of_served[-1], [*of_served, *(case for cases in of_others for case in cases)]
    if order.config.device == "cpu":
        counts = [count for count in order.worker_counts if count * private_mb < USED_MEMORY * room_mb]
        cases += [replace(longest, num_workers=count) for count in counts]
    turn_s = order.seconds / _ROUNDS
    turns: dict[_Case, list[dict[str, Any]]] = {case: [] for case in cases}
    for number in range(_ROUNDS):
        report(f"measuring, round {number + 1} of {_ROUNDS}")
        for case, results in turns.items():
            results.append(_turn(order, case, turn_s))
    speeds = {case: _speed(case, results) for case, results in turns.items()}
    together = [speed for case, speed in speeds.items() if case.num_workers > 1]
    return {
        "speeds": [speed for case, speed in speeds.items() if case.num_workers == 1],
        "scaling": [speeds[longest], *together] if together else [],
        "agreements": {engine.facts["dtype"]: engine.facts.get("agreement", {}) for engine in engines},
        "num_rounds": _ROUNDS,
        "turn_s": turn_s,
    }


def _cases(order: Order, engine: Engine, *, may_be_larger: bool) -> list[_Case]:
    """Batches as they are served, for both lengths of text: at most what a quarter of a second computes. The served
    type also gets larger ones with short texts if the worker is fast enough for them."""
    cases = []
    for text_tokens in sorted({min(_SHORT_TOKENS, order.max_tokens), min(_LONG_TOKENS, order.max_tokens)}):
        pilot = _Case(engine, text_tokens, _PILOT_TOKENS)
        most = int(_turn(order, pilot, _PILOT_S)["tokens_per_s"] * FULL_BATCH_S)
        sizes = [max(text_tokens, min(MAX_BATCH_TOKENS, most))]
        if may_be_larger and text_tokens <= _SHORT_TOKENS:
            sizes += [size for size in _LARGER_BATCHES if size <= most]
        cases += [replace(pilot, batch_tokens=size) for size in sizes]
    return cases


def _speed(case: _Case, results: list[dict[str, Any]]) -> dict[str, Any]:
    rates = [result["tokens_per_s"] for result in results]
    return {
        "num_workers": case.num_workers,
        "dtype": case.engine.facts["dtype"],
        "path": case.engine.facts["path"],
        "text_tokens": case.text_tokens,
        "batch_tokens": case.batch_tokens,
        "tokens_per_s": statistics.median(rates),
        "texts_per_s": statistics.median(rates) / case.text_tokens,
        "lowest": min(rates),
        "highest": max(rates),
        "private_mb": max(result["private_mb"] for result in results),
        "core_share": statistics.median(result["core_share"] for result in results),
    }


# --- one turn ---------------------------------------------------------------------------------------------------


def _turn(order: Order, case: _Case, turn_s: float) -> dict[str, Any]:
    """Compute batches for `turn_s` in all workers of a case at once: tokens per second of all together, the largest
    private memory of one, and the smallest share of a core."""
    card = order.config.card

    def prepare() -> Callable[[], dict[str, Any]]:
        batch = case.batch(order.config)
        rows = np.zeros((batch.num_rows, card.row_dim), np.float32)
        _forget_peak()
        case.engine.use_threads(order.config.num_threads)
        case.engine.embed(batch, rows)
        return lambda: _run(case.engine, batch, rows, turn_s)

    results = in_workers(order.config, prepare, case.num_workers)
    return {
        "tokens_per_s": sum(result["tokens_per_s"] for result in results),
        "core_share": min(result["core_share"] for result in results),
        "private_mb": max(result["private_mb"] for result in results),
    }


def _run(engine: Engine, batch: PackedBatch, rows: Any, turn_s: float) -> dict[str, Any]:
    """At least one batch, and none is started after `turn_s`."""
    num_batches, elapsed_s, started_at, processor_s = 0, 0.0, time.perf_counter(), time.process_time()
    while elapsed_s < turn_s:
        engine.embed(batch, rows)
        num_batches += 1
        elapsed_s = time.perf_counter() - started_at
    return {
        "tokens_per_s": num_batches * batch.token_ids.size / elapsed_s,
        "core_share": (time.process_time() - processor_s) / elapsed_s,  # below 1 if other programs used the core
        "private_mb": _peak_private_mb(),
    }


def _forget_peak() -> None:
    # Linux, Documentation/filesystems/proc.rst: 5 resets the high-water mark of resident memory.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_private_mb() -> int:
    """The most memory that this process alone wrote: what it has now, and what it has returned since the peak."""
    status = Path("/proc/self/status")
    returned = max(0, kilobytes(status, "VmHWM") - kilobytes(status, "VmRSS"))
    return private_memory_mb() + returned // 1024
