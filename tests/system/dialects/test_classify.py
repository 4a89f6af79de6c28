"""Models that classify texts and tokens: every exchange to the byte, and the same scores by every route."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support import goldens
from tests.support.serving import Server, running_server

_WITH_LABELS = """
import sys
from dataclasses import replace
from vecd.shm import card
from vecd.shm.heads import ScoreHead

kind, pooling, *labels = sys.argv[1].split()
read_card = card.read_card

def read_with_labels(folder, *options, **more):
    head = ScoreHead(tuple(labels), "softmax", "" if pooling == "none" else pooling)
    sizes = {"dim": len(labels), "num_labels": len(labels), "steps": ()}
    return replace(read_card(folder, *options, **more), capabilities=(kind,), score=head, **sizes)

card.read_card = read_with_labels
sys.argv = ["vecd", *sys.argv[2:]]
from vecd.__main__ import main
sys.exit(main())
"""
"""The bundled model's tokenizer and sizes, with labels. The dummy engine needs no weights for them."""


@contextmanager
def classifier(about: str) -> Iterator[Server]:
    program = (sys.executable, "-c", _WITH_LABELS, about)
    with running_server("--engine", "weightless", "--workers", "1", program=program) as server:
        yield server


@pytest.fixture(scope="module")
def moods() -> Iterator[Server]:
    with classifier("classify cls sad glad mad") as server:
        yield server


@pytest.fixture(scope="module")
def names() -> Iterator[Server]:
    with classifier("token-classify none O B-PER I-PER B-LOC") as server:
        yield server


def test_golden(moods):
    goldens.check("classify", moods.url, {"id", "created"})


def test_golden_of_tokens(names):
    goldens.check("token_classify", names.url, {"id", "created"})


def test_the_same_scores_by_every_route(moods):
    texts = ["one text", "another", ""]
    predicted = moods.post("/predict", inputs=[[text] for text in texts])
    scores = [{item["label"]: item["score"] for item in row} for row in predicted]
    for item, expected in zip(moods.post("/classify", input=texts)["data"], scores, strict=True):
        assert item["probs"] == [expected[label] for label in ("sad", "glad", "mad")]
        assert item["label"] == max(expected, key=lambda label: expected[label])
    pooled = [item["data"] for item in moods.post("/pooling", input=texts)["data"]]
    assert pooled == [list(row.values()) for row in ({x: s[x] for x in ("sad", "glad", "mad")} for s in scores)]
    assert moods.post("/classify", input=texts, raw_scores=False)["data"] == predicted
    assert moods.post("/models/m", inputs=texts) == predicted
    assert [moods.post("/predict", inputs=text) for text in texts] == predicted


def test_a_pair_has_scores_of_its_own(moods):
    pair, swapped = moods.post("/predict", inputs=[["a", "b"], ["b", "a"]])
    assert pair == moods.post("/predict", inputs=["a", "b"])
    assert pair != swapped
    assert pair != moods.post("/predict", inputs="a b")


def test_many_texts_at_once(moods):
    """More than are rendered on the event loop."""
    texts = [f"text {index}" for index in range(2000)]
    data = moods.post("/classify", input=texts)["data"]
    assert [item["index"] for item in data] == list(range(2000))
    large = [[text + " " * 100] for text in texts]
    assert len(moods.post("/predict", inputs=large)) == 2000, "a body that is parsed in pieces"


@pytest.mark.parametrize("text", ["Ada Lovelace, born in London", "é😀 Ada\tLovelace\n  İstanbul", "", "x" * 2000])
@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "max", "average"])
def test_entities_are_parts_of_the_sent_text(names, text, aggregation):
    entities = names.post("/predict", inputs=text, aggregation_strategy=aggregation, ignore_labels=[])
    assert entities == names.post("/predict", inputs=[text], aggregation_strategy=aggregation, ignore_labels=[])[0]
    [item] = names.post("/classify", input=text, aggregation_strategy=aggregation, ignore_labels=[])["data"]
    assert item["entities"] == entities
    end = 0
    for entity in entities:
        assert end <= entity["start"] <= entity["end"] <= len(text)
        if aggregation != "none":
            assert entity["word"] == text[entity["start"] : entity["end"]].strip()
            end = entity["end"]
