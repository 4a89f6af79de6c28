"""What the card of a model for classification says: the kinds it can serve, its labels, and its head.

Owns the reading of a score head: labels, activation, and by family the layers behind the transformer, as data.

Source of the heads: the classes …ForSequenceClassification and …ForTokenClassification of transformers 5.23. Source of
the settings: sentence-transformers 6.2's CrossEncoder, and transformers' pipeline for text classification.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from vecd.base.files import JsonMapping
from vecd.model.files import ModelError, ModelSettings, read_object, token_ids
from vecd.model.steps import HeadLayers, PairTemplate, ScoreHead, Step, UnknownActivation

_OF_SEQUENCES, _OF_TOKENS = "ForSequenceClassification", "ForTokenClassification"

_MAX_RANKED_LABELS = 2
"""One score, or "not relevant" and "relevant"."""

_MAX_LABELS = 2**16
"""The list of names travels between processes, and a row of a slot has a float for each."""


def score_kinds(config: ModelSettings, sentence_transformers: ModelSettings, kind: str) -> tuple[str, ...]:
    """The capabilities of a model that transformers loads as a classifier. `kind`, one of `vecd.model.steps.KINDS`,
    counts where the files allow several. A classifier that is asked for as dense is none."""
    architecture = architecture_of(config)
    if architecture.endswith(_OF_TOKENS) and kind != "dense":
        return ("token-classify",)
    if not architecture.endswith(_OF_SEQUENCES) or kind == "dense":
        return ()
    num_labels = _num_labels(config)
    reranks = num_labels == 1 or kind == "rerank" or sentence_transformers.get("model_type") == "CrossEncoder"
    may_rerank = num_labels <= _MAX_RANKED_LABELS and kind != "classify"
    return ("rerank", "classify") if reranks and may_rerank else ("classify",)


def read_score_head(config: ModelSettings, sentence_transformers: ModelSettings) -> ScoreHead:
    """Raises ModelError for a setting that is not known."""
    labels = _labels(config)
    architecture = architecture_of(config)
    is_of_tokens = architecture.endswith(_OF_TOKENS)
    code = config.inner("auto_map").get(f"AutoModel{_OF_TOKENS if is_of_tokens else _OF_SEQUENCES}")
    if code is not None:
        raise config.error(f"asks for Python code from the model's repository to be run (auto_map: {code})")
    pooling = "" if is_of_tokens else _pooling(config)
    padding_id = config.get("pad_token_id") if pooling == "lasttoken" else None
    return ScoreHead(
        labels=labels,
        activation=_activation(config, sentence_transformers, len(labels)),
        pooling=pooling,
        steps=_steps(config, len(labels), is_of_tokens=is_of_tokens),
        architecture=architecture,
        padding_id=padding_id,
    )


def architecture_of(config: JsonMapping) -> str:
    """Empty if config.json names none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


# --- labels and activation --------------------------------------------------------------------------------------


def _labels(config: ModelSettings) -> tuple[str, ...]:
    """By index. As in transformers: without names they are LABEL_0, …, and without a number there are two."""
    names = config.get("id2label")
    if names is None:
        return tuple(f"LABEL_{index}" for index in range(_num_labels(config)))
    if not isinstance(names, Mapping) or set(names) != set(map(str, range(len(names)))) or not names:
        raise config.error("id2label must have a name for each index from 0 on")
    if config.get("num_labels") not in (None, len(names)):
        raise config.error(f"num_labels is {config['num_labels']!r}, and id2label has {len(names)} names")
    return tuple(str(names[str(index)]) for index in range(len(names)))


def _num_labels(config: ModelSettings) -> int:
    names, stated = config.get("id2label"), config.get("num_labels")
    if isinstance(names, Mapping) and names:
        stated = len(names)
    if stated is None:
        return 2
    if type(stated) is not int or not 0 < stated <= _MAX_LABELS:
        raise config.error(f"num_labels is {stated!r:.80}, and must be a whole number from 1 to {_MAX_LABELS:,}")
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


def _activation_named(config: ModelSettings, key: str, name: object) -> str:
    """By the name of a class that a file has under `key`."""
    if str(name) not in _ACTIVATION_CLASSES:
        raise config.error(f"{key} is {name!r}; known: {', '.join(_ACTIVATION_CLASSES)}")
    return _ACTIVATION_CLASSES[str(name)]


