"""The words of a dialect as data: the attribute of a request that each speaks of, its values, reader and documentation.

Every dialect declares its fields with these types, and the OpenAPI document is written from the same declarations.
Reading a body gives what the request wants, by attribute, with the client's words, and finds words that contradict each
other. Null is the same as absent. Unknown fields are ignored, because clients send dozens. Every error names the field,
the limit and the value, but never quotes a text. Pure.
"""

import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import isfinite
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar, cast

from vecd.base.files import JsonMapping, JsonObject
from vecd.gateway.errors import BadRequest, quoted
from vecd.gateway.request import Encoding, Priority

Schema: TypeAlias = JsonObject
"""A JSON Schema, as OpenAPI 3.1 has them."""

STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
NUMBER: Schema = {"type": "number"}


def described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


def nullable(kind: str, **more: Any) -> Schema:
    """A value of one of JSON's types, or null, which in a request is the same as absent."""
    return {"type": [kind, "null"], **more}


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def list_of(items: Schema, *, at_least: int = 0) -> Schema:
    return {"type": "array", "items": items, **({"minItems": at_least} if at_least else {})}


def record(*optional: str, **properties: Schema) -> Schema:
    """An object with these properties. All but the `optional` ones are always present."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "required": required, "properties": properties}


TIME = described(COUNT, "seconds since 1970")
USAGE = record(prompt_tokens=COUNT, total_tokens=COUNT)
TEXTS = list_of(STRING, at_least=1)
VECTOR = list_of(NUMBER)
TOKEN_IDS = list_of(COUNT, at_least=1)

T = TypeVar("T")


SEVERAL = "*"
"""The key of a field that speaks of several attributes."""


class Said(dict[str, Any]):
    """What such a field says: the value of each attribute, by its key."""


@dataclass(frozen=True, slots=True)
class Field(Generic[T]):
    """A word of a dialect for one attribute of a request. Immutable; declared once, at module level. The field that
    declares an attribute is the key to its value, whatever word a client has used."""

    name: str
    description: str
    schema: Schema
    read: Callable[[Any, str], T]
    """Takes the value, which is not null, and the name of the field. Raises BadRequest. Returns None for a value that
    says nothing, and `Said` if the key is SEVERAL."""
    is_required: bool = False
    """For the documentation; `Wanted.require` raises the error."""
    is_large: bool = False
    """May hold megabytes of texts or ids; see `vecd.gateway.api.body`."""
    key: str = ""
    """That of the attribute. Default: the name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.key or self.name)

    def called(self, name: str, whose: str) -> "Field[T]":
        """Another word for the same attribute, with the same values."""
        return replace(self, name=name, description=f"the same as `{self.name}`, by {whose} name", is_required=False)


def inside(name: str, description: str, *fields: Field[Any]) -> tuple[Field[Any], ...]:
    """The fields of an object in the body. The word for one of them is "name.field"."""
    schema = nullable("object", properties={each.name: described(each.schema, each.description) for each in fields})
    whole = Field(name, description, schema, lambda value, name: expect(dict, value, name, "an object"))
    return (whole, *(replace(each, name=f"{name}.{each.name}") for each in fields))


def value_of(word: str, body: JsonMapping) -> Any:
    """What a body, of which nothing has been read, has by the word for a field, which may be inside an object."""
    outer, _, name = word.rpartition(".")
    place = body.get(outer) if outer else body
    return place.get(name) if isinstance(place, dict) else None


_NOTHING: JsonMapping = MappingProxyType({})


