"""The model card: the facts of a model that every process needs, read from its folder's JSON files.

Owns the reading of `config.json`, `modules.json` and the sentence-transformers files beside them, and the refusal
of folders that cannot be served. Reads no weights and imports no torch, so the supervisor can call it first and report
a broken folder in one line before any process starts. Sources of the formats: the files themselves as
saved by sentence-transformers 2 to 6 (`modules.json`, `*_Pooling/config.json`, `*_Dense/config.json`), and for static
embeddings the code of sentence-transformers 5 (StaticEmbedding) and of Model2Vec 0.10.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

from vecd.shm.architecture import native_config
from vecd.shm.heads import ScoreHead, SparseHead, Step, TextTemplate, TokenHead
from vecd.shm.llm_reranker_card import (
    is_causal_model,
    known_head,
    known_template,
    refuse_other_rankings,
    stated_head,
)
from vecd.shm.model_files import (
    EXPORT,
    inner,
    positive,
    read_object,
    read_optional,
    single_file,
    tensor_shapes,
    token_ids,
)
from vecd.shm.model_files import ModelError as ModelError
from vecd.shm.model_files import one_line as one_line
from vecd.shm.modules import Module, check_modules, read_modules, read_pooling, read_steps
from vecd.shm.multi_vector_card import STANFORD, has_bge_m3, layout_of, read_bge_m3, read_token_head, read_token_steps
from vecd.shm.output import Output
from vecd.shm.published import names_of, published
from vecd.shm.score_card import architecture_of, read_score_head, score_kinds
from vecd.shm.sparse_card import SparseModules, find_sparse, steps_of_masked_words

_SPANNED_DIM = 1024
"""Floats of a row where an output spans several: 30 rows for the vocabulary of BERT, so that a slot of 2,048 rows holds
68 sequences."""

# Families whose position ids start after the padding id, so that there are two more positions than tokens.
# Source: create_position_ids_from_input_ids in transformers' modeling_roberta.
POSITIONS_AFTER_PADDING = frozenset(
    {
        "roberta",
        "xlm-roberta",
        "camembert",
        "xlm-roberta-xl",
        "mpnet",
        "longformer",
        "data2vec-text",
        "roberta-prelayernorm",
        "xmod",
        "esm",
        "ibert",
        "lilt",
        "luke",
    }
)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Immutable facts of a model. Travels between processes as JSON (`to_json`, `from_json`)."""

    folder: str
    """Absolute path of the model's files."""
    weights_folder: str
    """Absolute path of config.json and the weights: `folder`, or its `0_Transformer` in old layouts."""
    model_type: str
    """As transformers names the architecture, for example "bert"."""
    hidden_size: int
    """H: floats per token."""
    dim: int
    """D: floats per vector, after pooling and every step. Of a model without dense vectors: those of its main output.
    """
    max_tokens: int
    """Longest sequence, special tokens included. Longer input is cut on the right."""
    vocab_size: int
    """Token ids are 0 … vocab_size - 1."""
    pooling: tuple[str, ...]
    """One or more of `vecd.shm.modules.POOLING_MODES`; several are concatenated in that order. Empty without dense
    vectors."""
    steps: tuple[Step, ...]
    """Of dense vectors; other heads have their own."""
    lowercase: bool
    """Texts are converted to lower case before the tokenizer's own normalizer."""
    prompt: str
    """Prefixed to every text that has no other prompt; empty for most models."""
    prompts: tuple[tuple[str, str], ...] = ()
    """Name and text of each of the model's prompts."""
    pools_prompt: bool = True
    """The tokens of a prompt are pooled with those of the text. If False, prompts are refused."""
    is_matryoshka: bool = False
    """A vector can be cut to its first elements and normalized again."""
    matryoshka_dims: tuple[int, ...] = ()
    """The lengths that the model was trained for; empty for any length."""
    truncate_dim: int = 0
    """sentence-transformers' setting: elements of a vector for requests that do not say how many; 0: all."""
    weights_bytes: int = 0
    """The size of all files of weights, including those of modules behind the first."""
    tokenizer_file: str = ""
    """Absolute path of the fast tokenizer's file; empty until `vecd.launch.config.plan` has converted it."""
    export_file: str = ""
    """Absolute path of the ONNX export that is the model's weights; empty where these are safetensors."""
    ignored_ids: tuple[int, ...] = ()
    """Of static embeddings alone: token ids that have no row in the table and do not count in the mean. The last one,
    vocab_size - 1, stands for a text without tokens, because a sequence has at least one."""
    capabilities: tuple[str, ...] = ("dense",)
    """At least one of `vecd.shm.heads.CAPABILITIES`, in that order."""
    num_labels: int = 0
    """Logits of a sequence, a pair or a token."""
    token_dim: int = 0
    """Floats of a token's vector."""
    score: ScoreHead | None = None
    """Of a model that can rerank by pairs or classify."""
    sparse: SparseHead | None = None
    tokens: TokenHead | None = None
    """Of a multi-vector model."""
    assumes_pooling: bool = False
    """Neither the files nor --pooling say how tokens become a vector."""
    text_template: TextTemplate | None = None
    """Of a model whose texts go through its chat template. Found by `vecd.launch.config.templates`."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ModelCard":
        steps = tuple(map(Step.from_json, fields["steps"]))
        tuples = {name: tuple(fields[name]) for name in ("pooling", "matryoshka_dims", "ignored_ids", "capabilities")}
        prompts = tuple((name, text) for name, text in fields["prompts"])
        heads = {
            "score": fields["score"] and ScoreHead.from_json(fields["score"]),
            "sparse": fields["sparse"] and SparseHead.from_json(fields["sparse"]),
            "tokens": fields["tokens"] and TokenHead.from_json(fields["tokens"]),
            "text_template": fields["text_template"] and TextTemplate.from_json(fields["text_template"]),
        }
        return cls(**{**fields, **tuples, **heads, "steps": steps, "prompts": prompts})

    @property
    def main_output(self) -> Output:
        """The output that shows most of what the model computes: engines are compared by it."""
        if self.score is not None:
            return Output.SCORES if self.score.pooling else Output.TOKEN_SCORES
        if len(self.capabilities) > 1:
            return Output.HYBRID
        if self.sparse is not None:
            return Output.LEXICAL if self.sparse.is_lexical else Output.SPARSE
        return Output.VECTORS if self.tokens is None else Output.TOKEN_VECTORS

    @property
    def outputs(self) -> frozenset[Output]:
        """What a sequence may ask of the model."""
        found = {self.main_output}
        if "dense" in self.capabilities:
            found |= {Output.VECTORS, Output.UNNORMALIZED}
            found |= {Output.TOKENS} if self.hidden_size <= self.row_dim else set()
        if self.sparse is not None:
            found.add(Output.LEXICAL if self.sparse.is_lexical else Output.SPARSE)
        if self.tokens is not None:
            found.add(Output.TOKEN_VECTORS)
        return frozenset(found)

    @property
    def reads_first_tokens_only(self) -> bool:
        """Whether nothing of the model needs the last hidden state of another token than each sequence's first."""
        return self.score is not None and self.score.pooling == "cls" and self.outputs == {Output.SCORES}

    @property
    def row_dim(self) -> int:
        """Floats of a row in a slot."""
        output = self.main_output
        widths = [_SPANNED_DIM if output.spans_rows else output.width_of(self)]
        return max(*widths, self.dim if "dense" in self.capabilities else 0)

    @property
    def all_steps(self) -> tuple[Step, ...]:
        """Those of dense vectors, and of every other head."""
        return (*self.steps, *(step for head in (self.score, self.sparse, self.tokens) if head for step in head.steps))

    @property
    def pooling_of_output(self) -> str:
        """How the tokens of a sequence become its vector, its scores or its sparse weights; empty where each token has
        its own, or nothing is known."""
        if "dense" in self.capabilities:
            return "+".join(self.pooling)
        if self.score is not None:
            return self.score.pooling
        return "" if self.sparse is None else self.sparse.pooling

    @property
    def assumption(self) -> str:
        """What is assumed and may be wrong, for the operator; empty for nothing."""
        if not self.assumes_pooling:
            return ""
        return (
            f"no modules.json: {'+'.join(self.pooling)} pooling without normalisation is assumed, as "
            "sentence-transformers does; right only if the model was trained with it (--pooling says another)"
        )

    @property
    def has_segments(self) -> bool:
        """Whether the tokens of the second part of a pair have another type, if the model has types. The families
        whose positions begin after the padding have tokenizers that give every token type 0."""
        has_none = self.score is None or not self.score.has_segments
        return not has_none and self.model_type not in POSITIONS_AFTER_PADDING

    @property
    def is_normalized(self) -> bool:
        """Whether vectors have length 1. sentence-transformers cuts them to `truncate_dim` after its last step."""
        return bool(self.steps) and self.steps[-1].kind == "normalize" and not self.truncate_dim

    @property
    def default_dim(self) -> int:
        """Floats of a dense vector for a request that does not say how many."""
        return self.truncate_dim or self.dim

    @property
    def pools_states(self) -> bool:
        """Whether a vector is the mean of its tokens' last hidden states, or that brought to length 1."""
        are_final = Output.TOKENS in self.outputs and not self.is_static
        return are_final and self.pooling == ("mean",) and all(step.kind == "normalize" for step in self.steps)

    @property
    def is_static(self) -> bool:
        """Whether the model is a table with a row per token, and no transformer."""
        return bool(self.ignored_ids)


