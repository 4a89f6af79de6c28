"""What a model has behind its transformer besides a dense vector, as data: scores, sparse and token vectors.

Owns the types alone, which are a part of the model card (`vecd.shm.card`), and travel with it as JSON. Reads no file.
Read by the engines, which compute the steps, and by the gateway, which makes the sequences and renders what comes back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CAPABILITIES = ("dense", "rerank", "classify", "token-classify", "sparse", "multi-vector")
"""What a model can do. A model with one label, or with a query and a document in one sequence, can rerank; every model
for sequence classification can classify."""

KINDS = ("auto", *CAPABILITIES)
"""What `--kind` may be; auto: what the model's files say."""

SCORE_ACTIVATIONS = ("identity", "sigmoid", "softmax", "tanh")
"""Functions from logits to scores. The gateway applies them, in float32."""


@dataclass(frozen=True, slots=True)
class Step:
    """One layer of a head, applied to rows [N, D]: pooled vectors, or the states of tokens."""

    kind: str
    """"dense", "normalize", "layer_norm", or "logit": the product with row `rows[0]` of a matrix, less that with row
    `rows[1]` if there are two."""
    path: str = ""
    """Folder of the module's weights, relative to the model's; empty for "normalize", and where `tensor` is given."""
    in_dim: int = 0
    out_dim: int = 0
    bias: bool = True
    activation: str = "identity"
    """Of "dense": a key of `vecd.workers.engines.torch.pooling.ACTIVATIONS`."""
    tensor: str = ""
    """The weights are the model's own, under this name with ".weight" and ".bias" behind it."""
    bias_tensor: str = ""
    """The whole name of the bias, where it has another one."""
    epsilon: float = 1e-5
    """Of "layer_norm"."""
    rows: tuple[int, ...] = ()
    """Of "logit"."""
    file: str = ""
    """In place of `path`: a file relative to the model's folder, of tensors "weight" and "bias". Safetensors, or a
    state dict that torch has saved."""
    has_residual: bool = False
    """Of "dense": the input is added to the output, through a matrix of its own where they differ in width."""
    cap: float = 0.0
    """Of "logit": a product p becomes cap · tanh(p / cap) before the difference is taken; 0: it stays as it is."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Step":
        return cls(**{**fields, "rows": tuple(fields["rows"])})


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """How a model without a template for pairs in its tokenizer gets a query and a document: as one text.

    The text is `before`, the query, `between`, the document and `after`. "{instruction}" in the first three stands for
    the instruction. What is too long is cut at the end of the document."""

    before: str
    between: str
    after: str
    instruction: str = ""
    """The default."""


@dataclass(frozen=True, slots=True)
class TextTemplate:
    """How a model whose texts go through its chat template gets one."""

    variants: tuple[tuple[str, str], ...]
    """What is before and behind a text, and the same of a text with a prompt, for which "{instruction}" stands; one
    alone: there is no place for a prompt."""
    strips: bool = False
    """The text loses the blanks at its ends."""
    strips_prompt: bool = False
    adds_special_tokens: bool = False
    """The tokenizer puts its own special tokens around all of it."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "TextTemplate":
        return cls(**{**fields, "variants": tuple(map(tuple, fields["variants"]))})


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """Logits of a sequence, of a pair, or of each token: the card's `num_labels` are their number."""

    labels: tuple[str, ...]
    """The names, by index; "LABEL_0", … where the model has none."""
    activation: str
    """One of SCORE_ACTIVATIONS: the model's own, from logits to scores."""
    pooling: str = ""
    """One of `vecd.shm.modules.POOLING_MODES`; empty: for each token."""
    steps: tuple[Step, ...] = ()
    """From the pooled state to the logits. Empty where no table describes the family: then only the class in
    transformers computes it."""
    architecture: str = ""
    """The name of the class in transformers, which is the reference."""
    pair_template: PairTemplate | None = None
    """None: the tokenizer's own."""
    has_segments: bool = True
    """False: the tokenizer's settings leave token types out, so that all tokens have type 0."""
    padding_id: int | None = None
    """Of pooling "lasttoken": the last token with another id is pooled, as in transformers; None: the last one."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ScoreHead":
        template = fields["pair_template"] and PairTemplate(**fields["pair_template"])
        steps = tuple(map(Step.from_json, fields["steps"]))
        return cls(**{**fields, "labels": tuple(fields["labels"]), "steps": steps, "pair_template": template})


@dataclass(frozen=True, slots=True)
class SparseHead:
    """A weight for each token of the vocabulary (Output.SPARSE), or for each token of the sequence (LEXICAL)."""

    steps: tuple[Step, ...]
    """From the states of tokens to logits over the vocabulary, or to one number."""
    is_lexical: bool = False
    """One number, at least 0, for each token; of equal tokens the largest counts. `ignored_ids` have none."""
    pooling: str = "max"
    """"max" or "sum" over the tokens of a sequence."""
    num_logs: int = 1
    """How often log1p is applied behind relu."""
    ignored_ids: tuple[int, ...] = ()
    query_weights: str = ""
    """File, relative to the model's folder, with a weight for each token of the vocabulary: safetensors by id, or JSON
    by token. A query's sparse vector has those of its different tokens, and the transformer is for documents alone.
    Empty: there is no difference."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "SparseHead":
        steps = tuple(map(Step.from_json, fields["steps"]))
        return cls(**{**fields, "steps": steps, "ignored_ids": tuple(fields["ignored_ids"])})


@dataclass(frozen=True, slots=True)
class TokenHead:
    """A vector for each token (Output.TOKEN_VECTORS); the card's `token_dim` is its length."""

    steps: tuple[Step, ...]
    """From the states of tokens to their vectors."""
    query_marker: int | None = None
    """Put behind the first special token of a query; None: nothing is."""
    document_marker: int | None = None
    query_prompt: str = ""
    document_prompt: str = ""
    query_tokens: int = 0
    """A query is filled up to so many tokens with `expansion_id`, and cut there; 0: as long as it is."""
    max_query_tokens: int | None = None
    """Where a query is cut, if not at `query_tokens`; 0: at the model's limit."""
    expansion_id: int | None = None
    """None: a query is not filled up."""
    attends_to_expansion: bool = False
    """The tokens of a query attend to its expansion, too."""
    document_tokens: int = 0
    """A document is cut to so many tokens; 0: to the model's limit."""
    ignored_ids: tuple[int, ...] = ()
    """Tokens of a document that get no vector."""
    drops_first: bool = False
    """The first token of a sequence gets no vector."""
    is_mean: bool = False
    """The score of a document is the mean of the query's maxima, not their sum."""

    @property
    def has_unattended(self) -> bool:
        """Whether a query may have tokens that no token attends to, which are those of its expansion."""
        return self.expansion_id is not None and not self.attends_to_expansion

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "TokenHead":
        steps = tuple(map(Step.from_json, fields["steps"]))
        return cls(**{**fields, "steps": steps, "ignored_ids": tuple(fields["ignored_ids"])})
