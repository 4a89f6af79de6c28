"""The heads of a model as data: what each output of its card is made of, in terms of hidden states.

Owns the table from `Output` to a function, the steps behind a pooling and their weights, and the operations of all
these in numpy. `vecd.workers.torch.heads` has the operations in torch, for devices. Everything is in float32. Knows no
batch, only runs of equal-length sequences. The tests compare both with sentence-transformers, whose modules Pooling,
Dense, LayerNorm and Normalize are the source.

numpy multiplies with the threads of its own library: one in a worker, which the fork server sees to.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from vecd.model.card import ModelCard, ModelError
from vecd.model.steps import Step
from vecd.shm.output import Output
from vecd.workers.arrays import Arrays
from vecd.workers.batch import Ints, Layout, Run
from vecd.workers.description import NotDescribed

Floats: TypeAlias = NDArray[np.float32]


_A = TypeVar("_A", bound=Any)  # Floats, or a Tensor

Apply: TypeAlias = Callable[[_A], _A]
"""From rows [N, in_dim] to rows [N, out_dim]."""

Heads: TypeAlias = dict[Output, Callable[[_A, Layout], _A]]
"""By output: from hidden states, [T, H] in the layout's order, to float32 rows of all sequences, [B or T, width]."""


class Operations(Protocol[_A]):
    poolings: Mapping[str, Apply[_A]]
    """By mode: from the float32 hidden states of a run, [B, L, H], to [B, H]."""
    activations: Mapping[str, Apply[_A]]
    """By the lower-case name of the class in torch.nn, with the class's default arguments."""

    @property
    def own(self) -> Mapping[str, _A]:
        """The model's tensors. Raises ModelError."""

    def read(self, path: Path) -> Mapping[str, _A]:
        """The tensors of a file. Raises ModelError."""

    def floats(self, rows: _A) -> _A:
        """In float32, where heads are computed."""

    def take(self, rows: _A, places: Ints) -> _A: ...
    def join(self, parts: list[_A], axis: int) -> _A: ...
    def normalize(self, rows: _A) -> _A:
        """L2, with the zero vector left as it is."""

    def linear(self, rows: _A, weight: _A, bias: _A | None) -> _A: ...
    def layer_norm(self, rows: _A, weight: _A, bias: _A | None, epsilon: float) -> _A: ...
    def hybrid(self, vectors: _A, weights: _A, firsts: _A, starts: Ints) -> _A:
        """The rows of BGE-M3, [T, D + 1]: each token's vector and weight; the dense vector and 0 for the first one of a
        sequence."""

    def other(self, card: ModelCard, step: Step) -> Apply[_A]:
        """A step that not all have. Raises ModelError."""
        raise ModelError(f"{file_of(card, step)}: step {step.kind} is unknown")


# --- what an output is made of ----------------------------------------------------------------------------------


def load_heads(
    card: ModelCard, operations: Operations[_A], sparse: Callable[[ModelCard], Callable[[_A, Layout], _A]]
) -> Heads[_A]:
    """A function for each of `card.outputs`. `sparse` makes that of a SPLADE model.

    Raises ModelError when a file or a tensor of a head is missing or misshapen, NotDescribed for a head that is not
    computed here."""
    heads: Heads[_A] = {}
    if "dense" in card.capabilities:
        head = Head(card, operations)
        heads[Output.VECTORS] = lambda hidden, layout: head(hidden, layout.runs)
        heads[Output.UNNORMALIZED] = lambda hidden, layout: head.unnormalized(hidden, layout.runs)
        heads[Output.TOKENS] = lambda hidden, layout: operations.floats(hidden)
    if card.score is not None:
        heads |= _score_heads(card, operations)
    if card.tokens is not None:
        vectors = steps_of(card, card.tokens.steps, operations)
        heads[Output.TOKEN_VECTORS] = lambda hidden, layout: vectors(hidden)
    if card.sparse is not None and not card.sparse.is_lexical:
        heads[Output.SPARSE] = sparse(card)
    if card.sparse is not None and card.sparse.is_lexical:
        weights = steps_of(card, card.sparse.steps, operations)
        heads[Output.LEXICAL] = lambda hidden, layout: weights(hidden)
    if card.main_output is Output.HYBRID:
        heads[Output.HYBRID] = lambda hidden, layout: operations.hybrid(
            vectors(hidden), weights(hidden), head(hidden, layout.runs), layout.starts
        )
    missing = card.outputs - heads.keys()
    if missing:
        raise NotDescribed(f"no head for {', '.join(output.name.lower() for output in sorted(missing))}")
    return heads


