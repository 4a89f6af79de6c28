"""The part of Ollama's API that is about embeddings: parses requests, renders responses. Pure.

Source of the shapes: Ollama's server and SDKs. It also answers what clients request before they embed: the list of
models and their descriptions, in which unknown facts are left out. The digest, whose beginning Ollama's own command
shows, is computed from the facts of the model and not from its weights. Of the options `num_ctx` counts; the others are
for text generation. `keep_alive` is ignored unless clients may set how long the model stays. A request without a text
has the model loaded, or unloaded where `keep_alive` is 0.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import orjson

from vecd.base.files import JsonObject
from vecd.gateway.api import fields
from vecd.gateway.api.answer import json_response, list_of_pieces
from vecd.gateway.api.fields import (
    COUNT,
    STRING,
    Field,
    Fields,
    Schema,
    Wanted,
    any_of,
    described,
    inside,
    json_type,
    list_of,
    nullable,
    record,
)
from vecd.gateway.api.operation import Call, Dialect, Operation, ParsedEmbed, ParsedStay
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects import ask
from vecd.gateway.dialects.ask import parse_texts, resolve
from vecd.gateway.dialects.vllm import version
from vecd.gateway.errors import ApiError, BadRequest, InputTooLong, InvalidApiKey, ModelNotFound, NotFound
from vecd.gateway.request import Embedded, Overflow, Response
from vecd.shm.control import parse_keep_alive

_TAG = "latest"
_FOR_EVER = 9_223_372_036
"""In 2262: the last second that Go counts in nanoseconds. Ollama's command shows what is decades away as "Forever"."""

# --- fields -----------------------------------------------------------------------------------------------------


NUM_CTX = replace(ask.MAX_TOKENS, name="num_ctx")
OPTIONS = inside("options", "all others are ignored", NUM_CTX)
MODEL = replace(
    ask.MODEL, description="name of the model, with or without `:latest`; another tag may name a prompt: `name:query`"
)
NAME = Field(
    "name",
    "the same as `model`, by its older name",
    nullable("string"),
    lambda value, name: fields.read_text(value, name) or None,
    key=MODEL.key,
)
"""Ollama's own client always sends it, as "" beside `model`."""
INPUT = replace(ask.INPUT, schema=any_of(nullable("string"), list_of(STRING)), is_required=False)
PROMPT = replace(INPUT, name="prompt", schema=nullable("string"), read=fields.read_text)
TRUNCATE = replace(
    ask.OVERFLOW,
    name="truncate",
    description="cut a text that is longer than the model takes; false: refuse it; default: as the server is "
    "configured",
    schema=nullable("boolean"),
    read=lambda value, name: frozenset((Overflow.TRUNCATE if fields.read_flag(value, name) else Overflow.ERROR,)),
)
DIMENSIONS = fields.whole_number("dimensions", "length of the vectors; 0: the model's own", minimum=0)
KEEP_ALIVE = fields.anything(
    "keep_alive",
    "how long the model stays loaded after its last request, where the server allows that: seconds, or as `5m`; "
    "negative: for ever",
    {},
)
STREAM = fields.flag("stream", "false: one object instead of a line of JSON")
VERBOSE = fields.anything("verbose", "ignored", {})

# --- embed ------------------------------------------------------------------------------------------------------


def parse_embed(call: Call) -> ParsedEmbed | ParsedStay:
    model_info = call.model_info
    texts = _read_texts(call.wanted.get(INPUT), INPUT.name, model_info.config.max_inputs)
    request = resolve(call, texts, normalizes=True)

    def render(fragments: list[bytes], total_ns: int, num_tokens: int, load_ns: int = 0) -> Response:
        """In pieces, so that megabytes are never copied. `load_ns`: for so long a request without a text has waited for
        the model."""
        pieces = (
            b'{"model":%b,"embeddings":' % orjson.dumps(model_info.model),
            *list_of_pieces(zip(fragments)),
            b',"total_duration":%d,"load_duration":%d,"prompt_eval_count":%d}' % (total_ns, load_ns, num_tokens),
        )
        return Response(200, list(pieces))

    if not texts:
        return _stay(call, None, lambda load_ns: render([], load_ns, 0, load_ns))

    def render_embed(embedded: Embedded) -> Response:
        return render(embedded.made[0], round(embedded.durations().total_s * 1e9), embedded.num_tokens)

    return _stay(call, ParsedEmbed(request, render_embed))


def parse_embeddings(call: Call) -> ParsedEmbed | ParsedStay:
    """The older operation: one text. Its vector is the model's own, and not brought to length 1."""
    prompt = call.wanted.get(PROMPT)
    request = resolve(call, [prompt or ""])
    if not prompt:
        return _stay(call, None, lambda load_ns: Response(200, b'{"embedding":[]}'))
    return _stay(call, ParsedEmbed(request, render_embedding))


