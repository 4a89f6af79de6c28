"""The rows of the reference model: transformers' own class, in its plain way, on one sequence at a time. Where it has
none, vecd's own model (`vecd.workers.torch.described`), and the heads that every engine has.

Owns the table of what every engine of a model is compared with, by main output, and the logits of classifiers. What
makes dense vectors and those of tokens of hidden states is `vecd.workers.heads`, as in every engine: of that, a
comparison shows no fault that numpy and torch have alike. The tests do, beside sentence-transformers.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from vecd.model.card import ModelCard
from vecd.model.multi_vector_card import CAUSAL_SPARSE
from vecd.model.steps import Step
from vecd.shm.output import Output
from vecd.shm.views import Rows
from vecd.workers.batch import PackedBatch, arrange
from vecd.workers.config import WorkerConfig
from vecd.workers.families import WITHOUT_CLASS
from vecd.workers.parity import vectors_one_by_one
from vecd.workers.torch.heads import load_heads
from vecd.workers.torch.loading import load_model
from vecd.workers.torch.padded import num_token_types
from vecd.workers.torch.transformer import Load, build_engine


def reference_rows(config: WorkerConfig, dtype: str, load: Load, probes: PackedBatch) -> Rows:
    """float32 [`probes.num_rows`, row_dim], of the model in `dtype`. Raises what the model raises."""
    config = replace(config, card=config.card.reference_card)
    make = _REFERENCES.get(config.card.main_output)
    if make is not None and config.card.model_type not in WITHOUT_CLASS:
        return make(config, dtype, load, probes)
    return vectors_one_by_one(build_engine(config, "padded", dtype, load), probes, config.card.row_dim)


def _one_by_one(card: ModelCard, probes: PackedBatch, rows_of: Callable[[PackedBatch, Tensor, int], Tensor]) -> Rows:
    """`rows_of` a sequence, of its token ids, [1, T], and of the border where its second part begins; 0 if it has
    none."""
    rows = np.zeros((probes.num_rows, card.row_dim), dtype=np.float32)
    with torch.inference_mode():
        for index, first in enumerate(probes.first_rows):
            probe = replace(probes.part(index, index + 1), borders=None)
            border = 0 if probes.borders is None else int(probes.borders[index])
            made = rows_of(probe, torch.from_numpy(probe.token_ids.astype(np.int64))[None], border)
            rows[first : first + len(made), : made.shape[1]] = made.float().cpu().numpy()
    return rows


def _sparse(config: WorkerConfig, dtype: str, load: Load, probes: PackedBatch) -> Rows:
    """By transformers' own class for masked words, or for the next one, which shares nothing with
    `vecd.workers.heads`."""
    card, device = config.card, torch.device(config.device)
    head = card.sparse
    assert head is not None
    is_causal = card.model_type in CAUSAL_SPARSE
    model = load_model(card, dtype, device, MODEL_FOR_CAUSAL_LM_MAPPING if is_causal else MODEL_FOR_MASKED_LM_MAPPING)

    def weights_of(probe: PackedBatch, ids: Tensor, border: int) -> Tensor:
        ids = ids.to(device)
        weights = torch.relu(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].float())
        for _ in range(head.num_logs):
            weights = torch.log1p(weights)
        pooled = weights.amax(dim=0) if head.pooling == "max" else weights.sum(dim=0)
        return pad(pooled, (0, probe.span * card.row_dim - len(pooled))).reshape(-1, card.row_dim)

    return _one_by_one(card, probes, weights_of)


def token_rows(config: WorkerConfig, dtype: str, load: Load, probes: PackedBatch) -> Rows:
    """The rows of a multi-vector model. Raises what the model raises, and ModelError for a broken head."""
    card, model = config.card, load(dtype)
    head = load_heads(card, torch.device(config.device))[card.main_output]

    def rows_of(probe: PackedBatch, ids: Tensor, border: int) -> Tensor:
        ids = ids.to(model.device)
        mask = torch.ones_like(ids)
        mask[:, border or ids.shape[1] :] = 0
        return head(model(input_ids=ids, attention_mask=mask).last_hidden_state[0], arrange(probe))

    return _one_by_one(card, probes, rows_of)


def _scores(config: WorkerConfig, dtype: str, load: Load, probes: PackedBatch) -> Rows:
    card, head = config.card, config.card.score
    assert head is not None
    if [step.kind for step in head.steps] == ["logit"]:
        return _differences_of_logits(config, dtype, head.steps[0], probes)
    if not head.has_class:
        return vectors_one_by_one(build_engine(config, "padded", dtype, load), probes, card.row_dim)
    model = load(dtype)

    def logits_of(probe: PackedBatch, ids: Tensor, border: int) -> Tensor:
        ids = ids.to(model.device)
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if num_token_types(model) > 1:
            types = torch.zeros_like(ids)
            types[:, (border if card.has_segments else 0) or ids.shape[1] :] = 1
            arguments["token_type_ids"] = types
        logits: Tensor = model(**arguments).logits
        return logits.reshape(-1, logits.shape[-1])

    return _one_by_one(card, probes, logits_of)


def _differences_of_logits(config: WorkerConfig, dtype: str, step: Step, probes: PackedBatch) -> Rows:
    """The score of a causal language model, by transformers' own class with its whole output layer: slow, for the
    comparison at load alone."""
    device = torch.device(config.device)
    model = load_model(config.card, dtype, device, MODEL_FOR_CAUSAL_LM_MAPPING)

    def score_of(probe: PackedBatch, ids: Tensor, border: int) -> Tensor:
        logits = model(input_ids=ids.to(device), use_cache=False, logits_to_keep=1).logits[0, -1].float()
        chosen = [float(logits[token]) for token in step.rows]
        return torch.tensor([[step.scale * (chosen[0] - sum(chosen[1:]))]])

    return _one_by_one(config.card, probes, score_of)


_REFERENCES: dict[Output, Callable[[WorkerConfig, str, Load, PackedBatch], Rows]] = {
    Output.SCORES: _scores,
    Output.TOKEN_SCORES: _scores,
    Output.SPARSE: _sparse,
    Output.TOKEN_VECTORS: token_rows,
    Output.HYBRID: token_rows,
}
"""By the main output of a model; of any other it is the padded engine."""
