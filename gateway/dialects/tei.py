"""text-embeddings-inference's HTTP API: parses requests, renders responses. Pure.

Owns the shapes of all its paths but `/info`, and of its errors. `/`, `/invocations` and Hugging Face's paths with the
name of a model do what the model is for: as `/embed`, `/predict` or `/embed_sparse`. `/` and `/invocations` rank a body
with a `query` and `texts`, which Elasticsearch sends to `/` as `documents`; a model that ranks scores pairs in `inputs`
there. Source of the shapes: its router's types, version 1.9. Differences from it:

- `parameters` may hold the options of every embedding, and not only of texts to compare;
- the inputs of one request are all texts or all token ids, or all texts or all pairs to classify;
- an empty text is embedded, not refused, and `top_n` of a request to rank is heeded;
- scores are those of the model's own activation: several labels may be true at once where the model says so;
- of a model that classifies tokens, a flat list is one of texts, and labels are of tokens or spans of the text.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import orjson

from vecd.base.files import JsonObject
from vecd.gateway.api import fields
from vecd.gateway.api.answer import (
    json_response,
    list_of_pieces,
    render_rows,
    written,
)
from vecd.gateway.api.fields import (
    BINARY_MEDIA_TYPES,
    NUMBER,
    SEVERAL,
    STRING,
    VECTOR,
    Field,
    Fields,
    Said,
    any_of,
    described,
    expect,
    inside,
    list_of,
    nullable,
    record,
)
from vecd.gateway.api.operation import Call, Dialect, Operation, ParsedDecode, ParsedEmbed, ParsedTokenize, posted
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects import ask, classify, outputs, rerank, zero_shot
from vecd.gateway.dialects.ask import (
    ACTIVATION,
    ANY_ACTIVATION,
    INPUT,
    INPUT_TYPE,
    MODEL,
    PROMPT_NAME,
    RAW,
    TextsOrIds,
    activation_of,
    check_id_lists,
    encoding_of,
    parse_inputs,
    parse_texts,
    resolve,
)
from vecd.gateway.dialects.rerank import QUERY, RAW_SCORES, TOP_N, Relevance, read_documents
from vecd.gateway.dialects.vllm import TokenLists
from vecd.gateway.encoding.result import matrix_pieces
from vecd.gateway.errors import (
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
from vecd.gateway.request import Embedded, Encoding, Form, Pair, Response, Token
from vecd.shm.output import Output

# --- options ----------------------------------------------------------------------------------------------------

TEXT_OR_TEXTS = (fields.STRING, fields.TEXTS)
IDS_OR_LISTS = (fields.TOKEN_IDS, list_of(fields.TOKEN_IDS, at_least=1))
WHAT = "what is to be embedded: a text, a list of texts, token ids, or a list of lists of them"
INPUTS = replace(INPUT, name="inputs", description=WHAT, schema=any_of(*TEXT_OR_TEXTS, *IDS_OR_LISTS))
TRUNCATE = replace(
    ask.TRUNCATION,
    name="truncate",
    description="whether a text that is longer than the model takes is cut, or refused; null: the server's default",
)
DIRECTION = replace(
    ask.TRUNCATION_DIRECTION,
    description="which end of a text that is cut is left out; null: the server's default",
)
TOKENIZING_FIELDS: tuple[Field[Any], ...] = (TRUNCATE, DIRECTION, PROMPT_NAME)


def _with_parameters(own: Iterable[Field[Any]], options: Iterable[Field[Any]]) -> Fields:
    """Options may be in an object as well: clients use it with texts to compare, and for Hugging Face's endpoints with
    every model."""
    about = "the other fields may be in here as well, and mean the same"
    return Fields(*own, *options, *inside("parameters", about, *options))


def _check_not_empty(value: Any, name: str) -> None:
    if value == []:
        raise EmptyInput(f"'{name}' cannot be empty", param=name)


def inputs_of(call: Call) -> TextsOrIds:
    value, name = call.wanted.get(INPUT), call.wanted.word(INPUTS)
    _check_not_empty(value, name)
    return parse_inputs(value, name, call.model_info.config.max_inputs)


def headers_of(embedded: Embedded, model_info: ModelInfo) -> dict[str, str]:
    """Times are whole milliseconds."""
    stages = embedded.durations()
    total_ms = str(int(stages.total_s * 1e3))
    return {
        "x-compute-type": model_info.config.compute_type,
        "x-compute-time": total_ms,
        "x-compute-characters": str(embedded.num_chars),
        "x-compute-tokens": str(embedded.num_tokens),
        "x-total-time": total_ms,
        "x-tokenization-time": str(int(stages.tokenize_s * 1e3)),
        "x-queue-time": str(int(stages.queue_s * 1e3)),
        "x-inference-time": str(int(stages.compute_s * 1e3)),
    }


# --- fields -----------------------------------------------------------------------------------------------------

_MAX_TEXTS = 2
"""Of one sequence."""
_PAIR = record("text_pair", text=fields.STRING, text_pair=fields.STRING)
PREDICTED = replace(
    INPUTS,
    description="what is to be classified: a text, a list of two texts, which are a pair, or a list of lists of one "
    "text or of a pair each; also objects with a `text` and a `text_pair`",
    schema=any_of(fields.STRING, fields.TEXTS, list_of(any_of(fields.TEXTS, _PAIR), at_least=1), _PAIR),
)


def _read_raw_scores(value: Any, name: str) -> Said:
    """False leaves the activation open, which is the default."""
    is_raw = fields.read_flag(value, name)
    return Said(raw_scores=is_raw, activation=RAW if is_raw else ANY_ACTIVATION)


RAW_LABELS = Field(
    "raw_scores",
    "true: scores are the model's own numbers, without an activation",
    nullable("boolean", default=False),
    _read_raw_scores,
    key=SEVERAL,
)
FUNCTION = fields.choice(
    "function_to_apply",
    "the activation; default: the model's own",
    {"none": RAW, "sigmoid": frozenset(("sigmoid",)), "softmax": frozenset(("softmax",)), "default": ANY_ACTIVATION},
    key=ACTIVATION.key,
)
TOP_K = replace(ask.TOP_K, description="most labels of a text; default: all")
PREDICT_OPTIONS: tuple[Field[Any], ...] = (
    *(TRUNCATE, DIRECTION, RAW_LABELS, FUNCTION, TOP_K, classify.AGGREGATION, classify.IGNORED),
    *zero_shot.FIELDS,
)

_FLAT_LABELS = (list_of(classify.LABEL), list_of(classify.ENTITY))
LABELS_OF_INPUTS = any_of(*(each for flat in _FLAT_LABELS for each in (flat, list_of(flat))), zero_shot.RESPONSE)

_COMPARED = record(source_sentence=STRING, sentences=fields.TEXTS)

INPUTS_OF_ALL = replace(
    INPUTS,
    description=f"{WHAT}; or texts to compare, as with /similarity",
    schema=any_of(*TEXT_OR_TEXTS, *IDS_OR_LISTS, _COMPARED, *PREDICTED.schema["anyOf"]),
)
_INPUTS_OF_HUB = replace(INPUTS, schema=any_of(*TEXT_OR_TEXTS, *IDS_OR_LISTS, *PREDICTED.schema["anyOf"]))
TEXT_INPUTS = replace(
    INPUTS,
    name="text_inputs",
    description="the same as `inputs`, by the name of SageMaker's own models",
    is_required=False,
)
COMPARED = replace(INPUTS, description="a text, and those that it is compared with", schema=_COMPARED, is_large=False)
TEXTS = replace(INPUTS, description="a text, or a list of texts", schema=any_of(*TEXT_OR_TEXTS))
NORMALIZE = fields.flag("normalize", "bring vectors to length 1", default=True)
DIMENSIONS = fields.whole_number("dimensions", "length of the vectors", minimum=1)
ENCODING = fields.choice(
    "encoding_format",
    "numbers, whether 'float' or 'base64', which Hugging Face's clients send, and cannot read; or no JSON at all",
    {"float": "float", "base64": "float", "bytes": "bytes", "npy": "npy"},
)
ADD_SPECIAL_TOKENS = fields.flag("add_special_tokens", "put the model's special tokens around a text", default=True)
IDS = replace(
    INPUT,
    name="ids",
    description="token ids of the model's own, or a list of lists of them",
    schema=any_of(*IDS_OR_LISTS),
)
SKIP_SPECIAL_TOKENS = fields.flag("skip_special_tokens", "leave the model's special tokens out of a text", default=True)


_SPARSE_OPTIONS = (*TOKENIZING_FIELDS, INPUT_TYPE, ask.TOP_K, ask.MAX_ACTIVE_DIMS, ask.MIN_WEIGHT)
OPTION_FIELDS = (*TOKENIZING_FIELDS, NORMALIZE, DIMENSIONS, ENCODING)
ALL_OPTIONS = Fields(*OPTION_FIELDS, *PREDICT_OPTIONS, *_SPARSE_OPTIONS)
"""Of the paths whose operation depends on the model."""

# --- embeddings -------------------------------------------------------------------------------------------------


def parse_embed(call: Call) -> ParsedEmbed:
    forms = (Form(encoding_of(call)),)
    request = resolve(call, inputs_of(call), forms=forms, normalizes=True, are_ids_of_model=True)
    return ParsedEmbed(request, render_rows if forms[0].encoding in BINARY_MEDIA_TYPES else render_vectors)


def parse_by_kind(call: Call, *, is_for_hub: bool = False) -> ParsedEmbed:
    """What the model is for; a model that makes vectors of texts may also do other things, by other paths. Texts to
    compare are recognized by their shape, because clients send them to "/", too. `is_for_hub`: as in `parse_predict`;
    there are none."""
    model_info = call.model_info
    if model_info.is_dense:
        call = call._replace(wanted=call.wanted.without(INPUT_TYPE))  # which is of sparse vectors
        compares = not is_for_hub and isinstance(call.wanted.get(INPUT), dict)
        return parse_similarity(call) if compares else parse_embed(call)
    if model_info.card.score is None and model_info.card.sparse is None:
        raise WrongModel(
            f"{model_info.what_it_is()}: POST /v1/embeddings with 'output' 'multi-vector'",
            can=lambda info: info.is_dense or info.card.score is not None or info.card.sparse is not None,
        )
    return parse_embed_sparse(call) if model_info.card.score is None else parse_predict(call, is_for_hub=is_for_hub)


def parse_embed_all(call: Call) -> ParsedEmbed:
    """Raises WrongModel if a token's vector is longer than a row."""
    model_info = call.model_info
    if Output.TOKENS not in model_info.outputs:
        raise WrongModel(
            f"This model cannot give one vector for each token: they would have {model_info.card.hidden_size} "
            f"dimensions, and there is room for the {model_info.card.dim} of its own vectors",
            can=lambda info: info.is_dense and Output.TOKENS in info.outputs,
        )
    request = resolve(call, inputs_of(call), Output.TOKENS, normalizes=False, are_ids_of_model=True)
    [form] = request.forms
    return ParsedEmbed(
        request,
        lambda embedded: Response(200, list_of_pieces(matrix_pieces(matrix, form) for matrix in embedded.made[0])),
    )


