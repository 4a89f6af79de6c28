"""The fields of a request's body as data: the values that each may have, its reader, and its documentation.

Every dialect declares its fields with these types, and the OpenAPI document is written from the same declarations. Null
is the same as absent. Unknown fields are ignored, because clients send dozens. Every error names the field, the limit
and the value, but never quotes a text. Pure.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

from vecd.base.files import JsonMapping, JsonObject
from vecd.gateway.errors import BadRequest, quoted

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


@dataclass(frozen=True, slots=True)
class Field(Generic[T]):
    """One field. Immutable; declared once, at module level, and used as the key to its value."""

    name: str
    description: str
    schema: Schema
    read: Callable[[Any, str], T]
    """Takes the value, which is not null, and the name of the field. Raises BadRequest."""
    is_required: bool = False
    """For the documentation; `Values.require` raises the error."""
    is_large: bool = False
    """May hold megabytes of texts or ids; see `vecd.gateway.api.body`."""


class Values:
    """Those of a body's fields, without absent and null ones."""

    __slots__ = ("_values",)

    def __init__(self, values: JsonMapping) -> None:
        self._values = values

    def get(self, field: Field[T]) -> T | None:
        value: T | None = self._values.get(field.name)
        return value

    def has_any(self, names: frozenset[str]) -> bool:
        """Quicker than one look-up for each."""
        return not names.isdisjoint(self._values)

    def changed(self, changes: JsonMapping) -> "Values":
        """The same, with other values as their fields read them; without those that are None."""
        merged = {**self._values, **changes}
        return Values({name: value for name, value in merged.items() if value is not None})

    def require(self, field: Field[T]) -> T:
        """The value. Raises BadRequest if there is none."""
        value: T | None = self._values.get(field.name)
        if value is None:
            raise BadRequest(f"'{field.name}' is required: {field.description}", param=field.name)
        return value


class Given(Protocol):
    """The values of fields, wherever they stand in a body."""

    def get(self, field: Field[T]) -> T | None: ...


def agreed(values: Given, *synonyms: Field[T]) -> tuple[T, str] | None:
    """The value of fields for one option, and the name of the first that has it. Raises BadRequest if two differ."""
    found: tuple[T, str] | None = None
    for field in synonyms:
        value = values.get(field)
        if value is None:
            continue
        if found is None:
            found = value, field.name
        elif value != found[0]:
            raise contradiction(found[1], field.name)
    return found


class Fields:
    def __init__(self, *fields: Field[Any]) -> None:
        self._by_name = {field.name: field for field in fields}
        self.large = frozenset(field.name for field in fields if field.is_large)
        self.small = frozenset(field.name for field in fields if not field.is_large)

    def __iter__(self) -> Iterator[Field[Any]]:
        return iter(self._by_name.values())

    def read(self, body: JsonMapping) -> Values:
        """Read the fields of a body. Raises BadRequest. Goes by the names in the body, of which most have two."""
        values: dict[str, Any] = {}
        for name, value in body.items():
            if value is not None and (field := self._by_name.get(name)) is not None:
                values[name] = field.read(value, name)
        return Values(values)

    def schema(self) -> Schema:
        """The schema of the whole body."""
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


def whole_number(name: str, description: str, *, minimum: int) -> Field[int]:
    def read(value: Any, name: str) -> int:
        if read_whole_number(value, name) < minimum:
            raise BadRequest(f"'{name}' must be at least {minimum}, is {value}", param=name)
        return cast(int, value)

    return Field(name, description, nullable("integer", minimum=minimum), read)


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


def choice(name: str, description: str, choices: Mapping[str, T], **schema: Any) -> Field[T]:
    """A field that must be one of the keys of `choices`; it reads as the value of that key."""

    def read(value: Any, name: str) -> T:
        if isinstance(value, str) and value in choices:
            return choices[value]
        names = ", ".join(f"'{choice}'" for choice in choices)
        raise BadRequest(f"'{name}' must be one of {names}, is {given(value)}", param=name)

    return Field(name, description, {"enum": [*choices, None], **schema}, read)


REQUEST_ID = text(
    "request_id",
    "name of the request in the response and in the log, as the header `x-request-id`, which comes first; one that is "
    "not 1 to 128 of `A-Za-z0-9._-` is replaced",
)


def anything(
    name: str, description: str, schema: Schema, *, is_required: bool = False, is_large: bool = False
) -> Field[Any]:
    """A field that reads as it was sent; its dialect checks the value."""
    return Field(name, description, schema, lambda value, _: value, is_required, is_large)


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


def contradiction(first: str, second: str) -> BadRequest:
    """The error for two fields that mean the same and have different values."""
    return BadRequest(f"'{first}' and '{second}' contradict each other: send one of them", param=second)


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
    """The name of a value's type in JSON, for an error message."""
    return _JSON_TYPES.get(type(value), "an object")
