"""The families that the fused path computes, as data: what differs between them, and the names of their tensors.

All are one architecture: BERT's post-LayerNorm encoder. The comparison with the reference model
(`vecd.workers.engines.parity`) shows whether a model is computed correctly. Read by
`vecd.workers.engines.torch.fused`.

Source of the names: the checkpoints themselves, as saved by transformers.
"""

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Family:
    """Names of tensors, without ".weight" and ".bias". Names in a layer are relative to it."""

    prefixes: tuple[str, ...]
    """Possible prefixes of the names; training heads put the encoder one level down."""
    layer: str = "encoder.layer.{}."
    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    out: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: str = "intermediate.dense"
    down: str = "output.dense"
    norm: str = "output.LayerNorm"
    has_token_types: bool = True
    """Every token has type 0, as in a single sentence."""
    positions_after: str | int | None = None
    """The padding id after which positions begin, or the setting that holds it; None: positions begin at 0."""
    distance_bias: str | None = None
    """The table of a bias by the distance of two tokens, the same in every layer."""
    projection: str | None = None
    """From the tables' width to the layers', after the norm of the embeddings, if the weights have it."""
    num_layers: str = "num_hidden_layers"
    num_heads: str = "num_attention_heads"
    activation: str = "hidden_act"
    norm_epsilon: str | float = "layer_norm_eps"
    """Settings in config.json, or the value itself."""


_BERT = Family(prefixes=("", "bert."))
_ROBERTA = Family(prefixes=("", "roberta."), positions_after="pad_token_id")
_ELECTRA = Family(prefixes=("", "electra."), projection="embeddings_project")
_DISTILBERT = Family(
    prefixes=("", "distilbert."),
    layer="transformer.layer.{}.",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
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
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    has_token_types=False,
    positions_after=1,
    distance_bias="encoder.relative_attention_bias",
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
    }
)
"""By transformers' name of the architecture."""
