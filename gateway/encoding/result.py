"""The pending result of a request: its rows, collected in the order in which its batches finish.

Knows no worker and no slot: rows are borrowed until a call returns, and those that are collected as arrays are copied.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vecd.gateway.errors import ApiError
from vecd.gateway.request import Collector, EmbedRequest, Role
from vecd.gateway.tokenization.late_chunks import LateChunks
from vecd.model.steps import TokenHead
from vecd.shm.output import Output

FloatRows: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int32]


class Delivered(Protocol):
    """What a pending result uses of the sequence to which rows belong."""

    index: int
    weight: int
    output: Output
    chunked: "ChunkedInput | None"


class ChunkedInput:
    """Makes one vector of those of an input's chunks. Source of the mean, and of its weights: LangChain's
    `OpenAIEmbeddings`, which does the same for servers that accept no long texts."""

    __slots__ = ("_num_missing", "_sum", "_total_weight", "is_normalized")

    def __init__(self, num_chunks: int, *, is_normalized: bool) -> None:
        """`is_normalized`: the mean is brought to length 1 again."""
        self._num_missing = num_chunks
        self._sum: NDArray[np.float64] | None = None
        self._total_weight = 0
        self.is_normalized = is_normalized

    def add(self, row: FloatRows, weight: int) -> FloatRows | None:
        """Take a chunk's row (float32 [D], borrowed). With the last one, return the input's: float32 [1, D]."""
        weighted = row.astype(np.float64) * weight
        self._sum = weighted if self._sum is None else self._sum + weighted
        self._total_weight += weight
        self._num_missing -= 1
        if self._num_missing:
            return None
        mean = self._sum / max(1, self._total_weight)
        if self.is_normalized and (norm := float(np.linalg.norm(mean))) > 0:
            mean /= norm
        return mean.astype(np.float32)[None]


class PendingResult:
    """`finished` resolves when every row was delivered, or raises the ApiError of the first failure. Once it is done,
    for any reason, the sequences that are still queued are abandoned and never reach a worker."""

    __slots__ = ("_collectors", "finished", "num_missing")

    def __init__(self, num_inputs: int, collectors: tuple[Collector, ...], loop: asyncio.AbstractEventLoop) -> None:
        self.finished: asyncio.Future[None] = loop.create_future()
        self.num_missing = num_inputs
        """Inputs whose rows have not all been delivered."""
        self._collectors = collectors

    @property
    def is_over(self) -> bool:
        """Whether it is complete, has failed, or was abandoned."""
        return self.finished.done()

    def deliver(self, index: int, rows: FloatRows) -> None:
        """Take the rows (float32 [n, D], borrowed until this returns) of inputs `index` … `index + n - 1`."""
        if self.finished.done():
            return
        try:
            for collector in self._collectors:
                collector.put(index, rows)
        except ApiError as error:  # the rows cannot have this form
            self.fail(error.with_traceback(None))  # its frames hold the rows
        else:
            self._count(len(rows))

    def deliver_one(self, sequence: Delivered, rows: FloatRows, num_left: int = 0) -> None:
        """Take the next rows (float32 [n, D], or [n, H] of tokens, C-contiguous, borrowed) of a sequence that is not
        `is_plain`; `num_left` more rows will follow."""
        if self.is_over:
            return
        if sequence.output.is_per_token:
            try:
                for collector in self._collectors:
                    collector.put_tokens(sequence.index, rows, num_left)
            except ApiError as error:
                self.fail(error.with_traceback(None))
            else:
                if not num_left:
                    self._count(1)
        elif sequence.chunked is not None:
            mean = sequence.chunked.add(rows[0], sequence.weight)
            if mean is not None:
                self.deliver(sequence.index, mean)

    def _count(self, num_inputs: int) -> None:
        self.num_missing -= num_inputs
        if self.num_missing == 0:
            self.finished.set_result(None)

    def fail(self, error: ApiError) -> None:
        if not self.is_over:
            self.finished.set_exception(error)

    def abandon(self) -> None:
        """The client has disconnected, or the deadline has passed."""
        self.finished.cancel()


class WholeInputs(Collector):
    """Gets all rows of an input's tokens at once: many floats are delivered over several turns of the event loop."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: dict[int, list[FloatRows]] = {}

    def put_tokens(self, index: int, rows: FloatRows, num_left: int) -> None:
        parts = self._parts.setdefault(index, [])
        parts.append(rows.copy())
        if not num_left:
            del self._parts[index]
            self.put_whole(index, parts[0] if len(parts) == 1 else np.concatenate(parts))

    def put_whole(self, index: int, rows: FloatRows) -> None:
        """Take all rows of input `index`, float32 [T, width], which this owns from now on."""
        raise NotImplementedError


