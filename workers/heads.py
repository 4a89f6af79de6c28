"""The heads of a model, interpreted: what each output of its card is made of, in terms of hidden states.

Owns the table from `Output` to a function, the steps behind a pooling and their weights, and the operations of all
these in numpy. `vecd.workers.torch.heads` has the operations in torch, for devices. Everything is in float32. Knows no
batch, only runs of equal-length sequences. The tests compare both with sentence-transformers, whose modules Pooling,
Dense, LayerNorm and Normalize are the source.

numpy multiplies with the threads of its own library: one in a worker, which the fork server sees to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from vecd.model.card import ModelCard, ModelError
from vecd.model.steps import POOLINGS, Step
from vecd.shm.output import Output
from vecd.workers.activations import ACTIVATIONS, Activation, Floats
from vecd.workers.arrays import Arrays
from vecd.workers.batch import Ints, Layout, Run
from vecd.workers.description import NotDescribed

_A = TypeVar("_A", bound=Any)  # Floats, or a Tensor

Apply: TypeAlias = Callable[[_A], _A]
"""From rows [N, in_dim] to rows [N, out_dim]."""

Heads: TypeAlias = dict[Output, Callable[[_A, Layout], _A]]
"""By output: from hidden states, [T, H] in the layout's order, to float32 rows of all sequences, [B or T, width]."""

Decoder: TypeAlias = Callable[[_A, Any], Iterator[_A]]
"""From rows [N, in_dim] and the type to multiply in, to logits [N, V], some columns at a time, valid until the next."""


class Operations(Protocol[_A]):
    """Those that are written twice; the others are numpy's and torch's alike, in `arrays`."""

    arrays: Any
    """The module: numpy, or torch."""

    @property
    def own(self) -> Mapping[str, _A]:
        """The model's tensors. Raises ModelError."""

    def read(self, path: Path) -> Mapping[str, _A]:
        """The tensors of a file. Raises ModelError."""

    def floats(self, rows: _A) -> _A:
        """In float32, where heads are computed."""

    def places(self, places: Ints) -> Any:
        """As an index of rows."""

    def activation(self, row: Activation) -> Apply[_A] | None: ...
    def normalize(self, rows: _A) -> _A:
        """L2, with the zero vector left as it is."""

    def linear(self, rows: _A, weight: _A, bias: _A | None) -> _A: ...
    def layer_norm(self, rows: _A, weight: _A, bias: _A | None, epsilon: float) -> _A: ...
    def log_saturate_(self, logits: _A, num_logs: int) -> _A:
        """relu, then log1p as often as said, in place."""

    def decoder(self, weight: _A, bias: _A | None) -> Decoder[_A]:
        """Of weights as they are stored, [V, in_dim]."""
        raise NotDescribed("a product with the vocabulary")

    def logit(self, card: ModelCard, step: Step) -> Apply[_A]:
        """Raises ModelError."""
        raise NotDescribed("some rows of an output layer")


# --- what an output is made of ----------------------------------------------------------------------------------


def load_heads(card: ModelCard, operations: Operations[_A]) -> Heads[_A]:
    """A function for each of `card.outputs`.

    Raises ModelError when a file or a tensor of a head is missing or misshapen, NotDescribed for a head that is not
    computed here."""
    parts = _Parts(card, operations)
    return {output: partial(_OUTPUTS[output], parts) for output in card.outputs}


class _Parts(Generic[_A]):
    """What the outputs of one model are made with."""

    def __init__(self, card: ModelCard, operations: Operations[_A]) -> None:
        self.operations = operations
        self._score, sparse = card.score, card.sparse
        if "dense" in card.capabilities:
            self.dense = Head(card, operations)
        if card.score is not None:
            if not card.score.steps:
                raise NotDescribed(f"the head of {card.model_type} has no table of its layers")
            self.logits = steps_of(card, card.score.steps, operations)
        if card.tokens is not None:
            self.token_vectors = steps_of(card, card.tokens.steps, operations)
        if sparse is not None and sparse.is_lexical:
            self.lexical = steps_of(card, sparse.steps, operations)
        elif sparse is not None:
            self.splade = SpladeHead(card, operations)

    def scores(self, hidden: _A, layout: Layout) -> _A:
        score, operations = self._score, self.operations
        assert score is not None
        if score.pooling == "cls":
            # Some engines return the states of first tokens only.
            is_pooled = len(hidden) == layout.starts.size
            return self.logits(hidden if is_pooled else hidden[operations.places(layout.starts)])
        if score.pooling == "lasttoken":
            return self.logits(hidden[operations.places(layout.last_tokens(score.padding_id))])
        return self.logits(pool(operations, hidden, layout.runs, (score.pooling,)))

    def hybrid(self, hidden: _A, layout: Layout) -> _A:
        """Of BGE-M3, [T, D + 1]: each token's vector and weight; the dense vector and 0 for the first one of a
        sequence."""
        rows: _A = self.operations.arrays.concatenate((self.token_vectors(hidden), self.lexical(hidden)), 1)
        starts = self.operations.places(layout.starts)
        rows[starts, :-1] = self.dense(hidden, layout.runs)
        rows[starts, -1] = 0
        return rows


