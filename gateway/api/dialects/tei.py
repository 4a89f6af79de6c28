"""text-embeddings-inference's HTTP API: parses requests, renders responses. Pure.

Owns the shapes of `/embed`, `/embed_all`, `/embed_sparse`, `/similarity`, `/rerank`, `/tokenize`, `/decode`, `/vertex`,
and of its errors. `/`, `/invocations` and Hugging Face's paths with the name of a model do what the model is for: as
`/embed`, `/predict` (`vecd.gateway.api.dialects.predict`) or `/embed_sparse`. `/` and `/invocations` rank a body with a
`query` and `texts`, which Elasticsearch sends to `/` as `documents`; a model that ranks scores pairs in `inputs` there.
`/info` belongs to `vecd.gateway.api.info`, because operators get more fields there. Source of the shapes: its router's
types, version 1.9.

Differences from text-embeddings-inference:

- token ids are the model's unless `--token-ids` names another vocabulary;
- `parameters` may hold the options of every embedding, and not only of texts to compare;
- the inputs of one request are all texts or all token ids;
- an empty text is embedded, not refused;
- `dimensions` is refused unless the model was made for it, or declared so (`--matryoshka`);
- texts inside objects, as in `/similarity` and `/vertex`, may take 256 KiB of a body that is larger than 64 KiB;
- `top_n` of a request to rank is heeded.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import orjson

from vecd.gateway.api import fields, schemas
from vecd.gateway.api.dialects import labels, predict, ranking, sparse
from vecd.gateway.api.dialects.headers import BINARY_MEDIA_TYPES, parse_accept, parse_priority, parse_timeout_s
from vecd.gateway.api.dialects.inputs import check_id_lists, parse_inputs, parse_texts
from vecd.gateway.api.dialects.options import INPUT_TYPE, MODEL
from vecd.gateway.api.dialects.ranking import QUERY, TOP_N, Relevance, read_documents
from vecd.gateway.api.dialects.rows import fragments_of, json_list, list_of_pieces, render_rows
from vecd.gateway.api.dialects.tei_options import (
    DIRECTION,
    IDS_OR_LISTS,
    INPUTS,
    PROMPT_NAME,
    TEXT_OR_TEXTS,
    TOKENIZING_FIELDS,
    TRUNCATE,
    WHAT,
    Options,
    checked_inputs,
    headers_of,
    parameters,
    read_nested,
    read_overflow,
    read_tokenizing,
)
from vecd.gateway.api.fields import Field, Fields, contradiction, json_type
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.operations import Call, Dialect, Operation, ParsedDecode, ParsedEmbed, ParsedTokenize
from vecd.gateway.api.schemas import any_of, described, list_of, nullable, record
from vecd.gateway.encoding.forms import Names, check_forms
from vecd.gateway.encoding.fragments import Matrix
from vecd.gateway.types.errors import (
    ApiError,
    BadRequest,
    EmptyInput,
    EngineFailed,
    ModelNotFound,
    ServerError,
    TooManyInputs,
    Unavailable,
    WrongModel,
)
from vecd.gateway.types.messages import Response
from vecd.gateway.types.request import (
    Embedded,
    EmbedRequest,
    Encoding,
    Form,
    Overflow,
    Pair,
    Token,
    TokenIds,
    Tokenizing,
)
from vecd.shm.output import Output

# --- fields -----------------------------------------------------------------------------------------------------

_COMPARED = record(source_sentence=schemas.STRING, sentences=schemas.TEXTS)

INPUTS_OF_ALL = replace(
    INPUTS,
    description=f"{WHAT}; or texts to compare, as with /similarity",
    schema=any_of(*TEXT_OR_TEXTS, *IDS_OR_LISTS, _COMPARED, *predict.PREDICTED.schema["anyOf"]),
)
_INPUTS_OF_HUB = replace(INPUTS, schema=any_of(*TEXT_OR_TEXTS, *IDS_OR_LISTS, *predict.PREDICTED.schema["anyOf"]))
TEXT_INPUTS = replace(
    INPUTS,
    name="text_inputs",
    description="the same as `inputs`, by the name of SageMaker's own models",
    is_required=False,
)
COMPARED = fields.anything("inputs", "a text, and those that it is compared with", _COMPARED, is_required=True)
TEXTS = fields.anything("inputs", "a text, or a list of texts", any_of(*TEXT_OR_TEXTS), is_required=True, is_large=True)
NORMALIZE = fields.flag("normalize", "bring vectors to length 1", default=True)
DIMENSIONS = fields.whole_number("dimensions", "length of the vectors", minimum=1)
ENCODING = fields.choice(
    "encoding_format",
    "numbers, whether 'float' or 'base64', which Hugging Face's clients send, and cannot read; or no JSON at all",
    {"float": Encoding.FLOAT, "base64": Encoding.FLOAT, "bytes": Encoding.BYTES, "npy": Encoding.NPY},
)
ADD_SPECIAL_TOKENS = fields.flag("add_special_tokens", "put the model's special tokens around a text", default=True)
IDS = fields.anything(
    "ids",
    "token ids of the model's own, or a list of lists of them",
    any_of(*IDS_OR_LISTS),
    is_required=True,
    is_large=True,
)
SKIP_SPECIAL_TOKENS = fields.flag("skip_special_tokens", "leave the model's special tokens out of a text", default=True)


def _read_instances(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise BadRequest(f"'{name}' must be a list of objects, is {json_type(value)}", param=name)
    if not value:
        raise EmptyInput(f"'{name}' cannot be empty", param=name)
    for index, instance in enumerate(value):
        if not isinstance(instance, dict):
            raise BadRequest(f"'{name}[{index}]' must be an object, is {json_type(instance)}", param=name)
    return value


_SPARSE_OPTIONS = (*TOKENIZING_FIELDS, INPUT_TYPE, sparse.TOP_K, sparse.MAX_ACTIVE_DIMS, sparse.MIN_WEIGHT)
OPTION_FIELDS = Fields(*TOKENIZING_FIELDS, NORMALIZE, DIMENSIONS, ENCODING)
INSTANCES = Field(
    "instances",
    "requests as /embed takes them, all with the same options",
    list_of(Fields(INPUTS, *OPTION_FIELDS).schema(), at_least=1),
    _read_instances,
    is_required=True,
)
PARAMETERS = parameters(OPTION_FIELDS)
ALL_OPTIONS = Fields(*{field.name: field for field in (*OPTION_FIELDS, *predict.OPTIONS, *_SPARSE_OPTIONS)}.values())
ALL_PARAMETERS = parameters(Fields(*ALL_OPTIONS, predict.CANDIDATE_LABELS))
"""Of the paths whose operation depends on the model."""

# --- embeddings -------------------------------------------------------------------------------------------------


def parse_embed(call: Call, inputs_field: Field[Any] = INPUTS) -> ParsedEmbed:
    inputs = checked_inputs(call.values.get(inputs_field), inputs_field.name, call.model_info)
    request = _embed_request(call, Options(call.values), inputs)
    return ParsedEmbed(request, partial(render_vectors, model_info=call.model_info))


def parse_embed_by_model(call: Call) -> ParsedEmbed:
    """The operation at Hugging Face's paths with the name of a model, which may select a prompt, as elsewhere."""
    prompt = call.model_info.prompt_of_model_name(call.values.get(MODEL))
    work = parse_embed(call)
    tokenizing = work.request.tokenizing
    if prompt is not None and tokenizing.prompt is not None and prompt != tokenizing.prompt:
        raise contradiction(MODEL.name, PROMPT_NAME.name)
    if prompt is None:
        return work
    return work._replace(request=work.request._replace(tokenizing=tokenizing._replace(prompt=prompt)))


