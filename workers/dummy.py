"""The engine without a model: vectors made from the token ids alone, to test everything but the vectors.

Owns the definition of these vectors, which tests can compute (`dummy_vectors`). Imports no torch, loads nothing, and is
fast enough to show what the rest of the server costs.

The vector of a sequence t[0] … t[n-1] whose second part begins at b, 0 if it has none, all arithmetic modulo 2^64::

    h    = mix(b) + Σ  mix(t[i] + (i + 1) · GOLDEN)  the sequence, its order, its length and its border; mix(0) = 0
    u[j] = mix(h + (j + 1) · GOLDEN) >> 40           24 bits, j = 0 … D-1
    x[j] = u[j] / 2^23 - 1                           in [-1, 1)
    v    = x / ‖x‖                                   in float64, then rounded to float32

Every output is made of x and v, with as many floats as it has in place of D. What is for each token i is made of h over
t[0] … t[i]:

    VECTORS        v
    UNNORMALIZED   x, rounded to float32, if the model's last step is to normalize, else v
    TOKENS         for each token v; if H is D, the last row is the sequence's vector
    SCORES         x, one float for each label
    TOKEN_SCORES   for each token x
    SPARSE         16 · max(0, x - 15/16), one float for each token of the vocabulary: 31 of 32 are 0
    TOKEN_VECTORS  for each token v
    LEXICAL        for each token max(0, x[0])
    HYBRID         for each token v, but in the first row VECTORS; behind it LEXICAL

`mix` is the finalizer of SplitMix64. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecd.shm.output import ModelSizes, Output
from vecd.shm.views import Rows
from vecd.workers.batch import COMPLETE, Engine, Finish, Ints, PackedBatch, write_outputs

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_LEAST_WEIGHT = 15 / 16


class DummyEngine(Engine):
    def __init__(self, model: ModelSizes, s_per_text: float = 0.0) -> None:
        """`s_per_text`: seconds that each sequence takes, slept so that several servers fit on few cores."""
        self._model = model
        self._s_per_text = s_per_text
        self.facts: dict[str, Any] = {"dtype": "float32", "path": "dummy"}
        self.warnings = ["the dummy engine runs no model: its vectors are made up, for tests alone"]

    def allow_leases(self, max_threads: int, *, may_copy_weights: bool) -> Sequence[int]:
        self.thread_choices = range(1, max_threads + 1)
        return self.thread_choices

    def begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        self.embed(batch, rows)
        return COMPLETE

    def embed(self, batch: PackedBatch, rows: Rows) -> None:
        if self._s_per_text:
            time.sleep(self._s_per_text * batch.lengths.size)
        write_outputs(rows, batch, partial(dummy_rows, batch=batch, model=self._model))


def dummy_rows(output: Output, batch: PackedBatch, model: ModelSizes) -> Rows:
    """The rows of all sequences of a batch, as if each had this output: float32 [B or T, width of the output]."""
    width = output.width_of(model)
    match output:
        case Output.UNNORMALIZED if model.is_normalized:
            return _floats(_hashes(batch), width).astype(np.float32)
        case Output.VECTORS | Output.UNNORMALIZED:
            return dummy_vectors(batch, width)
        case Output.TOKENS | Output.TOKEN_VECTORS:
            return dummy_states(batch, width)
        case Output.SCORES:
            return _floats(_hashes(batch), width).astype(np.float32)
        case Output.TOKEN_SCORES:
            return _floats(_token_hashes(batch), width).astype(np.float32)
        case Output.SPARSE:
            floats = _floats(_hashes(batch), width)
            return (np.maximum(0, floats - _LEAST_WEIGHT) / (1 - _LEAST_WEIGHT)).astype(np.float32)
        case Output.LEXICAL:
            return np.maximum(0, _floats(_token_hashes(batch), width)).astype(np.float32)
        case Output.HYBRID:
            vectors = dummy_states(batch, model.token_dim)
            vectors[np.cumsum(batch.lengths) - batch.lengths] = dummy_vectors(batch, model.dim)
            return np.hstack([vectors, dummy_rows(Output.LEXICAL, batch, model)])


def dummy_vectors(batch: PackedBatch, dim: int) -> Rows:
    """The vectors of a batch, float32 [B, dim], each of length 1."""
    return _normalized(_floats(_hashes(batch), dim))


def dummy_states(batch: PackedBatch, hidden_size: int) -> Rows:
    """The rows of all tokens of a batch, float32 [T, hidden_size], each of length 1."""
    return _normalized(_floats(_token_hashes(batch), hidden_size))


def _floats(hashes: NDArray[np.uint64], dim: int) -> NDArray[np.float64]:
    bits = _mix(hashes[:, None] + np.arange(1, dim + 1, dtype=np.uint64) * _GOLDEN) >> np.uint64(40)
    return bits.astype(np.float64) / 2.0**23 - 1.0


def _normalized(floats: NDArray[np.float64]) -> Rows:
    vectors: NDArray[np.float64] = floats / np.linalg.norm(floats, axis=1, keepdims=True)
    return vectors.astype(np.float32)


def _hashes(batch: PackedBatch) -> NDArray[np.uint64]:
    mixed, starts, _ = _mixed(batch)
    return np.add.reduceat(mixed, starts) + _border_hashes(batch)


def _token_hashes(batch: PackedBatch) -> NDArray[np.uint64]:
    mixed, starts, lengths = _mixed(batch)
    sums = np.cumsum(mixed)
    return sums + np.repeat(_border_hashes(batch) + mixed[starts] - sums[starts], lengths)


def _border_hashes(batch: PackedBatch) -> NDArray[np.uint64] | np.uint64:
    return np.uint64(0) if batch.borders is None else _mix(batch.borders.astype(np.uint64))


def _mixed(batch: PackedBatch) -> tuple[NDArray[np.uint64], Ints, Ints]:
    """The addend of each token, shape [T]; the start and the length of each sequence, both [B]."""
    lengths = batch.lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    places = (np.arange(batch.token_ids.size) - np.repeat(starts, lengths) + 1).astype(np.uint64)
    return _mix(batch.token_ids.astype(np.uint64) + places * _GOLDEN), starts, lengths


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
