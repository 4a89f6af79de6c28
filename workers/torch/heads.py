"""The heads of a model on torch: what each output of its card is made of, in terms of hidden states.

Owns the table from `Output` to a function, the pooling modes, the steps behind them, and the rows of a batch of several
outputs; all in float32 for every dtype of the model. Knows no model and no batch, only runs of equal-length sequences.

Source of the modes and the layout of the steps' files: sentence-transformers' modules Pooling, Dense, LayerNorm and
Normalize, with which the tests compare every one.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional

from vecd.model.card import ModelCard, ModelError, one_line
from vecd.model.steps import Step
from vecd.shm.output import Output
from vecd.workers.batch import Ints, Layout, PackedBatch, Run, outputs_in, places_of
from vecd.workers.description import NotDescribed
from vecd.workers.onnx.steps import Head, activation_of, apply_all, file_of, weights_of
from vecd.workers.torch.checkpoint import Tensors, own_tensors
from vecd.workers.torch.device import to_device
from vecd.workers.weights import broken, weight_files

_Apply: TypeAlias = Callable[[Tensor], Tensor]

# The rows of a batch whose sequences do not all ask for the model's vector, on torch's devices.
#
# What each `Output` means in terms of hidden states is in `vecd.workers.torch.heads`.

Heads: TypeAlias = dict[Output, Callable[[Tensor, Layout], Tensor]]
"""By output: from hidden states, [T, H] in the layout's order, to float32 rows of all sequences, [B or T, width]."""


def rows_of(batch: PackedBatch, layout: Layout, hidden: Tensor, heads: Heads, row_dim: int) -> tuple[Tensor, Ints]:
    """The rows, float32 [R, row_dim] on the device of `hidden`, and in which row of the batch each belongs, shape [R].

    `hidden` are the last hidden states, [T, H] in the layout's order. Zeros fill a row that an output does not.
    """
    assert batch.outputs is not None
    outputs = batch.outputs[layout.order]
    made, places = [], []
    for output in outputs_in(outputs):
        rows = heads[output](hidden, layout)
        if output.spans_rows:
            rows = functional.pad(rows, (0, batch.span * row_dim - rows.shape[1])).reshape(-1, row_dim)
        is_wanted, place = places_of(output, outputs, layout.lengths, batch.first_rows[layout.order], batch.span)
        if not is_wanted.all():
            rows = rows.index_select(0, to_device(np.flatnonzero(is_wanted), hidden.device))
        made.append(functional.pad(rows, (0, row_dim - rows.shape[1])))
        places.append(place)
    return torch.cat(made), np.concatenate(places)


# Turns the hidden states of tokens into the vectors of sequences.
#
# Source of the modes and the layout of the steps' files: sentence-transformers' modules Pooling, Dense, LayerNorm and
# Normalize, with which the tests compare every one.


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


def pool(hidden: Tensor, runs: Sequence[Run], modes: Sequence[str]) -> Tensor:
    """Hidden states [T, H] → float32 [B, H · number of modes], the modes side by side in their order."""
    hidden = hidden.float()
    return torch.cat([_pool_run(hidden, run, modes) for run in runs])


def _pool_run(hidden: Tensor, run: Run, modes: Sequence[str]) -> Tensor:
    sequences = hidden[run.start : run.stop].reshape(run.count, run.length, -1)
    return torch.cat([_POOLINGS[mode](sequences) for mode in modes], dim=-1)


# --- steps ------------------------------------------------------------------------------------------------------


def load_head(card: ModelCard, device: torch.device) -> Head[Tensor]:
    """Read the weights of the card's steps. Raises ModelError when a file or a tensor is missing or misshapen."""
    return Head(pool, card.pooling, _load_steps(card, card.steps, device), normalize)


def _load_steps(card: ModelCard, steps: Sequence[Step], device: torch.device) -> list[_Apply]:
    """A function for each step. Raises what `load_head` raises."""
    own = _own_tensors(card) if any(step.tensor for step in steps) else {}
    return [_load(card, step, own, device) for step in steps]


def _own_tensors(card: ModelCard) -> Mapping[str, Tensor]:
    try:
        return own_tensors(Path(card.weights_folder))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{card.weights_folder}: the weights cannot be read: {one_line(error)}") from error


def _in_a_row(card: ModelCard, steps: Sequence[Step], device: torch.device) -> _Apply:
    """From rows of any float type, [N, in_dim of the first], to float32 [N, out_dim of the last]."""
    loaded = _load_steps(card, steps, device)
    return lambda rows: apply_all(loaded, rows.float())


