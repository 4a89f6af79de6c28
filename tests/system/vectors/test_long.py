"""Long sequences in bfloat16, whose attention is computed in another way: at the lengths where it begins, where it is
filled up with neighbours, and where it is not; alone, among others, and at either end of a batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from tests.support.checkpoints import (
    Checkpoints,
    Reference,
    assert_same_vectors,
    batch_of,
    embed,
    engine_of,
    random_batch,
    sequences_of,
)
from vecd.workers.engines.lean import engine as lean_engine
from vecd.workers.engines.lean.graph import PIECE_TOKENS
from vecd.workers.engines.torch.fused import Attention
from vecd.workers.families.description import _distance_buckets
from vecd.workers.layout import Run

LONG = (159, 160, 161, 176, 200, 511, 512)
BATCHES = (
    (512, 3, 159, 161, 176, 200, 1, 511, 160, 40, 17),
    (200, 200, 161, 161, 161, 2),
    (3, 161),  # the long one last in the layout, the batch no multiple of 16
    (1, 1, 1, 1, 1, 512, 512),
    (158, 1, 161, 177, 415),
)
# By hidden size and number of heads: head dims of 12, 32, 8, 24 and 64, and numbers of heads that no block divides.
SHAPES = ((60, 5), (96, 3), (32, 4), (72, 3), (128, 2))


def long_checkpoint(checkpoint: Checkpoints, family: str, hidden_size: int = 32, num_heads: int = 4) -> Any:
    return checkpoint(
        family,
        pooling="cls",
        max_tokens=512,
        max_position_embeddings=600,
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_hidden_layers=2,
        # Weights so large that tokens attend to few others: or else a wrong attention would hardly show.
        initializer_range=1.2 / hidden_size**0.5,
    )


@pytest.mark.parametrize(
    ("family", "hidden_size", "num_heads"),
    [
        *(("bert", *shape) for shape in SHAPES),
        *(("mpnet", *shape) for shape in SHAPES[::2]),
        *((family, 32, 4) for family in ("roberta", "distilbert")),
    ],
)
def test_long_texts_have_the_reference_s_vectors(
    family: str, hidden_size: int, num_heads: int, checkpoint: Checkpoints, reference: Reference
) -> None:
    folder = long_checkpoint(checkpoint, family, hidden_size, num_heads)
    whole = [random_batch(lengths, seed=seed) for seed, lengths in enumerate(BATCHES)]
    exact, engine = engine_of(folder, "fused"), engine_of(folder, "fused", "bfloat16")
    alone = [batch_of([ids]) for ids in sequences_of(whole[0]) if ids.size in LONG]
    assert sorted(batch.token_ids.size for batch in alone) == sorted(LONG)
    expected = reference(folder, whole[0])
    assert_same_vectors(embed(exact, whole[0], hidden_size), expected)
    assert_same_vectors(embed(engine, whole[0], hidden_size), expected, "bfloat16")
    # float32 has been compared with the reference now, and is faster.
    for batch in (*whole[1:], *alone):
        exact_vectors = embed(exact, batch, hidden_size)
        assert_same_vectors(embed(engine, batch, hidden_size), exact_vectors, "bfloat16")


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("modernbert", {}),
        ("modernbert", {"local_attention": 600}),
        ("mistral", {}),
        ("mistral", {"sliding_window": 300}),
        ("mistral", {"sliding_window": None}),
        ("qwen3", {}),
        ("nomic_bert", {}),
        ("gte", {}),
        ("gemma3_text", {"sliding_window": 300, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}),
        ("gemma3_text", {"sliding_window": 300, "use_bidirectional_attention": False}),
    ],
)
def test_long_texts_whose_attention_is_cut_into_pieces_have_the_reference_s_vectors(
    family: str,
    settings: dict[str, Any],
    checkpoint: Checkpoints,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: dict[str, Any] = {"max_tokens": 800, "max_position_embeddings": 800, "initializer_range": 0.2}
    folder = checkpoint(family, pooling=("cls", "mean", "lasttoken"), **sizes, **settings)
    lengths = [PIECE_TOKENS, 800, 3, 300, PIECE_TOKENS + 1, 2 * PIECE_TOKENS + 1, 300, 255, 300, 700]
    batch = random_batch(lengths)
    expected = reference(folder, batch)
    engine = engine_of(folder, "lean")
    assert_same_vectors(embed(engine, batch, 96), expected)
    monkeypatch.setattr(lean_engine, "TOKENS_OF_A_PASS", 10_000)  # long texts of one length in one run
    assert_same_vectors(embed(engine, batch, 96), expected)


# --- the attention alone ------------------------------------------------------------------------------------------


def packed(lengths: Sequence[int], num_heads: int, head_dim: int, num_tokens: int) -> tuple[Tensor, list[Run]]:
    """Queries, keys and values, [num_tokens, 3 H], NaN behind the sequences, and their runs; lengths ascend."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(num_tokens, 3 * num_heads * head_dim, generator=generator)
    qkv[:, : num_heads * head_dim] *= 2.0 / head_dim**0.5
    qkv[sum(lengths) :] = torch.nan
    runs, start = [], 0
    for length in sorted(set(lengths)):
        runs.append(Run(start, lengths.count(length), length))
        start = runs[-1].stop
    return qkv, runs


