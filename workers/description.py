"""The layers of one model: its numbers, and the full names of its tensors.

Owns the reading of config.json by the table of families (`vecd.workers.families`), and the refusal of settings that
change a layer's computation. Reads no tensor and knows no backend.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vecd.base.files import JsonMapping
from vecd.model.architecture import native_config
from vecd.model.card import ModelCard
from vecd.workers.activations import ACTIVATIONS, Activation, Floats
from vecd.workers.families import FAMILIES, Family
from vecd.workers.families import EncoderSpec as EncoderSpec
from vecd.workers.families import LayerSpec as LayerSpec
from vecd.workers.families import RotaryScaling as RotaryScaling


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
    placeholders: tuple[int, ...] = ()
    if config["model_type"] == "embedding_gemma2":
        config, placeholders = config["text_config"], _placeholders(config)
    if config["model_type"] != card.model_type:
        raise NotDescribed("an architecture under another name")
    if family.encoder.distance_bias is not None and card.max_tokens > _MOST_DISTANCES:
        raise NotDescribed(f"texts of {card.max_tokens} tokens; the table of their distances has {_MOST_DISTANCES}")
    config, family = _settled(config, family)
    _refuse_other_computations(family, config)
    prefix = _prefix(family, names)
    encoder, epsilon, after = family.encoder, family.norm_epsilon, family.positions_after
    num_heads = int(config[family.num_heads])
    layers = tuple(_layer(family, config, prefix, index) for index in range(int(config[family.num_layers])))
    if family.has_slopes:
        # A window that hides no token: what is cut out of a band for each piece of a text is the bias, too.
        layers = tuple(replace(layer, window=card.max_tokens) for layer in layers)
    if config["model_type"] == "jina_bert" and f"{layers[0].query_norm}.weight" not in names:
        layers = tuple(replace(layer, query_norm=None, key_norm=None) for layer in layers)
    found = _named(
        encoder,
        prefix,
        num_heads=num_heads,
        slopes=alibi_slopes(num_heads) if family.has_slopes else (),
        experts_per_token=0 if family.every_with_experts is None else int(config["moe_top_k"]),
        epsilon=float(config[epsilon]) if isinstance(epsilon, str) else epsilon,
        activation=config[family.activation],
        is_causal=encoder.is_causal and not _sees_later(config),
        words_factor=int(config["hidden_size"]) ** 0.5 if family.is_scaled_by_width else 1.0,
        placeholders=placeholders,
        positions_after=int(config[after]) if isinstance(after, str) else after,
        layers=layers,
    )
    return replace(
        found,
        types=found.types if config.get("type_vocab_size") != 0 else None,
        projection=found.projection if f"{found.projection}.weight" in names else None,
    )


_MOST_DISTANCES = 2048
"""Of MPNet's and T5's tokens: twelve heads then take 200 MB for each pair of them."""


def _placeholders(config: JsonMapping) -> tuple[int, ...]:
    """Where a text has a token that stands for images or sounds, the whole model reads padding."""
    names = (f"{kind}_token_id" for kind in ("image", "video", "audio"))
    return int(config["text_config"]["pad_token_id"]), *(int(config[name]) for name in names)


def _settled(config: JsonMapping, family: Family) -> tuple[JsonMapping, Family]:
    """With what a model's settings say of the parts in which those of its family differ."""
    match config["model_type"]:
        case "t5":
            return _of_t5(config, family)
        case "deberta-v2":
            return config, _of_deberta(config, family)
    return config, family


def _of_t5(config: JsonMapping, family: Family) -> tuple[JsonMapping, Family]:
    """Source: T5Config in transformers."""
    gate, _, activation = config.get("feed_forward_proj", "relu").rpartition("-")
    if gate not in ("", "gated"):
        raise NotDescribed(f"feed_forward_proj {config['feed_forward_proj']}")
    is_gated = gate == "gated"
    encoder = replace(
        family.encoder,
        is_gated=is_gated,
        num_buckets=int(config["relative_attention_num_buckets"]),
        farthest=int(config.get("relative_attention_max_distance", 128)),
    )
    [up] = family.layer.up
    layer = replace(family.layer, up=(f"{up}_0", f"{up}_1")) if is_gated else family.layer
    activation = "gelu_new" if is_gated and activation == "gelu" else activation
    return {**config, family.activation: activation}, replace(family, encoder=encoder, layer=layer)


