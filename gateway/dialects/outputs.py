"""Embeddings in OpenAI's shape that are not, or not only, one dense vector for each input: parses requests, renders
responses. Pure, but for the clock.

Owns the fields `output` and `late_chunking`, and the items of such responses. An item has `embedding` if a dense vector
was requested, `sparse` if a sparse one was, and `embeddings`, by Jina's name, if a vector for each token was. A model
that makes several of them makes those of one request in one pass. A model without dense vectors has no default, because
a client that does not name its kind of vectors expects `embedding`. Late chunks have an item each, so that OpenAI's
clients read them.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, combinations, pairwise
from typing import Any, TypeAlias

from vecd.gateway.api import fields
from vecd.gateway.api.answer import item_pieces, list_response, report_json
from vecd.gateway.api.fields import (
    NUMBER,
    Field,
    Schema,
    Wanted,
    any_of,
    described,
    given,
    json_type,
    list_of,
    nullable,
    record,
)
from vecd.gateway.api.operation import Call, ParsedEmbed
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects.ask import (
    DIMENSIONS,
    DTYPE,
    ENCODING,
    MAX_ACTIVE_DIMS,
    MESSAGES,
    MIN_WEIGHT,
    NORMALIZE,
    TOP_K,
    TextsOrIds,
    forms_of,
    resolve,
)
from vecd.gateway.encoding.forms import WHOLE, normalize
from vecd.gateway.encoding.result import list_pieces, matrix_pieces, runs_of, vector_json
from vecd.gateway.encoding.sparse import SparseVector
from vecd.gateway.encoding.streams import Hybrid
from vecd.gateway.errors import BadRequest, WrongModel
from vecd.gateway.request import (
    Dtype,
    Embedded,
    Encoding,
    Form,
    Inputs,
    LateChunking,
    Overflow,
    Response,
)
from vecd.gateway.tokenization.tokenizer import TokenVocabulary
from vecd.shm.output import Output

_DENSE, _SPARSE, _MULTI_VECTOR = _KINDS = ("dense", "sparse", "multi-vector")
"""As in `vecd.model.steps.CAPABILITIES`."""
NEEDS = _KINDS
"""As in `Operation.needs`."""
Kinds: TypeAlias = frozenset[str]
_BY_NAME = {kind: kind for kind in _KINDS}
DENSE_ALONE: Kinds = frozenset((_DENSE,))
_ALL_KINDS = frozenset(frozenset(some) for n in (1, 2, 3) for some in combinations(_KINDS, n))
WITH_MULTI_VECTOR = frozenset(kinds for kinds in _ALL_KINDS if _MULTI_VECTOR in kinds)


def _read_output(value: Any, name: str) -> frozenset[Kinds]:
    items = value if isinstance(value, list) else [value]
    if not items:
        raise BadRequest(f"'{name}' must have one kind of vectors at least, is an empty list", param=name)
    for index, item in enumerate(items):
        fields.one_of(_BY_NAME, item, f"{name}[{index}]" if isinstance(value, list) else name, name)
    return frozenset((frozenset(items),))


OUTPUT = Field(
    "output",
    "the kind of vectors, or a list of kinds, of which the model has those in `capabilities` of GET /info. Default: "
    "dense; a model without dense vectors has no default",
    any_of({"enum": [*_KINDS, None]}, list_of({"enum": [*_KINDS]}, at_least=1)),
    _read_output,
)
"""Its value is the set of what is allowed, each of them a set of kinds."""
RETURN_MULTIVECTOR = replace(
    OUTPUT,
    name="return_multivector",
    description="Jina's: true: a vector for each token (`embeddings`) in place of one for each input, of a model made "
    "for it",
    schema=nullable("boolean", default=False),
    read=lambda value, name: WITH_MULTI_VECTOR if fields.read_flag(value, name) else _ALL_KINDS - WITH_MULTI_VECTOR,
)
RETURN_TOKENS = fields.flag(
    "return_tokens", "true: a sparse vector has the strings of its tokens, too, as in the vocabulary", default=False
)
FORMAT = fields.choice(
    "sparse_format",
    "how a sparse vector is written: lists of indices and of values, or an object with the weight of each token, by "
    "its string, as Elasticsearch and OpenSearch take it (`map`)",
    {"lists": "lists", "map": "map"},
    default="lists",
)
FIELDS: tuple[Field[Any], ...] = (
    RETURN_MULTIVECTOR, OUTPUT, TOP_K, MAX_ACTIVE_DIMS, MIN_WEIGHT, RETURN_TOKENS, FORMAT,
)  # fmt: skip


def asks_for(body: Mapping[str, Any]) -> tuple[str, ...]:
    """As `Operation.asks_for`."""
    kinds = body.get(OUTPUT.name, _MULTI_VECTOR if body.get(RETURN_MULTIVECTOR.name) is True else None)
    return tuple(kind for kind in _KINDS if kind == kinds or (isinstance(kinds, list) and kind in kinds))


def requested_kinds(wanted: Wanted, model_info: ModelInfo) -> Kinds:
    """The kinds of vectors that a request is for. Raises BadRequest for those that the model has not, and for no kind
    if the model has no dense vectors."""
    allowed = wanted.get(OUTPUT)
    if allowed is None and model_info.is_dense:  # most requests
        return DENSE_ALONE
    allowed = allowed or frozenset((DENSE_ALONE,))
    kinds = next(kinds for kinds in (DENSE_ALONE, frozenset((_MULTI_VECTOR,)), *allowed) if kinds in allowed)
    missing = [kind for kind in _KINDS if kind in kinds and kind not in model_info.card.capabilities]
    if missing:
        name = wanted.word(OUTPUT)
        own = [kind for kind in _KINDS if kind in model_info.card.capabilities]
        raise BadRequest(
            f"'{name}': the model served here makes no {missing[0]} vectors; set '{OUTPUT.name}' to one of its own: "
            f"{', '.join(own)}",
            param=name,
            can=lambda info: kinds.issubset(info.card.capabilities),
        )
    return kinds


def parse_outputs(call: Call, inputs: TextsOrIds, kinds: Kinds) -> ParsedEmbed:
    """The call for vectors of those kinds, which the model has, and which are not the dense alone."""
    wanted, _, model_info = call
    if len(kinds) > 1:
        output = Output.HYBRID
    else:
        output = Output.TOKEN_VECTORS if _MULTI_VECTOR in kinds else sparse_output(model_info)
    [form] = forms = forms_of(call, output)
    _check_fields(wanted, kinds, form, model_info)
    request = resolve(call, inputs, output, forms=forms)
    normalizes_dense = not model_info.card.is_normalized and wanted.get(NORMALIZE) is True
    write_sparse = partial(
        _sparse_pieces,
        vocabulary=model_info.vocabulary,
        as_map=wanted.get(FORMAT) == "map",
        has_tokens=wanted.get(RETURN_TOKENS) is True,
    )
    num_inputs, normalizes = len(inputs), request.normalize

    def writers(embedded: Embedded) -> Iterator[_Writer]:
        [made] = embedded.made
        of = made if output is Output.HYBRID else Hybrid(made, made, made)
        if _DENSE in kinds:
            dense_steps = [normalize] if normalizes_dense else []
            yield b"embedding", lambda index: (vector_json(of.dense[index], form, dense_steps),)
        if _SPARSE in kinds:
            yield b"sparse", lambda index: write_sparse(of.sparse[index])
        if _MULTI_VECTOR in kinds:
            steps = [normalize] if normalizes else []
            yield b"embeddings", lambda index: matrix_pieces(of.tokens[index], form, steps)

    def render(embedded: Embedded) -> Response:
        each = list(writers(embedded))
        items = (
            item_pieces(b"embedding", index, [(key, write(index)) for key, write in each], embedded)
            for index in range(num_inputs)
        )
        return list_response("embd", "list", items, embedded)

    return ParsedEmbed(request, render, _MULTI_VECTOR in kinds or are_many_weights(inputs))


_Writer = tuple[bytes, Callable[[int], Iterable[bytes]]]
"""The key of a vector in an item, and what makes the JSON of input i, in pieces."""


def _check_fields(wanted: Wanted, kinds: Kinds, form: Form, model_info: ModelInfo) -> None:
    """Refuse the options that only a dense vector has, or one that is asked for alone."""
    normalizes, dimensions = wanted.get(NORMALIZE), wanted.said(DIMENSIONS)
    if _DENSE in kinds and model_info.card.is_normalized and normalizes is False:
        raise _refusal(
            wanted, NORMALIZE, ": beside vectors of other kinds a dense vector has length 1, as the model gives it"
        )
    if _DENSE in kinds and not (model_info.card.is_normalized or normalizes) and form.dtype in WHOLE:
        raise _refusal(
            wanted,
            DTYPE,
            f": {form.dtype.value} is for vectors of length 1, which the dense one is not, unless the request has "
            f"'{NORMALIZE.name}' true",
        )
    if dimensions and (kinds != {_MULTI_VECTOR} or dimensions != model_info.card.token_dim):
        raise _refusal(
            wanted,
            DIMENSIONS,
            f" is for dense vectors; each vector of a token has {model_info.card.token_dim} dimensions",
        )
    if _MULTI_VECTOR not in kinds and _DENSE not in kinds and form.dtype is not Dtype.FLOAT32:
        raise _refusal(wanted, DTYPE, ": the weights of sparse vectors are float32 alone")
    if form.encoding not in (Encoding.FLOAT, Encoding.BASE64):
        what = f"{' and '.join(sorted(kinds))} vectors, is '{form.encoding.value}'"
        raise _refusal(wanted, ENCODING, f" must be 'float' or 'base64' for {what}")


def _refusal(wanted: Wanted, attribute: Field[Any], why: str) -> BadRequest:
    word = wanted.word(attribute)
    return BadRequest(f"'{word}'{why}", param=word)


def response_schema(dense: Schema) -> Schema:
    """The schema of a response with any of the kinds. `dense`: of one with dense vectors alone."""
    schema = copy.deepcopy(dense)
    item = schema["properties"]["data"]["items"]
    rows = any_of(list_of(fields.VECTOR), {"type": "string", "contentEncoding": "base64"})
    item["properties"] |= {"sparse": _SPARSE_VECTOR, "embeddings": described(rows, "a vector for each token")}
    item["required"] = [name for name in item["required"] if name != "embedding"]
    return schema


# --- sparse vectors ---------------------------------------------------------------------------------------------
#
# A vector has the weights that are greater than `min_weight`, at most `top_k` of them, in the order of their indices,
# which are the ids of the model's vocabulary. It may be empty.

_MANY_VECTORS = 8
"""More vectors than this are rendered in a thread: 400 weights take 0.1 ms, with their tokens 0.3 ms."""
_MANY_CHARS = 4096
"""So are those of more characters or token ids, which may have as many weights."""
_SPARSE_VECTOR = any_of(
    record("tokens", indices=list_of(fields.COUNT), values=fields.VECTOR, tokens=list_of(fields.STRING)),
    {"type": "object", "additionalProperties": NUMBER},
)


def sparse_output(model_info: ModelInfo) -> Output:
    """Raises WrongModel for a model without sparse vectors."""
    if model_info.card.sparse is None:
        raise WrongModel(
            f"{model_info.what_it_is()}: it cannot make sparse vectors", can=lambda info: info.card.sparse is not None
        )
    return Output.LEXICAL if model_info.card.sparse.is_lexical else Output.SPARSE


def are_many_weights(inputs: Inputs) -> bool:
    """Whether a response is rendered in a thread."""
    return len(inputs) > _MANY_VECTORS or sum(map(len, inputs)) > _MANY_CHARS


def indexed_pieces(vector: SparseVector) -> Iterator[bytes]:
    """The JSON of a list of objects, as text-embeddings-inference has it, some weights at a time."""
    runs = zip(runs_of(vector[0].tolist()), runs_of(vector[1]), strict=True)
    return list_pieces([{"index": index, "value": value} for index, value in zip(*run, strict=True)] for run in runs)


def _sparse_pieces(
    vector: SparseVector, vocabulary: TokenVocabulary, *, as_map: bool, has_tokens: bool
) -> Iterator[bytes]:
    """The JSON of a sparse vector, some weights at a time. A map has no entries for ids that the vocabulary has no
    string for: Elasticsearch refuses empty keys. Weights are the shortest numbers that are read as the same float32."""
    indices, values = map(runs_of, vector)
    texts = (vocabulary.texts_of(some.tolist()) for some in runs_of(vector[0]))
    if as_map:
        runs = zip(texts, values, strict=True)
        maps = ({text: value for text, value in zip(*run, strict=True) if text} for run in runs)
        return list_pieces(maps, b"{}")
    tokens = ((b',"tokens":',), list_pieces(texts)) if has_tokens else ()
    return chain((b'{"indices":',), list_pieces(indices), (b',"values":',), list_pieces(values), *tokens, (b"}",))


# --- late chunks ------------------------------------------------------------------------------------------------

_NAME = "late_chunking"
_MAX_TOKENS, _RANGES = "max_tokens", "ranges"
_MAX_CHAR = 2**31 - 1


def _read_chunking(value: Any, name: str) -> LateChunking | None:
    """Its `ranges` are as they were sent, because the inputs say whether they are one list or several."""
    if isinstance(value, bool):
        return LateChunking(are_inputs=True) if value else None
    if not isinstance(value, dict):
        raise BadRequest(f"'{name}' must be true, false or an object, is {given(value)}", param=name)
    known = {key: value[key] for key in (_MAX_TOKENS, _RANGES) if value.get(key) is not None}
    if len(value) != 1 or len(known) != 1:
        raise BadRequest(
            f"'{name}' must have either '{_MAX_TOKENS}' or '{_RANGES}' and nothing else, has {len(value)} keys, "
            f"{len(known)} of them known",
            param=name,
        )
    if _RANGES in known:
        fields.expect(list, known[_RANGES], f"{name}.{_RANGES}", "a list", param=name)
    most = known.get(_MAX_TOKENS, 1)
    if type(most) is not int or most < 1:
        shown = most if type(most) is int else json_type(most)
        raise BadRequest(f"'{name}.{_MAX_TOKENS}' must be a whole number of at least 1, is {shown}", param=name)
    return LateChunking(**known)


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


def parse_late(call: Call, inputs: TextsOrIds, kinds: Kinds, *, is_one: bool) -> ParsedEmbed:
    """The call for vectors of chunks. `is_one`: the field `input` is one text, and not a list."""
    wanted, _, model_info = call
    if wanted.has(MESSAGES.name):  # the client knows no characters of the text
        raise BadRequest(f"'{_NAME}' is for texts in 'input', not for 'messages'", param=_NAME)
    if kinds != DENSE_ALONE:
        raise BadRequest(f"'{_NAME}' is for dense vectors, not for {' and '.join(sorted(kinds))}", param=_NAME)
    _check_pooling(model_info)
    texts = [text for text in inputs if isinstance(text, str)]
    if len(texts) < len(inputs):
        raise BadRequest(f"'{_NAME}' is for texts; token ids have no ranges of characters", param=_NAME)
    [form] = forms = forms_of(call)
    if form.encoding not in (Encoding.FLOAT, Encoding.BASE64):
        raise _refusal(wanted, ENCODING, f" must be 'float' or 'base64' with '{_NAME}', is '{form.encoding.value}'")
    late = wanted.get(LATE_CHUNKING)
    assert late is not None
    chunking = _chunking(late, texts, is_one=is_one, most=model_info.config.max_inputs)
    if chunking.are_inputs:
        texts = ["".join(texts)]
    # No chunk is cut off unless the client says so.
    request = resolve(call, texts, forms=forms, preferred=Overflow.ERROR)
    overflow = request.tokenizing.overflow
    if overflow not in (Overflow.ERROR, Overflow.TRUNCATE):
        raise BadRequest(
            f"'{_NAME}': 'overflow' must be 'error' or 'truncate' with it, is '{overflow.value}'", param=_NAME
        )
    request = request._replace(tokenizing=request.tokenizing._replace(wants_offsets=True), late=chunking)
    render = partial(_render_chunks, len(texts), are_inputs=chunking.are_inputs)
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


def _chunking(late: LateChunking, texts: list[str], *, is_one: bool, most: int) -> LateChunking:
    """`most`: chunks that a request may name."""
    if late.are_inputs:
        return late._replace(ranges=(list(pairwise(accumulate(map(len, texts), initial=0))),))
    if late.ranges is None:
        return late
    lists: Any = [late.ranges] if is_one else late.ranges
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


def _render_chunks(num_inputs: int, embedded: Embedded, *, are_inputs: bool) -> Response:
    return list_response("embd", "list", _chunk_items(num_inputs, embedded, are_inputs=are_inputs), embedded)


def _chunk_items(num_inputs: int, embedded: Embedded, *, are_inputs: bool) -> Iterator[Iterable[bytes]]:
    made, reports, number = embedded.made[0], embedded.reports, 0
    for index in range(num_inputs):
        chunks = made.chunks[index]
        report = b',"report":%b' % report_json(reports[index]) if reports else b""
        items = zip(chunks.ranges.tolist(), chunks.is_truncated.tolist(), made.fragments(index), strict=True)
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
