"""Inputs become bodies within the limits, in their order, and each is written once."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecd.client.sdk.cutting import cut
from vecd.client.sdk.endpoint import RequestLimits

FIELDS = {"model": "m", "absent": None, "dimensions": 3}


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=40),
    st.integers(1, 10),
    st.integers(60, 300),
)
def test_all_inputs_are_sent_once_and_within_the_limits(texts: list[str], max_inputs: int, max_bytes: int) -> None:
    parts = list(cut(FIELDS, "input", texts, RequestLimits(max_inputs, max_bytes)))
    bodies = [json.loads(part.body) for part in parts]
    assert [text for body in bodies for text in body["input"]] == texts
    assert [part.start for part in parts] == [0, *(part.end for part in parts)][: len(parts)]
    for part, body in zip(parts, bodies, strict=True):
        assert body == {"model": "m", "dimensions": 3, "input": texts[part.start : part.end]}
        assert len(body["input"]) <= max_inputs
        assert len(part.body) <= max_bytes or len(body["input"]) == 1


@pytest.mark.parametrize("fields", [{}, {"model": None}])
def test_a_body_may_have_no_other_field(fields: dict[str, Any]) -> None:
    [part] = cut(fields, "inputs", ["a"], RequestLimits())
    assert (part.body, part.where) == (b'{"inputs":["a"]}', "")


def test_a_part_says_which_inputs_it_has() -> None:
    assert [part.where for part in cut({}, "input", ["a"] * 3, RequestLimits(2))] == [
        " (inputs 0 to 1 of the call are counted from 0 here)",
        " (inputs 2 to 2 of the call are counted from 0 here)",
    ]


def test_ids_may_be_arrays() -> None:
    [part] = cut({}, "input", [np.array([1, 2], np.int32), [np.int64(3)]], RequestLimits())
    assert json.loads(part.body) == {"input": [[1, 2], [3]]}


def test_half_of_a_pair_is_for_the_server_to_refuse() -> None:
    [part] = cut({}, "input", ["a", "\ud800"], RequestLimits())
    assert part.body == b'{"input":["a","\\ud800"]}'


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        list(cut({}, "input", [object()], RequestLimits()))
