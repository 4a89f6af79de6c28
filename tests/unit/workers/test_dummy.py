"""The engine without a model: its definition, and what the rest of the server's tests rely on."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vecd.model.card import ModelCard
from vecd.model.steps import Step
from vecd.shm.output import Output
from vecd.workers.batch import PackedBatch
from vecd.workers.dummy import DummyEngine, dummy_rows

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15

ids_strategy = st.lists(st.integers(0, 30_000), min_size=1, max_size=20)


def batch_of(*sequences: list[int]) -> PackedBatch:
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int32)
    return PackedBatch(lengths, np.array([token for ids in sequences for token in ids], dtype=np.int32))


def card(dim: int, hidden_size: int | None = None, *, is_normalized: bool = True, **sizes: Any) -> ModelCard:
    steps = (Step("normalize"),) * is_normalized
    sizes = {"vocab_size": 40, **sizes}
    return ModelCard(
        "", "", "bert", hidden_size or dim, dim, 32, pooling=("mean",), steps=steps, lowercase=False, prompt="", **sizes
    )


def by_definition(ids: list[int], dim: int, border: int) -> list[float]:
    """The module's docstring in plain Python: v."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return x ^ (x >> 31)

    h = (mix(border) + sum(mix((token + (place + 1) * _GOLDEN) & _MASK) for place, token in enumerate(ids))) & _MASK
    x = [(mix((h + (j + 1) * _GOLDEN) & _MASK) >> 40) / 2**23 - 1 for j in range(dim)]
    norm = sum(value * value for value in x) ** 0.5
    return [value / norm for value in x]


def test_a_batch_takes_its_time_for_each_sequence_and_has_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    monkeypatch.setattr(time, "sleep", slept_s.append)
    batch, rows, slow = batch_of([1, 2], [3], [4]), np.zeros((3, 8), np.float32), np.zeros((3, 8), np.float32)
    DummyEngine(card(8)).embed(batch, rows)
    assert slept_s == []
    DummyEngine(card(8), s_per_text=0.01).embed(batch, slow)
    assert slept_s == pytest.approx([0.03])
    np.testing.assert_array_equal(slow, rows)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], int, Output]:
    """Token ids, a border, an output."""
    ids = draw(ids_strategy)
    return ids, draw(st.integers(0, len(ids) - 1)), draw(st.sampled_from(Output))


@settings(deadline=None)
@given(st.lists(sequences(), min_size=1, max_size=5), st.sampled_from([1, 3, 9]), st.booleans(), st.booleans())
def test_rows_of_a_batch_are_those_of_each_sequence_alone(
    asked: list[tuple[list[int], int, Output]], hidden_size: int, is_normalized: bool, has_borders: bool
) -> None:
    """Outputs and borders of every kind in one batch, in rows of nine floats, of which 40 take five."""
    model = card(8, hidden_size, is_normalized=is_normalized, num_labels=3, token_dim=8)
    row_dim, span = 9, 5
    expected: list[list[float]] = []
    for ids, border, output in asked:
        alone = replace(batch_of(ids), borders=np.array([border * has_borders], dtype=np.int32))
        rows_of_it = dummy_rows(output, alone, model).tolist()
        if output == Output.VECTORS:
            np.testing.assert_allclose(rows_of_it, [by_definition(ids, 8, border * has_borders)], atol=1e-7)
        if output.spans_rows:
            [floats] = rows_of_it
            padded = floats + [0.0] * (span * row_dim - len(floats))
            rows_of_it = [padded[start : start + row_dim] for start in range(0, len(padded), row_dim)]
        expected += [row + [0.0] * (row_dim - len(row)) for row in rows_of_it]
    batch = replace(
        batch_of(*[ids for ids, _, _ in asked]),
        outputs=np.array([output for _, _, output in asked], dtype=np.uint8),
        borders=np.array([border for _, border, _ in asked], dtype=np.int32) if has_borders else None,
        span=span,
    )
    rows = np.full((len(expected) + 2, row_dim), 7, dtype=np.float32)
    DummyEngine(model).embed(batch, rows)
    assert batch.num_rows == len(expected)
    np.testing.assert_allclose(rows[: len(expected)], expected, atol=1e-7)
    assert (rows[len(expected) :] == 7).all()


def test_outputs_of_tokens_hold_the_vectors_of_texts() -> None:
    batch, model = batch_of([1, 2, 3], [4]), card(8, token_dim=8)
    vectors = dummy_rows(Output.VECTORS, batch, model)
    np.testing.assert_array_equal(dummy_rows(Output.TOKENS, batch, model)[[2, 3]], vectors)
    np.testing.assert_array_equal(dummy_rows(Output.HYBRID, batch, model)[[0, 3], :8], vectors)
    assert dummy_rows(Output.LEXICAL, batch, model).min() >= 0


@settings(deadline=None)
@given(ids_strategy.filter(lambda ids: len(ids) > 2), st.sampled_from(Output))
def test_a_border_that_is_lost_shows_in_every_output(ids: list[int], output: Output) -> None:
    model = card(8, num_labels=3, token_dim=8, vocab_size=1000)
    plain = batch_of(ids, ids, ids)
    bordered = replace(plain, borders=np.array([0, 1, 2], dtype=np.int32))
    num_rows = output.num_rows(len(ids))
    made = dummy_rows(output, bordered, model).reshape(3, num_rows, -1)
    assert np.array_equal(made[0], dummy_rows(output, batch_of(ids), model))
    if made.any(axis=(1, 2)).sum() > 1:  # weights of few tokens may all be 0
        assert not any(np.array_equal(made[one], made[other]) for one, other in ((0, 1), (0, 2), (1, 2)))


@settings(deadline=None)
@given(ids_strategy)
def test_a_sparse_vector_has_few_weights_and_none_below_zero(ids: list[int]) -> None:
    [weights] = dummy_rows(Output.SPARSE, batch_of(ids), card(8, vocab_size=30_000))
    assert weights.min() == 0
    assert weights.max() <= 1
    assert 0.025 < np.count_nonzero(weights) / weights.size < 0.04
