"""Rerank routes with `documents`: those of Cohere, Jina, Voyage, vLLM, infinity, Weaviate and NVIDIA. Pure.

Owns the shapes of `/rerank` with `documents`, `/v1/rerank`, `/v2/rerank`, `/api/rerank`, `/v1/ranking`, and of
`/invocations` with `documents`, with `text_pairs`, or with what vLLM's `/score` takes. Bodies with `texts` at `/rerank`
and `/invocations`, and with a `query` at `/`, are text-embeddings-inference's. Sources of the shapes: the clients of
each, because these APIs share paths, and clients choose a path by their own name for it. What a request gets:

- An object with `results` that has what any of these clients reads: Cohere's `meta`, Jina's and vLLM's `model` and
  `usage`, infinity's `object`.
- The same as `data` to Voyage's clients, which always send `truncation` or `top_k`; and always below `/voyage`, for
  LiteLLM, which may send neither.
- Weaviate's `scores`, in the order of the request, to a body with `property`, which its client always sends.

A result has a `document` only where the request asks for it, as an object with a `text`; Voyage's is a string. It is
never null, which LiteLLM refuses. Infinity's clients expect a string, so with LiteLLM's prefix `infinity/` a request
must have `return_documents=False`. Jina returns documents by default; its clients have their own.

Scores are between 0 and 1, by a sigmoid, whatever the model's own activation is, unless `raw_scores` or
`use_activation` say otherwise: clients compare them with thresholds. NVIDIA's are logits. Those of a multi-vector model
are sums or means of cosines.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from vecd.gateway.api import fields, schemas
from vecd.gateway.api.dialects import ranking
from vecd.gateway.api.dialects.headers import response_headers
from vecd.gateway.api.dialects.options import MODEL, PRIORITY
from vecd.gateway.api.dialects.ranking import NEEDS, QUERY, TOP_N, TRUNCATION, Relevance, read_documents
from vecd.gateway.api.dialects.rows import object_with_list, usage, written
from vecd.gateway.api.dialects.vllm import QUERIES, SCORE, SCORED, parse_score
from vecd.gateway.api.fields import Field, Fields, Values, contradiction, json_type
from vecd.gateway.api.operations import Call, Dialect, Operation, ParsedEmbed
from vecd.gateway.api.schemas import any_of, described, list_of, nullable, record
from vecd.gateway.types.errors import ApiError, BadRequest
from vecd.gateway.types.messages import Response
from vecd.gateway.types.request import Embedded

_DOCUMENTS_IN_A_UNIT = 100
"""Cohere bills a search for so many documents as one unit."""

# --- fields -----------------------------------------------------------------------------------------------------


DOCUMENTS = fields.anything(
    "documents",
    "what is ranked: texts, or objects with a `text`",
    ranking.TEXTS_SCHEMA,
    is_required=True,
    is_large=True,
)
TEXTS = fields.anything(
    "texts", "the same, by text-embeddings-inference's name; both may be sent if they are equal", {}, is_large=True
)
TOP_K = fields.whole_number("top_k", "the same as `top_n`, by Voyage's name", minimum=0)
RETURN_DOCUMENTS = ranking.flag("return_documents", "true: the response repeats the documents", default=False)
_MAX_RANK_FIELDS = 32


def _read_rank_fields(value: Any, name: str) -> tuple[str, ...]:
    """The names without repetitions, in the order of the request: each field of a document is read once, so that its
    text is no longer than the document."""
    names = tuple(dict.fromkeys(fields.read_texts(value, name)))
    if len(names) > _MAX_RANK_FIELDS:
        raise BadRequest(f"'{name}' has {len(names)} names, at most {_MAX_RANK_FIELDS} are allowed", param=name)
    return names


RANK_FIELDS = Field(
    "rank_fields",
    "Cohere's: of documents that are objects, the fields that are read, as lines of one text, each once and at most "
    f"{_MAX_RANK_FIELDS}. Default: `text`",
    nullable("array", items=schemas.STRING),
    _read_rank_fields,
)
PROPERTY = fields.anything("property", "Weaviate's: selects the shape of its response", {})
_FIELDS = Fields(
    DOCUMENTS,
    TEXTS,
    QUERY,
    TOP_N,
    TOP_K,
    RETURN_DOCUMENTS,
    RANK_FIELDS,
    ranking.RAW_SCORES,
    ranking.USE_ACTIVATION,
    PROPERTY,
    *ranking.COMMON,
)

# --- parse ------------------------------------------------------------------------------------------------------


def parse_rerank(call: Call, *, is_voyage: bool = False) -> ParsedEmbed:
    """`is_voyage`: the results are `data`, whatever fields the body has."""
    values, model_info = call.values, call.model_info
    documents, name = _read_documents(values, model_info.max_inputs)
    is_of_weaviate = values.get(PROPERTY) is not None
    returns_documents = values.get(RETURN_DOCUMENTS) is True or is_of_weaviate
    top_n, top_k = values.get(TOP_N), values.get(TOP_K)
    if top_n is not None and top_k is not None and top_n != top_k:
        raise contradiction(TOP_N.name, TOP_K.name)
    is_voyage = is_voyage or (top_n is None and (top_k is not None or values.get(TRUNCATION) is not None))
    texts = tuple(documents) if returns_documents else ()
    if is_of_weaviate:
        render = partial(render_weaviate, query=values.require(QUERY), documents=texts)
    else:
        render = partial(
            render_results,
            documents=texts,
            num=top_k if top_n is None else top_n,
            num_documents=len(documents),
            model=model_info.model,
            request_id=call.request_id,
            is_voyage=is_voyage,
        )
    return ranking.parse(
        call,
        [values.require(QUERY)],
        documents,
        name,
        ranking.read_tokenizing(values, model_info),
        render,
        is_raw=ranking.agreed_flag(values) is True,
        priority=values.get(PRIORITY),
        repeated=texts,
    )


def _read_documents(values: Values, max_inputs: int) -> tuple[list[str], str]:
    """The documents, and the name of their field. Raises BadRequest."""
    documents, texts = values.get(DOCUMENTS), values.get(TEXTS)
    if documents is None:
        documents, name = (texts, TEXTS.name) if texts is not None else (values.require(DOCUMENTS), DOCUMENTS.name)
    elif texts is not None and texts != documents:
        raise contradiction(DOCUMENTS.name, TEXTS.name)
    else:
        name = DOCUMENTS.name
    return read_documents(documents, name, max_inputs, values.get(RANK_FIELDS) or ("text",)), name


# --- render -----------------------------------------------------------------------------------------------------


def render_results(
    embedded: Embedded,
    relevance: Relevance,
    *,
    documents: tuple[str, ...],
    num: int | None,
    num_documents: int,
    model: str,
    request_id: str,
    is_voyage: bool,
) -> Response:
    """`documents`: those that the response repeats; none if it repeats none."""
    results: list[dict[str, Any]] = []
    for index, score in relevance.ranked(num):
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        if documents:
            result["document"] = documents[index] if is_voyage else {"text": documents[index]}
        results.append(result)
    before = {"id": request_id, "object": "list" if is_voyage else "rerank", "model": model}
    units = {"billed_units": {"search_units": -(-num_documents // _DOCUMENTS_IN_A_UNIT)}}
    after = {"usage": usage(embedded), "meta": units}
    body = object_with_list(before, "data" if is_voyage else "results", written(results), after)
    return Response(200, body, response_headers(embedded))


def render_weaviate(embedded: Embedded, relevance: Relevance, *, query: str, documents: tuple[str, ...]) -> Response:
    """In the order of the request: Weaviate sorts by the score."""
    scores = [
        {"document": document, "score": score} for document, score in zip(documents, relevance.scores, strict=True)
    ]
    return Response(200, orjson.dumps({"query": query, "scores": scores}), response_headers(embedded))


# --- NVIDIA -----------------------------------------------------------------------------------------------------

PASSAGES = fields.anything(
    "passages", "what is ranked: objects with a `text`", ranking.TEXTS_SCHEMA, is_required=True, is_large=True
)


def parse_ranking(call: Call) -> ParsedEmbed:
    values, model_info = call.values, call.model_info
    passages = read_documents(values.require(PASSAGES), PASSAGES.name, model_info.max_inputs)
    return ranking.parse(
        call,
        [values.require(QUERY)],
        passages,
        PASSAGES.name,
        ranking.read_tokenizing(values, model_info),
        render_rankings,
        is_raw=True,
    )


def render_rankings(embedded: Embedded, relevance: Relevance) -> Response:
    rankings = [{"index": index, "logit": logit} for index, logit in relevance.ranked(None)]
    return Response(200, orjson.dumps({"rankings": rankings, "usage": usage(embedded)}), response_headers(embedded))


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
    list_of({**list_of(schemas.STRING, at_least=2), "maxItems": 2}, at_least=1),
    _read_pairs,
    is_required=True,
    is_large=True,
)


def parse_text_pairs(call: Call) -> ParsedEmbed:
    values, model_info = call.values, call.model_info
    pairs = values.require(TEXT_PAIRS)
    documents = read_documents([document for _, document in pairs], TEXT_PAIRS.name, model_info.max_inputs)
    return ranking.parse(
        call,
        [query for query, _ in pairs],
        documents,
        TEXT_PAIRS.name,
        ranking.read_tokenizing(values, model_info),
        render_scores,
        is_raw=ranking.agreed_flag(values) is True,
        priority=values.get(PRIORITY),
    )


def parse_invocation(call: Call) -> ParsedEmbed:
    """As vLLM has it for `documents` and for queries in its request for scores; or pairs."""
    if call.values.get(TEXT_PAIRS) is not None:
        return parse_text_pairs(call)
    is_scored = any(call.values.get(SCORED[name]) is not None for name in QUERIES)
    return parse_score(call) if is_scored else parse_rerank(call)


def render_scores(embedded: Embedded, relevance: Relevance) -> Response:
    return Response(200, orjson.dumps({"scores": relevance.scores}), response_headers(embedded))


# --- the dialect ------------------------------------------------------------------------------------------------


def render_error(error: ApiError) -> Response:
    """Cohere's clients read `message`, Jina's, Voyage's and those of Haystack and LlamaIndex `detail`, Weaviate's
    `error`."""
    fault = {"message": error.message, "detail": error.message, "error": error.message}
    return Response(error.status, orjson.dumps(fault))


_SCORE = described({"type": "number"}, "between 0 and 1, unless the request or the model says otherwise")
_TEXT_OF = described(
    any_of(schemas.STRING, record(text=schemas.STRING)), "if the request asks for it; a string with Voyage's fields"
)
_RESULTS = list_of(record("document", index=schemas.COUNT, relevance_score=_SCORE, document=_TEXT_OF))
_USAGE = record(prompt_tokens=schemas.COUNT, total_tokens=schemas.COUNT)
_RERANKED = record(
    "results",
    "data",
    id=described(schemas.STRING, "The request's, as in the header x-request-id"),
    object={"enum": ["rerank", "list"]},
    model=schemas.STRING,
    results=described(_RESULTS, "the best first"),
    data=described(_RESULTS, "instead of `results`, for Voyage's clients"),
    usage=_USAGE,
    meta=record(billed_units=record(search_units=schemas.POSITIVE)),
)
_SCORED = record(query=schemas.STRING, scores=list_of(record(document=schemas.STRING, score=_SCORE)))
_RERANK = Operation(
    summary="Rank documents by how well they answer a query",
    fields=_FIELDS,
    embed=parse_rerank,
    response=any_of(_RERANKED, _SCORED),
    claims=(DOCUMENTS.name,),
    needs=NEEDS,
)

DIALECT = Dialect(
    name="rerank",
    title="Rerank (Cohere, Jina, Voyage, vLLM, infinity, NVIDIA)",
    operations={
        "POST /rerank": _RERANK,
        "POST /v1/rerank": _RERANK,
        "POST /openai/v1/rerank": _RERANK,
        "POST /v2/rerank": _RERANK,
        "POST /api/rerank": _RERANK,
        "POST /voyage/v1/rerank": Operation(
            summary="Rank documents, for clients of Voyage that are recognized by no field",
            fields=_FIELDS,
            embed=partial(parse_rerank, is_voyage=True),
            response=_RERANKED,
            needs=NEEDS,
        ),
        "POST /v1/ranking": Operation(
            summary="Rank passages by how well they answer a query",
            fields=Fields(PASSAGES, QUERY, MODEL, *ranking.TOKENIZING_FIELDS),
            embed=parse_ranking,
            response=record(rankings=list_of(record(index=schemas.COUNT, logit={"type": "number"})), usage=_USAGE),
            needs=NEEDS,
        ),
        "POST /invocations": Operation(
            summary="Rank documents, or score pairs of texts, where SageMaker looks for it",
            fields=Fields(*(replace(field, is_required=False) for field in (TEXT_PAIRS, *SCORED.values(), *_FIELDS))),
            embed=parse_invocation,
            response=any_of(record(scores=list_of(_SCORE)), SCORE.response, _RERANKED, _SCORED),
            claims=(TEXT_PAIRS.name, DOCUMENTS.name, QUERY.name, *QUERIES),
            needs=NEEDS,
        ),
    },
    render_error=render_error,
    error=record(message=schemas.STRING, detail=schemas.STRING, error=schemas.STRING),
)