def _score_heads(card: ModelCard, operations: Operations[_A]) -> Heads[_A]:
    score = card.score
    assert score is not None
    if not score.steps:
        raise NotDescribed(f"the head of {card.model_type} has no table of its layers")
    logits = steps_of(card, score.steps, operations)

    def pooled(hidden: _A, layout: Layout) -> _A:
        match score.pooling:
            case "cls" if len(hidden) == layout.starts.size:
                return hidden  # of first tokens only, as some engines return them
            case "cls":
                return operations.take(hidden, layout.starts)
            case "lasttoken":
                return operations.take(hidden, layout.last_tokens(score.padding_id))
            case mode:
                return pool(operations, hidden, layout.runs, (mode,))

    if not score.pooling:
        return {Output.TOKEN_SCORES: lambda hidden, layout: logits(hidden)}
    return {Output.SCORES: lambda hidden, layout: logits(pooled(hidden, layout))}


class Head(Generic[_A]):
    """From hidden states to dense vectors: pooling, then the card's steps."""

    def __init__(self, card: ModelCard, operations: Operations[_A]) -> None:
        """Raises ModelError when a file or a tensor of a step is missing or misshapen."""
        self._operations, self._modes = operations, card.pooling
        self.is_normalized = bool(card.steps) and card.steps[-1].kind == "normalize"
        self.after_pooling = steps_of(card, card.steps[:-1] if self.is_normalized else card.steps, operations)
        """Applies the steps to pooled vectors [B, …], without the last one if that is to normalize."""

    def __call__(self, hidden: _A, runs: Sequence[Run]) -> _A:
        """Hidden states [T, H] → vectors, float32 [B, D], in the order of the runs."""
        vectors = self.unnormalized(hidden, runs)
        return self._operations.normalize(vectors) if self.is_normalized else vectors

    def unnormalized(self, hidden: _A, runs: Sequence[Run]) -> _A:
        """Like the call, without the last step if that is to normalize."""
        return self.after_pooling(pool(self._operations, hidden, runs, self._modes))


def pool(operations: Operations[_A], hidden: _A, runs: Sequence[Run], modes: Sequence[str]) -> _A:
    """Hidden states [T, H] → float32 [B, H · number of modes], the modes side by side in their order."""
    hidden = operations.floats(hidden)
    parts = []
    for run in runs:
        sequences = hidden[run.start : run.stop].reshape(run.count, run.length, -1)
        parts.append(operations.join([operations.poolings[mode](sequences) for mode in modes], 1))
    return operations.join(parts, 0)


# --- steps ------------------------------------------------------------------------------------------------------


def steps_of(card: ModelCard, steps: Sequence[Step], operations: Operations[_A]) -> Apply[_A]:
    """The steps one after the other, on rows of any float type. Raises ModelError when a file or a tensor is missing or
    misshapen."""
    loaded = [_load(card, step, operations) for step in steps]

    def apply(rows: _A) -> _A:
        rows = operations.floats(rows)
        for step in loaded:
            rows = step(rows)
        return rows

    return apply


def _load(card: ModelCard, step: Step, operations: Operations[_A]) -> Apply[_A]:
    if step.kind == "normalize":
        return operations.normalize
    if step.kind not in ("dense", "layer_norm"):
        return operations.other(card, step)
    if step.activation not in operations.activations:
        raise ModelError(f"{file_of(card, step).parent}/config.json: activation {step.activation} is not supported")
    activation = operations.activations[step.activation]
    stored, *others = weights_of(card, step, operations)
    weight = operations.floats(stored)
    bias, residual = (None if other is None else operations.floats(other) for other in others)
    if step.kind == "layer_norm":
        return lambda rows: operations.layer_norm(rows, weight, bias, step.epsilon)

    def dense(rows: _A) -> _A:
        made: _A = activation(operations.linear(rows, weight, bias))
        if not step.has_residual:
            return made
        made += rows if residual is None else operations.linear(rows, residual, None)
        return made

    return dense


