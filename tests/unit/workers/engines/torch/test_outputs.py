"""What else a sequence may ask for than the model's vector: sentence-transformers' own rows are the measure."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from transformers import AutoModel

from tests.support.checkpoints import engine_of
from vecd.shm.card import read_card
from vecd.shm.output import Output
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.parity import vectors_of

LENGTHS = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]
VECTORS, RAW, TOKENS = Output.VECTORS, Output.UNNORMALIZED, Output.TOKENS
TEXTS = [
    "a cat",
    "The cat sat on the mat, and the dog on the other one.",
    "",
    "a cat",
    " ".join(f"word {number}" for number in range(80)),
]


def asking(batch: PackedBatch, outputs: Sequence[int]) -> PackedBatch:
    return replace(batch, outputs=np.resize(np.array(outputs, dtype=np.uint8), batch.lengths.size))


def assert_same(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """To 1e-5, or that part of the largest number: hidden states have no length of 1."""
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-5 * max(1.0, float(np.abs(expected).max())), rtol=0)


@pytest.mark.parametrize(
    "outputs",
    [[VECTORS, RAW, TOKENS], [TOKENS, TOKENS, VECTORS], [RAW], [TOKENS], [VECTORS, RAW], [VECTORS]],
)
@pytest.mark.parametrize("path", ["lean", "fused", "packed", "padded", "unpadded"])
def test_rows_are_the_reference_s_on_every_path(
    path: str, outputs: list[int], checkpoint: Callable[..., Path], reference: Any, random_batch: Any
) -> None:
    folder, batch = checkpoint("bert"), asking(random_batch(LENGTHS), outputs)
    assert_same(vectors_of(engine_of(folder, path), batch, 32), reference(folder, batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "path", "pooling"),
    [
        ("mpnet", "lean", "mean"),
        ("electra", "lean", "mean"),
        ("modernbert", "lean", "cls"),
        ("qwen2", "lean", "lasttoken"),
        ("qwen3", "lean", "lasttoken"),
        ("mistral", "lean", "mean"),
        ("xlm-roberta", "fused", "cls"),
        ("distilbert", "fused", "cls"),
        ("mpnet", "fused", "mean"),
        ("qwen3", "packed", "lasttoken"),
        ("gemma3_text", "packed", "mean"),
        ("modernbert", "packed", "cls"),
        ("deberta-v2", "padded", "mean"),
        ("fnet", "unpadded", "max"),
    ],
)
def test_rows_are_the_reference_s_for_every_family(
    family: str, path: str, pooling: str, checkpoint: Callable[..., Path], reference: Any, random_batch: Any
) -> None:
    """Whatever is pooled: an agreement of vectors alone would not see the tokens that pooling leaves out."""
    folder = checkpoint(family, pooling=pooling)
    batch = asking(random_batch(LENGTHS), [VECTORS, RAW, TOKENS])
    assert_same(vectors_of(engine_of(folder, path), batch, 32), reference(folder, batch))


def test_states_are_shorter_than_vectors_and_zeros_fill_the_row(
    checkpoint: Callable[..., Path], reference: Any, random_batch: Any
) -> None:
    folder = checkpoint("bert", pooling=("cls", "mean"))
    batch = asking(random_batch(LENGTHS), [TOKENS, VECTORS, RAW])
    found = vectors_of(engine_of(folder, "fused"), batch, 64)
    assert_same(found, reference(folder, batch))
    assert not found[:5, 32:].any()


def test_without_a_norm_at_the_end_the_unnormalized_vector_is_the_vector(
    checkpoint: Callable[..., Path], reference: Any, random_batch: Any
) -> None:
    """Also where a step before the last normalizes: only the last one is left out."""
    torch.manual_seed(0)
    folder = checkpoint("bert", steps=[Normalize(), Dense(32, 40)])
    engine, plain = engine_of(folder, "fused"), random_batch(LENGTHS)
    found = vectors_of(engine, asking(plain, [RAW]), 40)
    assert np.array_equal(found, vectors_of(engine, plain, 40))
    assert_same(found, reference(folder, plain))
    mixed = asking(plain, [TOKENS, RAW])
    assert_same(vectors_of(engine, mixed, 40), reference(folder, mixed))


def test_all_steps_but_the_norm_are_taken(checkpoint: Callable[..., Path], reference: Any, random_batch: Any) -> None:
    torch.manual_seed(0)
    folder = checkpoint("bert", steps=[Dense(32, 40), Normalize()])
    batch = asking(random_batch(LENGTHS), [VECTORS, RAW, TOKENS])
    found = vectors_of(engine_of(folder, "packed"), batch, 40)
    assert_same(found, reference(folder, batch))
    assert abs(np.linalg.norm(found[0]) - 1) < 1e-5
    assert abs(np.linalg.norm(found[1]) - 1) > 0.01


def test_vectors_are_the_same_whatever_their_neighbours_ask_for(
    checkpoint: Callable[..., Path], random_batch: Any
) -> None:
    engine, plain = engine_of(checkpoint("bert"), "fused"), random_batch(LENGTHS)
    mixed = asking(plain, [VECTORS, TOKENS])
    rows = vectors_of(engine, mixed, 32)
    starts = np.cumsum(mixed.rows_of_each) - mixed.rows_of_each
    assert np.array_equal(rows[starts[::2]], vectors_of(engine, plain, 32)[::2])


@pytest.mark.slow
@pytest.mark.parametrize("path", ["lean", "fused", "packed", "padded"])
def test_the_real_model_s_states_and_its_vectors_before_the_norm(path: str, minilm: Path) -> None:
    """As `encode(output_value="token_embeddings")` gives them, and as transformers' model without any module behind."""
    model = SentenceTransformer(str(minilm), device="cpu", local_files_only=True)
    states = [state.numpy() for state in model.encode(TEXTS, output_value="token_embeddings")]
    plain = AutoModel.from_pretrained(minilm, local_files_only=True).eval()
    means = []
    sequences = [model.tokenizer(text, truncation=True, max_length=read_card(minilm).max_tokens) for text in TEXTS]
    for sequence in sequences:
        with torch.inference_mode():
            hidden = plain(**{name: torch.tensor([values]) for name, values in sequence.items()}).last_hidden_state
        means.append(hidden.mean(dim=1).numpy())
    ids = [np.array(sequence["input_ids"], dtype=np.int32) for sequence in sequences]
    batch = PackedBatch(np.array([each.size for each in ids], dtype=np.int32), np.concatenate(ids))
    engine = engine_of(minilm, path)
    np.testing.assert_allclose(vectors_of(engine, asking(batch, [TOKENS]), 384), np.concatenate(states), atol=1e-5)
    np.testing.assert_allclose(vectors_of(engine, asking(batch, [RAW]), 384), np.concatenate(means), atol=1e-5)


@pytest.mark.parametrize(
    ("path", "num_padding_tokens"), [("lean", 0), ("fused", 1), ("packed", 0), ("padded", 4), ("unpadded", 0)]
)
def test_padding_is_counted(
    path: str, num_padding_tokens: int, checkpoint: Callable[..., Path], random_batch: Any
) -> None:
    engine = engine_of(checkpoint("bert"), path)
    before = engine.num_padding_tokens
    vectors_of(engine, random_batch([5, 3, 3]), 32)
    assert engine.num_padding_tokens - before == num_padding_tokens
