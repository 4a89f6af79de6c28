from contextlib import suppress

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.openai import parse_embeddings, render_embeddings
from gateway.errors import BadRequest
from gateway.request import EmbedRequest, Encoding


def parse(body: object) -> EmbedRequest:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return parse_embeddings(raw, max_inputs=4, dim=384)


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


@pytest.mark.parametrize(
    ("value", "encoding"),
    [
        (None, Encoding.FLOAT),
        ("", Encoding.FLOAT),
        ("float", Encoding.FLOAT),
        ("base64", Encoding.BASE64),
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
        (b"", None, "not valid JSON"),
        (b"{", None, "not valid JSON"),
        (b'{"input":"\\ud800"}', None, "not valid JSON"),
        (b'{"input":"\xff"}', None, "not valid JSON"),
        (b'{"input":NaN}', None, "not valid JSON"),
        (b"[" * 5000, None, "not valid JSON"),
        ([], None, "must be a JSON object, is a list"),
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
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64', is 'hex'"),
        ({"input": "a", "encoding_format": 5}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "encoding_format": []}, "encoding_format", "'float' or 'base64'"),
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
    with pytest.raises(BadRequest) as caught:
        parse(body)
    assert caught.value.param == param
    assert says in caught.value.message
    assert (caught.value.status, caught.value.type) == (400, "invalid_request_error")


def test_native_dimensions_are_accepted():
    assert parse({"input": "a", "dimensions": 384}).inputs == ["a"]


def test_no_refusal_quotes_what_was_sent():
    for body in (b'{"input":"secret', {"input": {"secret": 1}}, {"input": ["ok", {"secret": "secret"}]}):
        with pytest.raises(BadRequest) as caught:
            parse(body)
        assert "secret" not in caught.value.message


@given(st.binary())
def test_junk_is_a_bad_request_or_parsed(body):
    with suppress(BadRequest):
        parse_embeddings(body, max_inputs=4, dim=384)


def test_the_answer_has_every_key_that_clients_need():
    body = orjson.loads(render_embeddings([b"[1.0]", b'"AAAA"'], model='m"x', num_tokens=7))
    assert body == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1.0]},
            {"object": "embedding", "index": 1, "embedding": "AAAA"},
        ],
        "model": 'm"x',
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
