"""The families whose layers vecd's own engines compute, as data: what differs between them, and the names of their
tensors.

The lean engine computes all of them, the fused path those of FUSED_FAMILIES. Source of the names: the checkpoints
themselves, as saved by transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """How the frequencies of rotary positions are changed; the defaults change nothing.

    A pair that makes at most `least_turns` over `context` tokens has its frequency divided by `divisor`, one that makes
    `most_turns` or more keeps it, and one between them has a mean of both. Without a context all are divided.
    Source: Llama 3.1's `rope_type` "llama3" in transformers' modeling_rope_utils.py.
    """

    divisor: float = 1.0
    context: int = 0
    least_turns: float = 0.0
    most_turns: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Names of tensors, without ".weight" and ".bias": of a family relative to the layer, of a model in full. The
    defaults are BERT's."""

    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    """Query, key and value; or one tensor with the rows of all three. The keys may have fewer heads than the
    queries."""
    query_norm: str | None = None
    key_norm: str | None = None
    """Before the rotation: of each head by itself, [head dim], or of all together, [heads · head dim]."""
    out: str = "attention.output.dense"
    attended_norm: str | None = None
    """Where the norms come after the sums: of the sum of attention and x, which is then added to x once more."""
    attention_norm: str | None = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)
    """One; with a gate, the gate first: two, or one tensor with the rows of both (`EncoderSpec.is_gate_last`)."""
    down: str = "output.dense"
    router: str | None = None
    """Of layers with experts in place of `up` and `down`: what gives a token's expert, [experts, H]."""
    experts: str | None = None
    """Below it are mlp.w1 and mlp.w2, [experts · width, H], and one bias of all, [H]."""
    fed_forward_norm: str | None = None
    norm: str = "output.LayerNorm"
    theta: float | None = None
    """The base of the rotary positions of queries and keys; None: positions are added to the words."""
    scaling: RotaryScaling = RotaryScaling()
    window: int | None = None
    """The largest distance that a token sees, in tokens; None: any."""
    position_key: str | None = None
    position_query: str | None = None
    """DeBERTa's products by the table of relative positions, whose rows are keys and queries of their own."""
    words_gate: tuple[str, ...] = ()
    """EmbeddingGemma 2's third part of a layer, with a residual sum: a product, activation, times the layer's part of
    `EncoderSpec.gated_words`, another product, norm; and the whole name of a factor of all that leaves the layer."""


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """A stack of layers, with the norms after the residual sums

    x ─┬─ qkv ─ attention ─ out + x ─ norm ─┬─ up, activation ─ down + x ─ norm ─ x
       └───────────────────────┘            └──────────────────────┘

    or before the two halves, if there is a final norm:

    x ─┬─ norm ─ qkv ─ attention ─ out + x ─┬─ norm ─ up, activation ─ down + x ─ x
       └──────────────────────────────┘     └─────────────────────────────┘

    Gemma's have one more in each half, before the sum: `attended_norm`, `fed_forward_norm`. The numbers below
    `final_norm` are a model's own, which its family does not know.
    """

    words: str = "embeddings.word_embeddings"
    positions: str | None = "embeddings.position_embeddings"
    """None: the layers have rotary positions."""
    types: str | None = "embeddings.token_type_embeddings"
    embedding_norm: str | None = "embeddings.LayerNorm"
    projection: str | None = None
    """ELECTRA's, from the tables' width to the layers', after the norm, if the weights have it."""
    distance_bias: str | None = None
    """MPNet's and T5's table of a bias by the distance of two tokens, the same in every layer, [buckets, heads]."""
    relative: str | None = None
    """DeBERTa's table of relative positions, the same in every layer, [2 · relative_span, H]."""
    relative_norm: str | None = None
    slopes: tuple[float, ...] = ()
    """ALiBi, which is a bias as well: of each head, how much a score falls with every token between the two."""
    is_rms: bool = False
    norm_offset: float = 0.0
    """Added to the weights of every norm."""
    has_all_biases: bool = True
    """False: a bias is added where the weights have one."""
    is_causal: bool = False
    """A token sees no later one."""
    is_gated: bool = False
    is_gate_last: bool = False
    """In one tensor with the rows of both, the gate comes second."""
    has_value_norm: bool = False
    """Values are normalized, each head by itself and without weights."""
    gated_words: str | None = None
    gated_words_norm: str | None = None
    """A product of the embeddings, divided by the root of their width, with a part for each layer, which is normalized
    by itself."""
    final_norm: str | None = None
    final_projection: str | None = None
    num_heads: int = 0
    score_scale: float | None = None
    """Of the scores; None: 1/√(head dim)."""
    num_buckets: int = 32
    farthest: int = 128
    """Of `distance_bias`: the rows that are used, and the distance from which on all have the last one, in tokens.
    transformers' MPNet has both fixed: relative_attention_num_buckets sizes the table, and is not asked. Of `relative`:
    `farthest` is the distance that the last row is for; 0: each row is for one distance."""
    relative_span: int = 0
    epsilon: float = 0.0
    """Of each norm."""
    activation: str = ""
    words_factor: float = 1.0
    experts_per_token: int = 0
    placeholders: tuple[int, ...] = ()
    """Ids that are read as the first of them."""
    positions_after: int | None = None
    """The padding id after which positions begin; None: positions begin at 0."""
    layers: tuple[LayerSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    prefixes: tuple[str, ...]
    """Possible prefixes of the names; training heads put the encoder one level down."""
    encoder: EncoderSpec = EncoderSpec()
    layer: LayerSpec = LayerSpec()
    layer_prefix: str = "encoder.layer.{}."
    is_first_norm_absent: bool = False
    """The first layer has no norm before its attention."""
    is_scaled_by_width: bool = False
    """Embeddings are multiplied by the square root of their number of elements."""
    thetas: Mapping[str, str] | None = None
    """The settings with the base of the rotary positions, for each of transformers' types of layers."""
    has_slopes: bool = False
    """Scores fall with the distance of two tokens; the layers need no positions."""
    every_with_experts: str | None = None
    """The setting with n: of n layers the second one has experts."""
    has_class: bool = True
    """transformers has a class of it. Otherwise `vecd.workers.torch.described` is what its engines are compared
    with."""
    positions_after: str | int | None = None
    num_layers: str = "num_hidden_layers"
    num_heads: str = "num_attention_heads"
    activation: str = "hidden_act"
    norm_epsilon: str | float = "layer_norm_eps"
    """Settings in config.json, or the value itself."""


_ONE_THETA = MappingProxyType({"full_attention": "rope_theta", "sliding_attention": "rope_theta"})

_ROBERTA = Family(prefixes=("", "roberta."), positions_after="pad_token_id")
_DISTILBERT = Family(
    prefixes=("", "distilbert."),
    encoder=EncoderSpec(types=None),
    layer_prefix="transformer.layer.{}.",
    layer=LayerSpec(
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        out="attention.out_lin",
        attention_norm="sa_layer_norm",
        up=("ffn.lin1",),
        down="ffn.lin2",
        norm="output_layer_norm",
    ),
    num_layers="n_layers",
    num_heads="n_heads",
    activation="activation",
    norm_epsilon=1e-12,
)
_MPNET = Family(
    prefixes=("", "mpnet."),
    encoder=EncoderSpec(types=None, distance_bias="encoder.relative_attention_bias"),
    layer=LayerSpec(
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        attention_norm="attention.LayerNorm",
    ),
    positions_after=1,
)
_DEBERTA = Family(
    prefixes=("", "deberta."),
    encoder=EncoderSpec(relative="encoder.rel_embeddings", relative_norm="encoder.LayerNorm"),
    layer=LayerSpec(
        qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
        position_key="attention.self.pos_key_proj",
        position_query="attention.self.pos_query_proj",
    ),
)
_T5 = Family(
    prefixes=("",),
    encoder=EncoderSpec(
        words="shared",
        positions=None,
        types=None,
        embedding_norm=None,
        distance_bias="encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        is_rms=True,
        has_all_biases=False,
        final_norm="encoder.final_layer_norm",
        score_scale=1.0,
    ),
    layer_prefix="encoder.block.{}.layer.",
    layer=LayerSpec(
        qkv=("0.SelfAttention.q", "0.SelfAttention.k", "0.SelfAttention.v"),
        out="0.SelfAttention.o",
        attention_norm="0.layer_norm",
        up=("1.DenseReluDense.wi",),
        down="1.DenseReluDense.wo",
        norm="1.layer_norm",
    ),
    num_layers="num_layers",
    num_heads="num_heads",
    activation="dense_act_fn",
    norm_epsilon="layer_norm_epsilon",
)
_MODERNBERT = Family(
    prefixes=("", "model."),
    encoder=EncoderSpec(
        words="embeddings.tok_embeddings",
        positions=None,
        types=None,
        embedding_norm="embeddings.norm",
        has_all_biases=False,
        is_gated=True,
        final_norm="final_norm",
    ),
    layer_prefix="layers.{}.",
    layer=LayerSpec(
        qkv=("attn.Wqkv",),
        out="attn.Wo",
        attention_norm="attn_norm",
        up=("mlp.Wi",),
        down="mlp.Wo",
        norm="mlp_norm",
    ),
    is_first_norm_absent=True,
    thetas=MappingProxyType({"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}),
    activation="hidden_activation",
    norm_epsilon="norm_eps",
)
_MISTRAL = Family(
    prefixes=("", "model."),
    encoder=EncoderSpec(
        words="embed_tokens",
        positions=None,
        types=None,
        embedding_norm=None,
        is_rms=True,
        has_all_biases=False,
        is_causal=True,
        is_gated=True,
        final_norm="norm",
    ),
    layer_prefix="layers.{}.",
    layer=LayerSpec(
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.o_proj",
        attention_norm="input_layernorm",
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        norm="post_attention_layernorm",
    ),
    thetas=_ONE_THETA,
    norm_epsilon="rms_norm_eps",
)
_EUROBERT = replace(_MISTRAL, encoder=replace(_MISTRAL.encoder, is_causal=False))
_QWEN3 = replace(_MISTRAL, layer=replace(_MISTRAL.layer, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"))
_GEMMA3 = replace(
    _QWEN3,
    encoder=replace(_QWEN3.encoder, norm_offset=1.0),
    layer=replace(
        _QWEN3.layer,
        attended_norm="post_attention_layernorm",
        norm="pre_feedforward_layernorm",
        fed_forward_norm="post_feedforward_layernorm",
    ),
    is_scaled_by_width=True,
    thetas=MappingProxyType({"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}),
    activation="hidden_activation",
)
_EMBEDDING_GEMMA2 = Family(
    prefixes=("language_model.", ""),
    encoder=replace(
        _QWEN3.encoder,
        is_causal=False,
        has_value_norm=True,
        gated_words="ple.per_layer_model_projection",
        gated_words_norm="ple.per_layer_projection_norm",
        final_projection="embedding_projection",
        score_scale=1.0,
    ),
    layer_prefix="layers.{}.",
    layer=replace(
        _GEMMA3.layer,
        words_gate=(
            "ple_block.per_layer_input_gate",
            "ple_block.per_layer_projection",
            "ple_block.post_per_layer_input_norm",
            "layer_scalar",
        ),
    ),
    is_scaled_by_width=True,
    thetas=_ONE_THETA,
    activation="hidden_activation",
    norm_epsilon="rms_norm_eps",
)

# Both as transformers saves them, which is as the original's own code did.
_NOMIC = Family(
    prefixes=("", "nomic_bert."),
    encoder=EncoderSpec(positions=None, embedding_norm="emb_ln", has_all_biases=False, is_gated=True),
    layer_prefix="encoder.layers.{}.",
    layer=LayerSpec(
        qkv=("attn.Wqkv",),
        out="attn.out_proj",
        attention_norm="norm1",
        up=("mlp.fc12", "mlp.fc11"),
        down="mlp.fc2",
        norm="norm2",
    ),
    thetas=_ONE_THETA,
)
_NOMIC_MOE = replace(
    _NOMIC,
    encoder=replace(_NOMIC.encoder, has_all_biases=True, is_gated=False),
    layer=replace(_NOMIC.layer, up=("mlp.fc1",), router="mlp.router.layer", experts="mlp.experts"),
    every_with_experts="moe_every_n_layers",
    has_class=False,
)
_GTE = Family(
    prefixes=("", "new.", "gte."),
    encoder=EncoderSpec(positions=None, has_all_biases=False, is_gated=True, is_gate_last=True),
    layer=LayerSpec(
        qkv=("attention.qkv_proj",),
        out="attention.o_proj",
        attention_norm="attn_ln",
        up=("mlp.up_gate_proj",),
        down="mlp.down_proj",
        norm="mlp_ln",
    ),
    thetas=_ONE_THETA,
)

_JINA_V3 = Family(
    prefixes=("", "roberta."),
    encoder=EncoderSpec(positions=None, embedding_norm="emb_ln"),
    layer_prefix="encoder.layers.{}.",
    layer=LayerSpec(
        qkv=("mixer.Wqkv",),
        out="mixer.out_proj",
        attention_norm="norm1",
        up=("mlp.fc1",),
        down="mlp.fc2",
        norm="norm2",
    ),
    thetas=_ONE_THETA,
)
_JINA_BERT = Family(
    prefixes=("", "bert."),
    encoder=EncoderSpec(positions=None, has_all_biases=False, is_gated=True),
    layer=LayerSpec(
        # If the weights have them: jina-embeddings-v2-base-es, whose code is in jina-bert-v2-qk-devlin-norm-1e-2.
        query_norm="attention.self.layer_norm_q",
        key_norm="attention.self.layer_norm_k",
        up=("mlp.gated_layers",),
        down="mlp.wo",
        norm="mlp.layernorm",
    ),
    has_slopes=True,
    has_class=False,
)

FAMILIES = MappingProxyType(
    {
        "bert": Family(prefixes=("", "bert.")),
        **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), _ROBERTA),
        "distilbert": _DISTILBERT,
        "mpnet": _MPNET,
        "t5": _T5,
        "deberta-v2": _DEBERTA,
        "electra": Family(prefixes=("", "electra."), encoder=EncoderSpec(projection="embeddings_project")),
        "modernbert": _MODERNBERT,
        "nomic_bert": _NOMIC,
        "nomic_bert_moe": _NOMIC_MOE,
        "gte": _GTE,
        "jina_embeddings_v3": _JINA_V3,
        "xlm_roberta_flash": replace(
            _JINA_V3,
            encoder=EncoderSpec(embedding_norm="emb_ln"),
            thetas=None,
            positions_after="pad_token_id",
            has_class=False,
        ),
        "jina_bert": _JINA_BERT,
        "jina_bert_code": replace(
            _JINA_BERT,
            encoder=replace(_JINA_BERT.encoder, is_gate_last=True),
            layer=LayerSpec(
                query_norm="attention.self.layer_norm_q",
                key_norm="attention.self.layer_norm_k",
                attended_norm="attention.output.LayerNorm",
                attention_norm="layer_norm_1",
                up=("mlp.up_gated_layer",),
                down="mlp.down_layer",
                norm="layer_norm_2",
            ),
        ),
        **dict.fromkeys(("mistral", "llama", "qwen2"), _MISTRAL),
        "eurobert": _EUROBERT,
        "qwen3": _QWEN3,
        "gemma3_text": _GEMMA3,
        "embedding_gemma2_text": _EMBEDDING_GEMMA2,
    }
)

FUSED_FAMILIES = frozenset(FAMILIES) - {"nomic_bert", "gte", "gemma3_text", "embedding_gemma2_text"}
WITHOUT_CLASS = frozenset(name for name, family in FAMILIES.items() if not family.has_class)
