"""The pending result of a request: its rows, collected in the order in which its batches finish.

Owns `PendingResult`, and the mean of an input's chunks. Knows no worker and no slot: rows are borrowed until a call
returns. Made by `vecd.gateway.pipeline`, filled by `vecd.gateway.dispatch`.
"""

import asyncio
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vecd.gateway.types.errors import ApiError
from vecd.gateway.types.request import Collector
from vecd.shm.output import Output


class Delivered(Protocol):
    """What a pending result uses of the sequence to which rows belong."""

    index: int
    weight: int
    output: Output
    chunked: "ChunkedInput | None"


class ChunkedInput:
    """Collects the vectors of one input's chunks, and makes one vector of them.

    Source of the mean, and of its weights: LangChain's `OpenAIEmbeddings`, which does the same for servers that accept
    no long texts.
    """

    __slots__ = ("_num_missing", "_sum", "_total_weight", "is_normalized")

    def __init__(self, num_chunks: int, *, is_normalized: bool) -> None:
        """`is_normalized`: the mean is brought to length 1 again."""
        self._num_missing = num_chunks
        self._sum: NDArray[np.float64] | None = None
        self._total_weight = 0
        self.is_normalized = is_normalized

    def add(self, row: NDArray[np.float32], weight: int) -> NDArray[np.float32] | None:
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
    """Collects the rows of one request, in the order in which its batches finish.

    `finished` resolves when every row was delivered, or raises the ApiError of the first failure. Once it is done, for
    any reason, the sequences that are still queued are abandoned and never reach a worker.
    """

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

    def deliver(self, index: int, rows: NDArray[np.float32]) -> None:
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

    def deliver_one(self, sequence: Delivered, rows: NDArray[np.float32], num_left: int = 0) -> None:
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
        """Abandon the request: its client has disconnected, or its deadline has passed."""
        self.finished.cancel()
