"""What the card of a model for classification says: the kinds it can serve, its labels, and its head.

Owns the reading of a score head from a model's settings: labels, activation, and by family the layers behind the
transformer, as data. Reads no file. Called by `vecd.shm.card`.

Source of the heads: the classes …ForSequenceClassification and …ForTokenClassification of transformers 5.23, with which
every head is compared. Source of the settings: sentence-transformers 6.2's CrossEncoder, and transformers' pipeline for
text classification.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vecd.shm.heads import ScoreHead, Step
from vecd.shm.model_files import inner, number

_Config = Mapping[str, Any]

_OF_SEQUENCES, _OF_TOKENS = "ForSequenceClassification", "ForTokenClassification"
"""How the names of transformers' classes end."""

_MAX_RANKED_LABELS = 2
"""One score, or "not relevant" and "relevant". Of more labels, as of a model for inference, none is the relevance."""

_MAX_LABELS = 2**16
"""The list of names travels between processes, and a row of a slot has a float for each."""


def score_kinds(config: _Config, sentence_transformers: _Config, kind: str) -> tuple[str, ...]:
    """The capabilities of a model that transformers loads as a classifier, none for any other model.

    `config` is config.json, `sentence_transformers` config_sentence_transformers.json. `kind`, one of
    `vecd.shm.heads.KINDS`, counts where the files allow several. A classifier that is asked for as dense is none.
    Raises ValueError, with the key, for a number of labels that is none.
    """
    architecture = architecture_of(config)
    if architecture.endswith(_OF_TOKENS) and kind != "dense":
        return ("token-classify",)
    if not architecture.endswith(_OF_SEQUENCES) or kind == "dense":
        return ()
    num_labels = _num_labels(config)
    reranks = num_labels == 1 or kind == "rerank" or sentence_transformers.get("model_type") == "CrossEncoder"
    may_rerank = num_labels <= _MAX_RANKED_LABELS and kind != "classify"
    return ("rerank", "classify") if reranks and may_rerank else ("classify",)


def read_score_head(config: _Config, sentence_transformers: _Config, hidden_size: int) -> ScoreHead:
    """The head of a model with `score_kinds`. Raises ValueError, with the key, for a setting that is not known."""
    labels = _labels(config)
    architecture = architecture_of(config)
    is_of_tokens = architecture.endswith(_OF_TOKENS)
    code = inner(config, "auto_map").get(f"AutoModel{_OF_TOKENS if is_of_tokens else _OF_SEQUENCES}")
    if code is not None:
        raise ValueError(f"asks for Python code from the model's repository to be run (auto_map: {code})")
    family = _FAMILIES.get(str(config["model_type"]))
    steps = family.steps(config, hidden_size, len(labels), is_of_tokens=is_of_tokens) if family else ()
    pooling = "" if is_of_tokens else family.pooling(config) if family else "cls"
    padding_id = config.get("pad_token_id") if pooling == "lasttoken" else None
    return ScoreHead(
        labels=labels,
        activation=_activation(config, sentence_transformers, len(labels)),
        pooling=pooling,
        steps=steps,
        architecture=architecture,
        padding_id=padding_id,
    )


def architecture_of(config: _Config) -> str:
    """The class of transformers that the model was saved from; empty if config.json names none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


# --- labels and activation --------------------------------------------------------------------------------------


def _labels(config: _Config) -> tuple[str, ...]:
    """By index. As in transformers: without names they are LABEL_0, …, and without a number there are two."""
    names = config.get("id2label")
    if names is None:
        return tuple(f"LABEL_{index}" for index in range(_num_labels(config)))
    if not isinstance(names, Mapping) or set(names) != set(map(str, range(len(names)))) or not names:
        raise ValueError("id2label must have a name for each index from 0 on")
    if config.get("num_labels") not in (None, len(names)):
        raise ValueError(f"num_labels is {config['num_labels']!r}, and id2label has {len(names)} names")
    return tuple(str(names[str(index)]) for index in range(len(names)))


def _num_labels(config: _Config) -> int:
    names, stated = config.get("id2label"), config.get("num_labels")
    if isinstance(names, Mapping) and names:
        stated = len(names)
    if stated is None:
        return 2
    if type(stated) is not int or not 0 < stated <= _MAX_LABELS:
        raise ValueError(f"num_labels is {stated!r:.80}, and must be a whole number from 1 to {_MAX_LABELS:,}")
    return stated


_ACTIVATION_CLASSES = {
    f"torch.nn.{module}{name}": name.lower()
    for module, names in {
        "modules.activation.": ("Sigmoid", "Softmax", "Tanh"),
        "modules.linear.": ("Identity",),
        "": ("Sigmoid", "Softmax", "Tanh", "Identity"),
    }.items()
    for name in names
}
"""By the names that files give to a class, which is never imported."""


def activation_named(key: str, name: object) -> str:
    """One of `vecd.shm.heads.SCORE_ACTIVATIONS`, by the name of a class that a file has under `key`. Raises
    ValueError."""
    if str(name) not in _ACTIVATION_CLASSES:
        raise ValueError(f"{key} is {name!r}; known: {', '.join(_ACTIVATION_CLASSES)}")
    return _ACTIVATION_CLASSES[str(name)]


def _activation(config: _Config, sentence_transformers: _Config, num_labels: int) -> str:
    """The model's own, from the first of the places in which versions of sentence-transformers have saved it; else as
    transformers' pipeline chooses."""
    for key, name in (
        ("activation_fn (config_sentence_transformers.json)", sentence_transformers.get("activation_fn")),
        ("sentence_transformers.activation_fn", inner(config, "sentence_transformers").get("activation_fn")),
        ("sbert_ce_default_activation_function", config.get("sbert_ce_default_activation_function")),
    ):
        if name is not None:
            return activation_named(key, name)
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if num_labels == 1 or problem == "multi_label_classification" else "softmax"


