from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.openai import LARGE_FIELDS, parse_embeddings, render_embeddings
from gateway.encoding import JsonRows, Matrix, encode_base64, make_collector
from gateway.errors import BadRequest
from gateway.http1 import Response
from gateway.json_pieces import Bounds, PieceReader
from gateway.request import EmbedRequest, Encoding, Priority


def parse(fields: dict[str, Any], headers: Mapping[str, str] | None = None) -> EmbedRequest:
    return parse_embeddings(fields, headers or {}, max_inputs=4, dim=384)


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["", "a", "base64", "bulk"]))
anything: st.SearchStrategy[Any] = st.one_of(scalars, st.lists(scalars), st.lists(st.lists(scalars)), st.just({}))


def parse_in_pieces(fields: dict[str, Any]) -> EmbedRequest:
    """As a large body is parsed: with arrays of token ids."""
    bounds = Bounds(max_items=1000, max_chars=1000, max_ids=1000, window_bytes=16)
    steps = PieceReader(orjson.dumps(fields), LARGE_FIELDS, bounds).read_object()
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return parse(stop.value)


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", ""], ["a", ""]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([1, 2, 3, 4, 5, 6], [[1, 2, 3, 4, 5, 6]]),
    ],
)
def test_every_shape_of_input(value, inputs):
    assert parse({"input": value}).inputs == inputs
    pieced = parse_in_pieces({"input": value}).inputs
    assert [item if isinstance(item, str) else [*item] for item in pieced] == inputs


@pytest.mark.parametrize(
    ("value", "encoding"),
    [
        (None, Encoding.FLOAT),
        ("", Encoding.FLOAT),
        ("float", Encoding.FLOAT),
        ("base64", Encoding.BASE64),
        ("bytes", Encoding.BYTES),
        ("npy", Encoding.NPY),
    ],
)
def test_encoding_format(value, encoding):
    assert parse({"input": "a", "encoding_format": value}).encoding is encoding


def test_null_is_absent_and_unknown_fields_are_ignored():
    body = {"input": "a", "model": None, "dimensions": None, "user": None, "encoding_format": None, "task": [1]}
    assert parse(body) == parse({"input": "a"})


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "required"),
        ({"input": None}, "input", "required"),
        ({"input": []}, "input", "empty"),
        ({"input": 5}, "input", "is a whole number"),
        ({"input": True}, "input", "is a boolean"),
        ({"input": {}}, "input", "is an object"),
        ({"input": [None]}, "input", "'input[0]' must be a string, is null"),
        ({"input": ["a", None]}, "input", "'input[1]' must be a string, is null"),
        ({"input": ["a", 1]}, "input", "'input[1]' must be a string, is a whole number"),
        ({"input": [1.5]}, "input", "is a number with a fraction"),
        ({"input": [True]}, "input", "is a boolean"),
        ({"input": [1, True]}, "input", "'input[1]' must be a token id, is a boolean"),
        ({"input": [1, "a"]}, "input", "'input[1]' must be a token id, is a string"),
        ({"input": [[1], "a"]}, "input", "'input[1]' must be a list of token ids, is a string"),
        ({"input": [[1], []]}, "input", "'input[1]' is an empty list"),
        ({"input": [[1], [True]]}, "input", "'input[1][0]' must be a token id, is a boolean"),
        ({"input": ["a"] * 5}, "input", "5 inputs, at most 4"),
        ({"input": "a", "model": 5}, "model", "must be a string"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'bytes' or 'npy', is 'hex'"),
        ({"input": "a", "encoding_format": 5}, "encoding_format", "'float', 'base64', 'bytes' or 'npy'"),
        ({"input": "a", "encoding_format": []}, "encoding_format", "'float', 'base64', 'bytes' or 'npy'"),
        (
            {"input": "a", "priority": 1.5},
            "priority",
            "must be a string or a whole number, is a number with a fraction",
        ),
        ({"input": "a", "priority": True}, "priority", "must be a string or a whole number, is a boolean"),
        ({"input": "a", "priority": "high"}, "priority", "'interactive', 'normal' or 'bulk', is 'high'"),
        ({"input": "a", "dimensions": "384"}, "dimensions", "whole number"),
        ({"input": "a", "dimensions": True}, "dimensions", "whole number"),
        ({"input": "a", "dimensions": 0}, "dimensions", "does not support specifying dimensions"),
        (
            {"input": "a", "dimensions": 128},
            "dimensions",
            "does not support specifying dimensions. Its vectors have 384",
        ),
    ],
)
def test_bad_requests_name_the_field(body, param, says):
    for parser in (parse, parse_in_pieces):
        with pytest.raises(BadRequest) as caught:
            parser(body)
        assert caught.value.param == param
        assert says in caught.value.message
        assert (caught.value.status, caught.value.type) == (400, "invalid_request_error")


