"""vLLM's API beside `/v1/embeddings`: parses requests, renders responses. Pure, but for the clock.

Owns the shapes of `/pooling`, `/score`, `/tokenize`, `/detokenize` and `/version`, the paths of `/classify`
(`vecd.gateway.api.dialects.classify`), and SageMaker's `/invocations` with an `input`, to embed or to classify. Its
`/rerank`, and what ranks or scores at `/invocations`, belong to `vecd.gateway.api.dialects.rerank`. Source of the
shapes: vLLM's published OpenAPI document.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

import numpy as np
import orjson

from vecd.gateway.api import fields, schemas
from vecd.gateway.api.dialects import conversations, labels, options, ranking
from vecd.gateway.api.dialects.classify import CLASSIFY, parse_classify
from vecd.gateway.api.dialects.conversations import MESSAGES, read_messages
from vecd.gateway.api.dialects.headers import response_headers
from vecd.gateway.api.dialects.inputs import parse_ids, parse_inputs
from vecd.gateway.api.dialects.openai import (
    EMBEDDINGS,
    INPUT,
    VECTOR,
    Item,
    parse_embeddings,
    render_response,
    response_schema,
)
from vecd.gateway.api.dialects.options import RequestedForm
from vecd.gateway.api.dialects.rows import item_pieces, list_response, usage
from vecd.gateway.api.fields import Field, Fields, Values, contradiction
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.operations import (
    Call,
    Dialect,
    Operation,
    ParsedDecode,
    ParsedEmbed,
    ParsedMessages,
    ParsedTokenize,
)
from vecd.gateway.api.schemas import any_of, described, list_of, nullable, record
from vecd.gateway.encoding.activations import Scores
from vecd.gateway.encoding.matrices import list_pieces, matrix_pieces, runs_of, vector_json
from vecd.gateway.encoding.quantization import normalize
from vecd.gateway.encoding.scores import ScoreRows
from vecd.gateway.types.errors import ApiError, BadRequest, WrongModel
from vecd.gateway.types.messages import Response
from vecd.gateway.types.request import Embedded, EmbedRequest, Form, Overflow, Token
from vecd.shm.output import Output

# --- pooling ----------------------------------------------------------------------------------------------------

_TASKS = {
    "embed": Output.VECTORS,
    "token_embed": Output.TOKENS,
    "classify": Output.SCORES,
    "token_classify": Output.TOKEN_SCORES,
}
POOLING_TASK = fields.choice(
    "task",
    "a vector for each input (`embed`), or for each of its tokens (`token_embed`): those of a multi-vector model, or "
    "the last hidden states, each brought to length 1 unless `use_activation` is false; or the scores of all labels, "
    "in their order, for each input (`classify`) or for each token (`token_classify`), as logits if `use_activation` "
    "is false. Default: what the model is for",
    _TASKS,
)
EMBEDDING_MODE = fields.choice(
    "embedding_mode", "`query` or `document`: as `input_type`", {"query": "query", "document": "document"}
)
_NO_MULTIVECTOR = options.refused(
    "return_multivector",
    "'task' 'token_embed' has a vector for each token",
    nullable("boolean", default=False),
    harmless=(False,),
)
_NO_LATE_CHUNKING = options.refused(
    "late_chunking",
    "/v1/embeddings has it",
    any_of(nullable("boolean", default=False), {"type": "object"}),
    harmless=(False,),
)
_POOLING = Item(b"pooling", b"data")
_PROMPT_FIELDS: tuple[Field[str], ...] = (options.PROMPT, options.PROMPT_NAME, options.INPUT_TYPE)


def parse_pooling(call: Call) -> ParsedEmbed | ParsedMessages:
    values, model_info = call.values, call.model_info
    if values.get(MESSAGES) is not None:
        return options.read_messages(call, INPUT, parse_pooling)
    if values.get(EMBEDDING_MODE) is not None:
        mode = values.get(EMBEDDING_MODE)
        if values.get(options.INPUT_TYPE) not in (None, mode):
            raise contradiction(EMBEDDING_MODE.name, options.INPUT_TYPE.name)
        values = values.changed({options.INPUT_TYPE.name: mode})
        call = call._replace(values=values)
    task = _task_of(values, model_info)
    requested = options.read_form(values, call.headers)
    inputs = parse_inputs(values.get(INPUT), INPUT.name, model_info.max_inputs)
    request = options.read_request(
        call, inputs, requested, output=task, prompt_fields=_PROMPT_FIELDS, are_ids_of_model=True
    )
    if task is not Output.VECTORS:
        _check_rows(request, values, model_info)
    if task not in _AS_ARRAYS:
        return ParsedEmbed(request, partial(render_response, _POOLING, requested, model_info.model, call.request_id))
    activation = "identity" if values.get(options.USE_ACTIVATION) is False else None
    render = partial(render_arrays, activation, request.normalize, requested, model_info, call.request_id)
    return ParsedEmbed(request, render, is_large=True)


_AS_ARRAYS = (Output.SCORES, Output.TOKEN_SCORES, Output.TOKEN_VECTORS)


def _task_of(values: Values, model_info: ModelInfo) -> Output:
    """The output of the requested task, or that of the first of the tasks that the model has. Raises WrongModel."""
    requested = values.get(POOLING_TASK)
    own = [output for output in _POOLED if output in model_info.outputs]
    if not own:
        raise WrongModel(
            f"{model_info.what_it_is()}: POST /embed_sparse, or /v1/embeddings with 'output' 'sparse'",
            can=lambda info: _has_task(info, requested),
        )
    if requested is None:
        return own[0]
    if requested is Output.TOKENS and Output.TOKEN_VECTORS in own:
        return Output.TOKEN_VECTORS
    if requested not in model_info.outputs:
        names = ", ".join(f"'{name}'" for name, output in _TASKS.items() if output in model_info.outputs)
        raise WrongModel(
            f"{model_info.what_it_is()}: '{POOLING_TASK.name}' must be one of {names}",
            param=POOLING_TASK.name,
            can=lambda info: _has_task(info, requested),
        )
    return requested


def _has_task(model_info: ModelInfo, requested: Output | None) -> bool:
    if requested is None:
        return any(output in model_info.outputs for output in _POOLED)
    is_of_tokens = requested is Output.TOKENS and Output.TOKEN_VECTORS in model_info.outputs
    return is_of_tokens or requested in model_info.outputs


_POOLED = (Output.VECTORS, Output.SCORES, Output.TOKEN_SCORES, Output.TOKEN_VECTORS, Output.TOKENS)


def render_arrays(
    activation: str | None,
    normalizes: bool,
    requested: RequestedForm,
    model_info: ModelInfo,
    request_id: str,
    embedded: Embedded,
) -> Response:
    """The response with rows that were collected as arrays: scores, scores of tokens, vectors of tokens."""
    [collector] = embedded.collectors
    form = requested.form
    fragments: Iterator[Iterable[bytes]]
    if isinstance(collector, ScoreRows):
        scores = labels.scores_of(embedded, labels.head_of(model_info), activation)
        fragments = zip(_score_json(row, form) for row in scores)
    elif model_info.score is not None:
        activate = partial(labels.activated, head=model_info.score, activation=activation)
        matrices = labels.matrices_of(embedded)
        if form == Form():
            fragments = (list_pieces(map(activate, runs_of(matrix))) for matrix in matrices)
        else:
            steps = [lambda rows: activate(rows).astype(np.float32)]
            fragments = (matrix_pieces(matrix, form, steps) for matrix in matrices)
    else:
        steps = [normalize] if normalizes else []
        fragments = (matrix_pieces(matrix, form, steps) for matrix in labels.matrices_of(embedded))
    items = (
        item_pieces(_POOLING.object, index, [(_POOLING.vector, fragment)], embedded)
        for index, fragment in enumerate(fragments)
    )
    return list_response("embd", "list", model_info.model, request_id, items, embedded)


def _score_json(scores: Scores, form: Form) -> bytes:
    """Numbers have all digits of a float64; other encodings have float32 or what else is requested."""
    if form == Form():
        return orjson.dumps(scores, option=orjson.OPT_SERIALIZE_NUMPY)
    return vector_json(scores.astype(np.float32), form)


def _check_rows(request: EmbedRequest, values: Values, model_info: ModelInfo) -> None:
    """Refuse the options that only vectors of inputs have. Raises BadRequest."""
    width, are_tokens = request.output.width_of(model_info), request.output.is_per_token
    for field in options.DIMENSION_FIELDS:
        dimensions = values.get(field)
        if dimensions is not None and dimensions != width:
            what = "as many as a token's vector has" if are_tokens else "the number of labels"
            raise BadRequest(f"'{field.name}' must be {width}, {what}, is {dimensions}", param=field.name)
    overflow = request.tokenizing.overflow or model_info.overflow
    if are_tokens and overflow is Overflow.CHUNK:
        raise BadRequest(
            "'task' 'token_embed' does not go with chunks, whose tokens have no vectors in common: send 'overflow' "
            "'truncate' or 'error'",
            param="overflow",
        )


# --- scores -----------------------------------------------------------------------------------------------------


def _texts_to_score(name: str, description: str) -> Field[Any]:
    return fields.anything(name, description, ranking.TEXTS_SCHEMA, is_large=True)


SCORED = {
    name: _texts_to_score(name, description)
    for name, description in {
        "queries": "a text, or a list of texts",
        "documents": "as many texts, or any number for a single query",
        "items": "the same as `documents`",
        "data_1": "the same as `queries`",
        "data_2": "the same as `documents`",
        "text_1": "the same as `queries`",
        "text_2": "the same as `documents`",
    }.items()
}
_SPELLINGS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
QUERIES = ("queries", "data_1", "text_1")
"""The names of SCORED that only a request for scores has."""


def parse_score(call: Call) -> ParsedEmbed:
    """Scores have the model's own activation, as with vLLM."""
    values, model_info = call.values, call.model_info
    (first, second), texts = _read_scored(values, model_info.max_inputs)
    queries, documents = texts
    if len(queries) not in (1, len(documents)):
        raise BadRequest(
            f"'{first}' and '{second}' must be 1:1, 1:N or N:N texts, are {len(queries)}:{len(documents)}", param=second
        )
    return ranking.parse(
        call,
        queries,
        documents,
        second,
        ranking.read_tokenizing(values, model_info),
        partial(render_score, model=model_info.model, request_id=call.request_id),
        is_raw=ranking.agreed_flag(values) is True,
        activation="identity" if model_info.score is None else model_info.score.activation,
        priority=values.get(options.PRIORITY),
    )


