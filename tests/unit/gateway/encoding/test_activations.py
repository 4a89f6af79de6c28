"""Scores are right where single precision or a plain formula would not be, and the order is that of the logits."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vecd.gateway.encoding.activations import (
    ACTIVATIONS,
    ranked,
    relevance_logits,
    relevance_of,
    sigmoid,
    softmax,
)
from vecd.shm.heads import SCORE_ACTIVATIONS

floats32 = st.floats(-30, 30, width=32)


def test_every_activation_that_a_card_may_name_is_there():
    assert tuple(ACTIVATIONS) == SCORE_ACTIVATIONS


@given(floats32)
def test_a_sigmoid_is_exact_to_the_last_digits(logit):
    [score] = sigmoid(np.array([logit], dtype=np.float32)).tolist()
    expected = 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
    assert score == pytest.approx(expected, rel=4e-16)


@pytest.mark.parametrize("logit", [-3e38, -1000, 1000, 3e38])
def test_extreme_logits_overflow_nothing(logit):
    with np.errstate(all="raise", under="ignore"):
        assert sigmoid(np.array([logit], dtype=np.float32)).tolist() == [float(logit > 0)]
        row = np.array([[logit, 0.0, logit]], dtype=np.float32)
        assert softmax(row)[0].sum() == pytest.approx(1.0)


def test_a_softmax_of_very_negative_logits_is_right():
    """The entry of the greatest magnitude is not the one to subtract."""
    scores = softmax(np.array([[-1000.0, -1001.0]], dtype=np.float32))
    assert scores[0, 0] == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-15)


def test_different_logits_never_make_a_tie():
    """Neighbours in float32 around 12 are the same number as a sigmoid in float32."""
    logits = np.array([12.0, np.nextafter(np.float32(12), np.float32(13))], dtype=np.float32)
    assert len({np.float32(score) for score in sigmoid(logits)}) == 1
    assert len(set(sigmoid(logits).tolist())) == 2


@given(arrays(np.float32, st.integers(1, 40), elements=floats32))
def test_the_order_is_that_of_the_logits_and_stable(logits):
    column = relevance_logits(logits[:, None])
    order = ranked(column)
    assert sorted(order) == list(range(len(logits)))
    assert order == sorted(range(len(logits)), key=lambda index: (-logits[index], index))
    assert ranked(column, 3) == order[:3]


def test_two_labels_rank_by_the_second():
    logits = np.array([[2.0, -1.0], [0.0, 3.0], [1.0, 1.5]], dtype=np.float32)
    column = relevance_logits(logits)
    assert ranked(column) == [1, 2, 0]
    assert relevance_of(column, "softmax") == pytest.approx(softmax(logits)[:, 1], rel=1e-15)


def test_a_softmax_over_one_logit_is_not_always_one():
    column = relevance_logits(np.array([[0.0], [2.0]], dtype=np.float32))
    assert relevance_of(column, "softmax").tolist() == sigmoid(column).tolist()
    assert relevance_of(column, "identity").tolist() == [0.0, 2.0]
    assert relevance_of(column, "tanh").tolist() == pytest.approx([0.0, math.tanh(2)])
