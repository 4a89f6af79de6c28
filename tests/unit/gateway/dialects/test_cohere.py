"""Cohere's dialect: what its golden file cannot show, of one server without prompts."""

import json
from typing import Any

import numpy as np
import pytest

from tests.support.asking import PLAIN, answer, ask, body_of, changed
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects.cohere import DIALECT
from vecd.gateway.errors import BadRequest, ModelNotFound
from vecd.gateway.request import EmbedRequest, Overflow, Priority

EMBED = DIALECT.operations["POST /v2/embed"]
E5 = changed(PLAIN, prompts={"query": "query: ", "passage": "passage: "}, is_matryoshka=True)


def parse(body: dict[str, Any], model_info: ModelInfo = E5, headers: dict[str, str] | None = None) -> EmbedRequest:
    return ask(EMBED, {"texts": ["a"], **body}, headers, model_info).request


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"input_type": "search_query"}, "query: "),
        ({"input_type": "search_document"}, "passage: "),
        ({}, None),
        ({"model": "m:query"}, "query: "),
    ],
)
def test_input_type_or_the_name_of_the_model_chooses_the_prompt(body, prompt):
    assert parse(body).tokenizing.prompt == prompt


def test_an_input_type_that_contradicts_the_model_name_is_refused():
    for input_type in ("search_document", "clustering"):
        with pytest.raises(BadRequest, match="'model' and 'input_type' contradict each other") as caught:
            parse({"model": "m:query", "input_type": input_type})
        assert caught.value.param == "input_type"


def test_images_are_texts_where_the_model_has_a_prompt_of_that_name():
    model_info = changed(PLAIN, prompts={"image": "an image of "})
    assert parse({"input_type": "image"}, model_info).tokenizing.prompt == "an image of "


def test_another_model_is_refused_where_names_matter():
    strict = changed(E5, is_strict=True, aliases=("embed-v4.0",))
    parse({"model": "embed-v4.0"}, strict)
    with pytest.raises(ModelNotFound):
        parse({"model": "embed-v3.0"}, strict)


@pytest.mark.parametrize(
    ("body", "overflow", "max_tokens", "dimensions"),
    [
        ({}, None, None, None),
        ({"truncate": "NONE", "max_tokens": 16}, Overflow.ERROR, 16, None),
        ({"truncate": "START", "max_tokens": E5.config.max_tokens}, Overflow.TRUNCATE_LEFT, None, None),
        ({"truncate": "END", "max_tokens": 128_000, "output_dimension": 64}, Overflow.TRUNCATE, None, 64),
    ],
)
def test_options(body, overflow, max_tokens, dimensions):
    request = parse(body)
    assert (request.tokenizing.overflow, request.tokenizing.max_tokens) == (overflow, max_tokens)
    assert request.dimensions == dimensions


def test_int8_of_vectors_that_are_not_of_length_1_is_refused():
    with pytest.raises(BadRequest) as caught:
        parse({"embedding_types": ["int8"]}, changed(E5, steps=()))
    assert caught.value.param == "embedding_types"


def test_priority_of_the_body_wins_over_the_header():
    headers = {"x-vecd-priority": "bulk", "x-vecd-timeout-ms": "1500"}
    request = parse({"priority": -1}, headers=headers)
    assert (request.priority, request.timeout_s) == (Priority.INTERACTIVE, 1.5)
    assert parse({}, headers=headers).priority is Priority.BULK


def test_more_texts_than_the_server_takes_are_refused():
    parse({"texts": ["a"] * 4})
    for body in ({"texts": ["a"] * 5}, {"texts": None, "inputs": [{"content": [{"type": "text", "text": "a"}]}] * 5}):
        with pytest.raises(BadRequest, match="5 inputs, at most 4"):
            parse(body)


def test_echoed_texts_outlive_the_inputs():
    """They are cleared once they are tokenized."""
    texts = ['"a"', "é", ""]
    asked = ask(EMBED, {"texts": list(texts)})
    asked.request.inputs.clear()
    assert json.loads(body_of(answer(asked, np.ones((3, 2), np.float32))))["texts"] == texts


@pytest.mark.parametrize(
    ("changes", "warnings"),
    [
        ({}, None),
        ({"num_truncated": 1}, ["Texts longer than 16 tokens, of which the rest was cut: 1"]),
        ({"num_chunked": 2}, ["Texts longer than 16 tokens, which were embedded in parts: 2"]),
    ],
)
def test_the_response_warns_of_texts_that_are_too_long(changes, warnings):
    asked = ask(EMBED, {"texts": ["a"], "max_tokens": 16})
    response = answer(asked, np.ones((1, 2), np.float32), **changes)
    assert json.loads(body_of(response))["meta"].get("warnings") == warnings
