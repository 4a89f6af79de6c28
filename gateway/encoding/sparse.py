"""Collect a sparse vector for each input: the indices of its weights, and the weights.

Owns the two ways to it: from a weight for each token of the vocabulary (Output.SPARSE), and from a weight for each
token of the sequence (Output.LEXICAL). A weight of 0 is none. Made by `vecd.gateway.encoding.fragments`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vecd.gateway.encoding.token_rows import TokenParts
from vecd.gateway.types.request import SparseOptions

SparseVector = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Indices, ascending, and their weights, above 0. Both of the same length, which may be 0."""

_EMPTY: SparseVector = (np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32))


class SparseRows:
    """A sparse vector for each input."""

    __slots__ = ("_ignored_ids", "_options", "_parts", "_token_ids", "vectors")

    def __init__(
        self,
        num_inputs: int,
        options: SparseOptions,
        token_ids: Sequence[NDArray[np.int32]] = (),
        ignored_ids: Sequence[int] = (),
    ) -> None:
        """For weights by token of the sequence: `token_ids` of each input, shape [T], are read when its rows have come;
        `ignored_ids` have no weight."""
        self.vectors: list[SparseVector] = [_EMPTY] * num_inputs
        """In input order."""
        self._options = options
        self._token_ids = token_ids
        self._ignored_ids = ignored_ids
        self._parts = TokenParts()

    def put(self, index: int, rows: NDArray[np.float32]) -> None:
        """`rows` are weights over the vocabulary, [n, V]."""
        for row in rows:
            indices = np.flatnonzero(row > self._least_weight)
            self.vectors[index] = self._largest(indices.astype(np.int32), row[indices])
            index += 1

    def put_tokens(self, index: int, rows: NDArray[np.float32], num_left: int) -> None:
        """`rows` are weights of tokens, [n, 1]."""
        weights = self._parts.add(index, rows, num_left)
        if weights is not None:
            self.put_weights(index, weights[:, 0])

    def put_weights(self, index: int, weights: NDArray[np.float32]) -> None:
        """Take the weights of all tokens of input `index`, float32 [T]. Of equal tokens the largest counts."""
        token_ids = self._token_ids[index]
        counts = (weights > self._least_weight) & ~np.isin(token_ids, self._ignored_ids)
        token_ids, weights = token_ids[counts], weights[counts]
        order = np.lexsort((-weights, token_ids))
        indices, firsts = np.unique(token_ids[order], return_index=True)
        self.vectors[index] = self._largest(indices, weights[order[firsts]])

    @property
    def _least_weight(self) -> float:
        """Weights are greater."""
        return max(0.0, self._options.min_weight)

    def _largest(self, indices: NDArray[np.int32], weights: NDArray[np.float32]) -> SparseVector:
        """What `top_k` leaves; of equal weights those with the lower indices."""
        top_k = self._options.top_k
        if top_k is None or top_k >= indices.size:
            return indices, weights
        kept = np.sort(np.argsort(-weights, kind="stable")[:top_k])
        return indices[kept], weights[kept]
