"""vLLM's API beside `/v1/embeddings`: parses requests, renders responses. Pure, but for the clock.

Its `/rerank`, and what ranks or scores at `/invocations`, belong to `vecd.gateway.dialects.rerank`. Source of the
shapes: vLLM's published OpenAPI document.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

import numpy as np
import orjson

from vecd.gateway.api import fields
from vecd.gateway.api.answer import item_pieces, json_response, list_response
from vecd.gateway.api.fields import Field, Fields, Wanted, any_of, described, list_of, nullable, record
from vecd.gateway.api.operation import (
    Call,
    Dialect,
    Operation,
    ParsedDecode,
    ParsedEmbed,
    ParsedMessages,
    ParsedTokenize,
    posted,
)
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects import ask, classify, rerank
from vecd.gateway.dialects.ask import ADD_SPECIAL_TOKENS, DIMENSIONS, INPUT, MODEL, forms_of, parse_ids, parse_inputs
from vecd.gateway.dialects.classify import CLASSIFY, parse_classify
from vecd.gateway.dialects.openai import EMBEDDINGS, VECTOR, Item, parse_embeddings, renderer_of, response_schema
from vecd.gateway.encoding.forms import normalize
from vecd.gateway.encoding.labels import Scores
from vecd.gateway.encoding.result import list_pieces, matrix_pieces, runs_of, vector_json
from vecd.gateway.errors import ApiError, BadRequest, WrongModel
from vecd.gateway.request import Embedded, EmbedRequest, Form, Overflow, Response, Token
from vecd.shm.output import Output

# --- pooling ----------------------------------------------------------------------------------------------------

_TASKS = {
    "embed": (Output.VECTORS,),
    "token_embed": (Output.TOKEN_VECTORS, Output.TOKENS),
    "classify": (Output.SCORES,),
    "token_classify": (Output.TOKEN_SCORES,),
}
"""The outputs of each, of which the first counts that the model has."""
POOLING_TASK = fields.choice(
    "task",
    "a vector for each input (`embed`), or for each of its tokens (`token_embed`): those of a multi-vector model, or "
    "the last hidden states, each brought to length 1 unless `use_activation` is false; or the scores of all labels, "
    "in their order, for each input (`classify`) or for each token (`token_classify`), as logits if `use_activation` "
    "is false. Default: what the model is for",
    _TASKS,
)
_TASK_OR_PURPOSE = Field(
    "task",
    ask.TASK.description,
    ask.TASK.schema,
    lambda value, name: None if value in [*_TASKS] else fields.read_text(value, name),
    key=ask.TASK.key,
)
"""Here the model decides the task."""
EMBEDDING_MODE = fields.choice(
    "embedding_mode",
    "`query` or `document`: as `input_type`",
    {"query": "query", "document": "document"},
    key=ask.INPUT_TYPE.key,
)
_NO_MULTIVECTOR = ask.refused(
    "return_multivector",
    "'task' 'token_embed' has a vector for each token",
    nullable("boolean", default=False),
    harmless=(False,),
)
_NO_LATE_CHUNKING = ask.refused(
    "late_chunking",
    "/v1/embeddings has it",
    any_of(nullable("boolean", default=False), {"type": "object"}),
    harmless=(False,),
)
_POOLING = Item(b"pooling", b"data")


def parse_pooling(call: Call) -> ParsedEmbed | ParsedMessages:
    wanted, _, model_info = call
    if isinstance(value := wanted.get(INPUT), ask.Conversations):
        return ask.render_conversations(call, value, parse_pooling)
    task = _task_of(wanted, model_info)
    forms = forms_of(call, task)
    inputs = parse_inputs(value, INPUT.name, model_info.config.max_inputs)
    if task is not Output.VECTORS:
        _check_rows(task, wanted, model_info)
    request = ask.resolve(call, inputs, task, forms=forms, has_chunks=task is Output.SCORES, are_ids_of_model=True)
    if task not in _AS_ARRAYS:
        has_metadata = wanted.get(ask.ENCODING) == ask.METADATA
        return ParsedEmbed(request, renderer_of(forms[0], _POOLING, has_metadata=has_metadata))
    arrays = partial(render_arrays, ask.activation_of(wanted), request, model_info)
    return ParsedEmbed(request, arrays, is_large=task is not Output.TOKENS)


_AS_ARRAYS = (Output.SCORES, Output.TOKEN_SCORES, Output.TOKEN_VECTORS, Output.TOKENS)


def _task_of(wanted: Wanted, model_info: ModelInfo) -> Output:
    """The output of the requested task, or that of the first of the tasks that the model has. Raises WrongModel."""
    outputs = wanted.get(POOLING_TASK) or _POOLED

    def own(info: ModelInfo) -> Output | None:
        return next((output for output in outputs if output in info.outputs), None)

    output = own(model_info)
    if output is None:
        names = ", ".join(f"'{name}'" for name, them in _TASKS.items() if them[-1] in model_info.outputs)
        raise WrongModel(
            f"{model_info.what_it_is()}: '{POOLING_TASK.name}' must be one of {names}",
            param=POOLING_TASK.name,
            can=lambda info: own(info) is not None,
        )
    return output


_POOLED = (Output.VECTORS, Output.SCORES, Output.TOKEN_SCORES, Output.TOKEN_VECTORS, Output.TOKENS)


def render_arrays(activation: str | None, request: EmbedRequest, model_info: ModelInfo, embedded: Embedded) -> Response:
    """Of rows that were kept as arrays: scores, scores of tokens, vectors of tokens."""
    [form], made = request.forms, embedded.made[0]
    fragments: Iterator[Iterable[bytes]]
    if request.output is Output.SCORES:
        scores = classify.scores_of(embedded, classify.head_of(model_info), activation)
        fragments = zip(_score_json(row, form) for row in scores)
    elif request.output is Output.TOKEN_SCORES:
        activate = partial(classify.activated, head=classify.head_of(model_info), activation=activation)
        if form == Form():
            fragments = (list_pieces(map(activate, runs_of(matrix))) for matrix in made)
        else:
            steps = [lambda rows: activate(rows).astype(np.float32)]
            fragments = (matrix_pieces(matrix, form, steps) for matrix in made)
    else:
        steps = [normalize] if request.normalize else []
        fragments = (matrix_pieces(matrix, form, steps) for matrix in made)
    items = (
        item_pieces(_POOLING.object, index, [(_POOLING.vector, fragment)], embedded)
        for index, fragment in enumerate(fragments)
    )
    return list_response("embd", "list", items, embedded)


def _score_json(scores: Scores, form: Form) -> bytes:
    """Numbers have all digits of a float64; other encodings have float32 or what else is requested."""
    if form == Form():
        return orjson.dumps(scores, option=orjson.OPT_SERIALIZE_NUMPY)
    return vector_json(scores.astype(np.float32), form)


def _check_rows(output: Output, wanted: Wanted, model_info: ModelInfo) -> None:
    """Refuse the options that only vectors of inputs have. Raises BadRequest."""
    width, are_tokens, dimensions = output.width_of(model_info.card), output.is_per_token, wanted.said(DIMENSIONS)
    if dimensions and dimensions != width:
        what = "as many as a token's vector has" if are_tokens else "the number of labels"
        word = wanted.word(DIMENSIONS)
        raise BadRequest(f"'{word}' must be {width}, {what}, is {dimensions}", param=word)
    if are_tokens and ask.overflow_of(wanted, model_info.overflow) is Overflow.CHUNK:
        raise BadRequest(
            "'task' 'token_embed' does not go with chunks, whose tokens have no vectors in common: send 'overflow' "
            "'truncate' or 'error'",
            param="overflow",
        )


def parse_invocation(call: Call) -> ParsedEmbed | ParsedMessages:
    """By what the model is for."""
    embeds = not set(EMBEDDINGS.needs).isdisjoint(call.model_info.card.capabilities)
    return parse_embeddings(call) if embeds else parse_classify(call)


# --- tokens -----------------------------------------------------------------------------------------------------

TEXT = replace(INPUT, name="prompt", description="what is to be tokenized", schema=fields.STRING)
# It may be long, but is not `is_large`: large lists are cut to the number of ids that an embedding needs.
IDS = replace(INPUT, name="tokens", description="token ids of the model's own", schema=fields.TOKEN_IDS, is_large=False)
RETURN_TOKEN_STRS = fields.flag(
    "return_token_strs", "true: the tokens as the vocabulary has them are answered, too", default=False
)


def parse_tokenize(call: Call) -> ParsedTokenize | ParsedMessages:
    """The tokens include those of the prompt that an embedding of the text under the same model's name would have. A
    conversation has none, and by default the beginning of a reply, as with vLLM."""
    wanted, _, model_info = call
    prompt = model_info.prompt_of_model_name(wanted.get(MODEL))
    if isinstance(value := wanted.get(INPUT), ask.Conversations):
        tokenize = partial(_tokenize, prompt="")
        return ask.render_conversations(
            call, value, tokenize, TEXT.name, max_conversations=1, add_generation_prompt=True
        )
    text = fields.read_text(wanted.require(TEXT), TEXT.name)
    call = call._replace(wanted=wanted | Wanted({INPUT.key: [text]}))
    return _tokenize(call, model_info.default_prompt if prompt is None else prompt)


def _tokenize(call: Call, prompt: str) -> ParsedTokenize:
    """The call for the tokens of its one text."""
    wanted = call.wanted
    has_texts, max_tokens = wanted.get(RETURN_TOKEN_STRS) is True, call.model_info.config.max_tokens
    tokens = TokenLists(id_of, text_of) if has_texts else TokenLists(id_of)

    def render() -> Response:
        [ids], [texts] = tokens.column(0), tokens.column(1) if has_texts else [b"null"]
        body = b'{"count":%d,"max_model_len":%d,"tokens":%b,"token_strs":%b}'
        return Response(200, body % (tokens.num, max_tokens, ids, texts))

    adds_special_tokens = wanted.get(ADD_SPECIAL_TOKENS) is not False
    return ParsedTokenize(wanted.require(INPUT), adds_special_tokens, prompt, tokens.put, render)


class TokenLists:
    """The tokens of texts as JSON, which is written as they come: for each text a list for each column."""

    def __init__(self, *columns: Callable[[int, Token], Any]) -> None:
        """`columns`: make the element of the list of the number of a text and its token."""
        self.num = 0
        self._columns = columns
        self._texts: list[list[list[bytes]]] = []

    def put(self, index: int, tokens: list[Token]) -> None:
        if index == len(self._texts):
            self._texts.append([[] for _ in self._columns])
        self.num += len(tokens)
        for parts, element in zip(self._texts[index], self._columns, strict=True):
            if tokens:
                parts.append(orjson.dumps([element(index, token) for token in tokens])[1:-1])

    def column(self, number: int) -> list[bytes]:
        """The list of each text."""
        return [b"[%b]" % b",".join(columns[number]) for columns in self._texts]


def id_of(index: int, token: Token) -> int:
    return token.id


def text_of(index: int, token: Token) -> str:
    return token.text


def parse_detokenize(call: Call, key: str = "prompt") -> ParsedDecode:
    """`key`: of the text in the response."""
    ids = parse_ids(call.wanted.require(IDS), IDS.name)
    call.model_info.prompt_of_model_name(call.wanted.get(MODEL))  # raises ModelNotFound if names are strict
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

DIALECT = Dialect(
    name="vllm",
    title="vLLM",
    operations={
        "POST /pooling": Operation(
            summary="Embed or classify texts or token ids, as a whole or token by token",
            fields=Fields(INPUT, *ask.COMMON, POOLING_TASK, EMBEDDING_MODE, _NO_MULTIVECTOR, _NO_LATE_CHUNKING),
            parse=parse_pooling,
            needs=("dense", "classify", "token-classify", "multi-vector"),
            response=response_schema("pooling", "data", any_of(*VECTOR["anyOf"], list_of(fields.VECTOR))),
            returns_tokens=True,
            binary_media_types=EMBEDDINGS.binary_media_types,
        ),
        **posted(rerank.SCORE, "/score", "/v1/score", "/openai/v1/score"),
        **posted(CLASSIFY, "/classify", "/v1/classify", "/openai/v1/classify"),
        "POST /tokenize": Operation(
            summary="Tokenize a text, without embedding it",
            fields=Fields(TEXT, MODEL, ADD_SPECIAL_TOKENS, RETURN_TOKEN_STRS, *ask.CONVERSATION_FIELDS),
            parse=parse_tokenize,
            response=_TOKENIZED,
            claims=(TEXT.name,),
        ),
        "POST /detokenize": Operation(
            summary="The text of token ids",
            fields=Fields(IDS, MODEL),
            parse=parse_detokenize,
            response=record(prompt=fields.STRING),
        ),
        "POST /invocations": replace(
            EMBEDDINGS,
            summary="Embed or classify texts or token ids, where SageMaker looks for it",
            fields=Fields(*EMBEDDINGS.fields, *CLASSIFY.fields, _TASK_OR_PURPOSE),
            parse=parse_invocation,
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
