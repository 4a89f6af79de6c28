"""Turns the hidden states of tokens into rows, in numpy.

Owns the pooling modes and the steps behind them (dense, layer_norm, normalize) for the engine without torch, all in
float32. Knows no model and no batch, only runs of equal-length sequences. Called by `vecd.workers.engines.lean.engine`.
`vecd.workers.engines.torch.pooling` has the same for every device of torch; the tests compare both with
sentence-transformers, whose modules Pooling, Dense, LayerNorm and Normalize are the source.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vecd.shm.card import ModelCard, ModelError
from vecd.shm.heads import Step
from vecd.workers.engines.lean.arrays import Arrays
from vecd.workers.layout import Run

Floats: TypeAlias = NDArray[np.float32]


def _mean_weighted_by_position(hidden: Floats) -> Floats:
    weights = np.arange(1, hidden.shape[1] + 1, dtype=np.float32)
    pooled: Floats = np.einsum("blh,l->bh", hidden, weights / weights.sum())
    return pooled


# Each takes the hidden states of a run, [B, L, H], and gives [B, H].
_POOLINGS: dict[str, Callable[[Floats], Floats]] = {
    "cls": lambda hidden: hidden[:, 0],
    "max": lambda hidden: hidden.max(axis=1),
    "mean": lambda hidden: np.add.reduce(hidden, axis=1) / np.float32(hidden.shape[1]),
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(axis=1) / np.float32(hidden.shape[1] ** 0.5),
    "weightedmean": _mean_weighted_by_position,
    "lasttoken": lambda hidden: hidden[:, -1],
}


def _softplus(x: Floats) -> Floats:
    return np.logaddexp(0, x)


def _sigmoid(x: Floats) -> Floats:
    return np.exp(-_softplus(-x))


def _elu(x: Floats) -> Floats:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _gelu(x: Floats) -> Floats:
    erf = np.frompyfunc(math.erf, 1, 1)  # numpy has none; a dense step computes few numbers
    activated: Floats = x * (0.5 + 0.5 * erf(x / math.sqrt(2)).astype(np.float32))
    return activated


_ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "leakyrelu": lambda x: np.where(x > 0, x, np.float32(0.01) * x),
    "elu": _elu,
    "selu": lambda x: np.float32(1.0507009873554805) * np.where(x > 0, x, np.float32(1.6732632423543772) * _elu(x)),
    "gelu": _gelu,
    "silu": lambda x: x * _sigmoid(x),
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "sigmoid": _sigmoid,
    "softplus": _softplus,
    "softsign": lambda x: x / (1 + np.abs(x)),
    "hardtanh": lambda x: np.clip(x, -1, 1),
}
"""By the lower-case name of the class in torch.nn, with the class's default arguments."""


class LeanHead:
    """The part of a model behind the transformer: pooling, then the card's steps."""

    def __init__(self, modes: Sequence[str], steps: Sequence[Callable[[Floats], Floats]]) -> None:
        self._modes = modes
        self.is_normalized = bool(steps) and steps[-1] is normalize
        self._steps = steps[:-1] if self.is_normalized else steps

    def __call__(self, hidden: Floats, runs: Sequence[Run]) -> Floats:
        """Hidden states [T, H] → vectors [B, D], in the order of the runs."""
        vectors = self.unnormalized(hidden, runs)
        return normalize(vectors) if self.is_normalized else vectors

    def unnormalized(self, hidden: Floats, runs: Sequence[Run]) -> Floats:
        """Like the call, without the last step if that is to normalize."""
        return self.after_pooling(_joined([_pool(hidden, run, self._modes) for run in runs], axis=0))

    def after_pooling(self, vectors: Floats) -> Floats:
        """Apply the steps to pooled vectors [B, …], without the last one if that is to normalize."""
        for step in self._steps:
            vectors = step(vectors)
        return vectors


def _pool(hidden: Floats, run: Run, modes: Sequence[str]) -> Floats:
    sequences = hidden[run.start : run.stop].reshape(run.count, run.length, -1)
    return _joined([_POOLINGS[mode](sequences) for mode in modes], axis=1)


def _joined(parts: list[Floats], axis: int) -> Floats:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)


# --- steps ------------------------------------------------------------------------------------------------------


def load_head(card: ModelCard) -> LeanHead:
    """Read the weights of the card's steps. Raises ModelError when a file or a tensor is missing or misshapen."""
    return LeanHead(card.pooling, [_load_step(card, step) for step in card.steps])


def _load_step(card: ModelCard, step: Step) -> Callable[[Floats], Floats]:
    path = Path(card.folder) / step.path / "model.safetensors"
    match step.kind:
        case "normalize":
            return normalize
        case "dense":
            return _dense(step, path)
        case "layer_norm":
            return _layer_norm(step, path)
        case unknown:
            raise ModelError(f"{path}: step {unknown} is unknown")


def normalize(vectors: Floats) -> Floats:
    """L2, with the zero vector left as it is."""
    # np.linalg.norm and mean() take twice as long for the few numbers of a lone text.
    lengths: Floats = np.sqrt(np.add.reduce(vectors * vectors, axis=1, keepdims=True))
    normalized: Floats = np.divide(vectors, np.maximum(lengths, 1e-12, out=lengths))
    return normalized


def _dense(step: Step, path: Path) -> Callable[[Floats], Floats]:
    if step.activation not in _ACTIVATIONS:
        raise ModelError(f"{path.parent / 'config.json'}: activation {step.activation} is not supported")
    activation = _ACTIVATIONS[step.activation]
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (step.out_dim, step.in_dim)}
    if step.bias:
        shapes["linear.bias"] = (step.out_dim,)
    weights = _read_weights(path, shapes)
    weight, bias = weights["linear.weight"], weights.get("linear.bias", np.float32(0))
    return lambda vectors: activation(vectors @ weight.T + bias)


def _layer_norm(step: Step, path: Path) -> Callable[[Floats], Floats]:
    weights = _read_weights(path, {"norm.weight": (step.out_dim,), "norm.bias": (step.out_dim,)})

    def norm(vectors: Floats) -> Floats:
        centred = vectors - vectors.mean(axis=1, keepdims=True)
        deviation = np.sqrt((centred * centred).mean(axis=1, keepdims=True) + np.float32(_EPSILON))
        normalized: Floats = centred / deviation * weights["norm.weight"] + weights["norm.bias"]
        return normalized

    return norm


_EPSILON = 1e-5
"""Of torch.nn.LayerNorm."""


def _read_weights(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Floats]:
    """Exactly the tensors named in `shapes`, as float32. Raises ModelError when the file holds others."""
    try:
        weights = Arrays([path])
    except FileNotFoundError:
        raise ModelError(f"{path}: file missing") from None
    if weights.keys() != shapes.keys():
        raise ModelError(f"{path}: holds {sorted(weights)}, should hold {sorted(shapes)}")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise ModelError(f"{path}: {name} is {list(weights[name].shape)}, should be {list(shape)}")
    return weights
