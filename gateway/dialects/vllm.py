"""vLLM's API beside `/v1/embeddings`: parses requests, renders responses. Pure, but for the clock.

Its `/rerank`, and what ranks or scores at `/invocations`, belong to `vecd.gateway.dialects.rerank`. Source of the
shapes: vLLM's published OpenAPI document.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus

import numpy as np
import orjson

from vecd.gateway.api import fields
from vecd.gateway.api.answer import item_pieces, json_response, list_response, list_schema, written
from vecd.gateway.api.fields import Field, Fields, Values, agreed, any_of, described, list_of, nullable, record
from vecd.gateway.api.operation import (
    Call,
    Dialect,
    Operation,
    ParsedDecode,
    ParsedEmbed,
    ParsedMessages,
    ParsedTokenize,
)
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects import labels, options, ranking
from vecd.gateway.dialects.classify import CLASSIFY, parse_classify
from vecd.gateway.dialects.inputs import CONVERSATION_FIELDS, MESSAGES, parse_ids, parse_inputs, read_conversations
from vecd.gateway.dialects.openai import (
    EMBEDDINGS,
    INPUT,
    VECTOR,
    Item,
    parse_embeddings,
    render_response,
    response_schema,
)
from vecd.gateway.encoding.forms import normalize
from vecd.gateway.encoding.fragments import list_pieces, matrix_pieces, runs_of, vector_json
from vecd.gateway.encoding.labels import Scores
from vecd.gateway.encoding.result import ScoreRows
from vecd.gateway.errors import ApiError, BadRequest, WrongModel
from vecd.gateway.request import Embedded, EmbedRequest, Form, Overflow, Response, Token
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
    purpose = agreed(values, EMBEDDING_MODE, options.INPUT_TYPE)
    if purpose is not None:
        values = values.changed({options.INPUT_TYPE.name: purpose[0]})
        call = call._replace(values=values)
    task = _task_of(values, model_info)
    requested = options.read_form(values, call.headers)
    inputs = parse_inputs(values.get(INPUT), INPUT.name, model_info.config.max_inputs)
    request = options.read_request(
        call, inputs, requested, output=task, prompt_fields=_PROMPT_FIELDS, are_ids_of_model=True
    )
    if task is not Output.VECTORS:
        _check_rows(request, values, model_info)
    if task not in _AS_ARRAYS:
        return ParsedEmbed(request, partial(render_response, _POOLING, requested, model_info.model, call.request_id))
    activation = "identity" if values.get(options.USE_ACTIVATION) is False else None
    render = partial(render_arrays, activation, request, model_info, call.request_id)
    return ParsedEmbed(request, render, is_large=True)


_AS_ARRAYS = (Output.SCORES, Output.TOKEN_SCORES, Output.TOKEN_VECTORS)


def _task_of(values: Values, model_info: ModelInfo) -> Output:
    """The output of the requested task, or that of the first of the tasks that the model has. Raises WrongModel."""
    requested = values.get(POOLING_TASK)
    if requested is None:
        return next(output for output in _POOLED if output in model_info.outputs)
    own = _own_task(requested, model_info)
    if own is None:
        names = ", ".join(f"'{name}'" for name, output in _TASKS.items() if output in model_info.outputs)
        raise WrongModel(
            f"{model_info.what_it_is()}: '{POOLING_TASK.name}' must be one of {names}",
            param=POOLING_TASK.name,
            can=lambda info: _own_task(requested, info) is not None,
        )
    return own


def _own_task(requested: Output, model_info: ModelInfo) -> Output | None:
    """The model's output for a task; None if it has none. Vectors of tokens are projected where it has such."""
    if requested is Output.TOKENS and Output.TOKEN_VECTORS in model_info.outputs:
        return Output.TOKEN_VECTORS
    return requested if requested in model_info.outputs else None


_POOLED = (Output.VECTORS, Output.SCORES, Output.TOKEN_SCORES, Output.TOKEN_VECTORS, Output.TOKENS)


def render_arrays(
    activation: str | None, request: EmbedRequest, model_info: ModelInfo, request_id: str, embedded: Embedded
) -> Response:
    """Of rows that were collected as arrays: scores, scores of tokens, vectors of tokens."""
    [collector] = embedded.collectors
    [form] = request.forms
    fragments: Iterator[Iterable[bytes]]
    if isinstance(collector, ScoreRows):
        scores = labels.scores_of(embedded, labels.head_of(model_info), activation)
        fragments = zip(_score_json(row, form) for row in scores)
    elif model_info.card.score is not None:
        activate = partial(labels.activated, head=model_info.card.score, activation=activation)
        matrices = labels.matrices_of(embedded)
        if form == Form():
            fragments = (list_pieces(map(activate, runs_of(matrix))) for matrix in matrices)
        else:
            steps = [lambda rows: activate(rows).astype(np.float32)]
            fragments = (matrix_pieces(matrix, form, steps) for matrix in matrices)
    else:
        steps = [normalize] if request.normalize else []
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
    width, are_tokens = request.output.width_of(model_info.card), request.output.is_per_token
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