def parse_for_hub(call: Call) -> ParsedEmbed:
    """The operation at Hugging Face's paths, by what the model is for."""
    return _by_kind(call, parse_embed_by_model, predict.parse_by_hub)


def _by_kind(
    call: Call, embed: Callable[[Call], ParsedEmbed], classify: Callable[[Call], ParsedEmbed] = predict.parse_predict
) -> ParsedEmbed:
    """What the model is for; a model that makes vectors of texts may also do other things, by other paths."""
    model_info = call.model_info
    if model_info.is_dense:
        return embed(call)
    if model_info.score is None and model_info.sparse is None:
        raise WrongModel(
            f"{model_info.what_it_is()}: POST /v1/embeddings with 'output' 'multi-vector'",
            can=lambda info: info.is_dense or info.score is not None or info.sparse is not None,
        )
    return parse_embed_sparse(call) if model_info.score is None else classify(call)


def parse_invocation(call: Call) -> ParsedEmbed:
    """Raises WrongModel and BadRequest."""
    has_texts = call.values.get(TEXT_INPUTS) is not None and call.values.get(INPUTS_OF_ALL) is None
    return parse_embed(call, TEXT_INPUTS) if has_texts and call.model_info.is_dense else parse_default(call)


def parse_by_kind(call: Call) -> ParsedEmbed:
    """The operation at "/" without a query, by what the model is for."""
    return _by_kind(call, parse_embed_or_compare)


