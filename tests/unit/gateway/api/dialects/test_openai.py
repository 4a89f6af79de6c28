import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.asking import PLAIN, answer, ask, body_of, pieces_of
from vecd.gateway.api.dialects.openai import DIALECT, EMBEDDINGS, render_error
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.encoding.fragments import JsonRows, Matrix
from vecd.gateway.types.errors import BadRequest, InputTooLong, InvalidApiKey, ModelNotFound, ServerError, TooManyTokens
from vecd.gateway.types.messages import Response
from vecd.gateway.types.request import (
    Dtype,
    Embedded,
    EmbedRequest,
    Encoding,
    Form,
    InputReport,
    Priority,
    Source,
    Tokenizing,
)


def parse(
    fields: dict[str, Any],
    headers: Mapping[str, str] | None = None,
    model_info: ModelInfo = PLAIN,
    in_pieces: bool = False,
) -> EmbedRequest:
    return ask(EMBEDDINGS, fields, headers, model_info, in_pieces=in_pieces).request


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["", "a", "base64", "bulk"]))
anything: st.SearchStrategy[Any] = st.one_of(scalars, st.lists(scalars), st.lists(st.lists(scalars)), st.just({}))


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", ""], ["a", ""]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([1, 2, 3, 4, 5, 6], [[1, 2, 3, 4, 5, 6]]),
        ([{"text": "a"}, {"text": ""}], ["a", ""]),
        (["a", {"text": "b", "image": None}, "c"], ["a", "b", "c"]),
    ],
)
def test_every_shape_of_input(value, inputs):
    assert parse({"input": value}).inputs == inputs
    pieced = parse({"input": value}, in_pieces=True).inputs
    assert [item if isinstance(item, str) else [*item] for item in pieced] == inputs


@pytest.mark.parametrize(
    ("value", "encoding"),
    [
        (None, Encoding.FLOAT),
        ("", Encoding.FLOAT),
        ("float", Encoding.FLOAT),
        ("base64", Encoding.BASE64),
        ("bytes", Encoding.BYTES),
        ("bytes_only", Encoding.BYTES),
        ("npy", Encoding.NPY),
    ],
)
def test_encoding_format(value, encoding):
    assert parse({"input": "a", "encoding_format": value}).forms == (Form(encoding),)


def test_null_is_absent_and_unknown_fields_are_ignored():
    body = dict.fromkeys([field.name for field in EMBEDDINGS.fields], None) | {"input": "a", "num_ctx": [1], "x": {}}
    assert parse(body) == parse({"input": "a"}) == EmbedRequest(["a"], (Form(),))


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
        ({"input": [{"text": "a"}] * 5}, "input", "5 inputs, at most 4"),
        ({"input": [{"image": "a"}]}, "input", "'input[0]' must be a string, or an object with a string as its 'text'"),
        ({"input": [{"text": "a"}, {"text": "b", "image": "c"}]}, "input", "'input[1]' must be a string, or an object"),
        ({"input": [{"text": 5}]}, "input", "'input[0]' must be a string, or an object"),
        ({"input": [{}]}, "input", "'input[0]' must be a string, or an object"),
        ({"input": [{"text": "a"}, 5]}, "input", "'input[1]' must be a string, is a whole number"),
        ({"input": [{"text": "a"}, [1]]}, "input", "'input[1]' must be a string, is a list"),
        ({"input": [[1], {"text": "a"}]}, "input", "'input[1]' must be a list of token ids, is an object"),
        ({"input": "a", "model": 5}, "model", "must be a string"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'bytes', 'bytes_only' or 'npy', is 'hex'"),
        ({"input": "a", "encoding_format": 5}, "encoding_format", "'float', 'base64', 'bytes', 'bytes_only' or 'npy'"),
        ({"input": "a", "encoding_format": []}, "encoding_format", "'float', 'base64', 'bytes', 'bytes_only' or 'npy'"),
        (
            {"input": "a", "priority": 1.5},
            "priority",
            "must be a string or a whole number, is a number with a fraction",
        ),
        ({"input": "a", "priority": True}, "priority", "must be a string or a whole number, is a boolean"),
        ({"input": "a", "priority": "high"}, "priority", "'interactive', 'normal' or 'bulk', is 'high'"),
        ({"input": "a", "dimensions": "384"}, "dimensions", "whole number"),
        ({"input": "a", "dimensions": True}, "dimensions", "whole number"),
        ({"input": "a", "dimensions": -1}, "dimensions", "does not support specifying dimensions"),
        (
            {"input": "a", "dimensions": 128},
            "dimensions",
            "This model does not support specifying dimensions. Its vectors have 384",
        ),
    ],
)
def test_bad_requests_name_the_field(body, param, says):
    for in_pieces in (False, True):
        with pytest.raises(BadRequest) as caught:
            parse(body, in_pieces=in_pieces)
        assert caught.value.param == param
        assert says in caught.value.message
        assert (caught.value.status, caught.value.type) == (400, "invalid_request_error")


