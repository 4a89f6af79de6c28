"""What Cohere's and Ollama's clients are answered has sentence-transformers' vectors in it: whichever the form, the
prompt, the length and the cut. The model is the bundled one, with prompts."""

import httpx
import numpy as np
import pytest

from tests.support.every_kind import served

TEXTS = ["Hello, world", "The quick brown fox jumps over the lazy dog", "zwei Wörter"]
TOLERANCE = 1e-5
# One token a word, and two of the frame.
LONG = "one two three four five six seven eight"
ROOM, BEGINNING, END = 5, "one two three", "six seven eight"


@pytest.fixture(scope="module")
def url():
    return served("prompted").url


def post(url: str, path: str, **body: object) -> dict:
    answer = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def difference(vectors: list[list[float]], expected: np.ndarray) -> float:
    ours = np.array(vectors, dtype=np.float32)
    assert ours.shape == expected.shape
    return float(np.abs(ours - expected).max())


def shortened(vectors: np.ndarray, dim: int) -> np.ndarray:
    return vectors[:, :dim] / np.linalg.norm(vectors[:, :dim], axis=1, keepdims=True)


# --- Cohere -----------------------------------------------------------------------------------------------------


def test_cohere_floats_of_both_versions(url, reference):
    expected = reference(TEXTS)
    assert difference(post(url, "/v2/embed", texts=TEXTS)["embeddings"]["float"], expected) < TOLERANCE
    assert difference(post(url, "/v1/embed", texts=TEXTS)["embeddings"], expected) < TOLERANCE
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    assert difference(post(url, "/v2/embed", inputs=inputs)["embeddings"]["float"], expected) < TOLERANCE


@pytest.mark.parametrize(("input_type", "prompt"), [("search_query", "query: "), ("search_document", "passage: ")])
def test_cohere_input_type_puts_the_models_prompt_first(url, reference, input_type, prompt):
    answered = post(url, "/v2/embed", texts=TEXTS, input_type=input_type)
    assert difference(answered["embeddings"]["float"], reference([prompt + text for text in TEXTS])) < TOLERANCE
    assert answered["texts"] == TEXTS


@pytest.mark.parametrize(("truncate", "kept"), [("END", BEGINNING), ("START", END)])
def test_cohere_truncate(url, reference, truncate, kept):
    answered = post(url, "/v2/embed", texts=[LONG], truncate=truncate, max_tokens=ROOM)
    assert difference(answered["embeddings"]["float"], reference([kept])) < TOLERANCE
    assert answered["meta"]["billed_units"] == {"input_tokens": ROOM}
    assert len(answered["meta"]["warnings"]) == 1


# --- Ollama -----------------------------------------------------------------------------------------------------


def test_ollama_embeds(url, reference):
    answered = post(url, "/api/embed", model="prompted:latest", input=TEXTS)
    assert difference(answered["embeddings"], reference(TEXTS)) < TOLERANCE
    assert answered["model"] == "prompted"
    assert answered["total_duration"] > 0
    alone = post(url, "/api/embed", input=TEXTS[0])["embeddings"]
    assert difference(alone, reference(TEXTS)[:1]) < TOLERANCE
    older = post(url, "/api/embeddings", prompt=TEXTS[0])["embedding"]
    assert difference([older], reference(TEXTS)[:1]) < TOLERANCE


def test_ollama_tag_puts_the_models_prompt_first(url, reference):
    answered = post(url, "/api/embed", model="prompted:query", input=TEXTS)["embeddings"]
    assert difference(answered, reference(["query: " + text for text in TEXTS])) < TOLERANCE


def test_ollama_num_ctx_cuts_the_end(url, reference):
    for truncate in (True, None):
        answered = post(url, "/api/embed", input=LONG, truncate=truncate, options={"num_ctx": ROOM})
        assert difference(answered["embeddings"], reference([BEGINNING])) < TOLERANCE
        assert answered["prompt_eval_count"] == ROOM