def parse_embed_or_compare(call: Call) -> ParsedEmbed:
    """Texts to compare are recognized by their shape, because clients send them to "/", too."""
    return parse_similarity(call) if isinstance(call.values.get(INPUTS_OF_ALL), dict) else parse_embed(call)


def parse_embed_all(call: Call) -> ParsedEmbed:
    """Raises WrongModel if a token's vector is longer than a row, and BadRequest."""
    values, model_info = call.values, call.model_info
    if Output.TOKENS not in model_info.outputs:
        raise WrongModel(
            f"This model cannot give one vector for each token: they would have {model_info.hidden_size} dimensions, "
            f"and there is room for the {model_info.dim} of its own vectors",
            can=lambda info: info.is_dense and Output.TOKENS in info.outputs,
        )
    tokenizing = read_tokenizing(Options(values), model_info)
    overflow = tokenizing.overflow or model_info.overflow
    # An input in chunks has no single row for each token. It is refused, because the request did not allow to cut it.
    tokenizing = tokenizing._replace(overflow=Overflow.ERROR if overflow is Overflow.CHUNK else overflow)
    request = EmbedRequest(
        inputs=checked_inputs(values.get(INPUTS), INPUTS.name, model_info),
        priority=parse_priority(call.headers),
        timeout_s=parse_timeout_s(call.headers),
        tokenizing=tokenizing,
        output=Output.TOKENS,
    )
    return ParsedEmbed(request, partial(render_vectors, model_info=model_info))


def _embed_request(call: Call, options: Options, inputs: list[str] | list[TokenIds]) -> EmbedRequest:
    model_info = call.model_info
    normalizes = options.get(NORMALIZE) is not False
    encoding = options.get(ENCODING) or parse_accept(call.headers) or Encoding.FLOAT
    request = EmbedRequest(
        inputs=inputs,
        forms=(Form(encoding),),
        priority=parse_priority(call.headers),
        timeout_s=parse_timeout_s(call.headers),
        tokenizing=read_tokenizing(options, model_info),
        output=Output.VECTORS if normalizes else Output.UNNORMALIZED,
        normalize=normalizes,
        dimensions=_dimensions(options, model_info),
    )
    check_forms(
        request,
        model_info,
        Names(dimensions=options.name_of(DIMENSIONS)),
        has_ranges=model_info.has_quantization_ranges,
    )
    return request


def _dimensions(options: Options, model_info: ModelInfo) -> int | None:
    dimensions = options.get(DIMENSIONS)
    return None if dimensions is None else model_info.check_dimensions(dimensions, options.name_of(DIMENSIONS))


def render_vectors(embedded: Embedded, *, model_info: ModelInfo) -> Response:
    """A JSON list that holds the collected rows without a copy, or a binary response."""
    [collector] = embedded.collectors
    if isinstance(collector, Matrix):
        response = render_rows(collector, model=model_info.model, num_tokens=embedded.num_tokens)
    else:
        response = Response(200, json_list(fragments_of(embedded)))
    response.headers.update(headers_of(embedded, model_info))
    return response


# --- sparse vectors ---------------------------------------------------------------------------------------------