def read_card(folder: Path, kind: str = "auto", pooling: str = "auto") -> ModelCard:
    """Read the card of the model in `folder`.

    `kind`: "auto", or the capability that the model is to have where its files allow several, one of
    `vecd.shm.heads.KINDS`. `pooling`: "auto", or the one that a dense model has, whatever its files say.

    Raises ModelError when a required file is missing or unreadable, when the weights are neither safetensors nor an
    ONNX export, when the model needs code from its repository that has no equal in transformers, when it has an
    unknown module, when it is not of `kind`, or has no `pooling`.
    """
    _refuse_formats(folder)
    card = _read_card(folder.resolve(), kind, pooling)
    if kind not in ("auto", *card.capabilities):
        has = "vectors" if "dense" in card.capabilities else f"the head for {' and '.join(card.capabilities)}"
        raise ModelError(f"{folder}: --kind {kind} given, and the model has {has} only")
    if pooling != "auto" and ("dense" not in card.capabilities or card.is_static):
        what = "is a table of static embeddings" if card.is_static else f"is for {' and '.join(card.capabilities)}"
        raise ModelError(f"{folder}: --pooling {pooling} given, and the model {what}: it is for dense transformers")
    return card


def _refuse_formats(folder: Path) -> None:
    """Raises ModelError for what is no folder, and for weights of a known kind that is not served."""
    suffixes = {path.suffix for path in (folder, *folder.glob("*"))}
    # The fetch of a hub id takes no GGUF.
    is_gguf = ".gguf" in suffixes or any("gguf" in part.lower() for part in folder.parts if part.startswith("models--"))
    if is_gguf and not suffixes & {".safetensors", ".bin"}:
        raise ModelError(f"{folder}: is in the GGUF format, which vecd does not serve")
    if not folder.is_dir():
        raise ModelError(f"{folder}: {'is a file, and a model is a folder' if folder.exists() else 'no such folder'}")
    if (adapter := folder / "adapter_config.json").is_file():
        base = read_object(adapter).get("base_model_name_or_path") or "a model that it does not name"
        raise ModelError(f"{adapter}: is a LoRA adapter of {base}, and vecd serves whole models")