def _activation(config: ModelSettings, sentence_transformers: ModelSettings, num_labels: int) -> str:
    """The model's own, from the first of the places in which versions of sentence-transformers have saved it; else as
    transformers' pipeline chooses."""
    for key, name in (
        ("activation_fn (config_sentence_transformers.json)", sentence_transformers.get("activation_fn")),
        ("sentence_transformers.activation_fn", config.inner("sentence_transformers").get("activation_fn")),
        ("sbert_ce_default_activation_function", config.get("sbert_ce_default_activation_function")),
    ):
        if name is not None:
            return _activation_named(config, key, name)
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if num_labels == 1 or problem == "multi_label_classification" else "softmax"


# --- heads by family --------------------------------------------------------------------------------------------

_CAUSAL = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")
"""The last token is pooled, not the first, and the classifier of sequences has no bias."""

_HEADS: Mapping[str, HeadLayers] = MappingProxyType(
    {
        **dict.fromkeys(("bert", "nomic_bert", "gte"), HeadLayers(dense="pooler.dense")),
        "albert": HeadLayers(dense="pooler"),
        **dict.fromkeys(
            ("roberta", "xlm-roberta", "camembert", "mpnet"),
            HeadLayers(dense="classifier.dense", last="classifier.out_proj"),
        ),
        "electra": HeadLayers(dense="classifier.dense", activation="gelu", last="classifier.out_proj"),
        "distilbert": HeadLayers(dense="pre_classifier", activation="relu"),
        **dict.fromkeys(
            ("deberta", "deberta-v2"), HeadLayers(dense="pooler.dense", activation="pooler_hidden_act:gelu")
        ),
        "modernbert": HeadLayers(
            dense="head.dense", activation="classifier_activation:gelu", norm="head.norm", epsilon="norm_eps:1e-5"
        ),
        **dict.fromkeys(_CAUSAL, HeadLayers(last="score")),
    }
)
"""By transformers' name of the architecture. The head of any other is computed by transformers' class."""


def _pooling(config: ModelSettings) -> str:
    model_type = config["model_type"]
    if model_type != "modernbert":
        return "lasttoken" if model_type in _CAUSAL else "cls"
    pooling = config.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise config.error(f"classifier_pooling is {pooling!r:.80}; known: cls, mean")
    return str(pooling)


def _steps(config: ModelSettings, num_labels: int, *, is_of_tokens: bool) -> tuple[Step, ...]:
    """Empty for a head that no table describes."""
    model_type, width = config["model_type"], config["hidden_size"]
    if (head := _HEADS.get(model_type)) is None:
        return ()
    has_bias = model_type not in _CAUSAL
    if is_of_tokens and model_type != "modernbert":
        has_bias = has_bias or bool(config.get("token_classification_bias", True))
        head = HeadLayers(last=head.last.partition(".")[0])
    elif head.dense and config.get("pooler_hidden_size", width) != width:
        return ()
    of_modernbert = {"head.dense": "classifier_bias", "head.norm": "norm_bias"}

    def has(tensor: str) -> bool:
        return tensor not in of_modernbert or bool(config.get(of_modernbert[tensor], False))

    try:
        steps = head.steps_before_last(config, width, width, has)
    except UnknownActivation:
        return ()
    return (*steps, Step("dense", tensor=head.last, in_dim=width, out_dim=num_labels, bias=has_bias))


# Rerankers that are causal language models: which token means yes, which no, and how a pair is put to them.
#
# The parts of a chat template are found by `vecd.launch.config.templates`.
#
# Sources: sentence-transformers 6.2, `LogitScore` and `CrossEncoder`; the model cards of Qwen3-Reranker and of
# bge-reranker-v2-gemma; `mxbai_rerank_v2.py` of mixedbread's package mxbai-rerank.


@dataclass(frozen=True, slots=True)
class _KnownModel:
    name: str
    """A regular expression."""
    model_type: str
    yes: str
    no: str | None
    template: PairTemplate


_KNOWN = (
    _KnownModel(
        r"qwen3-reranker",
        "qwen3",
        "yes",
        "no",
        PairTemplate(
            before="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
            'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
            "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: ",
            between="\n<Document>: ",
            after="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
            instruction="Given a web search query, retrieve relevant passages that answer the query",
        ),
    ),
    _KnownModel(
        r"mxbai-rerank-(base|large)-v2",
        "qwen2",
        "1",
        "0",
        PairTemplate(
            before="<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
            "<|im_end|>\n<|im_start|>user\nquery: ",
            between="\ndocument: ",
            after="\nYou are a search relevance expert who evaluates how well documents match search queries. For each "
            "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
            "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n",
        ),
    ),
    _KnownModel(
        r"bge-reranker-v2-gemma",
        "gemma",
        "Yes",
        None,
        PairTemplate(
            before="<bos>A: ",
            between="\nB: ",
            after="\n{instruction}",
            instruction="Given a query A and a passage B, determine whether the passage contains an answer to the "
            "query by providing a prediction of either 'Yes' or 'No'.",
        ),
    ),
)

