"""The heads of a model on torch's devices, and the rows of a batch of several outputs.

Owns the operations of heads in torch, the product with the vocabulary of SPLADE models, and the rows of a causal
model's output layer. What each output is made of is in `vecd.workers.onnx.steps`, for numpy as well.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vecd.model.card import ModelCard, ModelError
from vecd.model.steps import Step
from vecd.shm.output import Output
from vecd.workers.batch import Ints, Layout, outputs_in, places_of
from vecd.workers.onnx import steps
from vecd.workers.torch.checkpoint import Tensors
from vecd.workers.torch.device import to_device

Heads: TypeAlias = steps.Heads[Tensor]


def load_heads(card: ModelCard, device: torch.device) -> Heads:
    """A function for each of `card.outputs`. Raises ModelError when a file or a tensor of a head is missing or
    misshapen, NotDescribed for a head that no table describes."""
    operations = TorchOperations(card, device)
    return steps.load_heads(card, operations, lambda card: SpladeHead(card, operations))


def rows_of(layout: Layout, hidden: Tensor, heads: Heads, row_dim: int) -> tuple[Tensor, Ints]:
    """The rows, float32 [R, row_dim] on the device of `hidden`, and in which row of the batch each belongs, shape [R].

    `hidden` are the last hidden states, [T, H] in the layout's order. Zeros fill a row that an output does not.
    """
    if layout.outputs is None:
        return heads[Output.VECTORS](hidden, layout), layout.first_rows
    made, places = [], []
    for output in outputs_in(layout.outputs):
        rows = heads[output](hidden, layout)
        if output.spans_rows:
            rows = functional.pad(rows, (0, layout.span * row_dim - rows.shape[1])).reshape(-1, row_dim)
        is_wanted, place = places_of(output, layout)
        if not is_wanted.all():
            rows = rows.index_select(0, to_device(np.flatnonzero(is_wanted), hidden.device))
        made.append(functional.pad(rows, (0, row_dim - rows.shape[1])))
        places.append(place)
    return torch.cat(made), np.concatenate(places)


def _mean_weighted_by_position(hidden: Tensor) -> Tensor:
    weights = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype, device=hidden.device)
    return torch.einsum("blh,l->bh", hidden, weights) / weights.sum()


_POOLINGS: dict[str, steps.Apply[Tensor]] = {
    "cls": lambda hidden: hidden[:, 0],
    "max": lambda hidden: hidden.amax(dim=1),
    "mean": lambda hidden: hidden.mean(dim=1),
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(dim=1) / hidden.shape[1] ** 0.5,
    "weightedmean": _mean_weighted_by_position,
    "lasttoken": lambda hidden: hidden[:, -1],
}

_ACTIVATIONS: dict[str, steps.Apply[Tensor]] = {
    activation.__name__.lower(): activation()
    for activation in (
        nn.Identity, nn.Tanh, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid,
        nn.Softplus, nn.Softsign, nn.Hardtanh,
    )
}  # fmt: skip


class TorchOperations(steps.Operations[Tensor]):
    poolings, activations = _POOLINGS, _ACTIVATIONS

    def __init__(self, card: ModelCard, device: torch.device) -> None:
        self._card, self.device = card, device

    @cached_property
    def own(self) -> Tensors:
        return Tensors(self._card.weight_files)

    def read(self, path: Path) -> Mapping[str, Tensor]:
        return Tensors([path])

    def floats(self, rows: Tensor) -> Tensor:
        return rows.to(self.device, torch.float32)

    def take(self, rows: Tensor, places: Ints) -> Tensor:
        return rows.index_select(0, to_device(places, rows.device))

    def join(self, parts: list[Tensor], axis: int) -> Tensor:
        return torch.cat(parts, dim=axis)

    def normalize(self, rows: Tensor) -> Tensor:
        return functional.normalize(rows, p=2.0, dim=-1)

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(rows, weight, bias)

    def layer_norm(self, rows: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        return functional.layer_norm(rows, weight.shape, weight, bias, epsilon)

    def hybrid(self, vectors: Tensor, weights: Tensor, firsts: Tensor, starts: Ints) -> Tensor:
        rows = torch.cat([vectors, weights], dim=1)
        rows[to_device(starts, rows.device)] = functional.pad(firsts, (0, 1))
        return rows

    def other(self, card: ModelCard, step: Step) -> steps.Apply[Tensor]:
        """The score of a causal language model: the logit of one token, or the difference of two. The reference
        (`vecd.workers.torch.reference`) computes the same with the whole matrix. Raises ModelError for a matrix that is
        missing, or has no such rows."""
        if step.kind != "logit":
            return super().other(card, step)
        folder = card.weights_folder
        name = next((name for prefix in _PREFIXES if (name := f"{prefix}{step.tensor}.weight") in self.own), None)
        if name is None:
            raise ModelError(f"{folder}: the weights lack {step.tensor}.weight, which gives the logits")
        shape = self.own.shape(name)
        if len(shape) != 2 or shape[0] <= max(step.rows) or shape[1] != step.in_dim:
            raise ModelError(f"{folder}: {name} is {list(shape)}, should be [{card.vocab_size}, {step.in_dim}]")
        matrix = self.floats(self.own.rows(name, step.rows))

        def score(states: Tensor) -> Tensor:
            logits = states @ matrix.T
            if step.cap:
                logits = step.cap * torch.tanh(logits / step.cap)
            return logits if logits.shape[1] == 1 else logits[:, :1] - logits[:, 1:]

        return score


_PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")


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

    def __init__(self, card: ModelCard, operations: TorchOperations) -> None:
        """Raises ModelError when a file or a tensor is missing or misshapen."""
        head = card.sparse
        assert head is not None
        *before, decoder = head.steps
        self._states = steps.steps_of(card, before, operations)
        self._decoder = steps.weights_of(card, decoder, operations)[:2]
        self._decoder_of: dict[torch.dtype, list[Tensor | None]] = {}
        self._device = operations.device
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
            self._decoder_of = {dtype: [t if t is None else t.to(self._device, dtype) for t in self._decoder]}
        return self._decoder_of[dtype]