def render_vectors(embedded: Embedded) -> Response:
    """A JSON list that holds the rows without a copy."""
    return Response(200, list_of_pieces(zip(embedded.made[0])))


# --- labels -----------------------------------------------------------------------------------------------------


def read_sequences(value: Any, name: str, model_info: ModelInfo) -> tuple[list[str] | list[Pair], bool]:
    """The texts or pairs of `inputs`, and whether the response is that of the only one, and not a list of one."""
    if isinstance(value, str | dict):
        return _of_one_kind([_texts_of(value, name, name)], name), True
    _check_not_empty(value, name)
    fields.expect(list, value, name, "a text, a list of two texts, or a list of lists", none="missing")
    if isinstance(value[0], str):
        if len(value) > _MAX_TEXTS:
            raise BadRequest(
                f"'{name}' has {len(value)} texts: a flat list is one text, or a pair of two; send a list of lists, "
                "as [[first text], [second text], …]",
                param=name,
            )
        return _of_one_kind([_texts_of(value, name, name)], name), True
    if len(value) > model_info.config.max_inputs:
        raise TooManyInputs(
            f"'{name}' has {len(value)} sequences, at most {model_info.config.max_inputs} in one request "
            "(--max-inputs)",
            param=name,
        )
    sequences = [_texts_of(item, f"{name}[{index}]", name) for index, item in enumerate(value)]
    return _of_one_kind(sequences, name), False


