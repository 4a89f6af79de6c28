"""Hugging Face's clients of text-embeddings-inference, in Python and in JavaScript, against the real model."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.clients.corpus import KEY, QUERY, TEXTS
from tests.support.clients.driving import Client, ClientError, running_client
from tests.support.shared_servers import shared_server


@pytest.fixture(scope="module")
def python() -> Iterator[Client]:
    with running_client("openai-2", "huggingface_client") as client:
        yield client


@pytest.fixture(scope="module")
def javascript() -> Iterator[Client]:
    with running_client("node", "huggingface_client") as client:
        yield client


@pytest.fixture(scope="module")
def pipeline() -> Any:
    """transformers' own, of a model whose labels tell entailment from its opposite."""
    import transformers

    from tests.support.published import folder_of, layouts  # imports torch, which the tests of no other client need

    [layout] = [each for each in layouts() if each.name == "MoritzLaurer/ModernBERT-base-zeroshot-v2.0"]
    return transformers.pipeline("zero-shot-classification", model=str(folder_of(layout)))


@pytest.mark.parametrize("path", ["", "/", "/embed"])
@pytest.mark.parametrize("function", ["feature_extraction", "feature_extraction_later"])
def test_a_list(python, float32_server, is_right, path, function):
    vectors = python.call(function, url=float32_server.url + path, text=TEXTS, options={})
    assert is_right(vectors, TEXTS)


@pytest.mark.parametrize("path", ["", "/embed"])
def test_a_string(python, float32_server, is_right, path):
    vectors = python.call("feature_extraction", url=float32_server.url + path, text="hello", options={})
    assert is_right(vectors, ["hello"])


def test_vectors_that_are_not_normalized(python, float32_server, is_right):
    url = f"{float32_server.url}/embed"
    vectors = np.array(python.call("feature_extraction", url=url, text=TEXTS, options={"normalize": False}))
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    assert np.abs(lengths - 1).min() > 0.1
    assert is_right((vectors / lengths).tolist(), TEXTS)


def test_similarity(python, float32_server, expected):
    scores = python.call("sentence_similarity", url=float32_server.url, sentence=TEXTS[0], others=TEXTS)
    vectors = expected(TEXTS)
    assert np.abs(np.array(scores) - vectors @ vectors[0]).max() < 1e-5


@pytest.mark.parametrize(("key", "status"), [(KEY, "422"), ("wrong", "401")])
def test_errors(python, strict_server, key, status):
    url, options = f"{strict_server.url}/embed", {"truncate": False}
    error = python.refusal("feature_extraction", url=url, text="word " * 1000, options=options, key=key)
    assert "HfHubHTTPError" in error.classes
    assert status in error.message


@pytest.mark.parametrize("path", ["/models/any", "/pipeline/text-classification/any"])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"function_to_apply": "sigmoid"}, {"function_to_apply": "none"}])
def test_text_classification(python, classifier, path, options):
    given = python.call("text_classification", url=classifier.url + path, text=QUERY, options=options)
    body = {"inputs": QUERY, "raw_scores": options.get("function_to_apply") == "none"}
    expected = httpx.post(f"{classifier.url}/predict", json=body, timeout=30).raise_for_status().json()
    assert [label for label, _ in given] == [item["label"] for item in expected][: options.get("top_k")]
    if options.get("function_to_apply") == "sigmoid":
        logits = httpx.post(f"{classifier.url}/predict", json={"inputs": QUERY, "raw_scores": True}, timeout=30).json()
        expected = [{"score": 1 / (1 + np.exp(-item["score"]))} for item in logits]
    assert [score for _, score in given] == pytest.approx([item["score"] for item in expected][: options.get("top_k")])


@pytest.mark.parametrize("path", ["/", "/predict"])
def test_text_classification_by_the_shape_of_tei_has_no_labels(python, classifier, path):
    """The client expects a list of lists, which text-embeddings-inference does not give for one text either."""
    with pytest.raises(ClientError):
        python.call("text_classification", url=classifier.url + path, text=QUERY, options={})


@pytest.mark.parametrize("path", ["", "/predict", "/models/any", "/pipeline/token-classification/any"])
@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_token_classification(python, token_classifier, path, strategy):
    text = "w30 w31 w40 w41 w42 w8 w9"
    options = {"aggregation_strategy": strategy, "ignore_labels": ["I-PER"]}
    given = python.call("token_classification", url=token_classifier.url + path, text=text, options=options)
    body = {"inputs": text, "aggregation_strategy": strategy, "ignore_labels": ["I-PER"]}
    expected = httpx.post(f"{token_classifier.url}/predict", json=body, timeout=30).raise_for_status().json()
    assert [{key: value for key, value in item.items() if value is not None} for item in given] == expected
    assert [text[item["start"] : item["end"]] for item in given] == [item["word"] for item in expected]
    assert len(given) > 1


@pytest.mark.parametrize("kind", ["classifier", "float32_server"])
@pytest.mark.parametrize("path", ["", "/models/any"])
def test_zero_shot_classification_is_refused(python, request, kind, path):
    url = request.getfixturevalue(kind).url + path
    error = python.refusal("zero_shot_classification", url=url, text=QUERY, labels=["a", "b"], options={})
    assert "HfHubHTTPError" in error.classes
    assert "POST /v1/classify with 'labels'" in error.message


@pytest.mark.parametrize("path", ["/models/any", "/pipeline/zero-shot-classification/any"])
@pytest.mark.parametrize("options", [{}, {"multi_label": True, "hypothesis_template": "w20 {} w21"}])
def test_zero_shot_classification(python, pipeline, path, options):
    url = shared_server("--dtype", "float32", "--workers", "1", pipeline.model.name_or_path).url + path
    text, labels = "w9 w10 w11", ["w5", "w6 w7", "w8"]
    given = python.call("zero_shot_classification", url=url, text=text, labels=labels, options=options)
    expected = pipeline(text, labels, **options)
    assert [label for label, _ in given] == expected["labels"]
    assert [score for _, score in given] == pytest.approx(expected["scores"], abs=1e-5)
    assert len({round(score, 4) for _, score in given}) == len(labels)


@pytest.mark.parametrize("path", ["", "/embed"])
def test_javascript(javascript, float32_server, is_right, path):
    vectors = javascript.call("featureExtraction", url=float32_server.url + path, body={"inputs": TEXTS})
    assert is_right(vectors, TEXTS)


@pytest.mark.parametrize("path", ["/models/any", "/pipeline/text-classification/any"])
def test_javascript_text_classification(javascript, classifier, path):
    given = javascript.call("textClassification", url=classifier.url + path, body={"inputs": QUERY})
    expected = httpx.post(f"{classifier.url}/predict", json={"inputs": QUERY}, timeout=30).raise_for_status().json()
    assert [item["label"] for item in given] == [item["label"] for item in expected]
    assert [item["score"] for item in given] == pytest.approx([item["score"] for item in expected])


@pytest.mark.parametrize("path", ["", "/models/any"])
def test_javascript_token_classification(javascript, token_classifier, path):
    given = javascript.call("tokenClassification", url=token_classifier.url + path, body={"inputs": "w30 w31 w40"})
    expected = token_classifier.post("/predict", inputs="w30 w31 w40")
    assert len(expected) > 1
    assert [(item["word"], item["entity_group"]) for item in given] == [
        (item["word"], item["entity_group"]) for item in expected
    ]
