"""From logits to scores, and from scores to an order.

Owns the activations that models and requests name, and the order of documents. Logits come from workers in float32;
everything here is computed in float64, because a sigmoid in half or single precision gives 1.0 to many documents. The
order is that of the logits, so no rounding of an activation can change it. Pure. Called by dialects.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Scores: TypeAlias = NDArray[np.float64]
Logits: TypeAlias = NDArray[np.floating[Any]]


def identity(logits: Logits) -> Scores:
    return logits.astype(np.float64)


def sigmoid(logits: Logits) -> Scores:
    """The exponent is never positive, so nothing overflows, and small scores keep all their digits."""
    values = logits.astype(np.float64)
    small = np.exp(-np.abs(values))
    scores: Scores = np.where(values >= 0, 1.0, small) / (1.0 + small)
    return scores


def softmax(logits: Logits) -> Scores:
    """Over the last axis."""
    values = logits.astype(np.float64)
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    scores: Scores = powers / powers.sum(axis=-1, keepdims=True)
    return scores


def tanh(logits: Logits) -> Scores:
    scores: Scores = np.tanh(logits.astype(np.float64))
    return scores


ACTIVATIONS: Mapping[str, Callable[[Logits], Scores]] = {
    "identity": identity,
    "sigmoid": sigmoid,
    "softmax": softmax,
    "tanh": tanh,
}
"""By the names of `vecd.shm.heads.SCORE_ACTIVATIONS`. Each takes logits [..., k], and returns as many scores."""


def relevance_logits(logits: Logits) -> Scores:
    """One logit for each row of [N, k], with k of 1 or 2.

    Of two labels, "not relevant" and "relevant", it is the logarithm of the odds of the second: its sigmoid is the
    softmax's second column. LangChain takes the second column of such a model, too; sentence-transformers' `rank` and
    text-embeddings-inference's `/rerank` refuse two labels.
    """
    values = logits.astype(np.float64)
    if values.shape[1] == 1:
        return values[:, 0]
    difference: Scores = values[:, 1] - values[:, 0]
    return difference


def relevance_of(logits: Scores, activation: str) -> Scores:
    """Scores for the logits [N] of `relevance_logits`. The softmax over a single logit would be 1.0 for every document;
    where a model names it, the sigmoid is meant."""
    return ACTIVATIONS["sigmoid" if activation == "softmax" else activation](logits)


def ranked(logits: Scores, num: int | None = None) -> list[int]:
    """The indices of the `num` greatest logits, the greatest first; equal ones in their own order. None: of all."""
    order: list[int] = np.argsort(-logits, kind="stable")[:num].tolist()
    return order
