"""Make the vectors of late chunks: the mean of each chunk's tokens, while their rows come.

Owns the sums, of which a chunk needs one and no row is kept, and the means. Knows no tokenizer. Made by
`vecd.gateway.encoding.fragments`, for models whose own vectors are such means; `vecd.gateway.tokenization.late_chunks`
says which tokens are whose.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from vecd.gateway.tokenization.late_chunks import LateChunks

_CHUNKS_PER_STEP = 32
"""Encoded at once."""


class _Sums:
    """The sums of the rows between each two borders of one input: chunks may overlap, and a row is added once."""

    __slots__ = ("_borders", "_position", "sums")

    def __init__(self, borders: NDArray[np.int32], width: int) -> None:
        self._borders = borders
        self._position = 0
        self.sums = np.zeros((len(borders) - 1, width))

    def add(self, rows: NDArray[np.float32]) -> None:
        """Take the next rows, float32 [n, width], borrowed."""
        start, stop = self._position, self._position + len(rows)
        first, last = np.searchsorted(self._borders, (start + 1, stop))
        starts = np.maximum(self._borders[first - 1 : last] - start, 0)
        self.sums[first - 1 : last] += np.add.reduceat(rows, starts, axis=0, dtype=np.float64)
        self._position = stop


class LateChunkRows:
    """The vectors of the chunks of each input."""

    __slots__ = ("_encode", "_sums", "_width", "chunks")

    def __init__(
        self, chunks: Sequence[LateChunks], width: int, encode: Callable[[NDArray[np.float32]], list[bytes]]
    ) -> None:
        """`chunks` of each input are read when its rows come. `encode` makes a fragment of JSON of each mean, float32
        [n, width]."""
        self.chunks = chunks
        self._width = width
        self._encode = encode
        self._sums: dict[int, _Sums] = {}

    def put(self, index: int, rows: NDArray[np.float32]) -> None:
        raise ValueError("rows of tokens come by `put_tokens`")

    def put_tokens(self, index: int, rows: NDArray[np.float32], num_left: int) -> None:
        sums = self._sums.get(index)
        if sums is None:
            sums = self._sums[index] = _Sums(self.chunks[index].borders, self._width)
        sums.add(rows)

    def fragments(self, index: int) -> Iterator[bytes | None]:
        """The JSON of each chunk's vector of input `index`, whose rows have all come; None for a chunk that was cut
        off. Takes milliseconds now and then. Raises BadRequest for a vector that does not fit its type."""
        chunks = self.chunks[index]
        borders, sums = chunks.borders, self._sums[index].sums
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
