"""From the hidden states of tokens to the vectors of sequences, in numpy: pooling, dense layers, norms.

Owns the pooling modes and the reading and computation of steps, in float32. Knows no model and no batch, only runs of
equal-length sequences. `vecd.workers.torch.heads` has the same for every device of torch; the tests compare both with
sentence-transformers, whose modules Pooling, Dense, LayerNorm and Normalize are the source.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from vecd.model.card import ModelCard, ModelError
from vecd.model.steps import Step
from vecd.workers.arrays import Arrays
from vecd.workers.batch import Run

# The steps of heads in numpy: dense layers with their activations, norms, and where their weights are.
#
# numpy multiplies with the threads of its own library: one in a worker, which the fork server sees to.

Floats: TypeAlias = NDArray[np.float32]
Apply: TypeAlias = Callable[[Floats], Floats]
"""From rows [N, in_dim] to rows [N, out_dim]."""


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


_A = TypeVar("_A", bound=_Shaped)


# --- activations ------------------------------------------------------------------------------------------------


def _softplus(x: Floats) -> Floats:
    return np.logaddexp(0, x)


def _sigmoid(x: Floats) -> Floats:
    return np.exp(-_softplus(-x))


def _elu(x: Floats) -> Floats:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _gelu(x: Floats) -> Floats:
    return x * (np.float32(0.5) + np.float32(0.5) * _erf(x * np.float32(0.5**0.5)))


def _erf(x: Floats) -> Floats:
    """Within 5e-7. numpy has none, and calling math.erf takes 40 times as long. Source: Eigen's generic_fast_erf_float,
    a quotient of polynomials between -4 and 4."""
    x = np.clip(x, -4, 4)
    square = x * x
    numerator, denominator = (_polynomial(coefficients, square) for coefficients in (_NUMERATOR, _DENOMINATOR))
    numerator *= x
    numerator /= denominator
    return numerator


def _polynomial(coefficients: Sequence[float], x: Floats) -> Floats:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= x
        total += np.float32(coefficient)
    return total


_NUMERATOR = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_DENOMINATOR = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


ACTIVATIONS: dict[str, Apply] = {
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


# --- steps ------------------------------------------------------------------------------------------------------


def load_steps(card: ModelCard, steps: Sequence[Step], own: Arrays) -> list[Apply]:
    """A function for each step. `own`: the model's tensors. Raises ModelError when a file or a tensor is missing or
    misshapen."""
    return [_load(card, step, own) for step in steps]


def apply_all(steps: Sequence[Callable[[_A], _A]], rows: _A) -> _A:
    for step in steps:
        rows = step(rows)
    return rows


def normalize(vectors: Floats) -> Floats:
    """L2, with the zero vector left as it is."""
    # np.linalg.norm and mean() take twice as long for the few numbers of a lone text.
    lengths: Floats = np.sqrt(np.add.reduce(vectors * vectors, axis=1, keepdims=True))
    normalized: Floats = np.divide(vectors, np.maximum(lengths, 1e-12, out=lengths))
    return normalized


def _load(card: ModelCard, step: Step, own: Arrays) -> Apply:
    match step.kind:
        case "normalize":
            return normalize
        case "dense":
            return _dense(card, step, own)
        case "layer_norm":
            return _layer_norm(card, step, own)
        case unknown:
            raise ModelError(f"{file_of(card, step)}: step {unknown} is unknown")


def _dense(card: ModelCard, step: Step, own: Arrays) -> Apply:
    activation = activation_of(card, step, ACTIVATIONS)
    weight, bias, residual = weights_of(card, step, own, Arrays)
    if bias is None:
        bias = np.zeros(1, dtype=np.float32)

    def apply(rows: Floats) -> Floats:
        made = activation(rows @ weight.T + bias)
        if not step.has_residual:
            return made
        return made + (rows if residual is None else rows @ residual.T)

    return apply


def _layer_norm(card: ModelCard, step: Step, own: Arrays) -> Apply:
    weight, bias, _ = weights_of(card, step, own, Arrays)
    epsilon = np.float32(step.epsilon)

    def norm(rows: Floats) -> Floats:
        centred = rows - rows.mean(axis=1, keepdims=True)
        deviation = np.sqrt((centred * centred).mean(axis=1, keepdims=True) + epsilon)
        normalized: Floats = centred / deviation * weight
        return normalized if bias is None else normalized + bias

    return norm


# --- the weights ------------------------------------------------------------------------------------------------


def activation_of(card: ModelCard, step: Step, activations: Mapping[str, Callable[[_A], _A]]) -> Callable[[_A], _A]:
    """Raises ModelError for one that is not supported."""
    if step.activation not in activations:
        path = file_of(card, step).parent / "config.json"
        raise ModelError(f"{path}: activation {step.activation} is not supported")
    return activations[step.activation]


def weights_of(
    card: ModelCard, step: Step, own: Mapping[str, _A], open_files: Callable[[Sequence[Path]], Mapping[str, _A]]
) -> tuple[_A, _A | None, _A | None]:
    """Weight, bias and the matrix of the residual of a step that is dense or a norm, None for those that it lacks.
    `own`: the model's tensors. Raises ModelError when a file or a tensor is missing or misshapen."""
    shape = (step.out_dim, step.in_dim) if step.kind == "dense" else (step.out_dim,)
    if step.tensor:
        bias_name = step.bias_tensor or f"{step.tensor}.bias"
        found = _find(card, own, f"{step.tensor}.weight", shape)
        return found, _find(card, own, bias_name, shape[:1]) if step.bias else None, None
    module = "" if step.file else "linear." if step.kind == "dense" else "norm."
    shapes: dict[str, tuple[int, ...]] = {f"{module}weight": shape}
    if step.bias:
        shapes[f"{module}bias"] = shape[:1]
    if step.has_residual and step.in_dim != step.out_dim:
        shapes["residual.weight"] = shape
    path = file_of(card, step)
    try:
        read = dict(open_files([path]))
    except FileNotFoundError:
        raise ModelError(f"{path}: file missing") from None
    if read.keys() != shapes.keys():
        raise ModelError(f"{path}: holds {sorted(read)}, should hold {sorted(shapes)}")
    for name, wanted in shapes.items():
        _check_shape(f"{path}: {name}", read[name], wanted)
    return read[f"{module}weight"], read.get(f"{module}bias"), read.get("residual.weight")


