"""Tenants for trials: texts that nobody else sends, with a canary of their own, and their vectors."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tests.support.canaries import WORD
from tests.support.soak.questions import Tenant
from tests.support.texts import make_texts
from vecd.workers.batch import PackedBatch
from vecd.workers.dummy import dummy_vectors

_MAX_CHARACTERS = 240
_MAX_TOKENS, _DIM = 256, 384
_ALPHABETS = "abcdefgh ", "日本語テキスト", "é ü\u0301\u200b", "1234567890.,;()[] ", "\U0001f642 x", "\t\n\r\x07 y"


def make_tenant(
    name: str, num_texts: int, reference: Callable[[list[str]], NDArray[np.float32]], *, seed: int
) -> Tenant:
    """`reference` makes float32 [N, D] of texts."""
    texts = texts_of(name, num_texts, seed=seed)
    return Tenant(name, texts, (reference(texts),))


def texts_of(name: str, num_texts: int, *, seed: int) -> list[str]:
    """Texts with the canary of a tenant's name in each."""
    return [f"{WORD}{name} {n} {text[:_MAX_CHARACTERS]}" for n, text in enumerate(make_texts(num_texts, seed=seed))]


def make_dummy_tenants(model_folder: Path, num_texts: int) -> list[Tenant]:
    """One with texts and one with ids: empty, short, of thousands of words, of any characters.

    Their vectors are those of the engine without a model, for the ids of the tokenizer in `model_folder`.
    """
    rng = random.Random(5)
    texts = [f"{WORD} {n} {_random_text(rng)}" for n in range(num_texts)] + ["", " ", "\x00", "a"]
    ids = [[101, *(rng.randrange(1000, 30_000) for _ in range(_random_length(rng, 250))), 102] for _ in texts]
    return [
        Tenant("texts", texts, (dummy_reference(model_folder, texts),)),
        Tenant("ids", ids, (_vectors_of(ids),)),
    ]


def dummy_reference(model_folder: Path, texts: list[str], max_tokens: int = _MAX_TOKENS) -> NDArray[np.float32]:
    """What the engine without a model makes of texts that are cut after `max_tokens`: float32 [N, 384]."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    return _vectors_of([tokenizer.encode(text).ids for text in texts])


def _random_length(rng: random.Random, most: int) -> int:
    """Mostly short, sometimes as long as may be."""
    return min(most, int(rng.lognormvariate(3.0, 1.3)))


def _random_text(rng: random.Random) -> str:
    alphabet = rng.choice(_ALPHABETS)
    return "".join(rng.choice(alphabet) for _ in range(_random_length(rng, 20_000)))


def _vectors_of(id_lists: list[list[int]]) -> NDArray[np.float32]:
    """float32 [N, 384], from the engine's own definition, each list alone."""
    lists = [np.array(ids, dtype=np.int32) for ids in id_lists]
    batches = [PackedBatch(np.array([ids.size], dtype=np.int32), ids) for ids in lists]
    return np.concatenate([dummy_vectors(batch, _DIM) for batch in batches])