def _texts_of(item: Any, where: str, name: str) -> list[str]:
    """One text, or the two of a pair."""
    places = ("[0]", "[1]")
    if isinstance(item, dict):
        places = (".text", ".text_pair")
        if item.get("text") is None:
            raise BadRequest(f"'{where}.text' must be a string, is missing", param=name)
        item = [item["text"]] if item.get("text_pair") is None else [item["text"], item["text_pair"]]
    if isinstance(item, str):
        return [item]
    texts = fields.expect(list, item, where, "a list of one text or two", param=name)
    if not 1 <= len(texts) <= _MAX_TEXTS:
        raise BadRequest(f"'{where}' must have one text, or a pair of two, has {len(texts)}", param=name)
    for place, text in zip(places, texts, strict=False):
        fields.expect(str, text, f"{where}{place}", "a string", param=name)
    return texts


def _of_one_kind(sequences: list[list[str]], name: str) -> list[str] | list[Pair]:
    num = len(sequences[0])
    for index, texts in enumerate(sequences):
        if len(texts) != num:
            raise BadRequest(
                f"'{name}[{index}]' has {len(texts)} texts and '{name}[0]' {num}: one request has texts, or pairs",
                param=name,
            )
    return [texts[0] for texts in sequences] if num == 1 else [Pair(*texts) for texts in sequences]


