"""Routes that classify texts, pairs and tokens, in the shapes of text-embeddings-inference, Hugging Face, vLLM,
infinity and Jina."""

from typing import Any

import numpy as np
import orjson
import pytest
from jsonschema_rs import validator_for

from tests.support.arrays import COLBERT, MOODS, NER, SPLADE, TOXIC, rendered, rows
from tests.support.asking import PLAIN, answer, ask, body_of, changed, refusal
from vecd.gateway.dialects import openai, tei, vllm
from vecd.gateway.encoding.forms import Matrix
from vecd.gateway.errors import WrongModel
from vecd.gateway.request import Overflow, Pair, Tokenizing
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


def scores(logits: np.ndarray) -> Matrix:
    made = Matrix(*logits.shape)
    made.put(0, logits, 0)
    return made


# --- /predict ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "model_info", "expected"),
    [
        ({}, TOXIC, [0.5, 1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(-1.0))]),
        ({}, MOODS, SOFTMAX[0]),
        ({"raw_scores": True}, TOXIC, [0.0, 2.0, 1.0]),
        ({"function_to_apply": "softmax"}, TOXIC, SOFTMAX[0]),
        ({"raw_scores": True, "parameters": {"function_to_apply": "none"}}, MOODS, [0.0, 2.0, 1.0]),
    ],
)
def test_the_activation_is_the_model_s_unless_the_request_says_otherwise(fields, model_info, expected):
    asked = ask(PREDICT, {"inputs": "a", **fields}, model_info=model_info)
    found = {item["label"]: item["score"] for item in rendered(asked, scores(LOGITS[:1]))}
    assert [found[label] for label in model_info.card.score.labels] == pytest.approx(expected, rel=1e-12)


def test_long_texts_are_cut_or_refused_but_never_split():
    assert ask(PREDICT, {"inputs": "a", "truncate": False}, model_info=MOODS).request.tokenizing == Tokenizing(
        overflow=Overflow.ERROR, are_ids_of_model=True
    )
    asked = ask(PREDICT, {"inputs": "a"}, model_info=changed(MOODS, overflow=Overflow.CHUNK))
    assert asked.request.tokenizing.overflow is Overflow.ERROR


@pytest.mark.parametrize("operation", [PREDICT, CLASSIFY])
@pytest.mark.parametrize("model_info", [PLAIN, SPLADE])
def test_a_model_that_classifies_nothing_says_what_it_is_for(operation, model_info):
    with pytest.raises(WrongModel, match=f"This server's model is for: {model_info.card.capabilities[0]}"):
        ask(operation, {"inputs": "a", "input": "a"}, model_info=model_info)


@pytest.mark.parametrize(
    ("operation", "model_info", "inputs", "output"),
    [
        (DEFAULT, MOODS, [Pair("a", "b")], Output.SCORES),
        (HUB, MOODS, ["a", "b"], Output.SCORES),
        (DEFAULT, SPLADE, ["a", "b"], Output.SPARSE),
        (DEFAULT, PLAIN, ["a", "b"], Output.VECTORS),
        (HUB, PLAIN, ["a", "b"], Output.VECTORS),
    ],
)
def test_other_paths_do_what_the_model_is_for(operation, model_info, inputs, output):
    request = ask(operation, {"inputs": ["a", "b"]}, model_info=model_info).request
    assert (request.inputs, request.output) == (inputs, output)


def test_other_paths_have_nothing_for_vectors_of_tokens():
    with pytest.raises(WrongModel, match="send a 'query' and 'texts'"):
        ask(DEFAULT, {"inputs": ["a", "b"]}, model_info=COLBERT)
    with pytest.raises(WrongModel, match="POST /v1/embeddings with 'output' 'multi-vector'"):
        ask(HUB, {"inputs": ["a", "b"]}, model_info=COLBERT)


# --- vLLM and infinity ------------------------------------------------------------------------------------------


def test_sagemaker_gets_what_the_model_is_for():
    """As with vLLM, whose body is the same for both."""
    for fields in ({}, {"use_activation": False}, {"raw_scores": True}):
        body = {"input": ["a", "b"], "model": "m", **fields}
        ours, theirs = (
            rendered(ask(operation, body, model_info=MOODS), scores(LOGITS)) for operation in (INVOCATION, CLASSIFY)
        )
        assert ours["data"] == theirs["data"]
        assert not [*validator_for(INVOCATION.response).iter_errors(ours)]
    assert ask(INVOCATION, {"input": "a"}).request.output is Output.VECTORS
    assert ask(INVOCATION, {"input": "a", "output": "sparse"}, model_info=SPLADE).request.output is Output.SPARSE


@pytest.mark.parametrize(
    ("raw_scores", "best", "score"), [(False, ["glad", "sad"], [SOFTMAX[0][1], 0.5]), (True, ["glad", "sad"], [2, 5])]
)
def test_infinity_s_labels_are_the_best_first_and_equal_ones_in_their_order(raw_scores, best, score):
    response = rendered(
        ask(CLASSIFY, {"input": ["a", "b"], "raw_scores": raw_scores}, model_info=MOODS), scores(LOGITS)
    )
    assert (response["object"], response["id"]) == ("classify", "infinity-req_1")
    assert [[item["label"] for item in labels] for labels in response["data"]] == [
        ["glad", "mad", "sad"],
        ["sad", "mad", "glad"],
    ]
    assert [labels[0]["score"] for labels in response["data"]] == pytest.approx(score, rel=1e-12)


CHAT = [{"role": "user", "content": "secret"}]