def _read_card(folder: Path, kind: str, pooling: str) -> ModelCard:
    """The card by the first kind that the files have the signs of. `folder` exists, and is absolute."""
    sparse_modules = None if has_bge_m3(folder) else find_sparse(folder, kind)
    if sparse_modules is not None:
        return _read_sparse(_read_transformer(folder, sparse_modules.transformer), sparse_modules)
    layout = layout_of(folder)
    first, *modules = _read_chain(folder, is_pooled=not layout)
    if first.kind == "StaticEmbedding":
        return _read_static(folder, first, modules)
    transformer = _read_transformer(folder, first.path, may_be_export=True)
    if layout:
        return _read_multi_vector(transformer, layout, modules)
    logit_head = _read_logit_head(transformer, modules, kind)
    if logit_head is not None:
        return _read_llm_reranker(transformer, logit_head)
    classifier = None if modules else _read_classifier(transformer, kind)
    if classifier is not None:
        return _with_score(transformer, *classifier)
    return _read_dense(transformer, modules, kind, pooling)


# --- a transformer, and what is behind it -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Transformer:
    """What the files of a model of any kind with a transformer say."""

    folder: Path
    """The model's."""
    path: Path
    """The folder of config.json and the weights."""
    config: Mapping[str, Any]
    """That of config.json, with `hidden_size` and `vocab_size`."""
    hidden_size: int
    vocab_size: int
    weights: list[Path]
    """The files of its weights."""
    export: Path | None
    """The ONNX export that is served."""

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    def card(self, sentence_bert: Mapping[str, Any], *, all_steps: Sequence[Step] = (), **fields: Any) -> ModelCard:
        """The card with these `fields`. `sentence_bert`: the settings of its module. `all_steps`: those of
        every head, whose files count as weights."""
        weights = [*self.weights, *(self.folder / step.path / "model.safetensors" for step in all_steps if step.path)]
        weights += [self.folder / step.file for step in all_steps if step.file]
        tokenizer = self.path / "tokenizer.json"
        prompt, prompts = _read_prompts(self.folder)
        common: dict[str, Any] = {
            "folder": str(self.folder),
            "weights_folder": str(self.path),
            "model_type": str(self.config["model_type"]),
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "pooling": (),
            "steps": (),
            "lowercase": bool(sentence_bert.get("do_lower_case", False)),
            "prompt": prompt,
            "prompts": prompts,
            "weights_bytes": sum(path.stat().st_size for path in weights),
            "tokenizer_file": str(tokenizer) if tokenizer.is_file() else "",
            "export_file": str(self.export or ""),
        }
        if "max_tokens" not in fields:
            common["max_tokens"] = _max_tokens(self.path, self.config, sentence_bert)
        return ModelCard(**{**common, **fields})


