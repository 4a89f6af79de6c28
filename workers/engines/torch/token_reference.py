"""The reference rows of a multi-vector model: transformers' own class, one sequence at a time.

Owns the attention mask of an expanded query, in transformers' own words: 0 for every token of the expansion. Called by
`vecd.workers.engines.torch.reference`.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from vecd.workers.config import WorkerConfig
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.torch.build import Load
from vecd.workers.engines.torch.heads import load_heads
from vecd.workers.layout import arrange


def token_rows(config: WorkerConfig, dtype: str, load: Load, probes: PackedBatch) -> NDArray[np.float32]:
    """The rows of `probes`, which ask for the main output: float32 [`probes.num_rows`, row_dim]. `load` gives the model
    in a dtype. Raises what the model raises, and ModelError for a broken head."""
    card, model = config.card, load(dtype)
    head = load_heads(card, torch.device(config.device))[card.main_output]
    rows = np.zeros((probes.num_rows, card.row_dim), dtype=np.float32)
    with torch.inference_mode():
        for index, first in enumerate(probes.first_rows):
            probe = replace(probes.part(index, index + 1), borders=None)
            border = 0 if probes.borders is None else int(probes.borders[index])
            token_ids = torch.from_numpy(probe.token_ids.astype(np.int64)).to(model.device)[None]
            mask = torch.ones_like(token_ids)
            mask[:, border or token_ids.shape[1] :] = 0
            hidden = model(input_ids=token_ids, attention_mask=mask).last_hidden_state[0]
            made = head(hidden, arrange(probe)).cpu().numpy()
            rows[first : first + len(made), : made.shape[1]] = made
    return rows
