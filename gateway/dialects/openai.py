"""OpenAI's embeddings API, with Jina's paths: parses requests, renders responses. Pure, but for the clock.

Source of the shapes: OpenAI's published OpenAPI document. Responses also have `id` and `created`, as vLLM's and
infinity's do; clients ignore them. Options beyond OpenAI's fields are in `vecd.gateway.dialects.ask`.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import orjson

from vecd.base.files import JsonObject
from vecd.gateway.api import fields
from vecd.gateway.api.answer import json_response, list_schema, render_rows, report_json, usage
from vecd.gateway.api.fields import (
    BINARY_MEDIA_TYPES,
    Fields,
    Schema,
    Wanted,
    agreed,
    any_of,
    described,
    list_of,
    nullable,
    record,
)
from vecd.gateway.api.operation import Call, Dialect, Operation, ParsedEmbed, ParsedMessages, posted
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects import ask, outputs
from vecd.gateway.dialects.ask import (
    COMMON,
    ENCODING,
    INPUT,
    METADATA,
    Conversations,
    forms_of,
    parse_inputs,
    render_conversations,
    resolve,
)
from vecd.gateway.dialects.classify import ZERO_SHOT
from vecd.gateway.dialects.outputs import LATE_CHUNKING, OUTPUT
from vecd.gateway.encoding.forms import Matrix
from vecd.gateway.encoding.result import Pieces
from vecd.gateway.errors import ApiError
from vecd.gateway.request import Embedded, Form, InputReport, Response
from vecd.model.steps import CAPABILITIES
from vecd.shm.control import ModelState

FIELDS = Fields(INPUT, *COMMON, ask.TASK, LATE_CHUNKING, *outputs.FIELDS)

# --- embeddings -------------------------------------------------------------------------------------------------


_OF_OUTPUTS = frozenset((OUTPUT.key, LATE_CHUNKING.key))


def parse_embeddings(call: Call) -> ParsedEmbed | ParsedMessages:
    wanted, _, model_info = call
    if isinstance(value := wanted.get(INPUT), Conversations):
        return render_conversations(call, value, parse_embeddings)
    inputs = parse_inputs(value, INPUT.name, model_info.config.max_inputs)
    if not model_info.is_dense or not wanted.is_without(_OF_OUTPUTS):
        kinds = outputs.requested_kinds(wanted, model_info)
        if wanted.get(LATE_CHUNKING) is not None:
            return outputs.parse_late(call, inputs, kinds, is_one=isinstance(value, str))
        if kinds != outputs.DENSE_ALONE:
            return outputs.parse_outputs(call, inputs, kinds)
    request = resolve(call, inputs, forms=forms_of(call))
    has_metadata = wanted.get(ENCODING) == METADATA
    return ParsedEmbed(request, renderer_of(request.forms[0], EMBEDDING, has_metadata=has_metadata))


def parse_multi_vector(call: Call) -> ParsedEmbed | ParsedMessages:
    """Jina's path for vectors of tokens."""
    path, said = outputs.WITH_MULTI_VECTOR, call.wanted.get(OUTPUT)
    if said is not None:
        path = agreed([("/v1/multi-vector", path), (call.wanted.word(OUTPUT), said)])
    return parse_embeddings(call._replace(wanted=call.wanted | Wanted({OUTPUT.key: path})))


class Item(NamedTuple):
    """The names in one item of a response: of its kind, and of its vector."""

    object: bytes
    vector: bytes


EMBEDDING = Item(b"embedding", b"embedding")


def renderer_of(form: Form, item: Item, *, has_metadata: bool = False) -> Callable[[Embedded], Response]:
    """What renders vectors in one form. `has_metadata`: bytes are described in vLLM's header, too."""
    if form.encoding in BINARY_MEDIA_TYPES:
        return _render_with_metadata if has_metadata else render_rows
    return _RENDER if item is EMBEDDING else partial(render_response, item)


def _render_with_metadata(embedded: Embedded) -> Response:
    response = render_rows(embedded)
    response.headers["metadata"] = _metadata(embedded.made[0], embedded)
    return response