@pytest.mark.parametrize("dimensions", [384, 0])
def test_native_dimensions_are_accepted(dimensions):
    request = parse({"input": "a", "dimensions": dimensions})
    assert (request.inputs, request.dimensions) == (["a"], None)


@pytest.mark.parametrize(
    "fields",
    [
        {"input": {"secret": 1}},
        {"input": ["ok", {"secret": "secret"}]},
        {"input": [{"text": "secret", "secret": 1}]},
    ],
)
def test_no_refusal_quotes_what_was_sent(fields):
    with pytest.raises(BadRequest) as caught:
        parse(fields)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("number", "priority"),
    [(-3, Priority.INTERACTIVE), (0, Priority.NORMAL), (1, Priority.BULK), (2**63 - 1, Priority.BULK)],
)
def test_a_priority_may_be_a_number_as_with_vllm(number, priority):
    assert parse({"input": "a", "priority": number}).priority == priority


@given(st.dictionaries(st.sampled_from([field.name for field in EMBEDDINGS.fields]), anything))
def test_any_fields_are_parsed_or_a_bad_request(fields):
    with suppress(BadRequest):
        parse(fields)


def test_the_body_says_more_than_the_headers():
    headers = {"accept": "application/x-npy", "x-vecd-priority": "bulk", "x-vecd-timeout-ms": "1500"}
    request = parse({"input": "a"}, headers)
    assert (request.forms, request.priority, request.timeout_s) == ((Form(Encoding.NPY),), Priority.BULK, 1.5)
    request = parse({"input": "a", "encoding_format": "base64", "priority": "interactive"}, headers)
    assert (request.forms, request.priority) == ((Form(Encoding.BASE64),), Priority.INTERACTIVE)
    request = parse({"input": "a", "output_dtype": "float16"}, headers)
    assert request.forms == (Form(Encoding.NPY, Dtype.FLOAT16),)
    request = parse({"input": "a"}, {"accept": "*/*"})
    assert (request.forms, request.priority, request.timeout_s) == ((Form(),), None, None)


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    "name",
    ["minilm", "org/alias", "minilm:latest", "minilm:query", "minilm:pasage", "minilm:v2", "gpt-4"],
)
def test_a_model_that_embeds_can_be_retrieved_and_no_other(name, is_strict):
    model_info = replace(PLAIN, aliases=("org/alias",), prompts={"query": "q: "}, is_strict=is_strict)

    def outcome(call: Callable[[], object]) -> object:
        try:
            call()
        except BadRequest as error:
            return type(error), error.message
        return "accepted"

    def retrieve() -> None:
        model = described("GET /v1/models/*", f"/v1/models/{name}", model_info)
        assert (model["id"], model["root"]) == (name, "minilm")

    assert outcome(retrieve) == outcome(lambda: parse({"input": "a", "model": name}, model_info=model_info))


def test_a_model_of_another_name_is_not_found_where_names_matter():
    strict = replace(PLAIN, is_strict=True, aliases=("text-embedding-3-small",))
    for name in (None, "minilm", "text-embedding-3-small", "minilm:latest", "minilm:query"):
        assert parse({"input": "a", "model": name}, model_info=strict).tokenizing == Tokenizing()
    with pytest.raises(ModelNotFound) as caught:
        parse({"input": "a", "model": "gpt"}, model_info=strict)
    assert orjson.loads(body_of(render_error(caught.value)))["error"] == {
        "message": "The model `gpt` does not exist; this server has 'minilm', 'text-embedding-3-small'",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code", "message"),
    [
        (
            InputTooLong(256, 300, param="input"),
            400,
            "invalid_request_error",
            "input",
            None,
            "This model's maximum context length is 256 tokens, however you requested 300 tokens (300 in your prompt; "
            "0 for the completion). Please reduce your prompt; or completion length.",
        ),
        (TooManyTokens("Requested 9 tokens, max 5 tokens per request", param="input"), 400, "max_tokens_per_request",
         "input", "max_tokens_per_request", "Requested 9 tokens, max 5 tokens per request"),
        (InvalidApiKey("Incorrect API key provided"), 401, "invalid_request_error", None, "invalid_api_key",
         "Incorrect API key provided"),
        (ServerError("failed"), 500, "server_error", None, "internal_error", "failed"),
    ],
)  # fmt: skip
def test_errors_are_openais(error, status, kind, param, code, message):
    response = render_error(error)
    assert response.status == status
    described = {"message": message, "type": kind, "param": param, "code": code}
    assert orjson.loads(body_of(response)) == {"error": described, "detail": message}


