"""Cohere's embeddings API, versions 1 and 2: parses requests, renders responses. Pure.

Owns the shapes of `/v2/embed` and `/v1/embed`, of a body of Cohere's at `/embed`, which is answered as by version 1,
and of `/v1/tokenize`, `/v1/detokenize` and `/v1/check-api-key`. The list of models that Cohere's clients ask for is a
member of OpenAI's. Source of the shapes: Cohere's published SDKs. Texts are embedded, images are not. `input_type`
selects the model's prompt for that purpose. Cohere takes at most 96 texts; this server has the same limit in every
dialect. Responses echo the texts.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from vecd.gateway.api import fields, schemas
from vecd.gateway.api.dialects import options
from vecd.gateway.api.dialects.headers import parse_priority, parse_timeout_s, priority_numbered, response_headers
from vecd.gateway.api.dialects.inputs import check_num, parse_ids, parse_texts
from vecd.gateway.api.dialects.rows import fragments_of, json_list
from vecd.gateway.api.dialects.vllm import Tokens
from vecd.gateway.api.fields import Field, Fields, Values, given, json_type
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.operations import Call, Dialect, Operation, ParsedDecode, ParsedEmbed, ParsedTokenize
from vecd.gateway.api.schemas import Schema, any_of, described, list_of, nullable, record
from vecd.gateway.encoding.forms import Names, check_forms
from vecd.gateway.types.errors import ApiError, BadRequest
from vecd.gateway.types.messages import Response
from vecd.gateway.types.request import Dtype, Embedded, EmbedRequest, Encoding, Form, Overflow, Priority, Tokenizing

_FORMS = {
    "float": Form(),
    "int8": Form(dtype=Dtype.INT8),
    "uint8": Form(dtype=Dtype.UINT8),
    "binary": Form(dtype=Dtype.BINARY),
    "ubinary": Form(dtype=Dtype.UBINARY),
    "base64": Form(Encoding.BASE64),
}
_IMAGE = "image"
"""The `input_type` of Cohere's that is for images."""

# --- fields -----------------------------------------------------------------------------------------------------


def _read_types(value: Any, name: str) -> tuple[str, ...]:
    """The types without repetitions, in the order of the request."""
    if not isinstance(value, list):
        raise BadRequest(f"'{name}' must be a list, is {json_type(value)}", param=name)
    for index, item in enumerate(value):
        if not isinstance(item, str) or item not in _FORMS:
            known = ", ".join(f"'{known}'" for known in _FORMS)
            raise BadRequest(f"'{name}[{index}]' must be one of {known}, is {given(item)}", param=name)
    return tuple(dict.fromkeys(value))


def _read_priority(value: Any, name: str) -> Priority:
    return priority_numbered(fields.read_whole_number(value, name))


_TEXT = record(type={"const": "text"}, text=schemas.STRING)
_INPUT = record(content={**list_of(_TEXT, at_least=1), "maxItems": 1})

TEXTS = fields.anything("texts", "what is to be embedded", any_of(schemas.TEXTS, nullable("string")), is_large=True)
INPUTS = fields.anything(
    "inputs",
    "the same as objects, each with one text",
    any_of(list_of(_INPUT, at_least=1), {"type": "null"}),
    is_large=True,
)
IMAGES = fields.anything("images", "refused: only texts are embedded", nullable("array", maxItems=0), is_large=True)
EMBEDDING_TYPES = Field(
    "embedding_types",
    "forms in which each vector is answered",
    nullable("array", items={"enum": list(_FORMS)}),
    _read_types,
)
OUTPUT_DIMENSION = fields.whole_number("output_dimension", "length of the vectors", minimum=1)
TRUNCATE = fields.choice(
    "truncate",
    "what becomes of a text that is longer than the model takes: an error (`NONE`), or its start or end is cut; "
    "default: as the server is configured",
    {"NONE": Overflow.ERROR, "START": Overflow.TRUNCATE_LEFT, "END": Overflow.TRUNCATE},
)
MAX_TOKENS = fields.whole_number("max_tokens", "longest text in tokens, if that is less than the model's", minimum=1)
PRIORITY = Field(
    "priority",
    "how soon an answer is wanted, beside other requests: lower first, 0 is the default",
    nullable("integer"),
    _read_priority,
)
TEXT = replace(fields.text("text", "what is to be tokenized"), schema=schemas.STRING, is_required=True, is_large=True)
IDS = fields.anything("tokens", "token ids of the model's own", schemas.TOKEN_IDS, is_required=True)
FIELDS = Fields(
    TEXTS,
    INPUTS,
    IMAGES,
    options.MODEL,
    options.INPUT_TYPE,
    EMBEDDING_TYPES,
    OUTPUT_DIMENSION,
    TRUNCATE,
    MAX_TOKENS,
    PRIORITY,
)

