"""Routes that classify texts, pairs and tokens, in the shapes of text-embeddings-inference, Hugging Face, vLLM,
infinity and Jina."""

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from jsonschema_rs import validator_for

from tests.support.arrays import COLBERT, MOODS, NER, RERANKER, SPLADE, TOXIC, render, rendered, rows
from tests.support.asking import PLAIN, answer, ask, body_of, embedded_of, pieces_of
from vecd.gateway.api.dialects import openai, tei, vllm
from vecd.gateway.encoding.scores import ScoreRows
from vecd.gateway.encoding.token_rows import TokenRows
from vecd.gateway.types.errors import BadRequest, EmptyInput, TooManyInputs, WrongModel
from vecd.gateway.types.request import Overflow, Pair, Tokenizing
from vecd.shm.output import Output

PREDICT = tei.DIALECT.operations["POST /predict"]
DEFAULT = tei.DIALECT.operations["POST /"]
HUB = tei.DIALECT.operations["POST /models/*/pipeline/text-classification"]
CLASSIFY = vllm.DIALECT.operations["POST /classify"]
INVOCATION = vllm.DIALECT.operations["POST /invocations"]
POOLING = vllm.DIALECT.operations["POST /pooling"]
ZERO_SHOT = openai.DIALECT.operations["POST /v1/classify"]

LOGITS = rows([0.0, 2.0, 1.0], [5.0, -40.0, 5.0])
SOFTMAX = [[0.09003057317038046, 0.6652409557748218, 0.24472847105479764], [0.5, 1.4312625e-20, 0.5]]
"""Computed with math.exp."""


def scores(logits: np.ndarray) -> ScoreRows:
    collected = ScoreRows(*logits.shape)
    collected.put(0, logits)
    return collected


# --- /predict ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "expected", "is_single"),
    [
        ("a", ["a"], True),
        (["a"], ["a"], True),
        (["a", "b"], [Pair("a", "b")], True),
        ([["a"], ["b"], ["c"]], ["a", "b", "c"], False),
        ([["a", "b"], ["c", "d"]], [Pair("a", "b"), Pair("c", "d")], False),
        ([["a"]], ["a"], False),
        ({"text": "a"}, ["a"], True),
        ({"text": "a", "text_pair": "b"}, [Pair("a", "b")], True),
        ([{"text": "a", "text_pair": "b"}, ["c", "d"]], [Pair("a", "b"), Pair("c", "d")], False),
        ("", [""], True),
    ],
)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_texts_and_pairs_are_recognized_as_by_tei(inputs, expected, is_single, in_pieces):
    asked = ask(PREDICT, {"inputs": inputs}, model_info=MOODS, in_pieces=in_pieces)
    assert (asked.request.inputs, asked.request.output) == (expected, Output.SCORES)
    num = len(expected)
    response = rendered(asked, scores(np.repeat(LOGITS[:1], num, axis=0)))
    assert isinstance(response[0], dict if is_single else list)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (["a", "b", "c"], "'inputs' has 3 texts: a flat list is one text, or a pair of two"),
        ([["a"], ["a", "b"]], "'inputs[1]' has 2 texts and 'inputs[0]' 1"),
        ([["a", "b", "c"]], "'inputs[0]' must have one text, or a pair of two, has 3"),
        ([[]], "'inputs[0]' must have one text, or a pair of two, has 0"),
        ([["a"], 5], "'inputs[1]' must be a list of one text or two, is a whole number"),
        ([["a", 5]], "'inputs[0][1]' must be a string, is a whole number"),
        ([["a", None]], "'inputs[0][1]' must be a string, is null"),
        (["a", 5], "'inputs[1]' must be a string, is a whole number"),
        ([1, 2], "'inputs[0]' must be a list of one text or two"),
        ([[1, 2]], "'inputs[0][0]' must be a string, is a whole number"),
        (5, "'inputs' must be a text, a list of two texts, or a list of lists, is a whole number"),
        (None, "is missing"),
        ({"text": None, "text_pair": "secret"}, "'inputs.text' must be a string, is missing"),
        ({"text": "a", "text_pair": ["secret"]}, "'inputs.text_pair' must be a string, is a list"),
        ([{"text_pair": "secret"}], "'inputs[0].text' must be a string, is missing"),
        ([[["secret"]]], "'inputs[0][0]' must be a string, is a list"),
    ],
)
def test_other_inputs_are_refused(inputs, says):
    with pytest.raises(BadRequest) as caught:
        ask(PREDICT, {"inputs": inputs}, model_info=MOODS)
    assert says in caught.value.message
    assert caught.value.param == "inputs"
    assert "secret" not in caught.value.message


