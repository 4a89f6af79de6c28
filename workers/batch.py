"""A batch on its way through a worker: its message checked, its order, the engine's contract, its rows.

Owns the checks on the message, the `Engine` protocol, the sorting by length, the places of rows, and the second try
after memory ran out. Imports no engine and no torch.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vecd.model.card import ModelCard
from vecd.shm.arena import ArenaSpec
from vecd.shm.output import Output, span_of
from vecd.shm.views import Rows
from vecd.shm.wire import SCOPE_OF_ALL, Batch

Ints: TypeAlias = NDArray[np.int64]

# The rows of a batch whose sequences do not all ask for the model's vector.
#
# Each output that a batch asks for is computed for all of its sequences: pooling costs next to nothing beside the
# layers.


def places_of(output: Output, batch: "PackedBatch | Layout") -> tuple[NDArray[np.bool_], Ints]:
    """Which rows are wanted of those that `output` has for all sequences, bool [B, T or B · span], and in which row of
    the batch each wanted one belongs. In the order of the sequences of `batch`, which has outputs."""
    assert batch.outputs is not None
    lengths: NDArray[np.integer[Any]] = batch.lengths
    is_wanted, first_rows = batch.outputs == output, batch.first_rows
    if output.spans_rows:
        places = (first_rows[is_wanted, None] + np.arange(batch.span)).reshape(-1)
        return np.repeat(is_wanted, batch.span), places
    if not output.is_per_token:
        return is_wanted, first_rows[is_wanted]
    first_tokens = np.cumsum(lengths) - lengths
    places = np.arange(lengths.sum()) + np.repeat(first_rows - first_tokens, lengths)
    is_wanted = np.repeat(is_wanted, lengths)
    return is_wanted, places[is_wanted]


def write_outputs(rows: Rows, batch: "PackedBatch | Layout", make: Callable[[Output], Rows]) -> None:
    """Write into `rows` what each sequence asks for; see `places_of`. `make` gives the rows of an output for all
    sequences, float32 [B or T, width]."""
    if batch.outputs is None:
        rows[batch.first_rows] = make(Output.VECTORS)
        return
    for output in map(Output, np.unique(batch.outputs)):
        made = make(output)
        if output.spans_rows:
            made = np.pad(made, ((0, 0), (0, batch.span * rows.shape[1] - made.shape[1]))).reshape(-1, rows.shape[1])
        is_wanted, places = places_of(output, batch)
        rows[places, : made.shape[1]] = made[is_wanted]
        rows[places, made.shape[1] :] = 0


# The contract of an engine, which turns a batch into the rows of a slot.

ReportProgress: TypeAlias = Callable[[str], None]

_IS_PER_TOKEN = np.array([Output(code).is_per_token for code in range(len(Output))])
_SPANS_ROWS = np.array([Output(code).spans_rows for code in range(len(Output))])


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
    scope: int = SCOPE_OF_ALL

    @property
    def rows_of_each(self) -> Ints:
        """Shape [B]: its tokens where an output has a row for each; `span` where it spans several; otherwise 1."""
        if self.outputs is None:
            return np.ones(self.lengths.size, dtype=np.int64)
        num_rows = np.where(_IS_PER_TOKEN[self.outputs], self.lengths, 1)
        return np.where(_SPANS_ROWS[self.outputs], self.span, num_rows).astype(np.int64)

    @property
    def first_rows(self) -> Ints:
        if self.outputs is None:
            return np.arange(self.lengths.size)
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


class Finish:
    """Finishes a batch that has been begun. Call it once. Borrows the rows until then. This one has nothing to do."""

    def is_ready(self) -> bool:
        """Whether the call would return at once. Never raises."""
        return True

    def __call__(self) -> None:
        """Wait until the rows are complete. Raises what the device raises; rows may then be half written."""


COMPLETE = Finish()


class Engine(Protocol):
    """Turns batches into rows. One engine per worker, used by one thread. By default it has that thread alone."""

    facts: dict[str, Any]
    """JSON values about the engine, for `/info`: at least "dtype" and "path"."""
    warnings: list[str]
    thread_choices: Sequence[int] = (1,)
    """Ascending."""

    @property
    def num_padding_tokens(self) -> int:
        """Tokens computed so far only to fill a shape, in addition to those of batches. Grows during `begin`."""
        return 0

    def use_threads(self, num_threads: int) -> None:
        """Compute each forward pass with this number of threads. Also called in a process that was forked after the
        engine was loaded; it is loaded with one thread. 0: it computes nothing until the next call, and need not keep
        what it computes with."""
        return

    def allow_leases(self, max_threads: int, *, may_copy_weights: bool) -> Sequence[int]:
        """Prepare for batches with up to `max_threads`, which is more than 1. Returns the numbers of threads that a
        batch can be computed with: ascending, the first is 1. Called once at most, before the first batch, in the
        process that will compute it. Starts no thread yet. `may_copy_weights`: whether this engine may use memory for
        weights that other workers share."""
        return (1,)

    def lease(self, num_threads: int) -> int:
        """Compute the next batches with at most this number of threads; 0: as configured. Returns with how many, which
        is fewer where the engine does not have that number yet. Without `allow_leases`: as configured."""
        return max((choice for choice in self.thread_choices if choice <= num_threads), default=self.thread_choices[0])

    def adopt(self, slots: Sequence[Rows]) -> None:
        """Prepare the memory that most rows will lie in: the slots of one arena. Called once at most, before the worker
        is ready; an engine also works without this call. May add to `warnings`."""
        return

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
        self.begin(batch, rows)()


class BadBatch(Exception):
    """A batch that this worker cannot take. The message holds numbers of tokens and rows, never an id."""


def read_batch(message: Batch, arena: ArenaSpec, card: ModelCard) -> PackedBatch:
    """The arrays of a message, without a copy. Raises BadBatch when they do not fit the arena or the model."""
    if message.slot >= arena.num_slots:
        raise BadBatch(f"slot {message.slot}, there are {arena.num_slots}")
    if message.num_sequences > arena.rows_per_slot:
        raise BadBatch(f"{message.num_sequences} sequences, a slot has {arena.rows_per_slot} rows")
    lengths = np.frombuffer(message.lengths_bytes, dtype="<i4")
    token_ids = np.frombuffer(message.token_ids_bytes, dtype="<i4")
    if lengths.min() < 1:
        raise BadBatch("a sequence without tokens")
    if lengths.max() > card.max_tokens:
        raise BadBatch(f"a sequence of {lengths.max()} tokens, the model takes {card.max_tokens}")
    if (total := int(lengths.sum(dtype=np.int64))) != token_ids.size:
        raise BadBatch(f"sequences of {total} tokens in all, but {token_ids.size} token ids")
    if token_ids.min() < 0 or token_ids.max() >= card.vocab_size:
        raise BadBatch(f"a token id outside the vocabulary of {card.vocab_size}")
    is_plain = card.main_output is Output.VECTORS
    if is_plain and not message.outputs_bytes and not message.borders_bytes:
        return PackedBatch(lengths, token_ids, scope=message.scope)
    outputs = np.frombuffer(message.outputs_bytes, dtype=np.uint8) if message.outputs_bytes else None
    if outputs is None and not is_plain:
        outputs = np.zeros(message.num_sequences, dtype=np.uint8)
    borders = np.frombuffer(message.borders_bytes, dtype="<i4") if message.borders_bytes else None
    batch = PackedBatch(lengths, token_ids, outputs, borders, span_of(card), message.scope)
    if borders is not None and not ((borders >= 0) & (borders < lengths)).all():
        raise BadBatch("the second part of a sequence begins outside it")
    if outputs is None:
        return batch
    if outputs.max() > max(Output):
        raise BadBatch(f"output {outputs.max()}, there are {len(Output)}")
    for output in map(Output, set(outputs.tolist())):
        if output not in card.outputs:
            raise BadBatch(f"the model has no {output.name.lower()}")
    if batch.num_rows > arena.rows_per_slot:
        raise BadBatch(f"{batch.num_rows} rows, a slot has {arena.rows_per_slot}")
    return batch


# The order in which a worker computes the sequences of a batch: by length, so that equal lengths form runs.

_EXPANDED = (Output.TOKEN_VECTORS, Output.HYBRID)
"""The second part of a sequence with such an output is the expansion of a query, otherwise that of a pair."""


@dataclass(frozen=True, slots=True)
class Run:
    start: int
    count: int
    length: int
    attended: tuple[int, ...] = ()
    """How many tokens of each sequence its tokens attend to, from the first on; empty: all. See `Layout.attended`."""

    @property
    def stop(self) -> int:
        return self.start + self.count * self.length

    def attended_keys(self) -> NDArray[np.bool_]:
        """Which tokens are attended to, where some are not: [count, 1, 1, length], as attention takes masks."""
        return np.arange(self.length) < np.array(self.attended)[:, None, None, None]


@dataclass(frozen=True, slots=True)
class Layout:
    """A batch with its sequences in ascending order of length. Owns its arrays."""

    first_rows: Ints
    """The row of the batch at which those of each sequence begin, shape [B]."""
    lengths: Ints
    starts: Ints
    token_ids: Ints
    """Shape [T]; int64, because that is what embedding tables are indexed with."""
    runs: list[Run]
    """Cover the tokens from 0 to T without a gap."""
    outputs: NDArray[np.uint8] | None = None
    """As in the batch, in this order."""
    span: int = 1
    borders: Ints | None = None
    """Where the second part of each pair begins within it, 0 if a sequence has none, shape [B]; None if none has
    one."""
    attended: Ints | None = None
    """How many tokens of each sequence its tokens attend to, from the first on, shape [B]: all but the expansion of a
    query, which not even itself attends to. None if no sequence has one."""
    prefix: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Tokens that come before those of each sequence, and are computed once for all. They are in none of the other
    fields."""
    num_known: int = 0
    """Tokens before those of `prefix`, whose states are known from an earlier batch."""

    @property
    def num_shared(self) -> int:
        return self.num_known + self.prefix.size

    def computed_ids(self) -> Ints:
        """The token ids of the pass: the prefix, then the sequences."""
        return np.concatenate((self.prefix, self.token_ids)) if self.prefix.size else self.token_ids

    def computed_offsets(self) -> Ints:
        """The position of each of `computed_ids` behind what is known; from 0 if nothing is."""
        if not self.num_shared:
            return self.offsets()
        return np.concatenate((np.arange(self.num_known, self.num_shared), self.offsets() + self.num_shared))

    def token_types(self) -> Ints:
        types = np.zeros(self.token_ids.size, dtype=np.int64)
        if self.borders is not None:
            has_two = self.borders > 0
            for start, border, length in zip(
                self.starts[has_two], self.borders[has_two], self.lengths[has_two], strict=True
            ):
                types[start + border : start + length] = 1
        return types

    def offsets(self) -> Ints:
        """The position of each token within its sequence, from 0, without a prefix. Shape [T]."""
        offsets = np.arange(self.token_ids.size)
        return offsets if self.starts.size == 1 else offsets - np.repeat(self.starts, self.lengths)

    def positions_after(self, padding_id: int) -> Ints:
        """Positions of the RoBERTa-like families, [T]: from padding_id + 1 on; a padding token, which a text may
        contain literally, has position padding_id and does not count. Source: create_position_ids_from_input_ids in
        transformers' modeling_roberta."""
        counts = self.token_ids != padding_id
        seen = np.cumsum(counts)
        before = np.repeat(seen[self.starts] - counts[self.starts], self.lengths)
        return np.where(counts, seen - before, 0) + padding_id

    def last_tokens(self, padding_id: int | None = None) -> Ints:
        """That of each sequence which has another id than the padding; the first of one that has nothing else, [B].
        Source: GenericForSequenceClassification in transformers' modeling_layers.py."""
        places = np.arange(self.token_ids.size)
        if padding_id is not None:
            places = np.where(self.token_ids != padding_id, places, 0)
        lasts: Ints = np.maximum(np.maximum.reduceat(places, self.starts), self.starts)
        return lasts