SCORED = {
    name: fields.anything(name, description, ranking.TEXTS_SCHEMA, is_large=True)
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
    (first, second), texts = _read_scored(values, model_info.config.max_inputs)
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
        partial(render_score, model=model_info.model, request_id=call.request_id),
        activation="identity" if model_info.card.score is None else model_info.card.score.activation,
    )


def _read_scored(values: Values, max_inputs: int) -> tuple[tuple[str, str], list[list[str]]]:
    """The names of the fields that a body has for queries and documents, and their texts."""
    present = tuple(name for name in SCORED if values.get(SCORED[name]) is not None)
    spelling = next((spelling for spelling in _SPELLINGS if spelling == present), None)
    if spelling is None:
        known = " or ".join(f"'{first}' and '{second}'" for first, second in _SPELLINGS)
        has = ", ".join(f"'{name}'" for name in present) or "none of them"
        raise BadRequest(f"A request must have {known}, has {has}", param=present[0] if present else _SPELLINGS[0][0])
    return spelling, [ranking.read_documents(values.get(SCORED[name]), name, max_inputs) for name in spelling]


def render_score(embedded: Embedded, relevance: ranking.Relevance, *, model: str, request_id: str) -> Response:
    data = ({"index": index, "object": "score", "score": score} for index, score in enumerate(relevance.scores))
    return list_response("score", "list", model, request_id, written(data), embedded)


def parse_invocation(call: Call) -> ParsedEmbed | ParsedMessages:
    """By what the model is for."""
    embeds = not set(EMBEDDINGS.needs).isdisjoint(call.model_info.card.capabilities)
    return parse_embeddings(call) if embeds else parse_classify(call)


# --- tokens -----------------------------------------------------------------------------------------------------

TEXT = fields.anything("prompt", "what is to be tokenized", fields.STRING, is_required=True, is_large=True)
# It may be long, but is not `is_large`: large lists are cut to the number of ids that an embedding needs.
IDS = fields.anything("tokens", "token ids of the model's own", fields.TOKEN_IDS, is_required=True)
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
        return read_conversations(
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
    render = partial(render_tokenize, tokens, max_tokens=call.model_info.config.max_tokens)
    return ParsedTokenize(texts, add_special_tokens, prompt, tokens, render)


class Tokens:
    """The tokens of one text: parts of JSON lists, each with commas inside."""

    def __init__(self, *, wants_texts: bool) -> None:
        self.num = 0
        self.ids: list[bytes] = []
        self.texts: list[bytes] | None = [] if wants_texts else None

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


def parse_detokenize(call: Call, key: str = "prompt") -> ParsedDecode:
    """`key`: of the text in the response."""
    ids = parse_ids(call.values.require(IDS), IDS.name)
    call.model_info.prompt_of_model_name(call.values.get(options.MODEL))  # raises ModelNotFound if names are strict
    return ParsedDecode([ids], False, lambda texts: json_response(200, {key: texts[0]}))


def version(model_infos: Sequence[ModelInfo], path: str) -> Response:
    return json_response(200, {"version": model_infos[0].config.version})


_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError", 501: "NotImplementedError"}
"""By status; the others have the status' phrase."""


def render_error(error: ApiError) -> Response:
    kind = _ERROR_TYPES.get(error.status) or HTTPStatus(error.status).phrase
    fault = {"message": error.message, "type": kind, "param": error.param, "code": error.status}
    return json_response(error.status, {"error": fault})


# --- the dialect ------------------------------------------------------------------------------------------------

_ERROR_SCHEMA = record(
    error=record(
        message=fields.STRING,
        type=fields.STRING,
        param=described(nullable("string"), "the field that is wrong"),
        code=described(fields.POSITIVE, "the status"),
    ),
)
_TOKENIZED = record(
    count=fields.COUNT,
    max_model_len=fields.POSITIVE,
    tokens=list_of(fields.COUNT),
    token_strs=nullable("array", items=fields.STRING),
)

SCORE = Operation(
    summary="Score how well documents answer queries",
    fields=Fields(*SCORED.values(), ranking.RAW_SCORES, ranking.USE_ACTIVATION, *ranking.COMMON),
    embed=parse_score,
    response=list_schema({"const": "list"}, record(index=fields.COUNT, object={"const": "score"}, score=fields.NUMBER)),
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
            response=response_schema("pooling", "data", any_of(*VECTOR["anyOf"], list_of(fields.VECTOR))),
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
            fields=Fields(TEXT, options.MODEL, options.ADD_SPECIAL_TOKENS, RETURN_TOKEN_STRS, *CONVERSATION_FIELDS),
            reply=parse_tokenize,
            response=_TOKENIZED,
            claims=(TEXT.name,),
        ),
        "POST /detokenize": Operation(
            summary="The text of token ids",
            fields=Fields(IDS, options.MODEL),
            reply=parse_detokenize,
            response=record(prompt=fields.STRING),
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
            summary="The server's version", describe=version, response=record(version=fields.STRING)
        ),
    },
    render_error=render_error,
    error=_ERROR_SCHEMA,
)