def parse_predict(call: Call, *, is_for_hub: bool = False) -> ParsedEmbed:
    """Where labels are of tokens, flat lists are of texts: there is nothing to say of the tokens of a pair.
    `is_for_hub`: a flat list is one of texts, too, and the labels of even one text are in a list of lists, where
    Hugging Face's clients look for them."""
    wanted, model_info, value, name = call.wanted, call.model_info, call.wanted.get(INPUT), PREDICTED.name
    head, activation, top_k = classify.head_of(model_info), activation_of(wanted), wanted.get(TOP_K)
    are_of_tokens = classify.classifies_tokens(model_info)
    inputs: list[str] | list[Pair]
    if are_of_tokens:
        _check_not_empty(value, name)
        inputs, is_single = parse_texts(value, name, model_info.config.max_inputs), isinstance(value, str)
    else:
        if is_for_hub and isinstance(value, list) and value and isinstance(value[0], str):
            value = [[text] for text in parse_texts(value, name, model_info.config.max_inputs)]
        inputs, is_single = read_sequences(value, name, model_info)
        is_single = is_single and not is_for_hub

    def respond(labels: Iterator[Iterable[bytes]], embedded: Embedded) -> Response:
        """`labels`: the JSON of each sequence's, in pieces."""
        return Response(200, iter(next(labels)) if is_single else list_of_pieces(labels))

    output = Output.TOKEN_SCORES if are_of_tokens else Output.SCORES
    request = resolve(call, inputs, output, are_ids_of_model=True)
    if are_of_tokens:
        return classify.parse_entities(request, model_info, wanted, activation, respond)
    return ParsedEmbed(
        request,
        lambda embedded: respond(written(classify.ranked_labels(embedded, head, activation, top_k)), embedded),
        classify.is_large(len(inputs), model_info),
    )


# --- sparse vectors ---------------------------------------------------------------------------------------------


def parse_embed_sparse(call: Call) -> ParsedEmbed:
    request = resolve(call, inputs_of(call), outputs.sparse_output(call.model_info), are_ids_of_model=True)
    return ParsedEmbed(request, render_sparse, outputs.are_many_weights(request.inputs))


def render_sparse(embedded: Embedded) -> Response:
    return Response(200, list_of_pieces(map(outputs.indexed_pieces, embedded.made[0])))


# --- similarity -------------------------------------------------------------------------------------------------


