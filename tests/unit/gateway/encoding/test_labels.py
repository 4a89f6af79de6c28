"""Scores are right where single precision or a plain formula would not be, and the order is that of the logits.
Entities are beside transformers' own pipeline: the same tokens and scores give the same spans."""

import math
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from vecd.gateway.encoding.labels import (
    AGGREGATIONS,
    Entity,
    Step,
    find_entities,
    ranked,
    relevance_logits,
    relevance_of,
    sigmoid,
    softmax,
)

floats32 = st.floats(-30, 30, width=32)


@given(floats32)
def test_a_sigmoid_is_exact_to_the_last_digits(logit):
    [score] = sigmoid(np.array([logit], dtype=np.float32)).tolist()
    expected = 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
    assert score == pytest.approx(expected, rel=4e-16)


@pytest.mark.parametrize("logit", [-3e38, -1000, 1000, 3e38])
def test_extreme_logits_overflow_nothing(logit):
    with np.errstate(all="raise", under="ignore"):
        assert sigmoid(np.array([logit], dtype=np.float32)).tolist() == [float(logit > 0)]
        row = np.array([[logit, 0.0, logit]], dtype=np.float32)
        assert softmax(row)[0].sum() == pytest.approx(1.0)


def test_a_softmax_of_very_negative_logits_is_right():
    """The entry of the greatest magnitude is not the one to subtract."""
    scores = softmax(np.array([[-1000.0, -1001.0]], dtype=np.float32))
    assert scores[0, 0] == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-15)


@given(arrays(np.float32, st.integers(1, 40), elements=floats32))
def test_the_order_is_that_of_the_logits_and_stable(logits):
    column = relevance_logits(logits[:, None])
    order = ranked(column)
    assert sorted(order) == list(range(len(logits)))
    assert order == sorted(range(len(logits)), key=lambda index: (-logits[index], index))
    assert ranked(column, 3) == order[:3]


def test_a_softmax_over_one_logit_is_not_always_one():
    column = relevance_logits(np.array([[0.0], [2.0]], dtype=np.float32))
    assert relevance_of(column, "softmax").tolist() == sigmoid(column).tolist()
    assert relevance_of(column, "identity").tolist() == [0.0, 2.0]
    assert relevance_of(column, "tanh").tolist() == pytest.approx([0.0, math.tanh(2)])


LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC", "B-A-B")
WORDS = ["ada", "love", "##lace", "lives", "in", "paris", "-", ",", "##ter", "x", "##y", "[UNK]", "[CLS]", "[SEP]"]
TEXTS = [
    "Ada Lovelace lives in Paris",
    "ada,ada in-paris  xy xyter",
    "Ada qqq Lovelacexy Paris Paris Ada",
    "",
    "qqq",
]


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def words_alone() -> Tokenizer:
    """Without a prefix for later parts of a word: as with SentencePiece, blanks decide."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def pipeline_entities(
    tokenizer: Tokenizer, text: str, scores: np.ndarray, offsets: np.ndarray, ids: list[int], aggregation: str
) -> list[dict[str, Any]]:
    """What transformers' pipeline makes of the scores of a text's tokens."""
    pytest.importorskip("transformers")
    from transformers.pipelines.token_classification import AggregationStrategy, TokenClassificationPipeline

    pipeline: Any = object.__new__(TokenClassificationPipeline)
    pipeline.tokenizer = SimpleNamespace(
        _tokenizer=tokenizer,
        unk_token_id=tokenizer.token_to_id("[UNK]"),
        convert_ids_to_tokens=tokenizer.id_to_token,
        convert_tokens_to_string=" ".join,
    )
    pipeline.model = SimpleNamespace(config=SimpleNamespace(id2label=dict(enumerate(LABELS))))
    strategy = AggregationStrategy[aggregation.upper()]
    is_special = (offsets[:, 0] < 0).astype(int)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gathered = pipeline.gather_pre_entities(text, np.array(ids), scores, offsets, is_special, strategy)
        entities: list[dict[str, Any]] = pipeline.aggregate(gathered, strategy)
    return [entity for entity in entities if "O" not in (entity.get("entity"), entity.get("entity_group"))]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("make", [wordpiece, words_alone])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(3))
def test_spans_are_those_of_transformers(aggregation, make, text, seed):
    tokenizer = make()
    encoding = tokenizer.encode(text, add_special_tokens=False)
    ids = [12, *encoding.ids, 13]
    offsets = np.array([(-1, -1), *encoding.offsets, (-1, -1)], np.int32)
    logits = np.random.default_rng(seed).normal(size=(len(ids), len(LABELS))) * 3
    scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    theirs = pipeline_entities(tokenizer, text, scores, offsets, ids, aggregation)
    prefix = "##" if make is wordpiece else ""
    tokens = ["[CLS]", *encoding.tokens, "[SEP]"]
    ours = entities((scores, offsets, tokens), text, aggregation, subword_prefix=prefix)
    assert [(entity.start, entity.end) for entity in ours] == [(item["start"], item["end"]) for item in theirs]
    assert [entity.label for entity in ours] == [item.get("entity", item.get("entity_group")) for item in theirs]
    assert [entity.position for entity in ours] == [item.get("index") for item in theirs]
    assert [entity.score for entity in ours] == pytest.approx([item["score"] for item in theirs], abs=1e-12)
    for entity in ours:
        if aggregation != "none":
            assert entity.word == text[entity.start : entity.end].strip()


def entities(tokens: Step, text: str, aggregation: str, **options: Any) -> list[Entity]:
    """In one step, and in steps of any length, which find the same."""
    [[*found], rest] = find_entities([tokens], text, LABELS, aggregation, **options)
    scores, offsets, strings = tokens
    for num in (1, 2, 3):
        ends = [slice(at, at + num) for at in range(0, len(strings), num)]
        steps = [(scores[own], offsets[own], strings[own]) for own in ends]
        lists = list(find_entities(steps, text, LABELS, aggregation, **options))
        assert len(lists) == len(steps) + 1
        assert [entity for some in lists for entity in some] == found + rest
    return found + rest


def one_hot(*labels: str) -> np.ndarray:
    return np.eye(len(LABELS))[[LABELS.index(label) for label in labels]]


def spans(labels: list[str], aggregation: str = "simple", **options: Any) -> list[tuple[str, int, int]]:
    """Of tokens of one character each."""
    offsets = np.array([(at, at + 1) for at in range(len(labels))], np.int32)
    found = entities((one_hot(*labels), offsets, ["x"] * len(labels)), "x" * 9, aggregation, **options)
    return [(entity.label, entity.start, entity.end) for entity in found]


def test_ignored_labels_are_left_out_and_may_be_none():
    assert spans(["O", "B-PER"], "none") == [("B-PER", 1, 2)]
    assert spans(["O", "B-PER"], "none", ignored=()) == [("O", 0, 1), ("B-PER", 1, 2)]
    assert spans(["O", "B-PER"], ignored=("PER",)) == [("O", 0, 1)]