def _read_transformer(folder: Path, module_path: str, *, may_be_export: bool = False) -> _Transformer:
    path = folder / module_path
    config = _read_config(path)
    _check_files(path)
    export = _export_of(path) if may_be_export else None
    weights = export_files(export) if export else _weights_of(path)
    hidden_size = positive(config, ("hidden_size", "dim", "d_model", "n_embd"), path / "config.json")
    vocab_size = positive(config, ("vocab_size",), path / "config.json")
    config = {**config, "hidden_size": hidden_size, "vocab_size": vocab_size}
    return _Transformer(folder, path, config, hidden_size, vocab_size, weights, export)


def _read_dense(transformer: _Transformer, modules: list[Module], kind: str, given_pooling: str) -> ModelCard:
    """The card of a model with dense vectors; of BGE-M3, with sparse and token vectors as well."""
    assumes_pooling = not modules and given_pooling == "auto"
    if assumes_pooling and kind == "auto":
        _refuse_guess(transformer)
    folder, config = transformer.folder, transformer.config
    sentence_bert = _read_sentence_bert(transformer.path)
    pooling: tuple[str, ...] = (_default_pooling(config),)
    pools_prompt = True
    if modules:
        default_prompt, _ = _read_prompts(folder)
        pooling, pools_prompt = read_pooling(folder / modules[0].path / "config.json", default_prompt)
    if given_pooling != "auto":
        pooling = (given_pooling,)
    steps, dim = read_steps(folder, modules[1:], transformer.hidden_size * len(pooling))
    fields: dict[str, Any] = {}
    all_steps = steps
    if modules and not transformer.export and kind != "dense" and has_bge_m3(folder):
        sparse, tokens = read_bge_m3(folder, transformer.path, transformer.hidden_size)
        all_steps = (*steps, *sparse.steps, *tokens.steps)
        fields = {
            "capabilities": ("dense", "sparse", "multi-vector"),
            "token_dim": transformer.hidden_size,
            "sparse": sparse,
            "tokens": tokens,
        }
    return transformer.card(
        sentence_bert,
        all_steps=all_steps,
        steps=steps,
        **fields,
        dim=dim,
        pooling=pooling,
        pools_prompt=pools_prompt,
        assumes_pooling=assumes_pooling,
        **_read_matryoshka(folder, config, dim, transformer.config_path),
    )


def _refuse_guess(transformer: _Transformer) -> None:
    """Raises ModelError for a plain model whose class or name tells that it may be something else than dense."""
    config, path = transformer.config, transformer.config_path
    architecture = architecture_of(config)
    if architecture.endswith("ForMaskedLM"):
        raise ModelError(
            f"{path}: {architecture} without modules.json may be a base model, a dense or a sparse one: --kind dense "
            f"serves it with {_default_pooling(config)} pooling, --kind sparse as SPLADE"
        )
    if is_causal_model(config) and _is_named_reranker(transformer.folder, config):
        raise ModelError(
            f"{path}: {architecture} without modules.json, and its name or tags say that it is a reranker: --kind "
            "rerank serves one that is known, --kind dense makes vectors of its hidden states"
        )


def _is_named_reranker(folder: Path, config: Mapping[str, Any]) -> bool:
    """By the model's names, and by the tags at the beginning of its README.md."""
    front = ""
    with suppress(OSError):
        front = (folder / "README.md").read_text(encoding="utf-8", errors="replace").partition("\n---")[0]
    tags = re.findall(r"^(?:tags|pipeline_tag):.*(?:\n[ \t]*-.*)*", front, re.MULTILINE)
    words = " ".join((names_of(folder, config), *tags))
    return re.search("rerank|zerank|text-ranking|cross-encoder", words, re.IGNORECASE) is not None


def _read_multi_vector(transformer: _Transformer, layout: str, modules: list[Module]) -> ModelCard:
    """The card of a model with a vector for each token."""
    folder = transformer.folder
    if transformer.export:
        raise ModelError(f"{transformer.export}: a multi-vector model is served from safetensors alone")
    sentence_bert = _read_sentence_bert(transformer.path, may_expand=True)
    max_tokens = _max_tokens(transformer.path, transformer.config, sentence_bert)
    steps, token_dim = read_token_steps(folder, layout, modules, transformer.weights, transformer.hidden_size)
    masks = [folder / module.path / "config.json" for module in modules if module.kind == "MultiVectorMask"]
    prompts = {} if layout == STANFORD else dict(_read_prompts(folder)[1])
    tokens = read_token_head(folder, transformer.path, layout, steps, masks, sentence_bert, prompts)
    # PyLate sets the tokenizer's limit to that of the text that it has embedded last.
    if tokens.document_tokens or tokens.query_tokens > max_tokens:
        tokens = replace(tokens, document_tokens=tokens.document_tokens or max_tokens)
        max_tokens = _positions(transformer.config) or max_tokens
    if tokens.query_tokens > max_tokens:
        raise ModelError(f"{folder}: queries of {tokens.query_tokens} tokens, but the model's limit is {max_tokens}")
    return transformer.card(
        sentence_bert,
        all_steps=tokens.steps,
        dim=token_dim,
        token_dim=token_dim,
        max_tokens=max_tokens,
        prompt="",
        capabilities=("multi-vector",),
        tokens=tokens,
    )