# --- parse ------------------------------------------------------------------------------------------------------


def parse_embed(call: Call, *, version: int) -> ParsedEmbed:
    """`version`: 1 responds with a bare list of floats to a request without `embedding_types`."""
    values, model_info = call.values, call.model_info
    texts = _read_texts(values, model_info.max_inputs)
    types = values.get(EMBEDDING_TYPES) or ()
    names = types or ("float",)
    dimensions, max_tokens = values.get(OUTPUT_DIMENSION), values.get(MAX_TOKENS)
    limit = model_info.max_tokens
    if max_tokens is not None:
        limit = min(limit, model_info.check_max_tokens(max_tokens, MAX_TOKENS.name))
    priority = values.get(PRIORITY)
    request = EmbedRequest(
        inputs=texts,
        forms=tuple(_FORMS[name] for name in names),
        priority=parse_priority(call.headers) if priority is None else priority,
        timeout_s=parse_timeout_s(call.headers),
        tokenizing=Tokenizing(
            prompt=_read_prompt(values, model_info),
            overflow=values.get(TRUNCATE),
            max_tokens=limit if limit < model_info.max_tokens else None,
        ),
        dimensions=None if dimensions is None else model_info.check_dimensions(dimensions, OUTPUT_DIMENSION.name),
    )
    params = Names(EMBEDDING_TYPES.name, EMBEDDING_TYPES.name, OUTPUT_DIMENSION.name)
    check_forms(request, model_info, params, has_ranges=model_info.has_quantization_ranges)
    render = partial(
        render_embed,
        names=None if version == 1 and not types else names,
        echoed=_echo(texts),
        version=version,
        max_tokens=limit,
        request_id=call.request_id,
    )
    return ParsedEmbed(request, render)


def _read_texts(values: Values, max_inputs: int) -> list[str]:
    if values.get(IMAGES):
        raise BadRequest("'images' cannot be embedded: this server embeds texts", param=IMAGES.name)
    texts, inputs = values.get(TEXTS), values.get(INPUTS)
    if inputs is None:
        return parse_texts(texts, TEXTS.name, max_inputs)
    if texts is not None:
        raise BadRequest("'texts' and 'inputs' are both given: send one of them", param=INPUTS.name)
    return _texts_of(inputs, INPUTS.name, max_inputs)


def _texts_of(inputs: Any, name: str, max_inputs: int) -> list[str]:
    """The text of each object of `inputs`. Raises BadRequest."""
    if not isinstance(inputs, list):
        what = "a list of whole numbers" if isinstance(inputs, array) else json_type(inputs)
        raise BadRequest(f"'{name}' must be a list of objects, is {what}", param=name)
    check_num(inputs, name, max_inputs)
    texts: list[str] = []
    for index, item in enumerate(inputs):
        if not isinstance(item, dict):
            raise BadRequest(f"'{name}[{index}]' must be an object, is {json_type(item)}", param=name)
        content, where = item.get("content"), f"{name}[{index}].content"
        if not isinstance(content, list):
            what = "missing" if content is None else json_type(content)
            raise BadRequest(f"'{where}' must be a list, is {what}", param=name)
        if len(content) != 1:
            raise BadRequest(f"'{where}' must have 1 item, a text, has {len(content)}", param=name)
        texts.append(_text_of(content[0], where, name))
    return texts


