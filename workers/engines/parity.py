"""Parity: whether an engine gives the vectors of the reference model.

Owns the probe sequences, the two figures of the comparison, and the bounds. Knows no engine. Called by
`vecd.workers.engines.selection` for all probes, once for each model, version and processor, and by
`vecd.workers.engines.load` for the short ones at every start.

The reference model is transformers' own modules on one sequence at a time, without packing, padding or neighbours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecd.shm.card import ModelCard
from vecd.shm.output import Output, span_of
from vecd.workers.engine import Engine, PackedBatch
from vecd.workers.special_tokens import special_tokens

_MAX_ABS_DIFF = 1e-5
"""For float32: the largest difference of an element that rounding may cause, relative to the largest element if that is
beyond 1. Measured on all-MiniLM-L6-v2, packed: 1.5e-7."""

_MIN_COSINE = {"bfloat16": 0.998, "float16": 0.998, "int8": 0.99}
"""Measured on all-MiniLM-L6-v2, bfloat16 against float32: 0.9989 at worst, typically 0.9998."""

_NUMBERS = frozenset({Output.SCORES, Output.TOKEN_SCORES, Output.LEXICAL})
"""Outputs whose rows have no direction that means anything: each column is compared by itself."""

_MAX_RELATIVE_DIFF = {"bfloat16": 0.15, "float16": 0.15, "int8": 0.75}
_MIN_SAME_ORDER = {"bfloat16": 0.95, "float16": 0.95, "int8": 0.9}
"""Measured on all-MiniLM-L6-v2 with heads of random weights, three of one label and one of three, against float32: in
bfloat16 0.026 to 0.056, in float16 up to 0.007, and all in the same order; in int8 0.24 to 0.63, and 95 to 98 %."""

_LEAST_UNIT = 1 / 32
"""Of the largest number: of numbers that hardly differ, rounding to 16 bits is not what matters."""

_TOO_CLOSE = 0.05
"""Of the unit: numbers whose order may change."""

_NEIGHBOURS = 16
"""Each row's order is compared with so many others at most."""

# Most wrong paths fail at a border, at a length, or in an order, and short sequences show that as well as long ones:
# 136 tokens in all; 392 took 60 ms on a core for all-MiniLM-L6-v2. Unsorted, and with equal lengths, which have a
# border inside a run.
_SHORT_LENGTHS = (5, 1, 34, 3, 13, 1, 55, 2, 5, 8, 3, 6)
# Beyond the thresholds of engines, and of models with windows.
_LONG_LENGTHS = (256, 170)

