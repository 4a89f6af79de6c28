"""Tokens that all sequences of a batch begin with: computed once, and attended to by the rest of each.

Owns the search for them in token ids, and when they pay. Only for models whose tokens see no later ones: then the
states of a prefix do not depend on what follows. The pairs of one query have their template, its instruction and the
query in common. Pure numpy. Called by `vecd.workers.engines.torch.transformer`.
"""

from dataclasses import replace

import numpy as np

from vecd.shm.card import ModelCard
from vecd.workers.engine import PackedBatch
from vecd.workers.layout import Layout, runs_of

MIN_SHARED_TOKENS = 16
_MIN_SAVED = 0.1
"""Of the tokens of the batch. Below, what is saved may not pay for attention with a mask, which is slower than causal
attention."""


def share_prefix(layout: Layout) -> Layout:
    """The layout with its common prefix apart, where that saves enough; else the same layout. At least one token of
    each sequence stays its own."""
    num_shared = _common_tokens(layout)
    num_saved = num_shared * (layout.lengths.size - 1)
    if num_shared < MIN_SHARED_TOKENS or num_saved < _MIN_SAVED * layout.token_ids.size:
        return layout
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
        prefix=layout.token_ids[:num_shared],
    )


def _common_tokens(layout: Layout) -> int:
    """Tokens that all sequences begin with, less than the shortest has; 0 for one sequence, and where some tokens are
    not attended to."""
    if layout.lengths.size == 1 or layout.attended is not None:
        return 0
    most, first = int(layout.lengths[0]) - 1, layout.token_ids
    for length in dict.fromkeys((min(most, MIN_SHARED_TOKENS), most)):  # most batches end with the first look
        heads = layout.token_ids[layout.starts[:, None] + np.arange(length)]
        is_common = (heads == first[:length]).all(axis=0)
        if not is_common.all():
            return int(is_common.argmin())
    return most


def probe(card: ModelCard) -> PackedBatch:
    """Sequences that share a prefix, the same at every call: by them an engine shows that it computes one right."""
    ids = np.random.default_rng(seed=0).integers(0, card.vocab_size, 64, dtype=np.int32)
    shared = ids[:MIN_SHARED_TOKENS]
    # The tokens behind the prefix are never all the same, and three sequences of five are equally long.
    ends = [ids[start : start + length] for start, length in ((16, 9), (25, 1), (26, 9), (35, 20), (55, 9))]
    lengths = np.array([shared.size + end.size for end in ends], dtype=np.int32)
    return PackedBatch(lengths, np.concatenate([part for end in ends for part in (shared, end)]))