class Wanted:
    """What a request wants: the values of its attributes, and the client's words for them. Null is the same as
    absent."""

    __slots__ = ("_body", "_values", "_words")

    def __init__(self, values: JsonMapping, words: "Fields | None" = None, body: JsonMapping = _NOTHING) -> None:
        """`values`: by key. `words` and `body`: what they were read from; without, they are defaults."""
        self._values = values
        self._words = words
        self._body = body

    def get(self, attribute: Field[T]) -> T | None:
        value: T | None = self._values.get(attribute.key)
        return value

    def require(self, attribute: Field[T]) -> T:
        """The value. Raises BadRequest if there is none."""
        value: T | None = self._values.get(attribute.key)
        if value is None:
            raise BadRequest(f"'{attribute.name}' is required: {attribute.description}", param=attribute.name)
        return value

    def said(self, attribute: Field[T]) -> T | None:
        """The value, if it is the client's, and not an alias' default."""
        is_said = self._words is not None and self._words.word_for(attribute.key, self._body) is not None
        return self.get(attribute) if is_said else None

    def word(self, attribute: Field[Any]) -> str:
        """The client's word for an attribute, one of several; the attribute's own name if there is none."""
        return (self._words and self._words.word_for(attribute.key, self._body)) or attribute.name

    def has(self, word: str) -> bool:
        return self._body.get(word) is not None

    def is_without(self, keys: frozenset[str]) -> bool:
        """Whether it says nothing of these attributes."""
        return keys.isdisjoint(self._values)

    def without(self, attribute: Field[Any]) -> "Wanted":
        values = {key: value for key, value in self._values.items() if key != attribute.key}
        return Wanted(values, self._words, self._body)

    def __or__(self, other: "Wanted") -> "Wanted":
        """Both; what `other` says counts more."""
        return Wanted({**self._values, **other._values}, other._words or self._words, other._body or self._body)


def agreed(said: Sequence[tuple[str, T]], instead: str = "send one of them") -> T:
    """What words say of one attribute, each with its value: the same, or of sets of allowed values those that
    are in all. Raises BadRequest, which names two words that contradict each other, and what to do `instead`."""
    if len(said) == 1:
        return said[0][1]
    for (first, value), (second, other) in combinations(said, 2):
        if not (value & other if isinstance(value, frozenset) and isinstance(other, frozenset) else value == other):
            raise BadRequest(f"'{first}' and '{second}' contradict each other: {instead}", param=second)
    values = [value for _, value in said]
    return frozenset.intersection(*values) if isinstance(values[0], frozenset) else values[0]  # type: ignore


class Fields:
    """The words of an operation. Of two fields of one name the last counts."""

    def __init__(self, *fields: Field[Any]) -> None:
        self._words = {field.name: field for field in fields}
        self._readers = {field.name: (field.key, None if field.read is _as_sent else field.read) for field in fields}
        self.words: dict[str, list[str]] = {}
        """The words for each attribute, by its key; those that speak of several by SEVERAL."""
        for field in self._words.values():
            self.words.setdefault(field.key, []).append(field.name)
        self._objects = frozenset(name.partition(".")[0] for name in self._words if "." in name)
        self.large = frozenset(field.name for field in self if field.is_large)
        self.small = frozenset(field.name for field in self if not field.is_large)

    def __iter__(self) -> Iterator[Field[Any]]:
        """Without those inside an object, which is one field."""
        return (field for name, field in self._words.items() if "." not in name)

    def read(self, body: JsonMapping) -> Wanted:
        """What a body wants. Raises BadRequest. Goes by the names in the body, of which most have two."""
        if self._objects and not self._objects.isdisjoint(body):
            body = self._flat(body)
        readers = self._readers
        values: dict[str, Any] = {}
        for name, value in body.items():
            if value is not None and (reader := readers.get(name)) is not None:
                key, read = reader
                if key is SEVERAL and read is not None:
                    for each, said in read(value, name).items():
                        if each in values:
                            return Wanted(self._agreed(body), self, body)
                        if said is not None:
                            values[each] = said
                elif key in values:
                    return Wanted(self._agreed(body), self, body)
                else:
                    values[key] = value if read is None else read(value, name)
        return Wanted(values, self, body)

    def word_for(self, key: str, body: JsonMapping) -> str | None:
        """One of a body's words for the attribute of that key; None if it has none."""
        for name in self.words.get(key, ()):
            if body.get(name) is not None:
                return name
        several = (name for name in self.words.get(SEVERAL, ()) if body.get(name) is not None)
        return next((name for name in several if key in self._words[name].read(body[name], name)), None)

    def _flat(self, body: JsonMapping) -> JsonMapping:
        """The body, and by their words the values in its objects."""
        objects = {name: self._words[name].read(body[name], name) for name in self._objects if body.get(name)}
        return {**body} | {f"{name}.{key}": value for name, each in objects.items() for key, value in each.items()}

    def _agreed(self, body: JsonMapping) -> dict[str, Any]:
        """By key, what all words of a body say together."""
        said: dict[str, list[tuple[str, Any]]] = {}
        for name, value in body.items():
            if value is not None and (field := self._words.get(name)) is not None:
                read = field.read(value, name)
                for key, each in read.items() if field.key is SEVERAL else ((field.key, read),):
                    if each is not None:
                        said.setdefault(key, []).append((name, each))
        return {key: agreed(each) for key, each in said.items()}

    def schema(self) -> Schema:
        properties = {field.name: described(field.schema, field.description) for field in self}
        required = [field.name for field in self if field.is_required]
        return {"type": "object", "properties": properties, **({"required": required} if required else {})}


