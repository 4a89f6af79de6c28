"""The field `late_chunking` of POST /v1/embeddings: what it asks for, what it refuses, and what is answered."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.asking import PLAIN, ask, changed, refusal
from tests.support.cards import DENSE
from vecd.gateway.api.operation import ParsedEmbed
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.config import ChatTemplateSpec
from vecd.gateway.dialects.openai import EMBEDDINGS
from vecd.gateway.request import LateChunking, Overflow
from vecd.model.steps import Step
from vecd.shm.output import Output


def parse(model_info: ModelInfo = PLAIN, /, **fields: Any) -> ParsedEmbed:
    return ask(EMBEDDINGS, {"input": "some text", **fields}, model_info=model_info)


def test_the_inputs_of_a_request_are_chunks_of_one_text():
    asked = parse(input=["One. ", {"text": "Two."}, "x"], late_chunking=True).request
    assert asked.inputs == ["One. Two.x"]
    assert asked.late == LateChunking(([(0, 5), (5, 9), (9, 10)],), are_inputs=True)
    assert asked.output is Output.VECTORS
    assert (asked.tokenizing.overflow, asked.tokenizing.wants_offsets) == (Overflow.ERROR, True)


def test_each_input_has_chunks_of_its_own():
    asked = parse(input=["a b", "c"], late_chunking={"max_tokens": 5}, prompt="p").request
    assert (asked.inputs, asked.late, asked.tokenizing.prompt) == (["a b", "c"], LateChunking(max_tokens=5), "p")
    asked = parse(late_chunking={"ranges": [[0, 4], [2, 9]]}).request
    assert asked.late == LateChunking(([(0, 4), (2, 9)],))
    asked = parse(input=["a b", "c"], late_chunking={"ranges": [[[0, 1]], [[0, 1]]]}).request
    assert asked.late == LateChunking(([(0, 1)], [(0, 1)]))


@pytest.mark.parametrize("value", [None, False])
def test_without_it_a_request_is_as_any_other(value):
    assert parse(late_chunking=value).request == parse().request


@pytest.mark.parametrize("default", [*Overflow])
@pytest.mark.parametrize(
    ("fields", "overflow"),
    [
        ({}, Overflow.ERROR),
        ({"truncate": True}, Overflow.TRUNCATE),
        ({"truncate_prompt_tokens": 8}, Overflow.TRUNCATE),
    ],
)
def test_a_text_that_is_too_long_is_an_error_unless_it_may_be_truncated(default, fields, overflow):
    """Whatever the server's own policy is: a chunk that is missing would not be noticed."""
    asked = parse(changed(PLAIN, overflow=default), late_chunking=True, **fields).request
    assert asked.tokenizing.overflow is overflow


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"late_chunking": "true"}, "'late_chunking' must be true, false or an object, is 'true'"),
        ({"late_chunking": {"secret": 1}}, "has 1 keys, 0 of them known"),
        ({"late_chunking": {"max_tokens": 1, "ranges": [[0, 1]]}}, "has 2 keys, 2 of them known"),
        ({"late_chunking": {"max_tokens": 0}}, "'late_chunking.max_tokens' must be a whole number of at least 1, is 0"),
        ({"late_chunking": {"max_tokens": True}}, "is a boolean"),
        ({"late_chunking": {"ranges": []}}, "'late_chunking.ranges' must be a list of at least 1 range, is empty"),
        ({"late_chunking": {"ranges": [[0, 1, 2]]}}, "'late_chunking.ranges[0]' must be [start, end]"),
        ({"late_chunking": {"ranges": [[0, True]]}}, "'late_chunking.ranges[0]' must be [start, end]"),
        (
            {"late_chunking": {"ranges": [[0, 1], [-1, 1]]}},
            "'late_chunking.ranges[1]' must begin at 0 or later and end behind its beginning, at 2147483647 at most, "
            "is [-1, 1]",
        ),
        ({"late_chunking": {"ranges": [[3, 3]]}}, "is [3, 3]"),
        ({"late_chunking": {"ranges": [[0, 2**63]]}}, "is [0, 9223372036854775808]"),
        (
            {"late_chunking": {"ranges": [[0, 1]] * 5}},
            "'late_chunking.ranges' has 5 ranges, at most 4 in one request (--max-inputs)",
        ),
        (
            {"input": ["ab", "cd"], "late_chunking": {"ranges": [[[0, 1]]]}},
            "'late_chunking.ranges' must have a list for each of 2 inputs, has 1 items",
        ),
        (
            {"input": ["ab"], "late_chunking": {"ranges": [7]}},
            "'late_chunking.ranges[0]' must be a list of at least 1 range, is a whole number",
        ),
        ({"input": ["ab"], "late_chunking": {"ranges": [[[1, 0]]]}}, "'late_chunking.ranges[0][0]' must begin at 0"),
        ({"input": [1, 2], "late_chunking": True}, "'late_chunking' is for texts"),
        ({"input": [[1, 2]], "late_chunking": {"max_tokens": 4}}, "'late_chunking' is for texts"),
        ({"late_chunking": True, "truncate": "START"}, "'error' or 'truncate' with it, is 'truncate_left'"),
    ],
)
def test_what_cannot_be_is_refused(fields, says):
    error = refusal(EMBEDDINGS, {"input": "some text", **fields})
    assert error.param == "late_chunking"
    assert says in error.message


def test_binary_answers_have_no_place_for_ranges():
    for encoding in ("bytes", "npy"):
        body = {"input": "a", "late_chunking": True, "encoding_format": encoding}
        assert refusal(EMBEDDINGS, body).param == "encoding_format"


BOTH = changed(PLAIN, capabilities=("dense", "multi-vector"))
CHAT = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("model_info", "fields", "says"),
    [
        (changed(PLAIN, pooling=("mean", "max")), {}, "this one has the pooling mean + max"),
        (changed(PLAIN, steps=(Step("dense"), Step("normalize"))), {}, "this one has more behind it"),
        (BOTH, {"output": ["dense", "multi-vector"]}, "'late_chunking' is for dense vectors"),
        (changed(PLAIN, chat_template=ChatTemplateSpec("", {})), {"messages": CHAT}, "not for 'messages'"),
    ],
)
def test_what_is_no_mean_of_a_text_is_refused(model_info, fields, says):
    body = fields if "messages" in fields else {"input": "a", **fields}
    error = refusal(EMBEDDINGS, {"late_chunking": True, **body}, model_info)
    assert error.param == "late_chunking"
    assert says in error.message


@pytest.mark.parametrize(
    ("changes", "is_mean"),
    [
        ({}, True),
        ({"steps": (Step("normalize"),)}, True),
        ({"steps": (Step("layer_norm"), Step("normalize"))}, False),
        ({"pooling": ("cls",)}, False),
        ({"pooling": ("mean", "max")}, False),
        ({"ignored_ids": (3,)}, False),
        ({"capabilities": ("multi-vector",)}, False),
    ],
)
def test_which_vectors_are_means(changes, is_mean):
    assert replace(DENSE, **changes).pools_states is is_mean
