"""The field `late_chunking` of POST /v1/embeddings: what it asks for, what it refuses, and what is answered."""

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from tests.support.asking import PLAIN, STAGES, ask, body_of
from tests.support.cards import DENSE
from vecd.gateway.api.dialects.openai import EMBEDDINGS
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.operations import ParsedEmbed
from vecd.gateway.encoding.fragments import Encoder
from vecd.gateway.tokenization.late_chunks import LateChunks
from vecd.gateway.types.errors import BadRequest
from vecd.gateway.types.request import Embedded, InputReport, LateChunking, Overflow, Source
from vecd.shm.heads import Step
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
        ({"add_special_tokens": False}, Overflow.ERROR),
        ({"truncate": True}, Overflow.TRUNCATE),
        ({"truncation": True}, Overflow.TRUNCATE),
        ({"truncate": "NONE"}, Overflow.ERROR),
        ({"overflow": "truncate"}, Overflow.TRUNCATE),
        ({"truncate_prompt_tokens": 8}, Overflow.TRUNCATE),
    ],
)
def test_a_text_that_is_too_long_is_an_error_unless_it_may_be_truncated(default, fields, overflow):
    """Whatever the server's own policy is: a chunk that is missing would not be noticed."""
    asked = parse(replace(PLAIN, overflow=default), late_chunking=True, **fields).request
    assert asked.tokenizing.overflow is overflow


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"late_chunking": 1}, "'late_chunking' must be true, false or an object, is a whole number"),
        ({"late_chunking": "true"}, "'late_chunking' must be true, false or an object, is 'true'"),
        ({"late_chunking": {}}, "has 0 keys, 0 of them known"),
        ({"late_chunking": {"secret": 1}}, "has 1 keys, 0 of them known"),
        ({"late_chunking": {"max_tokens": 1, "ranges": [[0, 1]]}}, "has 2 keys, 2 of them known"),
        ({"late_chunking": {"max_tokens": 0}}, "'late_chunking.max_tokens' must be a whole number of at least 1, is 0"),
        ({"late_chunking": {"max_tokens": 1.5}}, "is a number"),
        ({"late_chunking": {"max_tokens": True}}, "is a boolean"),
        ({"late_chunking": {"ranges": {}}}, "'late_chunking.ranges' must be a list, is an object"),
        ({"late_chunking": {"ranges": []}}, "'late_chunking.ranges' must be a list of at least 1 range, is empty"),
        ({"late_chunking": {"ranges": [5]}}, "'late_chunking.ranges[0]' must be [start, end], two whole numbers"),
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
        ({"late_chunking": True, "overflow": "chunk"}, "'error' or 'truncate' with it, is 'chunk'"),
        ({"late_chunking": True, "truncate": "START"}, "'error' or 'truncate' with it, is 'truncate_left'"),
    ],
)
def test_what_cannot_be_is_refused(fields, says):
    with pytest.raises(BadRequest) as caught:
        parse(**fields)
    assert says in caught.value.message
    assert caught.value.param == "late_chunking"
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("encoding", ["bytes", "bytes_only", "npy"])
def test_binary_answers_have_no_place_for_ranges(encoding):
    with pytest.raises(BadRequest) as caught:
        parse(late_chunking=True, encoding_format=encoding)
    assert caught.value.param == "encoding_format"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pools_states": False, "pooling": ("cls",)}, "this one has the pooling cls"),
        ({"pools_states": False, "pooling": ("mean", "max")}, "this one has the pooling mean + max"),
        ({"pools_states": False}, "this one has more behind it"),
    ],
)
def test_a_model_whose_vector_is_no_mean_is_refused(changes, says):
    with pytest.raises(BadRequest) as caught:
        parse(replace(PLAIN, **changes), late_chunking=True)
    assert says in caught.value.message
    assert caught.value.param == "late_chunking"


def test_other_kinds_of_vectors_have_no_chunks():
    both = replace(PLAIN, capabilities=("dense", "multi-vector"))
    for fields in ({"output": ["dense", "multi-vector"]}, {"return_multivector": True}):
        with pytest.raises(BadRequest, match="'late_chunking' is for dense vectors"):
            parse(both, late_chunking=True, **fields)
    with pytest.raises(BadRequest, match="not for 'messages'"):
        parse(replace(PLAIN, has_chat_template=True), late_chunking=True, messages=[{"role": "user", "content": "a"}])


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


def rendered(asked: ParsedEmbed, chunks: list[LateChunks], reports: tuple[InputReport, ...] = ()) -> Any:
    [collector] = Encoder(DENSE).make_collectors(asked.request, (), chunks)
    for index, of_input in enumerate(chunks):
        rows = np.arange(of_input.num_rows, dtype=np.float32)[:, None] + np.zeros(DENSE.dim, np.float32)
        collector.put_tokens(index, rows, 0)
    sources = frozenset((Source.TEXT,))
    embedded = Embedded((collector,), 9, 1, 0, sources, reports, 5, STAGES)
    response = asked.render(embedded)
    assert response.headers["x-vecd-truncated"] == "1"
    return orjson.loads(body_of(response))


FIRST = LateChunks(np.array([[0, 2], [2, 5]]), np.array([[0, 3], [3, 4]]), (0, 0), 4, np.array([False, False]))
SECOND = LateChunks(np.array([[0, 4], [4, 6]]), np.array([[0, 2], [0, 0]]), (0, 0), 2, np.array([True, True]))
TINY = replace(PLAIN, dim=DENSE.dim, is_normalized=False)


def test_an_item_is_a_chunk():
    asked = parse(TINY, input=["aabbb", "ccccdd"], late_chunking={"max_tokens": 3}, report=True)
    reports = (InputReport(4, False, 1, Source.TEXT), InputReport(2, True, 1, Source.TEXT))
    body = rendered(asked, [FIRST, SECOND], reports)
    assert body["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    assert [item["index"] for item in body["data"]] == [0, 1, 2, 3]
    assert [(item["input"], item["start"], item["end"]) for item in body["data"]] == [
        (0, 0, 2), (0, 2, 5), (1, 0, 4), (1, 4, 6),
    ]  # fmt: skip
    assert [item.get("truncated") for item in body["data"]] == [None, None, True, True]
    assert [item["embedding"] and item["embedding"][0] for item in body["data"]] == [1.0, 3.0, 0.5, None]
    assert [item["report"]["truncated"] for item in body["data"]] == [False, False, True, True]


def test_an_item_is_an_input_that_is_a_chunk():
    asked = parse(TINY, input=["cccc", "dd"], late_chunking=True)
    body = rendered(asked, [SECOND])
    assert [item.keys() for item in body["data"]] == [{"object", "index", "truncated", "embedding"}] * 2