class DroppedTokens:
    """Which tokens of a request's inputs have no vector."""

    __slots__ = ("_drops_first", "_ignored_ids", "_num_queries", "_token_ids")

    def __init__(self, head: TokenHead, request: EmbedRequest, token_ids: Sequence[Ints], *, drops_first: bool) -> None:
        """`token_ids`: those of each input, shape [T]; read when its rows have come. `drops_first`: the first row is no
        token's, whatever the head says."""
        self._token_ids = token_ids
        # All tokens of a query count, its expansion too.
        is_query = request.tokenizing.role is Role.QUERY
        self._num_queries = len(request.inputs) if is_query else request.tokenizing.num_queries
        self._ignored_ids = head.ignored_ids
        self._drops_first = head.drops_first or drops_first

    def without(self, index: int, rows: FloatRows, num_left: int = 0) -> FloatRows:
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


class TokenRows(WholeInputs):
    """A matrix for each input."""

    __slots__ = ("_dropped", "matrices")

    def __init__(self, num_inputs: int, width: int, dropped: DroppedTokens | None = None) -> None:
        """`width`: floats of a row. `dropped` None: every token has a row."""
        super().__init__()
        self.matrices: list[FloatRows] = [np.empty((0, width), dtype=np.float32)] * num_inputs
        """In input order, float32 [rows of the input, width]; before an input has come, without rows."""
        self._dropped = dropped

    def put_whole(self, index: int, rows: FloatRows) -> None:
        self.matrices[index] = rows if self._dropped is None else self._dropped.without(index, rows)


class ScoreRows(Collector):
    """The logits of each input, as the model gave them: a request may ask for another activation than the model's."""

    __slots__ = ("logits",)

    def __init__(self, num_inputs: int, num_labels: int) -> None:
        self.logits: FloatRows = np.empty((num_inputs, num_labels), dtype=np.float32)
        """Shape [num_inputs, num_labels], in input order."""

    def put(self, index: int, rows: FloatRows) -> None:
        self.logits[index : index + len(rows)] = rows


_CHUNKS_PER_STEP = 32
"""Encoded at once."""


class _Sums:
    """The sums of the rows between each two borders of one input: chunks may overlap, and a row is added once."""

    __slots__ = ("_borders", "_position", "sums")

    def __init__(self, borders: Ints, width: int) -> None:
        self._borders = borders
        self._position = 0
        self.sums = np.zeros((len(borders) - 1, width))

    def add(self, rows: FloatRows) -> None:
        """Take the next rows, float32 [n, width], borrowed."""
        start, stop = self._position, self._position + len(rows)
        first, last = np.searchsorted(self._borders, (start + 1, stop))
        starts = np.maximum(self._borders[first - 1 : last] - start, 0)
        self.sums[first - 1 : last] += np.add.reduceat(rows, starts, axis=0, dtype=np.float64)
        self._position = stop


class LateChunkRows(Collector):
    """The vectors of the chunks of each input: the means of their tokens, made while the rows come."""

    __slots__ = ("_encode", "_width", "chunks", "sums")

    def __init__(self, chunks: Sequence[LateChunks], width: int, encode: Callable[[FloatRows], list[bytes]]) -> None:
        """`chunks` of each input are read when its rows come. `encode` makes a fragment of JSON of each mean, float32
        [n, width]."""
        self.chunks = chunks
        self._width = width
        self._encode = encode
        self.sums: dict[int, _Sums] = {}

    def put_tokens(self, index: int, rows: FloatRows, num_left: int) -> None:
        sums = self.sums.get(index)
        if sums is None:
            sums = self.sums[index] = _Sums(self.chunks[index].borders, self._width)
        sums.add(rows)

    def fragments(self, index: int) -> Iterator[bytes | None]:
        """The JSON of each chunk's vector of input `index`, whose rows have all come; None for a chunk that was cut
        off. Takes milliseconds now and then. Raises BadRequest for a vector that does not fit its type."""
        chunks = self.chunks[index]
        borders, sums = chunks.borders, self.sums[index].sums
        start, stop = chunks.prompt
        if stop > start:
            sums[np.searchsorted(borders, start)] = 0  # until its end, there is no other border
        until = np.concatenate((np.zeros((1, self._width)), np.cumsum(sums, axis=0)))
        has_rows = chunks.rows[:, 0] < chunks.rows[:, 1]
        starts, stops = chunks.rows[has_rows].T
        nums = stops - starts - np.where(starts <= start, stop - start, 0)
        totals = until[np.searchsorted(borders, stops)] - until[np.searchsorted(borders, starts)]
        means = (totals / nums[:, None]).astype(np.float32)
        runs = (means[at : at + _CHUNKS_PER_STEP] for at in range(0, len(means), _CHUNKS_PER_STEP))
        encoded = chain.from_iterable(map(self._encode, runs))
        yield from (next(encoded) if has else None for has in has_rows.tolist())


