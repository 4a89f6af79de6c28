"""Every rerank and score route: what is asked for, what is answered, and what is refused. `test_attributes` has their
words."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pytest
from jsonschema_rs import validator_for

from tests.support.arrays import COLBERT, MOODS, RERANKER, rows
from tests.support.asking import PLAIN, ask, body_of, changed, embedded_of, read_in_pieces, refusal
from vecd.gateway.api.operation import Operation
from vecd.gateway.api.served import ModelInfo
from vecd.gateway.dialects import rerank, tei, vllm
from vecd.gateway.encoding.forms import Matrix
from vecd.gateway.encoding.streams import MaxSimRows
from vecd.gateway.errors import BadRequest, TooManyInputs, WrongModel
from vecd.gateway.request import Embedded, EmbedRequest, Overflow, Pair, Role, Tokenizing
from vecd.model.steps import PairTemplate, ScoreHead, TokenHead
from vecd.shm.output import Output

RERANK = rerank.DIALECT.operations["POST /v1/rerank"]
INVOCATION = rerank.DIALECT.operations["POST /invocations"]
VOYAGE = rerank.DIALECT.operations["POST /voyage/v1/rerank"]
TEI = tei.DIALECT.operations["POST /rerank"]
ROOT = tei.DIALECT.operations["POST /"]
TEI_INVOCATION = tei.DIALECT.operations["POST /invocations"]
SCORE = vllm.DIALECT.operations["POST /v1/score"]
DOCUMENTS = ["one", "two", "three"]
BODY: dict[str, Any] = {"model": "m", "query": "q", "documents": DOCUMENTS}

CROSS_ENCODER = changed(RERANKER, max_inputs=6)
OF_SIGMOID = changed(CROSS_ENCODER, score=ScoreHead(("LABEL_0",), "sigmoid", "cls"))
TWO_LABELS = changed(CROSS_ENCODER, num_labels=2, score=ScoreHead(("no", "yes"), "softmax", "cls"))
TEMPLATE = PairTemplate("<Instruct>: {instruction}\n<Query>: ", "\n<Document>: ", "", "rank")
WITH_INSTRUCTION = changed(CROSS_ENCODER, score=ScoreHead(("LABEL_0",), "sigmoid", "lasttoken", pair_template=TEMPLATE))
MULTI_VECTOR = changed(COLBERT, max_inputs=6)


def of_logits(logits: Sequence[Any], **changes: Any) -> Embedded:
    """The result of a model with scores: a number for each input, or a list with one for each label."""
    matrix = np.array(logits, dtype=np.float32).reshape(len(logits), -1)
    made = Matrix(*matrix.shape)
    made.put(0, matrix, 0)
    return embedded_of(made, **changes)


def of_matrices(*matrices: np.ndarray, num_queries: int = 1, is_mean: bool = False) -> Embedded:
    """The result of a multi-vector model: the vectors of the tokens of each input, the queries first."""
    request = EmbedRequest(["text"] * len(matrices), tokenizing=Tokenizing(num_queries=num_queries))
    made = MaxSimRows(request, TokenHead(steps=(), is_mean=is_mean), matrices[0].shape[1], [])
    for index, matrix in enumerate(matrices):
        made.put(index, matrix, 0)
    return embedded_of(made)


def rank(
    operation: Operation, body: dict[str, Any], logits: Sequence[Any], model_info: ModelInfo = CROSS_ENCODER
) -> Any:
    """The body of the answer, where the inputs have these logits: it is as the document says."""
    asked = ask(operation, body, model_info=model_info)
    assert len(asked.request.inputs) == len(logits)
    answer = orjson.loads(body_of(asked.render(of_logits(logits))))
    assert not [error.message for error in validator_for(operation.response).iter_errors(answer)]
    return answer


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def scored(results: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(result["index"], result["relevance_score"]) for result in results]


# --- results ----------------------------------------------------------------------------------------------------


def test_a_pair_is_asked_for_each_document():
    request = ask(RERANK, BODY, model_info=CROSS_ENCODER).request
    assert (request.inputs, request.output) == ([Pair("q", text) for text in DOCUMENTS], Output.SCORES)
    assert request.tokenizing.num_queries == 0


NEAR = float(np.nextafter(np.float32(9), np.float32(10)))


@pytest.mark.parametrize(
    ("fields", "model_info", "logits", "expected"),
    [
        ({}, CROSS_ENCODER, [-1.0, 2.0, 0.5], [(1, sigmoid(2)), (2, sigmoid(0.5)), (0, sigmoid(-1))]),
        ({}, CROSS_ENCODER, [9.0, NEAR, 9.0], [(1, sigmoid(NEAR)), (0, sigmoid(9)), (2, sigmoid(9))]),
        ({"raw_scores": True}, CROSS_ENCODER, [0.25, -8.5, 3.0], [(2, 3.0), (0, 0.25), (1, -8.5)]),
        # Two labels rank by the second.
        ({}, TWO_LABELS, [[0, 0], [1, 3], [2, 1]], [(1, sigmoid(2)), (0, 0.5), (2, sigmoid(-1))]),
    ],
)
def test_documents_are_ranked_by_their_logits(fields, model_info, logits, expected):
    answer = rank(RERANK, {**BODY, **fields}, logits, model_info)
    found = scored(answer["results"])
    assert [index for index, _ in found] == [index for index, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-15)
    assert all(set(result) == {"index", "relevance_score"} for result in answer["results"])


@pytest.mark.parametrize(
    ("fields", "logits", "written"),
    [
        ({"raw_scores": True}, [1.0, -2.0, 1000.0], [b"1000.0", b"1.0", b"-2.0"]),
        ({}, [900.0, 0.0, -900.0], [b"1.0", b"0.5", b"0.0"]),
    ],
)
def test_scores_are_always_written_as_floats(fields, logits, written):
    """OpenSearch casts them to a Double."""
    body = body_of(ask(RERANK, {**BODY, **fields}, model_info=CROSS_ENCODER).render(of_logits(logits)))
    assert all(b'"relevance_score":%b}' % number in body for number in written)


def test_large_documents_are_repeated_in_a_thread():
    large = {**BODY, "documents": ["x" * 200_000] * 3}
    assert not ask(RERANK, large, model_info=CROSS_ENCODER).is_large
    assert ask(RERANK, {**large, "return_documents": True}, model_info=CROSS_ENCODER).is_large


@pytest.mark.parametrize(
    ("operation", "fields", "key"),
    [
        (RERANK, {"top_k": None, "truncation": True}, "data"),
        (RERANK, {"top_k": 2}, "data"),
        (RERANK, {"truncation": False}, "data"),
        (RERANK, {"top_n": 2, "truncation": True}, "results"),
        (VOYAGE, {}, "data"),
    ],
)
def test_voyage_s_clients_get_data(operation, fields, key):
    assert {"data", "results"} & rank(operation, {**BODY, **fields}, [0.0, 1.0, 2.0]).keys() == {key}


def test_units_are_cohere_s():
    many = changed(CROSS_ENCODER, max_inputs=1000)
    answer = rank(RERANK, {**BODY, "documents": ["x"] * 101}, [0.0] * 101, many)
    assert answer["meta"]["billed_units"]["search_units"] == 2


# --- what documents may be --------------------------------------------------------------------------------------


def documents_of(**body: Any) -> list[str]:
    inputs: Any = ask(RERANK, {"query": "q", **body}, model_info=CROSS_ENCODER).request.inputs
    return [pair.document for pair in inputs]


def test_rank_fields_are_read_once_and_at_most_32():
    fields = [{"title": "t", "body": "b"}]
    assert documents_of(documents=fields, rank_fields=["title", "body", *["title"] * 60_000]) == ["t\nb"]
    names = [f"field {index}" for index in range(32)]
    assert documents_of(documents=[dict.fromkeys(names, "x")], rank_fields=names) == ["\n".join("x" * 32)]
    with pytest.raises(BadRequest, match="'rank_fields' has 33 names, at most 32 are allowed") as caught:
        documents_of(documents=fields, rank_fields=[*names, "title"])
    assert caught.value.param == "rank_fields"


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"documents": None}, "'documents' is required", "documents"),
        ({"documents": [{"a": "x"}], "rank_fields": ["b"]}, "in its 'rank_fields'", "documents"),
        ({"query": {"image": "q"}}, "'query.text' must be a string, is missing", "query.text"),
        ({"instruction": "x"}, "this model has no place for one", "instruction"),
    ],
)
def test_what_is_wrong_is_named(fields, message, param):
    error = refusal(RERANK, {**BODY, **fields}, CROSS_ENCODER)
    assert error.param == param
    assert message in error.message


def test_too_many_documents_are_refused_with_the_limit():
    body = {"query": "q", "documents": ["d"] * 10_000}
    with pytest.raises(TooManyInputs, match=r"'\$.documents' is invalid: 10000 inputs, at most 6 .*--max-inputs"):
        ask(RERANK, body, model_info=CROSS_ENCODER)
    with pytest.raises(TooManyInputs, match="documents"):
        read_in_pieces(RERANK, body, max_items=6)


# --- options ----------------------------------------------------------------------------------------------------


# --- models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model_info", "kind"), [(PLAIN, "makes embeddings"), (MOODS, "classifies texts")])
@pytest.mark.parametrize(
    ("operation", "body"),
    [(RERANK, BODY), (TEI, {"query": "q", "texts": ["a"]}), (SCORE, {"text_1": "a", "text_2": "b"})],
)
def test_a_model_that_cannot_rank_refuses(operation, body, model_info, kind):
    with pytest.raises(WrongModel, match=f"{kind}: it cannot rank texts"):
        ask(operation, body, model_info=model_info)
    assert operation.needs == ("rerank", "multi-vector")


def test_a_multi_vector_model_ranks_by_max_sim():
    asked = ask(RERANK, BODY, model_info=MULTI_VECTOR)
    assert asked.request.inputs == ["q", *DOCUMENTS]
    assert asked.request.output is Output.TOKEN_VECTORS
    assert (asked.request.tokenizing.num_queries, asked.request.tokenizing.role) == (1, Role.DOCUMENT)
    assert asked.request.is_max_sim
    assert asked.is_large, "it is computed in a thread"
    matrices = rows((1, 0), (0, 1)), rows((0.5, 0)), rows((1, 0), (0, 1)), rows((0, 0.75))
    answer = orjson.loads(body_of(asked.render(of_matrices(*matrices))))
    assert scored(answer["results"]) == [(1, 2.0), (2, 0.75), (0, 0.5)]
    answer = orjson.loads(body_of(asked.render(of_matrices(*matrices, is_mean=True))))
    assert scored(answer["results"]) == [(1, 1.0), (2, 0.375), (0, 0.25)]


def test_max_sim_of_pairs():
    asked = ask(SCORE, {"text_1": ["a", "b"], "text_2": ["c", "d"]}, model_info=MULTI_VECTOR)
    assert asked.request.inputs == ["a", "b", "c", "d"]
    assert asked.request.tokenizing.num_queries == 2
    one, other = rows((1, 0)), rows((0, 1))
    answer = orjson.loads(body_of(asked.render(of_matrices(one, other, one, one, num_queries=2))))
    assert [item["score"] for item in answer["data"]] == [1.0, 0.0]


# --- text-embeddings-inference, OpenSearch and SageMaker ----------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "body", "error", "says"),
    [
        (TEI, {"query": "q"}, BadRequest, "'texts' is required"),
        (TEI, {"query": "q", "texts": ["a"] * 7}, TooManyInputs, "7 inputs"),
        (ROOT, {"inputs": "a"}, WrongModel, "ranks texts: send a 'query'"),
        (ROOT, {"inputs": ["a", "b"]}, WrongModel, "ranks texts"),
        (ROOT, {"inputs": [{"text": "q", "text_pair": 5}]}, BadRequest, "must be a string"),
        (ROOT, {"inputs": [["q", "a"]] * 7}, TooManyInputs, "at most 6"),
        (TEI_INVOCATION, {"text_inputs": ["a"]}, WrongModel, "ranks texts"),
    ],
)
def test_what_is_refused_of_tei_s_clients_by_a_model_that_ranks(operation, body, error, says):
    with pytest.raises(error, match=says):
        ask(operation, body, model_info=CROSS_ENCODER)


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("operation", [ROOT, TEI_INVOCATION])
def test_opensearch_gets_scores_in_the_order_of_its_pairs(operation, in_pieces):
    pairs = [{"text": "q", "text_pair": "a"}, {"text": "q", "text_pair": "b"}]
    asked = ask(operation, {"inputs": pairs}, model_info=CROSS_ENCODER, in_pieces=in_pieces)
    assert asked.request.inputs == [Pair("q", "a"), Pair("q", "b")]
    assert asked.request.tokenizing.overflow is Overflow.TRUNCATE
    assert body_of(asked.render(of_logits([0.0, 1000.0]))) == b'[{"score":0.5},{"score":1.0}]'
    fields = {"inputs": pairs, "parameters": {"truncate": False, "raw_scores": True}}
    asked = ask(operation, fields, model_info=CROSS_ENCODER, in_pieces=in_pieces)
    assert asked.request.tokenizing.overflow is Overflow.ERROR
    assert body_of(asked.render(of_logits([3.0, -1.0]))) == b'[{"score":3.0},{"score":-1.0}]'
    asked = ask(operation, {"inputs": [["q", "a"], ["r", "b"]]}, model_info=MULTI_VECTOR, in_pieces=in_pieces)
    assert (asked.request.inputs, asked.request.tokenizing.num_queries) == (["q", "r", "a", "b"], 2)


def test_sagemaker_gets_what_vllm_has_for_documents_and_for_two_lists():
    assert rank(INVOCATION, BODY, [0.0, 1.0, 2.0]) == rank(RERANK, BODY, [0.0, 1.0, 2.0])
    body = {"data_1": ["q", "q"], "data_2": ["a", "b"]}
    assert rank(INVOCATION, body, [3.0, 1.0])["data"] == rank(SCORE, body, [3.0, 1.0])["data"]
    for missing in ("query", "documents"):
        with pytest.raises(BadRequest, match=f"'{missing}' is required"):
            ask(INVOCATION, {**BODY, missing: None}, model_info=CROSS_ENCODER)


# --- vLLM's scores ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_info", "fields", "expected"),
    [
        (CROSS_ENCODER, {}, [0.0, 1.0]),
        (OF_SIGMOID, {}, [0.5, sigmoid(1)]),
        (OF_SIGMOID, {"use_activation": False}, [0.0, 1.0]),
    ],
)
def test_scores_have_the_model_s_activation_and_the_order_of_the_inputs(model_info, fields, expected):
    answer = rank(SCORE, {"text_1": "q", "text_2": ["a", "b"], **fields}, [0.0, 1.0], model_info)
    assert [item["score"] for item in answer["data"]] == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "must have 'queries' and 'documents' or .* has none of them"),
        ({"text_1": "a", "text_2": "b", "queries": "c"}, "'text_1' and 'queries' contradict each other"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "must be 1:1, 1:N or N:N texts, are 2:1"),
    ],
)
def test_wrong_pairs_for_scores_are_refused(body, message):
    with pytest.raises(BadRequest, match=message):
        ask(SCORE, body, model_info=CROSS_ENCODER)
