"""The contract of an engine, which turns a batch into the rows of a slot.

Owns the `Engine` protocol and the batch that an engine is given. Imports no engine and no torch. Called by
`vecd.workers.process.loop`; implemented in `vecd.workers.engines`, whose `load` makes the engine of a configuration.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vecd.shm.output import Output
from vecd.shm.views import Rows
from vecd.shm.wire import SCOPE_OF_ALL

ReportProgress: TypeAlias = Callable[[str], None]
"""Called with the name of each stage of loading as it begins, for the operator."""


_IS_PER_TOKEN = np.array([Output(code).is_per_token for code in range(len(Output))])
_SPANS_ROWS = np.array([Output(code).spans_rows for code in range(len(Output))])
"""By code, like the other."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The sequences of one forward pass, end to end. Borrows the memory of the message it came in."""

    lengths: NDArray[np.int32]
    """Tokens of each sequence, shape [B]; each at least 1."""
    token_ids: NDArray[np.int32]
    """Shape [T], T the sum of `lengths`; each 0 … vocab_size - 1."""
    outputs: NDArray[np.uint8] | None = None
    """The `Output` of each sequence, shape [B]; None if all are VECTORS."""
    borders: NDArray[np.int32] | None = None
    """Where the second part of each sequence begins, 0 if it has none, shape [B]; None if no sequence has one. See
    `vecd.shm.wire.Batch.borders_bytes`."""
    span: int = 1
    """Rows of an output that spans several, by `vecd.shm.output.span_of`."""
    scope: int = SCOPE_OF_ALL
    """See `vecd.shm.wire.Batch.scope`."""

    @property
    def rows_of_each(self) -> NDArray[np.int64]:
        """How many rows each sequence has, shape [B]: its tokens where its output has a row for each; `span` where it
        spans several; otherwise 1."""
        if self.outputs is None:
            return np.ones(self.lengths.size, dtype=np.int64)
        num_rows = np.where(_IS_PER_TOKEN[self.outputs], self.lengths, 1)
        return np.where(_SPANS_ROWS[self.outputs], self.span, num_rows).astype(np.int64)

    @property
    def first_rows(self) -> NDArray[np.int64]:
        """The first row of each sequence, shape [B]."""
        num_rows = self.rows_of_each
        return np.cumsum(num_rows) - num_rows

    def part(self, first: int, last: int) -> "PackedBatch":
        """The sequences from `first` to before `last`. Borrows what this batch borrows."""
        begin, end = int(self.lengths[:first].sum()), int(self.lengths[:last].sum())
        outputs = None if self.outputs is None else self.outputs[first:last]
        borders = None if self.borders is None else self.borders[first:last]
        token_ids = self.token_ids[begin:end]
        return PackedBatch(self.lengths[first:last], token_ids, outputs, borders, self.span, self.scope)

    @property
    def num_rows(self) -> int:
        return self.lengths.size if self.outputs is None else int(self.rows_of_each.sum())


def largest_within(choices: Sequence[int], num_threads: int) -> int:
    """The largest of `choices`, ascending, that is at most `num_threads`; if there is none, the first."""
    return max((choice for choice in choices if choice <= num_threads), default=choices[0])


class Finish(Protocol):
    """Finishes a batch that has been begun. Call it once. Borrows the rows until then."""

    def is_ready(self) -> bool:
        """Whether the call would return at once. Never raises: the call raises what went wrong."""

    def __call__(self) -> None:
        """Wait until the rows are complete. Raises what the device raises; rows may then be half written."""


class _Complete:
    def is_ready(self) -> bool:
        return True

    def __call__(self) -> None:
        pass


COMPLETE: Finish = _Complete()
"""What `Engine.begin` returns when the rows are complete already."""


class Engine(Protocol):
    """Turns batches into rows. One engine per worker, used by one thread."""

    facts: dict[str, Any]
    """JSON values about the engine, for `/info`: at least "dtype" and "path"."""
    warnings: list[str]
    """One line each, for the operator: what was requested and is not available."""

    @property
    def num_padding_tokens(self) -> int:
        """Tokens computed so far only to fill a shape, in addition to those of batches. Grows during `begin`."""

    def use_threads(self, num_threads: int) -> None:
        """Compute each forward pass with so many threads. Also called in a process that was forked after the engine was
        loaded; it is loaded with one thread. 0: it computes nothing until the next call, in such a process, and need
        not keep what it computes with."""

    def allow_leases(self, max_threads: int, *, may_copy_weights: bool) -> Sequence[int]:
        """Prepare for batches with more than one thread, up to `max_threads`, which is more than 1. Returns the numbers
        of threads that a batch can be computed with: ascending, the first is 1.

        Called once at most, before the first batch, in the process that will compute it. Starts no thread yet.
        `may_copy_weights`: whether this engine may use memory for weights that other workers share."""

    def lease(self, num_threads: int) -> int:
        """Compute the next batches with at most so many threads; 0: as configured. Returns with how many, which is
        fewer where the engine has no such number, or does not have it yet. Without `allow_leases`: as configured."""

    def adopt(self, slots: Sequence[Rows]) -> None:
        """Prepare the memory that most rows will lie in: the slots of one arena. Called once at most, before the worker
        is ready; an engine also works without this call. May add to `warnings`."""

    def begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        """Begin to write the output of each sequence into rows, in the order of the batch.

        A sequence gets the rows of its output, each with the output's floats first and zeros behind them (`Output`).
        `rows` has at least `batch.num_rows` rows; the rows after them do not change. On a processor the rows are
        complete on return. On an accelerator the caller may begin the next batch, in other rows, before finishing this
        one.

        A row depends on its own sequence alone, except for the rounding of sums. Raises what the model raises; rows may
        then be half written, but nothing writes to them any more.
        """

    def embed(self, batch: PackedBatch, rows: Rows) -> None:
        """Begin and finish."""