def _read_scored(values: Values, max_inputs: int) -> tuple[tuple[str, str], list[list[str]]]:
    """The names of the fields that a body has for queries and documents, and their texts. Raises BadRequest."""
    present = tuple(name for name in SCORED if values.get(SCORED[name]) is not None)
    spelling = next((spelling for spelling in _SPELLINGS if spelling == present), None)
    if spelling is None:
        known = " or ".join(f"'{first}' and '{second}'" for first, second in _SPELLINGS)
        has = ", ".join(f"'{name}'" for name in present) or "none of them"
        raise BadRequest(f"A request must have {known}, has {has}", param=present[0] if present else _SPELLINGS[0][0])
    return spelling, [ranking.read_documents(values.get(SCORED[name]), name, max_inputs) for name in spelling]


def render_score(embedded: Embedded, relevance: ranking.Relevance, *, model: str, request_id: str) -> Response:
    body = {
        "id": f"score-{request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(relevance.scores)],
        "usage": usage(embedded),
    }
    return Response(200, orjson.dumps(body), response_headers(embedded))


# --- SageMaker --------------------------------------------------------------------------------------------------


def parse_invocation(call: Call) -> ParsedEmbed | ParsedMessages:
    """By what the model is for."""
    embeds = not set(EMBEDDINGS.needs).isdisjoint(call.model_info.capabilities)
    return parse_embeddings(call) if embeds else parse_classify(call)


