"""Long sequences in bfloat16, whose attention is computed in another way: at the lengths where it begins, where it is
filled up with neighbours, and where it is not; alone, among others, and at either end of a batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.t5.modeling_t5 import T5Attention

from tests.support.checkpoints import (
    FLOATS_OF_FUSED,
    Checkpoints,
    Reference,
    assert_same_vectors,
    batch_of,
    embed,
    engine_of,
    random_batch,
    sequences_of,
)
from tests.support.soak.form import in_full
from vecd.workers.batch import Run
from vecd.workers.description import EncoderSpec, _distance_buckets, relative_rows
from vecd.workers.families import FUSED_FAMILIES
from vecd.workers.onnx import engine as lean_engine
from vecd.workers.onnx.graph import PIECE_TOKENS
from vecd.workers.torch.attention import Attention

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
        ("bert", *SHAPES[0]),
        ("mpnet", *SHAPES[2]),
        *in_full(*(("bert", *shape) for shape in SHAPES[1:]), *(("mpnet", *shape) for shape in (SHAPES[0], SHAPES[4]))),
        *in_full(*((family, 32, 4) for family in ("roberta", "distilbert"))),
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
        ("modernbert", {"local_attention": 600}),
        ("mistral", {"sliding_window": 300}),
        ("gemma3_text", {"sliding_window": 300, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}),
        *in_full(
            ("modernbert", {}),
            ("mistral", {}),
            ("mistral", {"sliding_window": None}),
            ("qwen3", {}),
            ("nomic_bert", {}),
            ("gte", {}),
            ("gemma3_text", {"sliding_window": 300, "use_bidirectional_attention": False}),
        ),
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
    for dtype in FLOATS_OF_FUSED if family in FUSED_FAMILIES else ():
        assert_same_vectors(embed(engine_of(folder, "fused", dtype), batch, 96), expected, dtype)
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


@pytest.mark.parametrize("others", [torch.nan, torch.inf, -torch.inf, 1e38])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("lengths", "num_tokens"),
    [
        ((1, 1, 1, 161, 161, 161, 171), 672),
        ((1, 161, 161, 161), 496),  # the last is filled up with neighbours before it
    ],
)
def test_whatever_the_neighbours_hold_attention_is_the_same_to_the_bit(
    lengths: tuple[int, ...], num_tokens: int, has_bias: bool, others: float
) -> None:
    qkv, runs = packed(lengths, 5, 8, num_tokens)
    qkv = qkv.bfloat16()
    attention = Attention(5, 5, torch.randn(5, 512, 512) if has_bias else None)
    expected = attention(qkv, runs)
    for index, length in enumerate(lengths):
        own = slice(sum(lengths[:index]), sum(lengths[:index]) + length)
        planted = torch.full_like(qkv, others)
        planted[own] = qkv[own]
        assert torch.equal(attention(planted, runs)[own], expected[own])


@pytest.mark.parametrize(("num_buckets", "farthest"), [(32, 128), (20, 60)])
def test_distances_have_the_buckets_of_transformers_t5_and_mpnet(num_buckets: int, farthest: int) -> None:
    def expected(distances: torch.Tensor) -> NDArray[np.int64]:
        sizes = {"num_buckets": num_buckets, "max_distance": farthest}
        found = MPNetEncoder.relative_position_bucket(distances, **sizes).numpy()
        assert np.array_equal(found, T5Attention._relative_position_bucket(distances, **sizes).numpy())
        return found

    distances = torch.arange(-600, 601)
    buckets = _distance_buckets(distances.numpy(), num_buckets, farthest)
    assert np.array_equal(buckets, expected(distances))
    assert set(buckets.tolist()) <= set(range(num_buckets))
    # As a table of a whole text, too: vectorized logarithms may round otherwise in another place.
    positions = torch.arange(600)
    square = positions[None, :] - positions[:, None]
    assert np.array_equal(_distance_buckets(square.numpy(), num_buckets, farthest), expected(square))


@pytest.mark.parametrize(("span", "farthest"), [(256, 512), (512, 0), (256, 1024)])
def test_distances_have_the_rows_of_transformers_deberta(span: int, farthest: int) -> None:
    encoder = EncoderSpec(relative_span=span, farthest=farthest)
    buckets = -1 if not farthest else span
    tokens = torch.zeros(512, 1)
    distances = build_relative_position(tokens, tokens, buckets, farthest or span)[0]
    expected = (distances + span).clamp(0, 2 * span - 1).numpy()
    of_keys, of_queries = relative_rows(encoder, 512)
    positions = np.arange(512)
    apart = positions[None, :] - positions[:, None]
    assert np.array_equal(of_keys[apart + 512], expected)
    assert np.array_equal(of_queries[apart.T + 512], expected)
