"""POST /v1/embeddings, and the models that it has: what a body asks for, what several fields come to together, what is
answered. The golden files have the rest."""

import json
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import asking
from tests.support.asking import PLAIN, answer, ask, body_of, changed
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects.openai import DIALECT, EMBEDDINGS
from vecd.gateway.errors import ApiError, BadRequest
from vecd.gateway.request import (
    MAX_PROMPT_CHARS,
    Dtype,
    EmbedRequest,
    Encoding,
    Form,
    Overflow,
    Priority,
    Response,
    Source,
    Tokenizing,
)
from vecd.shm.output import Output

E5 = changed(PLAIN, prompts={"query": "query: ", "passage": "passage: "}, is_matryoshka=True, prompt="default: ")
CUT, LEFT, ERROR, CHUNK = Overflow.TRUNCATE, Overflow.TRUNCATE_LEFT, Overflow.ERROR, Overflow.CHUNK


def parse(
    model_info: ModelInfo = PLAIN, headers: Mapping[str, str] | None = None, in_pieces: bool = False, /, **fields: Any
) -> EmbedRequest:
    return ask(EMBEDDINGS, {"input": "a", **fields}, headers, model_info, in_pieces=in_pieces).request


def refusal(model_info: ModelInfo = PLAIN, in_pieces: bool = False, /, **fields: Any) -> ApiError:
    error = asking.refusal(EMBEDDINGS, {"input": "a", **fields}, model_info, in_pieces=in_pieces)
    assert (error.status, error.type) == (400, "invalid_request_error")
    return error


# --- inputs and headers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", ""], ["a", ""]),
        ([1, 2, 3, 4, 5, 6], [[1, 2, 3, 4, 5, 6]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([{"text": "a"}, {"text": ""}], ["a", ""]),
        (["a", {"text": "b", "image": None}, "c"], ["a", "b", "c"]),
    ],
)
def test_every_shape_of_input(value, inputs):
    assert parse(input=value).inputs == inputs
    pieced = parse(PLAIN, None, True, input=value).inputs
    assert [item if isinstance(item, str) else [*item] for item in pieced] == inputs


def test_null_is_absent_and_unknown_fields_are_ignored():
    body = dict.fromkeys([field.name for field in EMBEDDINGS.fields], None) | {"num_ctx": [1], "x": {}}
    assert parse(**body | {"input": "a"}) == parse() == EmbedRequest(["a"], (Form(),))


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": []}, "input", "empty"),
        ({"input": {"secret": 1}}, "input", "is an object"),
        ({"input": ["a", None]}, "input", "'input[1]' must be a string, is null"),
        ({"input": [1, "secret"]}, "input", "'input[1]' must be a token id, is a string"),
        ({"input": [[1], "secret"]}, "input", "'input[1]' must be a list of token ids, is a string"),
        ({"input": [[1], []]}, "input", "'input[1]' is an empty list"),
        ({"input": [[1], [True]]}, "input", "'input[1][0]' must be a token id, is a boolean"),
        ({"input": ["a"] * 5}, "input", "5 inputs, at most 4"),
        ({"input": [{"text": "secret", "secret": "c"}]}, "input", "'input[0]' must be a string, or an object"),
        ({"input": [{"text": "a"}, {"text": 5}]}, "input", "'input[1]' must be a string, or an object"),
        ({"input": [{"text": "a"}, [1]]}, "input", "'input[1]' must be a string, is a list"),
        ({"encoding_format": []}, "encoding_format", "'float', 'base64', 'bytes', 'bytes_only' or 'npy'"),
        ({"priority": 1.5}, "priority", "a string or a whole number, is a number with a fraction"),
        ({"dimensions": 128}, "dimensions", "does not support specifying dimensions"),
    ],
)
def test_bad_requests_name_the_field(fields, param, says):
    for in_pieces in (False, True):
        error = refusal(PLAIN, in_pieces, **fields)
        assert error.param == param
        assert says in error.message


@pytest.mark.parametrize(
    ("number", "priority"),
    [(-3, Priority.INTERACTIVE), (0, Priority.NORMAL), (1, Priority.BULK), (2**63 - 1, Priority.BULK)],
)
def test_a_priority_may_be_a_number_as_with_vllm(number, priority):
    assert parse(priority=number).priority == priority


def test_the_body_says_more_than_the_headers():
    headers = {"accept": "application/x-npy", "x-vecd-priority": "bulk", "x-vecd-timeout-ms": "1500"}
    request = parse(PLAIN, headers)
    assert (request.forms, request.priority, request.timeout_s) == ((Form(Encoding.NPY),), Priority.BULK, 1.5)
    request = parse(PLAIN, headers, encoding_format="base64", priority="interactive")
    assert (request.forms, request.priority) == ((Form(Encoding.BASE64),), Priority.INTERACTIVE)
    assert parse(PLAIN, headers, output_dtype="float16").forms == (Form(Encoding.NPY, Dtype.FLOAT16),)
    assert parse(PLAIN, {"accept": "*/*"}) == parse()


