"""The order in which a worker computes the sequences of a batch: by length, so that equal lengths form runs.

Owns the sorting and the order that undoes it. Pure numpy, no torch. Called by the engines of transformers
(`vecd.workers.engines.lean.engine`, `vecd.workers.engines.torch.transformer`), whose attention and pooling go by runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vecd.shm.output import Output
from vecd.workers.engine import PackedBatch

_EXPANDED = (Output.TOKEN_VECTORS, Output.HYBRID)
"""The second part of a sequence with such an output is the expansion of a query, otherwise that of a pair."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring sequences of one length: tokens `start` … `stop` hold `count` sequences of `length` tokens."""

    start: int
    count: int
    length: int
    attended: tuple[int, ...] = ()
    """How many tokens of each sequence its tokens attend to, from the first on; empty: all. See `Layout.attended`."""

    @property
    def stop(self) -> int:
        return self.start + self.count * self.length

    def attended_keys(self) -> NDArray[np.bool_]:
        """Which tokens are attended to, where some are not: [count, 1, 1, length], as masks of attention have it."""
        return np.arange(self.length) < np.array(self.attended)[:, None, None, None]


@dataclass(frozen=True, slots=True)
class Layout:
    """A batch with its sequences in ascending order of length. Owns its arrays."""

    order: NDArray[np.int64]
    """Shape [B]: sequence i of the layout is sequence order[i] of the batch."""
    lengths: NDArray[np.int64]
    """Shape [B], ascending."""
    starts: NDArray[np.int64]
    """Shape [B]: where each sequence's tokens begin."""
    token_ids: NDArray[np.int64]
    """Shape [T]; int64, because that is what embedding tables are indexed with."""
    runs: list[Run]
    """Cover the tokens from 0 to T without a gap."""
    borders: NDArray[np.int64] | None = None
    """Where the second part of each pair begins within it, 0 if a sequence has none, shape [B]; None if none has one.
    """
    attended: NDArray[np.int64] | None = None
    """How many tokens of each sequence its tokens attend to, from the first on, shape [B]: all but the expansion of a
    query, which not even itself attends to. None if no sequence has one."""
    prefix: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Tokens that come before those of each sequence, and are computed once for all. They are in none of the other
    fields; empty unless `vecd.workers.prefix` has taken them out."""
    num_known: int = 0
    """Tokens before those of `prefix`, whose states are known from an earlier batch. They are in no other field."""

    @property
    def num_shared(self) -> int:
        """Tokens that come before those of each sequence, known or computed once."""
        return self.num_known + self.prefix.size

    def computed_ids(self) -> NDArray[np.int64]:
        """The token ids of the pass: the prefix, then the sequences."""
        return np.concatenate((self.prefix, self.token_ids)) if self.prefix.size else self.token_ids

    def computed_offsets(self) -> NDArray[np.int64]:
        """The position of each of `computed_ids` behind what is known; from 0 if nothing is."""
        if not self.num_shared:
            return self.offsets()
        return np.concatenate((np.arange(self.num_known, self.num_shared), self.offsets() + self.num_shared))

    def token_types(self) -> NDArray[np.int64]:
        """1 for each token of the second part of a pair, else 0. Shape [T]."""
        types = np.zeros(self.token_ids.size, dtype=np.int64)
        if self.borders is not None:
            has_two = self.borders > 0
            for start, border, length in zip(
                self.starts[has_two], self.borders[has_two], self.lengths[has_two], strict=True
            ):
                types[start + border : start + length] = 1
        return types

    def offsets(self) -> NDArray[np.int64]:
        """The position of each token within its sequence, from 0, without a prefix. Shape [T]."""
        offsets = np.arange(self.token_ids.size)
        return offsets if self.starts.size == 1 else offsets - np.repeat(self.starts, self.lengths)

    def positions_after(self, padding_id: int) -> NDArray[np.int64]:
        """Positions of the RoBERTa-like families, [T]: from padding_id + 1 on. A padding token, which a text may
        contain literally, has position padding_id and does not count. Source: create_position_ids_from_input_ids in
        transformers' modeling_roberta.
        """
        counts = self.token_ids != padding_id
        seen = np.cumsum(counts)
        before = np.repeat(seen[self.starts] - counts[self.starts], self.lengths)
        return np.where(counts, seen - before, 0) + padding_id


def arrange(batch: PackedBatch) -> Layout:
    """Sort the sequences of `batch` by length; those of one length keep their order."""
    given_lengths = batch.lengths.astype(np.int64)
    if given_lengths.size == 1:  # sorting takes 0.1 ms, and a pass of a short text 4
        zero, token_ids = np.zeros(1, dtype=np.int64), batch.token_ids.astype(np.int64)
        borders, attended = _second_parts(batch, zero)
        run = Run(0, 1, token_ids.size) if attended is None else Run(0, 1, token_ids.size, (int(attended[0]),))
        return Layout(zero, given_lengths, zero, token_ids, [run], borders, attended)
    order = np.argsort(batch.lengths, kind="stable")
    lengths = given_lengths[order]
    starts = _starts(lengths)
    moved_by = np.repeat(_starts(given_lengths)[order] - starts, lengths)
    token_ids = batch.token_ids[np.arange(moved_by.size) + moved_by].astype(np.int64)
    borders, attended = _second_parts(batch, order)
    return Layout(order, lengths, starts, token_ids, runs_of(lengths, starts, attended), borders, attended)


def _second_parts(
    batch: PackedBatch, order: NDArray[np.int64]
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """`Layout.borders` and `Layout.attended`."""
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
    lengths, starts = layout.lengths[first:last], layout.starts[first:last] - begin
    borders = None if layout.borders is None else layout.borders[first:last]
    attended = None if layout.attended is None else layout.attended[first:last]
    token_ids = layout.token_ids[begin:end]
    runs = runs_of(lengths, starts, attended)
    return Layout(layout.order[first:last], lengths, starts, token_ids, runs, borders, attended)


def _starts(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.cumsum(lengths) - lengths


def runs_of(
    lengths: NDArray[np.int64], starts: NDArray[np.int64], attended: NDArray[np.int64] | None = None
) -> list[Run]:
    """Neighbouring sequences of one length, by their lengths, ascending, where each begins, and `Layout.attended`."""
    firsts = [0, *(np.flatnonzero(lengths[1:] != lengths[:-1]) + 1).tolist()]
    return [
        Run(int(starts[first]), last - first, int(lengths[first]), _attended(lengths, attended, first, last))
        for first, last in pairwise([*firsts, lengths.size])
    ]


def _attended(lengths: NDArray[np.int64], attended: NDArray[np.int64] | None, first: int, last: int) -> tuple[int, ...]:
    """`Run.attended` of the sequences of a run."""
    if attended is None or bool((attended[first:last] == lengths[first]).all()):
        return ()
    return tuple(attended[first:last].tolist())