def _read_sparse(transformer: _Transformer, modules: SparseModules) -> ModelCard:
    """The card of a SPLADE model."""
    sentence_bert = _read_sentence_bert(transformer.path, "fill-mask", modules.task)
    names = {name for file in transformer.weights for name in tensor_shapes(file)}
    steps = steps_of_masked_words(transformer.config_path, transformer.config, names)
    head = SparseHead(steps, pooling=modules.pooling, num_logs=modules.num_logs, query_weights=modules.query_weights)
    return transformer.card(sentence_bert, dim=transformer.vocab_size, capabilities=("sparse",), sparse=head)


def _with_score(transformer: _Transformer, capabilities: tuple[str, ...], head: ScoreHead) -> ModelCard:
    """The card of a model for classification."""
    sentence_bert = _read_sentence_bert(transformer.path, "sequence-classification", "sequence-classification")
    num_labels = len(head.labels)
    inputs = read_optional(transformer.path / "tokenizer_config.json").get("model_input_names")
    if isinstance(inputs, list) and "token_type_ids" not in inputs:
        head = replace(head, has_segments=False)
    return transformer.card(sentence_bert, dim=num_labels, num_labels=num_labels, capabilities=capabilities, score=head)


def _read_classifier(transformer: _Transformer, kind: str) -> tuple[tuple[str, ...], ScoreHead] | None:
    """What a model for classification can do, and its head; None for any other model. Raises ModelError."""
    config, path = transformer.config, transformer.folder / "config_sentence_transformers.json"
    stated = read_optional(path)
    try:
        capabilities = score_kinds(config, stated, kind)
        head = read_score_head(config, stated, transformer.hidden_size) if capabilities else None
    except ValueError as error:
        raise ModelError(f"{transformer.config_path}: {error}") from None
    if head is None:
        if stated.get("model_type") == "CrossEncoder" and kind != "dense":
            architecture = architecture_of(config)
            raise ModelError(f"{path}: model_type is CrossEncoder, and the weights are those of {architecture!r}")
        return None
    if stated.get("default_prompt_name"):
        raise ModelError(f"{path}: default_prompt_name is not supported for a model that takes pairs")
    return capabilities, head


def _read_llm_reranker(transformer: _Transformer, head: ScoreHead) -> ModelCard:
    """The card of a reranker that is a causal language model."""
    sentence_bert = _read_sentence_bert(transformer.path, "text-generation", "text-generation")
    pooling = (head.pooling,)
    return transformer.card(sentence_bert, dim=1, num_labels=1, pooling=pooling, capabilities=("rerank",), score=head)


def _read_logit_head(transformer: _Transformer, modules: list[Module], kind: str) -> ScoreHead | None:
    """The head of a reranker that is a causal language model; None for another model."""
    folder, config = transformer.folder, transformer.config
    if [module.kind for module in modules] == ["LogitScore"]:
        path = folder / modules[0].path / "config.json"
        activation = read_optional(folder / "config_sentence_transformers.json").get("activation_fn")
        try:
            return stated_head(config, read_object(path), activation)
        except ValueError as error:
            raise ModelError(f"{path}: {error}") from None
    names = names_of(folder, config)
    # A known name is enough: such a model has no vectors to embed texts with.
    is_wanted = kind == "rerank" or (kind == "auto" and known_template(config, names) is not None)
    if not is_wanted or modules or not is_causal_model(config):
        return None
    tokenizer = transformer.path / "tokenizer.json"
    try:
        return known_head(config, names, token_ids(tokenizer, read_object(tokenizer)))
    except ValueError as error:
        raise ModelError(f"{transformer.path}: {error}") from None


# --- the files --------------------------------------------------------------------------------------------------


def _read_config(weights_folder: Path) -> dict[str, Any]:
    path = weights_folder / "config.json"
    config = read_object(path)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path}: model_type is missing")
    if config["model_type"] in _OF_IMAGES:
        raise ModelError(f"{path}: a model of type {config['model_type']} has images; vecd serves text")
    if "quantization_config" in config:
        raise ModelError(f"{path}: quantized weights (quantization_config) are not supported")
    # transformers would load any file that is named here, even a pickle.
    if config.get("transformers_weights") is not None:
        raise ModelError(f"{path}: weights under another name (transformers_weights) are not supported")
    try:
        refuse_other_rankings(config)
        config = native_config(config) or config
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None
    # Models that wrap a text model keep its sizes one level down.
    text_config = config.get("text_config")
    config = {**config, **text_config} if isinstance(text_config, dict) else config
    if type(config.get("pad_token_id")) not in (int, NoneType):
        raise ModelError(f"{path}: pad_token_id is {config['pad_token_id']!r:.80}, and must be a whole number")
    return config


