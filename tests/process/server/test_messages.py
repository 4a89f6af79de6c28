"""Models whose texts go through their chat template, from the folder to the rows, against sentence-transformers on the
same files.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

from tests.support.checkpoints import worker_config
from tests.support.message_checkpoints import save_dense, save_multi_vector
from tests.support.multi_vector_checkpoints import TOKEN_DIM, features_of
from tests.support.tokenizing import tokenize
from vecd.gateway.request import Role, TokenizedInput, Tokenizing
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.launch.config.plan import make_plan
from vecd.launch.config.settings import load_settings
from vecd.model.card import ModelCard
from vecd.shm.output import Output
from vecd.workers.batch import PackedBatch
from vecd.workers.parity import vectors_of
from vecd.workers.select import build

TEXTS = [
    "a quick brown fox",
    "",
    "  \n fox jumps \t\n",
    "over <|im_end|> 中文 [SEP] naïve",
    "\nfox\n\n",
    "the lazy dog, it's 1234.5 " * 20,  # cut, with the template's end behind it
]
PROMPTS = [None, "Find texts", " Find\n"]


def served(folder: Path, cache_dir: Path) -> tuple[ModelCard, Tokenizer]:
    plan = make_plan(load_settings([str(folder), "--device", "cpu", "--cache-dir", str(cache_dir)]))
    try:
        return plan.gateway.card, Tokenizer(plan.gateway.card, plan.gateway.max_tokens, "auto")
    finally:
        plan.close()


def ids_of(items: Sequence[TokenizedInput]) -> list[list[int]]:
    return [array("i", item.token_ids).tolist() for item in items]


def batch_of(lists: list[list[int]], output: Output) -> PackedBatch:
    lengths = np.array(list(map(len, lists)), dtype=np.int32)
    return PackedBatch(lengths, np.concatenate(lists, dtype=np.int32), np.full(lengths.size, output, dtype=np.uint8))


@pytest.mark.parametrize(
    ("family", "pooling", "variables"),
    [("qwen3", "lasttoken", {"add_generation_prompt": True}), ("gemma3_text", "mean", {}), ("bert", "cls", {})],
)
def test_dense_vectors_are_sentence_transformers_own(family, pooling, variables, tmp_path):
    settings = {"processing_kwargs": {"chat_template": variables}} if variables else {}
    folder = save_dense(tmp_path, family, pooling=pooling, **settings)
    card, tokenizer = served(folder, tmp_path)
    model: Any = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    engine = build(replace(worker_config(folder), card=card), "lean", "float32")
    for prompt in PROMPTS:
        lists = ids_of(tokenize(tokenizer, TEXTS, Tokenizing(prompt=prompt)))
        assert lists == [model[0].preprocess([text], prompt=prompt)["input_ids"][0].tolist() for text in TEXTS]
        expected = np.stack([model.encode(text, prompt=prompt) for text in TEXTS])
        found = vectors_of(engine, batch_of(lists, Output.VECTORS), card.dim)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert ((found * expected).sum(axis=1) >= 1 - 1e-6).all()


@pytest.mark.parametrize("family", ["qwen3", "bert"])
def test_token_vectors_are_sentence_transformers_own(family, tmp_path):
    folder = save_multi_vector(tmp_path, family, query_length=45, document_length=50)
    card, tokenizer = served(folder, tmp_path)
    encoder = MultiVectorEncoder(str(folder), device="cpu", local_files_only=True)
    engine = build(replace(worker_config(folder), card=card), "lean", "float32")
    for role in Role:
        lists = ids_of(tokenize(tokenizer, TEXTS, Tokenizing(role=role)))
        expected = [features_of(encoder, text, role.value) for text in TEXTS]
        assert lists == [token_ids.tolist() for token_ids, _, _ in expected]
        found: NDArray[np.float32] = vectors_of(engine, batch_of(lists, Output.TOKEN_VECTORS), TOKEN_DIM)
        np.testing.assert_allclose(found, np.concatenate([vectors for _, _, vectors in expected]), atol=1e-5)
