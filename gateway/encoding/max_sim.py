"""Score how well documents answer queries by the vectors of their tokens: late interaction, as in ColBERT.

Owns the formula, the vectors of the queries, and what is kept of documents: for each vector of the query the greatest
dot product with any vector of the document counts, and the score is their sum, or their mean. Computed in float32, as
PyLate and sentence-transformers do. The rows of a document are compared as they come, and dropped. Made by
`vecd.gateway.encoding.fragments`.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vecd.gateway.encoding.token_rows import DroppedTokens, TokenParts

MAX_SHORT_QUERY = 512
"""Tokens of a query that is compared on the event loop. With 32,768 floats of a document, which is the most that is
delivered in one turn, that takes 0.4 to 0.6 ms on one core (AVX-512, 128 to 1,024 floats a row)."""


class MaxSimRows:
    """The score of each document for its own query or, where there is one, for that."""

    __slots__ = (
        "_dropped",
        "_greatest",
        "_held",
        "_is_mean",
        "_parts",
        "_queries",
        "_scores",
        "num_come",
        "num_queries_left",
        "on_come",
    )

    def __init__(self, num_inputs: int, num_queries: int, dropped: DroppedTokens, *, is_mean: bool) -> None:
        """The first `num_queries` inputs are queries, and the others documents: as many, or any number for one query.
        `is_mean`: the score is the mean of the greatest products, not their sum."""
        self.on_come: Callable[[], None] | None = None
        """Called when all rows of an input have come."""
        self.num_come = 0
        """Inputs whose rows have all come."""
        self.num_queries_left = num_queries
        """Queries whose rows have not all come."""
        self._queries: list[NDArray[np.float32] | None] = [None] * num_queries
        self._scores = np.zeros(num_inputs - num_queries)
        self._greatest: dict[int, NDArray[np.float32]] = {}
        """By the index of a document: the greatest product of each vector of its query, of the rows that have come."""
        self._held: dict[int, list[NDArray[np.float32]]] = {}
        """By the index of a document: rows that came before its query, or whose query is not short."""
        self._parts = TokenParts()
        self._dropped = dropped
        self._is_mean = is_mean

    @property
    def num_floats(self) -> int:
        """What is kept, of queries and of documents."""
        queries = sum(query.size for query in self._queries if query is not None)
        return queries + sum(rows.size for parts in self._held.values() for rows in parts)

    def put(self, index: int, rows: NDArray[np.float32]) -> None:
        raise ValueError("rows of tokens come by `put_tokens`")

    def put_tokens(self, index: int, rows: NDArray[np.float32], num_left: int) -> None:
        if index < len(self._queries):
            self._put_query(index, rows, num_left)
        else:
            self._put_document(index - len(self._queries), self._dropped.without(index, rows, num_left), num_left)
        if not num_left:
            self.num_come += 1
            if self.on_come is not None:
                self.on_come()

    def scores(self) -> NDArray[np.float64]:
        """The score of each document, shape [documents], once all rows have come; 0 where the query or the document has
        no vectors, as a document of nothing but ignored tokens. Takes as long as `compare_held`."""
        self.compare_held()
        return self._scores

    def compare_held(self) -> None:
        """Compare the rows that are held, and drop them. Call when all queries have come, and all rows of documents of
        which some have; until it returns, no row may come. Takes seconds with long queries: call in a thread."""
        for index, parts in self._held.items():
            query = self._query_of(index)
            assert query is not None
            for rows in parts:
                self._compare(index, query, rows)
            self._finish(index)
        self._held.clear()

    def _put_query(self, index: int, rows: NDArray[np.float32], num_left: int) -> None:
        matrix = self._parts.add(index, rows, num_left)
        if matrix is None:
            return
        self._queries[index] = self._dropped.without(index, matrix)
        self.num_queries_left -= 1

    def _put_document(self, index: int, rows: NDArray[np.float32], num_left: int) -> None:
        query = self._query_of(index)
        if query is None or len(query) > MAX_SHORT_QUERY:
            self._held.setdefault(index, []).append(rows.copy())
            return
        self._compare(index, query, rows)
        if not num_left and index not in self._held:
            self._finish(index)

    def _query_of(self, index: int) -> NDArray[np.float32] | None:
        return self._queries[index if len(self._queries) > 1 else 0]

    def _compare(self, index: int, query: NDArray[np.float32], rows: NDArray[np.float32]) -> None:
        """Take the next rows of a document; their order does not matter."""
        if not len(query) or not len(rows):
            return
        greatest = (query @ rows.T).max(axis=1)
        before = self._greatest.get(index)
        self._greatest[index] = greatest if before is None else np.maximum(before, greatest)

    def _finish(self, index: int) -> None:
        greatest = self._greatest.pop(index, None)
        if greatest is not None:
            self._scores[index] = greatest.mean() if self._is_mean else greatest.sum()
