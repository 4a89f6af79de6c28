"""The layers of one model: its numbers, and the full names of its tensors.

Owns the reading of config.json by the table of families (`vecd.workers.families.encoders`), and the refusal of settings
that change a layer's computation. Reads no tensor and knows no backend. Called by the backends that compute the layers,
`vecd.workers.engines.lean.graph` and `vecd.workers.engines.torch.fused`.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecd.shm.card import ModelCard
from vecd.workers.families.encoders import FAMILIES, Family

ACTIVATIONS = frozenset({"gelu", "gelu_new", "relu"})
"""By transformers' name; gelu_new is the approximation with tanh. Every backend has all of them."""


class NotDescribed(Exception):
    """No table describes this model's layers. Raised before any computation; the model then runs in another way."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Full names of tensors, without ".weight" and ".bias"."""

    qkv: tuple[str, str, str]
    """Query, key and value."""
    out: str
    attention_norm: str
    up: str
    down: str
    norm: str


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """A post-LayerNorm encoder, whose layers are all alike:

    x ─┬─ qkv ─ attention ─ out + x ─ norm ─┬─ up, activation ─ down + x ─ norm ─ x
       └───────────────────────┘            └──────────────────────┘
    """

    num_heads: int
    epsilon: float
    """Of each LayerNorm."""
    activation: str
    """One of ACTIVATIONS."""
    words: str
    positions: str
    types: str | None
    """Every token has type 0, as in a single sentence. None: the family has no types."""
    embedding_norm: str
    projection: str | None
    """ELECTRA's, from the tables' width to the layers', after the norm; None: the widths are the same."""
    positions_after: int | None
    """The padding id after which positions begin; None: positions begin at 0."""
    distance_bias: str | None
    """MPNet's table of a bias by the distance of two tokens, the same in every layer, [buckets, heads]."""
    layers: tuple[LayerSpec, ...]


def describe(card: ModelCard, names: Collection[str]) -> EncoderSpec:
    """The layers of the model of `card`, whose files have tensors with these names.

    Raises NotDescribed for another family or setting, OSError, ValueError, TypeError or KeyError for a config.json that
    cannot be read or lacks a setting.
    """
    family = FAMILIES.get(card.model_type)
    if family is None:
        raise NotDescribed(f"{card.model_type} has no table of its layers")
    config = json.loads((Path(card.weights_folder) / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != card.model_type or "auto_map" in config:
        raise NotDescribed("an architecture under another name")
    _refuse_other_computations(family, config)
    prefix = _prefix(family, names)
    epsilon, after = family.norm_epsilon, family.positions_after
    projection = None if family.projection is None else prefix + family.projection
    return EncoderSpec(
        num_heads=int(config[family.num_heads]),
        epsilon=float(config[epsilon]) if isinstance(epsilon, str) else epsilon,
        activation=config[family.activation],
        words=f"{prefix}embeddings.word_embeddings",
        positions=f"{prefix}embeddings.position_embeddings",
        types=f"{prefix}embeddings.token_type_embeddings" if family.has_token_types else None,
        embedding_norm=f"{prefix}embeddings.LayerNorm",
        projection=projection if f"{projection}.weight" in names else None,
        positions_after=int(config[after]) if isinstance(after, str) else after,
        distance_bias=None if family.distance_bias is None else prefix + family.distance_bias,
        layers=tuple(
            _layer(family, prefix + family.layer.format(index)) for index in range(int(config[family.num_layers]))
        ),
    )


def _prefix(family: Family, names: Collection[str]) -> str:
    for prefix in family.prefixes:
        if f"{prefix}embeddings.word_embeddings.weight" in names:
            return prefix
    raise NotDescribed("the weights have no embeddings.word_embeddings.weight")


def _refuse_other_computations(family: Family, config: Mapping[str, Any]) -> None:
    if config[family.activation] not in ACTIVATIONS:
        raise NotDescribed(f"activation {config[family.activation]}")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise NotDescribed("a decoder: its tokens do not see later tokens")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise NotDescribed(f"position_embedding_type {config['position_embedding_type']}")


def _layer(family: Family, at: str) -> LayerSpec:
    return LayerSpec(
        qkv=(at + family.query, at + family.key, at + family.value),
        out=at + family.out,
        attention_norm=at + family.attention_norm,
        up=at + family.up,
        down=at + family.down,
        norm=at + family.norm,
    )


# --- MPNet's distances ------------------------------------------------------------------------------------------


def bias_of_distances(table: NDArray[np.float32], max_tokens: int) -> NDArray[np.float32]:
    """What MPNet adds to the scores, float32 [heads, max_tokens, max_tokens], from its table [buckets, heads]."""
    positions = np.arange(max_tokens)
    buckets = _distance_buckets(positions[None, :] - positions[:, None])
    return np.ascontiguousarray(table[buckets].transpose(2, 0, 1))


def _distance_buckets(distances: NDArray[np.int64]) -> NDArray[np.int64]:
    """Key position minus query position → 0 … _NUM_BUCKETS - 1, half of them for each direction.

    In each half, the first half of the buckets is for one distance each; the rest grow logarithmically up to 128, and
    the last is for all beyond. Source: T5, section 2.1 of arXiv:1910.10683, as MPNet uses it.
    """
    per_direction = _NUM_BUCKETS // 2
    num_exact = per_direction // 2
    apart = np.abs(distances)
    # float32, as in transformers: in float64 some distances fall into another bucket.
    ratio = np.maximum(apart, 1).astype(np.float32) / np.float32(num_exact)
    logarithmic = np.log(ratio) / np.float32(np.log(_FARTHEST / num_exact))
    coarse = np.minimum(num_exact + (logarithmic * (per_direction - num_exact)).astype(np.int64), per_direction - 1)
    buckets: NDArray[np.int64] = np.where(apart < num_exact, apart, coarse) + (distances > 0) * per_direction
    return buckets


_NUM_BUCKETS = 32
_FARTHEST = 128
"""Tokens. transformers' MPNet has both fixed: relative_attention_num_buckets sizes the table, and is not asked."""