def test_no_inputs_and_too_many_are_errors_of_their_own():
    with pytest.raises(EmptyInput):
        ask(PREDICT, {"inputs": []}, model_info=MOODS)
    with pytest.raises(TooManyInputs, match=r"at most 4 in one request \(--max-inputs\)"):
        ask(PREDICT, {"inputs": [["a"]] * 5}, model_info=MOODS)


def test_labels_are_the_best_first_and_equal_ones_in_their_order():
    asked = ask(PREDICT, {"inputs": [["a"], ["b"]]}, model_info=MOODS)
    first, second = rendered(asked, scores(LOGITS))
    assert [item["label"] for item in first] == ["glad", "mad", "sad"]
    assert [item["score"] for item in first] == pytest.approx(sorted(SOFTMAX[0], reverse=True), rel=1e-12)
    assert [item["label"] for item in second] == ["sad", "mad", "glad"]
    assert [list(item) for item in first] == [["score", "label"]] * 3


def test_results_are_written_text_by_text():
    """Other threads wait while JSON is written, and a text may have an entity for each of its tokens."""
    asked = ask(PREDICT, {"inputs": [["a"], ["b"]], "top_k": 1, "raw_scores": True}, model_info=MOODS)
    response = asked.render(embedded_of(scores(LOGITS)))
    first, second = b'[{"score":2.0,"label":"glad"}]', b'[{"score":5.0,"label":"sad"}]'
    assert pieces_of(response) == [b"[", first, b",", second, b"]"]


def test_the_response_to_one_text_to_the_byte():
    asked = ask(PREDICT, {"inputs": "a", "raw_scores": True}, model_info=MOODS)
    assert render(asked, scores(LOGITS[:1])) == (
        b'[{"score":2.0,"label":"glad"},{"score":1.0,"label":"mad"},{"score":0.0,"label":"sad"}]'
    )


@pytest.mark.parametrize(
    ("fields", "model_info", "expected"),
    [
        ({}, TOXIC, [0.5, 1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(-1.0))]),
        ({}, MOODS, SOFTMAX[0]),
        ({"raw_scores": True}, TOXIC, [0.0, 2.0, 1.0]),
        ({"function_to_apply": "none"}, TOXIC, [0.0, 2.0, 1.0]),
        ({"function_to_apply": "softmax"}, TOXIC, SOFTMAX[0]),
        ({"function_to_apply": "default"}, MOODS, SOFTMAX[0]),
        ({"raw_scores": True, "parameters": {"function_to_apply": "none"}}, MOODS, [0.0, 2.0, 1.0]),
        ({"parameters": {"raw_scores": True}}, MOODS, [0.0, 2.0, 1.0]),
    ],
)
def test_the_activation_is_the_model_s_unless_the_request_says_otherwise(fields, model_info, expected):
    asked = ask(PREDICT, {"inputs": "a", **fields}, model_info=model_info)
    found = {item["label"]: item["score"] for item in rendered(asked, scores(LOGITS[:1]))}
    assert [found[label] for label in model_info.score.labels] == pytest.approx(expected, rel=1e-12)