_OUTPUTS: Mapping[Output, Callable[[_Parts[Any], Any, Layout], Any]] = {
    Output.VECTORS: lambda parts, hidden, layout: parts.dense(hidden, layout.runs),
    Output.UNNORMALIZED: lambda parts, hidden, layout: parts.dense.unnormalized(hidden, layout.runs),
    Output.TOKENS: lambda parts, hidden, layout: parts.operations.floats(hidden),
    Output.SCORES: lambda parts, hidden, layout: parts.scores(hidden, layout),
    Output.TOKEN_SCORES: lambda parts, hidden, layout: parts.logits(hidden),
    Output.SPARSE: lambda parts, hidden, layout: parts.splade(hidden, layout),
    Output.TOKEN_VECTORS: lambda parts, hidden, layout: parts.token_vectors(hidden),
    Output.LEXICAL: lambda parts, hidden, layout: parts.lexical(hidden),
    Output.HYBRID: lambda parts, hidden, layout: parts.hybrid(hidden, layout),
}


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
    hidden, arrays = operations.floats(hidden), operations.arrays
    parts = []
    for run in runs:
        sequences = hidden[run.start : run.stop].reshape(run.count, run.length, -1)
        pooled = [POOLINGS[mode](arrays, sequences) for mode in modes]
        parts.append(pooled[0] if len(modes) == 1 else arrays.concatenate(pooled, 1))
    made: _A = parts[0] if len(parts) == 1 else arrays.concatenate(parts, 0)
    return made


FLOATS_OF_A_SLICE, WORDS_OF_A_SLICE = 2**21, 4096
"""Logits of the vocabulary that are in memory at a time: 8 MiB. Measured with BERT-base's sizes and 16 to 1,180 tokens
on one core with AVX512-BF16, in float32 and bfloat16: between 2**18 and 2**22 no size is clearly faster, and 2**24
takes 1.5 times as long as 2**20. Words: of a decoder that has to cut them beforehand."""


class SpladeHead(Generic[_A]):
    """The sparse vector of a SPLADE model: a weight for each token of the vocabulary, from the states of a text's
    tokens, of any float type.

        logits [T, V]  = decoder(norm(activation(dense(hidden))))     all but the decoder in float32
        weights [B, V] = max over tokens, or sum, of log1p(relu(logits)), in float32

    Source: SpladePooling of sentence-transformers, SPLADE v2 (https://arxiv.org/abs/2109.10086)."""

    def __init__(self, card: ModelCard, operations: Operations[_A]) -> None:
        """Raises ModelError when a file or a tensor is missing or misshapen."""
        head = card.sparse
        assert head is not None
        *before, decoder = head.steps
        self._operations, self._num_logs, self._pooling = operations, head.num_logs, head.pooling
        self._states = steps_of(card, before, operations)
        weight, bias, _ = weights_of(card, decoder, operations)
        self._decoder = operations.decoder(weight, bias)

    def __call__(self, hidden: _A, layout: Layout) -> _A:
        pooled = self._pooled(self._states(hidden), layout.runs, hidden.dtype)
        return pooled if self._pooling == "sum" else self.activated(pooled)

    def activated(self, logits: _A) -> _A:
        return self._operations.log_saturate_(logits, self._num_logs)

    def _pooled(self, states: _A, runs: Sequence[Run], dtype: Any) -> _A:
        """The maxima of the logits, or the sums of the weights, of each sequence, [B, V]. The decoder goes by the
        vocabulary, not by tokens: each slice has all tokens of each sequence, and the weights are read once. A lone
        sequence may be too long for that."""
        arrays, is_sum = self._operations.arrays, self._pooling == "sum"
        most = FLOATS_OF_A_SLICE // WORDS_OF_A_SLICE
        if len(runs) == 1 == runs[0].count and len(states) > most:
            first = self._pooled(states[:most], [Run(0, 1, most)], dtype)
            rest = self._pooled(states[most:], [Run(0, 1, len(states) - most)], dtype)
            made: _A = first + rest if is_sum else arrays.maximum(first, rest)
            return made
        parts = []
        for logits in self._decoder(states, dtype):
            summands = self.activated(self._operations.floats(logits)) if is_sum else logits
            of_runs = (summands[run.start : run.stop].reshape(run.count, run.length, -1) for run in runs)
            pooled = [each.sum(1) if is_sum else arrays.amax(each, 1) for each in of_runs]
            parts.append(self._operations.floats(arrays.concatenate(pooled, 0)))
        whole: _A = arrays.concatenate(parts, 1)
        return whole


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
    if step.kind == "tanh_127":
        return lambda rows: operations.arrays.tanh(rows) * 127
    if step.kind == "logit":
        return operations.logit(card, step)
    activation = operations.activation(ACTIVATIONS.get(step.activation, Activation()))
    if activation is None:
        raise ModelError(f"{file_of(card, step).parent}/config.json: activation {step.activation} is not supported")
    stored, *others = weights_of(card, step, operations)
    weight = operations.floats(stored)
    bias, residual = (None if other is None else operations.floats(other) for other in others)
    if step.kind == "layer_norm":
        return lambda rows: operations.layer_norm(rows, weight, bias, step.epsilon)

    def dense(rows: _A) -> _A:
        made: _A = activation(operations.linear(rows, weight, bias))
        if step.divisor != 1:
            made /= step.divisor
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


class NumpyOperations(Operations[Floats]):
    arrays = np

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

    def places(self, places: Ints) -> Ints:
        return places

    def activation(self, row: Activation) -> Apply[Floats] | None:
        return row.numpy

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

    def log_saturate_(self, logits: Floats, num_logs: int) -> Floats:
        np.maximum(logits, 0, out=logits)
        for _ in range(num_logs):
            np.log1p(logits, out=logits, where=logits > 0)
        return logits