def parse_embed_sparse(call: Call) -> ParsedEmbed:
    """Raises WrongModel and BadRequest."""
    values, model_info, options = call.values, call.model_info, Options(call.values)
    output, purpose = sparse.output_of(model_info), options.get(INPUT_TYPE)
    tokenizing = labels.without_chunks(read_tokenizing(options, model_info), model_info)
    if purpose is not None and tokenizing.prompt is None:
        tokenizing = tokenizing._replace(prompt=model_info.prompt_for(purpose, options.name_of(INPUT_TYPE)))
    request = EmbedRequest(
        inputs=checked_inputs(values.get(INPUTS), INPUTS.name, model_info),
        priority=parse_priority(call.headers),
        timeout_s=parse_timeout_s(call.headers),
        tokenizing=tokenizing._replace(role=model_info.role_of(purpose or options.get(PROMPT_NAME))),
        output=output,
        sparse=sparse.read_options(options),
    )
    return ParsedEmbed(request, partial(_render_sparse, model_info=model_info), sparse.is_large(request.inputs))


def _render_sparse(embedded: Embedded, *, model_info: ModelInfo) -> Response:
    vectors = map(sparse.indexed_pieces, sparse.vectors_of(embedded))
    return Response(200, list_of_pieces(vectors), headers_of(embedded, model_info))


# --- similarity -------------------------------------------------------------------------------------------------


def parse_similarity(call: Call) -> ParsedEmbed:
    model_info = call.model_info
    texts, options = _compared(call.values.require(COMPARED), model_info), Options(call.values)
    _check_is_json(options, "cosines are JSON")
    request = EmbedRequest(
        inputs=texts,
        forms=(Form(Encoding.BYTES),),
        priority=parse_priority(call.headers),
        timeout_s=parse_timeout_s(call.headers),
        tokenizing=read_tokenizing(options, model_info),
        normalize=True,
        dimensions=_dimensions(options, model_info),
    )
    return ParsedEmbed(request, partial(render_similarity, model_info=model_info))


def _check_is_json(options: Options, why: str) -> None:
    if options.get(ENCODING) not in (None, Encoding.FLOAT):
        name = options.name_of(ENCODING)
        raise BadRequest(f"'{name}' must be 'float': {why}", param=name)


def _compared(value: Any, model_info: ModelInfo) -> list[str]:
    """The text, and the texts that it is compared with."""
    given = fields.expect(dict, value, "inputs", "an object of a 'source_sentence' and 'sentences'")
    source = fields.expect(str, given.get("source_sentence"), "inputs.source_sentence", "a string", none="missing")
    name = "inputs.sentences"
    sentences = fields.expect(list, given.get("sentences"), name, "a list of strings", none="missing")
    if not sentences:
        raise EmptyInput(f"'{name}' cannot be empty", param=name)
    if len(sentences) >= model_info.max_inputs:
        raise TooManyInputs(
            f"'{name}' has {len(sentences)} texts, at most {model_info.max_inputs - 1} beside the source in one "
            "request (--max-inputs)",
            param=name,
        )
    return [source, *parse_texts(sentences, name, model_info.max_inputs)]


