"""Hugging Face's clients of text-embeddings-inference, in Python and in JavaScript, against the real model."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.clients.corpus import TEXTS
from tests.support.clients.driving import Client, ClientError, running_client
from tests.support.clients.keys import KEY


@pytest.fixture(scope="module")
def python() -> Iterator[Client]:
    with running_client("openai-2", "huggingface_client") as client:
        yield client


@pytest.fixture(scope="module")
def javascript() -> Iterator[Client]:
    with running_client("node", "huggingface_client") as client:
        yield client


@pytest.mark.parametrize("path", ["", "/", "/embed"])
@pytest.mark.parametrize("function", ["feature_extraction", "feature_extraction_later"])
def test_a_list(python, float32_server, is_right, path, function):
    vectors = python.call(function, url=float32_server.url + path, text=TEXTS, options={})
    assert is_right(vectors, TEXTS)


@pytest.mark.parametrize("path", ["", "/embed"])
def test_a_string(python, float32_server, is_right, path):
    vectors = python.call("feature_extraction", url=float32_server.url + path, text="hello", options={})
    assert is_right(vectors, ["hello"])


def test_options(python, float32_server, is_right):
    options = {"normalize": True, "truncate": True, "truncation_direction": "right", "dimensions": 384}
    url = f"{float32_server.url}/embed"
    assert is_right(python.call("feature_extraction", url=url, text=TEXTS, options=options), TEXTS)


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
    with pytest.raises(ClientError) as caught:
        python.call("feature_extraction", url=url, text="word " * 1000, options=options, key=key)
    assert "HfHubHTTPError" in caught.value.classes
    assert status in caught.value.message


@pytest.mark.parametrize("path", ["", "/embed"])
def test_javascript(javascript, float32_server, is_right, path):
    vectors = javascript.call("featureExtraction", url=float32_server.url + path, body={"inputs": TEXTS})
    assert is_right(vectors, TEXTS)
