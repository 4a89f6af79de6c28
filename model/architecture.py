"""Translates a config.json that names the model's own code into architectures that are known here.

Owns the table of architectures whose original code is in a model's repository, and which transformers implements under
other names, or vecd's own table of layers describes (`vecd.workers.families`). Any other configuration is refused,
because a similar model gives wrong vectors without an error. Never runs or reads a model's code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vecd.base.files import JsonMapping, JsonObject


@dataclass(frozen=True, slots=True)
class _Port:
    """An architecture that is known, and the conditions under which an original configuration is the same."""

    always: Mapping[str, tuple[Any, Any]]
    """Key → the original's default, and the only value that is implemented."""
    translate: Callable[[JsonMapping], JsonObject]


def native_config(config: JsonMapping) -> JsonObject | None:
    """The fields for the configuration class of transformers, or of an architecture that vecd describes itself; None if
    transformers reads config.json correctly without help. Raises ValueError, with the reason in one line, for code
    without such an equal."""
    auto_map = config.get("auto_map") or {}
    if not isinstance(auto_map, Mapping):
        raise ValueError("auto_map must be a JSON object")
    model_type = str(config.get("model_type") or "")
    # Code for other classes (AutoModelForCausalLM …) does not matter: hidden states come from AutoModel's.
    wanted = auto_map.get("AutoModel", auto_map.get("AutoConfig"))
    if wanted is None:
        # The original's names without its auto_map: transformers would ignore them and use its defaults.
        if model_type == "nomic_bert" and "n_embd" in config:
            return _ported(config, _NOMIC)
        if sees_later_here(config):
            return {**config, "is_causal": False}
        return None
    # zerank-1: another name of Qwen3's settings, and code that scores pairs as `vecd.model.score_card` has it.
    if model_type == "qwen3" and str(wanted).rpartition("--")[2].startswith("modeling_zeranker."):
        return None
    key = (model_type, str(wanted).rpartition(".")[2])
    port = _PORTS.get(key)
    if port is _QWEN2 and "modeling_qwen." in str(wanted):
        port = _GTE_QWEN2
    if port is _JINA_BERT and _NORMALIZED_QUERIES in f"{wanted} {config.get('_name_or_path')}":
        port = _JINA_BERT_CODE
    if port is None:
        why = _REASONS.get(key, "transformers has no architecture that is known to be the same")
        raise ValueError(
            f"asks for Python code from the model's repository to be run (auto_map: {wanted}), which vecd refuses: "
            f"whoever can change that repository could run anything here; {why}"
        )
    return _ported(config, port)


def sees_later_here(config: JsonMapping) -> bool:
    """Whether tokens see later ones by a setting that transformers ignores, and vecd did at first: what is computed has
    another digest than config.json alone would give it."""
    return bool(config.get("use_bidirectional_attention")) and config.get("model_type") in _IGNORING_BIDIRECTIONAL


def _ported(config: JsonMapping, port: _Port) -> JsonObject:
    if port is _NOMIC and config.get("num_experts"):
        port = _NOMIC_MOE
    for name, (absent, required) in port.always.items():
        value = config.get(name, absent)
        if value != required and (value or required):  # null, false and 0 are one
            raise ValueError(f"{name} is {value!r}, and the version of this model that is served has {required!r} only")
    kept = {name: config[name] for name in _OF_HEADS if name in config}
    return {"architectures": config.get("architectures"), **kept, **port.translate(config)}


_OF_HEADS = ("id2label", "label2id", "num_labels", "problem_type", "sentence_transformers")
"""What heads of classification read; the same in every architecture."""


def _number(config: JsonMapping, name: str) -> Any:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise ValueError(f"{name} is missing or not a number")
    return value


