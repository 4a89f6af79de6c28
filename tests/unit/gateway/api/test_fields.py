from array import array
from enum import Enum
from typing import Any

import pytest

from vecd.gateway.api import fields
from vecd.gateway.api.fields import Field, Fields, Values
from vecd.gateway.types.errors import BadRequest
from vecd.gateway.types.quoting import quoted


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


def test_what_was_sent_is_read():
    values = ALL.read({"name": "n", "loud": False, "size": 3, "least": -1, "colour": "red", "thing": [1], "other": 5})
    assert (values.get(NAME), values.get(LOUD), values.get(SIZE), values.get(LEAST)) == ("n", False, 3, -1)
    assert (values.get(COLOUR), values.require(THING)) == (Colour.RED, [1])


def test_null_is_absent_and_what_is_not_known_is_ignored():
    values = ALL.read({"name": None, "other": {"name": 5}})
    assert values.get(NAME) is None
    assert not values.has_any(frozenset(("name", "other")))
    assert ALL.read({"size": 1}).has_any(frozenset(("name", "size")))


def test_what_is_required_is_missed():
    for body in ({}, {"thing": None}):
        with pytest.raises(BadRequest, match="'thing' is required: whatever") as caught:
            ALL.read(body).require(THING)
        assert caught.value.param == "thing"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("name", 5, "'name' must be a string, is a whole number"),
        ("name", ["a"], "'name' must be a string, is a list"),
        ("loud", 1, "'loud' must be true or false, is a whole number"),
        ("loud", "true", "'loud' must be true or false, is a string"),
        ("size", 0, "'size' must be at least 1, is 0"),
        ("size", True, "'size' must be a whole number, is a boolean"),
        ("size", 1.0, "'size' must be a whole number, is a number with a fraction"),
        ("least", -2, "'least' must be at least -1, is -2"),
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


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "null"),
        (True, "a boolean"),
        (5, "a whole number"),
        (1.5, "a number with a fraction, or too large"),
        ("a", "a string"),
        ([], "a list"),
        (array("i", [1]), "a list"),
        ({}, "an object"),
    ],
)
def test_types_have_jsons_names(value, kind):
    assert fields.json_type(value) == kind


def test_values_are_kept_by_name():
    values = Values({"name": "n"})
    assert values.get(fields.text("name", "the same name, declared elsewhere")) == "n"


def test_what_is_quoted_is_short_whatever_it_is_written_in():
    assert quoted("query") == "'query'"
    assert quoted("q" * 1000) == repr("q" * 32)
    assert len(quoted("\U0001f600" * 1000)) <= 70
    assert quoted("\U0001f600" * 1000).isascii()