def test_scores_that_float32_cannot_tell_apart_differ():
    """And are in the order of their logits."""
    asked = ask(PREDICT, {"inputs": [["a"], ["b"]]}, model_info=replace(RERANKER, score=TOXIC.score))
    [one], [other] = (row[:1] for row in rendered(asked, scores(rows([17.5, 0, 0], [18.5, 0, 0]))))
    assert one["score"] < other["score"] < 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"raw_scores": "yes"}, "raw_scores"),
        ({"function_to_apply": "relu"}, "function_to_apply"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"raw_scores": True, "function_to_apply": "sigmoid"}, "function_to_apply"),
        ({"raw_scores": True, "parameters": {"raw_scores": False}}, "parameters.raw_scores"),
        ({"parameters": {"top_k": -1}}, "parameters.top_k"),
        ({"parameters": [1]}, "parameters"),
        ({"truncate": 1}, "truncate"),
        ({"aggregation_strategy": "most"}, "aggregation_strategy"),
    ],
)
def test_wrong_options_are_named(fields, param):
    with pytest.raises(BadRequest) as caught:
        ask(PREDICT, {"inputs": "a", **fields}, model_info=MOODS)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message


@pytest.mark.parametrize("model_info", [MOODS, PLAIN])
@pytest.mark.parametrize("operation", [PREDICT, HUB, DEFAULT])
def test_labels_of_a_request_are_refused_where_clients_of_hugging_face_post_them(operation, model_info):
    fields = {"candidate_labels": ["a", "b"], "multi_label": False}
    with pytest.raises(BadRequest, match="POST /v1/classify with 'labels'"):
        ask(operation, {"inputs": "a", "parameters": fields}, model_info=model_info)


def test_long_texts_are_cut_or_refused_but_never_split():
    assert ask(PREDICT, {"inputs": "a", "truncate": False}, model_info=MOODS).request.tokenizing == Tokenizing(
        overflow=Overflow.ERROR, are_ids_of_model=True
    )
    asked = ask(PREDICT, {"inputs": "a"}, model_info=replace(MOODS, overflow=Overflow.CHUNK))
    assert asked.request.tokenizing.overflow is Overflow.ERROR


@pytest.mark.parametrize("operation", [PREDICT, CLASSIFY])
@pytest.mark.parametrize("model_info", [PLAIN, SPLADE])
def test_a_model_that_classifies_nothing_says_what_it_is_for(operation, model_info):
    with pytest.raises(WrongModel, match=f"This server's model is for: {model_info.capabilities[0]}"):
        ask(operation, {"inputs": "a", "input": "a"}, model_info=model_info)


def test_the_default_path_does_what_the_model_is_for():
    assert ask(DEFAULT, {"inputs": ["a", "b"]}, model_info=MOODS).request.inputs == [Pair("a", "b")]
    assert ask(DEFAULT, {"inputs": ["a", "b"]}, model_info=SPLADE).request.output is Output.SPARSE
    assert ask(DEFAULT, {"inputs": ["a", "b"]}).request.output is Output.VECTORS
    with pytest.raises(WrongModel, match="send a 'query' and 'texts'"):
        ask(DEFAULT, {"inputs": ["a", "b"]}, model_info=COLBERT)
    with pytest.raises(WrongModel, match="POST /v1/embeddings with 'output' 'multi-vector'"):
        ask(HUB, {"inputs": ["a", "b"]}, model_info=COLBERT)


# --- Hugging Face's paths ---------------------------------------------------------------------------------------


def test_hugging_face_s_clients_get_a_list_of_lists_even_for_one_text():
    body = {"inputs": "a", "parameters": {"top_k": 2, "function_to_apply": "sigmoid"}}
    [labels] = rendered(ask(HUB, body, model_info=MOODS), scores(LOGITS[:1]))
    assert [item["label"] for item in labels] == ["glad", "mad"]
    assert labels[0]["score"] == pytest.approx(1 / (1 + np.exp(-2.0)))


def test_a_flat_list_is_one_of_texts_there():
    asked = ask(HUB, {"inputs": ["a", "b"]}, model_info=MOODS)
    assert asked.request.inputs == ["a", "b"]
    assert len(rendered(asked, scores(LOGITS))) == 2


def test_other_models_embed_there():
    assert ask(HUB, {"inputs": ["a", "b"]}).request.output is Output.VECTORS


# --- vLLM and infinity ------------------------------------------------------------------------------------------