def _text_of(item: Any, where: str, name: str) -> Any:
    if not isinstance(item, dict):
        raise BadRequest(f"'{where}[0]' must be an object, is {json_type(item)}", param=name)
    if item.get("type") != "text":
        raise BadRequest(f"'{where}[0].type' must be 'text': this server embeds texts", param=name)
    if not isinstance(item.get("text"), str):
        raise BadRequest(f"'{where}[0].text' must be a string, is {json_type(item.get('text'))}", param=name)
    return item["text"]


def _read_prompt(values: Values, model_info: ModelInfo) -> str | None:
    """The prompt by `input_type`, or by the model's name. Raises BadRequest if they contradict each other, because
    clients that always send an `input_type` would silently override what their user wrote into the name."""
    if values.get(options.INPUT_TYPE) == _IMAGE and _IMAGE not in model_info.prompts:
        name = options.INPUT_TYPE.name
        raise BadRequest(f"'{name}' '{_IMAGE}' is not supported: this server embeds texts", param=name)
    return options.read_prompt(values, model_info, (options.INPUT_TYPE,))


def _echo(texts: Sequence[str]) -> list[bytes]:
    """The texts as JSON, with the commas between them.

    They are written here because a large body is parsed in a thread, while responses are rendered on the event loop,
    and so that no reference to the texts is kept.
    """
    return [b"%b%b" % (b"," if index else b"", orjson.dumps(text)) for index, text in enumerate(texts)]


# --- tokens -----------------------------------------------------------------------------------------------------


def parse_tokenize(call: Call) -> ParsedTokenize:
    """The tokens of a text alone, without special tokens and without a prompt."""
    text = fields.read_text(call.values.require(TEXT), TEXT.name)
    call.model_info.prompt_of_model_name(call.values.get(options.MODEL))  # raises ModelNotFound if names are strict
    tokens = Tokens(wants_texts=True)
    return ParsedTokenize([text], False, "", tokens, partial(render_tokenize, tokens))


def render_tokenize(tokens: Tokens) -> Response:
    body = b'{"tokens":[%b],"token_strings":[%b],"meta":%b}'
    meta = orjson.dumps({"api_version": {"version": "1"}})
    return Response(200, body % (b",".join(tokens.ids), b",".join(tokens.texts or ()), meta))


def parse_detokenize(call: Call) -> ParsedDecode:
    ids = parse_ids(call.values.require(IDS), IDS.name)
    call.model_info.prompt_of_model_name(call.values.get(options.MODEL))
    return ParsedDecode([ids], skip_special_tokens=False, render=lambda texts: Response(200, _dumps(text=texts[0])))


def check_api_key(model_info: ModelInfo, path: str) -> Response:
    """Only a request with a valid key, where there are keys, comes as far as this."""
    return Response(200, _dumps(valid=True))


def _dumps(**fields: Any) -> bytes:
    return orjson.dumps(fields)


# --- render -----------------------------------------------------------------------------------------------------


def render_embed(
    embedded: Embedded,
    *,
    names: tuple[str, ...] | None,
    echoed: list[bytes],
    version: int,
    max_tokens: int,
    request_id: str,
) -> Response:
    """The response, in pieces, so that megabytes are never copied. `names`: of the request's forms; None: the bare list
    of version 1. `max_tokens`: the length that texts were cut to."""
    pieces: list[bytes | memoryview] = [b'{"id":%b,"embeddings":' % orjson.dumps(request_id)]
    if names is None:
        pieces += json_list(fragments_of(embedded))
    else:
        for index, name in enumerate(names):
            pieces.append(b'%b"%b":' % (b"," if index else b"{", name.encode()))
            pieces += json_list(fragments_of(embedded, index))
        pieces.append(b"}")
    pieces += (b',"texts":[', *echoed)
    kind = b"embeddings_floats" if names is None else b"embeddings_by_type"
    meta = orjson.dumps(_meta(embedded, version, max_tokens))
    pieces.append(b'],"meta":%b,"response_type":"%b"}' % (meta, kind))
    return Response(200, pieces, headers=response_headers(embedded))


