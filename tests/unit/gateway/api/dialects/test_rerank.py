"""Every rerank and score route: what is asked for, what is answered, and what is refused."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from jsonschema_rs import validator_for

from tests.support.asking import PLAIN, ask, body_of, read_in_pieces
from tests.support.ranking import (
    CLASSIFIER,
    CROSS_ENCODER,
    MULTI_VECTOR,
    TWO_LABELS,
    WITH_INSTRUCTION,
    of_logits,
    of_matrices,
    rank,
)
from vecd.gateway.api.dialects import rerank, tei, vllm
from vecd.gateway.api.handlers import OperationsHandler
from vecd.gateway.api.operations import Operation
from vecd.gateway.api.registry import ROUTES
from vecd.gateway.types.errors import BadRequest, EmptyInput, ModelNotFound, TooManyInputs, WrongModel
from vecd.gateway.types.request import Overflow, Pair, Priority, Role
from vecd.shm.heads import CAPABILITIES
from vecd.shm.output import Output

RERANK = rerank.DIALECT.operations["POST /v1/rerank"]
RANKING = rerank.DIALECT.operations["POST /v1/ranking"]
INVOCATION = rerank.DIALECT.operations["POST /invocations"]
VOYAGE = rerank.DIALECT.operations["POST /voyage/v1/rerank"]
TEI = tei.DIALECT.operations["POST /rerank"]
ROOT = tei.DIALECT.operations["POST /"]
SCORE = vllm.DIALECT.operations["POST /v1/score"]
DOCUMENTS = ["one", "two", "three"]
BODY: dict[str, Any] = {"model": "m", "query": "q", "documents": DOCUMENTS}


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def scored(results: list[dict[str, Any]], key: str = "relevance_score") -> list[tuple[int, float]]:
    return [(result["index"], result[key]) for result in results]


def check(operation: Operation, answer: Any) -> None:
    errors = [error.message for error in validator_for(operation.response).iter_errors(answer)]
    assert not errors


# --- results ----------------------------------------------------------------------------------------------------


def test_results_have_what_every_client_reads():
    answer = rank(RERANK, BODY, [-1.0, 2.0, 0.5])
    check(RERANK, answer)
    assert [result["index"] for result in answer["results"]] == [1, 2, 0]
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx(
        [sigmoid(2), sigmoid(0.5), sigmoid(-1)], rel=1e-15
    )
    assert all(set(result) == {"index", "relevance_score"} for result in answer["results"])
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert answer["meta"] == {"billed_units": {"search_units": 1}}
    assert (answer["id"], answer["model"], answer["object"]) == ("req_1", "minilm", "rerank")


def test_a_pair_is_asked_for_each_document():
    request = ask(RERANK, BODY, model_info=CROSS_ENCODER).request
    assert request.inputs == [Pair("q", text) for text in DOCUMENTS]
    assert request.output is Output.SCORES
    assert request.tokenizing.overflow is Overflow.TRUNCATE
    assert request.tokenizing.num_queries == 0


def test_scores_are_always_written_as_floats():
    """OpenSearch casts them to a Double."""
    asked = ask(RERANK, {**BODY, "raw_scores": True}, model_info=CROSS_ENCODER)
    body = body_of(asked.render(of_logits([1.0, -2.0, 1000.0])))
    assert b'"relevance_score":1000.0}' in body
    assert b'"relevance_score":1.0}' in body
    assert b'"relevance_score":-2.0}' in body
    saturated = body_of(ask(RERANK, BODY, model_info=CROSS_ENCODER).render(of_logits([900.0, 0.0, -900.0])))
    assert b'"relevance_score":1.0}' in saturated
    assert b'"relevance_score":0.0}' in saturated


def test_equal_documents_keep_their_order_and_close_ones_theirs():
    near = float(np.nextafter(np.float32(9), np.float32(10)))
    answer = rank(RERANK, {**BODY, "documents": ["x"] * 4}, [9.0, near, 9.0, near])
    assert [result["index"] for result in answer["results"]] == [1, 3, 0, 2]
    assert len({result["relevance_score"] for result in answer["results"]}) == 2


@pytest.mark.parametrize("field", ["top_n", "top_k"])
@pytest.mark.parametrize(("num", "expected"), [(None, 3), (0, 3), (1, 1), (2, 2), (3, 3), (100, 3)])
def test_the_number_of_results(field, num, expected):
    answer = rank(RERANK, {**BODY, field: num}, [3.0, 2.0, 1.0])
    assert len(answer.get("results") or answer["data"]) == expected


def test_documents_are_repeated_only_if_asked_for():
    flags: tuple[Any, ...] = (True, "true", "True")
    for flag in flags:
        answer = rank(RERANK, {**BODY, "return_documents": flag}, [0.0, 1.0, 2.0])
        check(RERANK, answer)
        assert [result["document"] for result in answer["results"]] == [
            {"text": "three"}, {"text": "two"}, {"text": "one"},
        ]  # fmt: skip
    flags = (False, None, "false")
    for flag in flags:
        answer = rank(RERANK, {**BODY, "return_documents": flag}, [0.0, 1.0, 2.0])
        assert not any("document" in result for result in answer["results"])


def test_large_documents_are_repeated_in_a_thread():
    large = {**BODY, "documents": ["x" * 200_000] * 3}
    assert not ask(RERANK, large, model_info=CROSS_ENCODER).is_large
    assert ask(RERANK, {**large, "return_documents": True}, model_info=CROSS_ENCODER).is_large


@pytest.mark.parametrize("fields", [{"top_k": None, "truncation": True}, {"top_k": 2}, {"truncation": False}])
def test_voyage_s_clients_get_data(fields):
    answer = rank(RERANK, {**BODY, **fields, "return_documents": True}, [0.0, 1.0, 2.0])
    check(RERANK, answer)
    assert answer["object"] == "list"
    assert "results" not in answer
    assert answer["data"][0] == {"index": 2, "relevance_score": pytest.approx(sigmoid(2)), "document": "three"}
    assert answer["usage"]["total_tokens"] == 7


def test_below_voyage_there_is_always_data():
    assert len(rank(VOYAGE, BODY, [0.0, 1.0, 2.0])["data"]) == 3
    assert "results" in rank(RERANK, {**BODY, "top_n": 2, "truncation": True}, [0.0, 1.0, 2.0])


def test_weaviate_gets_scores_in_the_order_of_its_documents():
    answer = rank(RERANK, {"query": "q", "documents": DOCUMENTS, "property": ""}, [0.0, 2.0, 1.0])
    check(RERANK, answer)
    assert answer["query"] == "q"
    assert [item["document"] for item in answer["scores"]] == DOCUMENTS
    assert [item["score"] for item in answer["scores"]] == pytest.approx([0.5, sigmoid(2), sigmoid(1)])


@pytest.mark.parametrize("fields", [{"raw_scores": True}, {"use_activation": False}, {"raw_scores": "true"}])
def test_scores_can_be_the_model_s_own(fields):
    assert scored(rank(RERANK, {**BODY, **fields}, [0.25, -8.5, 3.0])["results"]) == [(2, 3.0), (0, 0.25), (1, -8.5)]


def test_two_labels_rank_by_the_second():
    answer = rank(RERANK, BODY, [[0.0, 0.0], [1.0, 3.0], [2.0, 1.0]], TWO_LABELS)
    assert scored(answer["results"]) == [
        (1, pytest.approx(sigmoid(2))), (0, 0.5), (2, pytest.approx(sigmoid(-1))),
    ]  # fmt: skip


def test_units_are_cohere_s():
    many = replace(CROSS_ENCODER, max_inputs=1000)
    answer = rank(RERANK, {**BODY, "documents": ["x"] * 101}, [0.0] * 101, many)
    assert answer["meta"]["billed_units"]["search_units"] == 2


def test_documents_that_were_cut_are_counted_in_a_header():
    asked = ask(RERANK, BODY, model_info=CROSS_ENCODER)
    assert asked.render(of_logits([1.0, 2.0, 3.0], num_truncated=2)).headers["x-vecd-truncated"] == "2"


# --- what documents may be --------------------------------------------------------------------------------------


def documents_of(**body: Any) -> list[str]:
    inputs: Any = ask(RERANK, {"query": "q", **body}, model_info=CROSS_ENCODER).request.inputs
    return [pair.document for pair in inputs]


def test_documents_are_texts_or_objects():
    assert documents_of(documents="alone") == ["alone"]
    assert documents_of(documents=["a", {"text": "b"}, {"text": "c", "id": 3}]) == ["a", "b", "c"]
    fields = [{"title": "t", "body": "b"}, {"body": "only"}, "plain"]
    assert documents_of(documents=fields, rank_fields=["title", "body"]) == ["t\nb", "only", "plain"]
    assert documents_of(texts=["a"]) == ["a"]
    assert documents_of(texts=["a", "b"], documents=["a", "b"]) == ["a", "b"]


def test_rank_fields_are_read_once_and_at_most_32():
    fields = [{"title": "t", "body": "b"}]
    assert documents_of(documents=fields, rank_fields=["title", "body", *["title"] * 60_000]) == ["t\nb"]
    names = [f"field {index}" for index in range(32)]
    assert documents_of(documents=[dict.fromkeys(names, "x")], rank_fields=names) == ["\n".join("x" * 32)]
    with pytest.raises(BadRequest, match="'rank_fields' has 33 names, at most 32 are allowed") as caught:
        documents_of(documents=fields, rank_fields=[*names, "title"])
    assert caught.value.param == "rank_fields"


def test_a_query_is_a_text_or_an_object():
    body = {**BODY, "query": {"text": "as object"}}
    inputs: Any = ask(RERANK, body, model_info=CROSS_ENCODER).request.inputs
    assert inputs[0].query == "as object"


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"query": "q"}, "'documents' is required", "documents"),
        ({"documents": ["d"]}, "'query' is required", "query"),
        ({"query": "q", "documents": []}, "'$.documents' is invalid: the list is empty", "documents"),
        ({"query": "q", "documents": ["d", 3]}, "'documents[1]' must be a string, or an object", "documents"),
        ({"query": "q", "documents": ["d", None]}, "is null", "documents"),
        ({"query": "q", "documents": [["d"]]}, "'documents[0]' must be a string", "documents"),
        ({"query": "q", "documents": ["d", {"image": "x"}]}, "'documents[1]' must be", "documents"),
        ({"query": "q", "documents": ["d", {"text": 1}]}, "is another object", "documents"),
        ({"query": "q", "documents": {"text": "d"}}, "'documents' must be a string or a list", "documents"),
        ({"query": "q", "documents": [{"a": "x"}], "rank_fields": ["b"]}, "in its 'rank_fields'", "documents"),
        ({"query": "q", "documents": ["d"], "rank_fields": "b"}, "'rank_fields' must be a list", "rank_fields"),
        ({"query": "q", "documents": ["d"], "rank_fields": [1]}, "'rank_fields[0]' must be", "rank_fields"),
        ({"query": ["q"], "documents": ["d"]}, "'query' must be a string", "query"),
        ({"query": {"image": "q"}, "documents": ["d"]}, "'query.text' must be a string, is missing", "query.text"),
        ({"query": 1, "documents": ["d"]}, "'query' must be a string", "query"),
        ({"query": "q", "documents": ["d"], "texts": ["e"]}, "contradict each other", "texts"),
        ({"query": "q", "documents": ["d"], "top_n": -1}, "'top_n' must be at least 0, is -1", "top_n"),
        ({"query": "q", "documents": ["d"], "top_n": 1.5}, "'top_n' must be a whole number", "top_n"),
        ({"query": "q", "documents": ["d"], "top_k": True}, "'top_k' must be a whole number", "top_k"),
        ({"query": "q", "documents": ["d"], "top_n": 1, "top_k": 2}, "'top_n' and 'top_k' contradict", "top_k"),
        ({"query": "q", "documents": ["d"], "return_documents": "yes"}, "is 'yes'", "return_documents"),
        ({"query": "q", "documents": ["d"], "max_tokens_per_doc": -1}, "at least 0", "max_tokens_per_doc"),
        ({"query": "q", "documents": ["d"], "overflow": "chunk"}, "'overflow' must be one of", "overflow"),
        ({"query": "q", "documents": ["d"], "instruction": "x"}, "this model has no place for one", "instruction"),
        (
            {"query": "q", "documents": ["d"], "raw_scores": True, "use_activation": True},
            "'raw_scores' and 'use_activation' contradict", "use_activation",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(body, message, param, in_pieces):
    with pytest.raises(BadRequest) as raised:
        ask(RERANK, body, model_info=CROSS_ENCODER, in_pieces=in_pieces)
    assert message in raised.value.message
    assert raised.value.param == param


def test_too_many_documents_are_refused_with_the_limit():
    with pytest.raises(TooManyInputs, match=r"'\$.documents' is invalid: 10000 inputs, at most 6 .*--max-inputs"):
        ask(RERANK, {"query": "q", "documents": ["d"] * 10_000}, model_info=CROSS_ENCODER)
    with pytest.raises(TooManyInputs, match="documents"):
        read_in_pieces(RERANK, {"query": "q", "documents": ["d"] * 10_000}, max_items=6)


def test_a_large_body_is_read_in_pieces():
    body = {"query": {"text": "q" * 400}, "documents": ["d" * 900, {"text": "e" * 900, "id": 7}], "top_n": 1}
    inputs: Any = ask(RERANK, body, model_info=CROSS_ENCODER, in_pieces=True).request.inputs
    assert inputs == [Pair("q" * 400, "d" * 900), Pair("q" * 400, "e" * 900)]


# --- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "server", "expected"),
    [
        ({}, Overflow.TRUNCATE, Overflow.TRUNCATE),
        ({}, Overflow.ERROR, Overflow.ERROR),
        ({}, Overflow.CHUNK, Overflow.TRUNCATE),
        ({}, Overflow.TRUNCATE_LEFT, Overflow.TRUNCATE_LEFT),
        ({"truncation": True}, Overflow.ERROR, Overflow.TRUNCATE),
        ({"truncation": False}, Overflow.TRUNCATE, Overflow.ERROR),
        ({"truncate": "NONE"}, Overflow.TRUNCATE, Overflow.ERROR),
        ({"truncate": "START"}, Overflow.TRUNCATE, Overflow.TRUNCATE_LEFT),
        ({"truncation_side": "left"}, Overflow.TRUNCATE, Overflow.TRUNCATE_LEFT),
        ({"truncation_side": "left"}, Overflow.ERROR, Overflow.ERROR),
        ({"truncate": True, "truncation_side": "left"}, Overflow.ERROR, Overflow.TRUNCATE_LEFT),
        ({"max_tokens_per_doc": 8}, Overflow.ERROR, Overflow.ERROR),
        ({"truncation_side": "right"}, Overflow.CHUNK, Overflow.TRUNCATE),
        ({"truncate_prompt_tokens": 64}, Overflow.ERROR, Overflow.TRUNCATE),
        ({"overflow": "error"}, Overflow.TRUNCATE, Overflow.ERROR),
    ],
)
def test_a_long_document_is_cut_unless_the_server_or_the_request_says_otherwise(fields, server, expected):
    model_info = replace(CROSS_ENCODER, overflow=server)
    assert ask(RERANK, {**BODY, **fields}, model_info=model_info).request.tokenizing.overflow is expected


def test_limits_and_instruction_are_passed_on():
    body = {**BODY, "max_tokens_per_doc": 100, "max_tokens_per_query": 20, "instruction": "by date"}
    tokenizing = ask(RERANK, body, model_info=WITH_INSTRUCTION).request.tokenizing
    assert (tokenizing.max_document_tokens, tokenizing.max_query_tokens) == (100, 20)
    assert tokenizing.instruction == "by date"
    zero = ask(RERANK, {**BODY, "max_tokens_per_doc": 0}, model_info=CROSS_ENCODER).request.tokenizing
    assert zero.max_document_tokens is None
    assert ask(RERANK, {**BODY, "priority": 5}, model_info=CROSS_ENCODER).request.priority is Priority.BULK


def test_names_of_other_models_are_refused_if_names_are_strict():
    with pytest.raises(ModelNotFound):
        ask(RERANK, BODY, model_info=replace(CROSS_ENCODER, is_strict=True))


# --- models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model_info", "kind"), [(PLAIN, "makes embeddings"), (CLASSIFIER, "classifies texts")])
def test_a_model_that_cannot_rank_refuses(model_info, kind):
    for operation, body in (
        (RERANK, BODY),
        (TEI, {"query": "q", "texts": ["a"]}),
        (SCORE, {"text_1": "a", "text_2": "b"}),
    ):
        with pytest.raises(WrongModel, match=f"{kind}: it cannot rank texts"):
            ask(operation, body, model_info=model_info)
        assert operation.needs == ("rerank", "multi-vector")


def matrix(*rows: tuple[float, float]) -> Any:
    return np.array(rows, dtype=np.float32)


def test_a_multi_vector_model_ranks_by_max_sim():
    asked = ask(RERANK, BODY, model_info=MULTI_VECTOR)
    assert asked.request.inputs == ["q", *DOCUMENTS]
    assert asked.request.output is Output.TOKEN_VECTORS
    assert (asked.request.tokenizing.num_queries, asked.request.tokenizing.role) == (1, Role.DOCUMENT)
    assert asked.request.is_max_sim
    assert asked.is_large, "it is computed in a thread"
    matrices = matrix((1, 0), (0, 1)), matrix((0.5, 0)), matrix((1, 0), (0, 1)), matrix((0, 0.75))
    answer = orjson.loads(body_of(asked.render(of_matrices(*matrices))))
    assert scored(answer["results"]) == [(1, 2.0), (2, 0.75), (0, 0.5)]
    answer = orjson.loads(body_of(asked.render(of_matrices(*matrices, is_mean=True))))
    assert scored(answer["results"]) == [(1, 1.0), (2, 0.375), (0, 0.25)]


def test_max_sim_of_pairs():
    asked = ask(SCORE, {"text_1": ["a", "b"], "text_2": ["c", "d"]}, model_info=MULTI_VECTOR)
    assert asked.request.inputs == ["a", "b", "c", "d"]
    assert asked.request.tokenizing.num_queries == 2
    one, other = matrix((1, 0)), matrix((0, 1))
    answer = orjson.loads(body_of(asked.render(of_matrices(one, other, one, one, num_queries=2))))
    assert [item["score"] for item in answer["data"]] == [1.0, 0.0]


# --- text-embeddings-inference ----------------------------------------------------------------------------------


def test_tei_gets_a_bare_list():
    answer = rank(TEI, {"query": "q", "texts": ["a", "b"]}, [-1.0, 1.0])
    check(TEI, answer)
    assert answer == [
        {"index": 1, "score": pytest.approx(sigmoid(1), rel=1e-15)},
        {"index": 0, "score": pytest.approx(sigmoid(-1), rel=1e-15)},
    ]
    answer = rank(TEI, {"query": "q", "texts": ["a", "b"], "raw_scores": True, "return_text": True}, [-1.0, 1.0])
    assert answer == [{"index": 1, "score": 1.0, "text": "b"}, {"index": 0, "score": -1.0, "text": "a"}]
    assert len(rank(TEI, {"query": "q", "texts": ["a", "b"], "top_n": 1}, [-1.0, 1.0])) == 1


@pytest.mark.parametrize(
    ("fields", "server", "expected"),
    [
        ({}, Overflow.TRUNCATE, Overflow.TRUNCATE),
        ({}, Overflow.TRUNCATE_LEFT, Overflow.TRUNCATE_LEFT),
        ({}, Overflow.CHUNK, Overflow.TRUNCATE),
        ({}, Overflow.ERROR, Overflow.ERROR),
        ({"truncate": True}, Overflow.ERROR, Overflow.TRUNCATE),
        ({"truncation_direction": "Left"}, Overflow.TRUNCATE, Overflow.TRUNCATE_LEFT),
        ({"truncation_direction": "Left"}, Overflow.ERROR, Overflow.ERROR),
        ({"truncate": True, "truncation_direction": "Left"}, Overflow.ERROR, Overflow.TRUNCATE_LEFT),
        ({"truncate": False, "truncation_direction": "Left"}, Overflow.TRUNCATE, Overflow.ERROR),
    ],
)
def test_tei_s_texts_are_cut_unless_the_server_or_the_request_says_otherwise(fields, server, expected):
    body = {"query": "q", "texts": ["a"], **fields}
    model_info = replace(CROSS_ENCODER, overflow=server)
    assert ask(TEI, body, model_info=model_info).request.tokenizing.overflow is expected


def test_tei_s_errors():
    with pytest.raises(EmptyInput, match="'texts' cannot be empty"):
        ask(TEI, {"query": "q", "texts": []}, model_info=CROSS_ENCODER)
    with pytest.raises(BadRequest, match="'texts' is required"):
        ask(TEI, {"query": "q"}, model_info=CROSS_ENCODER)
    with pytest.raises(BadRequest, match="'query' is required"):
        ask(TEI, {"texts": ["a"]}, model_info=CROSS_ENCODER)
    with pytest.raises(TooManyInputs):
        ask(TEI, {"query": "q", "texts": ["a"] * 7}, model_info=CROSS_ENCODER)


def test_elasticsearch_gets_a_bare_list_for_documents():
    body = {"query": "q", "documents": ["a", "b"], "return_documents": True}
    answer = rank(ROOT, body, [0.0, 1.0])
    check(ROOT, answer)
    assert answer == [
        {"index": 1, "score": pytest.approx(sigmoid(1)), "text": "b"}, {"index": 0, "score": 0.5, "text": "a"},
    ]  # fmt: skip
    for operation in (ROOT, tei.DIALECT.operations["POST /invocations"]):
        assert rank(operation, {"query": "q", "texts": ["a"]}, [0.0]) == [{"index": 0, "score": 0.5}]


@pytest.mark.parametrize(("path", "body"), [("/", {"inputs": "a"}), ("/invocations", {"text_inputs": ["a"]})])
def test_a_model_that_ranks_embeds_nothing(path, body):
    operation = tei.DIALECT.operations[f"POST {path}"]
    assert {"dense", "rerank", "multi-vector"} <= set(operation.needs)
    with pytest.raises(WrongModel, match="ranks texts: send a 'query'"):
        ask(operation, body, model_info=CROSS_ENCODER)


# --- who takes a body -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "dialect"),
    [
        ("/rerank", {"query": "q", "texts": ["a"]}, "tei"),
        ("/rerank", {"query": "q", "documents": ["a"]}, "rerank"),
        ("/rerank", {"query": "q", "texts": ["a"], "documents": ["a"]}, "rerank"),
        ("/rerank", {"query": "q"}, "tei"),
        ("/v1/rerank", {"query": "q", "texts": ["a"]}, "rerank"),
        ("/v2/rerank", {}, "rerank"),
        ("/", {"query": "q", "documents": ["a"]}, "tei"),
        ("/invocations", {"query": "q", "documents": ["a"]}, "rerank"),
        ("/invocations", {"query": "q", "texts": ["a"]}, "tei"),
        ("/invocations", {"query": "q"}, "rerank"),
        ("/invocations", {"queries": "q", "items": ["a"]}, "rerank"),
        ("/invocations", {"text_1": "q", "text_2": ["a"]}, "rerank"),
        ("/invocations", {"text_pairs": [["a", "b"]]}, "rerank"),
        ("/invocations", {"inputs": "a"}, "tei"),
        ("/invocations", {"input": "a"}, "vllm"),
        ("/score", {}, "vllm"),
    ],
)
def test_a_body_belongs_to_a_dialect(path, body, dialect):
    handler = ROUTES[path]["POST"].handler
    assert isinstance(handler, OperationsHandler)
    assert handler.claim_of(body, CAPABILITIES).dialect.name == dialect


@pytest.mark.parametrize(
    ("path", "capability", "dialect"),
    [
        ("/classify", "classify", "vllm"),
        ("/classify", "dense", "openai"),
        ("/classify", "sparse", "openai"),
        ("/invocations", "rerank", "tei"),
        ("/invocations", "dense", "vllm"),
        ("/invocations", "classify", "vllm"),
    ],
)
def test_a_body_without_inputs_belongs_to_what_the_model_can_do(path, capability, dialect):
    """Its error is then about the body, not about the model."""
    handler = ROUTES[path]["POST"].handler
    assert isinstance(handler, OperationsHandler)
    assert handler.claim_of({"text": "a"}, (capability,)).dialect.name == dialect


def test_errors_have_what_every_client_reads():
    error = orjson.loads(body_of(rerank.DIALECT.render_error(BadRequest("no"))))
    assert error == {"message": "no", "detail": "no", "error": "no"}


# --- NVIDIA and SageMaker ---------------------------------------------------------------------------------------


def test_nvidia_gets_logits():
    body = {"model": "m", "query": {"text": "q"}, "passages": [{"text": "a"}, {"text": "b"}], "truncate": "END"}
    answer = rank(RANKING, body, [-3.5, 2.25])
    check(RANKING, answer)
    assert scored(answer["rankings"], "logit") == [(1, 2.25), (0, -3.5)]
    with pytest.raises(BadRequest, match=r"'passages\[0\]' must be a string, or an object"):
        ask(RANKING, {**body, "passages": [{}]}, model_info=CROSS_ENCODER)


def test_sagemaker_gets_scores_in_the_order_of_its_pairs():
    asked = ask(INVOCATION, {"text_pairs": [["q", "a"], ["r", "b"]]}, model_info=CROSS_ENCODER)
    assert asked.request.inputs == [Pair("q", "a"), Pair("r", "b")]
    assert orjson.loads(body_of(asked.render(of_logits([0.0, 1.0])))) == {"scores": [0.5, pytest.approx(sigmoid(1))]}


def test_sagemaker_gets_what_vllm_has_for_documents_and_for_two_lists():
    ranked: dict[str, Any] = {"model": "m", "query": "q", "documents": ["a", "b"]}
    answer = rank(INVOCATION, ranked, [0.0, 1.0])
    check(INVOCATION, answer)
    assert answer == rank(RERANK, ranked, [0.0, 1.0])
    assert scored(answer["results"]) == [(1, pytest.approx(sigmoid(1))), (0, 0.5)]
    one: dict[str, Any] = {"queries": "q", "documents": ["a", "b"]}
    for body in (one, {"data_1": ["q", "q"], "data_2": ["a", "b"]}):
        answer = rank(INVOCATION, body, [3.0, 1.0])
        check(INVOCATION, answer)
        assert [item["score"] for item in answer["data"]] == [
            item["score"] for item in rank(SCORE, body, [3.0, 1.0])["data"]
        ]
    for missing in ("query", "documents"):
        with pytest.raises(BadRequest, match=f"'{missing}' is required"):
            ask(INVOCATION, {**ranked, missing: None}, model_info=CROSS_ENCODER)


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("operation", [ROOT, tei.DIALECT.operations["POST /invocations"]])
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


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ("a", WrongModel),
        (["a", "b"], WrongModel),
        ([["a"]], WrongModel),
        ([1, 2], WrongModel),
        ([], WrongModel),
        ([{"text": "q"}], WrongModel),
        ([{"text": "q", "text_pair": 5}], BadRequest),
        ([["q", "a"]] * 7, TooManyInputs),
    ],
)
def test_other_inputs_of_a_model_that_ranks_are_refused(inputs, error):
    with pytest.raises(error):
        ask(ROOT, {"inputs": inputs}, model_info=CROSS_ENCODER)


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize(
    "pairs", ["a", [], ["a"], [["a"]], [["a", "b", "c"]], [["a", 1]], [["a", "b"], None], [[1, 2]]]
)
def test_wrong_pairs_are_refused(pairs, in_pieces):
    with pytest.raises(BadRequest, match="text_pairs"):
        ask(INVOCATION, {"text_pairs": pairs}, model_info=CROSS_ENCODER, in_pieces=in_pieces)


# --- vLLM's scores ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")],
)
@pytest.mark.parametrize(
    ("queries", "documents", "expected"),
    [
        ("q", "d", [Pair("q", "d")]),
        ("q", ["d", {"text": "e"}], [Pair("q", "d"), Pair("q", "e")]),
        (["q"], ["d", "e"], [Pair("q", "d"), Pair("q", "e")]),
        (["q", "r"], ["d", "e"], [Pair("q", "d"), Pair("r", "e")]),
    ],
)
def test_the_spellings_of_pairs(first, second, queries, documents, expected):
    asked = ask(SCORE, {first: queries, second: documents}, model_info=CROSS_ENCODER)
    assert asked.request.inputs == expected


def test_scores_have_the_model_s_activation_and_the_order_of_the_inputs():
    body = {"text_1": "q", "text_2": ["a", "b"]}
    answer = rank(SCORE, body, [0.5, 3.0])
    check(SCORE, answer)
    assert answer["id"] == "score-req_1"
    assert answer["data"] == [
        {"index": 0, "object": "score", "score": 0.5}, {"index": 1, "object": "score", "score": 3.0},
    ]  # fmt: skip
    score = CROSS_ENCODER.score
    assert score is not None
    of_sigmoid = replace(CROSS_ENCODER, score=replace(score, activation="sigmoid"))
    assert [item["score"] for item in rank(SCORE, body, [0.0, 1.0], of_sigmoid)["data"]] == [0.5, sigmoid(1)]
    raw = rank(SCORE, {**body, "use_activation": False}, [0.0, 1.0], of_sigmoid)
    assert [item["score"] for item in raw["data"]] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "must have 'queries' and 'documents' or .* has none of them"),
        ({"text_1": "a"}, "has 'text_1'"),
        ({"text_1": "a", "data_2": "b"}, "has 'data_2', 'text_1'"),
        ({"text_1": "a", "text_2": "b", "queries": "c"}, "has 'queries', 'text_1', 'text_2'"),
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "must be 1:1, 1:N or N:N texts, are 2:1"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "are 2:3"),
        ({"text_1": "a", "text_2": []}, "the list is empty"),
        ({"text_1": "a", "text_2": [1]}, r"'text_2\[0\]' must be a string"),
        ({"text_1": "a", "text_2": ["b"] * 7}, "at most 6"),
    ],
)
def test_wrong_pairs_for_scores_are_refused(body, message):
    with pytest.raises(BadRequest, match=message):
        ask(SCORE, body, model_info=CROSS_ENCODER)
