"""A model's tensors by name, mapped from its safetensors files.

Owns the mapping of a folder, with one file or shards and an index, to tensors that borrow the file's pages: nothing is
read before it is used, and all processes share the pages. Knows no architecture. Called by
`vecd.workers.engines.torch.fused`.

A file must not be changed in place while it is mapped. To replace a model, write a new file and rename it.
"""

from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from vecd.workers.weights import new_name, weight_files


def map_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors as stored, read-only by agreement; norms by their new names. Raises OSError, SafetensorError or
    ValueError for files that are missing or broken."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            tensors.update({new_name(name): file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return tensors
