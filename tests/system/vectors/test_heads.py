"""What stands behind the transformer: every pooling mode, Dense and Normalize modules, as sentence-transformers has
them; and prompts before it, through a whole server."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize

from tests.support.checkpoints import (
    HIDDEN_SIZE,
    Checkpoints,
    Reference,
    assert_same_vectors,
    embed,
    engine_of,
    random_batch,
)
from tests.support.every_kind import DEFAULT_PROMPT, folders, served, widening_steps
from vecd.model.card import read_card
from vecd.model.steps import POOLINGS

LENGTHS = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]


ALL_MODES = tuple(POOLINGS)[::-1]  # side by side, in an order of the model's own


@pytest.mark.parametrize(
    ("family", "path", "pooling"),
    [
        ("bert", "lean", "mean"),
        ("bert", "fused", "lasttoken"),
        *(("bert", path, ALL_MODES) for path in ("lean", "fused")),
        *((family, "lean", ALL_MODES) for family in ("modernbert", "nomic_bert", "gte", "qwen3", "mistral")),
        ("qwen3", "packed", ALL_MODES),
        ("t5", "padded", ALL_MODES),
    ],
)
def test_every_pooling_mode_is_the_reference_s(
    family: str, path: str, pooling: str | Sequence[str], checkpoint: Checkpoints, reference: Reference
) -> None:
    folder = checkpoint(family, pooling=pooling, steps=[])
    dim = HIDDEN_SIZE * (1 if isinstance(pooling, str) else len(pooling))
    engine = engine_of(folder, path)
    for lengths in ([1], [60], LENGTHS):
        batch = random_batch(lengths)
        assert_same_vectors(embed(engine, batch, dim), reference(folder, batch))


@pytest.mark.parametrize(
    ("family", "path", "pooling"),
    [
        ("bert", "lean", "cls"),
        ("bert", "fused", "cls"),
        ("gemma3_text", "lean", "mean"),
        ("gemma3_text", "packed", "mean"),
        ("t5", "padded", "mean"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_modules_as_in_embeddinggemma_and_gtr_are_the_reference_s(
    family: str, path: str, pooling: str, dtype: str, checkpoint: Checkpoints, reference: Reference
) -> None:
    folder = checkpoint(family, pooling=pooling, steps=widening_steps())
    if path == "lean" and dtype != "float32":
        pytest.skip("the lean engine computes float32")
    engine = engine_of(folder, path, dtype)
    for lengths in ([1], [60], LENGTHS):
        batch = random_batch(lengths)
        assert_same_vectors(embed(engine, batch, 24), reference(folder, batch), dtype)


@pytest.mark.parametrize("last", [[], [Normalize()]], ids=["as it is", "normalized"])
def test_vectors_of_any_size_are_the_reference_s(
    last: list[torch.nn.Module], checkpoint: Checkpoints, reference: Reference
) -> None:
    """Without Normalize elements are beyond 1, and are held to a part of the largest."""
    torch.manual_seed(2)
    wide = Dense(2 * HIDDEN_SIZE, 16, activation_function=torch.nn.Identity())
    with torch.no_grad():
        wide.linear.weight.mul_(100)
    folder = checkpoint("bert", pooling=["cls", "max"], steps=[Normalize(), LayerNorm(2 * HIDDEN_SIZE), wide, *last])
    assert read_card(folder).dim == 16
    batch = random_batch(LENGTHS)
    expected = reference(folder, batch)
    assert (np.abs(expected).max() > 10) is np.bool_(not last)
    for path in ("lean", "fused"):
        assert_same_vectors(embed(engine_of(folder, path), batch, 16), expected)


# --- prompts ------------------------------------------------------------------------------------------------------

TEXTS = [
    "w2 w3",
    "w9",
    "",
    "w7 w8 unknown w9",
    " ".join(f"w{index}" for index in range(2, 115)),
    "w4 " * 59,
    "w5 " * 56,
]


def model_of(name: str) -> SentenceTransformer:
    return SentenceTransformer(str(folders()[name]), device="cpu", local_files_only=True)


def test_a_served_model_s_default_prompt_is_put_before_every_text() -> None:
    server, model = served("default-prompt"), model_of("default-prompt")
    expected = model.encode(TEXTS)
    assert np.abs(expected - model.encode(TEXTS, prompt=DEFAULT_PROMPT)).max() == 0
    assert np.abs(expected - model.encode(TEXTS, prompt="")).max(axis=1).min() > 1e-2
    assert_same_vectors(np.array(server.embed(TEXTS), dtype=np.float32), expected)
    assert_same_vectors(np.array([server.embed(text)[0] for text in TEXTS], dtype=np.float32), expected)


def test_a_document_does_not_get_the_default_prompt_that_is_the_query_s() -> None:
    """Each is embedded as sentence-transformers' `encode_query` and `encode_document` embed it."""
    server, model = served("query-prompt"), model_of("query-prompt")
    texts = [text for text in TEXTS if text]  # one of no tokens has no vector
    queries, documents = model.encode_query(texts), model.encode_document(texts)
    assert np.abs(queries - documents).max(axis=1).min() > 1e-2
    assert np.abs(model.encode(texts) - queries).max() == 0
    for fields in ({}, {"input_type": "search_query"}):
        assert_same_vectors(np.array(server.embed(texts, **fields), np.float32), queries)
    for fields in ({"input_type": "search_document"}, {"task": "retrieval.passage"}, {"model": "any:document"}):
        assert_same_vectors(np.array(server.embed(texts, **fields), np.float32), documents)