def test_vllm_s_probabilities_are_in_the_order_of_labels():
    asked = ask(CLASSIFY, {"input": ["a", "b"], "model": "m"}, model_info=MOODS)
    response = rendered(asked, scores(LOGITS))
    assert {"id": "classify-req_1", "object": "list", "model": "minilm"}.items() <= response.items()
    assert response["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    first, second = response["data"]
    assert (first["index"], first["label"], first["num_classes"]) == (0, "glad", 3)
    assert first["probs"] == pytest.approx(SOFTMAX[0], rel=1e-12)
    assert (second["label"], second["probs"]) == ("sad", pytest.approx(SOFTMAX[1], rel=1e-6))


def test_sagemaker_gets_what_the_model_is_for():
    """As with vLLM, whose body is the same for both."""
    body = {"input": ["a", "b"], "model": "m"}
    for fields in ({}, {"use_activation": False}, {"raw_scores": True}):
        ours, theirs = (
            rendered(ask(operation, {**body, **fields}, model_info=MOODS), scores(LOGITS))
            for operation in (INVOCATION, CLASSIFY)
        )
        assert ours["data"] == theirs["data"]
        assert not [*validator_for(INVOCATION.response).iter_errors(ours)]
    assert ask(INVOCATION, body).request.output is Output.VECTORS
    assert ask(INVOCATION, {**body, "output": "sparse"}, model_info=SPLADE).request.output is Output.SPARSE
    with pytest.raises(BadRequest, match="'input' must be a string"):
        ask(INVOCATION, {"input": 5}, model_info=MOODS)


def test_vllm_s_request_without_an_activation_gets_logits():
    asked = ask(CLASSIFY, {"input": [1, 2], "use_activation": False}, model_info=MOODS)
    assert asked.request.inputs == [[1, 2]]
    assert rendered(asked, scores(LOGITS[:1]))["data"][0]["probs"] == [0.0, 2.0, 1.0]


def test_infinity_s_request_is_answered_in_its_shape():
    asked = ask(CLASSIFY, {"input": ["a"], "raw_scores": False}, model_info=MOODS)
    response = rendered(asked, scores(LOGITS[:1]))
    assert (response["object"], response["id"]) == ("classify", "infinity-req_1")
    [labels] = response["data"]
    assert [item["label"] for item in labels] == ["glad", "mad", "sad"]
    asked = ask(CLASSIFY, {"input": ["a"], "raw_scores": True}, model_info=MOODS)
    assert [item["score"] for item in rendered(asked, scores(LOGITS[:1]))["data"][0]] == [2.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": {"text": "secret"}}, "input"),
        ({"input": ["a"] * 5}, "input"),
        ({"input": [["a"]]}, "input"),
        ({"input": "a", "raw_scores": True, "use_activation": True}, "use_activation"),
        ({"input": "a", "raw_scores": 1}, "raw_scores"),
        ({"input": "a", "use_activation": "no"}, "use_activation"),
        ({"input": "a", "priority": []}, "priority"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"messages": [{"role": "user", "content": "secret"}]}, "messages"),
    ],
)
def test_what_classify_refuses(fields, param):
    with pytest.raises(BadRequest) as caught:
        ask(CLASSIFY, fields, model_info=MOODS)
    assert caught.value.param == param
    assert "secret" not in caught.value.message


def test_ids_of_classify_are_the_model_s():
    """vLLM's clients have them from the server's own /tokenize."""
    request = ask(CLASSIFY, {"input": [5, 6]}, model_info=MOODS).request
    assert (request.inputs, request.tokenizing.are_ids_of_model) == ([[5, 6]], True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, SOFTMAX[0]),
        ({"task": "classify", "use_activation": False}, [0.0, 2.0, 1.0]),
        ({"task": "classify", "encoding_format": "base64", "use_activation": False}, "AAAAAAAAAEAAAIA/"),
    ],
)
def test_pooling_gives_the_scores_of_all_labels(fields, expected):
    asked = ask(POOLING, {"input": "a", **fields}, model_info=MOODS)
    assert (asked.request.output, asked.request.normalize) == (Output.SCORES, False)
    [item] = rendered(asked, scores(LOGITS[:1]))["data"]
    assert item == {"object": "pooling", "index": 0, "data": expected if isinstance(expected, str) else item["data"]}
    if not isinstance(expected, str):
        assert item["data"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("model_info", [MOODS, NER])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"encoding_format": "npy"}, "encoding_format"),
        ({"output_dtype": "int8"}, "output_dtype"),
        ({"output_dtype": "ubinary"}, "output_dtype"),
        ({"encoding_format": "base64", "embedding_type": "binary"}, "embedding_type"),
        ({"dimensions": 2}, "dimensions"),
    ],
)
def test_scores_are_not_vectors(model_info, fields, param):
    with pytest.raises(BadRequest) as caught:
        ask(POOLING, {"input": "a", **fields}, model_info=model_info)
    assert caught.value.param == param


