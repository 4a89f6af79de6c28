"""Collect all that BGE-M3 makes of an input in one pass: a dense vector, a sparse one, and one for each token.

Owns where each of them stands in the rows of Output.HYBRID. Made by `vecd.gateway.encoding.fragments`.
"""

import numpy as np
from numpy.typing import NDArray

from vecd.gateway.encoding.sparse import SparseRows
from vecd.gateway.encoding.token_rows import TokenParts, TokenRows


class HybridRows:
    """The rows of three outputs, of each input."""

    __slots__ = ("_parts", "dense", "sparse", "tokens")

    def __init__(self, num_inputs: int, dim: int, sparse: SparseRows, tokens: TokenRows) -> None:
        self.dense: NDArray[np.float32] = np.empty((num_inputs, dim), dtype=np.float32)
        """The model's vectors, shape [num_inputs, dim], in input order."""
        self.sparse = sparse
        self.tokens = tokens
        self._parts = TokenParts()

    def put(self, index: int, rows: NDArray[np.float32]) -> None:
        raise ValueError("rows of tokens come by `put_tokens`")

    def put_tokens(self, index: int, rows: NDArray[np.float32], num_left: int) -> None:
        """`rows` are [n, token_dim + 1], and the first one of an input has the model's vector in its token's place."""
        matrix = self._parts.add(index, rows, num_left)
        if matrix is not None:
            self.dense[index] = matrix[0, : self.dense.shape[1]]
            self.sparse.put_weights(index, matrix[:, -1])
            self.tokens.put_matrix(index, matrix[:, :-1])
