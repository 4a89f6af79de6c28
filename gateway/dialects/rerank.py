"""Routes that rank or score documents: those of Cohere, Jina, Voyage, vLLM, infinity, Weaviate and NVIDIA, and what
text-embeddings-inference's have in common with them. Pure, but for the clock.

- A model with scores (Output.SCORES) gets a pair of a query and a document for each document.
- A multi-vector model gets the queries, and behind them the documents (`Tokenizing.num_queries`). The score of a
  document is MaxSim (`vecd.gateway.encoding.streams`), which no activation is applied to.

A document that is too long is cut, and its query is kept: one long document of fifty is no reason to rank none. The
server (`--overflow error`) or the request may say that it is an error instead. Documents are ranked by their logits,
equal ones in their own order. Scores are JSON numbers with all digits of a float64, and always with a point or an
exponent, because some clients read nothing else as a floating-point number.

Bodies with `texts` at `/rerank` and `/invocations`, and with a `query` at `/`, are text-embeddings-inference's. Sources
of the shapes: the clients of each, because these APIs share paths, and clients choose a path by their own name for it.
What a request gets:

- An object with `results` that has what any of these clients reads: Cohere's `meta`, Jina's and vLLM's `model` and
  `usage`, infinity's `object`.
- The same as `data` to Voyage's clients, which always send `truncation` or `top_k`; and always below `/voyage`, for
  LiteLLM, which may send neither.
- Weaviate's `scores`, in the order of the request, to a body with `property`, which its client always sends.

A result has a `document` only where the request asks for it, as an object with a `text`; Voyage's is a string. It is
never null, which LiteLLM refuses. Scores are between 0 and 1, by a sigmoid, whatever the model's own activation is,
unless `raw_scores` or `use_activation` say otherwise: clients compare them with thresholds. NVIDIA's are logits. Those
of a multi-vector model are sums or means of cosines.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from vecd.base.files import JsonObject
from vecd.gateway.api import fields
from vecd.gateway.api.answer import (
    json_response,
    list_response,
    list_schema,
    object_with_list,
    usage,
    written,
)
from vecd.gateway.api.fields import (
    STRING,
    Field,
    Fields,
    any_of,
    described,
    given,
    json_type,
    list_of,
    nullable,
    record,
)
from vecd.gateway.api.operation import Call, Dialect, Operation, ParsedEmbed, posted
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects import ask
from vecd.gateway.dialects.ask import ACTIVATION, MODEL, OWN, RAW, check_num, parse_texts
from vecd.gateway.encoding.labels import Scores, ranked, relevance_logits, relevance_of
from vecd.gateway.errors import ApiError, BadRequest, WrongModel
from vecd.gateway.request import ALL, Embedded, Overflow, Pair, Response, Role
from vecd.shm.output import Output

NEEDS = ("rerank", "multi-vector")
"""As in `Operation.needs`."""

_LARGE_RESPONSE_CHARS = 256 * 1024
"""A response that repeats more of the documents is written in a thread: 0.3 ms."""
_DOCUMENTS_IN_A_UNIT = 100
"""Cohere bills a search for up to this many documents as one unit."""

# --- fields -----------------------------------------------------------------------------------------------------

_TEXT = any_of(fields.STRING, record(text=fields.STRING))
TEXTS_SCHEMA = any_of(list_of(_TEXT, at_least=1), fields.STRING)


def flag(name: str, description: str, **schema: Any) -> Field[bool]:
    """A boolean that may also be written as a string, because Xinference's clients do."""
    return Field(name, description, any_of(nullable("boolean", **schema), {"enum": [*_FLAGS]}), _read_flag)


_FLAGS = {"true": True, "false": False, "True": True, "False": False}


def _read_flag(value: Any, name: str) -> bool:
    if isinstance(value, str) and value in _FLAGS:
        return _FLAGS[value]
    if not isinstance(value, bool):
        raise BadRequest(f"'{name}' must be true or false, is {given(value)}", param=name)
    return value


def _read_query(value: Any, name: str) -> str:
    if isinstance(value, dict):
        return fields.expect(str, value.get("text"), f"{name}.text", "a string", none="missing")
    return fields.expect(str, value, name, "a string, or an object with a string as its 'text'")


