"""The heads of a model: what each output of its card is made of, in terms of hidden states.

Owns the table from `Output` to a function. The parts that the functions are made of are in
`vecd.workers.engines.torch.pooling`. Called by `vecd.workers.engines.torch.build`.
"""

import torch

from vecd.shm.card import ModelCard
from vecd.shm.output import Output
from vecd.workers.engines.torch.logit_head import LogitHead
from vecd.workers.engines.torch.outputs import Heads
from vecd.workers.engines.torch.pooling import Head, load_head
from vecd.workers.engines.torch.score_head import load_score_heads
from vecd.workers.engines.torch.sparse_head import load_splade
from vecd.workers.engines.torch.token_head import token_heads
from vecd.workers.families.description import NotDescribed


def load_heads(card: ModelCard, device: torch.device) -> Heads:
    """A function for each of `card.outputs`. Raises ModelError when a file or a tensor of a head is missing or
    misshapen, NotDescribed for a head that no table describes."""
    head = load_head(card, device) if "dense" in card.capabilities else None
    heads: Heads = {} if head is None else dense_heads(head)
    heads |= token_heads(card, head, device)
    if card.sparse is not None and not card.sparse.is_lexical:
        heads[Output.SPARSE] = load_splade(card, device)
    if card.score is not None and [step.kind for step in card.score.steps] == ["logit"]:
        heads[Output.SCORES] = LogitHead(card, device)
    elif card.score is not None:
        heads |= load_score_heads(card, device)
    missing = card.outputs - heads.keys()
    if missing:
        raise NotDescribed(f"no head for {', '.join(output.name.lower() for output in sorted(missing))}")
    return heads


def dense_heads(head: Head) -> Heads:
    """The functions of the outputs of a model with dense vectors."""
    return {
        Output.VECTORS: lambda hidden, layout: head(hidden, layout.runs),
        Output.UNNORMALIZED: lambda hidden, layout: head.unnormalized(hidden, layout.runs),
        Output.TOKENS: lambda hidden, layout: hidden.float(),
    }