_OF_IMAGES = ("clip", "siglip", "siglip2", "chinese_clip", "jina_clip", "colpali", "colqwen2", "colmodernvbert")
"""Types of models that put images and texts in one space."""


def _check_files(weights_folder: Path) -> None:
    if not (weights_folder / "tokenizer.json").is_file() and not vocabulary_files(weights_folder):
        raise ModelError(f"{weights_folder / 'tokenizer.json'}: file missing, and nothing there to make it from")


def vocabulary_files(weights_folder: Path) -> list[Path]:
    """The vocabularies of a slow tokenizer: WordPiece, BPE, sentencepiece. The fast one's file can be made of them."""
    named = (weights_folder / name for name in ("vocab.txt", "vocab.json", "merges.txt"))
    return sorted(path for path in (*named, *weights_folder.glob("*.model")) if path.is_file())


def export_files(export: Path) -> list[Path]:
    """An ONNX file and what its weights may be in: every file of its folder but other exports, such as quantized ones,
    and theirs."""
    files = (path for path in export.parent.rglob("*") if path.is_file())
    return sorted(path for path in files if path.name.startswith(export.name) or ".onnx" not in path.name)


def _export_of(weights_folder: Path) -> Path | None:
    """The ONNX export to serve, where there are no safetensors."""
    export = weights_folder / EXPORT
    has_safetensors = any((weights_folder / f"model.safetensors{end}").is_file() for end in ("", ".index.json"))
    return export if export.is_file() and not has_safetensors else None


def _weights_of(weights_folder: Path) -> list[Path]:
    """The files of the model's weights."""
    index = weights_folder / "model.safetensors.index.json"
    has_shards = index.is_file() and not (weights_folder / "model.safetensors").is_file()
    # By its name, because transformers unpickles every file that is not called .safetensors.
    return shards(index, ".safetensors") if has_shards else [single_file(weights_folder)]


def shards(index: Path, suffix: str) -> list[Path]:
    """The files that an index names, all with this suffix."""
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ModelError(f"{index}: weight_map must name a file for each tensor")
    names = sorted(set(places.values()))
    for name in names:
        if not name.endswith(suffix):
            raise ModelError(f"{index}: {name} is not a {suffix} file")
        if not (index.parent / name).is_file():
            raise ModelError(f"{index.parent / name}: file missing (named in {index.name})")
    return [index.parent / name for name in names]


# sentence_bert_config.json and so on: where sentence-transformers looks, in this order. Since version 2 it writes the
# first.
_SENTENCE_BERT_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")


def _read_sentence_bert(
    weights_folder: Path,
    wanted: str = "feature-extraction",
    default: str = "feature-extraction",
    *,
    may_expand: bool = False,
) -> dict[str, Any]:
    """The Transformer module's settings; may be empty. Refuses settings that would change vectors. `wanted` is the
    task that the model has to have, `default` the one it has where the file names none. `may_expand`: of a multi-vector
    model, whose queries may be expanded."""
    paths = (weights_folder / f"sentence_{kind}_config.json" for kind in _SENTENCE_BERT_KINDS)
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return {}
    config = read_object(path)
    task = config.get("transformer_task", default)
    if task != wanted:
        raise ModelError(f"{path}: transformer_task {task!r} is not {_WHOSE_TASK[wanted]} model's")
    plain = {"method": "forward", "method_output_name": _OUTPUT_OF_TASK[task]}
    modalities = config.get("modality_config", {"text": plain})
    # As messages, if it has them.
    setting = modalities.get("message", modalities.get("text")) if isinstance(modalities, dict) else None
    if not isinstance(setting, dict) or {**setting, "format": ""} != {**plain, "format": ""}:
        raise ModelError(f"{path}: texts do not go through the model's plain forward pass (modality_config)")
    for name in ("config_args", "config_kwargs", *(() if may_expand else ("query_expansion",))):
        if config.get(name):
            raise ModelError(f"{path}: {name} is not supported")
    try:
        objects = {name: inner(config, name) for name in ("tokenizer_args", "processor_kwargs", "processing_kwargs")}
        inner(objects["processing_kwargs"], "chat_template")
        for part in ("text", "common"):
            for name, value in inner(objects["processing_kwargs"], part).items():
                if name not in _WITHOUT_EFFECT and (name, value) != ("truncation", True):
                    raise ValueError(f"processing_kwargs.{part}.{name} is not supported")
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None
    return {**config, **objects}


_WITHOUT_EFFECT = ("padding", "padding_side", "pad_to_multiple_of", "return_tensors", "logits_to_keep")
"""Arguments for the tokenizer that change no token of a text."""