def parse_similarity(call: Call) -> ParsedEmbed:
    texts = _compared(call.wanted.require(COMPARED), call.model_info)
    if call.wanted.get(ENCODING) not in (None, "float"):
        name = call.wanted.word(ENCODING)
        raise BadRequest(f"'{name}' must be 'float': cosines are JSON", param=name)
    request = resolve(call, texts, forms=(Form(Encoding.BYTES),), are_ids_of_model=True)
    return ParsedEmbed(request._replace(output=Output.VECTORS, normalize=True), render_cosines)


def render_cosines(embedded: Embedded) -> Response:
    """The vectors are of length 1."""
    rows = embedded.made[0].rows
    cosines = rows[1:] @ rows[0]
    return Response(200, orjson.dumps(cosines, option=orjson.OPT_SERIALIZE_NUMPY))


def _compared(value: Any, model_info: ModelInfo) -> list[str]:
    """The text, and the texts that it is compared with."""
    given = expect(dict, value, "inputs", "an object of a 'source_sentence' and 'sentences'")
    source = expect(str, given.get("source_sentence"), "inputs.source_sentence", "a string", none="missing")
    name = "inputs.sentences"
    sentences = expect(list, given.get("sentences"), name, "a list of strings", none="missing")
    _check_not_empty(sentences, name)
    if len(sentences) >= model_info.config.max_inputs:
        raise TooManyInputs(
            f"'{name}' has {len(sentences)} texts, at most {model_info.config.max_inputs - 1} beside the source in one "
            "request (--max-inputs)",
            param=name,
        )
    return [source, *parse_texts(sentences, name, model_info.config.max_inputs)]


# --- ranking ----------------------------------------------------------------------------------------------------

RANKED = replace(rerank.DOCUMENTS, name="texts", description="what is ranked", schema=fields.TEXTS)
RANKED_DOCUMENTS = replace(
    RANKED,
    name="documents",
    description="the same, by the name of other APIs; or objects with a `text`",
    schema=rerank.TEXTS_SCHEMA,
    is_required=False,
)
RETURN_TEXT = replace(rerank.RETURN_DOCUMENTS, name="return_text", description="true: the response repeats the texts")


def parse_rerank(call: Call) -> ParsedEmbed:
    wanted = call.wanted
    texts = wanted.require(RANKED)
    _check_not_empty(texts, wanted.word(RANKED))
    texts = read_documents(call, texts, wanted.word(RANKED))
    repeated = tuple(texts) if wanted.get(RETURN_TEXT) is True else ()
    render = partial(render_ranks, texts=repeated, num=wanted.get(TOP_N))
    return rerank.parse(call, [wanted.require(QUERY)], texts, render, repeated=repeated)


def parse_default(call: Call) -> ParsedEmbed:
    if call.wanted.get(QUERY) is not None:
        return parse_rerank(call)
    return parse_pairs(call) if _takes_pairs(call.model_info) else parse_by_kind(call)


def _takes_pairs(model_info: ModelInfo) -> bool:
    return "rerank" in model_info.card.capabilities or model_info.card.capabilities == ("multi-vector",)


def parse_pairs(call: Call) -> ParsedEmbed:
    """A list of pairs, as OpenSearch's blueprint for cross-encoders sends them: their scores, in their order."""
    pairs = call.wanted.get(INPUT)
    if isinstance(pairs, list) and pairs and isinstance(pairs[0], dict | list):
        pairs, _ = read_sequences(pairs, INPUTS.name, call.model_info)
        if isinstance(pairs[0], Pair):
            queries, texts = map(list, zip(*pairs, strict=True))
            return rerank.parse(call, queries, texts, _render_scores, field=INPUTS.name)
    raise WrongModel(
        "The model served here ranks texts: send a 'query' and 'texts', or pairs of texts as 'inputs'",
        can=lambda info: not _takes_pairs(info),
    )


def _render_scores(embedded: Embedded, relevance: Relevance) -> Response:
    return json_response(200, [{"score": score} for score in relevance.scores])


def render_ranks(embedded: Embedded, relevance: Relevance, *, texts: tuple[str, ...], num: int | None) -> Response:
    """`texts`: those that the response repeats; none if it repeats none."""
    ranks = (
        {"index": index, "score": score, **({"text": texts[index]} if texts else {})}
        for index, score in relevance.ranked(num)
    )
    return Response(200, list_of_pieces(written(ranks)))


