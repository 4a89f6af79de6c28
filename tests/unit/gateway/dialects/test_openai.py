"""POST /v1/embeddings, and the models that it has: inputs, what several fields come to together, headers of responses.
`test_attributes` has its words."""

import json
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import numpy as np
import orjson
import pytest

from tests.support import asking
from tests.support.asking import PLAIN, answer, ask, body_of, changed
from vecd.gateway.api.operation import ParsedEmbed
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.app.app import render
from vecd.gateway.app.routes import Claim
from vecd.gateway.dialects.openai import DIALECT, EMBEDDINGS
from vecd.gateway.errors import ApiError, BadRequest
from vecd.gateway.request import (
    Embedded,
    EmbedRequest,
    Overflow,
    Response,
    Source,
    Tokenizing,
)

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


# --- prompts ----------------------------------------------------------------------------------------------------


def test_a_prompt_may_have_the_name_of_a_kind_of_input():
    model_info = changed(PLAIN, prompts={"text": "text: "})
    assert parse(model_info, input_type="text").tokenizing == Tokenizing("text: ")
    assert parse(model_info, input_type="string").tokenizing == Tokenizing()


# --- overflow ---------------------------------------------------------------------------------------------------


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
                assert asked in (left if fields else [of_the_server])


# --- forms ------------------------------------------------------------------------------------------------------


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
        ({"encoding_format": "float", "embedding_type": "base64"}, "embedding_type", "contradict each other"),
        ({"output_dtype": "bfloat16", "encoding_format": "npy"}, "encoding_format", "NumPy has no bfloat16"),
        ({"output_dtype": "int8", "normalize": False}, "output_dtype", "int8 is for vectors of length 1"),
    ],
)
def test_what_is_wrong_is_named(fields, param, says):
    error = refusal(E5, **fields)
    assert error.param == param
    assert says in error.message


def test_dimensions_that_the_model_was_not_made_for_are_refused_in_openai_s_words():
    assert "This model does not support specifying dimensions" in refusal(PLAIN, dimensions=128).message


# --- answers ----------------------------------------------------------------------------------------------------

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


def rendered(
    model_info: ModelInfo = PLAIN, changes: Mapping[str, Any] | None = None, **fields: Any
) -> tuple[bytes, Response]:
    asked = ask(EMBEDDINGS, {"input": ["a", "b"], **fields}, model_info=model_info)
    response = answer(asked, ROWS, model=model_info.model, **(changes or {}))
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
    for embedded, expected in (
        (Embedded(num_chunked=2, sources={*Source}), {"x-vecd-chunked": "2", "x-vecd-token-ids": "cl100k, model"}),
        (Embedded(num_truncated=3, sources={Source.MODEL}), {"x-vecd-truncated": "3", "x-vecd-token-ids": "model"}),
        (Embedded(sources={Source.TEXT}), {}),
    ):
        work = ParsedEmbed(EmbedRequest(["a"]), lambda embedded: Response(200))
        assert render(work, Claim(DIALECT, EMBEDDINGS), PLAIN, embedded).headers == expected


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


def test_a_route_is_listed_by_the_prompts_of_its_own_role():
    named = changed(PLAIN, model="leaf", task="document", prompts={"query": "q: ", "document": "", "own": "o: "})
    listed = described("GET /v1/models", "/v1/models", named)
    assert [model["id"] for model in listed["data"]] == ["leaf", "leaf:document", "leaf:own"]


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    "name",
    ["minilm", "org/alias", "minilm:latest", "minilm:query", "minilm:pasage", "minilm:v2", "gpt-4"],
)
def test_a_model_that_embeds_can_be_retrieved_and_no_other(name, is_strict):
    model_info = changed(
        PLAIN, aliases=("org/alias",), prompts={"query": "q: "}, unknown_model="refuse" if is_strict else "any"
    )

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