def by_hand(qkv: Tensor, runs: list[Run], num_heads: int, bias: Tensor | None) -> Tensor:
    out = torch.zeros(qkv.shape[0], qkv.shape[1] // 3)
    for run in runs:
        for start in range(run.start, run.stop, run.length):
            tokens = slice(start, start + run.length)
            query, key, value = qkv[tokens].view(run.length, 3, num_heads, -1).permute(1, 2, 0, 3).unbind(0)
            scores = query @ key.transpose(1, 2)
            if bias is not None:
                scores = scores + bias[:, : run.length, : run.length]
            out[tokens] = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
    return out


@pytest.mark.parametrize(("num_heads", "head_dim"), [(5, 8), (3, 12), (4, 32), (1, 64)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("lengths", "num_tokens"),
    [
        ((160,), 160),
        ((161,), 176),
        ((161,), 161),  # too few to fill up with: the other way
        ((159, 160), 320),
        ((5, 161, 161, 170), 512),
        ((1, 175, 176, 200), 560),
        ((15, 511, 512), 1040),
    ],
)
def test_attention_is_to_oneself_alone(
    lengths: tuple[int, ...], num_tokens: int, num_heads: int, head_dim: int, has_bias: bool
) -> None:
    qkv, runs = packed(lengths, num_heads, head_dim, num_tokens)
    qkv = qkv.bfloat16()
    bias = torch.randn(num_heads, 512, 512, generator=torch.Generator().manual_seed(1)) if has_bias else None
    out = Attention(num_heads, bias)(qkv, runs)
    assert out.dtype == torch.bfloat16
    # Scores of up to 10 are rounded to a 256th of themselves, before they become exponents.
    difference = (out.float() - by_hand(qkv.float(), runs, num_heads, bias)).abs()
    assert difference.max() < 0.1
    assert difference.mean() < 4e-3
    assert not out[sum(lengths) :].any()


@pytest.mark.parametrize("others", [torch.nan, torch.inf, -torch.inf, 1e38])
@pytest.mark.parametrize("has_bias", [False, True])
def test_whatever_the_neighbours_hold_attention_is_the_same_to_the_bit(others: float, has_bias: bool) -> None:
    lengths = (1, 1, 1, 161, 161, 161, 171)
    qkv, runs = packed(lengths, 5, 8, 672)
    qkv = qkv.bfloat16()
    attention = Attention(5, torch.randn(5, 512, 512) if has_bias else None)
    expected = attention(qkv, runs)
    for index, length in enumerate(lengths):
        own = slice(sum(lengths[:index]), sum(lengths[:index]) + length)
        planted = torch.full_like(qkv, others)
        planted[own] = qkv[own]
        assert torch.equal(attention(planted, runs)[own], expected[own])


def test_distances_have_the_buckets_of_transformers_mpnet() -> None:
    distances = torch.arange(-600, 601)
    buckets = _distance_buckets(distances.numpy())
    assert np.array_equal(buckets, MPNetEncoder.relative_position_bucket(distances).numpy())
    assert set(buckets.tolist()) <= set(range(32))
    # As a table of a whole text, too: vectorized logarithms may round otherwise in another place.
    positions = torch.arange(600)
    square = positions[None, :] - positions[:, None]
    assert np.array_equal(_distance_buckets(square.numpy()), MPNetEncoder.relative_position_bucket(square).numpy())
