"""Cohere's dialect: what is beyond its words, which `test_attributes` has."""

import json
from typing import Any

import numpy as np
import pytest

from tests.support.asking import PLAIN, answer, ask, body_of, changed
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects.cohere import DIALECT
from vecd.gateway.errors import BadRequest
from vecd.gateway.request import EmbedRequest

EMBED = DIALECT.operations["POST /v2/embed"]
E5 = changed(PLAIN, prompts={"query": "query: ", "passage": "passage: "}, is_matryoshka=True)


def parse(body: dict[str, Any], model_info: ModelInfo = E5, headers: dict[str, str] | None = None) -> EmbedRequest:
    return ask(EMBED, {"texts": ["a"], **body}, headers, model_info).request


def test_images_are_texts_where_the_model_has_a_prompt_of_that_name():
    model_info = changed(PLAIN, prompts={"image": "an image of "})
    assert parse({"input_type": "image"}, model_info).tokenizing.prompt == "an image of "


def test_int8_of_vectors_that_are_not_of_length_1_is_refused():
    with pytest.raises(BadRequest) as caught:
        parse({"embedding_types": ["int8"]}, changed(E5, steps=()))
    assert caught.value.param == "embedding_types"


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
