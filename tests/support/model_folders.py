"""Folders of models without weights, which tests read, spoil and see refused. Imports neither torch nor numpy."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from vecd.base.files import dump, load
from vecd.model.card import ModelCard, ModelError, read_card


def write_header(path: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file whose tensors of float32 are all 0."""
    tensors: dict[str, Any] = {}
    size = 0
    for name, shape in shapes.items():
        begin, size = size, size + 4 * math.prod(shape)
        tensors[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, size]}
    header = json.dumps(tensors).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


class ModelFolder:
    """A folder, made with its first file. A test reads it as a model."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, content: Any) -> None:
        """Text as it is, anything else as JSON."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    def change(self, name: str, **changes: Any) -> None:
        """Of a JSON object, which may be missing."""
        path = self.path / name
        self.write(name, {**(json.loads(path.read_text()) if path.exists() else {}), **changes})

    def read(self, kind: str = "auto") -> ModelCard:
        """The card. It survives the way between processes."""
        card = read_card(self.path, kind)
        assert load(ModelCard, json.loads(json.dumps(dump(card)))) == card
        return card

    def refusal(self, kind: str = "auto") -> str:
        """What is said of it, which begins with the name of the file, relative to the folder."""
        with pytest.raises(ModelError) as error:
            read_card(self.path, kind)
        message = str(error.value)
        assert message.startswith(str(self.path)), "names the file"
        assert "\n" not in message
        return message.removeprefix(str(self.path)).removeprefix("/")

    def assert_refused(self, file: str, why: str) -> None:
        refusal = self.refusal()
        assert refusal.startswith(f"{file}: ")
        assert why in refusal
