"""The vectors that come over HTTP are sentence-transformers' own."""

import asyncio
import base64
import random

import httpx
import numpy as np
import pytest

from tests.support.soak.form import pick
from tests.support.texts import make_texts

NUM_TEXTS = pick(short=250, long=1000)


async def embed_concurrently(url: str, texts: list[str], num_clients: int) -> np.ndarray:
    """Send every text once, in requests of 1 to 20 texts, some as float and some as base64, several at a time."""
    rng = random.Random(1)
    vectors = np.full((len(texts), 384), np.nan, dtype=np.float32)
    starts, cuts = 0, []
    while starts < len(texts):
        end = min(len(texts), starts + rng.choice([1, 1, 1, 2, 5, 20]))
        cuts.append((starts, end, rng.choice(["float", "base64"])))
        starts = end

    async def client(http: httpx.AsyncClient) -> None:
        while cuts:
            start, end, encoding = cuts.pop()
            body = {"input": texts[start:end], "encoding_format": encoding}
            answer = await http.post(f"{url}/v1/embeddings", json=body)
            assert answer.status_code == 200, answer.text
            for item in answer.json()["data"]:
                vectors[start + item["index"]] = read_vector(item["embedding"])

    async with httpx.AsyncClient(timeout=120) as http:
        await asyncio.gather(*(client(http) for _ in range(num_clients)))
    return vectors


def read_vector(embedding: str | list[float]) -> np.ndarray:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), dtype="<f4")
    return np.array(embedding, dtype=np.float32)


@pytest.fixture(scope="module")
def expected(reference):
    return reference(make_texts(NUM_TEXTS))


def test_texts_agree_with_sentence_transformers(float32_server, expected):
    texts = make_texts(NUM_TEXTS)
    vectors = asyncio.run(embed_concurrently(float32_server.url, texts, num_clients=12))
    difference = np.abs(vectors - expected).max(axis=1)
    assert np.isfinite(vectors).all()
    assert difference.max() < 1e-5, f"text {difference.argmax()}: {difference.max()}"


def test_texts_agree_in_direction_by_default(server, expected):
    if server.info()["model_dtype"] == "float32":
        pytest.skip("float32 is the default on this processor: compared above")
    vectors = asyncio.run(embed_concurrently(server.url, make_texts(NUM_TEXTS), num_clients=12))
    cosines = (vectors * expected).sum(axis=1) / np.linalg.norm(vectors, axis=1)
    assert cosines.min() > 0.998, f"text {cosines.argmin()}: {cosines.min()}"


def test_float_and_base64_are_the_same_to_the_bit(float32_server):
    texts = make_texts(40, seed=2)
    floats = np.array(float32_server.embed(texts, encoding_format="float"), dtype=np.float32)
    base64s = np.stack([read_vector(v) for v in float32_server.embed(texts, encoding_format="base64")])
    # The same batch twice may be cut differently, and the last bit depends on the cut: send each text alone.
    alone = [(float32_server.embed(t), float32_server.embed(t, encoding_format="base64")) for t in texts[:10]]
    for [as_float], [as_base64] in alone:
        assert np.array(as_float, dtype=np.float32).tobytes() == read_vector(as_base64).tobytes()
    assert np.abs(floats - base64s).max() < 1e-6


def test_token_ids_of_the_models_own_tokenizer_give_the_texts_vector(float32_server, minilm_folder):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    tokenizer.no_padding()
    texts = ["hello world", "The quick brown fox"]
    ids = [tokenizer.encode(text).ids for text in texts]
    expected = np.array(float32_server.embed(texts))
    assert np.abs(np.array(float32_server.embed(ids)) - expected).max() < 1e-6
    assert np.abs(np.array(float32_server.embed(ids[0])) - expected[0]).max() < 1e-6


def test_usage_counts_tokens_with_the_special_ones(float32_server):
    body = {"input": ["hello world", ""]}
    answer = httpx.post(f"{float32_server.url}/v1/embeddings", json=body).json()
    assert answer["usage"] == {"prompt_tokens": 4 + 2, "total_tokens": 4 + 2}


def test_what_was_cut_is_told(float32_server):
    long, short = "word " * 1000, "word"
    answer = httpx.post(f"{float32_server.url}/v1/embeddings", json={"input": [long, short, long]}, timeout=30)
    assert answer.headers["x-vecd-truncated"] == "2"
    assert answer.json()["usage"]["total_tokens"] == 256 + 3 + 256
    assert "x-vecd-truncated" not in httpx.post(f"{float32_server.url}/v1/embeddings", json={"input": short}).headers


def test_two_thousand_inputs_keep_their_order(float32_server, reference):
    texts = [f"number {i}" for i in range(2048)]
    vectors = np.array(float32_server.embed(texts), dtype=np.float32)
    sample = list(range(0, 2048, 97))
    assert np.abs(vectors[sample] - reference([texts[i] for i in sample])).max() < 1e-5
