"""The reference of a SPLADE model: transformers' own class for masked words, one sequence at a time.

Owns the formula in its plainest form, with all logits of a sequence in memory. Shares nothing with
`vecd.workers.engines.torch.sparse_head`, which is compared with it. Called by
`vecd.workers.engines.torch.reference`.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import MODEL_FOR_MASKED_LM_MAPPING

from vecd.shm.card import ModelCard
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.torch.loading import load_model


def sparse_reference(card: ModelCard, dtype: str, device: torch.device, batch: PackedBatch) -> NDArray[np.float32]:
    """The rows of `batch`, whose sequences all ask for Output.SPARSE: float32 [`batch.num_rows`, row_dim], from a model
    whose weights are in `dtype`. Raises ModelError when the model cannot be loaded exactly as stored."""
    assert card.sparse is not None
    model = load_model(card, dtype, device, MODEL_FOR_MASKED_LM_MAPPING)
    rows = np.zeros((batch.lengths.size, batch.span * card.row_dim), dtype=np.float32)
    with torch.inference_mode():
        for row, ids in zip(rows, np.split(batch.token_ids, np.cumsum(batch.lengths)[:-1]), strict=True):
            token_ids = torch.from_numpy(ids.astype(np.int64))[None].to(device)
            logits = model(input_ids=token_ids, attention_mask=torch.ones_like(token_ids)).logits[0].float()
            weights = torch.relu(logits)
            for _ in range(card.sparse.num_logs):
                weights = torch.log1p(weights)
            pooled = weights.amax(dim=0) if card.sparse.pooling == "max" else weights.sum(dim=0)
            row[: card.vocab_size] = pooled.cpu().numpy()
    return rows.reshape(-1, card.row_dim)
