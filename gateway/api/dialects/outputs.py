"""Embeddings in OpenAI's shape that are not, or not only, one dense vector: parses requests, renders responses. Pure,
but for the clock that `created` is read from.

Owns the field `output`, and the items of such responses. An item has `embedding` if a dense vector was requested,
`sparse` if a sparse one was, and `embeddings`, by Jina's name, if a vector for each token was. A model that makes
several of them makes those of one request in one pass. A model without dense vectors has no default, because a client
that does not name its kind of vectors expects `embedding`. Called by `vecd.gateway.api.dialects.openai`.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from vecd.gateway.api import schemas
from vecd.gateway.api.dialects import options, sparse
from vecd.gateway.api.dialects.labels import matrices_of, without_chunks
from vecd.gateway.api.dialects.options import RETURN_MULTIVECTOR, RequestedForm
from vecd.gateway.api.dialects.rows import item_pieces, list_response
from vecd.gateway.api.fields import Field, Values, contradiction, given
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.operations import Call, ParsedEmbed
from vecd.gateway.api.schemas import Schema, any_of, described, list_of
from vecd.gateway.encoding.forms import WHOLE
from vecd.gateway.encoding.hybrid import HybridRows
from vecd.gateway.encoding.matrices import matrix_pieces, vector_json
from vecd.gateway.encoding.quantization import normalize
from vecd.gateway.types.errors import BadRequest
from vecd.gateway.types.messages import Response
from vecd.gateway.types.request import Dtype, Embedded, Encoding, TokenIds
from vecd.shm.output import Output

_DENSE, _SPARSE, _MULTI_VECTOR = _KINDS = ("dense", "sparse", "multi-vector")
"""As in `vecd.shm.heads.CAPABILITIES`."""


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
    missing = [kind for kind in _KINDS if kind in kinds and kind not in model_info.capabilities]
    if missing:
        name = RETURN_MULTIVECTOR.name if multi and values.get(OUTPUT) is None else OUTPUT.name
        own = [kind for kind in _KINDS if kind in model_info.capabilities]
        raise BadRequest(
            f"'{name}': the model served here makes no {missing[0]} vectors; set '{OUTPUT.name}' to one of its own: "
            f"{', '.join(own)}",
            param=name,
            can=lambda info: kinds.issubset(info.capabilities),
        )
    return kinds


class _Requested(NamedTuple):
    kinds: frozenset[str]
    requested: RequestedForm
    as_map: bool
    has_tokens: bool
    num_inputs: int
    normalizes: bool
    """Vectors of tokens are brought to length 1; those of most models are."""
    normalizes_dense: bool


def parse_outputs(
    call: Call, inputs: list[str] | list[TokenIds], kinds: frozenset[str], requested: RequestedForm
) -> ParsedEmbed:
    """The call for vectors of those kinds, which the model has, and which are not the dense alone."""
    values, model_info = call.values, call.model_info
    _check_fields(values, kinds, requested, model_info)
    request = options.read_request(call, inputs, requested, output=_output_of(kinds, model_info))
    request = request._replace(
        sparse=sparse.read_options(values), tokenizing=without_chunks(request.tokenizing, model_info)
    )
    has_tokens, as_map = values.get(sparse.RETURN_TOKENS) is True, values.get(sparse.FORMAT) == "map"
    normalizes_dense = not model_info.is_normalized and options.read_normalize(values) is True
    what = _Requested(kinds, requested, as_map, has_tokens, len(inputs), request.normalize, normalizes_dense)
    is_large = _MULTI_VECTOR in kinds or sparse.is_large(inputs)
    return ParsedEmbed(request, partial(_render, what, model_info, call.request_id), is_large)


def _output_of(kinds: frozenset[str], model_info: ModelInfo) -> Output:
    if len(kinds) > 1:
        return Output.HYBRID
    return Output.TOKEN_VECTORS if _MULTI_VECTOR in kinds else sparse.output_of(model_info)


def _check_fields(values: Values, kinds: frozenset[str], requested: RequestedForm, model_info: ModelInfo) -> None:
    """Refuse the options that only a dense vector has, or one that is asked for alone."""
    normalizes = options.read_normalize(values)
    if _DENSE in kinds and model_info.is_normalized and normalizes is False:
        name = next(field.name for field in options.NORMALIZE_FIELDS if values.get(field) is not None)
        raise BadRequest(
            f"'{name}': beside vectors of other kinds a dense vector has length 1, as the model gives it", param=name
        )
    if _DENSE in kinds and not (model_info.is_normalized or normalizes) and requested.form.dtype in WHOLE:
        raise BadRequest(
            f"'{options.OUTPUT_DTYPE.name}': {requested.form.dtype.value} is for vectors of length 1, which the dense "
            f"one is not, unless the request has '{options.NORMALIZE.name}' true",
            param=options.OUTPUT_DTYPE.name,
        )
    for field in options.DIMENSION_FIELDS:
        dimensions = values.get(field)
        if dimensions is not None and (kinds != {_MULTI_VECTOR} or dimensions != model_info.token_dim):
            raise BadRequest(
                f"'{field.name}' is for dense vectors; each vector of a token has {model_info.token_dim} dimensions",
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


# --- the documentation ------------------------------------------------------------------------------------------


def response_schema(dense: Schema) -> Schema:
    """The schema of a response with any of the kinds. `dense`: of one with dense vectors alone."""
    schema = copy.deepcopy(dense)
    item = schema["properties"]["data"]["items"]
    rows = any_of(list_of(schemas.VECTOR), {"type": "string", "contentEncoding": "base64"})
    item["properties"] |= {"sparse": sparse.VECTOR, "embeddings": described(rows, "a vector for each token")}
    item["required"] = [name for name in item["required"] if name != "embedding"]
    return schema


# --- render -----------------------------------------------------------------------------------------------------


def _render(what: _Requested, model_info: ModelInfo, request_id: str, embedded: Embedded) -> Response:
    writers = _writers(what, model_info, embedded)
    items = (
        item_pieces(b"embedding", index, [(key, write(index)) for key, write in writers], embedded)
        for index in range(what.num_inputs)
    )
    return list_response("embd", "list", model_info.model, request_id, items, embedded)


_Writer = tuple[bytes, Callable[[int], Iterable[bytes]]]
"""The key of a vector in an item, and what makes the JSON of input i, in pieces."""


def _writers(what: _Requested, model_info: ModelInfo, embedded: Embedded) -> list[_Writer]:
    [collector] = embedded.collectors
    form = what.requested.form
    writers: list[_Writer] = []
    if isinstance(collector, HybridRows):
        vectors, matrices = collector.sparse.vectors, collector.tokens.matrices
    elif _SPARSE in what.kinds:
        vectors, matrices = sparse.vectors_of(embedded), []
    else:
        vectors, matrices = [], matrices_of(embedded)
    if _DENSE in what.kinds:
        assert isinstance(collector, HybridRows)
        dense, dense_steps = collector.dense, [normalize] if what.normalizes_dense else []
        writers.append((b"embedding", lambda index: (vector_json(dense[index], form, dense_steps),)))
    if _SPARSE in what.kinds:
        vocabulary = model_info.vocabulary
        write = partial(sparse.vector_pieces, vocabulary=vocabulary, as_map=what.as_map, has_tokens=what.has_tokens)
        writers.append((b"sparse", lambda index: write(vectors[index])))
    if _MULTI_VECTOR in what.kinds:
        steps = [normalize] if what.normalizes else []
        writers.append((b"embeddings", lambda index: matrix_pieces(matrices[index], form, steps)))
    return writers
