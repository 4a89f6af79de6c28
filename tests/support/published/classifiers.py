"""Rerankers that are causal language models, and classifiers by entailment, in the layouts of their hub repositories.

Sources: the model cards; `modeling_zeranker.py` of zerank-1-small (a fifth of the logit of "Yes" behind the query as
the system's message and the document as the user's); the code beside ctxl-rerank-v2 (the logit of row 0).
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.llm_checkpoints import CHATML, save_causal, save_reranker
from tests.support.published import IdsOf, Layout, RowsOf
from tests.support.published.usual import save_scores, scores_reference

_SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
_UNORDERED = {"accept_unordered": True}
"""Random weights rank at random."""

# --- rerankers --------------------------------------------------------------------------------------------------

ZERANK = "<|im_start|>system\n{query}<|im_end|>\n<|im_start|>user\n{document}<|im_end|>\n<|im_start|>assistant\n"
CTXL = (
    "Check whether a given document contains information helpful to answer the query.\n<Document> {document}\n"
    "<Query> {query} ??"
)
QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
    "search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>"
    "\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_OF_ROLES = ZERANK.replace("{query}", "{{ of.query }}").replace("{document}", "{{ of.document }}")
_ROLES_OF_ZERANK = (
    "{%- set of = namespace() -%}{%- for message in messages -%}{%- if message.role == 'query' -%}"
    "{%- set of.query = message.content -%}{%- elif message.role == 'document' -%}"
    "{%- set of.document = message.content -%}{%- endif -%}{%- endfor -%}" + _OF_ROLES[:-1] + "{{ '\\n' }}"
)


def _save_plain(folder: Path, readme: str = "", config: Any = (), **settings: Any) -> None:
    save_causal(folder, **{"template": CHATML, "tie_word_embeddings": True, **_SIZES, **settings})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **dict(config)}))
    (folder / "README.md").write_text(f"---\n{readme}\n---\n")


def _save_zerank_1(folder: Path) -> None:
    code = {"auto_map": {"AutoConfig": "modeling_zeranker.ZEConfig"}}
    _save_plain(folder, "base_model:\n- Qwen/Qwen3-4B\npipeline_tag: text-ranking", code)
    (folder / "modeling_zeranker.py").write_text("raise RuntimeError('code of the repository was run')\n")


def _save_zerank_2(folder: Path) -> None:
    plain = folder / "plain"
    _save_plain(plain, template=_ROLES_OF_ZERANK, tie_word_embeddings=False)
    save_reranker(folder, plain, no=None, yes="Yes", activation_fn=torch.nn.Identity())
    for path in plain.iterdir():
        path.unlink()
    plain.rmdir()


def _save_ctxl(folder: Path) -> None:
    _save_plain(folder, "pipeline_tag: text-ranking")


def _save_renamed(folder: Path) -> None:
    _save_plain(folder, "base_model: Qwen/Qwen3-Reranker-0.6B\ntags:\n- legal")


def by_logit(yes: int | str, no: str | None = None, scale: float = 1.0) -> Callable[[Path], RowsOf]:
    """Of transformers' class with its whole output layer."""

    def load(folder: Path) -> RowsOf:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        tokens = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        row, less = (word if isinstance(word, int) else tokens.convert_tokens_to_ids(word) for word in (yes, no or 0))

        def rows_of(ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
            with torch.inference_mode():
                logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0, -1]
            score = logits[row] - (logits[less] if no else 0)
            return np.array([score * scale], dtype=np.float32)

        return rows_of

    return load


def by_template(template: str) -> Callable[[Path], IdsOf]:
    """A document that is too long is cut; what follows it is kept."""

    def load(folder: Path) -> IdsOf:
        tokens: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

        def ids_of(query: str, document: str) -> tuple[list[int], int]:
            before, _, behind = template.replace("{query}", query).partition("{document}")
            parts = [tokens(part, add_special_tokens=False)["input_ids"] for part in (before, document, behind)]
            whole: list[int] = tokens(before + document + behind, add_special_tokens=False)["input_ids"]
            if len(whole) <= tokens.model_max_length:
                return whole, 0
            parts[1] = parts[1][: tokens.model_max_length - len(parts[0]) - len(parts[2])]
            return [token for part in parts for token in part], 0

        return ids_of

    return load


# --- classifiers by entailment ------------------------------------------------------------------------------------


def _nli(name: str, family: str, tokenizer: str, *labels: str, stated: Any = None) -> Layout:
    save = partial(save_scores, family=family, tokenizer=tokenizer, labels=list(labels), stated=stated)
    return Layout(name, save, scores_reference, f"{family}-nli", "classify")


LAYOUTS: tuple[Layout, ...] = (
    Layout(
        "zeroentropy/zerank-1-small", _save_zerank_1, by_logit("Yes", scale=1 / 5), "qwen3-logit", "rerank", "fused",
        settings=_UNORDERED, ids=by_template(ZERANK),
    ),
    Layout(
        "zeroentropy/zerank-2-reranker", _save_zerank_2, by_logit("Yes"), "qwen3-logit", "rerank", "fused",
        settings=_UNORDERED, ids=by_template(ZERANK),
    ),
    Layout(
        "ContextualAI/ctxl-rerank-v2-instruct-multilingual-1b", _save_ctxl, by_logit(0), "qwen3-logit", "rerank",
        "fused", settings=_UNORDERED, ids=by_template(CTXL),
    ),
    Layout(
        "a-firm/legal-ranker-0.6b", _save_renamed, by_logit("yes", "no"), "qwen3-logit", "rerank", "fused",
        settings=_UNORDERED, ids=by_template(QWEN3),
    ),
    _nli("FacebookAI/roberta-large-mnli", "roberta", "roberta", "CONTRADICTION", "NEUTRAL", "ENTAILMENT"),
    _nli("MoritzLaurer/ModernBERT-base-zeroshot-v2.0", "modernbert", "modernbert", "entailment", "not_entailment"),
)  # fmt: skip
