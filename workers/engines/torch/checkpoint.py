"""A model's tensors by name, read from its safetensors files.

Owns the way from a file, or from a folder with one file or shards and an index, to tensors that borrow no file: what
becomes of the files changes nothing. Knows no architecture. Called by the parts of `vecd.workers.engines.torch`.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from vecd.workers.model_file import ModelFile, stored_tensors
from vecd.workers.weights import weight_files

_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool
}  # fmt: skip
"""By the type's name in a header."""


class Tensors(Mapping[str, Tensor]):
    """The tensors of some files as stored, read at each access; norms by their new names."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Raises ModelError for a file that is not whole, OSError for one that is missing. Reading raises ModelError
        for one that has changed since."""
        self._places: dict[str, tuple[ModelFile, str, list[int], int, int]] = {}
        for path in paths:
            file = ModelFile(path)
            self._places |= {name: (file, *place) for name, *place in stored_tensors(file)}  # type: ignore[misc]

    def __getitem__(self, name: str) -> Tensor:
        file, kind, shape, begin, count = self._places[name]
        if not count:
            return torch.empty(shape, dtype=_TYPES[kind])
        return torch.from_numpy(file.read(begin, count)).view(_TYPES[kind]).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def own_tensors(folder: Path) -> Tensors:
    """Of a model. Raises OSError, ValueError or KeyError for files that are missing, ModelError for broken ones."""
    return Tensors(weight_files(folder))