def render_similarity(embedded: Embedded, *, model_info: ModelInfo) -> Response:
    """Cosines: the vectors are of length 1."""
    [collector] = embedded.collectors
    assert isinstance(collector, Matrix)
    cosines = collector.rows[1:] @ collector.rows[0]
    body = orjson.dumps(cosines, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(200, body, headers_of(embedded, model_info))


# --- ranking ----------------------------------------------------------------------------------------------------

RANKED = fields.anything("texts", "what is ranked", schemas.TEXTS, is_required=True, is_large=True)
RANKED_DOCUMENTS = fields.anything(
    "documents", "the same, by the name of other APIs; or objects with a `text`", ranking.TEXTS_SCHEMA, is_large=True
)
RAW_SCORES = ranking.flag("raw_scores", "true: scores are the model's logits, without a sigmoid", default=False)
RETURN_TEXT = ranking.flag("return_text", "true: the response repeats the texts", default=False)
RETURN_DOCUMENTS = ranking.flag("return_documents", "the same, by the name of other APIs", default=False)


def parse_rerank(call: Call) -> ParsedEmbed:
    values, model_info = call.values, call.model_info
    field = RANKED if values.get(RANKED) is not None or values.get(RANKED_DOCUMENTS) is None else RANKED_DOCUMENTS
    texts, documents = values.require(field), values.get(RANKED_DOCUMENTS)
    if documents is not None and documents != texts:
        raise contradiction(RANKED.name, RANKED_DOCUMENTS.name)
    if texts == []:
        raise EmptyInput(f"'{field.name}' cannot be empty", param=field.name)
    texts = read_documents(texts, field.name, model_info.max_inputs)
    returns_texts = values.get(RETURN_TEXT) is True or values.get(RETURN_DOCUMENTS) is True
    repeated = tuple(texts) if returns_texts else ()
    render = partial(render_ranks, texts=repeated, num=values.get(TOP_N), model_info=model_info)
    return _parse_ranked(call, [values.require(QUERY)], texts, field.name, render, repeated)


def _parse_ranked(
    call: Call,
    queries: list[str],
    texts: list[str],
    field: str,
    render: Callable[[Embedded, Relevance], Response],
    repeated: tuple[str, ...] = (),
) -> ParsedEmbed:
    options = Options(call.values)
    tokenizing = Tokenizing(overflow=read_overflow(options, ranking.default_overflow(call.model_info)))
    is_raw = options.get(RAW_SCORES) is True
    return ranking.parse(call, queries, texts, field, tokenizing, render, is_raw=is_raw, repeated=repeated)


def parse_default(call: Call) -> ParsedEmbed:
    """Raises WrongModel and BadRequest."""
    if call.values.get(QUERY) is not None:
        return parse_rerank(call)
    return parse_pairs(call) if _takes_pairs(call.model_info) else parse_by_kind(call)


def _takes_pairs(model_info: ModelInfo) -> bool:
    return "rerank" in model_info.capabilities or model_info.capabilities == ("multi-vector",)


def parse_pairs(call: Call) -> ParsedEmbed:
    """A list of pairs, as OpenSearch's blueprint for cross-encoders sends them: their scores, in their order. Raises
    WrongModel for texts alone, and BadRequest."""
    model_info, pairs = call.model_info, call.values.get(INPUTS_OF_ALL)
    if isinstance(pairs, list) and pairs and isinstance(pairs[0], dict | list):
        pairs = predict.read_sequences(pairs, INPUTS.name, model_info).inputs
        if isinstance(pairs[0], Pair):
            queries, texts = map(list, zip(*pairs, strict=True))
            return _parse_ranked(call, queries, texts, INPUTS.name, partial(_render_scores, model_info=model_info))
    raise WrongModel(
        "The model served here ranks texts: send a 'query' and 'texts', or pairs of texts as 'inputs'",
        can=lambda info: not _takes_pairs(info),
    )


def _render_scores(embedded: Embedded, relevance: Relevance, *, model_info: ModelInfo) -> Response:
    body = orjson.dumps([{"score": score} for score in relevance.scores])
    return Response(200, body, headers_of(embedded, model_info))


def render_ranks(
    embedded: Embedded, relevance: Relevance, *, texts: tuple[str, ...], num: int | None, model_info: ModelInfo
) -> Response:
    """`texts`: those that the response repeats; none if it repeats none."""
    ranks = [
        orjson.dumps({"index": index, "score": score, **({"text": texts[index]} if texts else {})})
        for index, score in relevance.ranked(num)
    ]
    return Response(200, json_list(ranks), headers_of(embedded, model_info))


# --- Vertex AI --------------------------------------------------------------------------------------------------


def parse_vertex(call: Call) -> ParsedEmbed:
    """All instances as one request, whose options are those of the first."""
    model_info, instances = call.model_info, call.values.require(INSTANCES)
    written = _written_options(instances[0])
    inputs: list[Any] = []
    ends = [0]
    for index, instance in enumerate(instances):
        if _written_options(instance) != written:
            raise BadRequest(
                f"'instances[{index}]' has other options than 'instances[0]': those of one request must be the same",
                param=INSTANCES.name,
            )
        inputs += _inputs_of_instance(instance, index, inputs, model_info)
        ends.append(len(inputs))
    options = Options(read_nested(OPTION_FIELDS, written, "instances[0]"), "instances[0]")
    _check_is_json(options, "predictions are JSON")
    headers = {name: value for name, value in call.headers.items() if name != "accept"}  # predictions are JSON
    request = _embed_request(call._replace(headers=headers), options, inputs)
    return ParsedEmbed(request, partial(render_predictions, ends=ends, model_info=model_info))


def _written_options(instance: dict[str, Any]) -> dict[str, Any]:
    """The options of an instance, not parsed. Most have none, and a small body may have thousands of instances."""
    if len(instance) == 1:
        return {}
    if "query" in instance and "texts" in instance:
        raise WrongModel("The model served here makes embeddings: it cannot rank texts", can=lambda info: False)
    return {name: value for name in _OPTION_NAMES if (value := instance.get(name)) is not None}


_OPTION_NAMES = tuple(field.name for field in OPTION_FIELDS)


def _inputs_of_instance(instance: dict[str, Any], index: int, before: list[Any], model_info: ModelInfo) -> list[Any]:
    """Raises BadRequest if there are too many with those `before` them, or of another kind."""
    name = f"instances[{index}].inputs"
    inputs: list[Any] = checked_inputs(instance.get(INPUTS.name), name, model_info)
    if len(before) + len(inputs) > model_info.max_inputs:
        raise TooManyInputs(
            f"'instances' have more than {model_info.max_inputs} inputs, the most in one request (--max-inputs)",
            param=INSTANCES.name,
        )
    if before and isinstance(inputs[0], str) is not isinstance(before[0], str):
        raise BadRequest(
            f"'{name}' are token ids and those of 'instances[0]' texts, or the reverse: one request has one kind",
            param=INSTANCES.name,
        )
    return inputs


def render_predictions(embedded: Embedded, *, ends: list[int], model_info: ModelInfo) -> Response:
    """`ends`: 0, and for each instance the number of inputs up to its end."""
    fragments = fragments_of(embedded)
    pieces: list[bytes | memoryview] = []
    before = b'{"predictions":['
    for start, end in pairwise(ends):
        pieces += (before, *json_list(fragments[start:end]))
        before = b","
    return Response(200, [*pieces, b"]}"], headers_of(embedded, model_info))


# --- tokens -----------------------------------------------------------------------------------------------------


def parse_tokenize(call: Call) -> ParsedTokenize:
    values, model_info = call.values, call.model_info
    texts = values.get(TEXTS)
    if texts == []:
        raise EmptyInput("'inputs' cannot be empty", param=TEXTS.name)
    texts = parse_texts(texts, TEXTS.name, model_info.max_inputs)
    name = values.get(PROMPT_NAME)
    prompt = model_info.default_prompt if name is None else model_info.prompt_named(name, PROMPT_NAME.name)
    adds = values.get(ADD_SPECIAL_TOKENS) is not False
    tokens = TokenLists(texts, prompt)
    return ParsedTokenize(texts, adds, prompt, tokens, tokens.render)


class TokenLists:
    """The tokens of texts as JSON. A token is written as its part of the text, a special one as its name."""

    def __init__(self, texts: list[str], prompt: str) -> None:
        self._texts = texts
        self._prompt = prompt
        self._index = -1
        self._data = b""
        """The text that is being written, with its prompt, in UTF-8."""
        self._before = b""
        """The separator before the next tokens of the text."""
        self._pieces: list[bytes | memoryview] = [b"["]

    def put(self, index: int, tokens: list[Token]) -> None:
        if index != self._index:
            self._pieces.append(b"],[" if index else b"[")
            self._index = index
            self._data = (self._prompt + self._texts[index]).encode(errors="replace")
            self._before = b""
        if tokens:
            self._pieces += (self._before, orjson.dumps([self._describe(token) for token in tokens])[1:-1])
            self._before = b","

    def _describe(self, token: Token) -> dict[str, Any]:
        is_part = token.start is not None
        return {
            "id": token.id,
            "text": self._data[token.start : token.stop].decode(errors="replace") if is_part else token.text,
            "special": token.is_special,
            "start": token.start,
            "stop": token.stop,
        }

    def render(self) -> Response:
        return Response(200, [*self._pieces, b"]]"])


def parse_decode(call: Call) -> ParsedDecode:
    value = call.values.require(IDS)
    if value == []:
        raise EmptyInput("'ids' cannot be empty", param=IDS.name)
    lists = parse_inputs(value, IDS.name, call.model_info.max_inputs)
    if isinstance(lists[0], str):
        raise BadRequest("'ids' must be token ids, or a list of lists of them, is text", param=IDS.name)
    skips = call.values.get(SKIP_SPECIAL_TOKENS) is not False
    return ParsedDecode(check_id_lists(lists, IDS.name), skips, lambda texts: Response(200, orjson.dumps(texts)))


# --- errors -----------------------------------------------------------------------------------------------------

_ERRORS: tuple[tuple[type[ApiError], int | None, str], ...] = (
    (EmptyInput, 400, "Empty"),
    (ModelNotFound, None, "Validation"),
    (BadRequest, 422, "Validation"),
    (WrongModel, 424, "Backend"),
    (EngineFailed, 424, "Backend"),
    (ServerError, None, "Backend"),
    (Unavailable, None, "Unhealthy"),
)
"""Class, status (None: the error's own) and type. The first match counts; other errors are overload or a refusal, by
their status."""
_OVERLOADED = 429
_FIELD = re.compile(r"'input(?=['\[])")
"""The name of the input field in messages of modules that know no dialect."""


def render_error(error: ApiError) -> Response:
    status, error_type = _status_and_type(error)
    message = _FIELD.sub("'inputs", error.message)
    return Response(status, orjson.dumps({"error": message, "error_type": error_type}))


def _status_and_type(error: ApiError) -> tuple[int, str]:
    if error.status == _OVERLOADED:
        return error.status, "Overloaded"
    if isinstance(error, BadRequest) and error.dialect is None and error.param is None:
        return error.status, "Validation"  # not JSON, or not HTTP, so not yet a request of this dialect
    for kind, status, error_type in _ERRORS:
        if isinstance(error, kind):
            return (error.status if status is None else status), error_type
    return error.status, "Validation"


# --- the table --------------------------------------------------------------------------------------------------

_VECTORS = list_of(schemas.VECTOR)
_COSINES = schemas.VECTOR
_TOKEN = record(
    id={"type": "integer"},
    text=schemas.STRING,
    special=schemas.BOOLEAN,
    start=described(nullable("integer"), "in bytes of the text as UTF-8, its prompt included"),
    stop=nullable("integer"),
)
_ERROR_TYPES = ["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]
_KINDS = ("dense", *labels.NEEDS, "sparse")
_EMBED = Operation(
    summary="Embed texts or token ids",
    needs=("dense",),
    fields=Fields(INPUTS, *OPTION_FIELDS, PARAMETERS),
    embed=parse_embed,
    response=_VECTORS,
    binary_media_types=tuple(BINARY_MEDIA_TYPES.values()),
)
_RANKING_OPTIONS = (TOP_N, TRUNCATE, DIRECTION, RAW_SCORES, RETURN_TEXT)
_RANKS = list_of(record("text", index=schemas.COUNT, score={"type": "number"}, text=schemas.STRING))
_PAIR_SCORES = list_of(record(score={"type": "number"}))
_RERANK = Operation(
    summary="Rank texts by how well they answer a query",
    fields=Fields(RANKED, QUERY, *_RANKING_OPTIONS),
    embed=parse_rerank,
    response=_RANKS,
    needs=ranking.NEEDS,
)
_SPARSE = list_of(record(index=schemas.COUNT, value={"type": "number"}))
_PREDICT = Operation(
    summary="Classify texts, pairs of texts, or their tokens",
    fields=Fields(predict.PREDICTED, *predict.OPTIONS, parameters(Fields(*predict.OPTIONS, predict.CANDIDATE_LABELS))),
    embed=predict.parse_predict,
    response=predict.RESPONSE,
    needs=labels.NEEDS,
)
_OPTIONAL = [replace(field, is_required=False) for field in (INPUTS_OF_ALL, RANKED, RANKED_DOCUMENTS, QUERY)]
_RANKING_ALONE = [field for field in (*_RANKING_OPTIONS, RETURN_DOCUMENTS) if field not in ALL_OPTIONS]
_DEFAULT_FIELDS = (*_OPTIONAL, *_RANKING_ALONE, *ALL_OPTIONS, ALL_PARAMETERS)
_DEFAULT = replace(
    _EMBED,
    summary="Embed, compare, classify or rank texts, by what the model is for",
    fields=Fields(*_DEFAULT_FIELDS),
    embed=parse_default,
    response=any_of(_VECTORS, _COSINES, list_of(_SPARSE), predict.RESPONSE, _RANKS, _PAIR_SCORES),
    needs=tuple(dict.fromkeys((*_KINDS, *ranking.NEEDS))),
    claims=(INPUTS.name, QUERY.name),
)
_INVOCATION = replace(
    _DEFAULT,
    fields=Fields(*_DEFAULT_FIELDS, TEXT_INPUTS),
    embed=parse_invocation,
    claims=(INPUTS.name, TEXT_INPUTS.name, RANKED.name),
    bare_list=INPUTS.name,
)
_EMBED_BY_MODEL = replace(
    _EMBED,
    summary="Embed or classify texts, where clients of Hugging Face look for it",
    fields=Fields(_INPUTS_OF_HUB, MODEL, *ALL_OPTIONS, ALL_PARAMETERS),
    embed=parse_for_hub,
    response=any_of(_VECTORS, list_of(_SPARSE), predict.RESPONSE),
    needs=_KINDS,
)
_HUB_PATHS = ("/models/*/pipeline/{}", "/pipeline/{}/*", "/hf-inference/models/*/pipeline/{}")
_HUB_TASKS = ("feature-extraction", "text-classification", "token-classification")

DIALECT = Dialect(
    name="tei",
    title="text-embeddings-inference",
    operations={
        "POST /embed": replace(_EMBED, claims=(INPUTS.name,)),
        "POST /models/*": _EMBED_BY_MODEL,
        **{f"POST {path.format(task)}": _EMBED_BY_MODEL for task in _HUB_TASKS for path in _HUB_PATHS},
        "POST /": _DEFAULT,
        "POST /invocations": _INVOCATION,
        "POST /embed_all": Operation(
            summary="Embed every token of texts, special tokens included",
            fields=Fields(INPUTS, *TOKENIZING_FIELDS, PARAMETERS),
            embed=parse_embed_all,
            needs=("dense",),
            response=list_of(_VECTORS),
        ),
        "POST /similarity": Operation(
            summary="Compare a text with others, by cosine",
            fields=Fields(COMPARED, *TOKENIZING_FIELDS, DIMENSIONS, ENCODING, PARAMETERS),
            embed=parse_similarity,
            needs=("dense",),
            response=_COSINES,
        ),
        "POST /vertex": Operation(
            summary="Embed, as Vertex AI asks for it",
            fields=Fields(INSTANCES),
            embed=parse_vertex,
            needs=("dense",),
            response=record(predictions=list_of(_VECTORS)),
        ),
        "POST /tokenize": Operation(
            summary="The tokens of texts",
            fields=Fields(TEXTS, ADD_SPECIAL_TOKENS, PROMPT_NAME),
            reply=parse_tokenize,
            response=list_of(list_of(_TOKEN)),
            claims=(INPUTS.name,),
        ),
        "POST /decode": Operation(
            summary="The text of token ids",
            fields=Fields(IDS, SKIP_SPECIAL_TOKENS),
            reply=parse_decode,
            response=list_of(schemas.STRING),
        ),
        "POST /rerank": _RERANK,
        "POST /predict": _PREDICT,
        "POST /embed_sparse": Operation(
            summary="Make sparse vectors of texts or token ids",
            fields=Fields(INPUTS, *_SPARSE_OPTIONS, parameters(Fields(*_SPARSE_OPTIONS))),
            embed=parse_embed_sparse,
            response=list_of(_SPARSE),
            needs=("sparse",),
        ),
    },
    render_error=render_error,
    error=record(error=schemas.STRING, error_type={"enum": _ERROR_TYPES}),
    statuses={
        422: "A field is not as it must be",
        424: "The engine failed on an input, or the model cannot do this at all",
    },
)