@pytest.mark.parametrize(("task", "model_info"), [("embed", MOODS), ("classify", PLAIN), ("token_classify", MOODS)])
def test_a_task_of_another_model_is_refused(task, model_info):
    with pytest.raises(WrongModel) as caught:
        ask(POOLING, {"input": "a", "task": task}, model_info=model_info)
    assert caught.value.param == "task"


def test_pooling_has_nothing_for_a_sparse_model():
    with pytest.raises(WrongModel, match="POST /embed_sparse"):
        ask(POOLING, {"input": "a"}, model_info=SPLADE)


# --- tokens -----------------------------------------------------------------------------------------------------

TOKEN_LOGITS = rows([9, 0, 0], [0, 9, 0], [0, 0, 9], [0, 9, 0], [9, 0, 0])
OFFSETS = np.array([(-1, -1), (3, 6), (7, 11), (11, 15), (-1, -1)], np.int32)
IDS = np.array([1, 3, 4, 5, 2], np.int32)
TEXT = "Él Ada Lovelace"
TOKENS: dict[str, Any] = {"token_ids": (IDS,), "offsets": (OFFSETS,)}


def token_scores() -> TokenRows:
    collected = TokenRows(1, 3)
    collected.put_tokens(0, TOKEN_LOGITS, 0)
    return collected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [("PER", "Ada Love", 3, 11), ("PER", "lace", 11, 15)]),
        ({"aggregation_strategy": "first"}, [("PER", "Ada Lovelace", 3, 15)]),
        ({"parameters": {"aggregation_strategy": "first"}}, [("PER", "Ada Lovelace", 3, 15)]),
    ],
)
@pytest.mark.parametrize("operation", [PREDICT, HUB, DEFAULT])
def test_entities_are_parts_of_the_sent_text(operation, fields, expected):
    asked = ask(operation, {"inputs": TEXT, **fields}, model_info=NER)
    assert (asked.request.output, asked.request.tokenizing.wants_offsets) == (Output.TOKEN_SCORES, True)
    entities = rendered(asked, token_scores(), **TOKENS)
    found = [(item["entity_group"], item["word"], item["start"], item["end"]) for item in entities]
    assert found == expected
    assert all(TEXT[start:end] == word for _, word, start, end in found)


def test_tokens_may_stay_by_themselves():
    asked = ask(PREDICT, {"inputs": [TEXT], "aggregation_strategy": "none"}, model_info=NER)
    [entities] = rendered(asked, token_scores(), **TOKENS)
    assert [list(item) for item in entities] == [["entity", "score", "index", "word", "start", "end"]] * 3
    assert [(item["entity"], item["index"], item["word"]) for item in entities] == [
        ("B-PER", 1, "ada"),
        ("I-PER", 2, "love"),
        ("B-PER", 3, "##lace"),
    ]
    asked = ask(PREDICT, {"inputs": TEXT, "aggregation_strategy": "none", "ignore_labels": ["B-PER"]}, model_info=NER)
    assert [item["entity"] for item in rendered(asked, token_scores(), **TOKENS)] == ["I-PER"]


def test_classify_has_the_entities_of_each_input():
    asked = ask(CLASSIFY, {"input": TEXT, "aggregation_strategy": "max"}, model_info=NER)
    [item] = rendered(asked, token_scores(), **TOKENS)["data"]
    assert (item["index"], item["object"]) == (0, "token-classification")
    assert [entity["word"] for entity in item["entities"]] == ["Ada Lovelace"]