def render_embedding(embedded: Embedded) -> Response:
    [fragment] = embedded.made[0]
    return Response(200, [b'{"embedding":', fragment, b"}"])


def _stay(
    call: Call, work: ParsedEmbed | None, render: Callable[[int], Response] = lambda load_ns: Response(200)
) -> ParsedEmbed | ParsedStay:
    """`work`, and how long the model stays if the client says that and may. `render`: as in `ParsedStay`. Raises
    BadRequest for a time that cannot be read, where it counts."""
    given, allows = call.wanted.get(KEEP_ALIVE), call.model_info.config.client_keep_alive
    if work is not None and (given is None or not allows):
        return work
    if given is None:
        return ParsedStay(work, render, loads=True)
    try:
        seconds = parse_keep_alive(given)
    except (ValueError, OverflowError) as error:
        if allows:
            raise BadRequest(f"'{KEEP_ALIVE.name}' {error}", param=KEEP_ALIVE.name) from None
        return ParsedStay(work, render, loads=True)
    return ParsedStay(work, render, loads=seconds != 0, sets_keep_alive=allows, keep_alive_s=seconds)


def _read_texts(value: Any, name: str, max_inputs: int) -> list[str]:
    """Empty for null, an empty text and an empty list, as with Ollama. Raises BadRequest."""
    if value is None or value == "" or value == []:
        return []
    wrong = None if isinstance(value, str | list) else (name, _type_of(value))
    if isinstance(value, list):
        wrong = next(((f"{name}[{i}]", _type_of(x)) for i, x in enumerate(value) if type(x) is not str), None)
    if wrong is not None:
        raise BadRequest(f"invalid input type: '{wrong[0]}' must be a string, is {wrong[1]}", param=name)
    return parse_texts(value, name, max_inputs)


def _type_of(value: Any) -> str:
    return "a list of token ids" if isinstance(value, array) else json_type(value)


# --- what there is ----------------------------------------------------------------------------------------------


def list_models(model_infos: Sequence[ModelInfo], path: str) -> Response:
    return json_response(200, {"models": [_describe(name, each) for each in model_infos for name in each.names]})


def list_running(model_infos: Sequence[ModelInfo], path: str) -> Response:
    """Those in memory, as `ollama ps` shows them."""
    described = [
        {
            **_describe(each.model, each),
            "context_length": each.config.max_tokens,
            "expires_at": _moment(_FOR_EVER if each.expires_at is None else min(each.expires_at, _FOR_EVER)),
            "size_vram": 0,
        }
        for each in model_infos
        if each.residence.is_resident
    ]
    return json_response(200, {"models": described})


def show(call: Call) -> Response:
    model_info = call.model_info
    name, word = _required_name(call.wanted)
    model_info.prompt_of_model_name(name, word)  # raises ModelNotFound for a name that no embedding may use
    family = model_info.card.model_type
    return json_response(
        200,
        {
            "modelfile": "",
            "parameters": f"num_ctx {model_info.config.max_tokens}",
            "template": "",
            "details": _details(model_info),
            "model_info": {
                "general.architecture": family,
                "general.basename": model_info.model,
                f"{family}.context_length": model_info.config.max_tokens,
                f"{family}.embedding_length": model_info.num_dimensions,
            },
            "capabilities": ["embedding"] if "dense" in model_info.card.capabilities else [],
            "modified_at": _moment(model_info.created_at),
        },
    )


def pull(call: Call) -> Response:
    """Does nothing, and succeeds for every name that an embedding may use, because clients pull before they embed."""
    name, word = _required_name(call.wanted)
    try:
        call.model_info.prompt_of_model_name(name, word)
    except ModelNotFound as error:
        raise NotFound(
            f"pull model manifest: file does not exist: this server has {error.served} and no other model, "
            f'not "{error.name}"',
            code="model_not_found",
        ) from None
    line = orjson.dumps({"status": "success"})
    if call.wanted.get(STREAM) is False:
        return Response(200, line)
    return Response(200, line + b"\n", content_type="application/x-ndjson")


def _required_name(wanted: Wanted) -> tuple[str, str]:
    """The name of the model, and the client's word for it."""
    name, word = wanted.get(MODEL), wanted.word(MODEL)
    if not name:
        raise BadRequest("model is required", param=word)
    return name, word


def _describe(name: str, model_info: ModelInfo) -> JsonObject:
    tagged = name if ":" in name else f"{name}:{_TAG}"
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _moment(model_info.created_at),
        "size": model_info.card.weights_bytes,
        "digest": _digest(model_info),
        "details": _details(model_info),
    }


