"""The engine without a model: vectors made from the token ids alone, to test everything but the vectors.

Owns the definition of these vectors, which tests can compute (`dummy_vectors`). Imports no torch, loads nothing, and is
fast enough to show what the rest of the server costs.

The vector of a sequence t[0] … t[n-1], all arithmetic modulo 2^64::

    h    = Σ  mix(t[i] + (i + 1) · GOLDEN)           the sequence, its order and its length
    u[j] = mix(h + (j + 1) · GOLDEN) >> 40           24 bits, j = 0 … D-1
    x[j] = u[j] / 2^23 - 1                           in [-1, 1)
    v    = x / ‖x‖                                   in float64, then rounded to float32

Output.VECTORS is v. UNNORMALIZED is x, rounded to float32, if the model's last step is to normalize, else v. TOKENS has
a row for each i: the v of t[0] … t[i] with H floats instead of D, then zeros. If H is D, the last row is the sequence's
vector.

`mix` is the finalizer of SplitMix64. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecd.shm.output import Output
from vecd.shm.views import Rows
from vecd.workers.engine import COMPLETE, Finish, PackedBatch, largest_within
from vecd.workers.outputs import write_outputs

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class DummyEngine:
    """An engine with `dim` floats per vector and `hidden_size` per token; None means `dim`."""

    def __init__(self, dim: int, hidden_size: int | None = None, *, is_normalized: bool = True) -> None:
        self._dim = dim
        self._hidden_size = dim if hidden_size is None else hidden_size
        self._is_normalized = is_normalized
        self.facts: dict[str, Any] = {"dtype": "float32", "path": "dummy"}
        self.warnings = ["the dummy engine runs no model: its vectors are made up, for tests alone"]
        self.num_padding_tokens = 0
        self._thread_choices: Sequence[int] = (1,)

    def use_threads(self, num_threads: int) -> None:
        pass

    def allow_leases(self, max_threads: int, *, may_copy_weights: bool) -> Sequence[int]:
        self._thread_choices = range(1, max_threads + 1)
        return self._thread_choices

    def lease(self, num_threads: int) -> int:
        return largest_within(self._thread_choices, num_threads)

    def adopt(self, slots: Sequence[Rows]) -> None:
        pass

    def begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        self.embed(batch, rows)
        return COMPLETE

    def embed(self, batch: PackedBatch, rows: Rows) -> None:
        if batch.outputs is None:
            rows[: batch.lengths.size] = dummy_vectors(batch, self._dim)
            return
        write_outputs(rows, batch.outputs, batch.lengths, batch.first_rows, lambda output: self._rows_of(output, batch))

    def _rows_of(self, output: Output, batch: PackedBatch) -> NDArray[np.float32]:
        """The rows of all sequences of a batch, as if each had this output."""
        match output:
            case Output.TOKENS:
                return dummy_states(batch, self._hidden_size)
            case Output.UNNORMALIZED if self._is_normalized:
                return _floats(_hashes(batch), self._dim).astype(np.float32)
            case _:
                return dummy_vectors(batch, self._dim)


def dummy_vectors(batch: PackedBatch, dim: int) -> NDArray[np.float32]:
    """The vectors of a batch, float32 [B, dim], each of length 1."""
    return _normalized(_floats(_hashes(batch), dim))


def dummy_states(batch: PackedBatch, hidden_size: int) -> NDArray[np.float32]:
    """The rows of all tokens of a batch, float32 [T, hidden_size], each of length 1."""
    mixed, starts, lengths = _mixed(batch)
    sums = np.cumsum(mixed)
    before = np.repeat(sums[starts] - mixed[starts], lengths)
    return _normalized(_floats(sums - before, hidden_size))


def _floats(hashes: NDArray[np.uint64], dim: int) -> NDArray[np.float64]:
    bits = _mix(hashes[:, None] + np.arange(1, dim + 1, dtype=np.uint64) * _GOLDEN) >> np.uint64(40)
    return bits.astype(np.float64) / 2.0**23 - 1.0


def _normalized(floats: NDArray[np.float64]) -> NDArray[np.float32]:
    vectors: NDArray[np.float64] = floats / np.linalg.norm(floats, axis=1, keepdims=True)
    return vectors.astype(np.float32)


def _hashes(batch: PackedBatch) -> NDArray[np.uint64]:
    mixed, starts, _ = _mixed(batch)
    return np.add.reduceat(mixed, starts)


def _mixed(batch: PackedBatch) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """The addend of each token, shape [T]; the start and the length of each sequence, both [B]."""
    lengths = batch.lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    places = (np.arange(batch.token_ids.size) - np.repeat(starts, lengths) + 1).astype(np.uint64)
    return _mix(batch.token_ids.astype(np.uint64) + places * _GOLDEN), starts, lengths


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