QUERY = Field("query", "what the documents are ranked for", _TEXT, _read_query, is_required=True, is_large=True)
TOP_N = fields.whole_number("top_n", "most documents in the response; 0: all", minimum=0)
RAW_SCORES = Field(
    "raw_scores",
    "true: scores are the model's own numbers, without a sigmoid",
    flag("", "", default=False).schema,
    lambda value, name: RAW if _read_flag(value, name) else OWN,
    key=ACTIVATION.key,
)
USE_ACTIVATION = replace(
    RAW_SCORES,
    name="use_activation",
    description="false: the same, by vLLM's name",
    schema=flag("", "").schema,
    read=lambda value, name: OWN if _read_flag(value, name) else RAW,
)
INSTRUCTION = fields.text("instruction", "what to rank by, for models whose template has a place for it")
MAX_TOKENS_PER_DOC = fields.whole_number(
    "max_tokens_per_doc", "most tokens of a document, the rest is cut off; 0: as many as the model takes", minimum=0
)
MAX_TOKENS_PER_QUERY = fields.whole_number("max_tokens_per_query", "the same for the query", minimum=0)
TRUNCATION = replace(
    ask.TRUNCATION,
    schema=flag("", "").schema,
    read=lambda value, name: ask.read_truncation(_read_flag(value, name), name),
)
OVERFLOW = fields.choice(
    "overflow",
    "what becomes of a document that is too long: an error, its beginning (`truncate`), or its end "
    "(`truncate_left`); default: the server's --overflow, or its beginning where that is `chunk`",
    {overflow.value: frozenset((overflow,)) for overflow in Overflow if overflow is not Overflow.CHUNK},
)
TOKENIZING_FIELDS: tuple[Field[Any], ...] = (
    OVERFLOW,
    ask.TRUNCATE,
    TRUNCATION,
    ask.TRUNCATE_PROMPT_TOKENS,
    ask.TRUNCATION_SIDE,
    ask.TRUNCATION_DIRECTION,
    MAX_TOKENS_PER_DOC,
    MAX_TOKENS_PER_QUERY,
    INSTRUCTION,
)
COMMON: tuple[Field[Any], ...] = (MODEL, *TOKENIZING_FIELDS, ask.PRIORITY, ask.USER, fields.REQUEST_ID)
DOCUMENTS = fields.anything(
    "documents",
    "what is ranked: texts, or objects with a `text`",
    TEXTS_SCHEMA,
    is_required=True,
    is_large=True,
)
TEXTS = replace(DOCUMENTS.called("texts", "text-embeddings-inference's"), schema={})
TOP_K = TOP_N.called("top_k", "Voyage's")
RETURN_DOCUMENTS = flag("return_documents", "true: the response repeats the documents", default=False)
_MAX_RANK_FIELDS = 32


def _read_rank_fields(value: Any, name: str) -> tuple[str, ...]:
    """Without repetitions, so that the text of a document is no longer than the document."""
    names = tuple(dict.fromkeys(fields.read_texts(value, name)))
    if len(names) > _MAX_RANK_FIELDS:
        raise BadRequest(f"'{name}' has {len(names)} names, at most {_MAX_RANK_FIELDS} are allowed", param=name)
    return names


RANK_FIELDS = Field(
    "rank_fields",
    "Cohere's: of documents that are objects, the fields that are read, as lines of one text, each once and at most "
    f"{_MAX_RANK_FIELDS}. Default: `text`",
    nullable("array", items=STRING),
    _read_rank_fields,
)
PROPERTY = fields.anything("property", "Weaviate's: selects the shape of its response", {})
_FIELDS: tuple[Field[Any], ...] = (
    DOCUMENTS,
    TEXTS,
    QUERY,
    TOP_N,
    TOP_K,
    RETURN_DOCUMENTS,
    RANK_FIELDS,
    RAW_SCORES,
    USE_ACTIVATION,
    PROPERTY,
    *COMMON,
)

# --- inputs -----------------------------------------------------------------------------------------------------

_TEXT_FIELD = ("text",)


def read_documents(call: Call, value: Any, name: str = "", rank_fields: tuple[str, ...] = _TEXT_FIELD) -> list[str]:
    """A text, or a list of texts and of objects, of which the `rank_fields` become lines of one text. `name`: of their
    field; "" for the documents'. Raises BadRequest, which has the index of the wrong one."""
    name, max_inputs = name or call.wanted.word(DOCUMENTS), call.model_info.config.max_inputs
    if isinstance(value, list):
        check_num(value, name, max_inputs)
    if isinstance(value, list) and set(map(type, value)) != {str}:
        value = [_text_of(item, f"{name}[{index}]", name, rank_fields) for index, item in enumerate(value)]
    return parse_texts(value, name, max_inputs)


