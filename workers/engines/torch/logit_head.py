"""The score of a causal language model: the logit of one token, or the difference of two, behind the last token.

Owns the step "logit" on torch: only its one or two rows are read, of a matrix with one for each token of the
vocabulary. Called by `vecd.workers.engines.torch.heads`. `vecd.workers.engines.torch.logit_reference` computes the same
with the whole matrix.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vecd.shm.card import ModelCard, ModelError
from vecd.shm.heads import Step
from vecd.workers.engines.torch.score_head import last_states
from vecd.workers.layout import Layout
from vecd.workers.weights import broken, weight_files

_PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")


class LogitHead:
    """From hidden states, [T, H] in the layout's order, to float32 [B, 1]."""

    def __init__(self, card: ModelCard, device: torch.device) -> None:
        """Raises ModelError for a matrix that is missing, or has no such rows."""
        assert card.score is not None
        (self._step,) = card.score.steps
        self._rows = read_rows(card, self._step).to(device)

    def __call__(self, hidden: Tensor, layout: Layout) -> Tensor:
        return self._score(last_states(hidden, layout).float())

    def _score(self, states: Tensor) -> Tensor:
        logits = states @ self._rows.T
        if self._step.cap:
            logits = self._step.cap * torch.tanh(logits / self._step.cap)
        return logits if logits.shape[1] == 1 else logits[:, :1] - logits[:, 1:]


def read_rows(card: ModelCard, step: Step) -> Tensor:
    """The rows of a "logit", float32 [1 or 2, H]. Raises ModelError."""
    names = {f"{prefix}{step.tensor}.weight" for prefix in _PREFIXES}
    folder = Path(card.weights_folder)
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in names.intersection(file.keys()):
                    matrix = file.get_slice(name)
                    shape = matrix.get_shape()
                    if len(shape) != 2 or shape[0] <= max(step.rows) or shape[1] != step.in_dim:
                        raise ModelError(f"{path}: {name} is {shape}, should be [{card.vocab_size}, {step.in_dim}]")
                    return torch.cat([matrix[row : row + 1] for row in step.rows]).float()
        except (OSError, SafetensorError) as error:
            raise broken(path, error) from None
    raise ModelError(f"{folder}: the weights lack {step.tensor}.weight, which gives the logits")