_REFUSED = {
    "JinaForRanking": "listwise: the score of a document depends on the others of its request",
    "LayerWiseMiniCPMForCausalLM": "layerwise: its score comes from a layer in the middle, by code of its own",
    "CostWiseGemmaForCausalLM": "lightweight: it drops layers and tokens on the way, by code of its own",
}

_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text", "gemma3")
"""Families whose output layer is their table of embeddings unless config.json says otherwise. Source:
`tie_word_embeddings` of transformers' classes of settings."""

_CAP_BY_DEFAULT = {"gemma2": 30.0}
"""`final_logit_softcapping` of the same classes."""


def refuse_other_rankings(config: ModelSettings) -> None:
    """Raises ModelError for a reranker whose scores are not those of one pair in one pass."""
    if (architecture := architecture_of(config)) in _REFUSED:
        raise config.error(f"{architecture} is not supported: {_REFUSED[architecture]}")


def is_causal_model(config: JsonMapping) -> bool:
    return architecture_of(config).endswith("ForCausalLM")


def stated_head(config: ModelSettings, module: ModelSettings, activation: object) -> ScoreHead:
    """The head of a model with a LogitScore module, whose config is `module`. `activation` is the name of a class in
    torch.nn, or None. Raises ModelError for ids that are none, and for what is not supported."""
    if module.get("module_input_name", "causal_logits") != "causal_logits":
        raise module.error(f"module_input_name {module['module_input_name']!r} is not supported")
    names = ("true_token_id",) if module.get("false_token_id") is None else ("true_token_id", "false_token_id")
    for name in names:
        row = module.get(name)
        if type(row) is not int or not 0 <= row < config["vocab_size"]:
            raise module.error(f"{name} must be an id of the vocabulary, not {row!r}")
    # sentence-transformers' own for one score is sigmoid.
    applied = "sigmoid" if activation is None else _activation_named(module, "activation_fn", activation)
    return _head(config, tuple(module[name] for name in names), applied, None)


def known_head(folder: Path, config: ModelSettings, names: str) -> ScoreHead:
    """The head of a causal model that is known by name. Raises ModelError for an unknown one, and for a vocabulary
    without its words."""
    ids = token_ids(read_object(folder / "tokenizer.json"))
    known = _find(config, names)
    if known is None:
        raise ModelError(
            f"{folder}: is a causal language model, and nothing says which tokens mean yes and no: it needs the module "
            "LogitScore of sentence-transformers, or the name of a known reranker (Qwen3-Reranker, "
            "mxbai-rerank-base-v2 or -large-v2, bge-reranker-v2-gemma)"
        )
    words = [word for word in (known.yes, known.no) if word is not None]
    for word in words:
        if word not in ids:
            raise ModelError(f"{folder}: {word!r} is not one token of the vocabulary")
    return _head(config, tuple(ids[word] for word in words), "sigmoid", known.template)


def known_template(config: JsonMapping, names: str) -> PairTemplate | None:
    """How a pair is put to the model, also to its conversion for sequence classification, if its name is known."""
    known = _find(config, names)
    return None if known is None else known.template


def _find(config: JsonMapping, names: str) -> _KnownModel | None:
    of_type = (known for known in _KNOWN if known.model_type == config["model_type"])
    return next((known for known in of_type if re.search(known.name, names, re.IGNORECASE)), None)


def _head(config: ModelSettings, rows: tuple[int, ...], activation: str, template: PairTemplate | None) -> ScoreHead:
    model_type = config["model_type"]
    is_tied = config.get("tie_word_embeddings", model_type in _TIED_BY_DEFAULT)
    default = _CAP_BY_DEFAULT.get(model_type, 0.0)
    has_none = config.get("final_logit_softcapping", default) is None
    cap = 0.0 if has_none else config.number("final_logit_softcapping", default)
    tensor = "embed_tokens" if is_tied else "lm_head"
    return ScoreHead(
        labels=("LABEL_0",),
        activation=activation,
        pooling="lasttoken",
        steps=(Step("logit", in_dim=config["hidden_size"], out_dim=1, tensor=tensor, rows=rows, cap=cap),),
        architecture=architecture_of(config),
        pair_template=template,
    )
