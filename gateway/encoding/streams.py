"""What is made of the rows of tokens: kept until an input is whole, or used as they come and dropped (the scores of
MaxSim, the vectors of late chunks). Knows no worker and no slot: rows are borrowed, and what is kept is a copy.
"""

import asyncio
from collections.abc import Callable, Iterator, MutableSequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vecd.gateway.encoding.sparse import SparseVector
from vecd.gateway.errors import BadRequest
from vecd.gateway.request import EmbedRequest, FloatRows, Ints, Make, Role, TokenizedInput
from vecd.gateway.tokenization.late_chunks import LateChunks, find_chunks
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.steps import TokenHead

MAX_TOKEN_FLOATS = 8 * 2**20
"""Of one response with a vector for each token: 32 MiB, and 180 MB as JSON. A request for MaxSim keeps as much of its
queries, and of documents that cannot be compared yet."""


class Tokens(Make):
    """Rows of tokens, of which all are kept until the response is there."""

    __slots__ = ("_num_tokens", "_token_ids", "_width")
    kind = "one vector for each token is given"

    def __init__(self, width: int, token_ids: list[Ints]) -> None:
        """`width`: floats of a row. `token_ids` gets those of each input that is expected, shape [T]."""
        self._width = width
        self._token_ids = token_ids
        self._num_tokens = 0

    def expect(self, start: int, tokenized: list[TokenizedInput]) -> int:
        num_tokens = self._note(tokenized)
        self._num_tokens += num_tokens
        if self._num_tokens > self._most and start + len(tokenized) > 1:
            raise BadRequest(
                f"The inputs have {self._num_tokens} tokens or more: one vector for each token is given of at most "
                f"{self._most} in a request",
                param="input",
            )
        return num_tokens * self._width

    def _note(self, tokenized: list[TokenizedInput]) -> int:
        self._token_ids += [np.frombuffer(item.token_ids, dtype="<i4") for item in tokenized]
        return sum(item.num_tokens for item in tokenized)

    @property
    def _most(self) -> int:
        """Rows that a request may keep."""
        return MAX_TOKEN_FLOATS // self._width


class Whole(Tokens):
    """Gets all rows of an input at once: many floats are delivered over several turns of the event loop."""

    __slots__ = ("_parts", "_take", "made")
    made: Any

    def __init__(self, width: int, token_ids: list[Ints], made: Any, take: Callable[[int, FloatRows], None]) -> None:
        """`take` gets an input's index and all of its rows, float32 [T, width], which it owns from then on, and writes
        into `made`."""
        super().__init__(width, token_ids)
        self.made = made
        self._take = take
        self._parts: dict[int, list[FloatRows]] = {}

    def put(self, index: int, rows: FloatRows, num_left: int) -> None:
        parts = self._parts.setdefault(index, [])
        parts.append(rows.copy())
        if not num_left:
            del self._parts[index]
            self._take(index, parts[0] if len(parts) == 1 else np.concatenate(parts))


class Hybrid(NamedTuple):
    """What BGE-M3 makes of each input in one pass, in input order."""

    dense: FloatRows
    """Shape [num_inputs, dim]."""
    sparse: list[SparseVector]
    tokens: list[FloatRows]
    """A matrix for each input, a row for each of its tokens."""


class DroppedTokens:
    """Which tokens of a request's inputs have no vector."""

    __slots__ = ("_drops_first", "_ignored_ids", "_num_queries", "_token_ids")

    def __init__(
        self, head: TokenHead, request: EmbedRequest, token_ids: list[Ints], *, drops_first: bool = False
    ) -> None:
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

    def keep(self, matrices: MutableSequence[Any], index: int, rows: FloatRows) -> None:
        matrices[index] = self.without(index, rows)


# --- MaxSim -----------------------------------------------------------------------------------------------------

MAX_SHORT_QUERY = 512
"""Tokens of a query that is compared on the event loop. With 32,768 floats of a document, which is the most that is
delivered in one turn, that takes 0.4 to 0.6 ms on one core (AVX-512, 128 to 1,024 floats a row)."""