# --- the usual kinds --------------------------------------------------------------------------------------------


def text(name: str, description: str, **schema: Any) -> Field[str]:
    return Field(name, description, nullable("string", **schema), read_text)


def read_text(value: Any, name: str) -> str:
    if not isinstance(value, str):  # not by `expect`: most requests have such a field
        raise BadRequest(f"'{name}' must be a string, is {json_type(value)}", param=name)
    return value


def read_texts(value: Any, name: str) -> tuple[str, ...]:
    items = enumerate(expect(list, value, name, "a list of strings"))
    return tuple([expect(str, item, f"{name}[{index}]", "a string", param=name) for index, item in items])


def flag(name: str, description: str, **schema: Any) -> Field[bool]:
    return Field(name, description, nullable("boolean", **schema), read_flag)


def read_flag(value: Any, name: str) -> bool:
    return expect(bool, value, name, "true or false")


def whole_number(name: str, description: str, *, minimum: int, key: str = "") -> Field[int]:
    def read(value: Any, name: str) -> int:
        if read_whole_number(value, name) < minimum:
            raise BadRequest(f"'{name}' must be at least {minimum}, is {value}", param=name)
        return cast(int, value)

    return Field(name, description, nullable("integer", minimum=minimum), read, key=key)


def number(name: str, description: str, *, minimum: float, **schema: Any) -> Field[float]:
    def read(value: Any, name: str) -> float:
        if type(value) not in (int, float):
            raise BadRequest(f"'{name}' must be a number, is {json_type(value)}", param=name)
        if not value >= minimum or not isfinite(value):
            raise BadRequest(f"'{name}' must be at least {minimum}, is {value}", param=name)
        return float(value)

    return Field(name, description, nullable("number", minimum=minimum, **schema), read)


def read_whole_number(value: Any, name: str) -> int:
    if type(value) is not int:
        raise BadRequest(f"'{name}' must be a whole number, is {json_type(value)}", param=name)
    return value


def choice(name: str, description: str, choices: Mapping[str, T], *, key: str = "", **schema: Any) -> Field[T]:
    """A field that must be one of the keys of `choices`; it reads as the value of that key."""
    values = {"enum": [*choices, None], **schema}
    return Field(name, description, values, lambda value, name: one_of(choices, value, name), key=key)


def one_of(choices: Mapping[str, T], value: Any, where: str, param: str = "") -> T:
    """What the value means, which is one of the `choices`. Raises BadRequest; `where` and `param` as in `expect`."""
    if isinstance(value, str) and value in choices:
        return choices[value]
    names = ", ".join(f"'{choice}'" for choice in choices)
    raise BadRequest(f"'{where}' must be one of {names}, is {given(value)}", param=param or where)


REQUEST_ID = text(
    "request_id",
    "name of the request in the response and in the log, as the header `x-request-id`, which comes first; one that is "
    "not 1 to 128 of `A-Za-z0-9._-` is replaced",
)


def anything(
    name: str, description: str, schema: Schema, *, is_required: bool = False, is_large: bool = False
) -> Field[Any]:
    """A field that reads as it was sent; its dialect checks the value."""
    return Field(name, description, schema, _as_sent, is_required, is_large)


def _as_sent(value: Any, name: str) -> Any:
    return value


def expect(kind: type[T], value: Any, where: str, what: str, *, none: str = "null", param: str = "") -> T:
    """The value, if it is of that type; never for a number, because a boolean counts as one. Raises BadRequest, which
    says that `where`, a part of the field `param`, must be `what`. `none`: the word for None, "missing" for what an
    object should have."""
    if not isinstance(value, kind):
        is_now = none if value is None else json_type(value)
        raise BadRequest(f"'{where}' must be {what}, is {is_now}", param=param or where)
    return value


