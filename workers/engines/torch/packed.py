"""The packed forward pass: all sequences end to end in one pass of batch size 1, without a padding token.

Owns the arguments that make an unmodified transformers model do so. The attention is in
`vecd.workers.engines.torch.packed_attention`. Called by `vecd.workers.engines.torch.transformer`.
"""

import inspect
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from vecd.shm.card import POSITIONS_AFTER_PADDING
from vecd.workers.engines.torch.device import to_device
from vecd.workers.engines.torch.linear import prepack_linears
from vecd.workers.engines.torch.packed_attention import PackingError, register, running
from vecd.workers.engines.torch.padded import PACKED_ATTENTION, num_token_types
from vecd.workers.engines.torch.prefix_states import PrefixStates
from vecd.workers.layout import Layout


class PackedForward:
    """Side effect of construction: the model's attention is switched to packed, and its linear layers are prepacked. A
    padded forward made later switches both back."""

    path = "packed"
    num_padding_tokens = 0

    def __init__(self, model: PreTrainedModel, device: torch.device, *, has_segments: bool = False) -> None:
        """`has_segments`: as for `PaddedForward`. Raises PackingError when the model takes no positions, or its
        attention cannot be replaced."""
        accepted = inspect.signature(model.forward).parameters
        if "position_ids" not in accepted:
            raise PackingError(f"{type(model).__name__} takes no position_ids")
        register()
        model.set_attn_implementation(PACKED_ATTENTION)
        if model.config._attn_implementation != PACKED_ATTENTION:
            raise PackingError(f"the attention of {type(model).__name__} cannot be replaced")
        prepack_linears(model)
        self._model = model
        self._device = device
        self.can_share = device.type == "cpu"
        self._num_token_types = num_token_types(model)
        self._has_segments = has_segments and self._num_token_types > 1

    def __call__(self, layout: Layout, prefix: PrefixStates | None = None) -> Tensor:
        token_ids = to_device(layout.computed_ids(), self._device)[None]
        arguments: dict[str, Any] = {
            "input_ids": token_ids,
            "position_ids": to_device(self._positions(layout), self._device)[None],
            # All ones, because without a mask transformers looks for packing itself and wraps the model's mask rule.
            "attention_mask": torch.ones_like(token_ids),
        }
        if self._has_segments and layout.borders is not None:
            arguments["token_type_ids"] = to_device(layout.token_types(), self._device)[None]
        elif self._num_token_types:
            arguments["token_type_ids"] = torch.zeros_like(token_ids)
        with running(layout.runs, prefix):
            hidden: Tensor = self._model(**arguments).last_hidden_state
        return hidden[0, layout.prefix.size :]

    def _positions(self, layout: Layout) -> NDArray[np.int64]:
        config = self._model.config
        if config.model_type not in POSITIONS_AFTER_PADDING:
            return layout.computed_offsets()
        if layout.num_shared:
            raise PackingError("a shared prefix of tokens that see later ones")  # of RoBERTa's families
        return layout.positions_after(int(config.pad_token_id))
