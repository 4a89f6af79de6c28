"""The padded forward pass: the input that transformers models expect, and the fallback of the packed pass.

Owns the division of a batch into small rectangles of similar length, padded on the right.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from vecd.workers.batch import Ints, Layout
from vecd.workers.torch.checkpoint import PrefixStates
from vecd.workers.torch.device import to_device
from vecd.workers.torch.linear import restore_linears

PACKED_ATTENTION = "vecd_packed"
"""The name under which transformers finds `vecd.workers.torch.packed`. It is here so that this path, the last fallback,
works with a transformers whose internal names that module does not find."""

_MAX_SEQUENCES = 16
_MAX_TOKENS = 4096

_FREE_PADDING_TOKENS = 64
"""Padding that costs no more than another pass. Measured on all-MiniLM-L6-v2, float32, one core: a pass costs 8 ms and
0.15 ms per token."""


class PaddedForward:
    """Side effect of construction: packed attention and linear layers are switched back to transformers' own."""

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        *,
        may_pad: bool = True,
        has_segments: bool = False,
        has_head: bool = False,
    ) -> None:
        """`may_pad`: sequences of several lengths share a pass. Not for the few models whose vectors change with masked
        padding, because convolutions and Fourier transforms reach over the border: ConvBERT, MobileBERT, FNet.
        `has_segments`: the second part of a pair has token type 1. `has_head`: the model gives logits, a row for each
        sequence or for each token."""
        self.path = "padded" if may_pad else "unpadded"
        self._may_pad = may_pad
        self.can_share = False
        if model.config._attn_implementation == PACKED_ATTENTION:
            try:
                model.set_attn_implementation("sdpa")
            except ValueError:  # a family that has no SDPA
                model.set_attn_implementation("eager")
            restore_linears(model)
        self._model = model
        self._device = device
        self.num_padding_tokens = 0
        stated = getattr(model.config, "pad_token_id", None)
        self._pad_token_id = stated or 0
        # A causal model with a head finds the last token by the padding's id; without one it takes no two sequences.
        # The heads of BART raise for different numbers of end tokens, such as those of a text and of a pair.
        takes_several = not has_head or (stated is not None and not getattr(model.config, "is_encoder_decoder", False))
        self._max_sequences = _MAX_SEQUENCES if takes_several else 1
        self._has_head = has_head
        self._has_types = has_segments and num_token_types(model) > 1

    def __call__(self, layout: Layout, prefix: PrefixStates | None = None) -> Tensor:
        assert prefix is None, "rectangles share no prefix"
        types = layout.token_types() if self._has_types and layout.borders is not None else None
        parts = rectangles(layout, may_pad=self._may_pad, max_sequences=self._max_sequences)
        return torch.cat([self._run(layout, rectangle, types) for rectangle in parts])

    def _run(self, layout: Layout, rectangle: slice, types: Ints | None) -> Tensor:
        """Hidden states of the real tokens of some sequences, [their tokens, H], or what a head gives for them."""
        lengths, starts = layout.lengths[rectangle], layout.starts[rectangle]
        is_token = np.arange(lengths[-1]) < lengths[:, None]
        token_ids = np.full(is_token.shape, self._pad_token_id, dtype=np.int64)
        self.num_padding_tokens += is_token.size - int(lengths.sum())
        is_attended = is_token
        if layout.attended is not None:
            is_attended = np.arange(lengths[-1]) < layout.attended[rectangle, None]
        tokens = slice(starts[0], starts[-1] + lengths[-1])
        token_ids[is_token] = layout.token_ids[tokens]
        arguments: dict[str, Any] = {}
        if types is not None:
            token_types = np.zeros_like(token_ids)
            token_types[is_token] = types[tokens]
            arguments["token_type_ids"] = to_device(token_types, self._device)
        made = self._model(
            input_ids=to_device(token_ids, self._device),
            attention_mask=to_device(is_attended.astype(np.int64), self._device),
            **arguments,
        )
        hidden: Tensor = made.logits if self._has_head else made.last_hidden_state
        if hidden.dim() == 2:
            return hidden
        # By index, because a mask would wait for a GPU to count the selected tokens.
        return hidden.flatten(0, 1).index_select(0, to_device(np.flatnonzero(is_token), self._device))


def num_token_types(model: PreTrainedModel) -> int:
    """0 for a model without types. GPT-2 takes them, but adds word embeddings for them."""
    accepted = inspect.signature(model.forward).parameters
    return int(getattr(model.config, "type_vocab_size", 0) or 0) if "token_type_ids" in accepted else 0


def rectangles(layout: Layout, *, may_pad: bool, max_sequences: int = _MAX_SEQUENCES) -> Iterator[slice]:
    """Slices of neighbouring sequences of the layout, in order, each small enough for one pass."""
    first, num_tokens = 0, 0
    for index, length in enumerate(map(int, layout.lengths)):
        count = index - first
        is_full = count >= max_sequences or not _takes_one_more(count, num_tokens, length, may_pad=may_pad)
        if count > 0 and is_full:
            yield slice(first, index)
            first, num_tokens = index, 0
        num_tokens += length
    yield slice(first, len(layout.lengths))


def _takes_one_more(count: int, num_tokens: int, length: int, *, may_pad: bool) -> bool:
    area = (count + 1) * length
    padding = area - (num_tokens + length)
    allowed = _FREE_PADDING_TOKENS + num_tokens // 4 if may_pad else 0
    return area <= _MAX_TOKENS and padding <= allowed
