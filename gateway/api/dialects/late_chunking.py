"""Vectors of late chunks in OpenAI's shape: parses the field, renders responses. Pure, but for the clock that `created`
is read from.

Owns the field `late_chunking`, and the items of such responses: one for each chunk, so that OpenAI's clients read them.
`true` is Jina's: the inputs are chunks of one text, which is all of them one behind the other, as they were sent. An
object is for chunks of each input. Called by `vecd.gateway.api.dialects.openai`.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from vecd.gateway.api import schemas
from vecd.gateway.api.dialects import options, outputs
from vecd.gateway.api.dialects.options import RequestedForm
from vecd.gateway.api.dialects.rows import list_response, report_json
from vecd.gateway.api.fields import Field, Values, given, json_type
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.operations import Call, ParsedEmbed
from vecd.gateway.api.schemas import Schema, any_of, described, list_of
from vecd.gateway.encoding.late_rows import LateChunkRows
from vecd.gateway.types.errors import BadRequest
from vecd.gateway.types.messages import Response
from vecd.gateway.types.request import Embedded, Encoding, InputReport, LateChunking, Overflow, TokenIds

_NAME = "late_chunking"
_MAX_TOKENS, _RANGES = "max_tokens", "ranges"
_MAX_CHAR = 2**31 - 1


class _Requested(NamedTuple):
    """The value of the field, apart from the inputs. With neither: the inputs are the chunks."""

    max_tokens: int | None = None
    ranges: list[Any] | None = None


def _read(value: Any, name: str) -> _Requested | None:
    if isinstance(value, bool):
        return _Requested() if value else None
    if not isinstance(value, dict):
        raise BadRequest(f"'{name}' must be true, false or an object, is {given(value)}", param=name)
    known = {key: value[key] for key in (_MAX_TOKENS, _RANGES) if value.get(key) is not None}
    if len(value) != 1 or len(known) != 1:
        raise BadRequest(
            f"'{name}' must have either '{_MAX_TOKENS}' or '{_RANGES}' and nothing else, has {len(value)} keys, "
            f"{len(known)} of them known",
            param=name,
        )
    requested = _Requested(**known)
    if requested.ranges is not None and not isinstance(requested.ranges, list):
        raise BadRequest(f"'{name}.{_RANGES}' must be a list, is {json_type(requested.ranges)}", param=name)
    most = requested.max_tokens
    if most is not None and (type(most) is not int or most < 1):
        shown = most if type(most) is int else json_type(most)
        raise BadRequest(f"'{name}.{_MAX_TOKENS}' must be a whole number of at least 1, is {shown}", param=name)
    return requested


_RANGE: Schema = {**list_of(schemas.COUNT, at_least=2), "maxItems": 2}
_RANGES_OF_ONE = list_of(_RANGE, at_least=1)
LATE_CHUNKING = Field(
    _NAME,
    "vectors of chunks, made of one pass over the whole text, by models with mean pooling. An object: chunks of each "
    "input, of at most so many of its tokens (`max_tokens`), or with these ranges of characters (`ranges`: a list of "
    "[start, end], or for a list of inputs a list of such lists). true, which is Jina's: the inputs are chunks of one "
    "text, which is all of them one behind the other. A text that is too long is an error, unless the request has it "
    "truncated",
    any_of(
        {"type": ["boolean", "null"], "default": False},
        {
            "type": "object",
            "properties": {
                _MAX_TOKENS: schemas.POSITIVE,
                _RANGES: any_of(_RANGES_OF_ONE, list_of(_RANGES_OF_ONE, at_least=1)),
            },
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
        },
    ),
    _read,
)

# --- parse ------------------------------------------------------------------------------------------------------


def check_messages(values: Values) -> None:
    """Refuse the field for conversations, of whose texts the client knows no characters."""
    if values.get(LATE_CHUNKING) is not None:
        raise BadRequest(f"'{_NAME}' is for texts in 'input', not for 'messages'", param=_NAME)


def parse_late(
    call: Call,
    inputs: list[str] | list[TokenIds],
    kinds: frozenset[str],
    requested: RequestedForm,
    *,
    is_one: bool,
) -> ParsedEmbed:
    """The call for vectors of chunks. `is_one`: the field `input` is one text, and not a list."""
    model_info = call.model_info
    if kinds != outputs.DENSE_ALONE:
        raise BadRequest(f"'{_NAME}' is for dense vectors, not for {' and '.join(sorted(kinds))}", param=_NAME)
    _check_model(model_info)
    texts = [text for text in inputs if isinstance(text, str)]
    if len(texts) < len(inputs):
        raise BadRequest(f"'{_NAME}' is for texts; token ids have no ranges of characters", param=_NAME)
    if requested.form.encoding not in (Encoding.FLOAT, Encoding.BASE64):
        raise BadRequest(
            f"'{options.ENCODING.name}' must be 'float' or 'base64' with '{_NAME}', is "
            f"'{requested.form.encoding.value}'",
            param=options.ENCODING.name,
        )
    late = call.values.get(LATE_CHUNKING)
    assert late is not None
    chunking = _chunking(late, texts, is_one=is_one, most=model_info.max_inputs)
    if chunking.are_inputs:
        texts = ["".join(texts)]
    # What is preferred where a request leaves it open: no chunk is cut off unless the client says so.
    call = call._replace(model_info=replace(model_info, overflow=Overflow.ERROR))
    request = options.read_request(call, texts, requested)
    overflow = request.tokenizing.overflow or Overflow.ERROR
    if overflow not in (Overflow.ERROR, Overflow.TRUNCATE):
        raise BadRequest(
            f"'{_NAME}': 'overflow' must be 'error' or 'truncate' with it, is '{overflow.value}'", param=_NAME
        )
    tokenizing = request.tokenizing._replace(overflow=overflow, wants_offsets=True)
    request = request._replace(tokenizing=tokenizing, late=chunking)
    num_inputs = len(texts)
    render = partial(_render, num_inputs, model_info.model, call.request_id, are_inputs=chunking.are_inputs)
    return ParsedEmbed(request, render, is_large=True)


def _check_model(model_info: ModelInfo) -> None:
    if model_info.pools_states:
        return
    own = "; this one has more behind it, or no hidden states"
    if model_info.pooling != ("mean",):
        own = f"; this one has the pooling {' + '.join(model_info.pooling)}"
    raise BadRequest(
        f"'{_NAME}' is for models whose vectors are the mean of their tokens' last hidden states{own}",
        param=_NAME,
        can=lambda info: info.is_dense and info.pools_states,
    )


def _chunking(late: _Requested, texts: list[str], *, is_one: bool, most: int) -> LateChunking:
    """`most`: chunks that a request may name."""
    if late.max_tokens is not None:
        return LateChunking(max_tokens=late.max_tokens)
    if late.ranges is None:
        ends = accumulate(map(len, texts), initial=0)
        return LateChunking((list(pairwise(ends)),), are_inputs=True)
    lists = [late.ranges] if is_one else late.ranges
    name = f"{_NAME}.{_RANGES}"
    if len(lists) != len(texts):
        raise BadRequest(
            f"'{name}' must have a list for each of {len(texts)} inputs, has {len(lists)} items", param=_NAME
        )
    names = [name if is_one else f"{name}[{index}]" for index in range(len(lists))]
    for ranges, its_name in zip(lists, names, strict=True):
        if not isinstance(ranges, list) or not ranges:
            what = "is empty" if ranges == [] else f"is {json_type(ranges)}"
            raise BadRequest(f"'{its_name}' must be a list of at least 1 range, {what}", param=_NAME)
    num_ranges = sum(map(len, lists))
    if num_ranges > most:
        raise BadRequest(f"'{name}' has {num_ranges} ranges, at most {most} in one request (--max-inputs)", param=_NAME)
    checked = zip(lists, names, strict=True)
    return LateChunking(tuple([_check_ranges(ranges, its_name) for ranges, its_name in checked]))


def _check_ranges(ranges: list[Any], name: str) -> list[tuple[int, int]]:
    """Whether they are within the text is checked later: a very long one was not read to its end."""
    checked: list[tuple[int, int]] = []
    for index, item in enumerate(ranges):
        if not isinstance(item, list) or len(item) != 2 or any(type(char) is not int for char in item):
            raise BadRequest(f"'{name}[{index}]' must be [start, end], two whole numbers", param=_NAME)
        start, end = item
        if not 0 <= start < end <= _MAX_CHAR:
            raise BadRequest(
                f"'{name}[{index}]' must begin at 0 or later and end behind its beginning, at {_MAX_CHAR} at most, is "
                f"[{start}, {end}]",
                param=_NAME,
            )
        checked.append((start, end))
    return checked


# --- render -----------------------------------------------------------------------------------------------------


def _render(num_inputs: int, model: str, request_id: str, embedded: Embedded, *, are_inputs: bool) -> Response:
    [collector] = embedded.collectors
    assert isinstance(collector, LateChunkRows)
    items = _items(num_inputs, collector, embedded.reports, are_inputs=are_inputs)
    return list_response("embd", "list", model, request_id, items, embedded)


def _items(
    num_inputs: int, collector: LateChunkRows, reports: Sequence[InputReport], *, are_inputs: bool
) -> Iterator[Iterable[bytes]]:
    number = 0
    for index in range(num_inputs):
        chunks = collector.chunks[index]
        report = b',"report":%b' % report_json(reports[index]) if reports else b""
        items = zip(chunks.ranges.tolist(), chunks.is_truncated.tolist(), collector.fragments(index), strict=True)
        for (start, end), is_truncated, fragment in items:
            where = b"" if are_inputs else b',"input":%d,"start":%d,"end":%d' % (index, start, end)
            truncated = b',"truncated":true' if is_truncated else b""
            head = b'{"object":"embedding","index":%d%b%b,"embedding":' % (number, where, truncated)
            yield head, b"null" if fragment is None else fragment, report, b"}"
            number += 1


def response_schema(schema: Schema) -> Schema:
    """The schema of a response whose items may be chunks. `schema`: of one whose items are inputs."""
    schema = copy.deepcopy(schema)
    properties = schema["properties"]["data"]["items"]["properties"]
    properties["embedding"] = any_of(properties["embedding"], {"type": "null"})
    properties |= {
        "input": described(schemas.COUNT, f"of a chunk (`{_NAME}`): whose chunk it is"),
        "start": described(schemas.COUNT, "where the chunk begins, in characters of its input"),
        "end": described(schemas.COUNT, "where it ends"),
        "truncated": described({"const": True}, "tokens of the chunk were cut off; all, if its `embedding` is null"),
    }
    return schema