def weights_of(card: ModelCard, step: Step, operations: Operations[_A]) -> tuple[_A, _A | None, _A | None]:
    """Weight, bias and the matrix of the residual of a step that is dense or a norm, as they are stored, None for those
    that it lacks. Raises ModelError when a file or a tensor is missing or misshapen."""
    shape = (step.out_dim, step.in_dim) if step.kind == "dense" else (step.out_dim,)
    if step.tensor:
        own, bias_name = operations.own, step.bias_tensor or f"{step.tensor}.bias"
        weight = _find(card, own, f"{step.tensor}.weight", shape)
        return weight, _find(card, own, bias_name, shape[:1]) if step.bias else None, None
    module = "" if step.file else "linear." if step.kind == "dense" else "norm."
    shapes: dict[str, tuple[int, ...]] = {f"{module}weight": shape}
    if step.bias:
        shapes[f"{module}bias"] = shape[:1]
    if step.has_residual and step.in_dim != step.out_dim:
        shapes["residual.weight"] = shape
    path = file_of(card, step)
    read = dict(operations.read(path))
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


def _check_shape(what: str, array: Any, shape: tuple[int, ...]) -> None:
    if tuple(array.shape) != shape:
        raise ModelError(f"{what} is {list(array.shape)}, should be {list(shape)}")


# --- in numpy ---------------------------------------------------------------------------------------------------


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


_ACTIVATIONS: dict[str, Apply[Floats]] = {
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


def _mean_weighted_by_position(hidden: Floats) -> Floats:
    weights = np.arange(1, hidden.shape[1] + 1, dtype=np.float32)
    pooled: Floats = np.einsum("blh,l->bh", hidden, weights / weights.sum())
    return pooled


_POOLINGS: dict[str, Apply[Floats]] = {
    "cls": lambda hidden: hidden[:, 0],
    "max": lambda hidden: hidden.max(axis=1),
    "mean": lambda hidden: np.add.reduce(hidden, axis=1) / np.float32(hidden.shape[1]),
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(axis=1) / np.float32(hidden.shape[1] ** 0.5),
    "weightedmean": _mean_weighted_by_position,
    "lasttoken": lambda hidden: hidden[:, -1],
}


class NumpyOperations(Operations[Floats]):
    poolings, activations = _POOLINGS, _ACTIVATIONS

    def __init__(self, own: Arrays) -> None:
        """`own`: the model's tensors."""
        self._own = own

    @property
    def own(self) -> Arrays:
        return self._own

    def read(self, path: Path) -> Arrays:
        return Arrays([path])

    def floats(self, rows: Floats) -> Floats:
        return rows

    def take(self, rows: Floats, places: Ints) -> Floats:
        return rows[places]

    def join(self, parts: list[Floats], axis: int) -> Floats:
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)

    def normalize(self, rows: Floats) -> Floats:
        # np.linalg.norm and mean() take twice as long for the few numbers of a lone text.
        lengths: Floats = np.sqrt(np.add.reduce(rows * rows, axis=1, keepdims=True))
        normalized: Floats = np.divide(rows, np.maximum(lengths, 1e-12, out=lengths))
        return normalized

    def linear(self, rows: Floats, weight: Floats, bias: Floats | None) -> Floats:
        made: Floats = rows @ weight.T
        return made if bias is None else made + bias

    def layer_norm(self, rows: Floats, weight: Floats, bias: Floats | None, epsilon: float) -> Floats:
        centred = rows - rows.mean(axis=1, keepdims=True)
        deviation = np.sqrt((centred * centred).mean(axis=1, keepdims=True) + np.float32(epsilon))
        normalized: Floats = centred / deviation * weight
        return normalized if bias is None else normalized + bias

    def hybrid(self, vectors: Floats, weights: Floats, firsts: Floats, starts: Ints) -> Floats:
        rows = np.concatenate((vectors, weights), axis=1)
        rows[starts, :-1] = firsts
        rows[starts, -1] = 0
        return rows
