"""Cohere's embeddings API, versions 1 and 2: parses requests, renders responses. Pure.

A body of Cohere's at `/embed` is answered as by version 1. The list of models that Cohere's clients ask for is a member
of OpenAI's. Source of the shapes: Cohere's published SDKs. Texts are embedded, images are not. Cohere takes at most 96
texts; this server has the same limit in every dialect.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from vecd.gateway.api import fields
from vecd.gateway.api.answer import json_response, list_of_pieces
from vecd.gateway.api.fields import (
    SEVERAL,
    STRING,
    Field,
    Fields,
    Said,
    Schema,
    any_of,
    described,
    expect,
    json_type,
    list_of,
    nullable,
    record,
)
from vecd.gateway.api.operation import Call, Dialect, Operation, ParsedEmbed, ParsedTokenize
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects import ask
from vecd.gateway.dialects.ask import INPUT, INPUT_TYPE, MAX_TOKENS, MODEL, check_num, parse_texts
from vecd.gateway.dialects.vllm import IDS, TokenLists, id_of, parse_detokenize, text_of
from vecd.gateway.encoding.result import Pieces
from vecd.gateway.errors import ApiError, BadRequest
from vecd.gateway.request import Dtype, Embedded, Encoding, Form, Response

_FORMS = {
    "float": Form(),
    "int8": Form(dtype=Dtype.INT8),
    "uint8": Form(dtype=Dtype.UINT8),
    "binary": Form(dtype=Dtype.BINARY),
    "ubinary": Form(dtype=Dtype.UBINARY),
    "base64": Form(Encoding.BASE64),
}

# --- fields -----------------------------------------------------------------------------------------------------


def _read_types(value: Any, name: str) -> Said:
    """Without repetitions."""
    for index, item in enumerate(expect(list, value, name, "a list")):
        if type(item) is not str or item not in _FORMS:
            fields.one_of(_FORMS, item, f"{name}[{index}]", name)
    names = tuple(dict.fromkeys(value))
    return Said(embedding_types=names, output_dtype=[_FORMS[name].dtype for name in names])


_TEXT = record(type={"const": "text"}, text=STRING)
_INPUT = record(content={**list_of(_TEXT, at_least=1), "maxItems": 1})

TEXTS = replace(
    INPUT, name="texts", description="what is to be embedded", schema=any_of(fields.TEXTS, nullable("string")),
    is_required=False,
)  # fmt: skip
INPUTS = replace(
    TEXTS,
    name="inputs",
    description="the same as objects, each with one text",
    schema=any_of(list_of(_INPUT, at_least=1), {"type": "null"}),
)
IMAGES = fields.anything("images", "refused: only texts are embedded", nullable("array", maxItems=0), is_large=True)
EMBEDDING_TYPES = Field(
    "embedding_types",
    "forms in which each vector is answered",
    nullable("array", items={"enum": list(_FORMS)}),
    _read_types,
    key=SEVERAL,
)
_TYPES: Field[tuple[str, ...]] = fields.anything(EMBEDDING_TYPES.name, "", {})
OUTPUT_DIMENSION = fields.whole_number("output_dimension", "length of the vectors", minimum=1, key=ask.DIMENSIONS.key)
TRUNCATE = fields.choice(
    "truncate",
    "what becomes of a text that is longer than the model takes: an error (`NONE`), or its start or end is cut; "
    "default: as the server is configured",
    ask.ENDS,
    key=ask.OVERFLOW.key,
)
TEXT = replace(INPUT, name="text", description="what is to be tokenized", schema=STRING)
FIELDS = Fields(
    TEXTS,
    INPUTS,
    IMAGES,
    MODEL,
    INPUT_TYPE,
    EMBEDDING_TYPES,
    OUTPUT_DIMENSION,
    TRUNCATE,
    MAX_TOKENS,
    ask.PRIORITY,
)

# --- parse ------------------------------------------------------------------------------------------------------


def parse_embed(call: Call, *, version: int) -> ParsedEmbed:
    """`version`: 1 responds with a bare list of floats to a request without `embedding_types`."""
    wanted, _, model_info = call
    if wanted.get(IMAGES):
        raise BadRequest("'images' cannot be embedded: this server embeds texts", param=IMAGES.name)
    read_texts = _texts_of if wanted.has(INPUTS.name) else parse_texts
    texts = read_texts(wanted.get(INPUT), wanted.word(TEXTS), model_info.config.max_inputs)
    types, of_alias = wanted.get(_TYPES), wanted.get(ask.DTYPE)
    if types is None and isinstance(of_alias, Dtype) and of_alias.value in _FORMS:
        types = (of_alias.value,)
    is_bare, names = version == 1 and not types, types or ("float",)
    request = ask.resolve(call, texts, forms=tuple(_FORMS[name] for name in names))
    limit = min(request.tokenizing.max_tokens, model_info.config.max_tokens)
    # Written here because a large body is parsed in a thread, while responses are rendered on the event loop, and so
    # that no reference to the texts is kept, nor to the call.
    echoed = [b"%b%b" % (b"," if index else b"", orjson.dumps(text)) for index, text in enumerate(texts)]

    def render(embedded: Embedded) -> Response:
        """In pieces, so that megabytes are never copied."""
        pieces: Pieces = [b'{"id":%b,"embeddings":' % orjson.dumps(embedded.request_id)]
        if is_bare:
            pieces += list_of_pieces(zip(embedded.made[0]))
        else:
            for index, name in enumerate(names):
                pieces.append(b'%b"%b":' % (b"," if index else b"{", name.encode()))
                pieces += list_of_pieces(zip(embedded.made[index]))
            pieces.append(b"}")
        pieces += (b',"texts":[', *echoed)
        kind = b"embeddings_floats" if is_bare else b"embeddings_by_type"
        meta = orjson.dumps(_meta(embedded, version, limit))
        pieces.append(b'],"meta":%b,"response_type":"%b"}' % (meta, kind))
        return Response(200, pieces)

    return ParsedEmbed(request, render)


def _texts_of(inputs: Any, name: str, max_inputs: int) -> list[str]:
    if not isinstance(inputs, list):
        what = "a list of whole numbers" if isinstance(inputs, array) else json_type(inputs)
        raise BadRequest(f"'{name}' must be a list of objects, is {what}", param=name)
    check_num(inputs, name, max_inputs)
    return [_text_of(item, f"{name}[{index}]", name) for index, item in enumerate(inputs)]


def _text_of(item: Any, where: str, name: str) -> str:
    content = expect(dict, item, where, "an object", param=name).get("content")
    where += ".content"
    parts = expect(list, content, where, "a list", none="missing", param=name)
    if len(parts) != 1:
        raise BadRequest(f"'{where}' must have 1 item, a text, has {len(parts)}", param=name)
    part = expect(dict, parts[0], f"{where}[0]", "an object", param=name)
    if part.get("type") != "text":
        raise BadRequest(f"'{where}[0].type' must be 'text': this server embeds texts", param=name)
    return expect(str, part.get("text"), f"{where}[0].text", "a string", param=name)


def parse_tokenize(call: Call) -> ParsedTokenize:
    """The tokens of a text alone, without special tokens and without a prompt."""
    text = fields.read_text(call.wanted.require(TEXT), TEXT.name)
    call.model_info.prompt_of_model_name(call.wanted.get(MODEL))  # raises ModelNotFound if names are strict
    tokens = TokenLists(id_of, text_of)

    def render() -> Response:
        [ids], [texts] = tokens.column(0), tokens.column(1)
        meta = orjson.dumps({"api_version": {"version": "1"}})
        return Response(200, b'{"tokens":%b,"token_strings":%b,"meta":%b}' % (ids, texts, meta))

    return ParsedTokenize([text], False, "", tokens.put, render)


def check_api_key(model_infos: Sequence[ModelInfo], path: str) -> Response:
    """Only a request with a valid key, where there are keys, comes as far as this."""
    return json_response(200, {"valid": True})


def _meta(embedded: Embedded, version: int, max_tokens: int) -> dict[str, Any]:
    """`max_tokens`: the length that texts were cut to."""
    became = {"of which the rest was cut": embedded.num_truncated, "which were embedded in parts": embedded.num_chunked}
    warnings = [f"Texts longer than {max_tokens} tokens, {what}: {num}" for what, num in became.items() if num]
    return {
        "api_version": {"version": str(version)},
        "billed_units": {"input_tokens": embedded.num_tokens},
        **({"warnings": warnings} if warnings else {}),
    }


def render_error(error: ApiError) -> Response:
    return json_response(error.status, {"message": error.message})


# --- documentation ----------------------------------------------------------------------------------------------


def _vectors(element: Schema) -> Schema:
    return list_of(list_of(element, at_least=1), at_least=1)


_FLOATS = _vectors(fields.NUMBER)
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
    billed_units=record(input_tokens=fields.POSITIVE),
    warnings=described(list_of(STRING), "Texts that were cut, if any were"),
)


def _response(kind: str, embeddings: Schema) -> Schema:
    return record(
        id=described(STRING, "The request's, as in the header x-request-id"),
        embeddings=embeddings,
        texts=described(list_of(STRING), "As they came; of one that is longer than is looked at, as much as that"),
        meta=_META,
        response_type={"const": kind},
    )


_V2_RESPONSE = _response("embeddings_by_type", _BY_TYPE)
_V1_EMBED = Operation(
    summary="Embed texts",
    fields=FIELDS,
    parse=partial(parse_embed, version=1),
    needs=("dense",),
    response={"oneOf": [_response("embeddings_floats", _FLOATS), _V2_RESPONSE]},
)
_TOKENIZED = record(
    tokens=list_of(fields.COUNT),
    token_strings=list_of(STRING),
    meta=record(api_version=record(version={"const": "1"})),
)

DIALECT = Dialect(
    name="cohere",
    title="Cohere",
    operations={
        "POST /v2/embed": replace(_V1_EMBED, parse=partial(parse_embed, version=2), response=_V2_RESPONSE),
        "POST /v1/embed": _V1_EMBED,
        "POST /embed": replace(_V1_EMBED, claims=(TEXTS.name,)),
        "POST /v1/tokenize": Operation(
            summary="Tokenize a text, without embedding it",
            fields=Fields(TEXT, MODEL),
            parse=parse_tokenize,
            response=_TOKENIZED,
        ),
        "POST /v1/detokenize": Operation(
            summary="The text of token ids",
            fields=Fields(IDS, MODEL),
            parse=partial(parse_detokenize, key="text"),
            response=record(text=STRING),
        ),
        "POST /v1/check-api-key": Operation(
            summary="Whether the API key is valid", describe=check_api_key, response=record(valid={"const": True})
        ),
    },
    render_error=render_error,
    error=record(message=STRING),
    prefix="/v2/",
)
