"""The logits of sequences, pairs and tokens, from hidden states and the card's description of the head.

Owns which state of a sequence is pooled for its score. In float32 for every dtype of the model. Called by
`vecd.workers.engines.torch.heads`.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vecd.shm.card import ModelCard
from vecd.shm.output import Output
from vecd.workers.engines.torch.device import to_device
from vecd.workers.engines.torch.outputs import Heads
from vecd.workers.engines.torch.own_steps import load_own_steps
from vecd.workers.engines.torch.pooling import pool
from vecd.workers.families.description import NotDescribed
from vecd.workers.layout import Layout


def load_score_heads(card: ModelCard, device: torch.device) -> Heads:
    """The function of the model's scores. Raises NotDescribed where no table has the family's head, ModelError when a
    tensor of it is missing or misshapen."""
    score = card.score
    assert score is not None
    if not score.steps:
        raise NotDescribed(f"the head of {card.model_type} has no table of its layers")
    logits = load_own_steps(card, score.steps, device)
    if not score.pooling:
        return {Output.TOKEN_SCORES: lambda hidden, layout: logits(hidden)}
    pooled = _POOLINGS.get(score.pooling)
    if pooled is not None:
        return {Output.SCORES: lambda hidden, layout: logits(pooled(hidden, layout, score.padding_id))}
    return {Output.SCORES: lambda hidden, layout: logits(pool(hidden, layout.runs, (score.pooling,)))}


def _first(hidden: Tensor, layout: Layout, padding_id: int | None) -> Tensor:
    if len(hidden) == layout.starts.size:
        return hidden  # of first tokens only, as the fused path returns them
    return hidden.index_select(0, to_device(layout.starts, hidden.device))


def last_states(hidden: Tensor, layout: Layout, padding_id: int | None = None) -> Tensor:
    """That of each sequence's last token [B, H], which has another id than the padding; of the first one if a sequence
    has nothing else. Source: GenericForSequenceClassification in transformers' modeling_layers.py."""
    counts = layout.token_ids != padding_id if padding_id is not None else np.ones(layout.token_ids.size, dtype=bool)
    places = np.where(counts, np.arange(layout.token_ids.size), 0)
    lasts = np.maximum(np.maximum.reduceat(places, layout.starts), layout.starts)
    return hidden.index_select(0, to_device(lasts, hidden.device))


_POOLINGS: dict[str, Callable[[Tensor, Layout, int | None], Tensor]] = {"cls": _first, "lasttoken": last_states}
"""Those that take one state of each sequence: the others need not be converted."""