def _digest(model_info: ModelInfo) -> str:
    """SHA-256 of the known facts that change the model's vectors; the same under all its names."""
    facts = (
        model_info.model,
        model_info.config.version,
        model_info.card.model_type,
        model_info.card.default_dim,
        model_info.card.hidden_size,
        model_info.config.max_tokens,
        model_info.card.pooling,
        model_info.card.is_normalized,
        model_info.default_prompt,
        sorted(model_info.prompts.items()),
        model_info.card.weights_bytes,
    )
    return hashlib.sha256(orjson.dumps(facts)).hexdigest()


def _details(model_info: ModelInfo) -> JsonObject:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": model_info.card.model_type,
        "families": [model_info.card.model_type],
    }


def _moment(seconds: float) -> str:
    """RFC 3339. `seconds`: since 1970."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def render_error(error: ApiError) -> Response:
    """The message begins with Ollama's own where clients look for it."""
    message = error.message
    if isinstance(error, ModelNotFound):
        message = f'model "{error.name}" not found, try pulling it first; this server has {error.served}'
    elif isinstance(error, InputTooLong):
        message = f"the input length exceeds the context length: {message}"
    # Ollama's own Go client prints `status` of a 401, and nothing of `error`.
    status = {"status": message} if isinstance(error, InvalidApiKey) else {}
    return json_response(error.status, {"error": message, **status})


# --- documentation ----------------------------------------------------------------------------------------------

_MOMENT: Schema = {"type": "string", "format": "date-time"}
_DETAILS = record("parent_model", parent_model=STRING, format=STRING, family=STRING, families=list_of(STRING))
_EMBED_RESPONSE = record(
    model=STRING,
    embeddings=list_of(fields.VECTOR),
    total_duration=described(COUNT, "nanoseconds"),
    load_duration=described(COUNT, "nanoseconds"),
    prompt_eval_count=described(COUNT, "tokens"),
)
_SHOW_RESPONSE = record(
    *("modelfile", "parameters", "template"),
    modelfile=STRING,
    parameters=STRING,
    template=STRING,
    details=_DETAILS,
    model_info={"type": "object", "required": ["general.architecture"], "properties": {}},
    capabilities=list_of(STRING),
    modified_at=_MOMENT,
)


def _models_response(at_least: int = 1, **more: Schema) -> Schema:
    listed = record(
        name=STRING,
        model=STRING,
        modified_at=_MOMENT,
        size=described(COUNT, "bytes of the weights' files"),
        digest={"type": "string", "pattern": "^[0-9a-f]{64}$", "description": "SHA-256 of the model's facts"},
        details=_DETAILS,
        **more,
    )
    return record(models=list_of(listed, at_least=at_least))


DIALECT = Dialect(
    name="ollama",
    title="Ollama",
    operations={
        "POST /api/embed": Operation(
            summary="Embed texts",
            fields=Fields(MODEL, INPUT, TRUNCATE, DIMENSIONS, *OPTIONS, KEEP_ALIVE),
            parse=parse_embed,
            needs=("dense",),
            response=_EMBED_RESPONSE,
        ),
        "POST /api/embeddings": Operation(
            summary="Embed a text (older)",
            fields=Fields(MODEL, PROMPT, *OPTIONS, KEEP_ALIVE),
            parse=parse_embeddings,
            needs=("dense",),
            response=record(embedding=fields.VECTOR),
        ),
        "GET /api/tags": Operation(
            summary="List the model",
            describe=list_models,
            describes_all=True,
            response=_models_response(),
        ),
        "GET /api/ps": Operation(
            summary="List the models in memory",
            describe=list_running,
            describes_all=True,
            response=_models_response(
                at_least=0,
                context_length=COUNT,
                expires_at=described(_MOMENT, "when it is unloaded if no request comes; in 2262: never"),
                size_vram={"const": 0},
            ),
        ),
        "GET /api/version": Operation(
            summary="Tell the server's version", describe=version, response=record(version=STRING)
        ),
        "POST /api/show": Operation(
            summary="Describe the model", fields=Fields(MODEL, NAME, VERBOSE), parse=show, response=_SHOW_RESPONSE
        ),
        "POST /api/pull": Operation(
            summary="Make sure that the model is there",
            fields=Fields(MODEL, NAME, STREAM),
            parse=pull,
            response=record(status=STRING),
            binary_media_types=("application/x-ndjson",),
        ),
    },
    render_error=render_error,
    error=record("status", error=STRING, status=described(STRING, "the same; only with a 401")),
    prefix="/api/",
)