def test_native_dimensions_are_accepted():
    assert parse({"input": "a", "dimensions": 384}).inputs == ["a"]


@pytest.mark.parametrize("fields", [{"input": {"secret": 1}}, {"input": ["ok", {"secret": "secret"}]}])
def test_no_refusal_quotes_what_was_sent(fields):
    with pytest.raises(BadRequest) as caught:
        parse(fields)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("number", "priority"),
    [(-3, Priority.INTERACTIVE), (0, Priority.NORMAL), (1, Priority.BULK), (10**20, Priority.BULK)],
)
def test_a_priority_may_be_a_number_as_with_vllm(number, priority):
    assert parse({"input": "a", "priority": number}).priority == priority


@given(st.dictionaries(st.sampled_from(["input", "model", "encoding_format", "dimensions", "priority"]), anything))
def test_any_fields_are_parsed_or_a_bad_request(fields):
    with suppress(BadRequest):
        parse(fields)


def test_the_body_says_more_than_the_headers():
    headers = {"accept": "application/x-npy", "x-vecd-priority": "bulk", "x-vecd-timeout-ms": "1500"}
    request = parse({"input": "a"}, headers)
    assert (request.encoding, request.priority, request.timeout_s) == (Encoding.NPY, Priority.BULK, 1.5)
    request = parse({"input": "a", "encoding_format": "base64", "priority": "interactive"}, headers)
    assert (request.encoding, request.priority) == (Encoding.BASE64, Priority.INTERACTIVE)
    request = parse({"input": "a"}, {"accept": "*/*"})
    assert (request.encoding, request.priority, request.timeout_s) == (Encoding.FLOAT, None, None)


ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


def rendered(encoding: Encoding, **more: Any) -> tuple[bytes, Response]:
    collector = make_collector(encoding, 2, 3)
    collector.put(0, ROWS)
    response = render_embeddings(collector, encoding, model=more.pop("model", "m"), num_tokens=7, **more)
    return b"".join(pieces_of(response)), response


def pieces_of(response: Response) -> list[bytes | memoryview]:
    assert isinstance(response.body, list)
    return response.body


@pytest.mark.parametrize(
    ("encoding", "first"), [(Encoding.FLOAT, [0.0, 1.0, 2.0]), (Encoding.BASE64, "AAAAAAAAgD8AAABA")]
)
def test_the_answer_has_every_key_that_clients_need(encoding, first):
    body, response = rendered(encoding, model='m"x')
    answer = orjson.loads(body)
    vectors = [item.pop("embedding") for item in answer["data"]]
    assert vectors[0] == first
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0}, {"object": "embedding", "index": 1}],
        "model": 'm"x',
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    assert (response.status, response.content_type, response.headers) == (200, "application/json", {})


def test_the_answer_may_be_the_rows_alone():
    body, response = rendered(Encoding.BYTES, num_truncated=1)
    assert body == ROWS.tobytes()
    assert response.content_type == "application/octet-stream"
    assert response.headers == {
        "x-vecd-tokens": "7", "x-vecd-dimensions": "3", "x-vecd-model": "m", "x-vecd-truncated": "1",
    }  # fmt: skip
    assert response.num_body_bytes == len(body)


def test_the_answer_may_be_a_numpy_file():
    body, response = rendered(Encoding.NPY)
    loaded = np.load(BytesIO(body), allow_pickle=False)
    assert (loaded.dtype.str, loaded.flags.c_contiguous) == ("<f4", True)
    assert np.array_equal(loaded, ROWS)
    assert (body[:8], response.content_type) == (b"\x93NUMPY\x01\x00", "application/x-npy")


@pytest.mark.parametrize("model", ["mödel", "a b", "a\r\nb", ""])
def test_a_name_that_no_header_can_hold_is_left_out(model):
    assert "x-vecd-model" not in rendered(Encoding.BYTES, model=model)[1].headers


def test_no_row_is_copied_into_an_answer():
    rows = JsonRows(2, encode_base64)
    rows.put(0, ROWS)
    pieces = pieces_of(render_embeddings(rows, Encoding.BASE64, model="m", num_tokens=7))
    assert [piece for piece in pieces if any(piece is fragment for fragment in rows.fragments)] == rows.fragments
    matrix = Matrix(2, 3)
    [view] = pieces_of(render_embeddings(matrix, Encoding.BYTES, model="m", num_tokens=7))
    assert np.shares_memory(np.frombuffer(view, np.float32), matrix.rows)
