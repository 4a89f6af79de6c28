"""The heads behind each token: vectors of multi-vector models, and BGE-M3's lexical weights.

Owns the application of such steps to hidden states, in float32, and the rows of BGE-M3 in one pass. Called by
`vecd.workers.engines.torch.heads`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from vecd.shm.card import ModelCard, ModelError
from vecd.shm.heads import Step
from vecd.shm.output import Output
from vecd.workers.engines.torch.device import to_device
from vecd.workers.engines.torch.outputs import Heads
from vecd.workers.engines.torch.pooling import ACTIVATIONS, Head, load_step
from vecd.workers.layout import Layout
from vecd.workers.linear_file import load_linear
from vecd.workers.weights import broken, weight_files

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
    if step.file:
        loaded = load_linear(Path(card.folder) / step.file, step.out_dim, step.in_dim)
        weight, bias = (torch.from_numpy(array).to(device) for array in loaded)
        return _linear(step, weight, bias)
    if step.tensor:
        return _linear(step, _own_tensor(card, step, device), None)
    return load_step(card, step, device)


def _linear(step: Step, weight: Tensor, bias: Tensor | None) -> _Apply:
    activation = ACTIVATIONS[step.activation]
    return lambda rows: activation(functional.linear(rows, weight, bias))


def _own_tensor(card: ModelCard, step: Step, device: torch.device) -> Tensor:
    """The matrix of a step that is in the model's own files, as float32."""
    name = f"{step.tensor}.weight"
    for path in weight_files(Path(card.weights_folder)):
        try:
            with safe_open(path, framework="pt") as file:
                if name not in file.keys():  # noqa: SIM118
                    continue
                weight: Tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise broken(path, error) from None
        if tuple(weight.shape) != (step.out_dim, step.in_dim):
            raise ModelError(f"{path}: {name} is {list(weight.shape)}, should be {[step.out_dim, step.in_dim]}")
        return weight.to(device=device, dtype=torch.float32)
    raise ModelError(f"{card.weights_folder}: the weights lack {name}")