class MaxSimRows(Tokens):
    """The score of each document for its own query or, where there is one, for that: late interaction, as in ColBERT.
    Computed in float32, as PyLate and sentence-transformers do. Rows of a document are compared as they come, and
    dropped. Those that come before all queries have are kept, and where a query is long those of all documents, until
    there is no room for more."""

    __slots__ = (
        "_dropped",
        "_greatest",
        "_has_come",
        "_has_long_query",
        "_is_mean",
        "_keep",
        "_keeps_documents",
        "_num_come",
        "_of_queries",
        "_queries",
        "_scores",
        "held",
        "num_queries_left",
    )  # fmt: skip

    def __init__(
        self,
        request: EmbedRequest,
        head: TokenHead,
        width: int,
        token_ids: list[Ints],
        keep: Callable[[int], None] = lambda num_floats: None,
    ) -> None:
        """The first inputs of the request are queries, and the others documents: as many, or any number for one query.
        `keep` is called with the number of floats that are kept, where it is less than was expected."""
        super().__init__(width, token_ids)
        num_queries = request.tokenizing.num_queries
        self._dropped = DroppedTokens(head, request, token_ids)
        self._queries: list[FloatRows | None] = [None] * num_queries
        self._of_queries = Whole(width, token_ids, self._queries, partial(self._dropped.keep, self._queries))
        self._scores = np.zeros(len(request.inputs) - num_queries)
        self._greatest: dict[int, FloatRows] = {}
        """By the index of a document: the greatest product of each vector of its query, of the rows that have come."""
        self.held: dict[int, list[FloatRows]] = {}
        """By the index of a document: rows that came before its query, or whose query is not short."""
        self._is_mean = head.is_mean
        """The score is the mean of the greatest products, not their sum."""
        self._keep = keep
        self._keeps_documents = True
        self._has_long_query = False
        self._has_come = asyncio.Event()
        """Set when all rows of an input have come."""
        self._num_come = 0
        self.num_queries_left = num_queries
        """Queries whose rows have not all come."""

    @property
    def num_floats(self) -> int:
        """What is kept, of queries and of documents."""
        queries = sum(query.size for query in self._queries if query is not None)
        return queries + sum(rows.size for parts in self.held.values() for rows in parts)

    def expect(self, start: int, tokenized: list[TokenizedInput]) -> int:
        num_tokens = self._note(tokenized)
        for query in tokenized[: max(0, len(self._queries) - start)]:
            self._num_tokens += query.num_tokens
            self._has_long_query |= query.num_tokens > MAX_SHORT_QUERY
        if self._num_tokens > self._most:
            raise BadRequest(
                f"The queries have {self._num_tokens} tokens or more: their vectors are kept, of at most {self._most} "
                "in a request",
                param="input",
            )
        return num_tokens * self._width if self._keeps_documents else 0

    async def make_room(self, num_queued: int) -> None:
        """Documents that were queued are no longer kept once all queries have come and, with a long one, they too."""
        if num_queued < len(self._queries):
            return
        while self.num_queries_left or (self._has_long_query and self._num_come < num_queued):
            self._has_come.clear()
            await self._has_come.wait()
        if self._has_long_query:
            await asyncio.to_thread(self.compare_held)
            self._keep(self.num_floats)

    def put(self, index: int, rows: FloatRows, num_left: int) -> None:
        num_queries = len(self._queries)
        if index < num_queries:
            self._of_queries.put(index, rows, num_left)
            self.num_queries_left -= not num_left
        else:
            self._put_document(index - num_queries, self._dropped.without(index, rows, num_left), num_left)
        if num_left:
            return
        self._num_come += 1
        self._has_come.set()
        if self._keeps_documents and not self.num_queries_left and not self._has_long_query:
            self._keeps_documents = False
            self._keep(self.num_floats)

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


# --- late chunks ------------------------------------------------------------------------------------------------

_CHUNKS_PER_STEP = 32
"""Encoded at once."""


class LateChunkRows(Tokens):
    """The vectors of the chunks of each input: the means of their tokens, made while the rows come."""

    __slots__ = ("_encode", "_num_chunks", "_request", "_tokenizer", "chunks", "sums")
    kind = "late chunks are made"
    inputs_per_turn = 32  # 2 ms for short ones

    def __init__(
        self, request: EmbedRequest, tokenizer: Tokenizer, width: int, encode: Callable[[FloatRows], list[bytes]]
    ) -> None:
        """`encode` makes a fragment of JSON of each mean, float32 [n, width]."""
        super().__init__(width, [])
        self.chunks: list[LateChunks] = []
        """Of each input."""
        self._num_chunks = 0
        self._request, self._tokenizer, self._encode = request, tokenizer, encode
        self.sums: dict[int, _Sums] = {}

    def expect(self, start: int, tokenized: list[TokenizedInput]) -> int:
        """Finds the chunks of the inputs: raises BadRequest as `find_chunks`."""
        request, num_before = self._request, self._num_chunks
        assert request.late is not None
        for index, item in enumerate(tokenized, start):
            num_prefix, _ = self._tokenizer.num_added(np.frombuffer(item.token_ids, dtype="<i4").tolist())
            text = str(request.inputs[index])
            is_whole = len(text) <= self._tokenizer.max_chars
            self.chunks.append(find_chunks(text, item, request.late, index, num_prefix, is_whole=is_whole))
            self._num_chunks += len(self.chunks[-1].ranges)
        if self._num_chunks > self._most:
            raise BadRequest(
                f"'late_chunking': {self._num_chunks} chunks or more, at most {self._most} are made in one request",
                param="late_chunking",
            )
        return (self._num_chunks - num_before) * self._width

    def put(self, index: int, rows: FloatRows, num_left: int) -> None:
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
