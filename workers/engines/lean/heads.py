"""The heads of a model without torch: what each output of its card is made of, in terms of hidden states.

Owns the table from `Output` to a function, and which state of a sequence is pooled for its score.
`vecd.workers.engines.torch.heads` has the same on torch. Called by `vecd.workers.engines.lean.engine`.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np

from vecd.shm.card import ModelCard
from vecd.shm.output import Output
from vecd.workers.engines.lean.arrays import Arrays
from vecd.workers.engines.lean.head import load_head, pool
from vecd.workers.engines.lean.sparse_head import LeanSpladeHead
from vecd.workers.engines.lean.steps import Floats, apply_all, load_steps
from vecd.workers.families.description import NotDescribed
from vecd.workers.layout import Layout

LeanHeads: TypeAlias = dict[Output, Callable[[Floats, Layout], Floats]]
"""By output: from hidden states, [T, H] in the layout's order, to rows of all sequences, [B or T, width]."""


def load_heads(card: ModelCard, own: Arrays) -> LeanHeads:
    """A function for each of `card.outputs`. `own`: the model's tensors.

    Raises ModelError when a file or a tensor of a head is missing or misshapen, NotDescribed for a head that is not
    computed here."""
    if card.export_file and card.score is not None:
        return {card.main_output: lambda logits, layout: logits}  # the graph has the head
    heads: LeanHeads = {}
    if "dense" in card.capabilities:
        head = load_head(card, own)
        heads[Output.VECTORS] = lambda hidden, layout: head(hidden, layout.runs)
        heads[Output.UNNORMALIZED] = lambda hidden, layout: head.unnormalized(hidden, layout.runs)
        heads[Output.TOKENS] = lambda hidden, layout: hidden
    if card.score is not None:
        heads |= _score_heads(card, own)
    if card.tokens is not None:
        vectors = partial(apply_all, load_steps(card, card.tokens.steps, own))
        heads[Output.TOKEN_VECTORS] = lambda hidden, layout: vectors(hidden)
    if card.sparse is not None and not card.sparse.is_lexical:
        heads[Output.SPARSE] = LeanSpladeHead(card, own)
    if card.sparse is not None and card.sparse.is_lexical:
        weights = partial(apply_all, load_steps(card, card.sparse.steps, own))
        heads[Output.LEXICAL] = lambda hidden, layout: weights(hidden)
    if card.main_output is Output.HYBRID:
        heads[Output.HYBRID] = lambda hidden, layout: _hybrid(hidden, layout, heads)
    if not card.outputs <= heads.keys():
        raise NotDescribed("a head without a description in numpy")
    return heads


def with_threads(heads: LeanHeads, num_threads: int) -> LeanHeads:
    """The same heads. numpy's have one thread, whatever `num_threads` is. Raises what `load_heads` raises."""
    made = {output: head for output, head in heads.items() if isinstance(head, LeanSpladeHead)}
    return {**heads, **{output: head.with_threads(num_threads) for output, head in made.items()}}


def _hybrid(hidden: Floats, layout: Layout, heads: LeanHeads) -> Floats:
    """The rows of BGE-M3, [T, D + 1]: each token's vector and weight; the dense vector and 0 for the first one."""
    parts = (heads[output](hidden, layout) for output in (Output.TOKEN_VECTORS, Output.LEXICAL))
    rows = np.concatenate(tuple(parts), axis=1)
    rows[layout.starts, :-1] = heads[Output.VECTORS](hidden, layout)
    rows[layout.starts, -1] = 0
    return rows


# --- scores -----------------------------------------------------------------------------------------------------


def _score_heads(card: ModelCard, own: Arrays) -> LeanHeads:
    score = card.score
    assert score is not None
    if not score.steps:
        raise NotDescribed(f"the head of {card.model_type} has no table of its layers")
    if score.pair_template is not None:
        # One that torch's engine computes once for a batch, which matters more than what it takes by itself.
        raise NotDescribed("pairs that share a beginning, the model's template")
    logits = partial(apply_all, load_steps(card, score.steps, own))
    match score.pooling:
        case "":
            return {Output.TOKEN_SCORES: lambda hidden, layout: logits(hidden)}
        case "cls":  # the graph gives the states of first tokens alone
            return {Output.SCORES: lambda hidden, layout: logits(hidden)}
        case "lasttoken":
            return {Output.SCORES: lambda hidden, layout: logits(_last(hidden, layout, score.padding_id))}
        case pooling:
            return {Output.SCORES: lambda hidden, layout: logits(pool(hidden, layout.runs, (pooling,)))}


def _last(hidden: Floats, layout: Layout, padding_id: int | None) -> Floats:
    """The last token that has another id than the padding; the first of a sequence of nothing else. Source:
    GenericForSequenceClassification in transformers' modeling_layers.py."""
    places = np.where(layout.token_ids != padding_id, np.arange(layout.token_ids.size), 0)
    return hidden[np.maximum(np.maximum.reduceat(places, layout.starts), layout.starts)]
