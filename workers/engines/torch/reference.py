"""The rows of the reference model: transformers' own class, in its plain way, on one sequence at a time.

Owns what every engine of a model is compared with, by main output: one function each, in `_REFERENCES`. Called by
`vecd.workers.engines.torch.selection`.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from vecd.shm.output import Output
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.parity import vectors_one_by_one
from vecd.workers.engines.torch.build import Load, build_engine
from vecd.workers.engines.torch.padded import num_token_types


def reference_rows(config: WorkerConfig, dtype: str, load: Load, probes: PackedBatch) -> NDArray[np.float32]:
    """The rows of `probes`, float32 [`probes.num_rows`, row_dim], of the model that `load` gives in `dtype`. Raises
    what the model raises."""
    card = config.card
    make = _REFERENCES.get(card.main_output)
    if make is None or card.score is None or not card.score.architecture.endswith("Classification"):
        engine = build_engine(config, "padded", dtype, load)
        return vectors_one_by_one(engine, probes, card.row_dim)
    model = load(dtype)
    rows = np.zeros((probes.num_rows, card.row_dim), dtype=np.float32)
    ends = np.cumsum(probes.lengths)
    with torch.inference_mode():
        for index, first_row in enumerate(probes.first_rows):
            ids = probes.token_ids[ends[index] - probes.lengths[index] : ends[index]]
            border = 0 if probes.borders is None else int(probes.borders[index])
            made = make(model, ids.astype(np.int64), border if card.has_segments else 0).float().cpu().numpy()
            rows[first_row : first_row + len(made), : made.shape[1]] = made
    return rows


def _logits(model: PreTrainedModel, token_ids: NDArray[np.int64], border: int) -> Tensor:
    """Of one sequence: [1, labels], or [T, labels]. `border`: where its second part begins; 0 if it has none."""
    ids = torch.from_numpy(token_ids).to(model.device)[None]
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if num_token_types(model) > 1:
        types = torch.zeros_like(ids)
        types[:, border or ids.shape[1] :] = 1
        arguments["token_type_ids"] = types
    logits: Tensor = model(**arguments).logits
    return logits.reshape(-1, logits.shape[-1])


_REFERENCES: dict[Output, Callable[[PreTrainedModel, NDArray[np.int64], int], Tensor]] = {
    Output.SCORES: _logits,
    Output.TOKEN_SCORES: _logits,
}
"""By the main output of a model: its rows for the token ids of one sequence, and the border where it has token types.
The vectors of any other model are those of the padded path."""
