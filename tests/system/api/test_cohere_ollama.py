"""What Cohere's and Ollama's clients are answered has sentence-transformers' vectors in it: whichever the form, the
prompt, the length and the cut. One server for all, of the bundled model with prompts of its own."""

import base64
import json

import httpx
import numpy as np
import pytest

from tests.support.serving import exact_server

TEXTS = ["Hello, world", "The quick brown fox jumps over the lazy dog", "zwei Wörter"]
PROMPTS = {"query": "query: ", "document": "passage: "}
TOLERANCE = 1e-5
# One token a word, and two of the frame.
LONG = "one two three four five six seven eight"
ROOM, BEGINNING, END = 5, "one two three", "six seven eight"


@pytest.fixture(scope="module")
def url(minilm_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "prompted"
    folder.mkdir()
    for path in minilm_folder.iterdir():
        (folder / path.name).symlink_to(path)
    about = folder / "config_sentence_transformers.json"
    about.unlink()
    about.write_text(json.dumps({"prompts": PROMPTS, "default_prompt_name": None}))
    with exact_server(str(folder), "--matryoshka") as server:
        yield server.url


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


def test_cohere_types_are_forms_of_the_same_vectors(url):
    types = ["float", "binary", "ubinary", "base64"]
    answered = post(url, "/v2/embed", texts=TEXTS, embedding_types=types)["embeddings"]
    floats = np.array(answered["float"], dtype=np.float32)
    for text, row in zip(answered["base64"], floats, strict=True):
        assert base64.b64decode(text, validate=True) == row.tobytes()
    packed = np.packbits(floats > 0, axis=1)
    assert np.array_equal(answered["ubinary"], packed)
    assert np.array_equal(answered["binary"], packed.astype(np.int16) - 128)


def test_cohere_whole_numbers_keep_the_direction(url, reference):
    answered = post(url, "/v2/embed", texts=TEXTS, embedding_types=["int8", "uint8"])["embeddings"]
    int8 = np.array(answered["int8"], dtype=np.float32)
    cosines = (int8 * reference(TEXTS)).sum(axis=1) / np.linalg.norm(int8, axis=1)
    assert cosines.min() > 0.99
    assert np.array_equal(int8 + 128, answered["uint8"])


@pytest.mark.parametrize(("input_type", "prompt"), [("search_query", "query: "), ("search_document", "passage: ")])
def test_cohere_input_type_puts_the_models_prompt_first(url, reference, input_type, prompt):
    answered = post(url, "/v2/embed", texts=TEXTS, input_type=input_type)
    assert difference(answered["embeddings"]["float"], reference([prompt + text for text in TEXTS])) < TOLERANCE
    assert answered["texts"] == TEXTS


def test_cohere_output_dimension(url, reference):
    answered = post(url, "/v2/embed", texts=TEXTS, output_dimension=64)["embeddings"]["float"]
    assert difference(answered, shortened(reference(TEXTS), 64)) < TOLERANCE


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


def test_ollama_dimensions_are_brought_to_length_1_again(url, reference):
    answered = post(url, "/api/embed", input=TEXTS, dimensions=64)["embeddings"]
    assert difference(answered, shortened(reference(TEXTS), 64)) < TOLERANCE


def test_ollama_tag_puts_the_models_prompt_first(url, reference):
    answered = post(url, "/api/embed", model="prompted:query", input=TEXTS)["embeddings"]
    assert difference(answered, reference(["query: " + text for text in TEXTS])) < TOLERANCE


def test_ollama_num_ctx_cuts_the_end(url, reference):
    for truncate in (True, None):
        answered = post(url, "/api/embed", input=LONG, truncate=truncate, options={"num_ctx": ROOM})
        assert difference(answered["embeddings"], reference([BEGINNING])) < TOLERANCE
        assert answered["prompt_eval_count"] == ROOM


def test_ollama_refuses_what_is_too_long_where_it_is_not_to_be_cut(url):
    body = {"input": ["short", LONG], "truncate": False, "options": {"num_ctx": ROOM}}
    answer = httpx.post(f"{url}/api/embed", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("the input length exceeds the context length: ")
