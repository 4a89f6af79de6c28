"""The families that the fused path computes, as data: what differs between them, and the names of their tensors.

They are one architecture: BERT's post-LayerNorm encoder. Whether a model of theirs is computed right is not taken from
this table, but from the comparison with the plain model (`vecd.workers.engines.parity`). Read by
`vecd.workers.engines.torch.fused`.

Source of the names: the checkpoints themselves, as saved by transformers.
"""

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Family:
    """Tensor names are without ".weight" and ".bias"; those of a layer are relative to it."""

    prefixes: tuple[str, ...]
    """Where the names may begin; heads that a model was trained with put the encoder one level down."""
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
    """Every token is of type 0: a sentence alone."""
    positions_after: str | int | None = None
    """The padding id after which positions begin, or the setting that holds it; None: positions begin at 0."""
    distance_bias: str | None = None
    """The table of a bias for how far two tokens are apart, the same in every layer."""
    num_layers: str = "num_hidden_layers"
    num_heads: str = "num_attention_heads"
    activation: str = "hidden_act"
    norm_epsilon: str | float = "layer_norm_eps"
    """Settings in config.json, or the value itself."""


_BERT = Family(prefixes=("", "bert."))
_ROBERTA = Family(prefixes=("", "roberta."), positions_after="pad_token_id")
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
    }
)
"""By transformers' name of the architecture."""
