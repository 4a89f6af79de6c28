"""Sparse vectors of queries from static weights, and the files that these are in."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vecd.gateway.encoding.query_weights import read_query_weights, vector_of_query
from vecd.shm.card import ModelCard, ModelError
from vecd.shm.heads import SparseHead

IDS = {"a": 0, "b": 1, "c": 2, "d": 3}
WEIGHTS = np.array([0.5, 0.0, 2.5, -1.0], dtype=np.float32)


def read(path: Path, vocab_size: int = 4) -> NDArray[np.float32]:
    head = SparseHead((), query_weights=path.name)
    folder = str(path.parent)
    card = ModelCard(folder, folder, "bert", 8, 8, 16, vocab_size, ("mean",), (), False, "", sparse=head)
    return read_query_weights(card, IDS.get)


def write_tensor(path: Path, dtype: str, stored: NDArray[Any], name: str = "weight") -> Path:
    data = stored.tobytes()
    header = json.dumps({name: {"dtype": dtype, "shape": list(stored.shape), "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def test_a_query_has_the_weights_of_its_different_tokens() -> None:
    indices, weights = vector_of_query(np.array([3, 2, 0, 1, 2, 0], dtype=np.int32), WEIGHTS)
    assert indices.tolist() == [0, 2]
    assert weights.tolist() == [0.5, 2.5]
    assert (indices.dtype, weights.dtype) == (np.dtype(np.int32), np.dtype(np.float32))


def test_a_query_without_a_weight_has_none() -> None:
    for token_ids in ([], [1], [3, 3]):
        indices, weights = vector_of_query(np.array(token_ids, dtype=np.int32), WEIGHTS)
        assert (indices.size, weights.size) == (0, 0)
        assert (indices.dtype, weights.dtype) == (np.dtype(np.int32), np.dtype(np.float32))


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("F32", "<f4"), ("F16", "<f2"), ("F64", "<f8"), ("BF16", "")])
def test_tensors_of_each_type(dtype: str, numpy_dtype: str, tmp_path: Path) -> None:
    stored = (WEIGHTS.view(np.uint32) >> 16).astype("<u2") if dtype == "BF16" else WEIGHTS.astype(numpy_dtype)
    path = write_tensor(tmp_path / "model.safetensors", dtype, stored)
    assert read(path).tolist() == WEIGHTS.tolist()
    assert read(path, vocab_size=6).tolist() == [*WEIGHTS.tolist(), 0.0, 0.0]


def test_weights_by_token(tmp_path: Path) -> None:
    path = tmp_path / "idf.json"
    path.write_text(json.dumps({"c": 2.5, "a": 0.5, "unknown": 7, "d": -1}))
    assert read(path).tolist() == WEIGHTS.tolist()


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        (np.zeros(5, "<f4"), "has weights of shape [5]; the vocabulary has 4"),
        (np.zeros((2, 2), "<f4"), "has weights of shape [2, 2]"),
        (np.array([1, np.nan], "<f4"), "a weight is nan or infinity"),
    ],
)
def test_tensors_that_are_no_weights(stored: NDArray[np.float32], why: str, tmp_path: Path) -> None:
    path = write_tensor(tmp_path / "model.safetensors", "F32", stored)
    with pytest.raises(ModelError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert why in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    tensor, words = tmp_path / "model.safetensors", tmp_path / "idf.json"
    whole = write_tensor(tensor, "F32", WEIGHTS).read_bytes()
    for content in (b"", b"\xff" * 20, whole[:-2]):
        tensor.write_bytes(content)
        refuse(tensor)
    for dtype, name in (("I64", "weight"), ("F32", "other")):
        refuse(write_tensor(tensor, dtype, WEIGHTS, name))
    for text in ("", "[1, 2]", '{"a": "b"}', '{"a": [1]}'):
        words.write_text(text)
        refuse(words)
    refuse(tmp_path / "absent.json")


def refuse(path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        read(path)
