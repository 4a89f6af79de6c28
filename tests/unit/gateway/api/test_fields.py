from dataclasses import replace
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecd.gateway.api import fields
from vecd.gateway.api.fields import SEVERAL, Field, Fields, Said, inside, parse_accept, value_of
from vecd.gateway.errors import BadRequest, quoted
from vecd.gateway.request import Encoding


class Colour(Enum):
    RED = "red"
    GREEN = "green"


NAME = fields.text("name", "what it is called", maxLength=9)
LOUD = fields.flag("loud", "whether it is", default=False)
SIZE = fields.whole_number("size", "how large it is", minimum=1)
LEAST = fields.whole_number("least", "no more is known", minimum=-1)
COLOUR = fields.choice("colour", "one of two", {colour.value: colour for colour in Colour})
THING: Field[Any] = fields.anything("thing", "whatever", {"type": "object"}, is_required=True, is_large=True)
ALL = Fields(NAME, LOUD, SIZE, LEAST, COLOUR, THING)


SIZES = (SIZE, SIZE.called("length", "a tailor's"))
SIDES: Field[frozenset[str]] = fields.choice(
    "sides", "where", {"any": frozenset("lr"), "left": frozenset("l"), "right": frozenset("r")}
)
BOTH = Field("both", "", {}, lambda value, _: Said(size=value, sides=frozenset("l")), key=SEVERAL)
WORDS = Fields(*SIZES, SIDES, replace(SIDES, name="ends"), BOTH, *inside("box", "all of it", *SIZES, SIDES))


@pytest.mark.parametrize(
    ("body", "size", "word", "sides"),
    [
        ({"length": 3}, 3, "length", None),
        ({"box": {"length": 3, "other": 1}, "ends": None}, 3, "box.length", None),
        ({"both": 3, "sides": "any"}, 3, "both", {"l"}),
    ],
)
def test_all_words_for_an_attribute_are_read_together(body, size, word, sides):
    wanted = WORDS.read(body)
    assert (wanted.get(SIZE), wanted.word(SIZE), wanted.get(SIDES)) == (size, word, sides)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"length": 3, "size": 4}, ("length", "size")),
        ({"sides": "any", "ends": "right", "box": {"sides": "left"}}, ("ends", "box.sides")),
    ],
)
def test_words_that_contradict_each_other_are_refused_by_name(body, words):
    first, second = words
    with pytest.raises(BadRequest, match=f"'{first}' and '{second}' contradict each other: send one of") as caught:
        WORDS.read(body)
    assert caught.value.param == words[1]


def test_what_is_required_is_missed():
    for body in ({}, {"thing": None}):
        with pytest.raises(BadRequest, match="'thing' is required: whatever") as caught:
            ALL.read(body).require(THING)
        assert caught.value.param == "thing"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("size", 0, "'size' must be at least 1, is 0"),
        ("colour", "blue", "'colour' must be one of 'red', 'green', is 'blue'"),
        ("colour", "x" * 99 + "secret", f"'colour' must be one of 'red', 'green', is '{'x' * 32}'"),
        ("colour", ["red"], "'colour' must be one of 'red', 'green', is a list"),
    ],
)
def test_what_is_refused_is_named(name, value, says):
    with pytest.raises(BadRequest) as caught:
        ALL.read({name: value})
    assert caught.value.param == name
    assert caught.value.message.startswith(says)
    assert "secret" not in caught.value.message


def test_the_schema_says_what_is_read():
    assert ALL.large == {"thing"}
    assert ALL.small == {"name", "loud", "size", "least", "colour"}
    assert ALL.schema() == {
        "type": "object",
        "properties": {
            "name": {"type": ["string", "null"], "maxLength": 9, "description": "what it is called"},
            "loud": {"type": ["boolean", "null"], "default": False, "description": "whether it is"},
            "size": {"type": ["integer", "null"], "minimum": 1, "description": "how large it is"},
            "least": {"type": ["integer", "null"], "minimum": -1, "description": "no more is known"},
            "colour": {"enum": ["red", "green", None], "description": "one of two"},
            "thing": {"type": "object", "description": "whatever"},
        },
        "required": ["thing"],
    }
    assert "required" not in Fields(NAME).schema()


def test_what_is_quoted_is_short_whatever_it_is_written_in():
    assert quoted("query") == "'query'"
    assert quoted("q" * 1000) == repr("q" * 32)
    assert len(quoted("\U0001f600" * 1000)) <= 70
    assert quoted("\U0001f600" * 1000).isascii()


# --- headers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [
        (None, None),
        ("application/*", None),
        ("Application/Octet-Stream", Encoding.BYTES),
        ("application/x-npy;version=1", Encoding.NPY),
        ("application/octet-stream, */*", None),
        ("application/octet-stream;q=0.5, application/json", None),
        ("application/octet-stream ; Q = 0.4 , application/json; q=0.3", Encoding.BYTES),
        ("application/octet-stream;q=0, */*", None),
        ("application/octet-stream;q=2", None),
        ("application/octet-stream;charset=utf-8;q=0.5, text/html", Encoding.BYTES),
        ("application/octet-stream;q=high", None),
        ("application/octet-stream;q=0.5, application/x-npy;q=0.6", Encoding.NPY),
        ("application/octet-stream, application/x-npy", Encoding.BYTES),
        ("application/x-npy;q=0.5, application/*;q=0.2", Encoding.NPY),
    ],
)
def test_accept(accept, encoding):
    assert parse_accept({} if accept is None else {"accept": accept}) is encoding


@given(st.text(st.sampled_from("application/octet-stream,;q=0.1* "), max_size=80))
def test_any_accept_is_read(accept):
    parse_accept({"accept": accept + ",application/x-npy"})


def test_a_body_s_value_by_a_word_that_may_be_inside_an_object():
    body = {"a": 1, "b": {"a": 2, "c": None}, "d": [{"a": 3}]}
    assert [value_of(word, body) for word in ("a", "b.a", "b.c", "d.a", "e.a", "a.a")] == [1, 2, None, None, None, None]