# --- tokens -----------------------------------------------------------------------------------------------------

TEXT = fields.anything("prompt", "what is to be tokenized", schemas.STRING, is_required=True, is_large=True)
# It may be long, but is not `is_large`: large lists are cut to the number of ids that an embedding needs.
IDS = fields.anything("tokens", "token ids of the model's own", schemas.TOKEN_IDS, is_required=True)
RETURN_TOKEN_STRS = fields.flag(
    "return_token_strs", "true: the tokens as the vocabulary has them are answered, too", default=False
)


def parse_tokenize(call: Call) -> ParsedTokenize | ParsedMessages:
    """The tokens include those of the prompt that an embedding of the text under the same model's name would have. A
    conversation has none, and by default the beginning of a reply, as with vLLM."""
    values, model_info = call.values, call.model_info
    given = values.get(options.ADD_SPECIAL_TOKENS)
    prompt = model_info.prompt_of_model_name(values.get(options.MODEL))
    if values.get(MESSAGES) is not None:
        return read_messages(
            values,
            model_info,
            lambda texts: _tokenize(call, texts, prompt="", add_special_tokens=given is True),
            instead_of=TEXT,
            max_conversations=1,
            add_generation_prompt=True,
        )
    text = fields.read_text(values.require(TEXT), TEXT.name)
    prompt = model_info.default_prompt if prompt is None else prompt
    return _tokenize(call, [text], prompt=prompt, add_special_tokens=given is not False)


