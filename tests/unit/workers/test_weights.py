"""The headers of weights' files, and what is said of a file that is not whole."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from vecd.shm.card import ModelError
from vecd.workers.weights import read_header


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float16)}, path)
    return path


def test_the_header_of_a_whole_file(weights: Path) -> None:
    assert read_header(weights) == {"a": ("F32", 12), "b": ("F16", 5)}


@pytest.mark.parametrize(
    ("first", "last", "says"),
    [
        (0, -1, "is cut off, or has something behind its tensors: it has"),
        (0, 20, "is cut off, or has something behind its tensors: it has 20 bytes"),
        (0, 3, "is not a safetensors file: it has 3 bytes"),
        (0, 0, "is not a safetensors file: it has 0 bytes"),
        (8, None, "is not a safetensors file"),
    ],
)
def test_a_part_of_a_file(weights: Path, first: int, last: int | None, says: str) -> None:
    weights.write_bytes(weights.read_bytes()[first:last])
    with pytest.raises(ModelError, match=says):
        read_header(weights)


def written(path: Path, header: Any, size: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * size)
    return path


@pytest.mark.parametrize(
    ("header", "size", "says"),
    [
        (b"{", 0, "is not a safetensors file"),
        ([], 0, "is not a safetensors file"),
        ({"a": 3}, 0, "is not a safetensors file"),
        ({"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}, 4, "is not a safetensors file"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, 4, "is damaged: it has"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 9, "has something behind its tensors"),
        (b"[" * 100_000, 0, "is not a safetensors file"),
    ],
)
def test_a_header_that_is_none(tmp_path: Path, header: Any, size: int, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        read_header(written(tmp_path / "model.safetensors", header, size))