MAX_SHORT_QUERY = 512
"""Tokens of a query that is compared on the event loop. With 32,768 floats of a document, which is the most that is
delivered in one turn, that takes 0.4 to 0.6 ms on one core (AVX-512, 128 to 1,024 floats a row)."""


class MaxSimRows(WholeInputs):
    """The score of each document for its own query or, where there is one, for that: late interaction, as in ColBERT.
    Computed in float32, as PyLate and sentence-transformers do. Rows of a document are compared as they come, and
    dropped."""

    __slots__ = (
        "_dropped",
        "_greatest",
        "_is_mean",
        "_queries",
        "_scores",
        "held",
        "num_come",
        "num_queries_left",
        "on_come",
    )

    def __init__(self, num_inputs: int, num_queries: int, dropped: DroppedTokens, *, is_mean: bool) -> None:
        """The first `num_queries` inputs are queries, and the others documents: as many, or any number for one query.
        `is_mean`: the score is the mean of the greatest products, not their sum."""
        super().__init__()
        self.on_come: Callable[[], None] | None = None
        """Called when all rows of an input have come."""
        self.num_come = 0
        """Inputs whose rows have all come."""
        self.num_queries_left = num_queries
        """Queries whose rows have not all come."""
        self._queries: list[FloatRows | None] = [None] * num_queries
        self._scores = np.zeros(num_inputs - num_queries)
        self._greatest: dict[int, FloatRows] = {}
        """By the index of a document: the greatest product of each vector of its query, of the rows that have come."""
        self.held: dict[int, list[FloatRows]] = {}
        """By the index of a document: rows that came before its query, or whose query is not short."""
        self._dropped = dropped
        self._is_mean = is_mean

    @property
    def num_floats(self) -> int:
        """What is kept, of queries and of documents."""
        queries = sum(query.size for query in self._queries if query is not None)
        return queries + sum(rows.size for parts in self.held.values() for rows in parts)

    def put_tokens(self, index: int, rows: FloatRows, num_left: int) -> None:
        if index < len(self._queries):
            super().put_tokens(index, rows, num_left)
        else:
            self._put_document(index - len(self._queries), self._dropped.without(index, rows, num_left), num_left)
        if not num_left:
            self.num_come += 1
            if self.on_come is not None:
                self.on_come()

    def put_whole(self, index: int, rows: FloatRows) -> None:
        self._queries[index] = self._dropped.without(index, rows)
        self.num_queries_left -= 1

    def scores(self) -> NDArray[np.float64]:
        """The score of each document, shape [documents], once all rows have come; 0 where the query or the document has
        no vectors, as a document of nothing but ignored tokens. Takes as long as `compare_held`."""
        self.compare_held()
        return self._scores

    def compare_held(self) -> None:
        """Compare the rows that are held, and drop them. Call when all queries have come, and all rows of documents of
        which some have; until it returns, no row may come. Takes seconds with long queries: call in a thread."""
        for index, parts in self.held.items():
            query = self._query_of(index)
            assert query is not None
            for rows in parts:
                self._compare(index, query, rows)
            self._finish(index)
        self.held.clear()

    def _put_document(self, index: int, rows: FloatRows, num_left: int) -> None:
        query = self._query_of(index)
        if query is None or len(query) > MAX_SHORT_QUERY:
            self.held.setdefault(index, []).append(rows.copy())
            return
        self._compare(index, query, rows)
        if not num_left and index not in self.held:
            self._finish(index)

    def _query_of(self, index: int) -> FloatRows | None:
        return self._queries[index if len(self._queries) > 1 else 0]

    def _compare(self, index: int, query: FloatRows, rows: FloatRows) -> None:
        """Take the next rows of a document; their order does not matter."""
        if len(query) and len(rows):
            greatest = (query @ rows.T).max(axis=1)
            self._greatest[index] = np.maximum(self._greatest.get(index, greatest), greatest)

    def _finish(self, index: int) -> None:
        greatest = self._greatest.pop(index, None)
        if greatest is not None:
            self._scores[index] = greatest.mean() if self._is_mean else greatest.sum()