_LONGEST_COST = 1e12
"""Multiplications by weights that the longest probe may take: some 20 s on a core. 2,000 tokens of a model with 250
million parameters. Models of billions are compared up to 256 tokens, however long it takes."""


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest distances of vectors from the reference vectors. Not finite if a vector is not."""

    max_abs_diff: float
    min_cosine: float
    """Of vectors; 1 for numbers."""
    scale: float
    """The largest absolute element of the reference vectors."""
    relative_diff: float | None = None
    """Of numbers, such as scores, not of vectors: the largest difference in units of their spread, which is the
    standard deviation of a column of the reference, or _LEAST_UNIT of `scale` if that is more."""
    same_order: float = 1.0
    """Of numbers: the part of pairs of rows that are in the same order, of those that are clearly apart."""

    def is_within_bounds(self, dtype: str) -> bool:
        """Whether the figures are within the bounds for vectors computed in `dtype`. False if they are not finite."""
        if not math.isfinite(self.max_abs_diff):
            return False
        if dtype == "float32":
            return self.max_abs_diff <= _MAX_ABS_DIFF * max(1.0, self.scale)
        if self.relative_diff is not None:
            return self.relative_diff <= _MAX_RELATIVE_DIFF[dtype] and self.same_order >= _MIN_SAME_ORDER[dtype]
        return self.min_cosine >= _MIN_COSINE[dtype]

    def to_json(self) -> dict[str, Any]:
        """ "min_cosine" of vectors, "relative_diff" and "same_order" of numbers."""
        if self.relative_diff is None:
            return {"max_abs_diff": self.max_abs_diff, "min_cosine": self.min_cosine}
        return {
            "max_abs_diff": self.max_abs_diff,
            "relative_diff": self.relative_diff,
            "same_order": self.same_order,
        }

    def __str__(self) -> str:
        if self.relative_diff is not None:
            return (
                f"largest difference {self.max_abs_diff:.1e}, {self.relative_diff:.4f} of their spread, "
                f"{self.same_order:.1%} in the same order"
            )
        return f"largest difference {self.max_abs_diff:.1e}, smallest cosine {self.min_cosine:.5f}"


def all_probes(card: ModelCard, num_parameters: int) -> PackedBatch:
    """Like `random_batch`, from 1 token to the longest affordable length.

    The first of them are `short_probes`.
    """
    affordable = max(*_LONG_LENGTHS, int(_LONGEST_COST / 2 / max(1, num_parameters)))
    return random_batch(card, (*_SHORT_LENGTHS, *_LONG_LENGTHS, affordable))


def short_probes(card: ModelCard) -> PackedBatch:
    """The probes of at most 55 tokens."""
    return random_batch(card, _SHORT_LENGTHS)


def random_batch(card: ModelCard, wanted_lengths: Sequence[int]) -> PackedBatch:
    """Sequences of random ids of the vocabulary, the same at every call, cut to the model's limit, that ask for its
    main output. For a head that gives scores they are between the special tokens of the model's tokenizer, with at
    least one token, and these are nowhere else in them: some heads fail without."""
    before, behind = special_tokens(card)
    lengths = np.clip(wanted_lengths, len(before) + 1 + len(behind), card.max_tokens).astype(np.int32)
    others = np.setdiff1d(np.arange(card.vocab_size, dtype=np.int32), [*before, *behind])
    token_ids = others[np.random.default_rng(seed=0).integers(0, others.size, lengths.sum(), dtype=np.int32)]
    ends = np.cumsum(lengths)
    for place, token in enumerate(before):
        token_ids[ends - lengths + place] = token
    for place, token in enumerate(reversed(behind)):
        token_ids[ends - 1 - place] = token
    output = card.main_output
    if output is Output.VECTORS:
        return PackedBatch(lengths, token_ids)
    # Every other sequence of more than two tokens has a second part, so that both kinds are compared.
    borders = np.where((np.arange(lengths.size) % 2 == 0) & (lengths > 2), lengths // 2, 0).astype(np.int32)
    has_borders = output is Output.SCORES or (card.tokens is not None and card.tokens.has_unattended)
    outputs = np.full(lengths.size, output, dtype=np.uint8)
    span = span_of(card) if output.spans_rows else 1
    return PackedBatch(lengths, token_ids, outputs, borders if has_borders else None, span)


def vectors_of(engine: Engine, batch: PackedBatch, row_dim: int) -> NDArray[np.float32]:
    """The engine's rows for `batch`, float32 [`batch.num_rows`, row_dim]. Raises what the engine raises."""
    rows = np.full((batch.num_rows, row_dim), np.nan, dtype=np.float32)
    engine.embed(batch, rows)
    return rows


def vectors_one_by_one(engine: Engine, batch: PackedBatch, row_dim: int) -> NDArray[np.float32]:
    """Like `vectors_of`, with each sequence in a batch of its own."""
    parts = (batch.part(index, index + 1) for index in range(batch.lengths.size))
    return np.concatenate([vectors_of(engine, part, row_dim) for part in parts])


def compare(
    vectors: NDArray[np.float32],
    reference: NDArray[np.float32],
    span: int = 1,
    output: Output = Output.VECTORS,
) -> Parity:
    """Compare two sets of rows of an output, each [B, D]: vectors row by row, numbers column by column. `span`: so many
    rows are one vector, in both."""
    ours, theirs = (rows.reshape(-1, span * rows.shape[1]).astype(np.float64) for rows in (vectors, reference))
    if output in _NUMBERS:
        return _compare_numbers(ours, theirs)
    with np.errstate(invalid="ignore", divide="ignore"):
        differences = np.abs(ours - theirs)
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        cosines = np.einsum("bd,bd->b", ours, theirs) / norms
    # A zero vector has no direction, but two zero vectors are equal.
    cosines[differences.max(axis=1) == 0] = 1.0
    return Parity(
        max_abs_diff=float(differences.max()),
        min_cosine=float(cosines.min()),
        scale=float(np.abs(theirs).max()),
    )


def _compare_numbers(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> Parity:
    differences, scale = np.abs(ours - theirs), float(np.abs(theirs).max())
    units = np.maximum(theirs.std(axis=0), _LEAST_UNIT * scale)
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.where(differences == 0, 0.0, differences / units)
    num_apart = num_same = 0
    for shift in range(1, min(_NEIGHBOURS, len(theirs))):
        expected = theirs - np.roll(theirs, shift, axis=0)
        is_apart = np.abs(expected) > _TOO_CLOSE * units
        num_apart += int(is_apart.sum())
        num_same += int((is_apart & (np.sign(ours - np.roll(ours, shift, axis=0)) == np.sign(expected))).sum())
    return Parity(
        max_abs_diff=float(differences.max()),
        min_cosine=1.0,
        scale=scale,
        relative_diff=float(relative.max()),
        same_order=num_same / num_apart if num_apart else 1.0,
    )