# --- prompts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, None),
        ({"prompt": "x" * MAX_PROMPT_CHARS}, "x" * MAX_PROMPT_CHARS),
        ({"prompt": ""}, ""),
        ({"prompt_name": "query"}, "query: "),
        ({"input_type": "search_document"}, "passage: "),
        ({"task": "retrieval.passage"}, "passage: "),
        ({"input_type": "string", "model": "e5:query"}, "query: "),
        ({"input_type": "text", "prompt_name": "passage"}, "passage: "),
        ({"model": "e5:query", "input_type": "query"}, "query: "),
        ({"model": "e5:query", "prompt": None, "input_type": None}, "query: "),
    ],
)
def test_prompts(fields, prompt):
    assert parse(E5, **fields).tokenizing == Tokenizing(prompt)


def test_a_prompt_may_have_the_name_of_a_kind_of_input():
    model_info = changed(PLAIN, prompts={"text": "text: "})
    assert parse(model_info, input_type="text").tokenizing == Tokenizing("text: ")
    assert parse(model_info, input_type="string").tokenizing == Tokenizing()


# --- overflow ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "overflow", "max_tokens"),
    [
        ({"overflow": "chunk"}, CHUNK, None),
        ({"truncate": True}, CUT, None),
        ({"truncate_prompt_tokens": 256}, CUT, 256),
        ({"truncate_prompt_tokens": -1}, CUT, None),
        ({"truncate_prompt_tokens": 8, "truncation_side": "left"}, LEFT, 8),
        ({"truncation_direction": "Left"}, LEFT, None),
    ],
)
def test_overflow(fields, overflow, max_tokens):
    assert parse(**fields).tokenizing == Tokenizing(None, overflow, max_tokens)


@pytest.mark.parametrize(
    ("fields", "of_the_server", "overflow"),
    [
        ({}, CHUNK, None),
        ({"truncate": True}, LEFT, LEFT),
        ({"truncate": True}, ERROR, CUT),
        ({"truncate": True}, CHUNK, CUT),
        ({"truncation_side": "left"}, ERROR, ERROR),
        ({"truncation_side": "left"}, CHUNK, CHUNK),
        ({"truncation_side": "right"}, LEFT, CUT),
        ({"truncate_prompt_tokens": -1}, LEFT, LEFT),
    ],
)
def test_what_a_request_leaves_open_is_the_servers_to_say(fields, of_the_server, overflow):
    assert parse(changed(PLAIN, overflow=of_the_server), **fields).tokenizing.overflow is overflow


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"overflow": "error"}, {"truncate": True}),
        ({"truncation_side": "right"}, {"truncation_direction": "left"}),
        ({"dimensions": 64}, {"output_dimension": 128}),
        ({"normalize": True}, {"use_activation": False}),
        ({"normalize": True}, {"normalized": False}),
    ],
)
def test_contradictions_are_refused(first, second):
    error = refusal(E5, **first, **second)
    [a], [b] = first, second
    assert error.message == f"'{a}' and '{b}' contradict each other: send one of them"
    assert error.param == b
    parse(E5, **first)
    parse(E5, **second)


ALLOWED: dict[str, dict[Any, set[Overflow]]] = {
    "overflow": {value.value: {value} for value in Overflow},
    "truncate": {True: {CUT, LEFT}, False: {ERROR}, "NONE": {ERROR}, "START": {LEFT}, "END": {CUT}},
    "truncation": {True: {CUT, LEFT}, False: {ERROR}},
    "truncation_side": {"left": {LEFT, ERROR, CHUNK}, "right": {CUT, ERROR, CHUNK}},
    "truncation_direction": {"Left": {LEFT, ERROR, CHUNK}, "right": {CUT, ERROR, CHUNK}},
    "truncate_prompt_tokens": {8: {CUT, LEFT}},
}


def test_no_field_is_ever_ignored():
    """All of the 1,620 ways to fill these fields, on every kind of server."""
    for values in product(*([None, *choices] for choices in ALLOWED.values())):
        fields = {name: value for name, value in zip(ALLOWED, values, strict=True) if value is not None}
        left = set(Overflow).intersection(*(ALLOWED[name][value] for name, value in fields.items()))
        sides = {fields[name].lower() for name in ("truncation_side", "truncation_direction") if name in fields}
        if len(sides) > 1:
            left = set()
        for of_the_server in Overflow:
            model_info = changed(PLAIN, overflow=of_the_server)
            if not left:
                assert "contradict" in refusal(model_info, **fields).message
            else:
                asked = parse(model_info, **fields).tokenizing.overflow
                assert (asked in left) if fields else (asked is None)