def _tokenize(call: Call, texts: list[str], *, prompt: str, add_special_tokens: bool) -> ParsedTokenize:
    tokens = Tokens(wants_texts=call.values.get(RETURN_TOKEN_STRS) is True)
    render = partial(render_tokenize, tokens, max_tokens=call.model_info.max_tokens)
    return ParsedTokenize(texts, add_special_tokens, prompt, tokens, render)


class Tokens:
    """The tokens of one text, as JSON."""

    def __init__(self, *, wants_texts: bool) -> None:
        self.num = 0
        self.ids: list[bytes] = []
        """Parts of the JSON list, each with commas inside."""
        self.texts: list[bytes] | None = [] if wants_texts else None
        """As `ids`."""

    def put(self, index: int, tokens: list[Token]) -> None:
        if not tokens:
            return
        self.num += len(tokens)
        self.ids.append(orjson.dumps([token.id for token in tokens])[1:-1])
        if self.texts is not None:
            self.texts.append(orjson.dumps([token.text for token in tokens])[1:-1])


def render_tokenize(tokens: Tokens, *, max_tokens: int) -> Response:
    texts = b"null" if tokens.texts is None else b"[%b]" % b",".join(tokens.texts)
    body = b'{"count":%d,"max_model_len":%d,"tokens":[%b],"token_strs":%b}'
    return Response(200, body % (tokens.num, max_tokens, b",".join(tokens.ids), texts))


def parse_detokenize(call: Call) -> ParsedDecode:
    ids = parse_ids(call.values.require(IDS), IDS.name)
    call.model_info.prompt_of_model_name(call.values.get(options.MODEL))  # raises ModelNotFound if names are strict
    return ParsedDecode([ids], skip_special_tokens=False, render=render_detokenize)


def render_detokenize(texts: list[str]) -> Response:
    [text] = texts
    return Response(200, orjson.dumps({"prompt": text}))


