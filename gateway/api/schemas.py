"""JSON Schemas, as OpenAPI 3.1 has them: the usual ones, and functions that make others of them. Pure.

Used by whatever declares a field of a request or the body of a response.
"""

from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]

STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}


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


TEXTS = list_of(STRING, at_least=1)
VECTOR = list_of({"type": "number"})
TOKEN_IDS = list_of(COUNT, at_least=1)
