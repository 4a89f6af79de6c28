"""Tensors read from files as float32: of the version that was opened, of whole files alone, or an error."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import torch as safetensors_torch
from safetensors.numpy import save_file

from vecd.model.card import ModelError
from vecd.model.files import stored_tensors
from vecd.workers.arrays import Arrays, ModelFile


def test_every_float16_is_the_float32_of_the_same_value(tmp_path: Path) -> None:
    bits = np.arange(2**16, dtype=np.uint16).reshape(-1, 64)
    numbers = bits.view(np.float16)
    finite = numbers[np.isfinite(numbers).all(axis=1)]
    path = tmp_path / "model.safetensors"
    save_file({"all": numbers, "finite": finite, "none": numbers[:0]}, path)
    arrays = Arrays([path])
    assert np.array_equal(arrays["finite"].view(np.uint32), finite.astype(np.float32).view(np.uint32)), "and -0 stays"
    assert np.array_equal(arrays["all"], numbers.astype(np.float32), equal_nan=True)
    assert arrays["none"].shape == (0, 64)
    assert np.array_equal(arrays.table("finite")(np.array([3, 1])), finite[[3, 1]].astype(np.float32))


CONTENT = bytes(range(256)) * 4096


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_arrays_are_the_tensors(stored: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5).to(stored), "scalar": torch.tensor(2.5).to(stored), "none": torch.zeros(0, 4)}
    safetensors_torch.save_file({**tensors, "ids": torch.arange(4)}, tmp_path / "model.safetensors")
    arrays = Arrays([tmp_path / "model.safetensors"])
    assert arrays.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert np.array_equal(arrays[name], tensor.float().numpy())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(CONTENT)
    return tmp_path / "file"


@pytest.mark.parametrize("name", ["file", "other"])
def test_another_file_in_its_place_is_not_read(path: Path, name: str) -> None:
    file = ModelFile(path)
    if name == "other":
        path.with_name(name).write_bytes(CONTENT[::-1])
        path.with_name(name).rename(path)
    else:
        path.unlink()
    assert file.read(0, file.size).tobytes() == CONTENT
    assert file.read(1000, 3).tobytes() == CONTENT[1000:1003]
    assert file.read(7, 0).size == 0


@pytest.mark.parametrize("size", [0, 100, len(CONTENT)])
def test_a_file_that_was_written_to_is_an_error_unless_it_is_in_memory(path: Path, size: int) -> None:
    files = [ModelFile(path, in_memory=in_memory) for in_memory in (True, False)]
    before = path.stat()
    path.write_bytes(CONTENT[::-1][:size])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert files[0].read(0, files[0].size).tobytes() == CONTENT
    for begin in (0, 10_000):
        with pytest.raises(ModelError, match="file: the file has changed since it was opened"):
            files[1].read(begin, 10)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float16)}, path)
    return path


def test_the_header_of_a_whole_file(weights: Path) -> None:
    found = {name: (tensor.kind, tensor.shape) for name, tensor in stored_tensors(weights).items()}
    assert found == {"a": ("F32", (3, 4)), "b": ("F16", (5,))}


@pytest.mark.parametrize(
    ("first", "last", "says"),
    [
        (0, -1, "is cut off, or has something behind its tensors: it has"),
        (0, 20, "is cut off, or has something behind its tensors: it has 20 bytes"),
        (0, 0, "is not a safetensors file: it has 0 bytes"),
        (8, None, "is not a safetensors file"),
    ],
)
def test_a_part_of_a_file(weights: Path, first: int, last: int | None, says: str) -> None:
    weights.write_bytes(weights.read_bytes()[first:last])
    with pytest.raises(ModelError, match=says):
        stored_tensors(weights)


def written(path: Path, header: Any, size: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * size)
    return path


@pytest.mark.parametrize(
    ("header", "size", "says"),
    [
        (b"{", 0, "is not a safetensors file"),
        ({"a": 3}, 0, "is not a safetensors file"),
        ([], 0, "is not a safetensors file"),
        ({"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}}, 4, "is not a safetensors file"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, 4, "is damaged: it has"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 9, "has something behind its tensors"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 8, "is damaged: it has"),
        ({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, 4, "is damaged: it has"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4]}}, 4, "is not a safetensors file"),
        ({"a": {"dtype": "X", "shape": [1], "data_offsets": [0, 4]}}, 4, "is not a safetensors file"),
        (b"[" * 100_000, 0, "is not a safetensors file"),
    ],
)
def test_a_header_that_is_none(tmp_path: Path, header: Any, size: int, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        stored_tensors(written(tmp_path / "model.safetensors", header, size))
