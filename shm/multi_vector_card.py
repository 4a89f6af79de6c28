"""What the files of a multi-vector model say about its token vectors: ColBERT in three layouts, and BGE-M3.

Owns the layouts and the reading of a `TokenHead`. Reads JSON files and the headers of safetensors, no weights. Called
by `vecd.shm.card`.

Sources: the multi-vector encoder of sentence-transformers 6.2, which reads the three layouts (its own, PyLate's and
Stanford's), and FlagEmbedding's `inference/embedder/encoder_only/m3.py` for BGE-M3.
"""

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vecd.shm.heads import SparseHead, Step, TokenHead
from vecd.shm.model_files import ModelError, positive, read_object, read_optional, tensor_shapes, token_ids
from vecd.shm.modules import Module, read_steps

OWN, PYLATE, STANFORD = "sentence-transformers", "PyLate", "Stanford"
"""The layouts. The first lists every step; the others leave out the mask and the norm, which they always have."""

_SETTINGS = "config_sentence_transformers.json"
_DEFAULT_QUERY_TOKENS = 32

_PYLATE_KEYS = (
    "query_length",
    "document_length",
    "query_expansion",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "attend_to_mask_tokens",
    "query_prefix",
    "document_prefix",
    "skiplist_words",
)
"""A model whose settings have one of them expands queries unless they say otherwise."""


def layout_of(folder: Path) -> str:
    """One of the layouts, or empty: not a multi-vector model."""
    settings = read_optional(folder / _SETTINGS)
    match settings.get("model_type"):
        case "MultiVectorEncoder":
            return OWN
        case "ColBERT":
            return PYLATE
        case None:
            architectures = read_optional(folder / "config.json").get("architectures")
            if isinstance(architectures, list) and "HF_ColBERT" in architectures:
                return STANFORD
            return PYLATE if "query_prefix" in settings else ""
        case _:
            return ""


def read_token_steps(
    folder: Path, layout: str, modules: Sequence[Module], weights: Sequence[Path], hidden_size: int
) -> tuple[tuple[Step, ...], int]:
    """The steps behind the state of each token of a model in one of the layouts, and the number of floats behind them.

    `modules` are those behind the Transformer, `weights` the files of its weights. Raises ModelError for a module that
    is not supported, and for a projection that is missing."""
    if layout == STANFORD:
        return _linear_of_weights(weights, hidden_size)
    others = [module for module in modules if module.kind != "MultiVectorMask"]
    if layout == OWN and len(others) == len(modules):
        raise ModelError(f"{folder / 'modules.json'}: a multi-vector model must have a MultiVectorMask module")
    return read_steps(folder, others, hidden_size, of_tokens=True)


def _linear_of_weights(weights: Sequence[Path], hidden_size: int) -> tuple[tuple[Step, ...], int]:
    """The projection that is a tensor of the model's own file."""
    for path in weights:
        shape = tensor_shapes(path).get("linear.weight")
        if shape is not None:
            if len(shape) != 2 or shape[1] != hidden_size:
                raise ModelError(f"{path}: linear.weight is {shape}, but a token has {hidden_size} floats")
            step = Step("dense", tensor="linear", in_dim=hidden_size, out_dim=shape[0], bias=False)
            return (step,), shape[0]
    raise ModelError(f"{weights[0]}: linear.weight is missing (the projection of a ColBERT model)")


