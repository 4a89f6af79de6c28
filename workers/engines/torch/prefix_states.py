"""Keys and values of a prefix during one pass: those known from an earlier pass, and those computed in this one.

Owns how both are put together and which are kept. Knows no attention and no token id. Made by
`vecd.workers.engines.torch.transformer`; called by the attention of each layer.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

KeysValues: TypeAlias = tuple[Tensor, Tensor]
"""Of a prefix in one layer: each [1, key heads, tokens, head dim], after norm and rotation."""


class PrefixStates:
    """Of one pass. The layers call `of_next_layer` in order, once each."""

    def __init__(
        self, num_known: int, num_computed: int, known: Sequence[KeysValues] = (), *, is_kept: bool = False
    ) -> None:
        """`num_known` tokens of the prefix come first, whose states are at the beginning of those in `known`, a pair
        for each layer. The pass computes `num_computed` more. `is_kept`: collect the states of all in `kept`."""
        self.num_known = num_known
        self.num_computed = num_computed
        self.kept: list[KeysValues] = []
        self._known = known
        self._is_kept = is_kept
        self._layer = 0

    @property
    def num_tokens(self) -> int:
        return self.num_known + self.num_computed

    def of_next_layer(self, keys: Tensor, values: Tensor) -> KeysValues:
        """The keys and values of the whole prefix, given those of its computed tokens. May be views of both."""
        if self.num_known:
            known_keys, known_values = (states[:, :, : self.num_known] for states in self._known[self._layer])
            self._layer += 1
            if not self.num_computed:
                return known_keys, known_values
            keys, values = torch.cat([known_keys, keys], dim=2), torch.cat([known_values, values], dim=2)
        if self._is_kept:
            # Copies, because both may be views of what the whole batch has computed.
            self.kept.append((_copy(keys), _copy(values)))
        return keys, values


def _copy(states: Tensor) -> Tensor:
    return states.clone(memory_format=torch.contiguous_format)


def bytes_of(states: Sequence[KeysValues]) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in states)