def given(value: Any) -> str:
    """A wrong value, for an error message: a string is quoted, anything else is named by its type."""
    return quoted(value) if isinstance(value, str) else json_type(value)


_JSON_TYPES: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "a whole number",
    float: "a number with a fraction, or too large",
    str: "a string",
    list: "a list",
    array: "a list",  # the token ids of a large body
}


def json_type(value: Any) -> str:
    return _JSON_TYPES.get(type(value), "an object")


# --- headers that mean the same in every dialect ----------------------------------------------------------------

Headers: TypeAlias = Mapping[str, str]
"""Names in lower case."""
MAX_TIMEOUT_MS = 24 * 60 * 60 * 1000

_PRIORITIES = {priority.name.lower(): priority for priority in Priority}
_WHOLE_NUMBER = re.compile(r"[0-9]{1,8}")
_QUALITY = re.compile(r"\s*q\s*=\s*(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)\s*", re.IGNORECASE)
_MAX_MEDIA_RANGES = 32
BINARY_MEDIA_TYPES = {Encoding.BYTES: "application/octet-stream", Encoding.NPY: "application/x-npy"}
_MAY_BE_BINARY = re.compile("|".join(map(re.escape, BINARY_MEDIA_TYPES.values())), re.IGNORECASE)
_ANY_OR_JSON = ("*/*", "application/json")
"""What most clients accept."""


def parse_priority(headers: Headers) -> Priority | None:
    """Raises BadRequest."""
    name = headers.get("x-vecd-priority")
    return None if name is None else priority_named(name, "header x-vecd-priority:")


def priority_named(name: str, where: str, param: str | None = None) -> Priority:
    """Raises BadRequest with a message that begins with `where`."""
    if name not in _PRIORITIES:
        raise BadRequest(f"{where} must be 'interactive', 'normal' or 'bulk', is {quoted(name)}", param=param)
    return _PRIORITIES[name]


def priority_numbered(number: int) -> Priority:
    """The priority of a number of vLLM's and Cohere's: lower goes first, 0 is normal."""
    return Priority.NORMAL if number == 0 else Priority.INTERACTIVE if number < 0 else Priority.BULK


def parse_timeout_s(headers: Headers) -> float | None:
    """Raises BadRequest."""
    value = headers.get("x-vecd-timeout-ms")
    if value is None:
        return None
    if not _WHOLE_NUMBER.fullmatch(value) or not 1 <= int(value) <= MAX_TIMEOUT_MS:
        raise BadRequest(
            f"header x-vecd-timeout-ms: must be a whole number from 1 to {MAX_TIMEOUT_MS}, is {quoted(value)}"
        )
    return int(value) / 1000


def parse_accept(headers: Headers) -> Encoding | None:
    """The binary encoding that `Accept` prefers to JSON; None if there is none.

    The response is JSON if the client likes it as much, or accepts none of the types, instead of a 406.
    Source: RFC 9110, section 12.5.1; only the parameter q counts.
    """
    accept = headers.get("accept")
    if accept is None or accept in _ANY_OR_JSON or not _MAY_BE_BINARY.search(accept):
        return None
    accept = accept.lower()
    qualities = dict(map(_media_range, accept.split(",", _MAX_MEDIA_RANGES)[:_MAX_MEDIA_RANGES]))
    preferred, highest = None, _quality_of("application/json", qualities)
    for encoding, media_type in BINARY_MEDIA_TYPES.items():
        if (quality := _quality_of(media_type, qualities)) > highest:
            preferred, highest = encoding, quality
    return preferred


def _media_range(text: str) -> tuple[str, float]:
    """A media range and its quality: 1 if there is none, 0 if it cannot be parsed."""
    media_range, *parameters = map(str.strip, text.split(";"))
    match = _QUALITY.fullmatch(next((each for each in parameters if each.startswith("q")), "q=1"))
    return media_range, float(match[1]) if match else 0.0


def _quality_of(media_type: str, qualities: Mapping[str, float]) -> float:
    ranges = (media_type, "application/*", "*/*")
    return next((qualities[each] for each in ranges if each in qualities), 0.0)