def arrange(batch: PackedBatch) -> Layout:
    """Sort the sequences of `batch` by length; those of one length keep their order."""
    given_lengths = batch.lengths.astype(np.int64)
    if given_lengths.size == 1:  # sorting takes 0.1 ms, and a pass of a short text 4
        zero, token_ids = np.zeros(1, dtype=np.int64), batch.token_ids.astype(np.int64)
        borders, attended = _second_parts(batch, zero)
        run = Run(0, 1, token_ids.size) if attended is None else Run(0, 1, token_ids.size, (int(attended[0]),))
        return Layout(zero, given_lengths, zero, token_ids, [run], batch.outputs, batch.span, borders, attended)
    order = np.argsort(batch.lengths, kind="stable")
    lengths = given_lengths[order]
    starts = _starts(lengths)
    moved_by = np.repeat(_starts(given_lengths)[order] - starts, lengths)
    token_ids = batch.token_ids[np.arange(moved_by.size) + moved_by].astype(np.int64)
    borders, attended = _second_parts(batch, order)
    outputs, first_rows = (None, order) if batch.outputs is None else (batch.outputs[order], batch.first_rows[order])
    runs = runs_of(lengths, starts, attended)
    return Layout(first_rows, lengths, starts, token_ids, runs, outputs, batch.span, borders, attended)


