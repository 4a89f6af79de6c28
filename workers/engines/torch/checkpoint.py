"""A model's tensors by name, mapped from its safetensors files.

Owns the mapping of a folder, with one file or shards and an index, to tensors that borrow the file's pages: nothing is
read before it is used, and all processes share the pages. Knows no architecture. Called by
`vecd.workers.engines.torch.fused`.

A file must not be changed in place while it is mapped. To replace a model, write a new file and rename it.
"""

import json
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def map_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors as stored, read-only by agreement. Raises OSError, SafetensorError or ValueError for files that are
    missing or broken."""
    tensors: dict[str, Tensor] = {}
    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors


def _files(folder: Path) -> list[Path]:
    """As transformers chooses: the single file wins over an index."""
    single = folder / _SINGLE
    if single.is_file():
        return [single]
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    return sorted({folder / name for name in index["weight_map"].values()})
