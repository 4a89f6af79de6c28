"""Rerankers that are causal language models: which token means yes, which no, and how a pair is put to them.

Owns the head of a model with sentence-transformers' LogitScore module, the models that are known by name because their
files do not say that they are rerankers, and the refusal of those that do not score one pair at a time. Reads no file:
`vecd.shm.card` does, and adds the file to the message of a ValueError. The parts of a chat template are found by
`vecd.launch.config.templates`.

Sources: sentence-transformers 6.2, `LogitScore` and `CrossEncoder`; the model cards of Qwen3-Reranker and of
bge-reranker-v2-gemma; `mxbai_rerank_v2.py` of mixedbread's package mxbai-rerank.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vecd.shm.heads import PairTemplate, ScoreHead, Step
from vecd.shm.model_files import number
from vecd.shm.score_card import activation_named, architecture_of


@dataclass(frozen=True, slots=True)
class _KnownModel:
    name: re.Pattern[str]
    """In one of `vecd.shm.published.names_of` the model."""
    model_type: str
    yes: str
    no: str | None
    template: PairTemplate


_KNOWN = (
    _KnownModel(
        re.compile(r"qwen3-reranker", re.IGNORECASE),
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
        re.compile(r"mxbai-rerank-(base|large)-v2", re.IGNORECASE),
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
        re.compile(r"bge-reranker-v2-gemma", re.IGNORECASE),
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
"""By architecture: why the model is not served."""

_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text", "gemma3")
"""Families whose output layer is their table of embeddings unless config.json says otherwise; of others it is not.
Source: `tie_word_embeddings` of transformers' classes of settings."""

_CAP_BY_DEFAULT = {"gemma2": 30.0}
"""`final_logit_softcapping` of the same classes."""


def refuse_other_rankings(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a reranker whose scores are not those of one pair in one pass."""
    if (architecture := architecture_of(config)) in _REFUSED:
        raise ValueError(f"{architecture} is not supported: {_REFUSED[architecture]}")


def is_causal_model(config: Mapping[str, Any]) -> bool:
    """Whether the first architecture gives logits of the next token."""
    return architecture_of(config).endswith("ForCausalLM")


def stated_head(config: Mapping[str, Any], module: Mapping[str, Any], activation: object) -> ScoreHead:
    """The head of a model with a LogitScore module.

    `config` is config.json, with `hidden_size` and `vocab_size`; `module` the module's own, `activation` the name of a
    class in torch.nn, or None. Raises ValueError for ids that are none, and for what is not supported.
    """
    if module.get("module_input_name", "causal_logits") != "causal_logits":
        raise ValueError(f"module_input_name {module['module_input_name']!r} is not supported")
    names = ("true_token_id",) if module.get("false_token_id") is None else ("true_token_id", "false_token_id")
    for name in names:
        row = module.get(name)
        if type(row) is not int or not 0 <= row < config["vocab_size"]:
            raise ValueError(f"{name} must be an id of the vocabulary, not {row!r}")
    # sentence-transformers' own for one score is sigmoid.
    applied = "sigmoid" if activation is None else activation_named("activation_fn", activation)
    return _head(config, tuple(module[name] for name in names), applied, None)


def known_head(config: Mapping[str, Any], names: str, ids: Mapping[str, int]) -> ScoreHead:
    """The head of a causal model that is known by name. `names`: `vecd.shm.published.names_of` it; `ids`: those of its
    tokens. Raises ValueError for an unknown one, and for a vocabulary without its words."""
    known = _find(config, names)
    if known is None:
        raise ValueError(
            "is a causal language model, and nothing says which tokens mean yes and no: it needs the module LogitScore "
            "of sentence-transformers, or the name of a known reranker (Qwen3-Reranker, mxbai-rerank-base-v2 or "
            "-large-v2, bge-reranker-v2-gemma)"
        )
    words = [word for word in (known.yes, known.no) if word is not None]
    for word in words:
        if word not in ids:
            raise ValueError(f"{word!r} is not one token of the vocabulary")
    return _head(config, tuple(ids[word] for word in words), "sigmoid", known.template)


def known_template(config: Mapping[str, Any], names: str) -> PairTemplate | None:
    """How a pair is put to the model, also to its conversion for sequence classification, if its name is known."""
    known = _find(config, names)
    return None if known is None else known.template


def _find(config: Mapping[str, Any], names: str) -> _KnownModel | None:
    found = (known for known in _KNOWN if known.name.search(names) and known.model_type == config["model_type"])
    return next(found, None)


def _head(
    config: Mapping[str, Any], rows: tuple[int, ...], activation: str, template: PairTemplate | None
) -> ScoreHead:
    model_type = config["model_type"]
    is_tied = config.get("tie_word_embeddings", model_type in _TIED_BY_DEFAULT)
    default = _CAP_BY_DEFAULT.get(model_type, 0.0)
    has_none = config.get("final_logit_softcapping", default) is None
    cap = 0.0 if has_none else number(config, "final_logit_softcapping", default)
    tensor = "embed_tokens" if is_tied else "lm_head"
    return ScoreHead(
        labels=("LABEL_0",),
        activation=activation,
        pooling="lasttoken",
        steps=(Step("logit", in_dim=config["hidden_size"], out_dim=1, tensor=tensor, rows=rows, cap=cap),),
        architecture=architecture_of(config),
        pair_template=template,
    )