def _second_parts(batch: PackedBatch, order: Ints) -> tuple[Ints | None, Ints | None]:
    if batch.borders is None:
        return None, None
    borders, lengths = batch.borders[order].astype(np.int64), batch.lengths[order].astype(np.int64)
    if batch.outputs is None:
        return borders, None
    is_expanded = np.isin(batch.outputs[order], _EXPANDED) & (borders > 0)
    if not is_expanded.any():
        return borders, None
    return np.where(is_expanded, 0, borders), np.where(is_expanded, borders, lengths)


def passes(layout: Layout, num_tokens: int) -> Iterator[Layout]:
    """The layout in parts of about equal size, each at most `num_tokens` tokens if no sequence is longer."""
    if layout.token_ids.size <= num_tokens:
        yield layout
        return
    ends = layout.starts + layout.lengths
    num_parts = -(-layout.token_ids.size // num_tokens)
    first = 0
    while first < ends.size:
        begin = int(layout.starts[first])
        size = min(num_tokens, -(-(layout.token_ids.size - begin) // num_parts))
        last = max(first + 1, int(np.searchsorted(ends, begin + size, side="right")))
        yield _part(layout, first, last, begin, int(ends[last - 1]))
        first, num_parts = last, max(1, num_parts - 1)


def _part(layout: Layout, first: int, last: int, begin: int, end: int) -> Layout:
    part, lengths, starts = slice(first, last), layout.lengths[first:last], layout.starts[first:last] - begin
    outputs = None if layout.outputs is None else layout.outputs[part]
    borders, attended = (None if each is None else each[part] for each in (layout.borders, layout.attended))
    runs, token_ids = runs_of(lengths, starts, attended), layout.token_ids[begin:end]
    return Layout(layout.first_rows[part], lengths, starts, token_ids, runs, outputs, layout.span, borders, attended)


def _starts(lengths: Ints) -> Ints:
    return np.cumsum(lengths) - lengths


def runs_of(lengths: Ints, starts: Ints, attended: Ints | None = None) -> list[Run]:
    firsts = [0, *(np.flatnonzero(lengths[1:] != lengths[:-1]) + 1).tolist()]
    return [
        Run(int(starts[first]), last - first, int(lengths[first]), _attended(lengths, attended, first, last))
        for first, last in pairwise([*firsts, lengths.size])
    ]


def _attended(lengths: Ints, attended: Ints | None, first: int, last: int) -> tuple[int, ...]:
    if attended is None or bool((attended[first:last] == lengths[first]).all()):
        return ()
    return tuple(attended[first:last].tolist())


# Out of memory: which errors mean it, and the second try with a batch in two halves.

log = logging.getLogger("vecd.worker")


def begin_or_halve(
    begin: Callable[[PackedBatch, Rows], Finish],
    batch: PackedBatch,
    rows: Rows,
    free_memory: Callable[[], None] = lambda: None,
) -> Finish:
    """Begin a batch, like `Engine.begin`. After out of memory `free_memory` is called, and the batch is computed once
    more, in two halves. Raises the error if there is only one sequence, or if a half is too large as well."""
    try:
        return begin(batch, rows)
    except Exception as error:
        if batch.lengths.size == 1 or not means_out_of_memory(error):
            raise
    # Outside of `except`, because the error's traceback holds the arrays of the failed pass.
    log.warning(
        "out of memory: %d sequences of %d tokens are computed in two halves",
        batch.lengths.size,
        batch.token_ids.size,
    )
    free_memory()
    first, second = halves(batch)
    begin(first, rows)()  # finished, so that nothing writes to the rows if the second fails
    return begin(second, rows[first.num_rows :])


def means_out_of_memory(error: Exception) -> bool:
    # By name, because a worker without a model does not import torch.
    names = {cls.__name__ for cls in type(error).__mro__}
    # torch and ONNX Runtime have no class for it on a CPU. Sources: torch's c10/core/impl/alloc_cpu.cpp,
    # "DefaultCPUAllocator: …"; ONNX Runtime's core/framework/bfc_arena.cc, "Failed to allocate memory for requested
    # buffer …".
    texts = ("DefaultCPUAllocator", "Failed to allocate memory", "bad_alloc")
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or any(text in str(error) for text in texts)


def means_no_more_code(error: Exception) -> bool:
    """Whether oneDNN could not compile a kernel. It accepts a shape at every size or not at all, so this error means
    out of memory. It is permanent: after one failure the same thread cannot compile any kernel, even with free memory.
    Measured with torch 2.13: after RLIMIT_AS was lifted again, every new shape still failed; shapes compiled before and
    other threads did not."""
    return isinstance(error, RuntimeError) and "could not create a primitive" in str(error)


def halves(batch: PackedBatch) -> tuple[PackedBatch, PackedBatch]:
    """The first sequences of `batch` and the rest, cut so that their numbers of tokens are as equal as possible. Both
    borrow what `batch` borrows. It holds at least two sequences."""
    ends = np.cumsum(batch.lengths, dtype=np.int64)
    count = 1 + int(np.abs(2 * ends[:-1] - ends[-1]).argmin())
    return batch.part(0, count), batch.part(count, batch.lengths.size)
