"""The headers of safetensors files, read without any library: what tensors there are, and whether the files are whole.

Owns the format's first bytes: the length of the header (8 bytes, little-endian), the header (JSON: name → dtype, shape
and data_offsets), the tensors. Source: the format's description in the safetensors repository. Reads no tensor. Called
by `vecd.launch.check.model`.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vecd.shm.card import ModelCard, ModelError

LFS_POINTER = b"version https://git-lfs"
"""So begins the small file that git puts in the place of a large one that has not been fetched."""

_MAX_HEADER_BYTES = 100_000_000
_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def read_weights(card: ModelCard) -> dict[str, Tensor]:
    """The tensors of all files of a model, by name; those of modules behind the first with the module's folder before
    it. Raises ModelError for a file that is not whole, or lacks what the index says it has."""
    folder = Path(card.weights_folder)
    found = _read_transformer(folder)
    for step in card.steps:
        if step.path:
            tensors = read_header(Path(card.folder) / step.path / "model.safetensors")
            found |= {f"{step.path}/{name}": tensor for name, tensor in tensors.items()}
    return found


def _read_transformer(folder: Path) -> dict[str, Tensor]:
    single = folder / "model.safetensors"
    if single.is_file():
        return read_header(single)
    index = folder / "model.safetensors.index.json"
    places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    shards = {name: read_header(folder / name) for name in sorted(set(places.values()))}
    for tensor, shard in sorted(places.items()):
        if tensor not in shards[shard]:
            raise ModelError(f"{folder / shard}: {tensor} is missing, which {index.name} says is there")
    return {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one file. Raises ModelError, in one line, when it is not whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(max(8, len(LFS_POINTER)))
            header_bytes = int.from_bytes(first[:8], "little")
            if first.startswith(LFS_POINTER):
                raise ModelError(f"{path}: is a pointer of git-lfs ({size} bytes), not the weights")
            if len(first) < 8 or header_bytes > _MAX_HEADER_BYTES:
                raise ModelError(f"{path}: is not a safetensors file ({size} bytes)")
            if 8 + header_bytes > size:
                raise ModelError(
                    f"{path}: is cut off: it has {size:,} bytes, and its header alone would take {8 + header_bytes:,}"
                )
            file.seek(8)
            header = json.loads(file.read(header_bytes))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = [_end(path, name, entry) for name, entry in tensors.items()]
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{path}: is not a safetensors file: {type(error).__name__}: {error}".splitlines()[0]
        ) from None
    expected = 8 + header_bytes + max(ends, default=0)
    if size != expected:
        how = "is cut off" if size < expected else "has something behind its tensors"
        raise ModelError(f"{path}: {how}: it has {size:,} bytes, and its header tells of {expected:,}")
    return {name: Tensor(entry["dtype"], tuple(entry["shape"])) for name, entry in tensors.items()}


def _end(path: Path, name: str, entry: dict[str, Any]) -> int:
    """Where a tensor ends, from the end of the header on."""
    begin, end = entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (begin, end, *entry["shape"])):
        raise ValueError(f"{name} has a shape or a place that is none")
    bits = _BITS.get(entry["dtype"])
    if bits is not None and (end - begin) * 8 != math.prod(entry["shape"]) * bits:
        raise ModelError(f"{path}: is damaged: {name} takes {end - begin} bytes, which do not fit its shape")
    return int(end)
