"""The engine without a model: its definition, and what the rest of the server's tests rely on."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vecd.shm.card import ModelCard
from vecd.shm.heads import Step
from vecd.shm.output import Output
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.dummy import DummyEngine, dummy_rows, dummy_vectors

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


def by_definition(ids: list[int], dim: int, *, border: int = 0, is_normalized: bool = True) -> list[float]:
    """The module's docstring in plain Python: v, or x."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return x ^ (x >> 31)

    h = (mix(border) + sum(mix((token + (place + 1) * _GOLDEN) & _MASK) for place, token in enumerate(ids))) & _MASK
    x = [(mix((h + (j + 1) * _GOLDEN) & _MASK) >> 40) / 2**23 - 1 for j in range(dim)]
    norm = sum(value * value for value in x) ** 0.5 if is_normalized else 1.0
    return [value / norm for value in x]


def rows_by_definition(ids: list[int], border: int, output: Output, model: ModelCard) -> list[list[float]]:
    """Without the zeros behind an output's floats; an output that spans rows has one here."""
    begun = [ids[: end + 1] for end in range(len(ids))]

    def v(tokens: list[int], dim: int) -> list[float]:
        return by_definition(tokens, dim, border=border)

    def x(tokens: list[int], dim: int) -> list[float]:
        return by_definition(tokens, dim, border=border, is_normalized=False)

    match output:
        case Output.VECTORS:
            return [v(ids, model.dim)]
        case Output.UNNORMALIZED:
            return [x(ids, model.dim) if model.is_normalized else v(ids, model.dim)]
        case Output.TOKENS:
            return [v(tokens, model.hidden_size) for tokens in begun]
        case Output.SCORES:
            return [x(ids, model.num_labels)]
        case Output.TOKEN_SCORES:
            return [x(tokens, model.num_labels) for tokens in begun]
        case Output.SPARSE:
            return [[16 * max(0.0, value - 15 / 16) for value in x(ids, model.vocab_size)]]
        case Output.TOKEN_VECTORS:
            return [v(tokens, model.token_dim) for tokens in begun]
        case Output.LEXICAL:
            return [[max(0.0, x(tokens, 1)[0])] for tokens in begun]
        case Output.HYBRID:
            vectors = [v(ids, model.dim), *(v(tokens, model.token_dim) for tokens in begun[1:])]
            return [[*vector, max(0.0, x(tokens, 1)[0])] for vector, tokens in zip(vectors, begun, strict=True)]


@settings(deadline=None)
@given(st.lists(ids_strategy, min_size=1, max_size=5), st.sampled_from([1, 3, 64]))
def test_vectors_are_as_defined(sequences: list[list[int]], dim: int) -> None:
    vectors = dummy_vectors(batch_of(*sequences), dim)
    expected = [by_definition(ids, dim) for ids in sequences]
    np.testing.assert_allclose(vectors, expected, atol=1e-7)


@settings(deadline=None)
@given(ids_strategy, ids_strategy, st.data())
def test_vectors_depend_on_their_own_sequence_alone(ids: list[int], other: list[int], data: st.DataObject) -> None:
    alone = dummy_vectors(batch_of(ids), 64)[0]
    together = dummy_vectors(batch_of(other, ids, other), 64)
    assert np.array_equal(together[1], alone)
    assert np.array_equal(together[0], together[2])
    assert np.array_equal(together[0], alone) == (ids == other)
    shuffled = data.draw(st.permutations(ids))
    assert np.array_equal(dummy_vectors(batch_of(shuffled), 64)[0], alone) == (shuffled == ids)


@settings(deadline=None)
@given(ids_strategy)
def test_vectors_have_length_one(ids: list[int]) -> None:
    assert abs(np.linalg.norm(dummy_vectors(batch_of(ids), 384)) - 1) < 1e-6


def test_a_batch_takes_its_time_for_each_sequence_and_has_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    monkeypatch.setattr(time, "sleep", slept_s.append)
    batch, rows, slow = batch_of([1, 2], [3], [4]), np.zeros((3, 8), np.float32), np.zeros((3, 8), np.float32)
    DummyEngine(card(8)).embed(batch, rows)
    assert slept_s == []
    DummyEngine(card(8), s_per_text=0.01).embed(batch, slow)
    assert slept_s == pytest.approx([0.03])
    np.testing.assert_array_equal(slow, rows)


def test_rows_behind_the_batch_are_left_alone() -> None:
    rows = np.full((4, 8), 7, dtype=np.float32)
    DummyEngine(card(8)).embed(batch_of([1, 2], [3]), rows)
    assert np.array_equal(rows[:2], dummy_vectors(batch_of([1, 2], [3]), 8))
    assert (rows[2:] == 7).all()


def test_zeros_fill_the_rest_of_rows_that_are_wider_than_a_vector() -> None:
    rows = np.full((2, 9), 7, dtype=np.float32)
    DummyEngine(card(8)).embed(batch_of([1, 2]), rows)
    assert np.array_equal(rows[0], [*dummy_vectors(batch_of([1, 2]), 8)[0], 0])
    assert (rows[1] == 7).all()


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], int, Output]:
    """Token ids, a border, an output."""
    ids = draw(ids_strategy)
    return ids, draw(st.integers(0, len(ids) - 1)), draw(st.sampled_from(Output))


@settings(deadline=None)
@given(st.lists(sequences(), min_size=1, max_size=5), st.sampled_from([1, 3, 9]), st.booleans(), st.booleans())
def test_all_outputs_are_as_defined(
    asked: list[tuple[list[int], int, Output]], hidden_size: int, is_normalized: bool, has_borders: bool
) -> None:
    """Outputs and borders of every kind in one batch, in rows of nine floats, of which 40 take five."""
    model = card(8, hidden_size, is_normalized=is_normalized, num_labels=3, token_dim=8)
    row_dim, span = 9, 5
    expected: list[list[float]] = []
    for ids, border, output in asked:
        rows_of_it = rows_by_definition(ids, border * has_borders, output, model)
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