@pytest.mark.parametrize("add", [False, True])
def test_special_tokens_may_be_left_out(add):
    assert parse(add_special_tokens=add).tokenizing == Tokenizing(add_special_tokens=add)


# --- vectors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dimensions", "output_dimension", "truncate_dim"])
def test_dimensions_by_all_their_names(name):
    assert parse(PLAIN, **{name: 384}).dimensions is None
    assert parse(E5, **{"dimensions": 64, name: 64}).dimensions == 64
    assert parse(E5, **{name: 0}).dimensions is None
    for model_info, wrong in ((PLAIN, 64), (E5, 385), (E5, -1), (E5, 64.0)):
        assert refusal(model_info, **{name: wrong}).param == name


@pytest.mark.parametrize("name", ["normalize", "normalized", "use_activation"])
def test_normalizing_by_all_its_names(name):
    request = parse(PLAIN, **{name: False})
    assert (request.output, request.normalize) == (Output.UNNORMALIZED, False)
    request = parse(PLAIN, **{name: True, "normalize": True})
    assert (request.output, request.normalize) == (Output.VECTORS, True)
    assert parse(PLAIN, **{name: None}) == parse()
    assert refusal(PLAIN, **{name: "yes"}).param == name


# --- forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"encoding_format": ""}, Form()),
        ({"encoding_format": "bytes_only"}, Form(Encoding.BYTES)),
        ({"output_dtype": "int8"}, Form(Encoding.FLOAT, Dtype.INT8)),
        ({"output_dtype": "bfloat16", "encoding_format": "bytes"}, Form(Encoding.BYTES, Dtype.BFLOAT16)),
        ({"embed_dtype": "float32", "endianness": "native"}, Form()),
        ({"endianness": "big", "encoding_format": "npy"}, Form(Encoding.NPY, Dtype.FLOAT32, True)),
        ({"endianness": "big"}, Form()),
        ({"embedding_type": "float"}, Form()),
        ({"embedding_type": "binary"}, Form(Encoding.FLOAT, Dtype.BINARY)),
        ({"embedding_type": ["ubinary"], "encoding_format": "base64"}, Form(Encoding.BASE64, Dtype.UBINARY)),
        ({"encoding_type": "base64", "embedding_type": "base64"}, Form(Encoding.BASE64)),
    ],
)
def test_forms(fields, form):
    assert parse(**fields).forms == (form,)


@pytest.mark.parametrize("name", ["output_dtype", "embedding_type", "encoding_type"])
def test_a_form_that_the_vectors_cannot_have_names_the_field_that_asked(name):
    error = refusal(changed(PLAIN, dim=12), **{name: "binary"})
    assert error.param == name
    assert "a multiple of 8; there are 12" in error.message
    error = refusal(E5, dimensions=384, output_dimension=None, **{name: "binary", "truncate_dim": 12})
    assert error.param == "truncate_dim"


# --- what is wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": "secret" * 1000}, "prompt", "at most 4096 characters, has 6000"),
        ({"prompt_name": "document"}, "prompt_name", "has no prompt 'document'; it has 'query', 'passage'"),
        ({"input_type": "image"}, "input_type", "must be one of 'query', 'passage', 'search_query'"),
        ({"prompt": "p", "prompt_name": "query"}, "prompt_name", "'prompt' and 'prompt_name' both choose the prompt"),
        ({"prompt": "", "task": "secret"}, "task", "'prompt' and 'task' both choose"),
        ({"input_type": "query", "task": "query"}, "task", "'input_type' and 'task' both choose"),
        ({"model": "m:query", "input_type": "document"}, "input_type", "'model' and 'input_type' contradict each"),
        ({"model": "m:query", "prompt": ""}, "prompt", "'model' and 'prompt' contradict each other"),
        ({"truncate": "end"}, "truncate", "must be true, false, 'NONE', 'START' or 'END', is 'end'"),
        ({"truncate": 1}, "truncate", "is a whole number"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1 for the model's length, is 0"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "is -2"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens", "must be a whole number, is a boolean"),
        ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "at most 256, as many tokens as the model takes"),
        ({"embed_dtype": "fp8_e4m3"}, "embed_dtype", "'float32', 'float16', 'bfloat16', is 'fp8_e4m3'"),
        ({"embedding_type": "int8"}, "embedding_type", "must be 'float', 'base64', 'binary' or 'ubinary', is 'int8'"),
        ({"embedding_type": []}, "embedding_type", "must be one type, or a list of one, is a list of 0"),
        ({"output_dtype": "int8", "embed_dtype": "float16"}, "embed_dtype", "'output_dtype' and 'embed_dtype' contra"),
        ({"output_dtype": "int8", "embedding_type": "binary"}, "embedding_type", "contradict each other"),
        ({"encoding_format": "float", "embedding_type": "base64"}, "embedding_type", "contradict each other"),
        ({"output_dtype": "bfloat16", "encoding_format": "npy"}, "encoding_format", "NumPy has no bfloat16"),
        ({"output_dtype": "int8", "normalize": False}, "output_dtype", "int8 is for vectors of length 1"),
    ],
)
def test_what_is_wrong_is_named(fields, param, says):
    error = refusal(E5, **fields)
    assert error.param == param
    assert says in error.message