# --- tokens -----------------------------------------------------------------------------------------------------


def parse_tokenize(call: Call) -> ParsedTokenize:
    wanted, _, model_info = call
    texts = wanted.get(TEXTS)
    _check_not_empty(texts, TEXTS.name)
    texts = parse_texts(texts, TEXTS.name, model_info.config.max_inputs)
    name = wanted.get(PROMPT_NAME)
    prompt = model_info.default_prompt if name is None else model_info.prompt_named(name, PROMPT_NAME.name)
    adds = wanted.get(ADD_SPECIAL_TOKENS) is not False
    data_of = cache(lambda index: (prompt + texts[index]).encode(errors="replace"))

    def describe(index: int, token: Token) -> JsonObject:
        """A token is written as its part of the text, a special one as its name."""
        is_part = token.start is not None
        return {
            "id": token.id,
            "text": data_of(index)[token.start : token.stop].decode(errors="replace") if is_part else token.text,
            "special": token.is_special,
            "start": token.start,
            "stop": token.stop,
        }

    tokens = TokenLists(describe)
    return ParsedTokenize(
        texts, adds, prompt, tokens.put, lambda: Response(200, [*list_of_pieces(zip(tokens.column(0)))])
    )


def parse_decode(call: Call) -> ParsedDecode:
    value = call.wanted.require(IDS)
    _check_not_empty(value, IDS.name)
    lists = parse_inputs(value, IDS.name, call.model_info.config.max_inputs)
    if isinstance(lists[0], str):
        raise BadRequest("'ids' must be token ids, or a list of lists of them, is text", param=IDS.name)
    skips = call.wanted.get(SKIP_SPECIAL_TOKENS) is not False
    return ParsedDecode(check_id_lists(lists, IDS.name), skips, lambda texts: json_response(200, texts))


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


def render_error(error: ApiError) -> Response:
    status, error_type = _status_and_type(error)
    return json_response(status, {"error": error.message, "error_type": error_type})


def _status_and_type(error: ApiError) -> tuple[int, str]:
    if error.status == 429:
        return error.status, "Overloaded"
    if isinstance(error, BadRequest) and error.dialect is None and error.param is None:
        return error.status, "Validation"  # not JSON, or not HTTP, so not yet a request of this dialect
    for kind, status, error_type in _ERRORS:
        if isinstance(error, kind):
            return (error.status if status is None else status), error_type
    return error.status, "Validation"


# --- the table --------------------------------------------------------------------------------------------------

