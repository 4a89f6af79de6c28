"""Scores, labels, entities, sparse vectors and vectors of tokens: the same by every route and in every shape."""

import base64

import numpy as np
import pytest

TEXTS = ["one text", "another"]


@pytest.fixture(scope="module")
def moods(served):
    return served("moods")


@pytest.fixture(scope="module")
def names(served):
    return served("names")


@pytest.fixture(scope="module")
def hybrid(served):
    return served("m3")


# --- classifiers ------------------------------------------------------------------------------------------------


def test_the_same_scores_by_every_route(moods):
    texts, labels = [*TEXTS, ""], ("sad", "glad", "mad")
    predicted = moods.post("/predict", inputs=[[text] for text in texts])
    scores = [{item["label"]: item["score"] for item in row} for row in predicted]
    for item, expected in zip(moods.post("/classify", input=texts)["data"], scores, strict=True):
        assert item["probs"] == [expected[label] for label in labels]
        assert item["label"] == max(expected, key=lambda label: expected[label])
    pooled = [item["data"] for item in moods.post("/pooling", input=texts)["data"]]
    assert pooled == [[row[label] for label in labels] for row in scores]
    assert moods.post("/classify", input=texts, raw_scores=False)["data"] == predicted
    assert moods.post("/models/m", inputs=texts) == predicted
    assert [moods.post("/predict", inputs=text) for text in texts] == predicted


def test_a_pair_has_scores_of_its_own(moods):
    pair, swapped = moods.post("/predict", inputs=[["a", "b"], ["b", "a"]])
    assert pair == moods.post("/predict", inputs=["a", "b"])
    assert pair not in (swapped, moods.post("/predict", inputs="a b"))


def test_more_inputs_than_are_rendered_on_the_event_loop(moods, hybrid):
    texts = [f"text {index}" for index in range(2000)]
    data = moods.post("/classify", input=texts)["data"]
    assert [item["index"] for item in data] == list(range(2000))
    large = [[text + " " * 100] for text in texts]
    assert len(moods.post("/predict", inputs=large)) == 2000, "a body that is parsed in pieces"
    items = hybrid.post("/v1/embeddings", input=texts[:64], output=["sparse", "dense"])["data"]
    assert [item["index"] for item in items] == list(range(64))
    assert len(hybrid.post("/embed_sparse", inputs=texts[:64])) == 64


NAMES = "é😀 Ada\tLovelace\n  İstanbul"


@pytest.mark.parametrize(
    ("text", "aggregation"),
    [(NAMES, name) for name in ("none", "simple", "first", "max", "average")] + [("", "simple"), ("x" * 2000, "first")],
)
def test_entities_are_parts_of_the_sent_text(names, text, aggregation):
    options = {"aggregation_strategy": aggregation, "ignore_labels": []}
    entities = names.post("/predict", inputs=text, **options)
    assert entities == names.post("/predict", inputs=[text], **options)[0]
    [item] = names.post("/classify", input=text, **options)["data"]
    assert item["entities"] == entities
    end = 0
    for entity in entities:
        assert end <= entity["start"] <= entity["end"] <= len(text)
        if aggregation != "none":
            assert entity["word"] == text[entity["start"] : entity["end"]].strip()
            end = entity["end"]


# --- several kinds of vectors -----------------------------------------------------------------------------------


def test_all_kinds_of_one_request_are_those_of_three(hybrid):
    texts = ["one text", "another text, which is longer", ""]
    together = hybrid.post("/v1/embeddings", input=texts, output=["multi-vector", "dense", "sparse"])["data"]
    for kind, key in (("dense", "embedding"), ("sparse", "sparse"), ("multi-vector", "embeddings")):
        alone = hybrid.post("/v1/embeddings", input=texts, output=kind)["data"]
        for ours, theirs in zip(together, alone, strict=True):
            assert set(theirs) == {"object", "index", key}
            if kind == "sparse":
                assert ours[key]["indices"] == theirs[key]["indices"]
                assert ours[key]["values"] == pytest.approx(theirs[key]["values"], rel=1e-5)
            else:
                assert np.allclose(ours[key], theirs[key], atol=1e-5)
                assert np.shape(ours[key]) == np.shape(theirs[key])


def test_the_same_sparse_vectors_in_every_shape(hybrid):
    items = [item["sparse"] for item in hybrid.post("/v1/embeddings", input=TEXTS, output="sparse")["data"]]
    indexed = hybrid.post("/embed_sparse", inputs=TEXTS)
    assert [[pair["index"] for pair in row] for row in indexed] == [item["indices"] for item in items]
    assert [[pair["value"] for pair in row] for row in indexed] == [item["values"] for item in items]
    maps = hybrid.post("/v1/embeddings", input=TEXTS, output="sparse", sparse_format="map")["data"]
    named = hybrid.post("/v1/embeddings", input=TEXTS, output="sparse", return_tokens=True)["data"]
    for item, other in zip(maps, named, strict=True):
        assert item["sparse"] == dict(zip(other["sparse"]["tokens"], other["sparse"]["values"], strict=True))
    assert set(maps[0]["sparse"]) <= {"one", "text", "[SEP]"}


def test_the_same_vectors_of_tokens_in_every_shape(hybrid):
    items = hybrid.post("/v1/embeddings", input=TEXTS, return_multivector=True)
    assert [np.shape(item["embeddings"]) for item in items["data"]] == [(3, 384), (2, 384)], "none for [CLS]"
    assert items["usage"]["prompt_tokens"] == 4 + 3
    pooled = hybrid.post("/pooling", input=TEXTS, task="token_embed")["data"]
    assert [item["data"] for item in pooled] == [item["embeddings"] for item in items["data"]]
    assert hybrid.post("/v1/multi-vector", input=TEXTS)["data"] == items["data"]
    encoded = hybrid.post("/v1/embeddings", input=TEXTS, return_multivector=True, encoding_format="base64")["data"]
    for item, other in zip(items["data"], encoded, strict=True):
        rows = np.frombuffer(base64.b64decode(other["embeddings"]), np.float32).reshape(-1, 384)
        assert np.array_equal(rows, np.array(item["embeddings"], np.float32))


def test_labels_are_chosen_by_cosines(hybrid):
    response = hybrid.post("/v1/classify", input=["one", "two"], labels=["two", "one"], temperature=0.01)
    assert [item["prediction"] for item in response["data"]] == ["one", "two"]
    assert all(sum(row["score"] for row in item["predictions"]) == pytest.approx(1) for item in response["data"])