# --- what would change the answer, and is not supported ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("messages", [{"role": "user", "content": "secret"}], None),
        ("late_chunking_params", {"chunk_size": 5}, None),
        ("return_multivector", True, False),
        ("modality", "image", "text"),
        ("padding", "anything", "do_not_pad"),
        ("padding", True, "max_length"),
    ],
)
def test_what_is_not_supported_is_refused(name, value, harmless):
    assert refusal(PLAIN, **{name: value}).param == name
    assert parse(PLAIN, **{name: harmless}) == parse()


@pytest.mark.parametrize("name", ["user", "request_id", "cache_salt", "keep_alive", "options"])
def test_what_changes_no_vector_is_ignored(name):
    assert parse(PLAIN, **{name: "anything"}) == parse()


@given(
    st.dictionaries(
        st.sampled_from([field.name for field in EMBEDDINGS.fields if field.name != "input"]),
        st.sampled_from(
            [None, True, False, 0, 1, -1, 8, "", "query", "float", "base64", "NONE", "left", "text", ["a"]]
        ),
    )
)
def test_every_refusal_names_a_field_that_was_sent(fields):
    refused: list[BadRequest] = []
    for model_info in (PLAIN, E5):
        try:
            parse(model_info, **fields)
        except BadRequest as error:
            refused.append(error)
    assert all(error.param in fields for error in refused)
    assert all(len(error.message) < 500 for error in refused)


# --- answers ----------------------------------------------------------------------------------------------------

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


def rendered(
    model_info: ModelInfo = PLAIN, changes: Mapping[str, Any] | None = None, **fields: Any
) -> tuple[bytes, Response]:
    asked = ask(EMBEDDINGS, {"input": ["a", "b"], **fields}, model_info=model_info)
    response = answer(asked, ROWS, **(changes or {}))
    return body_of(response), response


@pytest.mark.parametrize("model", ["mödel", "a b", 'a"\r\nb', ""])
def test_a_name_that_no_header_can_hold_is_left_out(model):
    _, response = rendered(changed(PLAIN, model=model), encoding_format="bytes")
    assert "x-vecd-model" not in response.headers
    assert response.headers["metadata"].isascii()
    assert response.headers["metadata"].isprintable()
    assert json.loads(response.headers["metadata"])["model"] == model
    assert json.loads(rendered(changed(PLAIN, model=model))[0])["model"] == model


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


@pytest.mark.parametrize(("num_inputs", "has_spans"), [(1, True), (25, True), (40, False)])
def test_a_description_that_no_proxy_takes_has_no_spans(num_inputs, has_spans):
    asked = ask(
        EMBEDDINGS,
        {"input": ["a"] * num_inputs, "encoding_format": "bytes"},
        model_info=changed(PLAIN, max_inputs=2048),
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


# --- models -----------------------------------------------------------------------------------------------------


def described(operation: str, path: str, model_info: ModelInfo) -> Any:
    describe = DIALECT.operations[operation].describe
    assert describe is not None
    return orjson.loads(body_of(describe([model_info], path)))


@pytest.mark.parametrize(("pools_prompt", "with_prompts"), [(True, ["org/e5:query"]), (False, [])])
def test_models_are_listed_by_all_names_and_by_prompts_that_can_be_served(pools_prompt, with_prompts):
    named = changed(PLAIN, model="org/e5", aliases=("a",), prompts={"query": "query: "}, pools_prompt=pools_prompt)
    listed = described("GET /v1/models", "/v1/models", named)
    assert [model["id"] for model in listed["data"]] == ["org/e5", "a", *with_prompts]


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    "name",
    ["minilm", "org/alias", "minilm:latest", "minilm:query", "minilm:pasage", "minilm:v2", "gpt-4"],
)
def test_a_model_that_embeds_can_be_retrieved_and_no_other(name, is_strict):
    model_info = changed(PLAIN, aliases=("org/alias",), prompts={"query": "q: "}, is_strict=is_strict)

    def outcome(call: Callable[[], object]) -> object:
        try:
            call()
        except BadRequest as error:
            return type(error), error.message
        return "accepted"

    def retrieve() -> None:
        model = described("GET /v1/models/*", f"//v1/models/{name}/", model_info)
        assert (model["id"], model["root"]) == (name, "minilm")

    assert outcome(retrieve) == outcome(lambda: parse(model_info, model=name))
