"""The safetensors files of a model: which they are, their headers, and what is wrong with one that is not whole.

Reads no tensor.
"""

import json
import math
import re
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from vecd.model.card import ModelCard, ModelError, one_line

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """As transformers chooses: the single file wins over an index. Raises OSError, ValueError or KeyError."""
    single = folder / _SINGLE
    if single.is_file():
        return [single]
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    return sorted({folder / name for name in index["weight_map"].values()})


def read_header(path: Path) -> dict[str, tuple[str, int]]:
    """The type and the number of elements of each tensor. Raises ModelError for a file that is not whole."""
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (part.get_dtype(), math.prod(part.get_shape())) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise broken(path, error) from None


def new_name(name: str) -> str:
    """The name of a tensor now: BERT's first files call the weight and the bias of a norm gamma and beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def check_headers(card: ModelCard) -> None:
    """Raises ModelError for a safetensors file that is not whole. One that is missing is left to who reads it."""
    paths = card.step_files
    with suppress(OSError, ValueError, KeyError):
        paths += [] if card.export_file else weight_files(Path(card.weights_folder))
    for path in paths:
        if path.suffix == ".safetensors" and path.exists():
            read_header(path)


def broken(path: Path, error: Exception) -> ModelError:
    """The fault of a file that cannot be read, in one line, from the exception of the library."""
    size = f"it has {path.stat().st_size:,} bytes" if path.exists() else "it is missing"
    for pattern, fault in _FAULTS:
        if re.search(pattern, str(error)):
            return ModelError(f"{path}: {fault}: {size} ({error})")
    return ModelError(f"{path}: cannot be read: {one_line(error)}")


_FAULTS = (
    ("incomplete metadata|invalid header length", "is cut off, or has something behind its tensors"),
    ("invalid shape|invalid offset", "is damaged"),
    ("header", "is not a safetensors file"),
)
