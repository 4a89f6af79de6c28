"""Readers of models that give scores: classifiers of texts and of tokens, and rerankers.

Owns the reading of a score head: labels, activation, and by family the layers behind the transformer, as data.

Source of the heads: the classes …ForSequenceClassification and …ForTokenClassification of transformers 5.23. Source of
the settings: sentence-transformers 6.2's CrossEncoder, and transformers' pipeline for text classification.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from vecd.base.files import JsonObject
from vecd.model.files import ModelError, ModelSettings, token_ids
from vecd.model.folder import ModelFolder, architecture_of, is_causal_model
from vecd.model.steps import MODERNBERT, HeadLayers, PairTemplate, ScoreHead, Step, UnknownActivation

_OF_SEQUENCES, _OF_TOKENS = "ForSequenceClassification", "ForTokenClassification"

_MAX_RANKED_LABELS = 2
"""One score, or "not relevant" and "relevant"."""

_MAX_LABELS = 2**16
"""The list of names travels between processes, and a row of a slot has a float for each."""


class Classifier:
    """What transformers loads as a classifier. One that is asked for as dense is none."""

    def claims(self, folder: ModelFolder) -> bool:
        """Raises ModelError for a cross-encoder whose weights are no classifier's."""
        if not folder.is_plain or folder.kind == "dense":
            return False
        architecture = architecture_of(folder.config)
        is_classifier = architecture.endswith((_OF_SEQUENCES, _OF_TOKENS))
        if folder.is_cross_encoder and not is_classifier:
            raise folder.stated.error(f"model_type is CrossEncoder, and the weights are those of {architecture!r}")
        return is_classifier

    def card(self, folder: ModelFolder) -> JsonObject:
        config, stated = folder.config, folder.stated
        architecture, labels = architecture_of(config), _labels(config)
        is_of_tokens = architecture.endswith(_OF_TOKENS)
        code = config.inner("auto_map").get(f"AutoModel{_OF_TOKENS if is_of_tokens else _OF_SEQUENCES}")
        if code is not None:
            raise config.error(f"asks for Python code from the model's repository to be run (auto_map: {code})")
        pooling = "" if is_of_tokens else _pooling(config)
        inputs = folder.optional(folder.place, "tokenizer_config.json").get("model_input_names")
        head = ScoreHead(
            labels=labels,
            activation=_activation(config, stated, len(labels)),
            pooling=pooling,
            steps=_steps(config, len(labels), is_of_tokens=is_of_tokens),
            architecture="" if architecture == _NEMOTRON else architecture,
            pair_template=_NEMOTRON_TEMPLATE if architecture == _NEMOTRON else None,
            has_segments=not isinstance(inputs, list) or "token_type_ids" in inputs,
            padding_id=config.get("pad_token_id") if pooling == "lasttoken" else None,
        )
        if stated.get("default_prompt_name"):
            raise stated.error("default_prompt_name is not supported for a model that takes pairs")
        reranks = len(labels) == 1 or folder.kind == "rerank" or folder.is_cross_encoder
        if is_of_tokens:
            capabilities: tuple[str, ...] = ("token-classify",)
        elif reranks and len(labels) <= _MAX_RANKED_LABELS and folder.kind != "classify":
            capabilities = ("rerank", "classify")
        else:
            capabilities = ("classify",)
        own = {"dim": len(labels), "num_labels": len(labels), "capabilities": capabilities, "score": head}
        return {**folder.of_transformer(folder.sentence_bert("sequence-classification")), **own}


# --- labels and activation --------------------------------------------------------------------------------------


def _labels(config: ModelSettings) -> tuple[str, ...]:
    """By index. As in transformers: without names they are LABEL_0, …, and without a number there are two."""
    names, num_labels = config.get("id2label"), config.get("num_labels")
    if names is None:
        num_labels = 2 if num_labels is None else num_labels
    elif not isinstance(names, Mapping) or set(names) != set(map(str, range(len(names)))) or not names:
        raise config.error("id2label must have a name for each index from 0 on")
    elif num_labels not in (None, len(names)):
        raise config.error(f"num_labels is {num_labels!r}, and id2label has {len(names)} names")
    else:
        num_labels = len(names)
    if type(num_labels) is not int or not 0 < num_labels <= _MAX_LABELS:
        raise config.error(f"num_labels is {num_labels!r:.80}, and must be a whole number from 1 to {_MAX_LABELS:,}")
    return tuple(str(names[str(index)]) if names else f"LABEL_{index}" for index in range(num_labels))


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