def read_token_head(
    folder: Path,
    weights_folder: Path,
    layout: str,
    steps: Sequence[Step],
    masks: Sequence[Path],
    sentence_bert: Mapping[str, Any],
    prompts: Mapping[str, str],
) -> TokenHead:
    """The head of a model in one of the layouts.

    `weights_folder` has the tokenizer. `steps` are those of its modules; `masks` the files of its MultiVectorMask
    modules; `sentence_bert` the settings of its Transformer; `prompts` the model's. Raises ModelError when a setting is
    not supported, or names a token that the vocabulary lacks.
    """
    path = folder / _SETTINGS
    if layout == STANFORD:
        path = folder / "artifact.metadata"
        settings = _as_pylate(read_optional(path))
    else:
        settings = read_optional(path)
    vocabulary = Vocabulary(weights_folder)
    for name in ("query_prefix", "document_prefix"):
        if not isinstance(settings.get(name), str | None):
            raise ModelError(f"{path}: {name} must be a string")
    query_marker, query_prompt = _marker(settings, "query", prompts, vocabulary)
    document_marker, document_prompt = _marker(settings, "document", prompts, vocabulary)
    lengths = {**settings, **{key: value for key, value in sentence_bert.items() if value is not None}}
    expansion = _expansion(path, settings, sentence_bert)
    query_tokens, max_query_tokens = _length(path, lengths, "query_length"), None
    if expansion is not None:
        if expansion.get("strategy") == "min":
            max_query_tokens = query_tokens
        query_tokens = positive(expansion, ("length",), path)
    words = _skipped_words(path, layout, settings, masks)
    return TokenHead(
        steps=tuple(steps) if layout == OWN else (*steps, Step("normalize")),
        query_marker=query_marker,
        document_marker=document_marker,
        query_prompt=query_prompt,
        document_prompt=document_prompt,
        query_tokens=query_tokens,
        max_query_tokens=max_query_tokens,
        expansion_id=None if expansion is None else vocabulary.expansion_id(path, expansion.get("token")),
        attends_to_expansion=expansion is not None and bool(expansion.get("attend")),
        document_tokens=_length(path, lengths, "document_length"),
        ignored_ids=tuple(sorted({vocabulary.ids[word] for word in words if word in vocabulary.ids})),
        is_mean=settings.get("similarity_fn_name") == "meanmaxsim",
    )


