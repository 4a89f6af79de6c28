"""The heads of a model in numpy: what each output of its card is made of, in terms of hidden states.

Owns the table from `Output` to a function. `vecd.workers.engines.torch.heads` has the same on torch. Called by
`vecd.workers.engines.lean.engine`.
"""

from collections.abc import Callable
from typing import TypeAlias

from vecd.shm.card import ModelCard
from vecd.shm.output import Output
from vecd.workers.engines.lean.head import Floats, load_head
from vecd.workers.families.description import NotDescribed
from vecd.workers.layout import Layout

LeanHeads: TypeAlias = dict[Output, Callable[[Floats, Layout], Floats]]
"""By output: from hidden states, [T, H] in the layout's order, to rows of all sequences, [B or T, width]."""


def load_heads(card: ModelCard) -> LeanHeads:
    """A function for each of `card.outputs`. Raises ModelError when a file or a tensor of a head is missing or
    misshapen, NotDescribed for a head that numpy does not compute."""
    heads: LeanHeads = {}
    if "dense" in card.capabilities:
        head = load_head(card)
        heads[Output.VECTORS] = lambda hidden, layout: head(hidden, layout.runs)
        heads[Output.UNNORMALIZED] = lambda hidden, layout: head.unnormalized(hidden, layout.runs)
        heads[Output.TOKENS] = lambda hidden, layout: hidden
    if not card.outputs <= heads.keys():
        raise NotDescribed("a head without a description in numpy")
    return heads
