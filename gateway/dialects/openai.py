"""OpenAI's embeddings API: parse a request, render an answer. Pure.

Owns the shapes of `/v1/embeddings` and `/v1/models`. Null is the same as absent, unknown fields are ignored (clients
send dozens), and every refusal names the field, the limit and the value, never the content.
Source of the shapes: OpenAI's published OpenAPI document. Beyond it: `encoding_format` may be "bytes" or "npy", or left
to `Accept`, and `priority` is "interactive", "normal" or "bulk", or a number as with vLLM, lower first. The body wins
over headers: it is the more explicit.
"""

from array import array
from collections.abc import Mapping
from typing import Any

import orjson

from gateway.dialects.headers import parse_accept, parse_priority, parse_timeout_s, priority_named
from gateway.dialects.rows import render_rows
from gateway.encoding import JsonRows, Matrix
from gateway.errors import BadRequest
from gateway.http1 import Response
from gateway.request import EmbedRequest, Encoding, Priority, TokenIds

LARGE_FIELDS = frozenset({"input"})
"""Fields of POST /v1/embeddings that may hold megabytes; see `gateway.bodies`."""

SMALL_FIELDS = frozenset({"model", "encoding_format", "dimensions", "user", "priority"})
"""Its others."""


def parse_embeddings(
    fields: Mapping[str, Any], headers: Mapping[str, str], *, max_inputs: int, dim: int
) -> EmbedRequest:
    """Parse POST /v1/embeddings: the body's fields, and the headers by lower-case names. Raises BadRequest."""
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest(f"'model' must be a string, is {_json_type(model)}", param="model")
    _check_dimensions(fields.get("dimensions"), dim)
    return EmbedRequest(
        inputs=_parse_input(fields.get("input"), max_inputs),
        encoding=_parse_encoding(fields.get("encoding_format")) or parse_accept(headers) or Encoding.FLOAT,
        priority=_parse_priority(fields.get("priority"), headers),
        timeout_s=parse_timeout_s(headers),
    )


def render_embeddings(
    collector: JsonRows | Matrix, encoding: Encoding, *, model: str, num_tokens: int, num_truncated: int = 0
) -> Response:
    """The answer, with the collected rows in it as they are. `num_truncated`: inputs that were cut."""
    if isinstance(collector, Matrix):
        response = render_rows(collector, encoding, model=model, num_tokens=num_tokens)
    else:
        response = Response(200, _render_list(collector.fragments, model, num_tokens))
    if num_truncated:
        response.headers["x-vecd-truncated"] = str(num_truncated)
    return response


def _render_list(fragments: list[bytes], model: str, num_tokens: int) -> list[bytes | memoryview]:
    """In pieces, so that megabytes are never copied."""
    pieces: list[bytes | memoryview] = []
    before = b'{"object":"list","data":['
    for index, fragment in enumerate(fragments):
        pieces += (b'%b{"object":"embedding","index":%d,"embedding":' % (before, index), fragment)
        before = b"},"
    usage = (orjson.dumps(model), num_tokens, num_tokens)
    pieces.append(b'}],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % usage)
    return pieces


def render_model(model: str, created: int) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": created, "owned_by": "vecd"}


def render_models(model: str, created: int) -> dict[str, Any]:
    return {"object": "list", "data": [render_model(model, created)]}


# --- fields -----------------------------------------------------------------------------------------------------


def _parse_input(value: Any, max_inputs: int) -> list[str] | list[TokenIds]:
    """A string, a list of strings, one list of token ids, or a list of such lists."""
    if isinstance(value, str):
        return [value]
    if value is None:
        raise BadRequest("'input' is required: a string, a list of strings, or token ids", param="input")
    if isinstance(value, array):
        return _one_list(value)
    if not isinstance(value, list):
        raise BadRequest(
            f"'input' must be a string, a list of strings, or token ids, is {_json_type(value)}",
            param="input",
        )
    if not value:
        raise BadRequest("'$.input' is invalid: the list is empty, at least 1 input is needed", param="input")
    if type(value[0]) is int:
        _check_ids(value, "input")
        return _one_list(value)
    if len(value) > max_inputs:
        raise BadRequest(
            f"'$.input' is invalid: {len(value)} inputs, at most {max_inputs} in one request", param="input"
        )
    if isinstance(value[0], list | array):
        return _check_id_lists(value)
    return _check_texts(value)


def _one_list(ids: TokenIds) -> list[TokenIds]:
    return [ids]


def _check_texts(values: list[Any]) -> list[str]:
    for index, value in enumerate(values):
        if type(value) is not str:
            raise BadRequest(f"'input[{index}]' must be a string, is {_json_type(value)}", param="input")
    return values


def _check_id_lists(values: list[Any]) -> list[TokenIds]:
    for index, value in enumerate(values):
        if not isinstance(value, list | array):
            raise BadRequest(f"'input[{index}]' must be a list of token ids, is {_json_type(value)}", param="input")
        if not value:
            raise BadRequest(f"'input[{index}]' is an empty list of token ids", param="input")
        if isinstance(value, list):
            _check_ids(value, f"input[{index}]")
    return values


def _check_ids(values: list[Any], name: str) -> None:
    if set(map(type, values)) == {int}:  # the loop would take ten times as long, and there may be millions
        return
    for index, value in enumerate(values):
        if type(value) is not int:
            raise BadRequest(f"'{name}[{index}]' must be a token id, is {_json_type(value)}", param="input")


def _parse_encoding(value: Any) -> Encoding | None:
    if value is None or value == "":
        return None
    try:
        return Encoding(value)
    except ValueError:
        given = ascii(value[:32]) if isinstance(value, str) else _json_type(value)
        raise BadRequest(
            f"'encoding_format' must be 'float', 'base64', 'bytes' or 'npy', is {given}", param="encoding_format"
        ) from None


def _parse_priority(value: Any, headers: Mapping[str, str]) -> Priority | None:
    if value is None:
        return parse_priority(headers)
    if type(value) is int:
        return Priority.NORMAL if value == 0 else Priority.INTERACTIVE if value < 0 else Priority.BULK
    if not isinstance(value, str):
        raise BadRequest(f"'priority' must be a string or a whole number, is {_json_type(value)}", param="priority")
    return priority_named(value, "'priority'", param="priority")


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