def _as_pylate(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Stanford's settings under PyLate's names. Queries are always expanded."""
    return {
        "query_prefix": metadata.get("query_token_id") or "[unused0]",
        "document_prefix": metadata.get("doc_token_id") or "[unused1]",
        "query_length": metadata.get("query_maxlen"),
        "document_length": metadata.get("doc_maxlen"),
        "attend_to_expansion_tokens": bool(metadata.get("attend_to_mask_tokens")),
        "skiplist_words": list(string.punctuation) if metadata.get("mask_punctuation", True) else [],
    }


def _marker(
    settings: Mapping[str, Any], role: str, prompts: Mapping[str, str], vocabulary: "Vocabulary"
) -> tuple[int | None, str]:
    """The id that is put behind the first token, and the text before the input. The prefix is a token if the vocabulary
    has it, with its space or without it, and text otherwise."""
    prefix = settings.get(f"{role}_prefix") or ""
    prompt = prompts.get(role, "").removeprefix(prefix)
    for token in (prefix, *prefix.split(None, 1)[:1]):
        if token in vocabulary.ids:
            rest = prefix.removeprefix(token)
            return vocabulary.ids[token], (rest if rest.strip() else "") + prompt
    return None, prefix + prompt


def _expansion(path: Path, settings: Mapping[str, Any], sentence_bert: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """As the newest layout writes it: strategy, length, token, attend. None: a query stays as it is."""
    if any(key in settings for key in _PYLATE_KEYS):
        attends = settings.get("attend_to_expansion_tokens", settings.get("attend_to_mask_tokens"))
        length = settings.get("query_length") or _DEFAULT_QUERY_TOKENS
        stated = {"strategy": "fixed", "attend": bool(attends), "length": length}
        default = settings.get("query_expansion", None if settings.get("do_query_expansion") is False else stated)
    else:
        default = None
    expansion = sentence_bert.get("query_expansion", default)
    if expansion is not None and (not isinstance(expansion, dict) or expansion.get("strategy") not in ("fixed", "min")):
        raise ModelError(f"{path}: query_expansion {expansion!r} is not supported")
    return expansion


def _length(path: Path, lengths: Mapping[str, Any], name: str) -> int:
    """0: not stated."""
    return 0 if lengths.get(name) is None else positive(lengths, (name,), path)


def _skipped_words(path: Path, layout: str, settings: Mapping[str, Any], masks: Sequence[Path]) -> list[str]:
    """Of the file at `path`, whose content `settings` is, or of the masks."""
    if layout != OWN:
        return list(string.punctuation) if settings.get("skiplist_words") is None else _words_in(path, settings)
    words: list[str] = []
    for mask_path in masks:
        mask = read_optional(mask_path)
        words += _words_in(mask_path, mask)
        tasks = mask.get("skiplist_tasks") or ["document"]
        if mask.get("keep_only_token_ids"):
            raise ModelError(f"{mask_path}: keep_only_token_ids is not supported")
        if words and tasks not in ("document", ["document"]):
            raise ModelError(f"{mask_path}: skiplist_tasks {tasks} is not supported: words are skipped in documents")
    return words


def _words_in(path: Path, settings: Mapping[str, Any]) -> list[str]:
    words = settings.get("skiplist_words") or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ModelError(f"{path}: skiplist_words must be a list of strings")
    return words


# --- BGE-M3 -----------------------------------------------------------------------------------------------------

SPARSE_LINEAR, COLBERT_LINEAR = "sparse_linear.safetensors", "colbert_linear.safetensors"
"""Files beside the model's."""

_UNUSED_TOKENS = ("cls_token", "sep_token", "eos_token", "pad_token", "unk_token")


def has_bge_m3(folder: Path) -> bool:
    """Whether `folder` has the files of the two heads that BGE-M3 has beside its dense vector."""
    return all((folder / name).is_file() for name in (SPARSE_LINEAR, COLBERT_LINEAR))


def read_bge_m3(folder: Path, weights_folder: Path, hidden_size: int) -> tuple[SparseHead, TokenHead]:
    """The two heads. Raises ModelError when the tokenizer in `weights_folder` cannot be read."""
    lexical = Step("dense", file=SPARSE_LINEAR, in_dim=hidden_size, out_dim=1, activation="relu")
    projection = Step("dense", file=COLBERT_LINEAR, in_dim=hidden_size, out_dim=hidden_size)
    vocabulary = Vocabulary(weights_folder)
    ids = {token_id for name in _UNUSED_TOKENS if (token_id := vocabulary.special(name)) is not None}
    sparse = SparseHead((lexical,), is_lexical=True, ignored_ids=tuple(sorted(ids)))
    return sparse, TokenHead((projection, Step("normalize")), drops_first=True, is_mean=True)


# --- the vocabulary ---------------------------------------------------------------------------------------------

_USUAL_MASKS = ("[MASK]", "<mask>")


class Vocabulary:
    """The ids of a tokenizer's tokens, from its files."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError when `folder` has no tokenizer.json, or a file is not what it should be."""
        path = folder / "tokenizer.json"
        self.ids = token_ids(path, read_object(path))
        self._special = {
            **read_optional(folder / "special_tokens_map.json"),
            **read_optional(folder / "tokenizer_config.json"),
        }

    def special(self, name: str) -> int | None:
        """The id of a special token, such as "mask_token"; None if the tokenizer has none."""
        token = self._special.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return self.ids.get(token) if isinstance(token, str) else None

    def expansion_id(self, path: Path, token: object) -> int:
        """The id of the token that a query is filled up with: `token`, as the file at `path` says, or the mask, or that
        of the end. Raises ModelError when the vocabulary has none of them."""
        if token is not None:
            found = self.ids.get(token) if isinstance(token, str) else None
        else:
            usual = (self.ids[mask] for mask in _USUAL_MASKS if mask in self.ids)
            choices = (self.special("mask_token"), next(usual, None), self.special("eos_token"))
            found = next((choice for choice in choices if choice is not None), None)
        if found is None:
            wanted = f"{token or 'mask or eos'!s:.80}"
            raise ModelError(f"{path}: the vocabulary has no token to expand queries with ({wanted})")
        return found
