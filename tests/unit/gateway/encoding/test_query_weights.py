"""Sparse vectors of queries from static weights, and the files that these are in."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vecd.gateway.encoding.sparse import QueryWeights, SparseRows, read_query_weights
from vecd.gateway.request import SparseOptions
from vecd.model.card import ModelCard, ModelError
from vecd.model.steps import SparseHead

IDS = {"a": 0, "b": 1, "c": 2, "d": 3}
WEIGHTS = np.array([0.5, 0.0, 2.5, -1.0], dtype=np.float32)


def read(path: Path, vocab_size: int = 4, copy: Path | None = None) -> NDArray[np.float32]:
    """The weights of all tokens."""
    head = SparseHead((), query_weights=path.name)
    folder = str(path.parent)
    card = ModelCard(folder, folder, "bert", 8, 8, 16, vocab_size, ("mean",), (), False, "", sparse=head)
    weights = read_query_weights(card, IDS.get, None if copy is None else str(copy))
    assert weights is not None
    return weights.of_tokens(np.arange(vocab_size, dtype=np.int32))[:, 0]


def write_tensor(path: Path, dtype: str, stored: NDArray[Any], name: str = "weight") -> Path:
    data = stored.tobytes()
    header = json.dumps({name: {"dtype": dtype, "shape": list(stored.shape), "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@pytest.mark.parametrize("name", ["idf.json", "model.safetensors"])
def test_a_copy_is_read_in_place_of_the_file(tmp_path: Path, name: str) -> None:
    copy = tmp_path / "12"  # as in /proc/1/fd
    if name == "idf.json":
        copy.write_text('{"a": 2.5}')
    else:
        write_tensor(copy, "F32", np.array([2.5], dtype="<f4"))
    assert read(tmp_path / name, copy=copy).tolist() == [2.5, 0, 0, 0]


def vector_of(token_ids: list[int], num_prefix: int = 0, num_suffix: int = 0) -> tuple[list[int], list[float]]:
    ids = np.array(token_ids, dtype=np.int32)
    rows = SparseRows(1, SparseOptions(), [ids])
    rows.put_whole(0, QueryWeights(WEIGHTS).of_tokens(ids, num_prefix, num_suffix))
    [(indices, weights)] = rows.made
    assert indices.dtype == np.int32
    assert weights.dtype == np.float32
    return indices.tolist(), weights.tolist()


def test_a_query_has_the_weights_of_its_different_tokens() -> None:
    assert vector_of([3, 2, 0, 1, 2, 0]) == ([0, 2], [0.5, 2.5])


def test_special_tokens_around_a_query_have_none() -> None:
    assert vector_of([0, 1, 2, 0], 1, 1) == ([2], [2.5])
    assert vector_of([0, 0, 2, 2], 1, 1) == ([0, 2], [0.5, 2.5]), "as an own token one has its weight"
    assert vector_of([0, 2], 1, 1) == ([], [])


def test_models_without_weights_of_queries() -> None:
    card = ModelCard("", "", "bert", 8, 8, 16, 4, ("mean",), (), False, "")
    assert read_query_weights(card, IDS.get) is None
    sparse = ModelCard("", "", "bert", 8, 8, 16, 4, ("mean",), (), False, "", sparse=SparseHead(()))
    assert read_query_weights(sparse, IDS.get) is None


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