def render_response(item: Item, embedded: Embedded) -> Response:
    """Holds the rows without a copy."""
    names = (embedded.request_id.encode(), int(time.time()), orjson.dumps(embedded.model))
    head = b'{"id":"embd-%b","object":"list","created":%d,"model":%b,"data":[' % names
    pieces = _render_items(head, embedded.made[0], item, embedded.reports)
    num_tokens = embedded.num_tokens
    pieces.append(b'}],"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (num_tokens, num_tokens))
    return Response(200, pieces)


_RENDER = partial(render_response, EMBEDDING)


def _render_items(head: bytes, fragments: Pieces, item: Item, reports: Sequence[InputReport]) -> Pieces:
    """In pieces, so that megabytes are never copied. The last item is left open."""
    pieces: Pieces = []
    before = head
    for index, fragment in enumerate(fragments):
        pieces += (b'%b{"object":"%b","index":%d,"%b":' % (before, item.object, index, item.vector), fragment)
        if reports:
            pieces.append(b',"report":%b' % report_json(reports[index]))
        before = b"},"
    return pieces


# --- vLLM's header ----------------------------------------------------------------------------------------------

_MAX_METADATA_BYTES = 3072
"""nginx has 4 KiB for the whole head of a response by default, and answers 502 to a longer one; aiohttp takes 8 KiB for
a header."""
_LEAST_SPAN_BYTES = 64
"""The least size of an input's entry. Saves writing entries of thousands of inputs, only to find them too long."""


def _metadata(matrix: Matrix, embedded: Embedded) -> str:
    """The JSON of vLLM's header `metadata`. `data`, with an entry for each input, is left out if it is too long for a
    header: rows are in the order of the inputs, and all have the same length."""
    described: JsonObject = {
        "id": f"embd-{embedded.request_id}", "created": int(time.time()), "model": embedded.model,
    }  # fmt: skip
    if len(matrix.rows) <= _MAX_METADATA_BYTES // _LEAST_SPAN_BYTES:
        header = _in_ascii({**described, "data": list(_spans(matrix)), "usage": usage(embedded)})
        if len(header) <= _MAX_METADATA_BYTES:
            return header
    return _in_ascii({**described, "usage": usage(embedded)})


def _in_ascii(value: JsonObject) -> str:
    return json.dumps(value, separators=(",", ":"))  # orjson would write UTF-8, which no header holds


def _spans(matrix: Matrix) -> Iterator[JsonObject]:
    for index, row in enumerate(matrix.rows):
        start = index * matrix.row_bytes
        yield {
            "index": index,
            "embed_dtype": matrix.form.dtype.value,
            "endianness": "big" if matrix.form.is_big_endian else "little",
            "start": start,
            "end": start + matrix.row_bytes,
            "shape": [len(row)],
        }


# --- models -----------------------------------------------------------------------------------------------------

_ENDPOINTS = {"dense": "embed", "rerank": "rerank", "classify": "classify", "multi-vector": "rerank"}
"""By capability, what Cohere calls what such a model is served at."""


def list_models(model_infos: Sequence[ModelInfo], path: str) -> Response:
    """Each model under all its names, and with each of its prompts, for programs that show a list to choose from;
    `models` is for Cohere's clients."""
    listed = [(model_info, name) for model_info in model_infos for name in _listed_names(model_info)]
    data = [_describe(model_info, name) for model_info, name in listed]
    models = [_describe_for_cohere(model_info, name) for model_info, name in listed]
    return json_response(200, {"object": "list", "data": data, "models": models})


def _listed_names(model_info: ModelInfo) -> list[str]:
    prompts = model_info.prompts if model_info.card.pools_prompt else ()
    return [*model_info.names, *(f"{model_info.model}:{name}" for name in prompts if model_info.is_for(name))]


def _describe_for_cohere(model_info: ModelInfo, name: str) -> JsonObject:
    endpoints = list(dict.fromkeys(_ENDPOINTS[each] for each in model_info.card.capabilities if each in _ENDPOINTS))
    return {"name": name, "endpoints": endpoints, "context_length": model_info.config.max_tokens}


def retrieve_model(model_infos: Sequence[ModelInfo], path: str) -> Response:
    """Describe the model under any name that an embedding may use. Raises BadRequest and ModelNotFound for others."""
    [model_info], name = model_infos, path.partition("/models/")[2].strip("/")
    model_info.prompt_of_model_name(name)
    return json_response(200, _describe(model_info, name))


def _describe(model_info: ModelInfo, name: str) -> JsonObject:
    seen = model_info.by_name(name)
    dimensions = {"dimensions": seen.num_dimensions} if model_info.is_dense else {}
    return {
        "id": name,
        "object": "model",
        "created": model_info.created_at,
        "owned_by": "vecd",
        "root": model_info.model,
        "max_model_len": model_info.config.max_tokens,
        "capabilities": model_info.card.capabilities,
        "state": model_info.residence.state,
        "identity": model_info.identity.by_alias.get(name, model_info.identity).text,
        **({} if seen.defaults is None else {"defaults": seen.defaults.given(), **dimensions}),
    }


def render_error(error: ApiError) -> Response:
    """All four keys are always present. Voyage's and Jina's clients read `detail`, which OpenAI's ignore."""
    described = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return json_response(error.status, {"error": described, "detail": error.message})


# --- the dialect ------------------------------------------------------------------------------------------------

_REPORT = described(
    record(
        tokens=described(fields.POSITIVE, "special ones included"),
        truncated=fields.BOOLEAN,
        chunks=described(fields.POSITIVE, "1: it was not split"),
        source=described({"enum": ["text", "model", "cl100k"]}, "what it was taken for: text, or whose ids"),
    ),
    "what became of the input; only where `report` asks for it",
)
VECTOR = any_of(fields.VECTOR, {"type": "string", "contentEncoding": "base64"})


def response_schema(kind: str, key: str, vector: Schema) -> Schema:
    """The schema of a response whose items are objects of the `kind`, each with its vector at `key`."""
    item = record("report", object={"const": kind}, index=fields.COUNT, **{key: vector}, report=_REPORT)
    return list_schema({"const": "list"}, item)


_MODEL_RESPONSE = record(
    "dimensions",
    "defaults",
    id=fields.STRING,
    object={"const": "model"},
    created=fields.TIME,
    owned_by=fields.STRING,
    root=described(fields.STRING, "the served model's own name"),
    max_model_len=described(fields.POSITIVE, "tokens, special ones included"),
    capabilities=described(list_of({"enum": [*CAPABILITIES]}, at_least=1), "what the model can do, as in GET /info"),
    state=described({"enum": [*ModelState]}, "a model that is not ready is loaded for a request, unless it has failed"),
    identity=described(fields.nullable("string"), "as in the header x-vecd-identity; null while it is not known"),
    dimensions=described(fields.POSITIVE, "of vectors by an alias with `defaults`"),
    defaults=described({"type": "object"}, "of requests by this alias that do not say otherwise; only if it has any"),
)
_COHERE_S_MODEL = record(
    name=fields.STRING,
    endpoints=list_of({"enum": [*dict.fromkeys(_ENDPOINTS.values())]}),
    context_length=fields.POSITIVE,
)
_MODELS_RESPONSE = record(
    object={"const": "list"},
    data=list_of(_MODEL_RESPONSE, at_least=1),
    models=described(list_of(_COHERE_S_MODEL, at_least=1), "the same, as Cohere has it"),
)
ERROR_SCHEMA = record(
    detail=described(fields.STRING, "the message again, for Voyage's and Jina's clients"),
    error=record(
        message=fields.STRING,
        type=fields.STRING,
        param=described(nullable("string"), "the field that is wrong"),
        code=nullable("string"),
    ),
)

EMBEDDINGS = Operation(
    summary="Embed texts or token ids",
    fields=FIELDS,
    parse=parse_embeddings,
    response=outputs.chunks_schema(outputs.response_schema(response_schema("embedding", "embedding", VECTOR))),
    needs=outputs.NEEDS,
    asks_for=outputs.asks_for,
    binary_media_types=tuple(fields.BINARY_MEDIA_TYPES.values()),
)
_MULTI_VECTOR = replace(
    EMBEDDINGS, summary="Embed each token of texts", parse=parse_multi_vector, needs=("multi-vector",)
)
_MODELS = Operation(
    summary="List the model, by all its names",
    describe=list_models,
    describes_all=True,
    response=_MODELS_RESPONSE,
)
_MODEL = Operation(summary="Describe the model", describe=retrieve_model, response=_MODEL_RESPONSE)

DIALECT = Dialect(
    name="openai",
    title="OpenAI",
    operations={
        **posted(
            EMBEDDINGS,
            *("/v1/embeddings", "/embeddings", "/v1/engines/*/embeddings", "/engines/*/embeddings"),
            *("/openai/deployments/*/embeddings", "/v1/openai/deployments/*/embeddings"),
            *("/v1/deployments/*/embeddings", "/openai/v1/embeddings"),  # KServe and others put OpenAI's below /openai
        ),
        **posted(ZERO_SHOT, "/v1/classify", "/classify", "/openai/v1/classify"),
        **posted(_MULTI_VECTOR, "/v1/multi-vector", "/openai/v1/multi-vector"),
        "GET /v1/models": _MODELS,
        "GET /models": _MODELS,
        "GET /v1/models/*": _MODEL,
        "GET /models/*": _MODEL,
        "GET /openai/v1/models": _MODELS,
        "GET /openai/v1/models/*": _MODEL,
    },
    render_error=render_error,
    error=ERROR_SCHEMA,
)