_NEMOTRON = "LlamaBidirectionalForSequenceClassification"
"""Of NVIDIA's NeMo: the mean is pooled, and the logits are divided by `temperature`."""
_NEMOTRON_TEMPLATE = PairTemplate(before="<|begin_of_text|>question:", between=" \n \n passage:", after="")
"""Source: the model card of llama-nemotron-rerank-1b-v2; the first token is its tokenizer's."""

_HEADS: Mapping[str, HeadLayers] = MappingProxyType(
    {
        **dict.fromkeys(("bert", "jina_bert", "nomic_bert", "gte"), HeadLayers(dense="pooler.dense")),
        "albert": HeadLayers(dense="pooler"),
        **dict.fromkeys(
            ("roberta", "xlm-roberta", "xlm_roberta_flash", "jina_embeddings_v3", "camembert", "mpnet"),
            HeadLayers(dense="classifier.dense", last="classifier.out_proj"),
        ),
        "electra": HeadLayers(dense="classifier.dense", activation="gelu", last="classifier.out_proj"),
        "distilbert": HeadLayers(dense="pre_classifier", activation="relu"),
        **dict.fromkeys(
            ("deberta", "deberta-v2"), HeadLayers(dense="pooler.dense", activation="pooler_hidden_act:gelu")
        ),
        "modernbert": MODERNBERT,
        **dict.fromkeys(_CAUSAL, HeadLayers(last="score")),
    }
)
"""By transformers' name of the architecture. The head of any other is computed by transformers' class."""


def _pooling(config: ModelSettings) -> str:
    model_type = config["model_type"]
    if architecture_of(config) == _NEMOTRON:
        return "mean"
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
    divisor = 1.0
    if architecture_of(config) == _NEMOTRON and not (divisor := config.number("temperature", 1.0)) > 0:
        raise config.error(f"temperature is {divisor}, and must be greater than 0")
    last = Step("dense", tensor=head.last, in_dim=width, out_dim=num_labels, bias=has_bias, divisor=divisor)
    return (*steps, last)


# Rerankers that are causal language models: which token means yes, which no, and how a pair is put to them.
#
# The parts of a chat template are found by `vecd.launch.config.templates`.
#
# Sources: sentence-transformers 6.2, `LogitScore` and `CrossEncoder`; the model cards of Qwen3-Reranker, of
# bge-reranker-v2-gemma and of ctxl-rerank-v2; `mxbai_rerank_v2.py` of mixedbread's package mxbai-rerank;
# `modeling_zeranker.py` of zerank-1-small, whose score is the sigmoid of a fifth of the logit.


@dataclass(frozen=True, slots=True)
class _KnownModel:
    name: str
    """A regular expression."""
    model_type: str
    yes: str | int
    """A token, or its id."""
    no: str | None
    template: PairTemplate
    scale: float = 1.0
    sign: str = ""
    """What the chat template of a copy under another name has."""


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
        sign="Judge whether the Document meets the requirements based on the Query and the Instruct",
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
    _KnownModel(
        r"zerank-[12]",
        "qwen3",
        "Yes",
        None,
        PairTemplate(
            before="<|im_start|>system\n",
            between="<|im_end|>\n<|im_start|>user\n",
            after="<|im_end|>\n<|im_start|>assistant\n",
        ),
        scale=1 / 5,
    ),
    _KnownModel(
        r"ctxl-rerank-v2",
        "qwen3",
        0,
        None,
        PairTemplate(
            before="Check whether a given document contains information helpful to answer the query.\n<Document> ",
            between="\n<Query> ",
            after="{ instruction} ??",
            is_document_first=True,
        ),
    ),
)

_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text", "gemma3")
"""Families whose output layer is their table of embeddings unless config.json says otherwise. Source:
`tie_word_embeddings` of transformers' classes of settings."""

_CAP_BY_DEFAULT = {"gemma2": 30.0}
"""`final_logit_softcapping` of the same classes."""


