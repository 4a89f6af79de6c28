"""Cohere's dialect: every exchange to the byte, and what one server cannot show: prompts, names, large bodies."""

import json
from dataclasses import replace

import pytest

from tests.support import goldens
from vecd.gateway.api.dialects.cohere import DIALECT, FIELDS
from vecd.gateway.api.fields import Values
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.operations import Call, ParsedEmbed
from vecd.gateway.types.errors import BadRequest, ModelNotFound
from vecd.gateway.types.request import Dtype, Encoding, Form, Overflow, Priority


def parse(
    model_info: ModelInfo, body: dict, path: str = "/v2/embed", headers: dict[str, str] | None = None
) -> ParsedEmbed:
    operation = DIALECT.operations[f"POST {path}"]
    assert operation.embed is not None
    ask = operation.embed(Call(FIELDS.read(body), headers or {}, model_info, "req_1"))
    assert isinstance(ask, ParsedEmbed)
    return ask


# --- what is asked ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("input_type", "prompt"),
    [
        ("search_query", "query: "),
        ("search_document", "passage: "),
        ("classification", None),
        ("clustering", None),
        (None, None),
    ],
)
def test_input_type_chooses_the_prompt(model_info, input_type, prompt):
    model_info = replace(model_info, prompts={"query": "query: ", "passage": "passage: "})
    ask = parse(model_info, {"texts": ["a"], "input_type": input_type})
    assert ask.request.tokenizing.prompt == prompt


def test_a_model_name_may_choose_the_prompt(model_info):
    model_info = replace(model_info, prompts={"query": "query: ", "passage": "passage: "})
    assert parse(model_info, {"texts": ["a"], "model": "m:query"}).request.tokenizing.prompt == "query: "
    both = {"texts": ["a"], "model": "m:query", "input_type": "search_query"}
    assert parse(model_info, both).request.tokenizing.prompt == "query: "


def test_an_input_type_that_contradicts_the_model_name_is_refused(model_info):
    model_info = replace(model_info, prompts={"query": "query: ", "passage": "passage: "})
    for input_type in ("search_document", "clustering"):
        with pytest.raises(BadRequest, match="'model' and 'input_type' contradict each other") as caught:
            parse(model_info, {"texts": ["a"], "model": "m:query", "input_type": input_type})
        assert caught.value.param == "input_type"


def test_images_are_no_texts(model_info):
    """Unless the model has a prompt of that name."""
    with pytest.raises(BadRequest, match="'input_type' 'image' is not supported: this server embeds texts") as caught:
        parse(model_info, {"texts": ["a"], "input_type": "image"})
    assert caught.value.param == "input_type"
    model_info = replace(model_info, prompts={"image": "an image of "})
    assert parse(model_info, {"texts": ["a"], "input_type": "image"}).request.tokenizing.prompt == "an image of "


def test_another_model_is_refused_where_names_matter(model_info):
    strict = replace(model_info, is_strict=True, aliases=("embed-v4.0",))
    parse(strict, {"texts": ["a"], "model": "embed-v4.0"})
    with pytest.raises(ModelNotFound):
        parse(strict, {"texts": ["a"], "model": "embed-v3.0"})


@pytest.mark.parametrize(
    ("truncate", "overflow"),
    [("NONE", Overflow.ERROR), ("START", Overflow.TRUNCATE_LEFT), ("END", Overflow.TRUNCATE), (None, None)],
)
def test_truncate(model_info, truncate, overflow):
    assert parse(model_info, {"texts": ["a"], "truncate": truncate}).request.tokenizing.overflow is overflow


def test_max_tokens_beyond_the_models_are_the_models(model_info):
    assert parse(model_info, {"texts": ["a"], "max_tokens": 16}).request.tokenizing.max_tokens == 16
    for max_tokens in (model_info.max_tokens, 128_000):
        assert parse(model_info, {"texts": ["a"], "max_tokens": max_tokens}).request.tokenizing.max_tokens is None


def test_output_dimension(model_info):
    ask = parse(replace(model_info, is_matryoshka=True), {"texts": ["a"], "output_dimension": 64})
    assert ask.request.dimensions == 64


def test_each_type_is_a_form(model_info):
    ask = parse(
        model_info, {"texts": ["a"], "embedding_types": ["base64", "int8", "uint8", "binary", "ubinary", "float"]}
    )
    assert ask.request.forms == (
        Form(Encoding.BASE64),
        Form(dtype=Dtype.INT8),
        Form(dtype=Dtype.UINT8),
        Form(dtype=Dtype.BINARY),
        Form(dtype=Dtype.UBINARY),
        Form(),
    )


def test_int8_of_vectors_that_are_not_of_length_1_is_refused(model_info):
    with pytest.raises(BadRequest) as caught:
        parse(replace(model_info, is_normalized=False), {"texts": ["a"], "embedding_types": ["int8"]})
    assert caught.value.param == "embedding_types"


def test_priority_of_the_body_wins_over_the_header(model_info):
    headers = {"x-vecd-priority": "bulk", "x-vecd-timeout-ms": "1500"}
    ask = parse(model_info, {"texts": ["a"], "priority": -1}, headers=headers)
    assert ask.request.priority is Priority.INTERACTIVE
    assert ask.request.timeout_s == 1.5
    assert parse(model_info, {"texts": ["a"]}, headers=headers).request.priority is Priority.BULK


def test_more_texts_than_the_server_takes_are_refused(model_info):
    model_info = replace(model_info, max_inputs=3)
    parse(model_info, {"texts": ["a"] * 3})
    for body in ({"texts": ["a"] * 4}, {"inputs": [{"content": [{"type": "text", "text": "a"}]}] * 4}):
        with pytest.raises(BadRequest, match="4 inputs, at most 3"):
            parse(model_info, body)


def test_no_refusal_quotes_a_text(model_info):
    secret = "a text that nobody may see"
    for body in (
        {"inputs": [{"content": [{"type": secret, "text": "a"}]}]},
        {"inputs": [{"content": [secret]}]},
        {"inputs": [{"content": secret}]},
        {"inputs": secret},
        {"texts": [{secret: secret}]},
        {"images": [secret]},
    ):
        with pytest.raises(BadRequest) as caught:
            parse(model_info, body)
        assert secret not in caught.value.message


# --- what is answered -------------------------------------------------------------------------------------------


def test_echoed_texts_outlive_the_inputs(model_info):
    """They are cleared once they are tokenized."""
    texts = ['"a"', "é", ""]
    ask = parse(model_info, {"texts": list(texts)})
    ask.request.inputs.clear()
    assert json.loads(b"[%b]" % b"".join(ask.render.keywords["echoed"])) == texts  # type: ignore[attr-defined]


def test_fields_of_the_golden_file_are_declared():
    """A field that no exchange has is a field that nobody has seen working."""
    used = {
        name
        for exchange in goldens.exchanges("cohere")
        if isinstance(body := exchange["request"].get("body"), dict)
        for name in body
    }
    assert {field.name for field in FIELDS} <= used
    assert Values({}).get(next(iter(FIELDS))) is None