def _whole(config: JsonMapping, name: str, multiple_of: int = 1) -> int:
    value = _number(config, name)
    if not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number")
    return -(-value // multiple_of) * multiple_of


def _sizes(config: JsonMapping) -> JsonObject:
    """The numbers that BERT's own and later configurations have under the same names."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    sizes: JsonObject = {name: _whole(config, name) for name in (*names, "max_position_embeddings")}
    if sizes["num_attention_heads"] < 1 or sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise ValueError(f"hidden_size {sizes['hidden_size']} is no multiple of {sizes['num_attention_heads']} heads")
    return {**sizes, "layer_norm_eps": _number(config, "layer_norm_eps"), "pad_token_id": config.get("pad_token_id")}


def _chosen(config: JsonMapping, name: str, known: Mapping[str, str]) -> str:
    value = config.get(name)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} is {value!r:.80}; known: {', '.join(known)}")
    return known[value]


# --- Nomic ------------------------------------------------------------------------------------------------------


def _translate_nomic(config: JsonMapping) -> JsonObject:
    translated = {
        "model_type": "nomic_bert",
        "vocab_size": _whole(config, "vocab_size", int(config.get("pad_vocab_size_multiple") or 1)),
        "hidden_size": _whole(config, "n_embd"),
        "num_hidden_layers": _whole(config, "n_layer"),
        "num_attention_heads": _whole(config, "n_head"),
        "intermediate_size": _whole(config, "n_inner", 256),
        "hidden_act": "silu",
        "layer_norm_eps": _number(config, "layer_norm_epsilon"),
        "type_vocab_size": _whole(config, "type_vocab_size"),
        "pad_token_id": config.get("pad_token_id") or 0,
    }
    # Newer files have both kinds of names. The original code reads its own.
    for name, value in translated.items():
        if config.get(name, value) != value and name not in ("vocab_size", "hidden_act", "pad_token_id"):
            raise ValueError(f"{name} is {config[name]!r} under this name and {value!r} under the original's")
    base = float(_number(config, "rotary_emb_base"))
    rope = config.get("rope_parameters") or {"rope_theta": base}
    if rope.get("rope_theta") != base or rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_parameters is {rope!r}, and rotary_emb_base {base!r}")
    return {
        **translated,
        # Rotary positions have no table of limited length.
        "max_position_embeddings": _whole(config, "n_positions"),
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
    }


# nomic-embed-text-v1 and v1.5, CodeRankEmbed, snowflake-arctic-embed-m-long. Source: modeling_hf_nomic_bert.py and
# configuration_hf_nomic_bert.py of nomic-ai/nomic-bert-2048, against transformers 5.23's models/nomic_bert and the
# names of its tensors in conversion_mapping.py. An absent key has GPT-2's default there, which is seldom intended.
_NOMIC = _Port(
    always={
        "activation_function": ("gelu_new", "swiglu"),
        "prenorm": (False, False),
        "parallel_block": (False, False),
        "causal": (False, False),
        "use_rms_norm": (False, False),
        "qkv_proj_bias": (True, False),
        "mlp_fc1_bias": (True, False),
        "mlp_fc2_bias": (True, False),
        "rotary_emb_fraction": (0.0, 1.0),
        "rotary_emb_interleaved": (False, False),
        "rotary_emb_scale_base": (None, None),
        "rotary_scaling_factor": (None, None),  # stretches with the longest text of a batch
        "rotary_head_dim": (False, False),
        "num_heads_kv": (None, None),
    },
    translate=_translate_nomic,
)


def _translate_nomic_moe(config: JsonMapping) -> JsonObject:
    experts = {name: _whole(config, name) for name in ("num_experts", "moe_top_k", "moe_every_n_layers")}
    if not 1 <= experts["moe_top_k"] <= experts["num_experts"]:
        raise ValueError(f"moe_top_k is {experts['moe_top_k']}, and there are {experts['num_experts']} experts")
    if experts["moe_every_n_layers"] < 2:
        raise ValueError(f"moe_every_n_layers is {experts['moe_every_n_layers']}, and must be 2 or more")
    common, width = _translate_nomic(config), _whole(config, "n_inner")
    return {**common, "model_type": "nomic_bert_moe", "hidden_act": "gelu", "intermediate_size": width, **experts}


# nomic-embed-text-v2-moe, which has routed experts in every second layer. Source: the same code; transformers 5.23 has
# no class for it.
_NOMIC_MOE = _Port(
    always={
        **_NOMIC.always,
        "activation_function": ("gelu_new", "gelu"),
        "qkv_proj_bias": (True, True),
        "mlp_fc1_bias": (True, True),
        "mlp_fc2_bias": (True, True),
        "moe_normalize_expert_weights": (False, False),
        "num_shared_experts": (0, 0),
        "expert_choice_router": (False, False),
        "ffn_div": (1, 1),
    },
    translate=_translate_nomic_moe,
)


# --- GTE --------------------------------------------------------------------------------------------------------


def _translate_gte(config: JsonMapping) -> JsonObject:
    sizes = _sizes(config)
    return {
        **sizes,
        "model_type": "gte",
        "hidden_act": config.get("hidden_act", "gelu"),
        "type_vocab_size": config.get("type_vocab_size", 1),
        "rope_parameters": _rope_of_gte(config, sizes["hidden_size"] // sizes["num_attention_heads"]),
    }


def _rope_of_gte(config: JsonMapping, head_dim: int) -> JsonObject:
    """The original's fixed NTK scaling by a factor f: base · f, and every frequency divided by f^(2 / head_dim), which
    is transformers' linear scaling of another base. Source: NTKScalingRotaryEmbedding in modeling.py of
    Alibaba-NLP/new-impl."""
    base = float(_number(config, "rope_theta"))
    scaling = config.get("rope_scaling")
    if scaling is None:
        return {"rope_type": "default", "rope_theta": base}
    known = isinstance(scaling, Mapping) and scaling.keys() <= {"type", "rope_type", "factor", "rope_theta"}
    if not known or scaling.get("type", scaling.get("rope_type")) != "ntk":
        raise ValueError(f"rope_scaling {scaling!r} is not known; known: null and a fixed NTK factor")
    factor = float(_number(scaling, "factor"))
    if factor <= 1:
        raise ValueError(f"rope_scaling: the factor must be greater than 1, and is {factor}")
    return {"rope_type": "linear", "rope_theta": base * factor, "factor": factor ** (2 / head_dim)}


# gte-base-en-v1.5, gte-large-en-v1.5, gte-multilingual-base, stella_en_400M_v5 ("new"), snowflake-arctic-embed-m-v2.0
# ("gte"). Source: modeling.py and configuration.py of Alibaba-NLP/new-impl, against transformers 5.23's models/gte
# and the names of its tensors in conversion_mapping.py.
_GTE = _Port(
    always={
        "position_embedding_type": ("rope", "rope"),
        "layer_norm_type": ("layer_norm", "layer_norm"),
        "logn_attention_scale": (False, False),
        "pack_qkv": (True, True),
    },
    translate=_translate_gte,
)


# --- Jina's BERT ------------------------------------------------------------------------------------------------


def _translate_jina_bert(config: JsonMapping) -> JsonObject:
    activation = _chosen(config, "feed_forward_type", {"geglu": "gelu", "reglu": "relu"})
    types = _whole(config, "type_vocab_size")
    return {**_sizes(config), "model_type": "jina_bert", "hidden_act": activation, "type_vocab_size": types}


# jina-embeddings-v2-small-en, -base-en, -de, -es and -zh, jina-colbert-v1-en, jina-reranker-v1: a bias that falls with
# the distance (ALiBi), and a gate. Source: modeling_bert.py of jinaai/jina-bert-implementation. An absent
# position_embedding_type is "absolute" there. -es has its own copy of that code, jina-bert-v2-qk-devlin-norm-1e-2, with
# norms of queries and keys. transformers 5.23 has no class for it.
_JINA_BERT = _Port(
    always={
        "position_embedding_type": ("absolute", "alibi"),
        "is_decoder": (False, False),
        "add_cross_attention": (False, False),
    },
    translate=_translate_jina_bert,
)

_NORMALIZED_QUERIES = "jina-bert-v2-qk-post-norm"
"""The repository of the code of jina-embeddings-v2-base-code: with norms of queries and keys."""

_JINA_BERT_CODE = _Port(
    always=_JINA_BERT.always, translate=lambda config: {**_translate_jina_bert(config), "model_type": "jina_bert_code"}
)


# --- XLM-RoBERTa with merged weights ----------------------------------------------------------------------------


def _translate_flash(config: JsonMapping) -> JsonObject:
    places = {"rotary": "jina_embeddings_v3", "absolute": "xlm_roberta_flash"}
    model_type = _chosen(config, "position_embedding_type", places)
    activations = {"gelu": "gelu", **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_new")}
    translated = {
        **_sizes(config),
        "model_type": model_type,
        "hidden_act": _chosen(config, "hidden_act", activations),
        "type_vocab_size": _whole(config, "type_vocab_size"),
    }
    if model_type == "xlm_roberta_flash":
        return translated
    head_dim = translated["hidden_size"] // translated["num_attention_heads"]
    if (rotated := config.get("rotary_emb_dim", head_dim)) != head_dim:
        raise ValueError(f"rotary_emb_dim is {rotated!r:.80}, and a head has {head_dim} elements, all of which turn")
    base = float(_number({"rotary_emb_base": 10_000.0, **config}, "rotary_emb_base"))
    return {**translated, "rope_parameters": {"rope_type": "default", "rope_theta": base}}


# jina-embeddings-v3, jina-colbert-v2 (rotary positions: transformers 5.23's models/jina_embeddings_v3), and
# jina-reranker-v2-base-multilingual (XLM-RoBERTa's positions: described here). Source: modeling_xlm_roberta.py of
# jinaai/xlm-roberta-flash-implementation. Its versions differ in what an absent position_embedding_type means.
_FLASH = _Port(
    always={
        "pad_vocab_size_multiple": (1, 1),
        "last_layer_subset": (False, False),
        "is_decoder": (False, False),
        "rotary_emb_scale_base": (None, None),
        "rotary_emb_interleaved": (False, False),
    },
    translate=_translate_flash,
)


# --- decoders whose tokens see those behind them ----------------------------------------------------------------

_IGNORING_BIDIRECTIONAL = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2")
"""Whose classes in transformers 5.23 read `is_causal` alone: there `use_bidirectional_attention` has no effect, or in
some batches only."""


def _both_ways(config: JsonMapping, model_type: str, **own: Any) -> JsonObject:
    """The same settings, for the class of `model_type` without its causal mask."""
    return {**_without_code(config), "model_type": model_type, "is_causal": False, **own}


def _without_code(config: JsonMapping) -> JsonObject:
    return {name: value for name, value in config.items() if name != "auto_map"}


# KaLM-embedding v2. Files of this class that do not state `is_causal` may be of either kind.
_QWEN2 = _Port(
    always={"is_causal": (True, False), "use_sliding_window": (False, False)},
    translate=partial(_both_ways, model_type="qwen2"),
)

# gte-Qwen2-1.5B-instruct and 7B, and what was made of them with the same modeling_qwen.py: stella_en_1.5B_v5,
# inf-retriever-v1. Its Qwen2Model.forward has is_causal=False where nothing is stated, as in stella's config.json, by
# its length of 844 bytes.
_GTE_QWEN2 = replace(_QWEN2, always={**_QWEN2.always, "is_causal": (False, False)})

# llama-embed-nemotron-8b, llama-nemotron-embed-1b-v2, llama-nemotron-rerank-1b-v2. Source: LlamaBidirectionalModel of
# NVIDIA's NeMo: LlamaModel with a mask of the padding alone. `temperature` is the classifier's.
_NEMOTRON = _Port(always={"pooling": ("avg", "avg")}, translate=partial(_both_ways, model_type="llama"))


def _translate_voyage(config: JsonMapping) -> JsonObject:
    if "num_labels" not in config:
        raise ValueError("num_labels is missing: the width of the projection")
    return _both_ways(config, "qwen3", embedding_projection=_whole(config, "num_labels"))


# voyage-4-nano. Source: modeling_qwen3_bidirectional.py of its repository: Qwen3Model with a mask of the padding alone,
# which layers with a window do not have, and behind it the layer `linear`, without a bias.
_VOYAGE = _Port(always={"use_sliding_window": (False, False)}, translate=_translate_voyage)

# pplx-embed-v1. Source: modeling.py and configuration.py of its repository, which change the same.
_PPLX = _Port(
    always={"use_sliding_window": (False, False), "use_bidirectional_attention": (True, True)},
    translate=partial(_both_ways, model_type="qwen3"),
)


# --- EuroBERT ---------------------------------------------------------------------------------------------------


def _translate_eurobert(config: JsonMapping) -> JsonObject:
    pooling = config.get("clf_pooling", config.get("classifier_pooling", "late"))
    # An absent rope_theta is 10,000 in transformers.
    rope = {} if config.get("rope_parameters") else {"rope_theta": 250_000.0}
    return {**rope, **_without_code(config), "model_type": "eurobert", "classifier_pooling": pooling}


# EuroBERT-210m, 610m and 2.1B. Source: modeling_eurobert.py and configuration_eurobert.py of EuroBERT/EuroBERT-210m,
# whose fields transformers 5.23's models/eurobert has under the same names but one; its own tests load these weights.
_EUROBERT = _Port(
    always={"rope_scaling": (None, None), "pretraining_tp": (1, 1), "is_causal": (False, False)},
    translate=_translate_eurobert,
)


# --- the tables -------------------------------------------------------------------------------------------------

_PORTS = {
    ("nomic_bert", "NomicBertModel"): _NOMIC,
    ("new", "NewModel"): _GTE,
    ("new", "NewConfig"): _GTE,
    ("gte", "GteModel"): _GTE,
    ("bert", "JinaBertModel"): _JINA_BERT,
    **{
        (model_type, name): _FLASH
        for model_type in ("xlm-roberta", "")  # the first configurations have none
        for name in ("XLMRobertaModel", "XLMRobertaFlashConfig", "XLMRobertaLoRA")
    },
    ("qwen2", "Qwen2Model"): _QWEN2,
    ("llama_bidirec", "LlamaBidirectionalModel"): _NEMOTRON,
    ("llama_bidirec", "LlamaBidirectionalConfig"): _NEMOTRON,
    ("qwen3", "Qwen3BidirectionalModel"): _VOYAGE,
    ("bidirectional_pplx_qwen3", "PPLXQwen3Model"): _PPLX,
    ("eurobert", "EuroBertModel"): _EUROBERT,
}
"""By config.json's model_type and the class that its auto_map names for AutoModel, or else for AutoConfig."""

# Known code that differs from transformers' architecture of the same model_type.
_REASONS = {
    ("mistral", "MistralModel"): "an argument of this code says whether tokens see those behind them, not config.json",
    ("nvembed", "NVEmbedModel"): "its pooling is a layer of latent attention, which transformers has not",
}
