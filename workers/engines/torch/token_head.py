"""The heads behind each token: vectors of multi-vector models, and BGE-M3's lexical weights.

Owns the application of such steps to hidden states, in float32, and the rows of BGE-M3 in one pass. Called by
`vecd.workers.engines.torch.heads`.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from vecd.shm.card import ModelCard
from vecd.shm.heads import Step
from vecd.shm.output import Output
from vecd.workers.engines.torch.device import to_device
from vecd.workers.engines.torch.outputs import Heads
from vecd.workers.engines.torch.own_steps import load_own_steps
from vecd.workers.engines.torch.pooling import Head, load_step
from vecd.workers.layout import Layout

_Apply: TypeAlias = Callable[[Tensor], Tensor]


def token_heads(card: ModelCard, head: Head | None, device: torch.device) -> Heads:
    """The functions of TOKEN_VECTORS, and of LEXICAL and HYBRID where the card has them. `head` is that of a model that
    has dense vectors as well. Raises ModelError when a file or a tensor is missing or misshapen."""
    heads: Heads = {}
    if card.tokens is None:
        return heads
    vectors = _TokenSteps(card, card.tokens.steps, device)
    heads[Output.TOKEN_VECTORS] = lambda hidden, layout: vectors(hidden)
    if card.sparse is not None and card.sparse.is_lexical:
        weights = _TokenSteps(card, card.sparse.steps, device)
        heads[Output.LEXICAL] = lambda hidden, layout: weights(hidden)
        if head is not None:
            heads[Output.HYBRID] = lambda hidden, layout: _hybrid(hidden, layout, head, vectors, weights)
    return heads


class _TokenSteps:
    def __init__(self, card: ModelCard, steps: Sequence[Step], device: torch.device) -> None:
        self._steps = [_load_step(card, step, device) for step in steps]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden states [T, H] of any float type → float32 [T, width]."""
        rows = hidden.float()
        for step in self._steps:
            rows = step(rows)
        return rows


def _hybrid(hidden: Tensor, layout: Layout, head: Head, vectors: _Apply, weights: _Apply) -> Tensor:
    """The rows of BGE-M3, [T, D + 1]: each token's vector and weight; the dense vector and 0 for the first one."""
    rows = torch.cat([vectors(hidden), weights(hidden)], dim=1)
    firsts = to_device(layout.starts, hidden.device)
    rows[firsts] = functional.pad(head(hidden, layout.runs), (0, 1))
    return rows


# --- the weights ------------------------------------------------------------------------------------------------


def _load_step(card: ModelCard, step: Step, device: torch.device) -> _Apply:
    if step.tensor:
        return load_own_steps(card, [step], device)
    return load_step(card, step, device)