def _text_of(item: Any, where: str, name: str, rank_fields: tuple[str, ...]) -> str:
    if isinstance(item, str):
        return item
    if isinstance(item, dict):
        values = [item.get(field) for field in rank_fields if item.get(field) is not None]
        texts = [value for value in values if isinstance(value, str)]
        if texts and len(texts) == len(values):
            return "\n".join(texts)
    what = "as its 'text'" if rank_fields == _TEXT_FIELD else "in its 'rank_fields'"
    is_now = "another object" if isinstance(item, dict) else json_type(item)
    raise BadRequest(f"'{where}' must be a string, or an object with a string {what}, is {is_now}", param=name)


def default_overflow(model_info: ModelInfo) -> Overflow:
    """The server's own policy. What is ranked has no chunks, and is cut instead."""
    return Overflow.TRUNCATE if model_info.overflow is Overflow.CHUNK else model_info.overflow


# --- the request and its result ---------------------------------------------------------------------------------


class Relevance(NamedTuple):
    """How well each document answers its query, in the order of the request."""

    logits: Scores
    """What documents are ranked by."""
    scores: list[float]
    """What the response has."""

    def ranked(self, num: int | None) -> list[tuple[int, float]]:
        """The index and the score of the `num` best documents, the best first; 0 and None: of all."""
        return [(index, self.scores[index]) for index in ranked(self.logits, num or None)]


def parse(
    call: Call,
    queries: list[str],
    documents: list[str],
    render: Callable[[Embedded, Relevance], Response],
    *,
    activation: str = "sigmoid",
    repeated: Sequence[str] = (),
    field: str = "",
) -> ParsedEmbed:
    """The call for the scores of `documents`, each for the query of its index, or all for the only one. `activation`:
    of scores, unless the client wants what the model computes. `repeated`: the texts that the response has, too.
    `field`: with the documents; "": that of the attribute. Raises WrongModel and BadRequest."""
    wanted, _, model_info = call
    is_scored = _check(model_info)
    if wanted.get(ACTIVATION) == RAW:
        activation = "identity"
    of_each = queries * len(documents) if len(queries) == 1 else queries
    request = ask.resolve(
        call,
        list(map(Pair, of_each, documents)) if is_scored else [*queries, *documents],
        Output.SCORES if is_scored else Output.TOKEN_VECTORS,
        preferred=default_overflow(model_info),
        has_prompt=False,
    )
    tokenizing = request.tokenizing._replace(
        max_document_tokens=wanted.get(MAX_TOKENS_PER_DOC) or ALL,
        max_query_tokens=wanted.get(MAX_TOKENS_PER_QUERY) or ALL,
        instruction=_instruction(call),
    )
    if not is_scored:
        tokenizing = tokenizing._replace(role=Role.DOCUMENT, num_queries=len(queries))
    request = request._replace(tokenizing=tokenizing, normalize=False, is_max_sim=not is_scored)

    def render_scores(embedded: Embedded) -> Response:
        if is_scored:
            logits = relevance_logits(embedded.made[0].rows)
            scores = relevance_of(logits, activation)
        else:
            logits = scores = embedded.made[0].scores()
        return render(embedded, Relevance(logits, scores.tolist()))

    is_large = not is_scored or sum(map(len, repeated)) > _LARGE_RESPONSE_CHARS
    return ParsedEmbed(request, render_scores, is_large, field or wanted.word(DOCUMENTS))


def _instruction(call: Call) -> str | None:
    instruction, score = call.wanted.get(INSTRUCTION), call.model_info.card.score
    template = None if score is None else score.pair_template
    if instruction is not None and not (template is not None and template.has_instruction):
        raise BadRequest(f"'{INSTRUCTION.name}': this model has no place for one", param=INSTRUCTION.name)
    return instruction


def _check(model_info: ModelInfo) -> bool:
    """Whether the model ranks by scores, not by MaxSim. Raises WrongModel if it does neither."""
    if _ranks(model_info):
        return "rerank" in model_info.card.capabilities
    what = "makes embeddings" if model_info.card.score is None else "classifies texts"
    raise WrongModel(f"The model served here {what}: it cannot rank texts", can=_ranks)


def _ranks(model_info: ModelInfo) -> bool:
    return not set(NEEDS).isdisjoint(model_info.card.capabilities)


# --- rerank -----------------------------------------------------------------------------------------------------


