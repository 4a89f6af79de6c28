"""Steps of a head whose weights are among the model's own: read once, computed in float32.

Owns the search for their tensors by name, and their check. The activations are those of
`vecd.workers.engines.torch.pooling`, whose steps have files of their own. Called by
`vecd.workers.engines.torch.score_head` and `vecd.workers.engines.torch.token_head`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from vecd.shm.card import ModelCard, ModelError, one_line
from vecd.shm.heads import Step
from vecd.workers.engines.torch.checkpoint import own_tensors
from vecd.workers.engines.torch.pooling import ACTIVATIONS


def load_own_steps(card: ModelCard, steps: Sequence[Step], device: torch.device) -> Callable[[Tensor], Tensor]:
    """The steps in a row, from rows of any float type, [N, in_dim of the first], to float32 [N, out_dim of the last].

    Each has a `tensor`. Raises ModelError when a file cannot be read, or a tensor is missing or misshapen.
    """
    try:
        tensors = own_tensors(Path(card.weights_folder))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{card.weights_folder}: the weights cannot be read: {one_line(error)}") from error
    loaded = [_load(card, tensors, step, device) for step in steps]

    def compute(rows: Tensor) -> Tensor:
        rows = rows.float()
        for step in loaded:
            rows = step(rows)
        return rows

    return compute


def _load(
    card: ModelCard, tensors: Mapping[str, Tensor], step: Step, device: torch.device
) -> Callable[[Tensor], Tensor]:
    shape = (step.out_dim,)
    weight_shape = (step.out_dim, step.in_dim) if step.kind == "dense" else shape
    weight = _read(card, tensors, f"{step.tensor}.weight", weight_shape, device)
    bias = _read(card, tensors, step.bias_tensor or f"{step.tensor}.bias", shape, device) if step.bias else None
    match step.kind:
        case "dense":
            activation = ACTIVATIONS[step.activation]
            return lambda rows: activation(functional.linear(rows, weight, bias))
        case "layer_norm":
            return lambda rows: functional.layer_norm(rows, shape, weight, bias, step.epsilon)
        case unknown:
            raise ModelError(f"{card.weights_folder}: step {unknown} is unknown")


def _read(
    card: ModelCard, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """float32 on `device`. The name may have the base model's before it, as in "bert.pooler.dense.weight"."""
    found = [name] if name in tensors else [stored for stored in tensors if stored.partition(".")[2] == name]
    if len(found) != 1:
        raise ModelError(f"{card.weights_folder}: the weights lack {name}, which the model's head is made of")
    tensor = tensors[found[0]]
    if tuple(tensor.shape) != shape:
        raise ModelError(f"{card.weights_folder}: {found[0]} is {list(tensor.shape)}, should be {list(shape)}")
    return tensor.to(device=device, dtype=torch.float32)