def file_of(card: ModelCard, step: Step) -> Path:
    return Path(card.folder, step.file or Path(step.path, "model.safetensors"))


def _find(card: ModelCard, own: Mapping[str, _A], name: str, shape: tuple[int, ...]) -> _A:
    """The name may have the base model's before it, as in "bert.pooler.dense.weight"."""
    found = [name] if name in own else [stored for stored in own if stored.partition(".")[2] == name]
    if len(found) != 1:
        raise ModelError(f"{card.weights_folder}: the weights lack {name}, which the model's head is made of")
    array = own[found[0]]
    _check_shape(f"{card.weights_folder}: {found[0]}", array, shape)
    return array


def _check_shape(what: str, array: _Shaped, shape: tuple[int, ...]) -> None:
    if tuple(array.shape) != shape:
        raise ModelError(f"{what} is {list(array.shape)}, should be {list(shape)}")


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


class Head(Generic[_A]):
    """The part of a model behind the transformer: pooling, then the card's steps."""

    def __init__(
        self,
        pool: Callable[[_A, Sequence[Run], Sequence[str]], _A],
        modes: Sequence[str],
        steps: Sequence[Callable[[_A], _A]],
        normalize: Callable[[_A], _A],
    ) -> None:
        self._pool, self._modes = pool, modes
        self._normalize = normalize
        self.is_normalized = bool(steps) and steps[-1] is normalize
        self._steps = steps[:-1] if self.is_normalized else steps

    def __call__(self, hidden: _A, runs: Sequence[Run]) -> _A:
        """Hidden states [T, H] → vectors, float32 [B, D], in the order of the runs."""
        vectors = self.unnormalized(hidden, runs)
        return self._normalize(vectors) if self.is_normalized else vectors

    def unnormalized(self, hidden: _A, runs: Sequence[Run]) -> _A:
        """Like the call, without the last step if that is to normalize."""
        return self.after_pooling(self._pool(hidden, runs, self._modes))

    def after_pooling(self, vectors: _A) -> _A:
        """Apply the steps to pooled vectors [B, …], without the last one if that is to normalize."""
        return apply_all(self._steps, vectors)


def load_head(card: ModelCard, own: Arrays) -> Head[Floats]:
    """Read the weights of the card's steps. `own`: the model's tensors. Raises ModelError when a file or a tensor is
    missing or misshapen."""
    return Head(pool, card.pooling, load_steps(card, card.steps, own), normalize)


def pool(hidden: Floats, runs: Sequence[Run], modes: Sequence[str]) -> Floats:
    """Hidden states [T, H] → [B, H · number of modes], the modes side by side in their order."""
    return _joined([_pool(hidden, run, modes) for run in runs], axis=0)


def _pool(hidden: Floats, run: Run, modes: Sequence[str]) -> Floats:
    sequences = hidden[run.start : run.stop].reshape(run.count, run.length, -1)
    return _joined([_POOLINGS[mode](sequences) for mode in modes], axis=1)


def _joined(parts: list[Floats], axis: int) -> Floats:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)
