"""The engine without a model: its definition, and what the rest of the server's tests rely on."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vecd.shm.output import Output
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.dummy import DummyEngine, dummy_vectors

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15

ids_strategy = st.lists(st.integers(0, 30_000), min_size=1, max_size=20)


def batch_of(*sequences: list[int]) -> PackedBatch:
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int32)
    return PackedBatch(lengths, np.array([token for ids in sequences for token in ids], dtype=np.int32))


def by_definition(ids: list[int], dim: int, *, is_normalized: bool = True) -> list[float]:
    """The module's docstring in plain Python."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return x ^ (x >> 31)

    h = sum(mix((token + (place + 1) * _GOLDEN) & _MASK) for place, token in enumerate(ids)) & _MASK
    x = [(mix((h + (j + 1) * _GOLDEN) & _MASK) >> 40) / 2**23 - 1 for j in range(dim)]
    norm = sum(value * value for value in x) ** 0.5 if is_normalized else 1.0
    return [value / norm for value in x]


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


def test_rows_behind_the_batch_are_left_alone() -> None:
    rows = np.full((4, 8), 7, dtype=np.float32)
    DummyEngine(8).embed(batch_of([1, 2], [3]), rows)
    assert np.array_equal(rows[:2], dummy_vectors(batch_of([1, 2], [3]), 8))
    assert (rows[2:] == 7).all()


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(ids_strategy, st.sampled_from([Output.VECTORS, Output.UNNORMALIZED, Output.TOKENS])),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([1, 3, 8]),
    st.booleans(),
)
def test_other_outputs_are_as_defined(
    sequences: list[tuple[list[int], Output]], hidden_size: int, is_normalized: bool
) -> None:
    dim = 8
    expected: list[list[float]] = []
    for ids, output in sequences:
        if output is Output.TOKENS:
            padding = [0.0] * (dim - hidden_size)
            expected += [by_definition(ids[: end + 1], hidden_size) + padding for end in range(len(ids))]
        else:
            is_raw = output is Output.UNNORMALIZED and is_normalized
            expected.append(by_definition(ids, dim, is_normalized=not is_raw))
    batch = replace(
        batch_of(*[ids for ids, _ in sequences]), outputs=np.array([output for _, output in sequences], dtype=np.uint8)
    )
    rows = np.full((len(expected) + 2, dim), 7, dtype=np.float32)
    DummyEngine(dim, hidden_size, is_normalized=is_normalized).embed(batch, rows)
    assert batch.num_rows == len(expected)
    np.testing.assert_allclose(rows[: len(expected)], expected, atol=1e-7)
    assert (rows[len(expected) :] == 7).all()
