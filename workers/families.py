"""The families whose layers vecd's own engines compute, as data: what differs between them, and the names of their
tensors.

The lean engine computes all of them, the fused path those of FUSED_FAMILIES. Source of the names: the checkpoints
themselves, as saved by transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Family:
    """Names of tensors, without ".weight" and ".bias". Names in a layer are relative to it."""

    prefixes: tuple[str, ...]
    """Possible prefixes of the names; training heads put the encoder one level down."""
    words: str = "embeddings.word_embeddings"
    is_scaled_by_width: bool = False
    """Embeddings are multiplied by the square root of their number of elements."""
    embedding_norm: str | None = "embeddings.LayerNorm"
    layer: str = "encoder.layer.{}."
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    """Or one name for all three, in this order."""
    query_norm: str | None = None
    key_norm: str | None = None
    """Of each head by itself, before the rotation."""
    out: str = "attention.output.dense"
    attended_norm: str | None = None
    attention_norm: str = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)
    is_gated: bool = False
    """`up` is a gate, which is activated, and what is multiplied with it: two names, or one for both."""
    is_gate_last: bool = False
    """In one tensor for both, the gate comes second."""
    down: str = "output.dense"
    fed_forward_norm: str | None = None
    norm: str = "output.LayerNorm"
    final_norm: str | None = None
    """None: each norm comes after its residual sum. Otherwise before its half of the layer, and this one at the end."""
    is_first_norm_absent: bool = False
    """The first layer has no norm before its attention."""
    is_rms: bool = False
    norm_offset: float = 0.0
    has_all_biases: bool = True
    """False: a bias is added where the weights have one."""
    thetas: Mapping[str, str] | None = None
    """The settings with the base of the rotary positions, for each of transformers' types of layers; None: a table of
    positions is added to the words."""
    is_causal: bool = False
    may_see_later: bool = False
    """But it does where the setting use_bidirectional_attention says so."""
    has_token_types: bool = True
    """Every token has type 0, as in a single sentence."""
    positions_after: str | int | None = None
    distance_bias: str | None = None
    """A table by the distance of two tokens, the same in every layer."""
    projection: str | None = None
    """From the tables' width to the layers', after the norm of the embeddings, if the weights have it."""
    num_layers: str = "num_hidden_layers"
    num_heads: str = "num_attention_heads"
    activation: str = "hidden_act"
    norm_epsilon: str | float = "layer_norm_eps"
    """Settings in config.json, or the value itself."""


_ONE_THETA = MappingProxyType({"full_attention": "rope_theta", "sliding_attention": "rope_theta"})

_BERT = Family(prefixes=("", "bert."))
_ROBERTA = Family(prefixes=("", "roberta."), positions_after="pad_token_id")
_ELECTRA = Family(prefixes=("", "electra."), projection="embeddings_project")
_DISTILBERT = Family(
    prefixes=("", "distilbert."),
    layer="transformer.layer.{}.",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up=("ffn.lin1",),
    down="ffn.lin2",
    norm="output_layer_norm",
    has_token_types=False,
    num_layers="n_layers",
    num_heads="n_heads",
    activation="activation",
    norm_epsilon=1e-12,
)
_MPNET = Family(
    prefixes=("", "mpnet."),
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    has_token_types=False,
    positions_after=1,
    distance_bias="encoder.relative_attention_bias",
)
_MODERNBERT = Family(
    prefixes=("", "model."),
    words="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    layer="layers.{}.",
    qkv=("attn.Wqkv",),
    out="attn.Wo",
    attention_norm="attn_norm",
    up=("mlp.Wi",),
    is_gated=True,
    down="mlp.Wo",
    norm="mlp_norm",
    final_norm="final_norm",
    is_first_norm_absent=True,
    has_all_biases=False,
    has_token_types=False,
    thetas=MappingProxyType({"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}),
    activation="hidden_activation",
    norm_epsilon="norm_eps",
)
_MISTRAL = Family(
    prefixes=("", "model."),
    words="embed_tokens",
    embedding_norm=None,
    layer="layers.{}.",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    attention_norm="input_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    is_gated=True,
    down="mlp.down_proj",
    norm="post_attention_layernorm",
    final_norm="norm",
    is_rms=True,
    has_all_biases=False,
    has_token_types=False,
    thetas=_ONE_THETA,
    is_causal=True,
    norm_epsilon="rms_norm_eps",
)
_QWEN3 = replace(_MISTRAL, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
_GEMMA3 = replace(
    _QWEN3,
    is_scaled_by_width=True,
    attended_norm="post_attention_layernorm",
    fed_forward_norm="post_feedforward_layernorm",
    attention_norm="input_layernorm",
    norm="pre_feedforward_layernorm",
    norm_offset=1.0,
    thetas=MappingProxyType({"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}),
    may_see_later=True,
    activation="hidden_activation",
)

# Both as transformers saves them, which is as the original's own code did.
_NOMIC = Family(
    prefixes=("", "nomic_bert."),
    embedding_norm="emb_ln",
    layer="encoder.layers.{}.",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),
    is_gated=True,
    down="mlp.fc2",
    norm="norm2",
    has_all_biases=False,
    thetas=_ONE_THETA,
)
_GTE = Family(
    prefixes=("", "new.", "gte."),
    qkv=("attention.qkv_proj",),
    out="attention.o_proj",
    attention_norm="attn_ln",
    up=("mlp.up_gate_proj",),
    is_gated=True,
    is_gate_last=True,
    down="mlp.down_proj",
    norm="mlp_ln",
    has_all_biases=False,
    thetas=_ONE_THETA,
)

FAMILIES = MappingProxyType(
    {
        "bert": _BERT,
        "roberta": _ROBERTA,
        "xlm-roberta": _ROBERTA,
        "camembert": _ROBERTA,
        "distilbert": _DISTILBERT,
        "mpnet": _MPNET,
        "electra": _ELECTRA,
        "modernbert": _MODERNBERT,
        "nomic_bert": _NOMIC,
        "gte": _GTE,
        "mistral": _MISTRAL,
        "qwen2": _MISTRAL,
        "qwen3": _QWEN3,
        "gemma3_text": _GEMMA3,
    }
)

FUSED_FAMILIES = frozenset(
    {"bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "electra"}
    | {"modernbert", "mistral", "qwen2", "qwen3"}
)
