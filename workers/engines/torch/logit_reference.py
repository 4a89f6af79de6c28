"""The reference of a reranker that is a causal language model: transformers' own class with its whole output layer.

Owns the forward pass of that class on one sequence at a time. Slow, and needs memory for the logits of the whole
vocabulary: for the comparison at load alone. `vecd.workers.engines.torch.logit_head` computes the same for requests.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from vecd.shm.card import ModelCard
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.torch.loading import load_model


def logit_reference(card: ModelCard, dtype: str, device: torch.device, batch: PackedBatch) -> NDArray[np.float32]:
    """The scores of `batch`, float32 [B, 1], before any activation, computed in `dtype`.

    Raises ModelError when the model cannot be loaded exactly as stored.
    """
    assert card.score is not None
    (step,) = card.score.steps
    model = load_model(card, dtype, device, MODEL_FOR_CAUSAL_LM_MAPPING)
    scores = []
    with torch.inference_mode():
        for ids in np.split(batch.token_ids, np.cumsum(batch.lengths)[:-1]):
            token_ids = torch.from_numpy(ids.astype(np.int64))[None].to(device)
            logits = model(input_ids=token_ids, use_cache=False, logits_to_keep=1).logits[0, -1].float()
            chosen = [float(logits[row]) for row in step.rows]
            scores.append([chosen[0] - sum(chosen[1:])])
    return np.array(scores, dtype=np.float32)
