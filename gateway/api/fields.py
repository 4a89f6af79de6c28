"""The fields of a request's body as data: the values that each may have, its reader, and its documentation.

Owns `Field` and `Fields`, and the readers of the usual kinds of values. Every dialect declares its fields with them,
and `vecd.gateway.api.openapi` writes the document from the same declarations. Null is the same as absent. Unknown
fields are ignored, because clients send dozens. Every error names the field, the limit and the value, but never quotes
a text. Pure.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from vecd.gateway.api.schemas import Schema, described, nullable
from vecd.gateway.types.errors import BadRequest
from vecd.gateway.types.quoting import quoted

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
    """May hold megabytes of texts or ids; see `vecd.gateway.api.bodies`."""


class Values:
    """The values of a body's fields, without absent and null ones."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, field: Field[T]) -> T | None:
        value: T | None = self._values.get(field.name)
        return value

    def has_any(self, names: frozenset[str]) -> bool:
        """Whether any field of these names has a value; quicker than one look-up for each."""
        return not names.isdisjoint(self._values)

    def changed(self, changes: Mapping[str, Any]) -> "Values":
        """The same, with other values as their fields read them; without those that are None."""
        merged = {**self._values, **changes}
        return Values({name: value for name, value in merged.items() if value is not None})

    def require(self, field: Field[T]) -> T:
        """The value. Raises BadRequest if there is none."""
        value: T | None = self._values.get(field.name)
        if value is None:
            raise BadRequest(f"'{field.name}' is required: {field.description}", param=field.name)
        return value


class Fields:
    """The fields of one operation."""

    def __init__(self, *fields: Field[Any]) -> None:
        self._by_name = {field.name: field for field in fields}
        self.large = frozenset(field.name for field in fields if field.is_large)
        self.small = frozenset(field.name for field in fields if not field.is_large)

    def __iter__(self) -> Iterator[Field[Any]]:
        return iter(self._by_name.values())

    def read(self, body: Mapping[str, Any]) -> Values:
        """Read the fields of a body. Raises BadRequest. Goes by the names in the body, of which most have two."""
        values: dict[str, Any] = {}
        for name, value in body.items():
            if value is not None and (field := self._by_name.get(name)) is not None:
                values[name] = field.read(value, name)
        return Values(values)

    def schema(self) -> Schema:
        """The schema of the whole body."""
        properties = {field.name: described(field.schema, field.description) for field in self._by_name.values()}
        required = [field.name for field in self._by_name.values() if field.is_required]
        return {"type": "object", "properties": properties, **({"required": required} if required else {})}


# --- the usual kinds --------------------------------------------------------------------------------------------


def text(name: str, description: str, **schema: Any) -> Field[str]:
    return Field(name, description, nullable("string", **schema), read_text)


def read_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"'{name}' must be a string, is {json_type(value)}", param=name)
    return value


def read_texts(value: Any, name: str) -> tuple[str, ...]:
    for index, item in enumerate(expect(list, value, name, "a list of strings")):
        if not isinstance(item, str):
            raise BadRequest(f"'{name}[{index}]' must be a string, is {json_type(item)}", param=name)
    return tuple(value)


def flag(name: str, description: str, **schema: Any) -> Field[bool]:
    return Field(name, description, nullable("boolean", **schema), read_flag)


def read_flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"'{name}' must be true or false, is {json_type(value)}", param=name)
    return value


def whole_number(name: str, description: str, *, minimum: int) -> Field[int]:
    def read(value: Any, name: str) -> int:
        if read_whole_number(value, name) < minimum:
            raise BadRequest(f"'{name}' must be at least {minimum}, is {value}", param=name)
        return cast(int, value)

    return Field(name, description, nullable("integer", minimum=minimum), read)


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


def expect(kind: type[T], value: Any, where: str, what: str, *, none: str = "null") -> T:
    """The value, if it is of that type; never for a number, because a boolean counts as one.

    Raises BadRequest, which says that `where` must be `what`. `none`: the word for None, "missing" for what an object
    should have.
    """
    if not isinstance(value, kind):
        is_now = none if value is None else json_type(value)
        raise BadRequest(f"'{where}' must be {what}, is {is_now}", param=where)
    return value


def given(value: Any) -> str:
    """A wrong value, for an error message: a string is quoted, anything else is named by its type."""
    return quoted(value) if isinstance(value, str) else json_type(value)


def contradiction(first: str, second: str) -> BadRequest:
    """The error for two fields that mean the same and have different values."""
    return BadRequest(f"'{first}' and '{second}' contradict each other: send one of them", param=second)


def json_type(value: Any) -> str:
    """The name of a value's type in JSON, for an error message."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "a whole number"
        case float():
            return "a number with a fraction, or too large"
        case str():
            return "a string"
        case list() | array():  # the token ids of a large body
            return "a list"
        case _:
            return "an object"
