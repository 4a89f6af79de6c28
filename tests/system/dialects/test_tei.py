"""text-embeddings-inference's dialect: every exchange to the byte, and what one server cannot show: prompts, defaults,
the table of errors, large bodies."""

import json

import httpx
import numpy as np
import pytest

from tests.support import goldens


def test_golden(weightless):
    goldens.check("tei", weightless.url, set())


def test_overload_says_when_to_come_again(weightless):
    """The shape of the error changes nothing about its headers."""
    answer = httpx.post(f"{weightless.url}/embed", json={"inputs": ["word " * 200] * 64}, headers=_NO_TIME)
    assert answer.status_code in (429, 503), "no time at all"
    assert answer.json()["error_type"] == ("Overloaded" if answer.status_code == 429 else "Unhealthy")
    assert int(answer.headers["retry-after"]) >= 1


_NO_TIME = {"x-vecd-timeout-ms": "1"}


@pytest.mark.parametrize("padding", ["", " " * 100_000], ids=["small body", "large body"])
def test_too_many_inputs_are_refused(weightless, padding):
    body = json.dumps({"inputs": ["x"] * 2049}) + padding
    answer = httpx.post(f"{weightless.url}/embed", content=body, timeout=30)
    assert (answer.status_code, answer.json()["error_type"]) == (422, "Validation")
    assert "2048" in answer.json()["error"]
    assert "--max-inputs" in answer.json()["error"]
    compared = {"inputs": {"source_sentence": "a", "sentences": ["x"] * 2048}}
    answer = httpx.post(f"{weightless.url}/similarity", content=json.dumps(compared) + padding, timeout=30)
    assert answer.status_code == 422
    assert "'inputs.sentences' has 2048 texts, at most 2047" in answer.json()["error"]
    assert "--max-inputs" in answer.json()["error"]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return ["one", "two words", "three words here", "one"]


def vectors_of(weightless, texts: list[str]) -> np.ndarray:
    return np.array(httpx.post(f"{weightless.url}/embed", json={"inputs": texts}, timeout=30).json(), dtype=np.float32)


def test_similarity_is_the_cosine_of_the_vectors(weightless, texts):
    source, *sentences = texts
    body = {"inputs": {"source_sentence": source, "sentences": sentences}}
    for path in ("/similarity", "/", "/invocations"):
        cosines = httpx.post(weightless.url + path, json=body, timeout=30).json()
        vectors = vectors_of(weightless, texts)
        assert cosines == pytest.approx(list(vectors[1:] @ vectors[0]), abs=1e-6)
        assert cosines[-1] == pytest.approx(1, abs=1e-6)


def test_predictions_are_what_each_instance_would_have_got(weightless, texts):
    instances = [{"inputs": texts[0]}, {"inputs": texts[1:3]}, {"inputs": [texts[3]]}]
    answer = httpx.post(f"{weightless.url}/vertex", json={"instances": instances}, timeout=30)
    alone = [httpx.post(f"{weightless.url}/embed", json=instance, timeout=30).json() for instance in instances]
    assert answer.json() == {"predictions": alone}


def test_the_headers_tell_what_was_computed_and_for_how_long(weightless):
    """Whole milliseconds, of which the parts are no more than all."""
    headers = httpx.post(f"{weightless.url}/embed", json={"inputs": ["héllo", "x" * 10]}, timeout=30).headers
    assert (headers["x-compute-type"], headers["x-compute-characters"]) == ("cpu", "15")
    assert int(headers["x-compute-tokens"]) >= 6
    assert headers["x-total-time"] == headers["x-compute-time"]
    parts = [int(headers[f"x-{part}-time"]) for part in ("tokenization", "queue", "inference")]
    assert all(part >= 0 for part in parts)
    assert sum(parts) <= int(headers["x-total-time"])


def test_a_long_text_s_tokens_are_those_of_its_parts(weightless):
    """More than are written on the event loop."""
    [long] = httpx.post(f"{weightless.url}/tokenize", json={"inputs": "wörd " * 3000}, timeout=60).json()
    [short] = httpx.post(f"{weightless.url}/tokenize", json={"inputs": "wörd"}, timeout=30).json()
    inner = [(token["id"], token["text"]) for token in short[1:-1]]
    assert [(token["id"], token["text"]) for token in long[1:-1]] == inner * 3000
    assert all(token["start"] < token["stop"] for token in long[1:-1])