_OUTPUT_OF_TASK = {
    "feature-extraction": "last_hidden_state",
    "fill-mask": "logits",
    "text-generation": "logits",
    "sequence-classification": "logits",
}
_WHOSE_TASK = {
    "feature-extraction": "an embedding",
    "fill-mask": "a sparse",
    "text-generation": "a causal reranking",
    "sequence-classification": "a classifying",
}


# --- modules.json -----------------------------------------------------------------------------------------------


def _read_chain(folder: Path, *, is_pooled: bool) -> list[Module]:
    """The modules: a Transformer and a Pooling, or a StaticEmbedding, then steps. A plain transformers model has only
    the first; a multi-vector model is not pooled. A folder of Model2Vec's is a chain of its own: see `_MODEL2VEC`."""
    path = folder / "modules.json"
    if read_optional(folder / "config.json").get("model_type") == _MODEL2VEC:
        return [Module("StaticEmbedding", "")]
    if not path.exists():
        return [Module("Transformer", "")]
    chain = read_modules(path)
    check_modules(path, chain)
    kinds = [module.kind for module in chain]
    if kinds[:1] == ["StaticEmbedding"] or kinds == ["Transformer", "LogitScore"]:
        return chain
    if kinds == ["Transformer"] and is_pooled and _is_cross_encoder(folder):
        return chain
    first = ["Transformer", "Pooling"] if is_pooled else ["Transformer"]
    if kinds[: len(first)] != first:
        raise ModelError(f"{path}: must begin with {' and '.join(first)}, begins with {kinds[:2]}")
    for kind in first:
        if kinds.count(kind) != 1:
            raise ModelError(f"{path}: must have one {kind} module, has {kinds.count(kind)}")
    return chain


def _is_cross_encoder(folder: Path) -> bool:
    return read_optional(folder / "config_sentence_transformers.json").get("model_type") == "CrossEncoder"


def _default_pooling(config: Mapping[str, Any]) -> str:
    """sentence-transformers' pooling of a plain transformers model."""
    is_causal = is_causal_model(config) and config.get("is_causal", True)
    return "lasttoken" if is_causal else "mean"


# --- sizes and prompts ------------------------------------------------------------------------------------------


def _max_tokens(weights_folder: Path, config: Mapping[str, Any], sentence_bert: Mapping[str, Any]) -> int:
    """The limit of sentence_bert_config.json, else the tokenizer's; at most the number of positions."""
    positions = _positions(config)
    limits = [] if positions is None else [positions]
    stated = sentence_bert.get("max_seq_length")
    for name in ("tokenizer_args", "processor_kwargs"):
        stated = sentence_bert.get(name, {}).get("model_max_length", stated)
    if stated is None:
        stated = read_optional(weights_folder / "tokenizer_config.json").get("model_max_length")
    # Tokenizers without a limit have 1e30.
    if isinstance(stated, int | float) and 0 < stated < 1e9:
        limits.append(int(stated))
    if not limits:
        raise ModelError(f"{weights_folder / 'config.json'}: neither it nor the tokenizer says how long a text may be")
    return min(limits)


def _positions(config: Mapping[str, Any]) -> int | None:
    """The longest text that the model has positions for."""
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    if not isinstance(positions, int) or positions <= 0:
        return None
    if config["model_type"] in POSITIONS_AFTER_PADDING:
        pad_token_id = config.get("pad_token_id")
        if pad_token_id is None or config["model_type"] == "mpnet":
            pad_token_id = 1  # the default of these families, and MPNet's only value
        positions -= pad_token_id + 1
    return positions


