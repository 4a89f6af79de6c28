"""The sparse vector of a SPLADE model: a weight for each token of the vocabulary, from the states of a text's tokens.

Owns the product with the vocabulary, which is never whole in memory, and the largest or the sum over each sequence's
own tokens, special ones included. Knows no architecture: the card has the steps. Called by
`vecd.workers.engines.torch.heads`.

    logits [T, V]  = decoder(norm(activation(dense(hidden))))     all but the decoder in float32
    weights [B, V] = max over tokens, or sum, of log1p(relu(logits)), in float32

Source: SpladePooling of sentence-transformers, SPLADE v2 (https://arxiv.org/abs/2109.10086).
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from vecd.shm.card import ModelCard, ModelError
from vecd.shm.heads import SparseHead, Step
from vecd.workers.engines.torch.checkpoint import own_tensors
from vecd.workers.engines.torch.pooling import ACTIVATIONS
from vecd.workers.layout import Layout

_FLOATS_OF_A_SLICE = 2**21
"""Logits that are in memory at a time: 8 MiB. Measured with BERT-base's sizes and 16 to 1,180 tokens on one core with
AVX512-BF16, in float32 and bfloat16: between 2**18 and 2**22 no size is clearly faster, and 2**24 takes 1.5 times as
long as 2**20."""


class SpladeHead:
    """Hidden states [T, H] of any float type, in the layout's order → weights, float32 [B, vocab_size]."""

    def __init__(self, head: SparseHead, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """`tensors`: the model's own, by name. Raises KeyError or ValueError for one that is missing or misshapen."""
        dense, norm, decoder = head.steps
        self._activation = ACTIVATIONS[dense.activation]
        self._dense = [_to(device, tensor) for tensor in _tensors_of(dense, tensors)]
        self._norm = [_to(device, tensor) for tensor in _tensors_of(norm, tensors)]
        self._epsilon = norm.epsilon
        self._decoder = _tensors_of(decoder, tensors)
        self._decoder_of: dict[torch.dtype, list[Tensor | None]] = {}
        self._device = device
        self._is_sum = head.pooling == "sum"
        self._num_logs = head.num_logs

    def __call__(self, hidden: Tensor, layout: Layout) -> Tensor:
        states = self._states(hidden)
        weight, bias = self._decoder_in(hidden.dtype)
        assert weight is not None
        pooled = torch.empty(layout.lengths.size, len(weight), device=hidden.device)
        # By the vocabulary, not by tokens: each slice has all tokens of each sequence, and the weights are read once.
        size = max(1, _FLOATS_OF_A_SLICE // len(states))
        for start in range(0, len(weight), size):
            part = slice(start, start + size)
            logits = functional.linear(states, weight[part], None if bias is None else bias[part])
            self._pool(logits, layout, pooled[:, part])
        return pooled if self._is_sum else self._activate_(pooled)

    def _states(self, hidden: Tensor) -> Tensor:
        """What the decoder multiplies, in the type of `hidden`."""
        weight, bias = self._dense
        assert weight is not None
        states = self._activation(functional.linear(hidden.float(), weight, bias))
        norm, shift = self._norm
        return functional.layer_norm(states, states.shape[-1:], norm, shift, self._epsilon).to(hidden.dtype)

    def _pool(self, logits: Tensor, layout: Layout, pooled: Tensor) -> None:
        """Write the maxima of the logits, or the sums of the weights, of each sequence into `pooled`."""
        if self._is_sum:
            logits = self._activate_(logits.float())
        first = 0
        for run in layout.runs:
            of_run = logits[run.start : run.stop].view(run.count, run.length, -1)
            pooled[first : first + run.count] = of_run.sum(dim=1) if self._is_sum else of_run.amax(dim=1)
            first += run.count

    def _activate_(self, logits: Tensor) -> Tensor:
        logits.relu_()
        for _ in range(self._num_logs):
            logits.log1p_()
        return logits

    def _decoder_in(self, dtype: torch.dtype) -> list[Tensor | None]:
        """The decoder in the type of the hidden states: made once."""
        if dtype not in self._decoder_of:
            self._decoder_of = {dtype: [_to(self._device, tensor, dtype) for tensor in self._decoder]}
        return self._decoder_of[dtype]


def load_splade(card: ModelCard, device: torch.device) -> SpladeHead:
    """Read the head of a SPLADE model. Raises ModelError when a file or a tensor is missing or misshapen."""
    assert card.sparse is not None
    folder = Path(card.weights_folder)
    try:
        return SpladeHead(card.sparse, own_tensors(folder), device)
    except KeyError as error:
        raise ModelError(f"{folder}: the weights lack {error.args[0]}, of the head for masked words") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: {error}") from None


def _to(device: torch.device, tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    return None if tensor is None else tensor.to(device=device, dtype=dtype)


def _tensors_of(step: Step, tensors: Mapping[str, Tensor]) -> list[Tensor | None]:
    """Weight and bias as stored."""
    shape = (step.out_dim, step.in_dim) if step.kind == "dense" else (step.out_dim,)
    wanted: dict[str, tuple[int, ...]] = {f"{step.tensor}.weight": shape}
    if step.bias:
        wanted[step.bias_tensor or f"{step.tensor}.bias"] = (step.out_dim,)
    for name, wanted_shape in wanted.items():
        if tuple(tensors[name].shape) != wanted_shape:
            raise ValueError(f"{name} is {list(tensors[name].shape)}, should be {list(wanted_shape)}")
    found: list[Tensor | None] = [tensors[name] for name in wanted]
    return found if step.bias else [*found, None]
