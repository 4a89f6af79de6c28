"""Embeddings in OpenAI's shape that are not, or not only, one dense vector for each input: parses requests, renders
responses. Pure, but for the clock.

Owns the fields `output` and `late_chunking`, and the items of such responses. An item has `embedding` if a dense vector
was requested, `sparse` if a sparse one was, and `embeddings`, by Jina's name, if a vector for each token was. A model
that makes several of them makes those of one request in one pass. A model without dense vectors has no default, because
a client that does not name its kind of vectors expects `embedding`. Late chunks have an item each, so that OpenAI's
clients read them.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from vecd.gateway.api import fields
from vecd.gateway.api.answer import item_pieces, list_response, report_json
from vecd.gateway.api.fields import (
    Field,
    Schema,
    Values,
    any_of,
    contradiction,
    described,
    given,
    json_type,
    list_of,
)
from vecd.gateway.api.operation import Call, ParsedEmbed
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects import options, sparse
from vecd.gateway.dialects.inputs import TextsOrIds
from vecd.gateway.dialects.labels import matrices_of, without_chunks
from vecd.gateway.dialects.options import RETURN_MULTIVECTOR, RequestedForm
from vecd.gateway.encoding.forms import WHOLE, HybridRows, normalize
from vecd.gateway.encoding.fragments import matrix_pieces, vector_json
from vecd.gateway.encoding.result import LateChunkRows
from vecd.gateway.errors import BadRequest
from vecd.gateway.request import Dtype, Embedded, Encoding, InputReport, LateChunking, Overflow, Response
from vecd.shm.output import Output

_DENSE, _SPARSE, _MULTI_VECTOR = _KINDS = ("dense", "sparse", "multi-vector")
"""As in `vecd.model.steps.CAPABILITIES`."""


def _read_output(value: Any, name: str) -> frozenset[str]:
    items = value if isinstance(value, list) else [value]
    if not items:
        raise BadRequest(f"'{name}' must have one kind of vectors at least, is an empty list", param=name)
    for index, item in enumerate(items):
        if not isinstance(item, str) or item not in _KINDS:
            where = f"{name}[{index}]" if isinstance(value, list) else name
            known = ", ".join(f"'{kind}'" for kind in _KINDS)
            raise BadRequest(f"'{where}' must be one of {known}, is {given(item)}", param=name)
    return frozenset(items)


OUTPUT = Field(
    "output",
    "the kind of vectors, or a list of kinds, of which the model has those in `capabilities` of GET /info. Default: "
    "dense; a model without dense vectors has no default",
    any_of({"enum": [*_KINDS, None]}, list_of({"enum": [*_KINDS]}, at_least=1)),
    _read_output,
)
FIELDS: tuple[Field[Any], ...] = (OUTPUT, *sparse.FIELDS)
NAMES = frozenset(field.name for field in (*FIELDS, RETURN_MULTIVECTOR))
NEEDS = _KINDS
"""As in `Operation.needs`."""
DENSE_ALONE = frozenset((_DENSE,))


def asks_for(body: Mapping[str, Any]) -> tuple[str, ...]:
    """As `Operation.asks_for`."""
    kinds = body.get(OUTPUT.name, _MULTI_VECTOR if body.get(RETURN_MULTIVECTOR.name) is True else None)
    return tuple(kind for kind in _KINDS if kind == kinds or (isinstance(kinds, list) and kind in kinds))


def requested_kinds(values: Values, model_info: ModelInfo) -> frozenset[str]:
    """The kinds of vectors that a request is for. Raises BadRequest for those that the model has not, and for no kind
    if the model has no dense vectors."""
    kinds, multi = values.get(OUTPUT), values.get(RETURN_MULTIVECTOR)
    if kinds is not None and multi is not None and multi is not (_MULTI_VECTOR in kinds):
        raise contradiction(OUTPUT.name, RETURN_MULTIVECTOR.name)
    if kinds is None:
        kinds = frozenset((_MULTI_VECTOR if multi else _DENSE,))
    missing = [kind for kind in _KINDS if kind in kinds and kind not in model_info.card.capabilities]
    if missing:
        name = RETURN_MULTIVECTOR.name if multi and values.get(OUTPUT) is None else OUTPUT.name
        own = [kind for kind in _KINDS if kind in model_info.card.capabilities]
        raise BadRequest(
            f"'{name}': the model served here makes no {missing[0]} vectors; set '{OUTPUT.name}' to one of its own: "
            f"{', '.join(own)}",
            param=name,
            can=lambda info: kinds.issubset(info.card.capabilities),
        )
    return kinds


def parse_outputs(call: Call, inputs: TextsOrIds, kinds: frozenset[str], requested: RequestedForm) -> ParsedEmbed:
    """The call for vectors of those kinds, which the model has, and which are not the dense alone."""
    values, model_info = call.values, call.model_info
    _check_fields(values, kinds, requested, model_info)
    if len(kinds) > 1:
        output = Output.HYBRID
    else:
        output = Output.TOKEN_VECTORS if _MULTI_VECTOR in kinds else sparse.output_of(model_info)
    request = options.read_request(call, inputs, requested, output=output)
    request = request._replace(
        sparse=sparse.read_options(values), tokenizing=without_chunks(request.tokenizing, model_info)
    )
    normalizes_dense = not model_info.card.is_normalized and options.read_normalize(values) is True
    write_sparse = partial(
        sparse.vector_pieces,
        vocabulary=model_info.vocabulary,
        as_map=values.get(sparse.FORMAT) == "map",
        has_tokens=values.get(sparse.RETURN_TOKENS) is True,
    )
    form, num_inputs, normalizes, request_id = requested.form, len(inputs), request.normalize, call.request_id

    def writers(embedded: Embedded) -> Iterator[_Writer]:
        [collector] = embedded.collectors
        if isinstance(collector, HybridRows):
            vectors, matrices = collector.sparse.vectors, collector.tokens.matrices
        elif _SPARSE in kinds:
            vectors, matrices = sparse.vectors_of(embedded), []
        else:
            vectors, matrices = [], matrices_of(embedded)
        if _DENSE in kinds:
            assert isinstance(collector, HybridRows)
            dense, dense_steps = collector.dense, [normalize] if normalizes_dense else []
            yield b"embedding", lambda index: (vector_json(dense[index], form, dense_steps),)
        if _SPARSE in kinds:
            yield b"sparse", lambda index: write_sparse(vectors[index])
        if _MULTI_VECTOR in kinds:
            steps = [normalize] if normalizes else []
            yield b"embeddings", lambda index: matrix_pieces(matrices[index], form, steps)

    def render(embedded: Embedded) -> Response:
        each = list(writers(embedded))
        items = (
            item_pieces(b"embedding", index, [(key, write(index)) for key, write in each], embedded)
            for index in range(num_inputs)
        )
        return list_response("embd", "list", model_info.model, request_id, items, embedded)

    return ParsedEmbed(request, render, _MULTI_VECTOR in kinds or sparse.is_large(inputs))


_Writer = tuple[bytes, Callable[[int], Iterable[bytes]]]
"""The key of a vector in an item, and what makes the JSON of input i, in pieces."""


def _check_fields(values: Values, kinds: frozenset[str], requested: RequestedForm, model_info: ModelInfo) -> None:
    """Refuse the options that only a dense vector has, or one that is asked for alone."""
    normalizes = options.read_normalize(values)
    if _DENSE in kinds and model_info.card.is_normalized and normalizes is False:
        name = next(field.name for field in options.NORMALIZE_FIELDS if values.get(field) is not None)
        raise BadRequest(
            f"'{name}': beside vectors of other kinds a dense vector has length 1, as the model gives it", param=name
        )
    if _DENSE in kinds and not (model_info.card.is_normalized or normalizes) and requested.form.dtype in WHOLE:
        raise BadRequest(
            f"'{options.OUTPUT_DTYPE.name}': {requested.form.dtype.value} is for vectors of length 1, which the dense "
            f"one is not, unless the request has '{options.NORMALIZE.name}' true",
            param=options.OUTPUT_DTYPE.name,
        )
    for field in options.DIMENSION_FIELDS:
        dimensions = values.get(field)
        if dimensions is not None and (kinds != {_MULTI_VECTOR} or dimensions != model_info.card.token_dim):
            raise BadRequest(
                f"'{field.name}' is for dense vectors; each vector of a token has {model_info.card.token_dim} "
                "dimensions",
                param=field.name,
            )
    if _MULTI_VECTOR not in kinds and _DENSE not in kinds and requested.form.dtype is not Dtype.FLOAT32:
        raise BadRequest(
            f"'{options.OUTPUT_DTYPE.name}': the weights of sparse vectors are float32 alone",
            param=options.OUTPUT_DTYPE.name,
        )
    if requested.form.encoding not in (Encoding.FLOAT, Encoding.BASE64):
        name = options.ENCODING.name
        what = requested.form.encoding.value
        raise BadRequest(
            f"'{name}' must be 'float' or 'base64' for {' and '.join(sorted(kinds))} vectors, is '{what}'", param=name
        )


def response_schema(dense: Schema) -> Schema:
    """The schema of a response with any of the kinds. `dense`: of one with dense vectors alone."""
    schema = copy.deepcopy(dense)
    item = schema["properties"]["data"]["items"]
    rows = any_of(list_of(fields.VECTOR), {"type": "string", "contentEncoding": "base64"})
    item["properties"] |= {"sparse": sparse.VECTOR, "embeddings": described(rows, "a vector for each token")}
    item["required"] = [name for name in item["required"] if name != "embedding"]
    return schema


# --- late chunks ------------------------------------------------------------------------------------------------

_NAME = "late_chunking"
_MAX_TOKENS, _RANGES = "max_tokens", "ranges"
_MAX_CHAR = 2**31 - 1


class _Requested(NamedTuple):
    """The value of the field, apart from the inputs. With neither: the inputs are the chunks."""

    max_tokens: int | None = None
    ranges: list[Any] | None = None


def _read_chunking(value: Any, name: str) -> _Requested | None:
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
    if requested.ranges is not None:
        fields.expect(list, requested.ranges, f"{name}.{_RANGES}", "a list", param=name)
    most = requested.max_tokens
    if most is not None and (type(most) is not int or most < 1):
        shown = most if type(most) is int else json_type(most)
        raise BadRequest(f"'{name}.{_MAX_TOKENS}' must be a whole number of at least 1, is {shown}", param=name)
    return requested


_RANGE: Schema = {**list_of(fields.COUNT, at_least=2), "maxItems": 2}
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
                _MAX_TOKENS: fields.POSITIVE,
                _RANGES: any_of(_RANGES_OF_ONE, list_of(_RANGES_OF_ONE, at_least=1)),
            },
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
        },
    ),
    _read_chunking,
)


def check_messages(values: Values) -> None:
    """Refuse the field for conversations, of whose texts the client knows no characters."""
    if values.get(LATE_CHUNKING) is not None:
        raise BadRequest(f"'{_NAME}' is for texts in 'input', not for 'messages'", param=_NAME)


def parse_late(
    call: Call,
    inputs: TextsOrIds,
    kinds: frozenset[str],
    requested: RequestedForm,
    *,
    is_one: bool,
) -> ParsedEmbed:
    """The call for vectors of chunks. `is_one`: the field `input` is one text, and not a list."""
    model_info = call.model_info
    if kinds != DENSE_ALONE:
        raise BadRequest(f"'{_NAME}' is for dense vectors, not for {' and '.join(sorted(kinds))}", param=_NAME)
    _check_pooling(model_info)
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
    chunking = _chunking(late, texts, is_one=is_one, most=model_info.config.max_inputs)
    if chunking.are_inputs:
        texts = ["".join(texts)]
    # What is preferred where a request leaves it open: no chunk is cut off unless the client says so.
    preferring = copy.copy(model_info)
    preferring.overflow = Overflow.ERROR
    request = options.read_request(call._replace(model_info=preferring), texts, requested)
    overflow = request.tokenizing.overflow or Overflow.ERROR
    if overflow not in (Overflow.ERROR, Overflow.TRUNCATE):
        raise BadRequest(
            f"'{_NAME}': 'overflow' must be 'error' or 'truncate' with it, is '{overflow.value}'", param=_NAME
        )
    tokenizing = request.tokenizing._replace(overflow=overflow, wants_offsets=True)
    request = request._replace(tokenizing=tokenizing, late=chunking)
    render = partial(_render_chunks, len(texts), model_info.model, call.request_id, are_inputs=chunking.are_inputs)
    return ParsedEmbed(request, render, is_large=True)


def _check_pooling(model_info: ModelInfo) -> None:
    if model_info.card.pools_states:
        return
    own = "; this one has more behind it, or no hidden states"
    if model_info.card.pooling != ("mean",):
        own = f"; this one has the pooling {' + '.join(model_info.card.pooling)}"
    raise BadRequest(
        f"'{_NAME}' is for models whose vectors are the mean of their tokens' last hidden states{own}",
        param=_NAME,
        can=lambda info: info.is_dense and info.card.pools_states,
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
    return LateChunking(tuple(map(_check_ranges, lists, names)))


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


def _render_chunks(num_inputs: int, model: str, request_id: str, embedded: Embedded, *, are_inputs: bool) -> Response:
    [collector] = embedded.collectors
    assert isinstance(collector, LateChunkRows)
    items = _chunk_items(num_inputs, collector, embedded.reports, are_inputs=are_inputs)
    return list_response("embd", "list", model, request_id, items, embedded)


def _chunk_items(
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


def chunks_schema(schema: Schema) -> Schema:
    """The schema of a response whose items may be chunks. `schema`: of one whose items are inputs."""
    schema = copy.deepcopy(schema)
    properties = schema["properties"]["data"]["items"]["properties"]
    properties["embedding"] = any_of(properties["embedding"], {"type": "null"})
    properties |= {
        "input": described(fields.COUNT, f"of a chunk (`{_NAME}`): whose chunk it is"),
        "start": described(fields.COUNT, "where the chunk begins, in characters of its input"),
        "end": described(fields.COUNT, "where it ends"),
        "truncated": described({"const": True}, "tokens of the chunk were cut off; all, if its `embedding` is null"),
    }
    return schema
