"""A vector is its own sequence's: no split into batches, no neighbour, and no token that is computed for nothing shows
in it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.checkpoints import (
    VOCAB_SIZE,
    Checkpoints,
    assert_same_vectors,
    batch_of,
    change_weights,
    cosines_of,
    embed,
    engine_of,
    random_batch,
    sequences_of,
)
from tests.support.soak.form import in_full
from vecd.workers.batch import Engine

BERT_RELATIVES = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "electra")
FUSED = (*BERT_RELATIVES, "modernbert", "qwen2", "qwen3", "mistral")
LEAN = (*FUSED, "nomic_bert", "gte", "gemma3_text")
FUSED_DTYPES = ["float32", "bfloat16"]
Check: TypeAlias = Callable[[Any, Any], None]

LENGTHS = [5, 1, 30, 60, 7, 5, 2, 1, 12, 12, 59]
LONG_LENGTHS = [161, 3, 200, 159, 161, 40, 176]
LONG_SETTINGS: dict[str, Any] = {
    "pooling": "cls",
    "max_tokens": 512,
    "max_position_embeddings": 600,
    "num_hidden_layers": 2,
}


def check_splits(engine: Engine, check: Callable[[Any, Any], None], lengths: list[int], examples: int) -> None:
    """`check` the vectors of the same sequences in other batches, in another order, against those of one batch."""
    sequences = sequences_of(random_batch(lengths))
    together = embed(engine, batch_of(sequences))

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(st.permutations(range(len(sequences))), st.sets(st.integers(1, len(sequences) - 1)))
    def check_split(order: list[int], cuts: set[int]) -> None:
        for part in np.split(np.array(order), sorted(cuts)):
            check(embed(engine, batch_of([sequences[index] for index in part])), together[part])

    check_split()


@pytest.mark.parametrize(
    ("family", "path"),
    [
        *((family, path) for path in ("lean", "fused") for family in ("bert", "qwen3")),
        ("mistral", "packed"),
        ("bert", "padded"),
        ("fnet", "unpadded"),
        *in_full(*((family, "lean") for family in LEAN if family not in ("bert", "qwen3"))),
        *in_full(*((family, "fused") for family in FUSED if family not in ("bert", "qwen3"))),
        *in_full(("bert", "packed"), ("modernbert", "packed")),
    ],
)
def test_any_split_into_batches_gives_the_same_vectors(family: str, path: str, checkpoint: Checkpoints) -> None:
    check_splits(engine_of(checkpoint(family), path), assert_same_vectors, LENGTHS, examples=8)


@pytest.mark.parametrize("family", [*LEAN[:1], *in_full(*LEAN[1:])])
def test_any_split_gives_the_same_vectors_in_int8(family: str, checkpoint: Checkpoints) -> None:
    check_splits(engine_of(checkpoint(family), "lean", "int8"), assert_same_vectors, LENGTHS, examples=4)


@pytest.mark.parametrize(
    ("family", "path"),
    [
        ("modernbert", "lean"),
        ("mpnet", "fused"),
        *in_full(*((family, "lean") for family in ("bert", "mpnet", "qwen3", "mistral"))),
        *in_full(*((family, "fused") for family in ("bert", "modernbert", "qwen3", "mistral"))),
    ],
)
def test_any_split_of_long_texts_gives_the_same_vectors(family: str, path: str, checkpoint: Checkpoints) -> None:
    engine = engine_of(checkpoint(family, **LONG_SETTINGS), path)
    check_splits(engine, assert_same_vectors, LONG_LENGTHS, examples=4)


def assert_nearly_the_same(found: Any, expected: Any) -> None:
    assert cosines_of(found, expected).min() > 0.9999
    np.testing.assert_allclose(found, expected, atol=1e-2, rtol=0)


@pytest.mark.parametrize("family", ["bert", "mistral", *in_full(*FUSED[1:-1])])
def test_in_bfloat16_any_split_gives_nearly_the_same_vectors(family: str, checkpoint: Checkpoints) -> None:
    engine = engine_of(checkpoint(family, **LONG_SETTINGS), "fused", "bfloat16")
    check_splits(engine, assert_nearly_the_same, [5, 1, 60, 7, *LONG_LENGTHS], examples=6)


# --- a token that spoils its text, and no other -------------------------------------------------------------------

SPOILT, HARMLESS = 7, 8


def word_embeddings(weights: dict[str, Tensor]) -> Tensor:
    """The table, which is the first with so many rows."""
    named = ("word_embeddings.weight", "embed_tokens.weight", "tok_embeddings.weight")
    return next(tensor for name, tensor in weights.items() if name.endswith(named))


@pytest.mark.parametrize(
    ("family", "path", "dtype"),
    [
        *((family, "lean", "float32") for family in ("bert", "gemma3_text")),
        *((family, "fused", dtype) for family in ("bert", "qwen3") for dtype in FUSED_DTYPES),
        *((family, "packed", "float32") for family in ("bert", "modernbert")),
        ("bert", "packed", "bfloat16"),
        ("bert", "padded", "float16"),
        ("fnet", "unpadded", "float32"),
        *in_full(*((family, "lean", "float32") for family in LEAN[1:-1])),
        *in_full(*((family, "fused", dtype) for family in FUSED[1:] for dtype in FUSED_DTYPES if family != "qwen3")),
        *in_full(*((family, "packed", "float32") for family in ("qwen3", "gemma3_text"))),
        *in_full(("bert", "packed", "float16"), ("bert", "padded", "bfloat16"), ("bert", "padded", "float32")),
    ],
)
def test_what_is_not_finite_stays_in_its_own_text(
    family: str, path: str, dtype: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint(family, **LONG_SETTINGS), tmp_path / "spoilt")

    def spoil(weights: dict[str, Tensor]) -> None:
        word_embeddings(weights)[SPOILT] = torch.nan
        word_embeddings(weights)[SPOILT, 0] = torch.inf

    engine = engine_of(change_weights(folder, spoil), path, dtype)
    rng = np.random.default_rng(0)
    lengths = [161, 3, 200, 3, 161, 161, 1, 176, 3, 1]
    clean = [rng.integers(HARMLESS, VOCAB_SIZE, length, dtype=np.int32) for length in lengths]
    expected = embed(engine, batch_of(clean))
    assert np.isfinite(expected).all()
    for chosen in ([0], [2], [3], [4], [7], [6, 8], [0, 1, 5]):
        spoilt = [ids.copy() for ids in clean]
        for index in chosen:
            spoilt[index][lengths[index] // 2] = SPOILT
        vectors = embed(engine, batch_of(spoilt))
        others = np.setdiff1d(np.arange(len(lengths)), chosen)
        assert np.isnan(vectors[chosen]).all()
        # To the bit: the batch has the same shape, so that everything is summed in the same order.
        assert np.array_equal(vectors[others], expected[others]), chosen


@pytest.mark.parametrize("family", ["bert", "mistral", *in_full(*FUSED[1:-1])])
@pytest.mark.parametrize("dtype", FUSED_DTYPES)
def test_tokens_that_are_computed_to_round_up_never_show(
    family: str, dtype: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """They are word 0 at position 0; so nobody else may be when these are spoilt."""
    plain = checkpoint(family, **LONG_SETTINGS)
    folder = shutil.copytree(plain, tmp_path / "spoilt")

    def spoil(weights: dict[str, Tensor]) -> None:
        word_embeddings(weights)[0] = torch.nan

    engine, expected = engine_of(change_weights(folder, spoil), "fused", dtype), engine_of(plain, "fused", dtype)
    rng = np.random.default_rng(0)
    for lengths in ([1], [2], [3], [5], [1, 1, 1], [127, 2], [161], [161, 161], [200, 161, 7], [400, 500, 161]):
        batch = batch_of([rng.integers(2, VOCAB_SIZE, length, dtype=np.int32) for length in lengths])
        assert np.array_equal(embed(engine, batch), embed(expected, batch)), lengths


def test_every_number_of_tokens_gives_the_same_vector(checkpoint: Checkpoints) -> None:
    """One text beside others that fill the batch up to every number of tokens that is rounded differently."""
    engine = engine_of(checkpoint("bert"), "fused")
    text = sequences_of(random_batch([9]))[0]
    alone = embed(engine, batch_of([text]))
    for num_tokens in (*range(1, 18), 115, 119, 120, 135, 136, 1014, 1015, 1016, 1039, 4087, 4088, 4119):
        others = sequences_of(random_batch([60] * (num_tokens // 60) + [num_tokens % 60 or 1], seed=num_tokens))
        assert_same_vectors(embed(engine, batch_of([*others, text]))[-1:], alone)