def test_pooling_has_a_row_for_each_token():
    for fields in ({}, {"task": "token_classify"}):
        asked = ask(POOLING, {"input": TEXT, **fields, "use_activation": False}, model_info=NER)
        assert (asked.request.output, asked.request.normalize) == (Output.TOKEN_SCORES, False)
        assert rendered(asked, token_scores(), **TOKENS)["data"][0]["data"] == TOKEN_LOGITS.tolist()


@pytest.mark.parametrize(
    ("operation", "fields", "param"),
    [
        (PREDICT, {"inputs": [["a", "b"]]}, "inputs"),
        (PREDICT, {"inputs": 5}, "inputs"),
        (PREDICT, {"inputs": "a", "ignore_labels": "O"}, "ignore_labels"),
        (PREDICT, {"inputs": "a", "ignore_labels": ["O", 5]}, "ignore_labels"),
        (CLASSIFY, {"input": [1, 2]}, "input"),
        (CLASSIFY, {"input": "a", "ignore_labels": {}}, "ignore_labels"),
    ],
)
def test_what_is_refused_for_tokens(operation, fields, param):
    with pytest.raises(BadRequest) as caught:
        ask(operation, fields, model_info=NER)
    assert caught.value.param == param


# --- zero-shot --------------------------------------------------------------------------------------------------

VECTORS = rows([1, 0], [0.6, 0.8], [1, 0], [0, 1])
"""Of two texts and two labels; cosines are [1, 0] and [0.6, 0.8]."""


def predictions(**fields: Any) -> list[dict[str, Any]]:
    body = {"input": ["a", {"text": "b"}], "labels": ["x", "y"], **fields}
    asked = ask(ZERO_SHOT, body, model_info=replace(PLAIN, dim=2))
    assert (asked.request.inputs, asked.request.normalize) == (["a", "b", "x", "y"], True)
    found: list[dict[str, Any]] = orjson.loads(body_of(answer(asked, VECTORS)))["data"]
    return found


def test_the_label_with_the_greatest_cosine_is_predicted():
    first, second = predictions()
    assert (first["object"], first["index"], first["prediction"]) == ("classification", 0, "x")
    assert first["score"] == pytest.approx(np.e / (1 + np.e))
    assert [item["label"] for item in first["predictions"]] == ["x", "y"]
    assert sum(item["score"] for item in first["predictions"]) == pytest.approx(1)
    assert (second["prediction"], second["score"]) == ("y", pytest.approx(1 / (1 + np.exp(-0.2)), rel=1e-6))


def test_a_lower_temperature_separates_labels():
    first, second = predictions(temperature=0.1)
    assert first["score"] == pytest.approx(1 / (1 + np.exp(-10.0)), rel=1e-6)
    assert second["prediction"] == "y"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"labels": None}, "labels"),
        ({"labels": []}, "labels"),
        ({"labels": "secret"}, "labels"),
        ({"labels": ["a", 5]}, "labels"),
        ({"labels": ["a"] * 4}, "input"),
        ({"input": [1, 2]}, "input"),
        ({"input": []}, "input"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "1"}, "temperature"),
    ],
)
def test_what_zero_shot_refuses(fields, param):
    with pytest.raises(BadRequest) as caught:
        ask(ZERO_SHOT, {"input": "a", "labels": ["x"], **fields})
    assert caught.value.param == param
    assert "secret" not in caught.value.message


def test_the_scores_of_a_request_are_limited():
    """They are the product of two lists, so a small body could have millions."""
    body = {"input": ["a"] * 600, "labels": ["x"] * 600}
    with pytest.raises(BadRequest, match="have 360000 scores, of 600 texts and 600 labels: at most 262144") as caught:
        ask(ZERO_SHOT, body, model_info=replace(PLAIN, max_inputs=2048))
    assert caught.value.param == "labels"


def test_labels_and_texts_have_the_model_s_prompt_for_classification():
    asked = ask(
        ZERO_SHOT, {"input": "a", "labels": ["x"]}, model_info=replace(PLAIN, prompts={"classification": "c: "})
    )
    assert asked.request.tokenizing.prompt == "c: "
