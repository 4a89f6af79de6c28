"""What else a sequence may ask for than the model's vector: sentence-transformers' own rows are the measure."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers.sentence_transformer.modules import Dense, Normalize

from tests.support.checkpoints import Checkpoints, engine_of, random_batch, reference
from vecd.shm.output import Output
from vecd.workers.batch import PackedBatch
from vecd.workers.parity import vectors_of

LENGTHS = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]
VECTORS, RAW, TOKENS = Output.VECTORS, Output.UNNORMALIZED, Output.TOKENS


def asking(batch: PackedBatch, outputs: Sequence[int]) -> PackedBatch:
    return replace(batch, outputs=np.resize(np.array(outputs, dtype=np.uint8), batch.lengths.size))


def assert_same(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """To 1e-5, or that part of the largest number: hidden states have no length of 1."""
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-5 * max(1.0, float(np.abs(expected).max())), rtol=0)


@pytest.mark.parametrize(
    ("path", "outputs"),
    [
        *((path, [VECTORS, RAW, TOKENS]) for path in ("lean", "fused", "packed", "padded", "unpadded")),
        *((path, outputs) for path in ("lean", "fused") for outputs in ([TOKENS, TOKENS, VECTORS], [RAW], [VECTORS])),
    ],
)
def test_rows_are_the_reference_s_on_every_path(path: str, outputs: list[int], checkpoint: Checkpoints) -> None:
    folder, batch = checkpoint("bert"), asking(random_batch(LENGTHS), outputs)
    assert_same(vectors_of(engine_of(folder, path), batch, 32), reference(folder, batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "path", "pooling"),
    [
        ("modernbert", "lean", "cls"),
        ("qwen3", "lean", "lasttoken"),
        ("mpnet", "fused", "mean"),
        ("gemma3_text", "packed", "mean"),
        ("deberta-v2", "padded", "mean"),
        ("fnet", "unpadded", "max"),
        *(
            pytest.param(family, path, pooling, marks=pytest.mark.full)
            for family, path, pooling in (
                ("electra", "lean", "mean"),
                ("qwen2", "lean", "lasttoken"),
                ("mistral", "lean", "mean"),
                ("xlm-roberta", "fused", "cls"),
                ("distilbert", "fused", "cls"),
                ("modernbert", "packed", "cls"),
            )
        ),
    ],
)
def test_rows_are_the_reference_s_for_every_family(
    family: str, path: str, pooling: str, checkpoint: Checkpoints
) -> None:
    """Whatever is pooled: an agreement of vectors alone would not see the tokens that pooling leaves out."""
    folder = checkpoint(family, pooling=pooling)
    batch = asking(random_batch(LENGTHS), [VECTORS, RAW, TOKENS])
    assert_same(vectors_of(engine_of(folder, path), batch, 32), reference(folder, batch))


def test_states_are_shorter_than_vectors_and_zeros_fill_the_row(checkpoint: Checkpoints) -> None:
    folder = checkpoint("bert", pooling=("cls", "mean"))
    batch = asking(random_batch(LENGTHS), [TOKENS, VECTORS, RAW])
    found = vectors_of(engine_of(folder, "fused"), batch, 64)
    assert_same(found, reference(folder, batch))
    assert not found[:5, 32:].any()


def test_without_a_norm_at_the_end_the_unnormalized_vector_is_the_vector(checkpoint: Checkpoints) -> None:
    """Also where a step before the last normalizes: only the last one is left out."""
    torch.manual_seed(0)
    folder = checkpoint("bert", steps=[Normalize(), Dense(32, 40)])
    engine, plain = engine_of(folder, "fused"), random_batch(LENGTHS)
    found = vectors_of(engine, asking(plain, [RAW]), 40)
    assert np.array_equal(found, vectors_of(engine, plain, 40))
    assert_same(found, reference(folder, plain))
    mixed = asking(plain, [TOKENS, RAW])
    assert_same(vectors_of(engine, mixed, 40), reference(folder, mixed))


@pytest.mark.parametrize(
    ("path", "num_padding_tokens"), [("lean", 0), ("fused", 1), ("packed", 0), ("padded", 4), ("unpadded", 0)]
)
def test_padding_is_counted(path: str, num_padding_tokens: int, checkpoint: Checkpoints) -> None:
    engine = engine_of(checkpoint("bert"), path)
    before = engine.num_padding_tokens
    vectors_of(engine, random_batch([5, 3, 3]), 32)
    assert engine.num_padding_tokens - before == num_padding_tokens