@pytest.mark.parametrize(
    ("operation", "fields", "param"),
    [
        (CLASSIFY, {"messages": CHAT}, "messages"),
        (ZERO_SHOT, {"labels": []}, "labels"),
        (ZERO_SHOT, {"labels": ["a", 5]}, "labels"),
        (ZERO_SHOT, {"labels": ["a"] * 4}, "input"),
        (ZERO_SHOT, {"input": [1, 2]}, "input"),
    ],
)
def test_what_is_wrong_is_named(operation, fields, param):
    body = {"input": "a", "labels": ["x"], **fields}
    error = refusal(operation, body, PLAIN if operation is ZERO_SHOT else MOODS)
    assert error.param == param
    assert param in error.message


@pytest.mark.parametrize("model_info", [MOODS, NER])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"encoding_format": "npy"}, "encoding_format"),
        ({"output_dtype": "ubinary"}, "output_dtype"),
        ({"encoding_format": "base64", "embedding_type": "binary"}, "embedding_type"),
        ({"dimensions": 2}, "dimensions"),
    ],
)
def test_scores_are_not_vectors(model_info, fields, param):
    assert refusal(POOLING, {"input": "a", **fields}, model_info).param == param


@pytest.mark.parametrize(("task", "model_info"), [("embed", MOODS), ("classify", PLAIN), ("token_classify", MOODS)])
def test_a_task_of_another_model_is_refused(task, model_info):
    error = refusal(POOLING, {"input": "a", "task": task}, model_info)
    assert (type(error), error.param) == (WrongModel, "task")


# --- tokens -----------------------------------------------------------------------------------------------------

TOKEN_LOGITS = rows([9, 0, 0], [0, 9, 0], [0, 0, 9], [0, 9, 0], [9, 0, 0])
OFFSETS = np.array([(-1, -1), (3, 6), (7, 11), (11, 15), (-1, -1)], np.int32)
IDS = np.array([1, 3, 4, 5, 2], np.int32)
TEXT = "Él Ada Lovelace"
TOKENS: dict[str, Any] = {"token_ids": (IDS,), "offsets": (OFFSETS,)}


def token_scores() -> list[np.ndarray]:
    return [TOKEN_LOGITS]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [("PER", "Ada Love", 3, 11), ("PER", "lace", 11, 15)]),
        ({"aggregation_strategy": "first"}, [("PER", "Ada Lovelace", 3, 15)]),
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
    body = {"inputs": [TEXT], "aggregation_strategy": "none", "ignore_labels": ["I-PER"]}
    [entities] = rendered(ask(PREDICT, body, model_info=NER), token_scores(), **TOKENS)
    assert [(item["entity"], item["index"], item["word"]) for item in entities] == [
        ("B-PER", 1, "ada"),
        ("B-PER", 3, "##lace"),
    ]


def test_pooling_has_a_row_for_each_token():
    for fields in ({}, {"task": "token_classify"}):
        asked = ask(POOLING, {"input": TEXT, **fields, "use_activation": False}, model_info=NER)
        assert (asked.request.output, asked.request.normalize) == (Output.TOKEN_SCORES, False)
        assert rendered(asked, token_scores(), **TOKENS)["data"][0]["data"] == TOKEN_LOGITS.tolist()


# --- zero-shot --------------------------------------------------------------------------------------------------

VECTORS = rows([1, 0], [0.6, 0.8], [1, 0], [0, 1])
"""Of two texts and two labels; cosines are [1, 0] and [0.6, 0.8]."""


def predictions(**fields: Any) -> list[dict[str, Any]]:
    body = {"input": ["a", {"text": "b"}], "labels": ["x", "y"], **fields}
    asked = ask(ZERO_SHOT, body, model_info=changed(PLAIN, dim=2, prompts={"classification": "c: "}))
    assert (asked.request.inputs, asked.request.normalize) == (["a", "b", "x", "y"], True)
    assert asked.request.tokenizing.prompt == "c: "
    found: list[dict[str, Any]] = orjson.loads(body_of(answer(asked, VECTORS)))["data"]
    return found


def test_the_label_with_the_greatest_cosine_is_predicted():
    first, second = predictions()
    assert (first["object"], first["index"], first["prediction"]) == ("classification", 0, "x")
    assert first["score"] == pytest.approx(np.e / (1 + np.e))
    assert [item["label"] for item in first["predictions"]] == ["x", "y"]
    assert sum(item["score"] for item in first["predictions"]) == pytest.approx(1)
    assert (second["prediction"], second["score"]) == ("y", pytest.approx(1 / (1 + np.exp(-0.2)), rel=1e-6))
    [first, _] = predictions(temperature=0.1)
    assert first["score"] == pytest.approx(1 / (1 + np.exp(-10.0)), rel=1e-6), "a lower one separates labels"


@pytest.mark.parametrize(
    ("num_texts", "labels", "says"),
    [
        (513, ["x"] * 512, "have 262656 scores, of 513 texts and 512 labels: at most 262144"),
        (65, ["x" * 2**16], "have 4259840 characters, once for each of 65 texts: at most 4194304"),
    ],
)
def test_what_a_small_body_asks_for_by_two_lists_is_limited(num_texts, labels, says):
    model_info = changed(PLAIN, max_inputs=2048)
    ask(ZERO_SHOT, {"input": ["a"] * (num_texts - 1), "labels": labels}, model_info=model_info)
    error = refusal(ZERO_SHOT, {"input": ["a"] * num_texts, "labels": labels}, model_info)
    assert error.param == "labels"
    assert says in error.message
