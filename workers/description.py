"""The layers of one model: its numbers, and the full names of its tensors.

Owns the reading of config.json by the table of families (`vecd.workers.families`), and the refusal of settings that
change a layer's computation. Reads no tensor and knows no backend.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vecd.model.architecture import native_config
from vecd.model.card import ModelCard
from vecd.workers.activations import ACTIVATIONS, Activation
from vecd.workers.families import FAMILIES, Family
from vecd.workers.families import EncoderSpec as EncoderSpec
from vecd.workers.families import LayerSpec as LayerSpec


class NotDescribed(Exception):
    """No table describes this model's layers. Raised before any computation; the model then runs in another way."""


def describe(card: ModelCard, names: Collection[str]) -> EncoderSpec:
    """The layers of the model of `card`. Raises NotDescribed for another family or setting, OSError, ValueError,
    TypeError or KeyError for a config.json that cannot be read or lacks a setting."""
    family = FAMILIES.get(card.model_type)
    if family is None:
        raise NotDescribed(f"{card.model_type} has no table of its layers")
    stored = json.loads((Path(card.weights_folder) / "config.json").read_text(encoding="utf-8"))
    config = native_config(stored) or stored
    if config["model_type"] != card.model_type:
        raise NotDescribed("an architecture under another name")
    _refuse_other_computations(family, config)
    prefix = _prefix(family, names)
    encoder, epsilon, after = family.encoder, family.norm_epsilon, family.positions_after
    layers = tuple(_layer(family, config, prefix, index) for index in range(int(config[family.num_layers])))
    found = _named(
        encoder,
        prefix,
        num_heads=int(config[family.num_heads]),
        epsilon=float(config[epsilon]) if isinstance(epsilon, str) else epsilon,
        activation=config[family.activation],
        is_causal=encoder.is_causal and not _sees_later(config),
        words_factor=card.hidden_size**0.5 if family.is_scaled_by_width else 1.0,
        positions_after=int(config[after]) if isinstance(after, str) else after,
        layers=layers,
    )
    return replace(
        found,
        types=found.types if config.get("type_vocab_size") != 0 else None,
        projection=found.projection if f"{found.projection}.weight" in names else None,
    )


S = TypeVar("S", EncoderSpec, LayerSpec)


def _named(spec: S, prefix: str, **numbers: Any) -> S:
    """With the names of its tensors in full, and the numbers of one model."""
    given = ((each.name, getattr(spec, each.name)) for each in fields(spec) if each.name not in numbers)
    names: dict[str, Any] = {
        name: prefix + value if isinstance(value, str) else tuple(prefix + part for part in value)
        for name, value in given
        if isinstance(value, str | tuple)
    }
    return replace(spec, **names, **numbers)


def _prefix(family: Family, names: Collection[str]) -> str:
    for prefix in family.prefixes:
        if f"{prefix}{family.encoder.words}.weight" in names:
            return prefix
    raise NotDescribed(f"the weights have no {family.encoder.words}.weight")


def _refuse_other_computations(family: Family, config: Mapping[str, Any]) -> None:
    if ACTIVATIONS.get(config[family.activation], Activation()).onnx is None:
        raise NotDescribed(f"activation {config[family.activation]}")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise NotDescribed("a decoder: its tokens do not see later tokens")
    sees_later = _sees_later(config) and not family.may_see_later
    if family.encoder.is_causal and (sees_later or config.get("is_causal") is False):
        raise NotDescribed("a decoder whose tokens see later tokens")
    if "query_pre_attn_scalar" in config and config["query_pre_attn_scalar"] != config["head_dim"]:
        raise NotDescribed("scores that are not divided by the square root of the width of a head")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise NotDescribed(f"position_embedding_type {config['position_embedding_type']}")


def _sees_later(config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_bidirectional_attention"))


def _layer(family: Family, config: Mapping[str, Any], prefix: str, index: int) -> LayerSpec:
    window = _window(config, index)
    theta, divisor = (None, 1.0) if family.thetas is None else _rotary(family.thetas, config, window)
    at = prefix + family.layer_prefix.format(index)
    layer = _named(family.layer, at, theta=theta, frequency_divisor=divisor, window=window)
    return replace(layer, attention_norm=None) if family.is_first_norm_absent and index == 0 else layer


def _window(config: Mapping[str, Any], index: int) -> int | None:
    """The largest distance that a token of layer `index` sees; None: any. Source: transformers' classes of settings."""
    match config["model_type"]:
        case "modernbert":
            is_local = index % int(config.get("global_attn_every_n_layers", 3)) > 0
        case "qwen2" | "qwen3":
            is_local = config.get("use_sliding_window", False) and index >= config["max_window_layers"]
        case "mistral":
            is_local = config["sliding_window"] is not None
        case "gemma3_text":
            is_local = (index + 1) % int(config.get("sliding_window_pattern", 6)) > 0
        case _:
            return None
    types = config.get("layer_types")
    if types is not None:
        is_local = types[index] == "sliding_attention"
    if not is_local:
        return None
    # Where tokens see later ones, the setting counts both sides; elsewhere the token itself.
    if config["model_type"] == "modernbert":
        return int(config["local_attention"]) // 2
    return int(config["sliding_window"]) // 2 if _sees_later(config) else int(config["sliding_window"]) - 1


def _rotary(settings: Mapping[str, str], config: Mapping[str, Any], window: int | None) -> tuple[float, float]:
    kind = "full_attention" if window is None else "sliding_attention"
    rotary = config.get("rope_parameters") or {}
    rotary = rotary.get(kind, rotary)
    scaling = rotary.get("rope_type", "default")
    if config.get("rope_scaling") or scaling not in ("default", "linear"):
        raise NotDescribed("rotary positions that are scaled")
    if rotary.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)) != 1:
        raise NotDescribed("rotary positions of a part of each head")
    theta = rotary["rope_theta"] if "rope_theta" in rotary else config[settings[kind]]
    return float(theta), float(rotary["factor"]) if scaling == "linear" else 1.0


def window_band(num_queries: int, before: int, after: int) -> NDArray[np.float32]:
    """What is added to scores where tokens see `before` and `after` them alone: 0 or -inf, float32 [num_queries, keys];
    the first key is `before` the first query."""
    distances = np.arange(num_queries + before + after) - before - np.arange(num_queries)[:, None]
    return np.where((distances >= -before) & (distances <= after), np.float32(0), np.float32(-np.inf))


# --- MPNet's distances ------------------------------------------------------------------------------------------


def bias_of_distances(table: NDArray[np.float32], max_tokens: int) -> NDArray[np.float32]:
    """What MPNet adds to the scores, float32 [heads, max_tokens, max_tokens], from its table [buckets, heads]."""
    positions = np.arange(max_tokens)
    buckets = _distance_buckets(positions[None, :] - positions[:, None])
    return np.ascontiguousarray(table[buckets].transpose(2, 0, 1))


def _distance_buckets(distances: NDArray[np.int64]) -> NDArray[np.int64]:
    """Key position minus query position → 0 … _NUM_BUCKETS - 1, half of them for each direction. In each half, the
    first half of the buckets is for one distance each; the rest grow logarithmically up to 128. Source: T5, section 2.1
    of arXiv:1910.10683, as MPNet uses it."""
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
