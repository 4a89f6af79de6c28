"""text-embeddings-inference's dialect and Ollama's: what their clients read beside the vectors, and large bodies."""

import json

import httpx
import numpy as np
import pytest


def test_overload_says_when_to_come_again(dummy):
    """The shape of the error changes nothing about its headers."""
    no_time = {"x-vecd-timeout-ms": "1"}
    answer = httpx.post(f"{dummy.url}/embed", json={"inputs": ["word " * 200] * 64}, headers=no_time)
    assert answer.status_code in (429, 503), "no time at all"
    assert answer.json()["error_type"] == ("Overloaded" if answer.status_code == 429 else "Unhealthy")
    assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("padding", ["", " " * 100_000], ids=["small body", "large body"])
@pytest.mark.parametrize(
    ("path", "inputs", "words"),
    [
        ("/embed", ["x"] * 2049, "2048"),
        (
            "/similarity",
            {"source_sentence": "a", "sentences": ["x"] * 2048},
            "'inputs.sentences' has 2048 texts, at most 2047",
        ),
    ],
    ids=["embed", "similarity"],
)
def test_too_many_inputs_are_refused(dummy, path, inputs, words, padding):
    answer = httpx.post(dummy.url + path, content=json.dumps({"inputs": inputs}) + padding, timeout=30)
    assert (answer.status_code, answer.json()["error_type"]) == (422, "Validation")
    assert words in answer.json()["error"]
    assert "--max-inputs" in answer.json()["error"]


def test_a_large_list_of_token_ids_is_refused_as_one_by_ollama_s_path(dummy):
    """Large bodies' ids come as arrays."""
    answer = httpx.post(f"{dummy.url}/api/embed", json={"input": list(range(30_000))}, timeout=30)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("invalid input type: 'input")


@pytest.mark.parametrize("path", ["/similarity", "/", "/invocations"])
def test_similarity_is_the_cosine_of_the_vectors(dummy, path):
    source, *sentences = texts = ["one", "two words", "three words here", "one"]
    vectors = np.array(dummy.post("/embed", inputs=texts), dtype=np.float32)
    cosines = dummy.post(path, inputs={"source_sentence": source, "sentences": sentences})
    assert cosines == pytest.approx(list(vectors[1:] @ vectors[0]), abs=1e-6)
    assert cosines[-1] == pytest.approx(1, abs=1e-6)


def test_the_headers_tell_what_was_computed_and_for_how_long(dummy):
    """Whole milliseconds, of which the parts are no more than all."""
    headers = httpx.post(f"{dummy.url}/embed", json={"inputs": ["héllo", "x" * 10]}, timeout=30).headers
    assert (headers["x-compute-type"], headers["x-compute-characters"]) == ("cpu", "15")
    assert int(headers["x-compute-tokens"]) >= 6
    assert headers["x-total-time"] == headers["x-compute-time"]
    parts = [int(headers[f"x-{part}-time"]) for part in ("tokenization", "queue", "inference")]
    assert all(part >= 0 for part in parts)
    assert sum(parts) <= int(headers["x-total-time"])