class LlmReranker:
    """A causal language model that says yes or no: with the module LogitScore, known by its files, or by settings."""

    def claims(self, folder: ModelFolder) -> bool:
        if folder.kinds == ["Transformer", "LogitScore"]:
            return True
        if not folder.is_plain or folder.kind not in ("auto", "rerank") or not is_causal_model(folder.config):
            return False
        # A known name is enough: such a model has no vectors to embed texts with.
        return folder.kind == "rerank" or bool(folder.yes) or known_template(folder) is not None

    def card(self, folder: ModelFolder) -> JsonObject:
        is_stated = bool(folder.modules_behind("Transformer")) and not folder.yes
        head = _stated_head(folder) if is_stated else _known_head(folder)
        own = {"dim": 1, "num_labels": 1, "pooling": (head.pooling,), "capabilities": ("rerank",), "score": head}
        return {**folder.of_transformer(folder.sentence_bert("text-generation")), **own}


def _stated_head(folder: ModelFolder) -> ScoreHead:
    """By the module LogitScore. Raises ModelError for ids that are none, and for what is not supported."""
    config, module = folder.config, folder.settings(folder.modules[1].path, "config.json")
    if module.get("module_input_name", "causal_logits") != "causal_logits":
        raise module.error(f"module_input_name {module['module_input_name']!r} is not supported")
    names = ("true_token_id",) if module.get("false_token_id") is None else ("true_token_id", "false_token_id")
    for name in names:
        row = module.get(name)
        if type(row) is not int or not 0 <= row < config["vocab_size"]:
            raise module.error(f"{name} must be an id of the vocabulary, not {row!r}")
    # sentence-transformers' own for one score is sigmoid.
    activation = folder.stated.get("activation_fn")
    applied = "sigmoid" if activation is None else _activation_named(module, "activation_fn", activation)
    return _head(config, tuple(module[name] for name in names), applied, None)


def _known_head(folder: ModelFolder) -> ScoreHead:
    """Raises ModelError for an unknown model, and for a vocabulary without its words."""
    known, scale = _find(folder), 1.0
    words: tuple[str | int | None, ...]
    if folder.yes:
        words = folder.yes, folder.no or None
    elif known is not None:
        words, scale = (known.yes, known.no), known.scale
    else:
        raise ModelError(
            f"{folder.weights_folder}: is a causal language model, and nothing says which tokens mean yes and no: it "
            "needs yes, no and template in a table [models.NAME], the module LogitScore of sentence-transformers, or "
            "the name of a known reranker (Qwen3-Reranker, mxbai-rerank-base-v2 or -large-v2, bge-reranker-v2-gemma, "
            "zerank-1 or -2, ctxl-rerank-v2)"
        )
    ids = token_ids(folder.settings(folder.place, "tokenizer.json"))
    rows = tuple(_row_of(word, ids, folder) for word in words if word is not None)
    head = _head(folder.config, rows, "sigmoid", None if known is None else known.template)
    return replace(head, steps=tuple(replace(step, scale=scale) for step in head.steps))


def _row_of(word: str | int, ids: Mapping[str, int], folder: ModelFolder) -> int:
    if isinstance(word, int):
        return word
    written = (word, word.replace(" ", "Ġ"), word.replace(" ", "▁"))  # a blank, as vocabularies have it
    found = next((ids[each] for each in written if each in ids), None)
    if found is None:
        raise ModelError(f"{folder.weights_folder}: {word!r} is not one token of the vocabulary")
    return found


def known_template(folder: ModelFolder) -> PairTemplate | None:
    """How a pair is put to the model, also to its conversion for sequence classification, if it is known."""
    known = _find(folder)
    return None if known is None else known.template


def _find(folder: ModelFolder) -> _KnownModel | None:
    """By the name of the model or of one that it was made from, or by the sign in its chat template."""
    of_type = [known for known in _KNOWN if known.model_type == folder.config["model_type"]]
    names, chat = folder.names, str(folder.optional(folder.place, "tokenizer_config.json").get("chat_template"))
    with suppress(OSError, ValueError):
        chat = (folder.weights_folder / "chat_template.jinja").read_text(encoding="utf-8")
    by_name = (known for known in of_type if re.search(known.name, names, re.IGNORECASE))
    return next(by_name, next((known for known in of_type if known.sign and known.sign in chat), None))


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