def _load(card: ModelCard, step: Step, own: Mapping[str, Tensor], device: torch.device) -> _Apply:
    match step.kind:
        case "normalize":
            return normalize
        case "dense":
            return _dense(card, step, own, device)
        case "layer_norm":
            weight, bias, _ = _weights_of(card, step, own, device)
            return lambda rows: functional.layer_norm(rows, (step.out_dim,), weight, bias, step.epsilon)
        case unknown:
            raise ModelError(f"{file_of(card, step)}: step {unknown} is unknown")


def normalize(vectors: Tensor) -> Tensor:
    """L2, with the zero vector left as it is."""
    return functional.normalize(vectors, p=2.0, dim=-1)


def _dense(card: ModelCard, step: Step, own: Mapping[str, Tensor], device: torch.device) -> _Apply:
    activation = activation_of(card, step, ACTIVATIONS)
    weight, bias, residual = _weights_of(card, step, own, device)

    def apply(rows: Tensor) -> Tensor:
        made = activation(functional.linear(rows, weight, bias))
        if not step.has_residual:
            return made
        return made + (rows if residual is None else functional.linear(rows, residual))

    return apply


def _weights_of(
    card: ModelCard, step: Step, own: Mapping[str, Tensor], device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    weight, bias, residual = weights_of(card, step, own, Tensors)
    return weight.to(device, torch.float32), _to(device, bias), _to(device, residual)


# The sparse vector of a SPLADE model: a weight for each token of the vocabulary, from the states of a text's tokens.
#
#     logits [T, V]  = decoder(norm(activation(dense(hidden))))     all but the decoder in float32
#     weights [B, V] = max over tokens, or sum, of log1p(relu(logits)), in float32
#
# Source: SpladePooling of sentence-transformers, SPLADE v2 (https://arxiv.org/abs/2109.10086).

FLOATS_OF_A_SLICE = 2**21
"""Logits that are in memory at a time: 8 MiB. Measured with BERT-base's sizes and 16 to 1,180 tokens on one core with
AVX512-BF16, in float32 and bfloat16: between 2**18 and 2**22 no size is clearly faster, and 2**24 takes 1.5 times as
long as 2**20."""


class SpladeHead:
    """Hidden states [T, H] of any float type, in the layout's order → weights, float32 [B, vocab_size]."""

    def __init__(self, card: ModelCard, device: torch.device) -> None:
        """Raises ModelError when a file or a tensor is missing or misshapen."""
        head = card.sparse
        assert head is not None
        *before, decoder = head.steps
        self._states = _in_a_row(card, before, device)
        self._decoder = weights_of(card, decoder, _own_tensors(card), Tensors)[:2]
        self._decoder_of: dict[torch.dtype, list[Tensor | None]] = {}
        self._device = device
        self._is_sum = head.pooling == "sum"
        self._num_logs = head.num_logs

    def __call__(self, hidden: Tensor, layout: Layout) -> Tensor:
        states = self._states(hidden).to(hidden.dtype)
        weight, bias = self._decoder_in(hidden.dtype)
        assert weight is not None
        pooled = torch.empty(layout.lengths.size, len(weight), device=hidden.device)
        # By the vocabulary, not by tokens: each slice has all tokens of each sequence, and the weights are read once.
        size = max(1, FLOATS_OF_A_SLICE // len(states))
        for start in range(0, len(weight), size):
            part = slice(start, start + size)
            logits = functional.linear(states, weight[part], None if bias is None else bias[part])
            self._pool(logits, layout, pooled[:, part])
        return pooled if self._is_sum else self.activate_(pooled)

    def _pool(self, logits: Tensor, layout: Layout, pooled: Tensor) -> None:
        """Write the maxima of the logits, or the sums of the weights, of each sequence into `pooled`."""
        if self._is_sum:
            logits = self.activate_(logits.float())
        first = 0
        for run in layout.runs:
            of_run = logits[run.start : run.stop].view(run.count, run.length, -1)
            pooled[first : first + run.count] = of_run.sum(dim=1) if self._is_sum else of_run.amax(dim=1)
            first += run.count

    def activate_(self, logits: Tensor) -> Tensor:
        logits.relu_()
        for _ in range(self._num_logs):
            logits.log1p_()
        return logits

    def _decoder_in(self, dtype: torch.dtype) -> list[Tensor | None]:
        """The decoder in the type of the hidden states: made once."""
        if dtype not in self._decoder_of:
            self._decoder_of = {dtype: [_to(self._device, tensor, dtype) for tensor in self._decoder]}
        return self._decoder_of[dtype]


def _to(device: torch.device, tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    return None if tensor is None else tensor.to(device=device, dtype=dtype)


# The logits of sequences, pairs and tokens, from hidden states and the card's description of the head.
#
# In float32 for every dtype of the model.


def load_score_heads(card: ModelCard, device: torch.device) -> Heads:
    """The function of the model's scores. Raises NotDescribed where no table has the family's head, ModelError when a
    tensor of it is missing or misshapen."""
    score = card.score
    assert score is not None
    if not score.steps:
        raise NotDescribed(f"the head of {card.model_type} has no table of its layers")
    logits = _in_a_row(card, score.steps, device)
    if not score.pooling:
        return {Output.TOKEN_SCORES: lambda hidden, layout: logits(hidden)}
    pooled = _SCORE_POOLINGS.get(score.pooling)
    if pooled is not None:
        return {Output.SCORES: lambda hidden, layout: logits(pooled(hidden, layout, score.padding_id))}
    return {Output.SCORES: lambda hidden, layout: logits(pool(hidden, layout.runs, (score.pooling,)))}


def _first(hidden: Tensor, layout: Layout, padding_id: int | None) -> Tensor:
    if len(hidden) == layout.starts.size:
        return hidden  # of first tokens only, as the fused path returns them
    return hidden.index_select(0, to_device(layout.starts, hidden.device))


def last_states(hidden: Tensor, layout: Layout, padding_id: int | None = None) -> Tensor:
    """The state of each sequence's last token, [B, H], as of `Layout.last_tokens`."""
    return hidden.index_select(0, to_device(layout.last_tokens(padding_id), hidden.device))


_SCORE_POOLINGS: dict[str, Callable[[Tensor, Layout, int | None], Tensor]] = {"cls": _first, "lasttoken": last_states}
"""Those that take one state of each sequence: the others need not be converted."""


# The heads behind each token: vectors of multi-vector models, and BGE-M3's lexical weights.


def token_heads(card: ModelCard, head: Head[Tensor] | None, device: torch.device) -> Heads:
    """The functions of TOKEN_VECTORS, and of LEXICAL and HYBRID where the card has them. `head` is that of a model that
    has dense vectors as well. Raises ModelError when a file or a tensor is missing or misshapen."""
    heads: Heads = {}
    if card.tokens is None:
        return heads
    vectors = _in_a_row(card, card.tokens.steps, device)
    heads[Output.TOKEN_VECTORS] = lambda hidden, layout: vectors(hidden)
    if card.sparse is not None and card.sparse.is_lexical:
        weights = _in_a_row(card, card.sparse.steps, device)
        heads[Output.LEXICAL] = lambda hidden, layout: weights(hidden)
        if head is not None:
            heads[Output.HYBRID] = lambda hidden, layout: _hybrid(hidden, layout, head, vectors, weights)
    return heads


def _hybrid(hidden: Tensor, layout: Layout, head: Head[Tensor], vectors: _Apply, weights: _Apply) -> Tensor:
    """The rows of BGE-M3, [T, D + 1]: each token's vector and weight; the dense vector and 0 for the first one."""
    rows = torch.cat([vectors(hidden), weights(hidden)], dim=1)
    firsts = to_device(layout.starts, hidden.device)
    rows[firsts] = functional.pad(head(hidden, layout.runs), (0, 1))
    return rows


# The score of a causal language model: the logit of one token, or the difference of two, behind the last token.
#
# `vecd.workers.torch.reference` computes the same with the whole matrix.

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


def load_heads(card: ModelCard, device: torch.device) -> Heads:
    """A function for each of `card.outputs`. Raises ModelError when a file or a tensor of a head is missing or
    misshapen, NotDescribed for a head that no table describes."""
    head = load_head(card, device) if "dense" in card.capabilities else None
    heads: Heads = {} if head is None else dense_heads(head)
    heads |= token_heads(card, head, device)
    if card.sparse is not None and not card.sparse.is_lexical:
        heads[Output.SPARSE] = SpladeHead(card, device)
    if card.score is not None and [step.kind for step in card.score.steps] == ["logit"]:
        heads[Output.SCORES] = LogitHead(card, device)
    elif card.score is not None:
        heads |= load_score_heads(card, device)
    missing = card.outputs - heads.keys()
    if missing:
        raise NotDescribed(f"no head for {', '.join(output.name.lower() for output in sorted(missing))}")
    return heads


def dense_heads(head: Head[Tensor]) -> Heads:
    """The functions of the outputs of a model with dense vectors."""
    return {
        Output.VECTORS: lambda hidden, layout: head(hidden, layout.runs),
        Output.UNNORMALIZED: lambda hidden, layout: head.unnormalized(hidden, layout.runs),
        Output.TOKENS: lambda hidden, layout: hidden.float(),
    }
