"""Collect a matrix for each input, with a row for each of its tokens.

Owns the copies, and which tokens of a multi-vector model have no vector. Rows come in parts, because many floats are
delivered over several turns of the event loop. Made by `vecd.gateway.encoding.fragments`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vecd.gateway.types.request import EmbedRequest, Role
from vecd.shm.heads import TokenHead


class TokenParts:
    """The rows of inputs of which some have come."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: dict[int, list[NDArray[np.float32]]] = {}

    def add(self, index: int, rows: NDArray[np.float32], num_left: int) -> NDArray[np.float32] | None:
        """Copy the next rows of input `index`, float32 [n, width]. With the last ones (`num_left` is 0), return all of
        the input's, float32 [T, width], which the caller owns."""
        if not num_left and index not in self._parts:
            return rows.copy()
        parts = self._parts.setdefault(index, [])
        parts.append(rows.copy())
        return None if num_left else np.concatenate(self._parts.pop(index))


class DroppedTokens:
    """Which tokens of a request's inputs have no vector."""

    __slots__ = ("_drops_first", "_ignored_ids", "_num_queries", "_token_ids")

    def __init__(
        self, head: TokenHead, request: EmbedRequest, token_ids: Sequence[NDArray[np.int32]], *, drops_first: bool
    ) -> None:
        """`token_ids`: those of each input, shape [T]; read when its rows have come. `drops_first`: the first row is no
        token's, whatever the head says."""
        self._token_ids = token_ids
        # All tokens of a query count, its expansion too.
        is_query = request.tokenizing.role is Role.QUERY
        self._num_queries = len(request.inputs) if is_query else request.tokenizing.num_queries
        self._ignored_ids = head.ignored_ids
        self._drops_first = head.drops_first or drops_first

    def without(self, index: int, rows: NDArray[np.float32], num_left: int = 0) -> NDArray[np.float32]:
        """The rows (float32 [n, width]) of input `index`, all or some, without those of tokens that have none; `rows`
        itself if all have one. `num_left` more stand behind them."""
        ignored_ids = () if index < self._num_queries else self._ignored_ids
        if not ignored_ids and not self._drops_first:
            return rows
        token_ids = self._token_ids[index]
        end = len(token_ids) - num_left
        start = end - len(rows)
        has_vector = ~np.isin(token_ids[start:end], ignored_ids)
        if self._drops_first and not start:
            has_vector[0] = False
        return rows if has_vector.all() else rows[has_vector]


class TokenRows:
    """A matrix for each input."""

    __slots__ = ("_dropped", "_parts", "matrices")

    def __init__(self, num_inputs: int, width: int, dropped: DroppedTokens | None = None) -> None:
        """`width`: floats of a row. `dropped` None: every token has a row."""
        self.matrices: list[NDArray[np.float32]] = [np.empty((0, width), dtype=np.float32)] * num_inputs
        """In input order, float32 [rows of the input, width]; before an input has come, without rows."""
        self._dropped = dropped
        self._parts = TokenParts()

    def put(self, index: int, rows: NDArray[np.float32]) -> None:
        raise ValueError("rows of tokens come by `put_tokens`")

    def put_tokens(self, index: int, rows: NDArray[np.float32], num_left: int) -> None:
        matrix = self._parts.add(index, rows, num_left)
        if matrix is not None:
            self.put_matrix(index, matrix)

    def put_matrix(self, index: int, matrix: NDArray[np.float32]) -> None:
        """Take all rows of input `index`, float32 [T, width], which this owns from now on."""
        self.matrices[index] = matrix if self._dropped is None else self._dropped.without(index, matrix)