def parse_rerank(call: Call, *, is_voyage: bool = False) -> ParsedEmbed:
    """`is_voyage`: the results are `data`, whatever fields the body has."""
    wanted = call.wanted
    documents = read_documents(call, wanted.require(DOCUMENTS), rank_fields=wanted.get(RANK_FIELDS) or _TEXT_FIELD)
    is_of_weaviate = wanted.has(PROPERTY.name)
    returns_documents = wanted.get(RETURN_DOCUMENTS) is True or is_of_weaviate
    num, words_of_voyage = wanted.get(TOP_N), (TOP_K.name, TRUNCATION.name)
    is_voyage = is_voyage or (not wanted.has(TOP_N.name) and wanted.has(words_of_voyage[num is None]))
    query, texts = wanted.require(QUERY), tuple(documents) if returns_documents else ()
    num_units = -(-len(documents) // _DOCUMENTS_IN_A_UNIT)

    def render(embedded: Embedded, relevance: Relevance) -> Response:
        results: list[JsonObject] = []
        for index, score in relevance.ranked(num):
            result: JsonObject = {"index": index, "relevance_score": score}
            if texts:
                result["document"] = texts[index] if is_voyage else {"text": texts[index]}
            results.append(result)
        before = {"id": embedded.request_id, "object": "list" if is_voyage else "rerank", "model": embedded.model}
        after = {"usage": usage(embedded), "meta": {"billed_units": {"search_units": num_units}}}
        return Response(200, object_with_list(before, "data" if is_voyage else "results", written(results), after))

    def render_weaviate(embedded: Embedded, relevance: Relevance) -> Response:
        """In the order of the request: Weaviate sorts by the score."""
        pairs = zip(texts, relevance.scores, strict=True)
        scores = [{"document": document, "score": score} for document, score in pairs]
        return json_response(200, {"query": query, "scores": scores})

    how = render_weaviate if is_of_weaviate else render
    return parse(call, [query], documents, how, repeated=texts)


# --- NVIDIA -----------------------------------------------------------------------------------------------------

PASSAGES = replace(DOCUMENTS, name="passages", description="what is ranked: objects with a `text`")


def parse_ranking(call: Call) -> ParsedEmbed:
    passages = read_documents(call, call.wanted.require(PASSAGES))
    return parse(call, [call.wanted.require(QUERY)], passages, render_rankings, activation="identity")


def render_rankings(embedded: Embedded, relevance: Relevance) -> Response:
    rankings = [{"index": index, "logit": logit} for index, logit in relevance.ranked(None)]
    return json_response(200, {"rankings": rankings, "usage": usage(embedded)})


# --- scores -----------------------------------------------------------------------------------------------------

QUERIES = fields.anything("queries", "a text, or a list of texts", TEXTS_SCHEMA, is_large=True)
_SCORED_DOCUMENTS = replace(DOCUMENTS, description="as many texts, or any number for a single query", is_required=False)
_SCORED: tuple[Field[Any], ...] = (
    QUERIES,
    _SCORED_DOCUMENTS,
    *(replace(QUERIES, name=name, description="the same as `queries`") for name in ("data_1", "text_1")),
    *(
        replace(_SCORED_DOCUMENTS, name=name, description="the same as `documents`")
        for name in ("items", "data_2", "text_2")
    ),
)


def parse_score(call: Call) -> ParsedEmbed:
    """Scores have the model's own activation, as with vLLM."""
    wanted, score = call.wanted, call.model_info.card.score
    given = [(wanted.word(attribute), wanted.get(attribute)) for attribute in (QUERIES, DOCUMENTS)]
    (first, queries), (second, documents) = given
    if queries is None or documents is None:
        has = next((f"'{word}'" for word, value in given if value is not None), "none of them")
        raise BadRequest(
            "A request must have 'queries' and 'documents' or 'queries' and 'items' or 'data_1' and 'data_2' or "
            f"'text_1' and 'text_2', has {has}",
            param=second if queries is None and documents is not None else first,
        )
    queries, documents = read_documents(call, queries, first), read_documents(call, documents)
    if len(queries) not in (1, len(documents)):
        raise BadRequest(
            f"'{first}' and '{second}' must be 1:1, 1:N or N:N texts, are {len(queries)}:{len(documents)}", param=second
        )
    activation = "identity" if score is None else score.activation
    return parse(call, queries, documents, render_score, activation=activation)


def render_score(embedded: Embedded, relevance: Relevance) -> Response:
    data = ({"index": index, "object": "score", "score": score} for index, score in enumerate(relevance.scores))
    return list_response("score", "list", written(data), embedded)


SCORE = Operation(
    summary="Score how well documents answer queries",
    fields=Fields(*_SCORED, RAW_SCORES, USE_ACTIVATION, *COMMON),
    parse=parse_score,
    response=list_schema({"const": "list"}, record(index=fields.COUNT, object={"const": "score"}, score=fields.NUMBER)),
    needs=NEEDS,
)

# --- SageMaker --------------------------------------------------------------------------------------------------


def _read_pairs(value: Any, name: str) -> list[list[str]]:
    for index, pair in enumerate(fields.expect(list, value, name, "a list of pairs of strings")):
        if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
            what = f"a list of {len(pair)}" if isinstance(pair, list) else json_type(pair)
            raise BadRequest(f"'{name}[{index}]' must be a list of two strings, is {what}", param=name)
    return value  # type: ignore[no-any-return]  # checked


TEXT_PAIRS = Field(
    "text_pairs",
    "pairs of a query and a document",
    list_of({**list_of(STRING, at_least=2), "maxItems": 2}, at_least=1),
    _read_pairs,
    is_required=True,
    is_large=True,
    key=DOCUMENTS.key,
)


def parse_invocation(call: Call) -> ParsedEmbed:
    """As vLLM has it for `documents` and for queries in its request for scores; or pairs."""
    wanted = call.wanted
    if not wanted.has(TEXT_PAIRS.name):
        return parse_rerank(call) if wanted.get(QUERIES) is None else parse_score(call)
    pairs = wanted.require(TEXT_PAIRS)
    documents = read_documents(call, [document for _, document in pairs])
    return parse(call, [query for query, _ in pairs], documents, render_scores)


def render_scores(embedded: Embedded, relevance: Relevance) -> Response:
    return json_response(200, {"scores": relevance.scores})


# --- the dialect ------------------------------------------------------------------------------------------------


def render_error(error: ApiError) -> Response:
    """Cohere's clients read `message`, Jina's, Voyage's and those of Haystack and LlamaIndex `detail`, Weaviate's
    `error`."""
    fault = {"message": error.message, "detail": error.message, "error": error.message}
    return json_response(error.status, fault)


_SCORE = described(fields.NUMBER, "between 0 and 1, unless the request or the model says otherwise")
_TEXT_OF = described(any_of(STRING, record(text=STRING)), "if the request asks for it; a string with Voyage's fields")
_RESULTS = list_of(record("document", index=fields.COUNT, relevance_score=_SCORE, document=_TEXT_OF))
_RERANKED = record(
    "results",
    "data",
    id=described(STRING, "The request's, as in the header x-request-id"),
    object={"enum": ["rerank", "list"]},
    model=STRING,
    results=described(_RESULTS, "the best first"),
    data=described(_RESULTS, "instead of `results`, for Voyage's clients"),
    usage=fields.USAGE,
    meta=record(billed_units=record(search_units=fields.POSITIVE)),
)
_OF_WEAVIATE = record(query=STRING, scores=list_of(record(document=STRING, score=_SCORE)))
_RERANK = Operation(
    summary="Rank documents by how well they answer a query",
    fields=Fields(*_FIELDS),
    parse=parse_rerank,
    response=any_of(_RERANKED, _OF_WEAVIATE),
    claims=(DOCUMENTS.name,),
    needs=NEEDS,
)

DIALECT = Dialect(
    name="rerank",
    title="Rerank (Cohere, Jina, Voyage, vLLM, infinity, NVIDIA)",
    operations={
        **posted(_RERANK, "/rerank", "/v1/rerank", "/openai/v1/rerank", "/v2/rerank", "/api/rerank"),
        "POST /voyage/v1/rerank": replace(
            _RERANK,
            summary="Rank documents, for clients of Voyage that are recognized by no field",
            parse=partial(parse_rerank, is_voyage=True),
            response=_RERANKED,
            claims=(),
        ),
        "POST /v1/ranking": Operation(
            summary="Rank passages by how well they answer a query",
            fields=Fields(PASSAGES, QUERY, MODEL, *TOKENIZING_FIELDS),
            parse=parse_ranking,
            response=record(rankings=list_of(record(index=fields.COUNT, logit=fields.NUMBER)), usage=fields.USAGE),
            needs=NEEDS,
        ),
        "POST /invocations": Operation(
            summary="Rank documents, or score pairs of texts, where SageMaker looks for it",
            fields=Fields(*(replace(field, is_required=False) for field in (TEXT_PAIRS, *_SCORED, *_FIELDS))),
            parse=parse_invocation,
            response=any_of(record(scores=list_of(_SCORE)), SCORE.response, _RERANKED, _OF_WEAVIATE),
            claims=(TEXT_PAIRS.name, DOCUMENTS.name, QUERY.name, "queries", "data_1", "text_1"),
            needs=NEEDS,
        ),
    },
    render_error=render_error,
    error=record(message=STRING, detail=STRING, error=STRING),
)
