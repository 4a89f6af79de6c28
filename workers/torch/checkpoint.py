"""A model's tensors by name, read from its safetensors files.

The tensors borrow no file: what becomes of the files changes nothing. Knows no architecture.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from vecd.workers.arrays import StoredTensors

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool
}  # fmt: skip


class Tensors(StoredTensors, Mapping[str, Tensor]):
    """As stored, read at each access; norms by their new names."""

    def __getitem__(self, name: str) -> Tensor:
        file, tensor = self._places[name]
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=TYPES[tensor.kind])
        return torch.from_numpy(file.read(tensor.begin, tensor.nbytes)).view(TYPES[tensor.kind]).reshape(tensor.shape)

    def __contains__(self, name: object) -> bool:  # the default reads the tensor
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name][1].shape

    def rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Some rows of a matrix, [rows, K]: the others are not read."""
        file, tensor = self._places[name]
        size = tensor.nbytes // tensor.shape[0]
        read = (torch.from_numpy(file.read(tensor.begin + row * size, size)) for row in rows)
        return torch.stack([row.view(TYPES[tensor.kind]) for row in read])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


# Keys and values of a prefix during one pass: those known from an earlier pass, and those computed in this one.

KeysValues: TypeAlias = tuple[Tensor, Tensor]
"""Of a prefix in one layer: each [1, key heads, tokens, head dim], after norm and rotation."""


class PrefixStates:
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
            kept = [states.clone(memory_format=torch.contiguous_format) for states in (keys, values)]
            self.kept.append((kept[0], kept[1]))
        return keys, values


def bytes_of(states: Sequence[KeysValues]) -> int:
    return sum(keys.nbytes + values.nbytes for keys, values in states)
