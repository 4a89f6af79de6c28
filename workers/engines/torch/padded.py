"""The padded forward pass: the input that transformers models expect, and the fallback of the packed pass.

Owns the division of a batch into small rectangles of similar length, padded on the right, and the attention masks.
Called by `vecd.workers.engines.torch.transformer`.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from vecd.workers.engines.torch.device import to_device
from vecd.workers.engines.torch.linear import restore_linears
from vecd.workers.layout import Layout

PACKED_ATTENTION = "vecd_packed"
"""The `attn_implementation` under which transformers finds `vecd.workers.engines.torch.packed_attention`. It is here so
that this path, the last fallback, works with a transformers whose internal names that module does not find."""

_MAX_SEQUENCES = 16
_MAX_TOKENS = 4096
"""Limits of one rectangle, padding included; larger ones are not faster on a core."""

_FREE_PADDING_TOKENS = 64
"""Padding that costs no more than another pass. Measured on all-MiniLM-L6-v2, float32, one core: a pass costs 8 ms and
0.15 ms per token."""


class PaddedForward:
    """Side effect of construction: packed attention and linear layers are switched back to transformers' own."""

    def __init__(self, model: PreTrainedModel, device: torch.device, *, may_pad: bool = True) -> None:
        """`may_pad`: sequences of several lengths share a pass. Not for the few models whose vectors change with masked
        padding, because convolutions and Fourier transforms reach over the border: ConvBERT, MobileBERT, FNet."""
        self.path = "padded" if may_pad else "unpadded"
        self._may_pad = may_pad
        self.can_share = False
        if model.config._attn_implementation == PACKED_ATTENTION:
            _restore_attention(model)
            restore_linears(model)
        self._model = model
        self._device = device
        self.num_padding_tokens = 0
        self._pad_token_id = getattr(model.config, "pad_token_id", None) or 0

    def __call__(self, layout: Layout) -> Tensor:
        return torch.cat([self._run(layout, rectangle) for rectangle in rectangles(layout, may_pad=self._may_pad)])

    def _run(self, layout: Layout, rectangle: slice) -> Tensor:
        """Hidden states of the real tokens of some sequences, [their tokens, H]."""
        lengths, starts = layout.lengths[rectangle], layout.starts[rectangle]
        is_token = np.arange(lengths[-1]) < lengths[:, None]
        token_ids = np.full(is_token.shape, self._pad_token_id, dtype=np.int64)
        self.num_padding_tokens += is_token.size - int(lengths.sum())
        is_attended = is_token
        if layout.attended is not None:
            is_attended = np.arange(lengths[-1]) < layout.attended[rectangle, None]
        token_ids[is_token] = layout.token_ids[starts[0] : starts[-1] + lengths[-1]]
        hidden: Tensor = self._model(
            input_ids=to_device(token_ids, self._device),
            attention_mask=to_device(is_attended.astype(np.int64), self._device),
        ).last_hidden_state
        # By index, because a mask would wait for a GPU to count the selected tokens.
        return hidden.flatten(0, 1).index_select(0, to_device(np.flatnonzero(is_token), self._device))


def rectangles(layout: Layout, *, may_pad: bool) -> Iterator[slice]:
    """Slices of neighbouring sequences of the layout, in order, each small enough for one pass."""
    first, num_tokens = 0, 0
    for index, length in enumerate(map(int, layout.lengths)):
        count = index - first
        if count > 0 and not _takes_one_more(count, num_tokens, length, may_pad=may_pad):
            yield slice(first, index)
            first, num_tokens = index, 0
        num_tokens += length
    yield slice(first, len(layout.lengths))


def _takes_one_more(count: int, num_tokens: int, length: int, *, may_pad: bool) -> bool:
    """Whether a rectangle of `count` sequences and `num_tokens` real tokens takes one of `length`, none longer."""
    area = (count + 1) * length
    padding = area - (num_tokens + length)
    allowed = _FREE_PADDING_TOKENS + num_tokens // 4 if may_pad else 0
    return count < _MAX_SEQUENCES and area <= _MAX_TOKENS and padding <= allowed


def _restore_attention(model: PreTrainedModel) -> None:
    """Switch to the implementation that transformers uses by default."""
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # a family that has no SDPA
        model.set_attn_implementation("eager")