def _meta(embedded: Embedded, version: int, max_tokens: int) -> dict[str, Any]:
    cut, chunked = embedded.num_truncated, embedded.num_chunked
    warnings = [f"Texts longer than {max_tokens} tokens, of which the rest was cut: {cut}"] if cut else []
    if chunked:
        warnings.append(f"Texts longer than {max_tokens} tokens, which were embedded in parts: {chunked}")
    return {
        "api_version": {"version": str(version)},
        "billed_units": {"input_tokens": embedded.num_tokens},
        **({"warnings": warnings} if warnings else {}),
    }


# --- errors -----------------------------------------------------------------------------------------------------


def render_error(error: ApiError) -> Response:
    return Response(error.status, orjson.dumps({"message": error.message}))


# --- documentation ----------------------------------------------------------------------------------------------


def _vectors(element: Schema) -> Schema:
    return list_of(list_of(element, at_least=1), at_least=1)


_FLOATS = _vectors({"type": "number"})
_SIGNED = _vectors({"type": "integer", "minimum": -128, "maximum": 127})
_UNSIGNED = _vectors({"type": "integer", "minimum": 0, "maximum": 255})
_BASE64 = list_of({"type": "string", "contentEncoding": "base64"}, at_least=1)
_BY_TYPE: Schema = {
    "type": "object",
    "minProperties": 1,
    "properties": {
        "float": _FLOATS,
        "int8": _SIGNED,
        "uint8": _UNSIGNED,
        "binary": _SIGNED,
        "ubinary": _UNSIGNED,
        "base64": _BASE64,
    },
    "additionalProperties": False,
}
_META = record(
    "warnings",
    api_version=record(version={"enum": ["1", "2"]}),
    billed_units=record(input_tokens=schemas.POSITIVE),
    warnings=described(list_of(schemas.STRING), "Texts that were cut, if any were"),
)


def _response(kind: str, embeddings: Schema) -> Schema:
    return record(
        id=described(schemas.STRING, "The request's, as in the header x-request-id"),
        embeddings=embeddings,
        texts=described(
            list_of(schemas.STRING), "As they came; of one that is longer than is looked at, as much as that"
        ),
        meta=_META,
        response_type={"const": kind},
    )


_V2_RESPONSE = _response("embeddings_by_type", _BY_TYPE)
_SUMMARY = "Embed texts"

_V1_EMBED = Operation(
    summary=_SUMMARY,
    fields=FIELDS,
    embed=partial(parse_embed, version=1),
    needs=("dense",),
    response={"oneOf": [_response("embeddings_floats", _FLOATS), _V2_RESPONSE]},
)
_TOKENIZED = record(
    tokens=list_of(schemas.COUNT),
    token_strings=list_of(schemas.STRING),
    meta=record(api_version=record(version={"const": "1"})),
)

DIALECT = Dialect(
    name="cohere",
    title="Cohere",
    operations={
        "POST /v2/embed": Operation(
            summary=_SUMMARY,
            fields=FIELDS,
            embed=partial(parse_embed, version=2),
            needs=("dense",),
            response=_V2_RESPONSE,
        ),
        "POST /v1/embed": _V1_EMBED,
        "POST /embed": replace(_V1_EMBED, claims=(TEXTS.name,)),
        "POST /v1/tokenize": Operation(
            summary="Tokenize a text, without embedding it",
            fields=Fields(TEXT, options.MODEL),
            reply=parse_tokenize,
            response=_TOKENIZED,
        ),
        "POST /v1/detokenize": Operation(
            summary="The text of token ids",
            fields=Fields(IDS, options.MODEL),
            reply=parse_detokenize,
            response=record(text=schemas.STRING),
        ),
        "POST /v1/check-api-key": Operation(
            summary="Whether the API key is valid", describe=check_api_key, response=record(valid={"const": True})
        ),
    },
    render_error=render_error,
    error=record(message=schemas.STRING),
    prefix="/v2/",
)