def version(model_info: ModelInfo, path: str) -> Response:
    return Response(200, orjson.dumps({"version": model_info.version}))


# --- errors -----------------------------------------------------------------------------------------------------

_ERROR_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    501: "NotImplementedError",
}
"""By status; the others have the status' phrase."""


def render_error(error: ApiError) -> Response:
    kind = _ERROR_TYPES.get(error.status) or HTTPStatus(error.status).phrase
    fault = {"message": error.message, "type": kind, "param": error.param, "code": error.status}
    return Response(error.status, orjson.dumps({"error": fault}))


# --- the dialect ------------------------------------------------------------------------------------------------

_ERROR_SCHEMA = record(
    error=record(
        message=schemas.STRING,
        type=schemas.STRING,
        param=described(nullable("string"), "the field that is wrong"),
        code=described(schemas.POSITIVE, "the status"),
    ),
)
_TOKENIZED = record(
    count=schemas.COUNT,
    max_model_len=schemas.POSITIVE,
    tokens=list_of(schemas.COUNT),
    token_strs=nullable("array", items=schemas.STRING),
)

SCORE = Operation(
    summary="Score how well documents answer queries",
    fields=Fields(*SCORED.values(), ranking.RAW_SCORES, ranking.USE_ACTIVATION, *ranking.COMMON),
    embed=parse_score,
    response=record(
        id=schemas.STRING,
        object={"const": "list"},
        created=schemas.COUNT,
        model=schemas.STRING,
        data=list_of(record(index=schemas.COUNT, object={"const": "score"}, score={"type": "number"})),
        usage=record(prompt_tokens=schemas.COUNT, total_tokens=schemas.COUNT),
    ),
    needs=ranking.NEEDS,
)

DIALECT = Dialect(
    name="vllm",
    title="vLLM",
    operations={
        "POST /pooling": Operation(
            summary="Embed or classify texts or token ids, as a whole or token by token",
            fields=Fields(INPUT, *options.COMMON, POOLING_TASK, EMBEDDING_MODE, _NO_MULTIVECTOR, _NO_LATE_CHUNKING),
            embed=parse_pooling,
            needs=("dense", "classify", "token-classify", "multi-vector"),
            response=response_schema("pooling", "data", any_of(*VECTOR["anyOf"], list_of(schemas.VECTOR))),
            returns_tokens=True,
            binary_media_types=EMBEDDINGS.binary_media_types,
        ),
        "POST /score": SCORE,
        "POST /v1/score": SCORE,
        "POST /openai/v1/score": SCORE,
        "POST /classify": CLASSIFY,
        "POST /v1/classify": CLASSIFY,
        "POST /openai/v1/classify": CLASSIFY,
        "POST /tokenize": Operation(
            summary="Tokenize a text, without embedding it",
            fields=Fields(TEXT, options.MODEL, options.ADD_SPECIAL_TOKENS, RETURN_TOKEN_STRS, *conversations.FIELDS),
            reply=parse_tokenize,
            response=_TOKENIZED,
            claims=(TEXT.name,),
        ),
        "POST /detokenize": Operation(
            summary="The text of token ids",
            fields=Fields(IDS, options.MODEL),
            reply=parse_detokenize,
            response=record(prompt=schemas.STRING),
        ),
        "POST /invocations": replace(
            EMBEDDINGS,
            summary="Embed or classify texts or token ids, where SageMaker looks for it",
            fields=Fields(*EMBEDDINGS.fields, *CLASSIFY.fields),
            embed=parse_invocation,
            response=any_of(EMBEDDINGS.response, CLASSIFY.response),
            claims=(INPUT.name,),
            needs=(*EMBEDDINGS.needs, *CLASSIFY.needs),
        ),
        "GET /version": Operation(
            summary="The server's version", describe=version, response=record(version=schemas.STRING)
        ),
    },
    render_error=render_error,
    error=_ERROR_SCHEMA,
)
