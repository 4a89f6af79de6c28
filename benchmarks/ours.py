"""vecd's engine outside of a worker: the same way to it, and the same checks, without processes around it.

Owns the worker's configuration that it is loaded with. Called by `benchmarks.duels` and `benchmarks.inprocess`.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import num_cores
from vecd.model.card import ModelCard
from vecd.shm.arena import ArenaSpec
from vecd.workers.batch import Engine, PackedBatch
from vecd.workers.config import WorkerConfig
from vecd.workers.load import load_engine

_ROWS_PER_SLOT = 512


class NotMeasurable(Exception):
    """Raised when what was asked for cannot be measured here. One line: what, and why."""


def load_vecd(card: ModelCard, dtype: str, cache_folder: Path) -> Engine:
    """The engine that a worker would run. Raises NotMeasurable when it is not one in `dtype`."""
    engine = load_engine(worker_config(card, dtype, cache_folder), lambda _: None)
    if engine.facts["dtype"] != dtype:
        raise NotMeasurable(f"vecd runs in {engine.facts['dtype']}, not {dtype}: {'; '.join(engine.warnings)}")
    for warning in engine.warnings:
        print(f"benchmarks.engine: {warning}", file=sys.stderr)
    return engine


def worker_config(card: ModelCard, dtype: str, cache_folder: Path) -> WorkerConfig:
    """What the supervisor would compose for one core."""
    fields: dict[str, Any] = {
        "card": card,
        "arena": ArenaSpec(num_slots=2, rows_per_slot=_ROWS_PER_SLOT, dim=card.dim),
        "engine": "auto",
        "device": "cpu",
        "dtype": dtype,
        "num_threads": 1,
        "log_level": "warning",
        "cache_dir": cache_folder,
        "cache_folder": str(cache_folder),
    }
    # An older commit's engine can be measured, too, by this benchmark: one that had no cache yet.
    known = {field.name for field in dataclasses.fields(WorkerConfig)}
    return WorkerConfig(**{name: value for name, value in fields.items() if name in known})


class AllCores:
    """The engine with as many threads as there are cores, called as `benchmarks.peers.Peer` is."""

    variant = "all cores"

    def __init__(self, card: ModelCard, dtype: str) -> None:
        with tempfile.TemporaryDirectory(prefix="vecd-bench-") as folder:
            self._engine = load_vecd(card, dtype, Path(folder))
        self._engine.use_threads(num_cores())
        self._dim = card.dim

    def embed(self, token_ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        lengths = mask.sum(axis=1).astype(np.int32)
        rows = np.empty((len(lengths), self._dim), np.float32)
        self._engine.embed(PackedBatch(lengths, token_ids[mask > 0].astype(np.int32)), rows)
        return rows