def _of_deberta(config: JsonMapping, family: Family) -> Family:
    """Source: DebertaV2Config, DebertaV2Encoder and DisentangledSelfAttention in transformers."""
    width, num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kinds = config.get("pos_att_type") or ()
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    for name, is_known in (
        ("relative_attention", config.get("relative_attention", False)),
        ("pos_att_type", {kind.strip() for kind in kinds} == {"c2p", "p2c"}),
        ("conv_kernel_size", config.get("conv_kernel_size", 0) < 1),
        ("embedding_size", config.get("embedding_size", width) == width),
    ):
        if not is_known:
            raise NotDescribed(f"{name} {config.get(name)}")
    farthest = int(config.get("max_relative_positions", -1))
    farthest = int(config["max_position_embeddings"]) if farthest < 1 else farthest
    buckets = int(config.get("position_buckets", -1))
    norms = {each.strip() for each in str(config.get("norm_rel_ebd", "none")).lower().split("|")}
    head_dim = int(config.get("attention_head_size", width // num_heads))
    encoder = replace(
        family.encoder,
        positions=family.encoder.positions if config.get("position_biased_input", True) else None,
        relative_norm=family.encoder.relative_norm if "layer_norm" in norms else None,
        score_scale=(3 * head_dim) ** -0.5,
        relative_span=buckets if buckets > 0 else farthest,
        farthest=farthest if buckets > 0 else 0,
    )
    layer = family.layer
    if config.get("share_att_key", False):
        layer = replace(layer, position_query=layer.qkv[0], position_key=layer.qkv[1])
    return replace(family, encoder=encoder, layer=layer)


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
    if config.get("attn_logit_softcapping") is not None:
        raise NotDescribed("scores that are capped (attn_logit_softcapping)")
    if config["model_type"] == "gemma3_text" and config["query_pre_attn_scalar"] != config["head_dim"]:
        raise NotDescribed("scores that are not divided by the square root of the width of a head")
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise NotDescribed(f"position_embedding_type {config['position_embedding_type']}")


def _sees_later(config: Mapping[str, Any]) -> bool:
    """What the settings of a causal family say. `vecd.model.architecture` has translated the second one where
    transformers does not read it."""
    return config.get("is_causal") is False or bool(config.get("use_bidirectional_attention"))


def _layer(family: Family, config: Mapping[str, Any], prefix: str, index: int) -> LayerSpec:
    window = _window(config, index)
    theta, scaling = (None, RotaryScaling()) if family.thetas is None else _rotary(family.thetas, config, window)
    at = prefix + family.layer_prefix.format(index)
    layer = _named(family.layer, at, theta=theta, scaling=scaling, window=window)
    if family.every_with_experts is not None and index % int(config[family.every_with_experts]) != 1:
        layer = replace(layer, router=None, experts=None)
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
        case "gemma3_text" | "embedding_gemma2_text":
            is_local = (index + 1) % int(config.get("sliding_window_pattern", 6)) > 0
        case _:
            return None
    types = config.get("layer_types")
    if types is not None:
        is_local = types[index] == "sliding_attention"
    if not is_local:
        return None
    if config["model_type"] == "modernbert":
        return int(config["local_attention"]) // 2
    window = int(config["sliding_window"])
    if config["model_type"] == "embedding_gemma2_text":
        return window
    if config["model_type"] == "gemma3_text" and config.get("use_bidirectional_attention"):  # counts both sides
        window = window // 2 + 1
    # Counts the token itself, unless the mask is that of an encoder.
    return window if config.get("is_causal") is False else window - 1


def _rotary(settings: Mapping[str, str], config: Mapping[str, Any], window: int | None) -> tuple[float, RotaryScaling]:
    kind = "full_attention" if window is None else "sliding_attention"
    if config.get("rope_scaling") and len(set(settings.values())) > 1:
        raise NotDescribed("rotary positions that are scaled in some layers only")
    rotary = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rotary = rotary.get(kind, rotary)
    if rotary.get("partial_rotary_factor", config.get("partial_rotary_factor", 1)) != 1:
        raise NotDescribed("rotary positions of a part of each head")
    theta = rotary["rope_theta"] if "rope_theta" in rotary else config[settings[kind]]
    return float(theta), _scaling(rotary)


def _scaling(rotary: Mapping[str, Any]) -> RotaryScaling:
    match rotary.get("rope_type", rotary.get("type", "default")):
        case "default":
            return RotaryScaling()
        case "linear":
            return RotaryScaling(float(rotary["factor"]))
        case "llama3":
            turns = (float(rotary[name]) for name in ("low_freq_factor", "high_freq_factor"))
            return RotaryScaling(float(rotary["factor"]), int(rotary["original_max_position_embeddings"]), *turns)
        case other:
            raise NotDescribed(f"rotary positions that are scaled ({other})")


def frequencies_of(theta: float, scaling: RotaryScaling, head_dim: int) -> NDArray[np.float32]:
    """Of each pair of a head, in radians per token: float32 [head_dim / 2]; float32 at every step, as in
    transformers."""
    one = np.float32(1)
    frequencies = one / np.power(np.float32(theta), np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    divided: NDArray[np.float32] = frequencies / np.float32(scaling.divisor)
    if not scaling.context:
        return divided
    turns = np.float32(scaling.context) / (np.float32(2 * np.pi) / frequencies)
    span = np.float32(scaling.most_turns - scaling.least_turns)
    kept = np.clip((turns - np.float32(scaling.least_turns)) / span, 0, 1)
    mixed: NDArray[np.float32] = (one - kept) * divided + kept * frequencies
    return mixed


def window_band(num_queries: int, before: int, after: int, *, falls: bool = False) -> NDArray[np.float32]:
    """What is added to scores where tokens see `before` and `after` them alone: 0 or -inf, float32 [num_queries, keys];
    the first key is `before` the first query. `falls`: minus the distance of the two, instead of 0."""
    distances = np.arange(num_queries + before + after) - before - np.arange(num_queries)[:, None]
    seen = -np.abs(distances).astype(np.float32) if falls else np.float32(0)
    return np.where((distances >= -before) & (distances <= after), seen, np.float32(-np.inf))


# --- distances of two tokens -----------------------------------------------------------------------------------


def bias_of_distances(encoder: EncoderSpec, table: Floats, max_tokens: int) -> Floats:
    """What MPNet and T5 add to the scores, [heads, max_tokens, max_tokens], from their table [buckets, heads]."""
    positions = np.arange(max_tokens)
    buckets = _distance_buckets(positions[None, :] - positions[:, None], encoder.num_buckets, encoder.farthest)
    return np.ascontiguousarray(table[buckets].transpose(2, 0, 1))


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Of ALiBi: 2^(-8/n), 2^(-16/n), … for a power of two n; for another number those of the power below, and every
    other one of the power above. Source: attention_with_linear_biases of ofirpress, as in Jina's BERT."""
    power = 2 ** (num_heads.bit_length() - 1)
    first = tuple(2 ** (-8 * (index + 1) / power) for index in range(power))
    return first + alibi_slopes(2 * power)[: 2 * (num_heads - power) : 2] if power < num_heads else first


def _distance_buckets(distances: NDArray[np.int64], num_buckets: int, farthest: int) -> NDArray[np.int64]:
    """Key position minus query position → 0 … num_buckets - 1, half of them for each direction. In each half, the
    first half of the buckets is for one distance each; the rest grow logarithmically up to `farthest`. Source: T5,
    section 2.1 of arXiv:1910.10683, as MPNet uses it."""
    per_direction = num_buckets // 2
    num_exact = per_direction // 2
    apart = np.abs(distances)
    # float32, as in transformers: in float64 some distances fall into another bucket.
    ratio = np.maximum(apart, 1).astype(np.float32) / np.float32(num_exact)
    logarithmic = np.log(ratio) / np.float32(np.log(farthest / num_exact))
    coarse = np.minimum(num_exact + (logarithmic * (per_direction - num_exact)).astype(np.int64), per_direction - 1)
    buckets: NDArray[np.int64] = np.where(apart < num_exact, apart, coarse) + (distances > 0) * per_direction
    return buckets


# DeBERTa's scores have two more terms than the product of query i and key j: of the query and the key that the table
# of relative positions has for i - j, and of that key and the table's query for i - j. Source: section 3.1 of
# arXiv:2006.03654; of the buckets: make_log_bucket_position in transformers.


def relative_rows(encoder: EncoderSpec, max_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows of DeBERTa's table for keys, by j - i, and for queries, by i - j, each from -max_tokens on, int64
    [2 · max_tokens]."""
    distances = np.arange(-max_tokens, max_tokens)
    return _relative_rows(encoder, -distances), _relative_rows(encoder, distances)


def _relative_rows(encoder: EncoderSpec, distances: NDArray[np.int64]) -> NDArray[np.int64]:
    span = encoder.relative_span
    if encoder.farthest:
        num_exact, apart = span // 2, np.abs(distances)
        # float32, as in transformers.
        ratio = np.maximum(apart, 1).astype(np.float32) / np.float32(num_exact)
        logarithmic = np.log(ratio) / np.log(np.float32((encoder.farthest - 1) / num_exact))
        coarse = np.ceil(logarithmic * np.float32(num_exact - 1)).astype(np.int64) + num_exact
        distances = np.where(apart <= num_exact, distances, np.sign(distances) * coarse)
    return np.clip(distances + span, 0, 2 * span - 1)


def relative_states(encoder: EncoderSpec, layer: LayerSpec, tensor: Callable[[str], Floats]) -> tuple[Floats, Floats]:
    """The keys and queries of DeBERTa's relative positions in one layer, each [heads, rows, head dim]. They depend on
    weights alone."""
    assert encoder.relative is not None
    table = tensor(f"{encoder.relative}.weight")[: 2 * encoder.relative_span]
    if encoder.relative_norm is not None:
        table = table - table.mean(axis=1, keepdims=True)
        table /= np.sqrt(np.square(table).mean(axis=1, keepdims=True) + np.float32(encoder.epsilon))
        table = table * tensor(f"{encoder.relative_norm}.weight") + tensor(f"{encoder.relative_norm}.bias")
    keys, queries = (
        table @ tensor(f"{name}.weight").T + tensor(f"{name}.bias")
        for name in (layer.position_key, layer.position_query)
    )
    keys, queries = (each.reshape(len(table), encoder.num_heads, -1).transpose(1, 0, 2) for each in (keys, queries))
    return keys, queries
