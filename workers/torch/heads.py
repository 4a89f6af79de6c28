"""The operations of heads (`vecd.workers.heads`) in torch, and the rows of a batch of several outputs."""

from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vecd.model.card import ModelCard, ModelError
from vecd.model.steps import Step
from vecd.shm.output import Output
from vecd.workers import heads
from vecd.workers.activations import Activation
from vecd.workers.batch import Ints, Layout, places_of
from vecd.workers.heads import Apply, Decoder, Heads, Operations
from vecd.workers.torch.checkpoint import Tensors
from vecd.workers.torch.device import to_device


def load_heads(card: ModelCard, device: torch.device) -> Heads[Tensor]:
    return heads.load_heads(card, TorchOperations(card, device))


def rows_of(layout: Layout, hidden: Tensor, made_by: Heads[Tensor], row_dim: int) -> tuple[Tensor, Ints]:
    """The rows, float32 [R, row_dim] on the device of `hidden`, and in which row of the batch each belongs, shape [R].

    `hidden` are the last hidden states, [T, H] in the layout's order. Zeros fill a row that an output does not.
    """
    if layout.outputs is None:
        return made_by[Output.VECTORS](hidden, layout), layout.first_rows
    made, places = [], []
    for output in map(Output, np.unique(layout.outputs)):
        rows = made_by[output](hidden, layout)
        if output.spans_rows:
            rows = functional.pad(rows, (0, layout.span * row_dim - rows.shape[1])).reshape(-1, row_dim)
        is_wanted, place = places_of(output, layout)
        if not is_wanted.all():
            rows = rows.index_select(0, to_device(np.flatnonzero(is_wanted), hidden.device))
        made.append(functional.pad(rows, (0, row_dim - rows.shape[1])))
        places.append(place)
    return torch.cat(made), np.concatenate(places)


class TorchOperations(Operations[Tensor]):
    arrays = torch

    def __init__(self, card: ModelCard, device: torch.device) -> None:
        self._card, self.device = card, device

    @cached_property
    def own(self) -> Tensors:
        return Tensors(self._card.weight_files)

    def read(self, path: Path) -> Mapping[str, Tensor]:
        return Tensors([path])

    def floats(self, rows: Tensor) -> Tensor:
        return rows.to(self.device, torch.float32)

    def places(self, places: Ints) -> Tensor:
        return to_device(places, self.device)

    def activation(self, row: Activation) -> Apply[Tensor] | None:
        return getattr(nn, row.torch)() if row.torch else None

    def normalize(self, rows: Tensor) -> Tensor:
        return functional.normalize(rows, p=2.0, dim=-1)

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(rows, weight, bias)

    def layer_norm(self, rows: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        return functional.layer_norm(rows, weight.shape, weight, bias, epsilon)

    def log_saturate_(self, logits: Tensor, num_logs: int) -> Tensor:
        logits.relu_()
        for _ in range(num_logs):
            logits.log1p_()
        return logits

    def decoder(self, weight: Tensor, bias: Tensor | None) -> Decoder[Tensor]:
        @lru_cache(1)
        def stored(dtype: torch.dtype) -> list[Tensor | None]:
            return [None if each is None else each.to(self.device, dtype) for each in (weight, bias)]

        def logits_of(states: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
            weight, bias = stored(dtype)
            assert weight is not None
            states, size = states.to(dtype), max(1, heads.FLOATS_OF_A_SLICE // len(states))
            for start in range(0, len(weight), size):
                words = slice(start, start + size)
                yield functional.linear(states, weight[words], None if bias is None else bias[words])

        return logits_of

    def logit(self, card: ModelCard, step: Step) -> Apply[Tensor]:
        """The score of a causal language model: the logit of one token, or the difference of two. The reference
        (`vecd.workers.torch.reference`) computes the same with the whole matrix. Raises ModelError for a matrix that is
        missing, or has no such rows."""
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
            return step.scale * (logits if logits.shape[1] == 1 else logits[:, :1] - logits[:, 1:])

        return score


_PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