# --- answers ----------------------------------------------------------------------------------------------------

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


def rendered(
    model_info: ModelInfo = PLAIN, changes: Mapping[str, Any] | None = None, **fields: Any
) -> tuple[bytes, Response]:
    asked = ask(EMBEDDINGS, {"input": ["a", "b"], **fields}, model_info=model_info)
    response = answer(asked, ROWS, **(changes or {}))
    return body_of(response), response


@pytest.mark.parametrize(("encoding", "first"), [("float", [0.0, 1.0, 2.0]), ("base64", "AAAAAAAAgD8AAABA")])
def test_the_answer_has_every_key_that_clients_need(encoding, first):
    body, response = rendered(replace(PLAIN, model='m"x'), encoding_format=encoding)
    parsed = orjson.loads(body)
    vectors = [item.pop("embedding") for item in parsed["data"]]
    assert vectors[0] == first
    assert parsed.pop("created") > 1_700_000_000
    assert parsed == {
        "id": "embd-req_1",
        "object": "list",
        "data": [{"object": "embedding", "index": 0}, {"object": "embedding", "index": 1}],
        "model": 'm"x',
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    assert (response.status, response.content_type, response.headers) == (200, "application/json", {})


def test_the_answer_may_be_the_rows_alone():
    body, response = rendered(replace(PLAIN, model="m"), {"num_truncated": 1}, encoding_format="bytes_only")
    assert body == ROWS.tobytes()
    assert response.content_type == "application/octet-stream"
    assert response.headers == {
        "x-vecd-tokens": "7", "x-vecd-dimensions": "3", "x-vecd-dtype": "float32", "x-vecd-model": "m",
        "x-vecd-truncated": "1",
    }  # fmt: skip
    assert response.num_body_bytes == len(body)


def test_the_answer_may_be_a_numpy_file():
    body, response = rendered(encoding_format="npy")
    loaded = np.load(BytesIO(body), allow_pickle=False)
    assert (loaded.dtype.str, loaded.flags.c_contiguous) == ("<f4", True)
    assert np.array_equal(loaded, ROWS)
    assert (body[:8], response.content_type) == (b"\x93NUMPY\x01\x00", "application/x-npy")
    assert "metadata" not in response.headers


@pytest.mark.parametrize("model", ["mödel", "a b", "a\r\nb", ""])
def test_a_name_that_no_header_can_hold_is_left_out(model):
    _, response = rendered(replace(PLAIN, model=model), encoding_format="bytes")
    assert "x-vecd-model" not in response.headers
    assert response.headers["metadata"].isascii()
    assert response.headers["metadata"].isprintable()
    assert json.loads(response.headers["metadata"])["model"] == model


def test_rows_are_described_as_with_vllm():
    body, response = rendered(encoding_format="bytes", embed_dtype="float16", endianness="big")
    metadata = json.loads(response.headers["metadata"])
    assert metadata.pop("created") > 1_700_000_000
    spans: list[dict[str, Any]] = [
        {"index": 0, "embed_dtype": "float16", "endianness": "big", "start": 0, "end": 6, "shape": [3]},
        {"index": 1, "embed_dtype": "float16", "endianness": "big", "start": 6, "end": 12, "shape": [3]},
    ]
    assert metadata == {
        "id": "embd-req_1",
        "model": "minilm",
        "data": spans,
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    for span, row in zip(spans, ROWS, strict=True):
        assert np.array_equal(np.frombuffer(body[span["start"] : span["end"]], ">f2"), row)


@pytest.mark.parametrize(("num_inputs", "has_spans"), [(1, True), (25, True), (40, False), (2000, False)])
def test_a_description_that_no_proxy_takes_has_no_spans(num_inputs, has_spans):
    asked = ask(
        EMBEDDINGS,
        {"input": ["a"] * num_inputs, "encoding_format": "bytes"},
        model_info=replace(PLAIN, max_inputs=2048),
    )
    response = answer(asked, np.ones((num_inputs, 384), np.float32))
    assert len(response.headers["metadata"]) <= 3072
    metadata = json.loads(response.headers["metadata"])
    assert ("data" in metadata) == has_spans
    assert not has_spans or [item["end"] for item in metadata["data"]] == [1536 * n for n in range(1, num_inputs + 1)]
    assert (metadata["id"], metadata["usage"]["total_tokens"]) == ("embd-req_1", 7)


def test_headers_tell_what_was_not_embedded_as_it_came():
    changes = {"num_chunked": 2, "sources": frozenset((Source.TEXT, Source.MODEL, Source.CL100K))}
    assert rendered(changes=changes)[1].headers == {"x-vecd-chunked": "2", "x-vecd-token-ids": "cl100k, model"}
    assert rendered(changes={"sources": frozenset((Source.MODEL,))})[1].headers == {"x-vecd-token-ids": "model"}


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_each_item_may_have_a_report(encoding):
    reports = (InputReport(3, False, 1, Source.TEXT), InputReport(300, True, 2, Source.CL100K))
    body, _ = rendered(changes={"reports": reports}, report=True, encoding_format=encoding)
    assert [item["report"] for item in orjson.loads(body)["data"]] == [
        {"tokens": 3, "truncated": False, "chunks": 1, "source": "text"},
        {"tokens": 300, "truncated": True, "chunks": 2, "source": "cl100k"},
    ]
    assert "report" not in orjson.loads(rendered(report=False)[0])["data"][0]


@pytest.mark.parametrize("encoding", ["bytes", "bytes_only", "npy"])
def test_rows_alone_have_no_place_for_a_report(encoding):
    with pytest.raises(BadRequest, match="'report' is part of a JSON answer") as caught:
        parse({"input": "a", "report": True, "encoding_format": encoding})
    assert caught.value.param == "report"
    parse({"input": "a", "report": False, "encoding_format": encoding})


def test_no_row_is_copied_into_an_answer():
    rows, pieces = collected("base64")
    assert isinstance(rows, JsonRows)
    assert [piece for piece in pieces if any(piece is fragment for fragment in rows.fragments)] == rows.fragments
    matrix, [view] = collected("bytes")
    assert isinstance(matrix, Matrix)
    assert np.shares_memory(np.frombuffer(view, np.float32), matrix.rows)


def collected(encoding: str) -> tuple[JsonRows | Matrix, list[bytes | memoryview]]:
    """The rows of an answer, and its pieces."""
    asked = ask(EMBEDDINGS, {"input": ["a", "b"], "encoding_format": encoding})
    kept: list[Any] = []

    def render(embedded: Embedded) -> Response:
        kept.extend(embedded.collectors)
        return asked.render(embedded)

    pieces = pieces_of(answer(asked._replace(render=render), ROWS))
    return kept[0], pieces


# --- models -----------------------------------------------------------------------------------------------------

NAMED = replace(
    PLAIN, model="org/e5", aliases=("text-embedding-ada-002",), prompts={"query": "query: ", "passage": "passage: "}
)


def described(operation: str, path: str, model_info: ModelInfo = NAMED) -> Any:
    describe = DIALECT.operations[operation].describe
    assert describe is not None
    return orjson.loads(body_of(describe(model_info, path)))


def test_models_are_listed_by_all_their_names():
    listed = described("GET /v1/models", "/v1/models")
    assert listed["object"] == "list"
    names = [model["id"] for model in listed["data"]]
    assert names == ["org/e5", "text-embedding-ada-002", "org/e5:query", "org/e5:passage"]
    assert listed["data"][1] == {
        "id": "text-embedding-ada-002",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "vecd",
        "capabilities": ["dense"],
        "root": "org/e5",
        "max_model_len": 256,
        "state": "ready",
        "identity": None,
    }


def test_prompts_that_cannot_be_served_are_not_listed():
    listed = described("GET /v1/models", "/v1/models", replace(NAMED, pools_prompt=False))
    assert [model["id"] for model in listed["data"]] == ["org/e5", "text-embedding-ada-002"]


@pytest.mark.parametrize(
    "name", ["org/e5", "text-embedding-ada-002", "org/e5:query", "text-embedding-ada-002:document", "org/e5:latest"]
)
def test_a_model_is_found_by_each_of_its_names(name):
    assert described("GET /v1/models/*", f"/v1/models/{name}")["id"] == name
    assert described("GET /models/*", f"//models/{name}/")["id"] == name


@pytest.mark.parametrize("name", ["e5", "org", "org/e5:", "org/e5:qeury", "org/e5:v2", "gpt-4", "x" * 5000])
def test_no_other_model_is_found_where_names_matter(name):
    with pytest.raises(ModelNotFound) as caught:
        described("GET /v1/models/*", f"/v1/models/{name}", replace(NAMED, is_strict=True))
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert len(caught.value.message) < 180
