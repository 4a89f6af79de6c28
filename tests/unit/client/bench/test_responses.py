import io

import numpy as np
import orjson
import pytest

from vecd.client.bench.responses import Receipt, read_bytes, read_json, read_npy
from vecd.client.connection import BadResponse, ServerResponse

ITEM = {"object": "embedding", "index": 0, "embedding": [0.5, 0.5]}
USAGE = {"prompt_tokens": 9, "total_tokens": 9}


def dump(*, indent: bool = False, **fields: object) -> ServerResponse:
    return ServerResponse(200, orjson.dumps(fields, option=orjson.OPT_INDENT_2 if indent else 0))


@pytest.mark.parametrize("num_texts", [1, 2, 64])
def test_embeddings_and_tokens_are_counted(num_texts: int) -> None:
    answer = dump(object="list", data=[ITEM] * num_texts, model="m", usage=USAGE)
    assert read_json(answer, num_texts) == Receipt(num_texts, 9)


def test_spacing_does_not_matter() -> None:
    assert read_json(dump(indent=True, data=[ITEM, ITEM], usage=USAGE), 2) == Receipt(2, 9)


def test_the_order_of_fields_does_not_matter() -> None:
    data = [{**ITEM, "embedding": [0.5] * 1000}]
    assert read_json(dump(usage=USAGE, data=data), 1) == Receipt(1, 9)


def test_a_model_called_embedding_is_not_counted() -> None:
    assert read_json(dump(data=[ITEM], model='"embedding":', usage=USAGE), 1) == Receipt(1, 9)


@pytest.mark.parametrize("usage", [None, {}])
def test_usage_may_be_missing(usage: object) -> None:
    assert read_json(dump(data=[ITEM], usage=usage), 1) == Receipt(1, 0)


@pytest.mark.parametrize("num_vectors", [0, 1, 3])
def test_every_text_needs_its_embedding(num_vectors: int) -> None:
    with pytest.raises(BadResponse, match=f"{num_vectors} embeddings for 2 texts"):
        read_json(dump(data=[ITEM] * num_vectors, usage=USAGE), 2)


def test_an_empty_vector_is_no_embedding() -> None:
    with pytest.raises(BadResponse):
        read_json(dump(data=[{**ITEM, "embedding": []}]), 1)


@pytest.mark.parametrize("body", [b"", b"OK", b"[[0.5]]", b'{"data":{}}', b'{"data":[{}]}', b'{"data":[1]}'])
def test_other_shapes_are_bad_answers(body: bytes) -> None:
    with pytest.raises(BadResponse):
        read_json(ServerResponse(200, body), 1)


@pytest.mark.parametrize(("num_texts", "dim"), [(1, 1), (1, 384), (7, 3)])
def test_bare_rows_are_counted_by_their_bytes(num_texts: int, dim: int) -> None:
    body = b"x" * (4 * num_texts * dim)
    assert read_bytes(ServerResponse(200, body), num_texts) == Receipt(num_texts, 0)
    assert read_bytes(ServerResponse(200, body, num_tokens=9, num_dimensions=dim), num_texts) == Receipt(num_texts, 9)


@pytest.mark.parametrize(("num_bytes", "dim"), [(0, None), (4, None), (12, None), (7, None), (16, 3), (0, 3)])
def test_bytes_that_are_no_rows_are_bad_answers(num_bytes: int, dim: int | None) -> None:
    with pytest.raises(BadResponse, match="are not 2 rows"):
        read_bytes(ServerResponse(200, b"x" * num_bytes, num_dimensions=dim), 2)


def test_rows_may_begin_as_json_does() -> None:
    assert read_bytes(ServerResponse(200, b"{" * 8), 2) == Receipt(2, 0)


def test_json_is_no_rows() -> None:
    with pytest.raises(BadResponse, match="JSON"):
        read_bytes(ServerResponse(200, b'{"a": 1}'), 1)


def npy(rows: np.ndarray, version: tuple[int, int] = (1, 0)) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, rows, version=version)
    return file.getvalue()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", ["<f4", "<f2", "|i1"])
def test_a_numpy_file_has_a_row_a_text(version: tuple[int, int], dtype: str) -> None:
    body = npy(np.ones((3, 5), dtype), version)
    assert read_npy(ServerResponse(200, body, num_tokens=9), 3) == Receipt(3, 9)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x93NUMPY",
        b'{"data": []}',
        b"\x93NUMPY\x01\x00\xff\xff{",
        npy(np.ones((2, 5), "<f4")),
        npy(np.ones((3, 5), "<f4"))[:-1],
        npy(np.ones((3, 5), "<f4")) + b"x",
        npy(np.ones(15, "<f4")),
        npy(np.ones((3, 0), "<f4")),
        npy(np.ones((3, 5), "<f4")).replace(b"'<f4'", b"'<x4'"),
        npy(np.ones((3, 5), "<f4")).replace(b"{", b"["),
        npy(np.ones((3, 5), "<f4")).replace(b"shape", b"space"),
    ],
)
def test_what_is_not_such_a_file_is_a_bad_answer(body: bytes) -> None:
    with pytest.raises(BadResponse):
        read_npy(ServerResponse(200, body), 3)
