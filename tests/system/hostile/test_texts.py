"""Texts that somebody made to be slow or to be misread: tokens and vectors are sentence-transformers' all the same."""

import asyncio
import base64
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import tokenizers

from vecd.gateway.request import TokenizedInput
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.card import read_card

_random = random.Random(5)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def words(length: int, last: str = "") -> str:
    """Words of no language, all as long."""
    return " ".join("".join(_random.choices(LETTERS, k=length)) + last for _ in range(20_000 // length))


TEXTS = {
    "special tokens": "[SEP] hi [CLS] there [MASK] [PAD] [UNK] [sep]",
    "ideographs": "".join(chr(_random.randrange(0x4E00, 0x9F00)) for _ in range(20_000)),
    "ideographs and marks": "中文，漢字。" * 3000,
    "kana without a blank": "とてもながいぶんしょうです" * 1500,
    "punctuation": "".join(_random.choices("!?.,;:-()[]<=>", k=20_000)),
    "one word": "x" * 20_000,
    "blanks": " \t\n" * 5000 + "end" + "\u3000\u00a0" * 2000,
    "words of no language": words(40),
    "words that are too long to be known": words(120),
    "words with a letter that is unknown": words(30, last="\u16a0"),
    "marks without an end": "a" + "\u0301" * 20_000 + " b",
    "signs that combine": "a=\u0338b <\u0338 >\u0338 e\u0301 \u0301 " * 700,
    "emoji": "😀👨\u200d👩\u200d👧🇩🇪" * 1500,
    "nothing to be seen": "\u200b\u00ad\ufeff\u2060" * 4000 + "word",
    "control characters": "a\x00b\x01c\x7f\ufffd " * 3000,
    "right to left": "\u202eשלום עולם\u202c " * 1500,
    "special tokens without end": "[SEP][CLS] " * 2000,
    "half a special token": "[SEP [CLS [MASK " * 1500,
    "base64": base64.b64encode(_random.randbytes(15_000)).decode(),
}


EMBEDDED = (
    "special tokens", "ideographs", "one word", "words with a letter that is unknown", "signs that combine",
    "half a special token",
)  # fmt: skip
"""Of these the vectors are compared, too: the model takes most of the time."""


@pytest.fixture(scope="module")
def own(minilm_folder):
    """The model's tokenizer, which tokenizes every text to its end."""
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@pytest.mark.parametrize("max_tokens", [16, 256, 512, 8192])
def test_the_tokens_are_the_library_s_own(minilm_folder, own, max_tokens):
    ours = Tokenizer(read_card(minilm_folder), max_tokens, "auto")

    async def tokenize() -> list[TokenizedInput]:
        return [item async for run in ours.tokenize(list(TEXTS.values())) for item in run]

    try:
        tokenized = asyncio.run(tokenize())
    finally:
        ours.threads.close()
    for (name, text), item in zip(TEXTS.items(), tokenized, strict=True):
        whole = own.encode(text[: ours.max_chars]).ids
        kept = [*whole[: max_tokens - 1], 102] if len(whole) > max_tokens else whole
        assert np.frombuffer(item.token_ids, "<i4").tolist() == kept, name
        assert item.is_truncated == (len(whole) > max_tokens or len(text) > ours.max_chars), name


def test_the_vectors_are_sentence_transformers_own_and_the_tokens_are_counted(float32_server, reference, own):
    texts = [TEXTS[name] for name in EMBEDDED]
    answer = httpx.post(f"{float32_server.url}/v1/embeddings", json={"input": texts}, timeout=200).raise_for_status()
    vectors = np.array([item["embedding"] for item in answer.json()["data"]])
    np.testing.assert_allclose(vectors, reference(texts), atol=1e-5)
    lengths = [len(encoding.ids) for encoding in own.encode_batch(texts)]
    assert answer.json()["usage"]["prompt_tokens"] == sum(min(length, 256) for length in lengths)
    assert int(answer.headers["x-vecd-truncated"]) == sum(length > 256 for length in lengths) >= 3


def test_others_are_answered_while_they_are_tokenized(float32_server, reference):
    """None is refused, and nobody's vector is another's."""
    large = list(TEXTS.values())
    expected = reference(["a short text"])[0]
    with ThreadPoolExecutor(1) as clients:
        hostile = clients.submit(httpx.post, f"{float32_server.url}/v1/embeddings", json={"input": large}, timeout=200)
        for _ in range(5):
            [vector] = float32_server.embed("a short text")
            np.testing.assert_allclose(np.array(vector), expected, atol=1e-5)
        assert len(hostile.result().raise_for_status().json()["data"]) == len(large)
