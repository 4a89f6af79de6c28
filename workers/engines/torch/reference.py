"""The rows of the reference model: transformers' own class, in its plain way, on one sequence at a time.

Owns the table of what every engine of a model is compared with, by main output, and the logits of classifiers. Called
by `vecd.workers.engines.selection`.
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
from vecd.workers.engines.torch.logit_reference import logit_reference
from vecd.workers.engines.torch.padded import num_token_types
from vecd.workers.engines.torch.sparse_reference import sparse_reference
from vecd.workers.engines.torch.token_reference import token_rows


def reference_rows(config: WorkerConfig, dtype: str, load: Load, probes: PackedBatch) -> NDArray[np.float32]:
    """The rows of `probes`, float32 [`probes.num_rows`, row_dim], of the model in `dtype`. `load` gives it, as for the
    engines. Raises what the model raises."""
    make = _REFERENCES.get(config.card.main_output, _vectors)
    return make(config, dtype, load, probes)


def _vectors(config: WorkerConfig, dtype: str, load: Load, probes: PackedBatch) -> NDArray[np.float32]:
    return vectors_one_by_one(build_engine(config, "padded", dtype, load), probes, config.card.row_dim)


def _sparse(config: WorkerConfig, dtype: str, load: Load, probes: PackedBatch) -> NDArray[np.float32]:
    return sparse_reference(config.card, dtype, torch.device(config.device), probes)


def _scores(config: WorkerConfig, dtype: str, load: Load, probes: PackedBatch) -> NDArray[np.float32]:
    card = config.card
    assert card.score is not None
    if [step.kind for step in card.score.steps] == ["logit"]:
        return logit_reference(card, dtype, torch.device(config.device), probes)
    model = load(dtype)
    rows = np.zeros((probes.num_rows, card.row_dim), dtype=np.float32)
    ends = np.cumsum(probes.lengths)
    with torch.inference_mode():
        for index, first_row in enumerate(probes.first_rows):
            ids = probes.token_ids[ends[index] - probes.lengths[index] : ends[index]]
            border = int(probes.borders[index]) if probes.borders is not None and card.has_segments else 0
            made = _logits(model, ids.astype(np.int64), border).float().cpu().numpy()
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


_REFERENCES: dict[Output, Callable[[WorkerConfig, str, Load, PackedBatch], NDArray[np.float32]]] = {
    Output.SCORES: _scores,
    Output.TOKEN_SCORES: _scores,
    Output.SPARSE: _sparse,
    Output.TOKEN_VECTORS: token_rows,
    Output.HYBRID: token_rows,
}
"""By the main output of a model; of any other it is `_vectors`."""
