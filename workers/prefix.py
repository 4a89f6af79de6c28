"""Tokens that sequences begin with in common: computed once, and attended to by the rest of each.

Owns the search for them in token ids, when they pay, and which are kept from one batch to the next. Only for models
whose tokens see no later ones: then the states of a prefix do not depend on what follows. The pairs of one query have
their template and the query in common.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from vecd.model.card import ModelCard
from vecd.shm.wire import NO_SCOPE
from vecd.workers.batch import Ints, Layout, PackedBatch, runs_of

S = TypeVar("S")

MIN_SHARED_TOKENS = 16
_MIN_SAVED = 0.1
"""Share of the batch's tokens. Less may not pay for attention with a mask, which is slower than causal attention."""

_MIN_MORE = 4
"""Fewer tokens behind a known prefix are not kept: documents begin alike by chance."""

_NUM_SEEN = 16
"""Sequences of earlier batches that one is compared with: requests that are computed at the same time take turns."""


@dataclass(frozen=True, slots=True, eq=False)
class _Known(Generic[S]):
    scope: int
    token_ids: Ints
    states: S


class PrefixCache(Generic[S]):
    """Finds the prefix of a batch, and keeps the states of prefixes for later batches. At most `max_tokens` tokens are
    kept; the prefixes whose last use is the longest ago are dropped first. Nothing else drops them, because the
    weights never change in a process.

    A prefix serves batches of its scope alone, because a quick answer tells a client that its tokens were computed
    before; sequences of several tenants share nothing, not even within their batch. For one thread.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._known: list[_Known[S]] = []
        self._seen: deque[tuple[int, Ints]] = deque(maxlen=_NUM_SEEN)
        """Sequences that were alone in their batch, behind their scopes: what another one has in common with them is a
        prefix."""

    def share(self, layout: Layout, scope: int) -> tuple[Layout, S | None]:
        """The layout with its prefix apart, where that saves enough, and the states that begin with those of its
        `num_known` tokens; else the same layout. At least one token of each sequence stays its own. Side effect: the
        states count as used, and a sequence that is alone is remembered."""
        num_sequences, num_tokens = layout.lengths.size, layout.token_ids.size
        common = _common_tokens(layout)
        if scope == NO_SCOPE or common.size < MIN_SHARED_TOKENS:
            return layout, None
        known, num_known = self._longest_known(common, scope)
        num_shared = common.size if num_sequences > 1 else min(self._meet(layout.token_ids, scope), self._max_tokens)
        if num_shared < num_known + _MIN_MORE:
            num_shared = num_known
        # What one sequence computes apart saves as much in the next batch.
        num_saved = num_known * num_sequences + (num_shared - num_known) * max(1, num_sequences - 1)
        if num_shared < MIN_SHARED_TOKENS or num_saved < _MIN_SAVED * num_tokens:
            return layout, None
        if known is None:
            return set_apart(layout, num_shared), None
        self._known.append(self._known.pop(self._known.index(known)))
        return set_apart(layout, num_shared, num_known), known.states

    def takes(self, shared: Layout) -> bool:
        """Whether the prefix of a layout from `share` has new tokens, and is short enough to be kept."""
        return shared.prefix.size > 0 and shared.num_known + shared.prefix.size <= self._max_tokens

    def keep(self, token_ids: Ints, states: S, scope: int) -> None:
        """Keep the states of a prefix, if `takes` allows it. Copies `token_ids`, and owns `states` from now on."""
        size = token_ids.size
        self._known = [
            known
            for known in self._known
            if known.scope != scope
            or known.token_ids.size > size
            or _num_common(known.token_ids, token_ids) < known.token_ids.size
        ]
        self._known.append(_Known(scope, token_ids.copy(), states))
        while self.num_tokens > self._max_tokens:
            del self._known[0]

    @property
    def num_tokens(self) -> int:
        return sum(known.token_ids.size for known in self._known)

    def _longest_known(self, token_ids: Ints, scope: int) -> tuple[_Known[S] | None, int]:
        sizes = [_num_common(known.token_ids, token_ids) if known.scope == scope else 0 for known in self._known]
        most = max(sizes, default=0)
        return (self._known[sizes.index(most)], most) if most else (None, 0)

    def _meet(self, token_ids: Ints, scope: int) -> int:
        """The most tokens that a remembered sequence begins with, too, less than either has. Remembers these tokens."""
        own = [seen for of, seen in self._seen if of == scope]
        others = [seen for seen in own if not np.array_equal(seen, token_ids)]
        if len(others) == len(own):
            self._seen.append((scope, token_ids))
        return min(token_ids.size - 1, max((_num_common(seen, token_ids) for seen in others), default=0))


def set_apart(layout: Layout, num_shared: int, num_known: int = 0) -> Layout:
    """The layout with the first `num_shared` tokens apart, which all its sequences begin with; the states of the first
    `num_known` of them are known."""
    lengths = layout.lengths - num_shared
    starts = np.cumsum(lengths) - lengths
    own = layout.offsets() >= num_shared
    return replace(
        layout,
        lengths=lengths,
        starts=starts,
        token_ids=layout.token_ids[own],
        runs=runs_of(lengths, starts),
        borders=None,
        prefix=layout.token_ids[num_known:num_shared],
        num_known=num_known,
    )


def _common_tokens(layout: Layout) -> Ints:
    """The beginning of all sequences, shorter than the shortest; none where some tokens are not attended to."""
    if layout.attended is not None:
        return layout.token_ids[:0]
    most, first = int(layout.lengths[0]) - 1, layout.token_ids
    for length in dict.fromkeys((min(most, MIN_SHARED_TOKENS), most)):  # most batches end with the first look
        heads = layout.token_ids[layout.starts[:, None] + np.arange(length)]
        is_common = (heads == first[:length]).all(axis=0)
        if not is_common.all():
            return first[: int(is_common.argmin())]
    return first[:most]


def _num_common(first: Ints, second: Ints) -> int:
    length = min(first.size, second.size)
    is_common = first[:length] == second[:length]
    return length if is_common.all() else int(is_common.argmin())


def probe(card: ModelCard) -> PackedBatch:
    """Sequences that share a prefix, the same at every call: by them an engine shows that it computes one right."""
    ids = np.random.default_rng(seed=0).integers(0, card.vocab_size, 64, dtype=np.int32)
    shared = ids[:MIN_SHARED_TOKENS]
    # The tokens behind the prefix are never all the same, and three sequences of five are equally long.
    ends = [ids[start : start + length] for start, length in ((16, 9), (25, 1), (26, 9), (35, 20), (55, 9))]
    lengths = np.array([shared.size + end.size for end in ends], dtype=np.int32)
    return PackedBatch(lengths, np.concatenate([part for end in ends for part in (shared, end)]))
