"""The comparison itself; what is done with it is tested in test_engines."""

import numpy as np
import pytest

from vecd.shm.card import ModelCard
from vecd.workers.engines.dummy import DummyEngine
from vecd.workers.engines.parity import all_probes, compare, short_probes, vectors_of, vectors_one_by_one

PLAIN = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)


def card(max_tokens: int = 256, vocab_size: int = 100) -> ModelCard:
    return ModelCard("", "", "bert", 8, 8, max_tokens, vocab_size, ("mean",), (), False, "")


def test_the_same_vectors_agree() -> None:
    parity = compare(PLAIN, PLAIN)
    assert parity.max_abs_diff == 0
    assert parity.min_cosine == pytest.approx(1)
    assert parity.is_within_bounds("float32")
    assert parity.is_within_bounds("bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_disagrees(dtype: str, value: float) -> None:
    broken = PLAIN.copy()
    broken[3, 2] = value
    for ours, theirs in ((broken, PLAIN), (PLAIN, broken), (broken, broken)):
        assert not compare(ours, theirs).is_within_bounds(dtype)


def test_zero_vectors_agree_with_each_other_alone() -> None:
    with_zero = PLAIN.copy()
    with_zero[2] = 0
    assert compare(with_zero, with_zero).is_within_bounds("bfloat16")
    assert not compare(with_zero, PLAIN).is_within_bounds("bfloat16")
    assert not compare(PLAIN, with_zero).is_within_bounds("float32")


def test_float32_is_held_to_a_difference() -> None:
    one_off = PLAIN.copy()
    one_off[0, 0] += 5e-4
    assert not compare(one_off, PLAIN).is_within_bounds("float32")
    assert compare(one_off, PLAIN).is_within_bounds("bfloat16")


def test_the_bound_grows_with_vectors_that_are_not_normalized() -> None:
    large = PLAIN * 1000
    assert compare(large + np.float32(1e-3), large).is_within_bounds("float32")
    assert not compare(large + np.float32(1e-1), large).is_within_bounds("float32")


def test_one_turned_row_is_enough_to_disagree() -> None:
    turned = PLAIN.copy()
    turned[4] = turned[4][::-1]
    assert not compare(turned, PLAIN).is_within_bounds("bfloat16")


@pytest.mark.parametrize(
    ("max_tokens", "num_parameters", "longest"),
    [
        (1, 10**6, 1),
        (4, 10**6, 4),
        (60, 10**6, 60),
        (512, 3 * 10**8, 512),
        (8192, 25 * 10**7, 2000),
        (8192, 10**10, 256),
    ],
)
def test_probes_reach_from_one_token_to_the_longest_that_is_affordable(
    max_tokens: int, num_parameters: int, longest: int
) -> None:
    batch = all_probes(card(max_tokens), num_parameters)
    assert batch.lengths.min() == 1
    assert batch.lengths.max() == longest
    assert batch.token_ids.size == batch.lengths.sum()
    assert 0 <= batch.token_ids.min() <= batch.token_ids.max() < 100
    assert np.array_equal(batch.token_ids, all_probes(card(max_tokens), num_parameters).token_ids)


@pytest.mark.parametrize("max_tokens", [1, 40, 512])
def test_the_short_probes_are_the_first_of_all(max_tokens: int) -> None:
    short, every = short_probes(card(max_tokens)), all_probes(card(max_tokens), 10**6)
    assert np.array_equal(short.lengths, every.lengths[: short.lengths.size])
    assert np.array_equal(short.token_ids, every.token_ids[: short.token_ids.size])
    assert short.lengths.max() <= 55


def test_one_by_one_is_in_the_order_of_the_batch() -> None:
    batch = short_probes(card())
    engine = DummyEngine(card())
    assert np.array_equal(vectors_one_by_one(engine, batch, 8), vectors_of(engine, batch, 8))