_VECTORS = list_of(VECTOR)
_TOKEN = record(
    id={"type": "integer"},
    text=STRING,
    special=fields.BOOLEAN,
    start=described(nullable("integer"), "in bytes of the text as UTF-8, its prompt included"),
    stop=nullable("integer"),
)
_ERROR_TYPES = ["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]
_KINDS = ("dense", *classify.NEEDS, "sparse")
_EMBED = Operation(
    summary="Embed texts or token ids",
    needs=("dense",),
    fields=_with_parameters((INPUTS,), OPTION_FIELDS),
    parse=parse_embed,
    response=_VECTORS,
    binary_media_types=tuple(BINARY_MEDIA_TYPES.values()),
)
_RANKING_OPTIONS = (TOP_N, TRUNCATE, DIRECTION, RAW_SCORES, RETURN_TEXT)
_RANKS = list_of(record("text", index=fields.COUNT, score=NUMBER, text=STRING))
_PAIR_SCORES = list_of(record(score=NUMBER))
_SPARSE = list_of(record(index=fields.COUNT, value=NUMBER))
_PREDICT = Operation(
    summary="Classify texts, pairs of texts, or their tokens",
    fields=_with_parameters((PREDICTED,), PREDICT_OPTIONS),
    parse=zero_shot.parse_or(parse_predict),
    response=LABELS_OF_INPUTS,
    needs=classify.NEEDS,
)
_DEFAULT_FIELDS = (
    *(replace(field, is_required=False) for field in (INPUTS_OF_ALL, RANKED, RANKED_DOCUMENTS, QUERY)),
    *(TOP_N, RETURN_TEXT, rerank.RETURN_DOCUMENTS),
)
_DEFAULT = replace(
    _EMBED,
    summary="Embed, compare, classify or rank texts, by what the model is for",
    fields=_with_parameters(_DEFAULT_FIELDS, ALL_OPTIONS),
    parse=zero_shot.parse_or(parse_default),
    asks_for=zero_shot.asks_for,
    response=any_of(_VECTORS, VECTOR, list_of(_SPARSE), LABELS_OF_INPUTS, _RANKS, _PAIR_SCORES),
    needs=tuple(dict.fromkeys((*_KINDS, *rerank.NEEDS))),
    claims=(INPUTS.name, QUERY.name),
)
_INVOCATION = replace(
    _DEFAULT,
    fields=_with_parameters((*_DEFAULT_FIELDS, TEXT_INPUTS), ALL_OPTIONS),
    claims=(INPUTS.name, TEXT_INPUTS.name, RANKED.name),
    bare_list=INPUTS.name,
)
_EMBED_BY_MODEL = replace(
    _EMBED,
    summary="Embed or classify texts, where clients of Hugging Face look for it",
    fields=_with_parameters((_INPUTS_OF_HUB, MODEL), ALL_OPTIONS),
    parse=zero_shot.parse_or(partial(parse_by_kind, is_for_hub=True), is_for_hub=True),
    asks_for=zero_shot.asks_for,
    response=any_of(_VECTORS, list_of(_SPARSE), LABELS_OF_INPUTS),
    needs=_KINDS,
)
_HUB_PATHS = ("/models/*/pipeline/{}", "/pipeline/{}/*", "/hf-inference/models/*/pipeline/{}")
_HUB_TASKS = ("feature-extraction", "text-classification", "token-classification", "zero-shot-classification")

DIALECT = Dialect(
    name="tei",
    title="text-embeddings-inference",
    operations={
        "POST /embed": replace(_EMBED, claims=(INPUTS.name,)),
        **posted(_EMBED_BY_MODEL, "/models/*", *(path.format(task) for task in _HUB_TASKS for path in _HUB_PATHS)),
        "POST /": _DEFAULT,
        "POST /invocations": _INVOCATION,
        "POST /embed_all": Operation(
            summary="Embed every token of texts, special tokens included",
            fields=_with_parameters((INPUTS,), TOKENIZING_FIELDS),
            parse=parse_embed_all,
            needs=("dense",),
            response=list_of(_VECTORS),
        ),
        "POST /similarity": Operation(
            summary="Compare a text with others, by cosine",
            fields=_with_parameters((COMPARED,), (*TOKENIZING_FIELDS, DIMENSIONS, ENCODING)),
            parse=parse_similarity,
            needs=("dense",),
            response=VECTOR,
        ),
        "POST /tokenize": Operation(
            summary="The tokens of texts",
            fields=Fields(TEXTS, ADD_SPECIAL_TOKENS, PROMPT_NAME),
            parse=parse_tokenize,
            response=list_of(list_of(_TOKEN)),
            claims=(INPUTS.name,),
        ),
        "POST /decode": Operation(
            summary="The text of token ids",
            fields=Fields(IDS, SKIP_SPECIAL_TOKENS),
            parse=parse_decode,
            response=list_of(STRING),
        ),
        "POST /rerank": Operation(
            summary="Rank texts by how well they answer a query",
            fields=Fields(RANKED, QUERY, *_RANKING_OPTIONS),
            parse=parse_rerank,
            response=_RANKS,
            needs=rerank.NEEDS,
        ),
        "POST /predict": _PREDICT,
        "POST /embed_sparse": Operation(
            summary="Make sparse vectors of texts or token ids",
            fields=_with_parameters((INPUTS,), _SPARSE_OPTIONS),
            parse=parse_embed_sparse,
            response=list_of(_SPARSE),
            needs=("sparse",),
        ),
    },
    headers=headers_of,
    render_error=render_error,
    error=record(error=STRING, error_type={"enum": _ERROR_TYPES}),
    statuses={
        422: "A field is not as it must be",
        424: "The engine failed on an input, or the model cannot do this at all",
    },
)
