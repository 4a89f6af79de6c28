"""OpenAI's embeddings API: parse a request, render an answer. Pure.

Owns the shapes of `/v1/embeddings` and `/v1/models`. Null is the same as absent, unknown fields are ignored (clients
send dozens), and every refusal names the field, the limit and the value, never the content.
Source of the shapes: OpenAI's published OpenAPI document.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.errors import BadRequest
from gateway.request import EmbedRequest, Encoding


def parse_embeddings(body: bytes, *, max_inputs: int, dim: int) -> EmbedRequest:
    """Parse the body of POST /v1/embeddings. Raises BadRequest."""
    fields = _parse_object(body)
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest(f"'model' must be a string, is {_json_type(model)}", param="model")
    _check_dimensions(fields.get("dimensions"), dim)
    return EmbedRequest(
        inputs=_parse_input(fields.get("input"), max_inputs),
        encoding=_parse_encoding(fields.get("encoding_format")),
    )


def render_embeddings(fragments: Sequence[bytes], *, model: str, num_tokens: int) -> bytes:
    """The answer's body; `fragments` are the encoded rows in input order."""
    data = b",".join([b'{"object":"embedding","index":%d,"embedding":%b}' % item for item in enumerate(fragments)])
    return b'{"object":"list","data":[%b],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (
        data,
        orjson.dumps(model),
        num_tokens,
        num_tokens,
    )


def render_model(model: str, created: int) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": created, "owned_by": "vecd"}


def render_models(model: str, created: int) -> dict[str, Any]:
    return {"object": "list", "data": [render_model(model, created)]}


# --- fields -----------------------------------------------------------------------------------------------------


def _parse_object(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # The library says what and where, and quotes nothing.
        raise BadRequest(f"The body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest(f"The body must be a JSON object, is {_json_type(fields)}")
    return fields


def _parse_input(value: Any, max_inputs: int) -> list[str] | list[list[int]]:
    """A string, a list of strings, one list of token ids, or a list of such lists."""
    if isinstance(value, str):
        return [value]
    if value is None:
        raise BadRequest("'input' is required: a string, a list of strings, or token ids", param="input")
    if not isinstance(value, list):
        raise BadRequest(
            f"'input' must be a string, a list of strings, or token ids, is {_json_type(value)}",
            param="input",
        )
    if not value:
        raise BadRequest("'$.input' is invalid: the list is empty, at least 1 input is needed", param="input")
    if type(value[0]) is int:
        _check_ids(value, "input")
        return [value]
    if len(value) > max_inputs:
        raise BadRequest(
            f"'$.input' is invalid: {len(value)} inputs, at most {max_inputs} in one request", param="input"
        )
    if type(value[0]) is list:
        return _check_id_lists(value)
    return _check_texts(value)


def _check_texts(values: list[Any]) -> list[str]:
    for index, value in enumerate(values):
        if type(value) is not str:
            raise BadRequest(f"'input[{index}]' must be a string, is {_json_type(value)}", param="input")
    return values


def _check_id_lists(values: list[Any]) -> list[list[int]]:
    for index, value in enumerate(values):
        if type(value) is not list:
            raise BadRequest(f"'input[{index}]' must be a list of token ids, is {_json_type(value)}", param="input")
        if not value:
            raise BadRequest(f"'input[{index}]' is an empty list of token ids", param="input")
        _check_ids(value, f"input[{index}]")
    return values


def _check_ids(values: list[Any], name: str) -> None:
    if set(map(type, values)) == {int}:  # the loop would take ten times as long, and there may be millions
        return
    for index, value in enumerate(values):
        if type(value) is not int:
            raise BadRequest(f"'{name}[{index}]' must be a token id, is {_json_type(value)}", param="input")


def _parse_encoding(value: Any) -> Encoding:
    if value is None or value == "":
        return Encoding.FLOAT
    try:
        return Encoding(value)
    except ValueError:
        given = ascii(value[:32]) if isinstance(value, str) else _json_type(value)
        raise BadRequest(
            f"'encoding_format' must be 'float' or 'base64', is {given}", param="encoding_format"
        ) from None


def _check_dimensions(value: Any, dim: int) -> None:
    if value is None:
        return
    if type(value) is not int:
        raise BadRequest(f"'dimensions' must be a whole number, is {_json_type(value)}", param="dimensions")
    if value != dim:
        raise BadRequest(
            f"This model does not support specifying dimensions. Its vectors have {dim}, 'dimensions' is {value}",
            param="dimensions",
        )


def _json_type(value: Any) -> str:
    """What JSON calls the type of a value; never the value itself."""
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
        case list():
            return "a list"
        case _:
            return "an object"
