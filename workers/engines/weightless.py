"""The engine without a model: vectors made from the token ids alone, to test everything but the vectors.

Owns their definition, which tests may compute for themselves (`weightless_vectors`). Imports no torch, loads nothing,
and is fast enough to show what the rest of the server costs.

The vector of a sequence t[0] … t[n-1], all arithmetic modulo 2^64::

    h    = Σ  mix(t[i] + (i + 1) · GOLDEN)           the sequence, its order and its length
    u[j] = mix(h + (j + 1) · GOLDEN) >> 40           24 bits, j = 0 … D-1
    x[j] = u[j] / 2^23 - 1                           in [-1, 1)
    v    = x / ‖x‖                                   in float64, then rounded to float32

`mix` is the finalizer of SplitMix64. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shm.view import Rows
from workers.engine import COMPLETE, Finish, PackedBatch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class WeightlessEngine:
    """An engine of `dim` floats per vector."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self.facts: dict[str, Any] = {"dtype": "float32", "path": "weightless"}
        self.warnings: list[str] = []

    def adopt(self, slots: Sequence[Rows]) -> None:
        pass

    def begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        self.embed(batch, rows)
        return COMPLETE

    def embed(self, batch: PackedBatch, rows: Rows) -> None:
        rows[: batch.lengths.size] = weightless_vectors(batch, self._dim)


def weightless_vectors(batch: PackedBatch, dim: int) -> NDArray[np.float32]:
    """The vectors of a batch, float32 [B, dim], each of length 1, or 0 where it is [-1, …], which never happens."""
    hashes = _hashes(batch)
    bits = _mix(hashes[:, None] + np.arange(1, dim + 1, dtype=np.uint64) * _GOLDEN) >> np.uint64(40)
    floats = bits.astype(np.float64) / 2.0**23 - 1.0
    vectors: NDArray[np.float64] = floats / np.linalg.norm(floats, axis=1, keepdims=True)
    return vectors.astype(np.float32)


def _hashes(batch: PackedBatch) -> NDArray[np.uint64]:
    lengths = batch.lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    places = (np.arange(batch.token_ids.size) - np.repeat(starts, lengths) + 1).astype(np.uint64)
    return np.add.reduceat(_mix(batch.token_ids.astype(np.uint64) + places * _GOLDEN), starts)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