# --- heads by family --------------------------------------------------------------------------------------------

_LAYER_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "tanh": "tanh", "silu": "silu", "swish": "silu"}
"""By transformers' names."""


@dataclass(frozen=True, slots=True)
class _Family:
    """Names of tensors, without ".weight" and ".bias"."""

    classifier: str = "classifier"
    dense: str = ""
    """The layer between the pooled state and the classifier; empty for none."""
    activation: str = "tanh"
    """What follows `dense`, or the setting that says it, as "setting:its default"."""
    token_classifier: str = "classifier"
    is_causal: bool = False
    """The last token is pooled, not the first, and the classifier of sequences has no bias."""

    def pooling(self, config: _Config) -> str:
        return "lasttoken" if self.is_causal else "cls"

    def steps(self, config: _Config, width: int, num_labels: int, *, is_of_tokens: bool) -> tuple[Step, ...]:
        """None where a setting asks for what no step computes."""
        if is_of_tokens:
            has_bias = not self.is_causal or bool(config.get("token_classification_bias", True))
            return (_dense(self.token_classifier, width, num_labels, bias=has_bias),)
        classifier = _dense(self.classifier, width, num_labels, bias=not self.is_causal)
        if not self.dense:
            return (classifier,)
        setting, _, default = self.activation.partition(":")
        activation = _LAYER_ACTIVATIONS.get(str(config.get(setting, default)) if default else setting)
        if activation is None or config.get("pooler_hidden_size", width) != width:
            return ()
        return (_dense(self.dense, width, width, activation=activation), classifier)


@dataclass(frozen=True, slots=True)
class _ModernBert(_Family):
    """A head of dense, activation and norm, the same for sequences and tokens."""

    def pooling(self, config: _Config) -> str:
        pooling = config.get("classifier_pooling", "cls")
        if pooling not in ("cls", "mean"):
            raise ValueError(f"classifier_pooling is {pooling!r:.80}; known: cls, mean")
        return str(pooling)

    def steps(self, config: _Config, width: int, num_labels: int, *, is_of_tokens: bool) -> tuple[Step, ...]:
        activation = _LAYER_ACTIVATIONS.get(str(config.get("classifier_activation", "gelu")))
        if activation is None:
            return ()
        has_bias, has_norm_bias = bool(config.get("classifier_bias", False)), bool(config.get("norm_bias", False))
        epsilon = number(config, "norm_eps", 1e-5)
        return (
            _dense("head.dense", width, width, activation=activation, bias=has_bias),
            Step("layer_norm", tensor="head.norm", in_dim=width, out_dim=width, bias=has_norm_bias, epsilon=epsilon),
            _dense("classifier", width, num_labels),
        )


def _dense(tensor: str, in_dim: int, out_dim: int, *, activation: str = "identity", bias: bool = True) -> Step:
    return Step("dense", tensor=tensor, in_dim=in_dim, out_dim=out_dim, activation=activation, bias=bias)


_BERT = _Family(dense="pooler.dense")
_ROBERTA = _Family(dense="classifier.dense", classifier="classifier.out_proj")
_DEBERTA = _Family(dense="pooler.dense", activation="pooler_hidden_act:gelu")
_CAUSAL = _Family(classifier="score", token_classifier="score", is_causal=True)

_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        **dict.fromkeys(("bert", "nomic_bert", "gte"), _BERT),
        "albert": _Family(dense="pooler"),
        **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet"), _ROBERTA),
        "electra": _Family(dense="classifier.dense", classifier="classifier.out_proj", activation="gelu"),
        "distilbert": _Family(dense="pre_classifier", activation="relu"),
        **dict.fromkeys(("deberta", "deberta-v2"), _DEBERTA),
        "modernbert": _ModernBert(),
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"), _CAUSAL),
    }
)
"""By transformers' name of the architecture. The head of any other is computed by transformers' class alone."""
