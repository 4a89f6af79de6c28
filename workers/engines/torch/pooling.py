"""Turns the hidden states of tokens into the vectors of sequences.

Owns the pooling modes and the steps behind them (dense, layer_norm, normalize), all in float32 for every dtype of the
model. Knows no model and no batch, only runs of equal-length sequences. Called by
`vecd.workers.engines.torch.transformer`.

Source of the modes and the layout of the steps' files: sentence-transformers' modules Pooling, Dense, LayerNorm and
Normalize, with which the tests compare every one.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from vecd.shm.card import ModelCard, ModelError
from vecd.shm.heads import Step
from vecd.workers.engines.torch.checkpoint import Tensors
from vecd.workers.layout import Run


def _mean_weighted_by_position(hidden: Tensor) -> Tensor:
    weights = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype, device=hidden.device)
    return torch.einsum("blh,l->bh", hidden, weights) / weights.sum()


# Each takes the hidden states of a run, float32 [B, L, H], and gives [B, H].
_POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda hidden: hidden[:, 0],
    "max": lambda hidden: hidden.amax(dim=1),
    "mean": lambda hidden: hidden.mean(dim=1),
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(dim=1) / hidden.shape[1] ** 0.5,
    "weightedmean": _mean_weighted_by_position,
    "lasttoken": lambda hidden: hidden[:, -1],
}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    activation.__name__.lower(): activation()
    for activation in (
        nn.Identity, nn.Tanh, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid,
        nn.Softplus, nn.Softsign, nn.Hardtanh,
    )
}  # fmt: skip
"""By the lower-case name of the class in torch.nn, with the class's default arguments."""


class Head:
    """The part of a model behind the transformer: pooling, then the card's steps."""

    def __init__(self, modes: Sequence[str], steps: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self._modes = modes
        self._is_normalized = bool(steps) and steps[-1] is normalize
        self._steps = steps[:-1] if self._is_normalized else steps

    def __call__(self, hidden: Tensor, runs: Sequence[Run]) -> Tensor:
        """Hidden states [T, H] of any float type → vectors, float32 [B, D], in the order of the runs."""
        vectors = self.unnormalized(hidden, runs)
        return normalize(vectors) if self._is_normalized else vectors

    def unnormalized(self, hidden: Tensor, runs: Sequence[Run]) -> Tensor:
        """Like the call, without the last step if that is to normalize."""
        vectors = pool(hidden, runs, self._modes)
        for step in self._steps:
            vectors = step(vectors)
        return vectors


def pool(hidden: Tensor, runs: Sequence[Run], modes: Sequence[str]) -> Tensor:
    """Hidden states [T, H] → float32 [B, H · number of modes], the modes side by side in their order."""
    hidden = hidden.float()
    return torch.cat([_pool_run(hidden, run, modes) for run in runs])


def _pool_run(hidden: Tensor, run: Run, modes: Sequence[str]) -> Tensor:
    sequences = hidden[run.start : run.stop].reshape(run.count, run.length, -1)
    return torch.cat([_POOLINGS[mode](sequences) for mode in modes], dim=-1)


# --- steps ------------------------------------------------------------------------------------------------------


def load_head(card: ModelCard, device: torch.device) -> Head:
    """Read the weights of the card's steps. Raises ModelError when a file or a tensor is missing or misshapen."""
    return Head(card.pooling, [load_step(card, step, device) for step in card.steps])


def load_step(card: ModelCard, step: Step, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The function of a step that has a folder or a file of its own, or no weights. Raises what `load_head` raises."""
    path = Path(card.folder, step.file or Path(step.path, "model.safetensors"))
    match step.kind:
        case "normalize":
            return normalize
        case "dense":
            return _dense(step, path, device)
        case "layer_norm":
            return _layer_norm(step, path, device)
        case unknown:
            raise ModelError(f"{path}: step {unknown} is unknown")


def normalize(vectors: Tensor) -> Tensor:
    """L2, with the zero vector left as it is."""
    return functional.normalize(vectors, p=2.0, dim=-1)


def _dense(step: Step, path: Path, device: torch.device) -> Callable[[Tensor], Tensor]:
    if step.activation not in ACTIVATIONS:
        raise ModelError(f"{path.parent / 'config.json'}: activation {step.activation} is not supported")
    activation = ACTIVATIONS[step.activation]
    module = "" if step.file else "linear."
    shapes: dict[str, tuple[int, ...]] = {f"{module}weight": (step.out_dim, step.in_dim)}
    if step.bias:
        shapes[f"{module}bias"] = (step.out_dim,)
    if step.has_residual and step.in_dim != step.out_dim:
        shapes["residual.weight"] = (step.out_dim, step.in_dim)
    weights = _read_weights(path, shapes, device)
    weight, bias, residual = weights[f"{module}weight"], weights.get(f"{module}bias"), weights.get("residual.weight")

    def apply(vectors: Tensor) -> Tensor:
        made = activation(functional.linear(vectors, weight, bias))
        if not step.has_residual:
            return made
        return made + (vectors if residual is None else functional.linear(vectors, residual))

    return apply


def _layer_norm(step: Step, path: Path, device: torch.device) -> Callable[[Tensor], Tensor]:
    shape = (step.out_dim,)
    weights = _read_weights(path, {"norm.weight": shape, "norm.bias": shape}, device)
    return lambda vectors: functional.layer_norm(vectors, shape, weights["norm.weight"], weights["norm.bias"])


def _read_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> dict[str, Tensor]:
    """Exactly the tensors named in `shapes`, as float32. Raises ModelError when the file holds others."""
    try:
        weights = dict(Tensors([path]))
    except FileNotFoundError:
        raise ModelError(f"{path}: file missing") from None
    if weights.keys() != shapes.keys():
        raise ModelError(f"{path}: holds {sorted(weights)}, should hold {sorted(shapes)}")
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise ModelError(f"{path}: {name} is {list(weights[name].shape)}, should be {list(shape)}")
    return {name: tensor.to(device=device, dtype=torch.float32) for name, tensor in weights.items()}
