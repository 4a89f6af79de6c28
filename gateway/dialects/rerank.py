"""Rerank routes with `documents`: those of Cohere, Jina, Voyage, vLLM, infinity, Weaviate and NVIDIA. Pure.

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

from dataclasses import replace
from functools import partial
from typing import Any

from vecd.base.files import JsonObject
from vecd.gateway.api import fields
from vecd.gateway.api.answer import json_response, object_with_list, response_headers, usage, written
from vecd.gateway.api.fields import (
    STRING,
    Field,
    Fields,
    agreed,
    any_of,
    described,
    json_type,
    list_of,
    nullable,
    record,
)
from vecd.gateway.api.operation import Call, Dialect, Operation, ParsedEmbed
from vecd.gateway.dialects import ranking
from vecd.gateway.dialects.options import MODEL
from vecd.gateway.dialects.ranking import NEEDS, QUERY, TOP_N, TRUNCATION, Relevance, read_documents
from vecd.gateway.dialects.vllm import QUERIES, SCORE, SCORED, parse_score
from vecd.gateway.errors import ApiError, BadRequest
from vecd.gateway.request import Embedded, Response

_DOCUMENTS_IN_A_UNIT = 100
"""Cohere bills a search for up to this many documents as one unit."""

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
    documents, name = agreed(values, DOCUMENTS, TEXTS) or (values.require(DOCUMENTS), DOCUMENTS.name)
    documents = read_documents(documents, name, model_info.config.max_inputs, values.get(RANK_FIELDS) or ("text",))
    is_of_weaviate = values.get(PROPERTY) is not None
    returns_documents = values.get(RETURN_DOCUMENTS) is True or is_of_weaviate
    num = agreed(values, TOP_N, TOP_K)
    is_voyage = is_voyage or (num[1] == TOP_K.name if num is not None else values.get(TRUNCATION) is not None)
    query, texts = values.require(QUERY), tuple(documents) if returns_documents else ()
    # No renderer keeps a reference to the call, which has all documents.
    request_id, num_units = call.request_id, -(-len(documents) // _DOCUMENTS_IN_A_UNIT)

    def render(embedded: Embedded, relevance: Relevance) -> Response:
        results: list[JsonObject] = []
        for index, score in relevance.ranked(num and num[0]):
            result: JsonObject = {"index": index, "relevance_score": score}
            if texts:
                result["document"] = texts[index] if is_voyage else {"text": texts[index]}
            results.append(result)
        before = {"id": request_id, "object": "list" if is_voyage else "rerank", "model": model_info.model}
        after = {"usage": usage(embedded), "meta": {"billed_units": {"search_units": num_units}}}
        body = object_with_list(before, "data" if is_voyage else "results", written(results), after)
        return Response(200, body, response_headers(embedded))

    def render_weaviate(embedded: Embedded, relevance: Relevance) -> Response:
        """In the order of the request: Weaviate sorts by the score."""
        pairs = zip(texts, relevance.scores, strict=True)
        scores = [{"document": document, "score": score} for document, score in pairs]
        return json_response(200, {"query": query, "scores": scores}, response_headers(embedded))

    how = render_weaviate if is_of_weaviate else render
    return ranking.parse(call, [query], documents, name, how, repeated=texts)


# --- NVIDIA -----------------------------------------------------------------------------------------------------

PASSAGES = fields.anything(
    "passages", "what is ranked: objects with a `text`", ranking.TEXTS_SCHEMA, is_required=True, is_large=True
)


def parse_ranking(call: Call) -> ParsedEmbed:
    values, model_info = call.values, call.model_info
    passages = read_documents(values.require(PASSAGES), PASSAGES.name, model_info.config.max_inputs)
    return ranking.parse(call, [values.require(QUERY)], passages, PASSAGES.name, render_rankings, is_raw=True)


def render_rankings(embedded: Embedded, relevance: Relevance) -> Response:
    rankings = [{"index": index, "logit": logit} for index, logit in relevance.ranked(None)]
    return json_response(200, {"rankings": rankings, "usage": usage(embedded)}, response_headers(embedded))


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
)


def parse_invocation(call: Call) -> ParsedEmbed:
    """As vLLM has it for `documents` and for queries in its request for scores; or pairs."""
    pairs = call.values.get(TEXT_PAIRS)
    if pairs is None:
        is_scored = any(call.values.get(SCORED[name]) is not None for name in QUERIES)
        return parse_score(call) if is_scored else parse_rerank(call)
    documents = read_documents([document for _, document in pairs], TEXT_PAIRS.name, call.model_info.config.max_inputs)
    return ranking.parse(call, [query for query, _ in pairs], documents, TEXT_PAIRS.name, render_scores)


def render_scores(embedded: Embedded, relevance: Relevance) -> Response:
    return json_response(200, {"scores": relevance.scores}, response_headers(embedded))


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
_SCORED = record(query=STRING, scores=list_of(record(document=STRING, score=_SCORE)))
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
            response=record(rankings=list_of(record(index=fields.COUNT, logit=fields.NUMBER)), usage=fields.USAGE),
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
    error=record(message=STRING, detail=STRING, error=STRING),
)
