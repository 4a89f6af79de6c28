"""Runs work in a forked process, as workers do it: with an engine that was loaded before the fork.

Owns the fork and the way back of its result. Knows no engine.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vecd.base.files import JsonObject
from vecd.base.kernel import (
    describe_status,
    die_with_parent,
    is_single_threaded,
    num_threads,
    volunteer_for_oom_kill,
)
from vecd.model.card import ModelError, one_line
from vecd.shm.output import FULL_BATCH_S, MAX_BATCH_TOKENS
from vecd.workers.batch import Engine, PackedBatch, ReportProgress
from vecd.workers.check.order import Order
from vecd.workers.config import WorkerConfig
from vecd.workers.machine import kilobytes, private_memory_mb
from vecd.workers.parity import random_batch


def in_worker(config: WorkerConfig, work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked process. An engine on an accelerator does not survive a fork; then this process
    does the work. Raises ModelError, in one line, for what the work raises, and for a process that died."""
    if config.device != "cpu":
        return _call(work)
    if not is_single_threaded():  # a fork would lose the threads, and the locks that they hold
        raise ModelError(f"loading the model has started threads that do not end ({num_threads()})")
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_work_and_send, args=(config, work, theirs, os.getpid()))
    process.start()
    theirs.close()
    try:
        result = ours.recv()
    except (EOFError, ConnectionError):
        process.join()
        raise ModelError(f"a worker {describe_status(process.exitcode)}") from None
    finally:
        ours.close()
        process.kill()
        process.join()
    if isinstance(result, ModelError):
        raise result
    return result


def _work_and_send(
    config: WorkerConfig, work: Callable[[], Any], connection: "Connection[Any, Any]", parent_pid: int
) -> None:
    die_with_parent(parent_pid)
    volunteer_for_oom_kill()
    torch.set_num_threads(config.num_threads)
    try:
        result = _call(work)
    except ModelError as error:
        result = error
    connection.send(result)


def _call(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except ModelError:
        raise
    except Exception as error:  # a model may raise anything
        raise ModelError(one_line(error)) from error


# --- speed ------------------------------------------------------------------------------------------------------

_ROUNDS = 5
_SHORT_TOKENS, _LONG_TOKENS = 24, 256
_LARGER_BATCHES = (4096, 8192)
_MAX_SEQUENCES = 512
_PILOT_TOKENS, _PILOT_S = 256, 0.1


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    engine: Engine
    text_tokens: int
    batch_tokens: int

    def batch(self, config: WorkerConfig) -> PackedBatch:
        """Of random ids, which have no influence on speed. No more texts than the rows of a slot are enough for."""
        rows_of_one = random_batch(config.card, [self.text_tokens]).num_rows
        most = min(_MAX_SEQUENCES, config.arena.rows_per_slot // rows_of_one)
        num_texts = max(1, min(most, self.batch_tokens // self.text_tokens))
        return random_batch(config.card, [self.text_tokens] * num_texts)


def measure(order: Order, engines: Sequence[Engine], report: ReportProgress) -> JsonObject:
    """Measure engines in turns, so that a disturbance affects all. Raises ModelError when one cannot be measured."""
    cases = [case for engine in engines for case in _cases(order, engine, may_be_larger=engine is engines[0])]
    turn_s = order.seconds / _ROUNDS
    turns: dict[_Case, list[JsonObject]] = {case: [] for case in cases}
    for number in range(_ROUNDS):
        report(f"measuring, round {number + 1} of {_ROUNDS}")
        for case, results in turns.items():
            results.append(_turn(order, case, turn_s))
    return {
        "speeds": [_speed(case, results) for case, results in turns.items()],
        "agreements": {engine.facts["dtype"]: engine.facts.get("agreement", {}) for engine in engines},
        "num_rounds": _ROUNDS,
        "turn_s": turn_s,
    }


def _cases(order: Order, engine: Engine, *, may_be_larger: bool) -> list[_Case]:
    """Batches as they are served, for both lengths of text: at most what a quarter of a second computes."""
    cases = []
    for text_tokens in sorted({min(_SHORT_TOKENS, order.max_tokens), min(_LONG_TOKENS, order.max_tokens)}):
        pilot = _Case(engine, text_tokens, _PILOT_TOKENS)
        most = int(_turn(order, pilot, _PILOT_S)["tokens_per_s"] * FULL_BATCH_S)
        sizes = [max(text_tokens, min(MAX_BATCH_TOKENS, most))]
        if may_be_larger and text_tokens <= _SHORT_TOKENS:
            sizes += [size for size in _LARGER_BATCHES if size <= most]
        cases += [replace(pilot, batch_tokens=size) for size in sizes]
    return cases


def _speed(case: _Case, results: list[JsonObject]) -> JsonObject:
    rates = [result["tokens_per_s"] for result in results]
    return {
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


def _turn(order: Order, case: _Case, turn_s: float) -> JsonObject:
    card = order.config.card

    def work() -> JsonObject:
        batch = case.batch(order.config)
        rows = np.zeros((batch.num_rows, card.row_dim), np.float32)
        _forget_peak()
        case.engine.use_threads(order.config.num_threads)
        case.engine.embed(batch, rows)
        num_batches, elapsed_s, started_at, processor_s = 0, 0.0, time.perf_counter(), time.process_time()
        while elapsed_s < turn_s:
            case.engine.embed(batch, rows)
            num_batches += 1
            elapsed_s = time.perf_counter() - started_at
        return {
            "tokens_per_s": num_batches * batch.token_ids.size / elapsed_s,
            "core_share": (time.process_time() - processor_s) / elapsed_s,  # below 1 if others used the core
            "private_mb": _peak_private_mb(),
        }

    found: JsonObject = in_worker(order.config, work)
    return found


def _forget_peak() -> None:
    # Linux, Documentation/filesystems/proc.rst: 5 resets the high-water mark of resident memory.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_private_mb() -> int:
    status = Path("/proc/self/status")
    returned = max(0, kilobytes(status, "VmHWM") - kilobytes(status, "VmRSS"))
    return private_memory_mb() + returned // 1024