def _read_prompts(folder: Path) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The text of the default prompt, and the name and text of each prompt."""
    path = folder / "config_sentence_transformers.json"
    config = read_optional(path)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ModelError(f"{path}: prompts must be an object of strings")
    default = config.get("default_prompt_name")
    # These two names always exist, with no text unless the file gives them one.
    if default not in (None, "query", "document", *prompts):
        raise ModelError(f"{path}: default_prompt_name {default!r} is not among its prompts")
    return prompts.get(default) or "", tuple((name, text or "") for name, text in prompts.items())


def _read_matryoshka(folder: Path, config: Mapping[str, Any], dim: int, path: Path) -> dict[str, Any]:
    """The fields of a card about shorter vectors: as the files say under vLLM's names and sentence-transformers', or
    else as is published about the model. `config` is the content of `path`."""
    settings = folder / "config_sentence_transformers.json"
    stated = read_optional(settings)
    keys = ("matryoshka_dimensions", "matryoshka_dims")
    places = ((path, config), (settings, stated))
    lists = [(place, key, content[key]) for place, content in places for key in keys if content.get(key)]
    for place, key, dims in lists:
        if not isinstance(dims, list) or not all(type(number) is int and 1 <= number <= dim for number in dims):
            raise ModelError(f"{place}: {key} must be a list of whole numbers from 1 to {dim}")
    truncate_dim = 0 if stated.get("truncate_dim") is None else positive(stated, ("truncate_dim",), settings)
    known = published(names_of(folder, config)).matryoshka_dims
    is_stated = bool(lists or truncate_dim or config.get("is_matryoshka"))
    dims = lists[0][2] if lists else [] if is_stated else known or ()
    return {
        "is_matryoshka": is_stated or known is not None,
        "matryoshka_dims": tuple(sorted({number for number in dims if number <= dim})),
        "truncate_dim": truncate_dim if truncate_dim < dim else 0,
    }


# --- static embeddings ------------------------------------------------------------------------------------------

_MODEL2VEC = "model2vec"
"""The model_type of Model2Vec's folders. Their modules.json names a StaticEmbedding too, with which
sentence-transformers reads them almost as Model2Vec does: it keeps unknown tokens and texts of any length. They are
served as Model2Vec itself does."""

_MODEL2VEC_MAX_TOKENS = 512
"""Its default."""

_STATIC_MAX_TOKENS = 2**15
"""A mean of rows has no limit of positions. But the gateway keeps the tokens of an input in memory, and a batch holds
all tokens of a sequence: so these models get the longest text that usual transformers with long contexts have."""


def _read_static(folder: Path, table: Module, modules: list[Module]) -> ModelCard:
    """The card of a table of rows with its tokenizer."""
    weights_folder = folder / table.path
    tokenizer_file = weights_folder / "tokenizer.json"
    weights = single_file(weights_folder)
    num_tokens, hidden_size = _table_shape(weights)
    tokenizer = read_object(tokenizer_file)
    try:
        num_ids = 1 + max(token_ids(tokenizer_file, tokenizer).values(), default=-1)
        unknown_ids = tuple(_unknown_ids(tokenizer))
        truncated_to = (tokenizer.get("truncation") or {}).get("max_length")
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ModelError(f"{tokenizer_file}: not a tokenizer: {error}") from None
    if num_ids > num_tokens:
        raise ModelError(f"{tokenizer_file}: has {num_ids} tokens, and {weights.name} has rows for {num_tokens}")
    config = read_optional(weights_folder / "config.json")
    prompt, prompts = _read_prompts(folder)
    if config.get("model_type") == _MODEL2VEC:
        model_type, max_tokens = _MODEL2VEC, config.get("max_length", _MODEL2VEC_MAX_TOKENS)
        steps, dim = (Step("normalize"),) * bool(config.get("normalize")), hidden_size
        ignored_ids = unknown_ids
    else:
        model_type, max_tokens = "static", truncated_to
        steps, dim = read_steps(folder, modules, hidden_size)
        ignored_ids = ()
    return ModelCard(
        folder=str(folder),
        weights_folder=str(weights_folder),
        model_type=model_type,
        hidden_size=hidden_size,
        dim=dim,
        max_tokens=max_tokens if isinstance(max_tokens, int) and max_tokens > 0 else _STATIC_MAX_TOKENS,
        vocab_size=num_tokens + 1,
        pooling=("mean",),
        steps=steps,
        lowercase=False,
        prompt=prompt,
        prompts=prompts,
        **_read_matryoshka(folder, config, dim, weights_folder / "config.json"),
        weights_bytes=sum(
            path.stat().st_size
            for path in (weights, *(folder / step.path / "model.safetensors" for step in steps if step.path))
        ),
        tokenizer_file=str(tokenizer_file),
        ignored_ids=(*ignored_ids, num_tokens),
    )


TABLES = ("embedding.weight", "embeddings")
"""Names of the table: StaticEmbedding's, and Model2Vec's, which StaticEmbedding reads as well."""


def _table_shape(path: Path) -> tuple[int, int]:
    """How many token ids have a row, and the floats of each."""
    shapes = tensor_shapes(path)
    table = next((shapes[name] for name in TABLES if name in shapes), None)
    if table is None:
        raise ModelError(f"{path}: has no table of embeddings ({' or '.join(TABLES)})")
    try:
        num_tokens, hidden_size = shapes.get("mapping", table)[0], table[1]
    except LookupError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if num_tokens < 1 or hidden_size < 1:
        raise ModelError(f"{path}: cannot be read: the table of embeddings is empty")
    return num_tokens, hidden_size


def _unknown_ids(tokenizer: Mapping[str, Any]) -> Iterator[int]:
    """The id of the unknown token, which Model2Vec drops; none if the tokenizer has none."""
    model = tokenizer.get("model") or {}
    unknown = model.get("unk_id")
    if (token := model.get("unk_token")) is not None:
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
        unknown = {**model.get("vocab", {}), **added}.get(token)
    if unknown is not None:
        yield unknown
