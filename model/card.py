"""The model card: the facts of a model that every process needs, read from its folder's JSON files.

Owns the reading of `config.json`, `modules.json` and the sentence-transformers files beside them, and the refusal of
folders that cannot be served. Reads no weights and imports no torch, so the supervisor can call it first.

Sources of the formats: the files as saved by sentence-transformers 2 to 6, and for static embeddings the code of
sentence-transformers 5 (StaticEmbedding) and of Model2Vec 0.10.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

from vecd.base.files import JsonMapping, JsonObject
from vecd.model.architecture import native_config
from vecd.model.files import (
    EXPORT,
    ModelSettings,
    read_object,
    read_optional,
    single_file,
    stored_tensors,
    token_ids,
    weight_files,
)
from vecd.model.files import ModelError as ModelError
from vecd.model.files import one_line as one_line
from vecd.model.multi_vector_card import (
    STANFORD,
    SparseModules,
    find_sparse,
    has_bge_m3,
    layout_of,
    read_bge_m3,
    read_token_head,
    read_token_steps,
    steps_of_masked_words,
)
from vecd.model.score_card import (
    architecture_of,
    is_causal_model,
    known_head,
    known_template,
    read_score_head,
    refuse_other_rankings,
    score_kinds,
    stated_head,
)
from vecd.model.steps import (
    Module,
    ScoreHead,
    SparseHead,
    Step,
    TextTemplate,
    TokenHead,
    check_modules,
    read_modules,
    read_pooling,
    read_steps,
)
from vecd.shm.output import Output

# What is published about models by name, where their files do not say it.
#
# Sources: the model cards on the Hugging Face hub, and jina.ai/models.


@dataclass(frozen=True, slots=True)
class Published:
    matryoshka_dims: tuple[int, ...] | None = None
    """The lengths that the model's vectors may be cut to, some longer than its smaller variants' vectors; empty: any
    length; None: nothing is published."""
    instead: str = ""


_UP_TO_1024 = (32, 64, 128, 256, 512, 768, 1024)
_TABLE = (
    (r"qwen3-embedding-[\d.]+b", Published(())),
    (r"embeddinggemma-300m", Published((128, 256, 512, 768))),
    (r"nomic-embed-text-v1\.5", Published((64, 128, 256, 512, 768))),
    (r"modernbert-embed-base", Published((256, 768))),
    (r"mxbai-embed-large-v1", Published(())),
    (r"snowflake-arctic-embed-(m-v1\.5|[ml]-v2\.0)", Published((256,))),
    (r"jina-embeddings-v3", Published(_UP_TO_1024, "jinaai/jina-embeddings-v3-hf")),
    (r"jina-embeddings-v3-hf|jina-embeddings-v5-text-(small|nano)-\w.*", Published(_UP_TO_1024)),
    (r"jina-embeddings-v5-text-small", Published(_UP_TO_1024, "jinaai/jina-embeddings-v5-text-small-retrieval")),
    (r"static-(retrieval-mrl-en|similarity-mrl-multilingual)-v1", Published((32, 64, 128, 256, 512, 1024))),
    (r"potion-[\w-]+", Published(())),
)


def names_of(folder: Path, config: JsonMapping) -> str:
    """What names the model: its folder and config.json. In the hub's cache the name is two folders above the files."""
    return f"{'/'.join(folder.parts[-3:])} {config.get('_name_or_path', '')}"


def published(names: str) -> Published:
    parts = re.split(r"/|--|\s", names.lower())
    found = (facts for pattern, facts in _TABLE if any(re.fullmatch(pattern, part) for part in parts))
    return next(found, Published())


_SPANNED_DIM = 1024
"""Floats of a row where an output spans several: a slot of 2,048 rows holds 68 sequences with BERT's vocabulary."""

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
    """Immutable facts of a model."""

    folder: str
    weights_folder: str
    """`folder`, or its `0_Transformer` in old layouts."""
    model_type: str
    """As transformers names the architecture, for example "bert"."""
    hidden_size: int
    """H: floats per token."""
    dim: int
    """D: floats per vector, after every step. Of a model without dense vectors: those of its main output."""
    max_tokens: int
    """Longest sequence, special tokens included. Longer input is cut on the right."""
    vocab_size: int
    pooling: tuple[str, ...]
    """One or more of `vecd.model.steps.POOLING_MODES`, concatenated in that order. Empty without dense vectors."""
    steps: tuple[Step, ...]
    """Of dense vectors; other heads have their own."""
    lowercase: bool
    """Texts are converted to lower case before the tokenizer's own normalizer."""
    prompt: str
    prompts: tuple[tuple[str, str], ...] = ()
    pools_prompt: bool = True
    """The tokens of a prompt are pooled with those of the text. If not, prompts are refused."""
    is_matryoshka: bool = False
    matryoshka_dims: tuple[int, ...] = ()
    """The lengths that the model was trained for; empty for any length."""
    truncate_dim: int = 0
    """sentence-transformers' setting: elements of a vector for requests that do not say how many; 0: all."""
    weights_bytes: int = 0
    tokenizer_file: str = ""
    """Of the fast tokenizer; empty until `vecd.launch.config.plan` has converted it."""
    export_file: str = ""
    """The ONNX export that is the model's weights; empty where these are safetensors."""
    ignored_ids: tuple[int, ...] = ()
    """Token ids, of static embeddings alone: they have no row in the table and do not count in the mean. The last one,
    vocab_size - 1, stands for a text without tokens, because a sequence has at least one."""
    capabilities: tuple[str, ...] = ("dense",)
    """At least one of `vecd.model.steps.CAPABILITIES`, in that order."""
    num_labels: int = 0
    token_dim: int = 0
    """Floats of a token's vector."""
    score: ScoreHead | None = None
    sparse: SparseHead | None = None
    tokens: TokenHead | None = None
    assumes_pooling: bool = False
    text_template: TextTemplate | None = None

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
        output = self.main_output
        widths = [_SPANNED_DIM if output.spans_rows else output.width_of(self)]
        return max(*widths, self.dim if "dense" in self.capabilities else 0)

    @property
    def all_steps(self) -> tuple[Step, ...]:
        return (*self.steps, *(step for head in (self.score, self.sparse, self.tokens) if head for step in head.steps))

    @property
    def step_files(self) -> list[Path]:
        """The weights of `all_steps` that have files of their own."""
        with_file = (step for step in self.all_steps if step.file or step.path)
        return [Path(self.folder, step.file or f"{step.path}/model.safetensors") for step in with_file]

    @property
    def weight_files(self) -> list[Path]:
        """Of the transformer, or the export's. Raises ModelError for one that is missing."""
        return export_files(Path(self.export_file)) if self.export_file else weight_files(Path(self.weights_folder))

    @property
    def pooling_of_output(self) -> str:
        """How tokens become a row; empty where each token has its own vector, or nothing is known."""
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
        """Whether the tokens of the second part of a pair have another type, if the model has types. The families whose
        positions begin after the padding have tokenizers that give every token type 0."""
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
        are_final = Output.TOKENS in self.outputs and not self.is_static
        return are_final and self.pooling == ("mean",) and all(step.kind == "normalize" for step in self.steps)

    @property
    def is_static(self) -> bool:
        """Whether the model is a table with a row per token, and no transformer."""
        return bool(self.ignored_ids)


def read_card(folder: Path, kind: str = "auto", pooling: str = "auto") -> ModelCard:
    """Read the card of the model in `folder`. `kind`: "auto", or the capability that the model is to have where its
    files allow several. `pooling`: "auto", or the one that a dense model has, whatever its files say.

    Raises ModelError for a model that cannot be served: a file is missing or unreadable, the weights are neither
    safetensors nor an ONNX export, its code has no equal in transformers, it has an unknown module, or it is not of
    `kind`, or has no `pooling`.
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
    """Raises ModelError."""
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
    """By the first kind that the files have the signs of. `folder` exists, and is absolute."""
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
    card = _read_llm_reranker(transformer, modules, kind)
    if card is None and not modules:
        card = _read_classifier(transformer, kind)
    return card or _read_dense(transformer, modules, kind, pooling)


# --- a transformer, and what is behind it -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Transformer:
    folder: Path
    path: Path
    config: ModelSettings
    """With `hidden_size` and `vocab_size`."""
    stated: ModelSettings
    """What sentence-transformers says of the model."""
    weights: list[Path]
    export: Path | None

    def card(self, sentence_bert: JsonMapping, **fields: Any) -> ModelCard:
        """`sentence_bert`: the settings of its module."""
        tokenizer = self.path / "tokenizer.json"
        common: JsonObject = {
            "model_type": self.config["model_type"],
            "hidden_size": self.config["hidden_size"],
            "vocab_size": self.config["vocab_size"],
            "lowercase": bool(sentence_bert.get("do_lower_case", False)),
            "tokenizer_file": str(tokenizer) if tokenizer.is_file() else "",
            "export_file": str(self.export or ""),
        }
        if "max_tokens" not in fields:
            common["max_tokens"] = _max_tokens(self.path, self.config, sentence_bert)
        return _card(self.folder, self.path, self.stated, self.weights, **{**common, **fields})


def _card(
    folder: Path, weights_folder: Path, stated: ModelSettings, weights: Sequence[Path], **fields: Any
) -> ModelCard:
    """With what is read alike of all models."""
    prompt, prompts = _read_prompts(stated)
    places = {"folder": str(folder), "weights_folder": str(weights_folder), "prompt": prompt, "prompts": prompts}
    card = ModelCard(**{"pooling": (), "steps": (), **places, **fields})
    return replace(card, weights_bytes=sum(path.stat().st_size for path in (*weights, *card.step_files)))


def _stated(folder: Path) -> ModelSettings:
    return read_optional(folder / "config_sentence_transformers.json")


def _read_transformer(folder: Path, module_path: str, *, may_be_export: bool = False) -> _Transformer:
    path = folder / module_path
    config = _read_config(path)
    _check_files(path)
    export = _export_of(path) if may_be_export else None
    weights = export_files(export) if export else weight_files(path)
    config["hidden_size"] = config.positive("hidden_size", "dim", "d_model", "n_embd")
    config["vocab_size"] = config.positive("vocab_size")
    return _Transformer(folder, path, config, _stated(folder), weights, export)


def _read_dense(transformer: _Transformer, modules: list[Module], kind: str, given_pooling: str) -> ModelCard:
    """The card of a model with dense vectors; of BGE-M3, with sparse and token vectors as well."""
    assumes_pooling = not modules and given_pooling == "auto"
    if assumes_pooling and kind == "auto":
        _refuse_guess(transformer)
    folder, config, hidden_size = transformer.folder, transformer.config, transformer.config["hidden_size"]
    sentence_bert = _read_sentence_bert(transformer.path)
    pooling: tuple[str, ...] = (_default_pooling(config),)
    pools_prompt = True
    if modules:
        default_prompt, _ = _read_prompts(transformer.stated)
        pooling, pools_prompt = read_pooling(folder / modules[0].path / "config.json", default_prompt)
    if given_pooling != "auto":
        pooling = (given_pooling,)
    steps, dim = read_steps(folder, modules[1:], hidden_size * len(pooling))
    fields: JsonObject = {}
    if modules and not transformer.export and kind != "dense" and has_bge_m3(folder):
        sparse, tokens = read_bge_m3(folder, transformer.path, hidden_size)
        capabilities = ("dense", "sparse", "multi-vector")
        fields = {"capabilities": capabilities, "token_dim": hidden_size, "sparse": sparse, "tokens": tokens}
    return transformer.card(
        sentence_bert,
        steps=steps,
        **fields,
        dim=dim,
        pooling=pooling,
        pools_prompt=pools_prompt,
        assumes_pooling=assumes_pooling,
        **_read_matryoshka(folder, transformer.stated, config, dim),
    )


def _refuse_guess(transformer: _Transformer) -> None:
    """Raises ModelError for a model without modules.json whose class or name tells that it may be something else than
    dense."""
    config = transformer.config
    architecture = architecture_of(config)
    if architecture.endswith("ForMaskedLM"):
        raise config.error(
            f"{architecture} without modules.json may be a base model, a dense or a sparse one: --kind dense "
            f"serves it with {_default_pooling(config)} pooling, --kind sparse as SPLADE"
        )
    if is_causal_model(config) and _is_named_reranker(transformer.folder, config):
        raise config.error(
            f"{architecture} without modules.json, and its name or tags say that it is a reranker: --kind "
            "rerank serves one that is known, --kind dense makes vectors of its hidden states"
        )


def _is_named_reranker(folder: Path, config: JsonMapping) -> bool:
    """By the model's names, and by the tags at the beginning of its README.md."""
    front = ""
    with suppress(OSError):
        front = (folder / "README.md").read_text(encoding="utf-8", errors="replace").partition("\n---")[0]
    tags = re.findall(r"^(?:tags|pipeline_tag):.*(?:\n[ \t]*-.*)*", front, re.MULTILINE)
    words = " ".join((names_of(folder, config), *tags))
    return re.search("rerank|zerank|text-ranking|cross-encoder", words, re.IGNORECASE) is not None


def _read_multi_vector(transformer: _Transformer, layout: str, modules: list[Module]) -> ModelCard:
    folder = transformer.folder
    if transformer.export:
        raise ModelError(f"{transformer.export}: a multi-vector model is served from safetensors alone")
    sentence_bert = _read_sentence_bert(transformer.path, may_expand=True)
    max_tokens = _max_tokens(transformer.path, transformer.config, sentence_bert)
    steps, token_dim = read_token_steps(folder, layout, modules, transformer.weights, transformer.config["hidden_size"])
    masks = [folder / module.path / "config.json" for module in modules if module.kind == "MultiVectorMask"]
    prompts = {} if layout == STANFORD else dict(_read_prompts(transformer.stated)[1])
    tokens = read_token_head(folder, transformer.path, layout, steps, masks, sentence_bert, prompts)
    # PyLate sets the tokenizer's limit to that of the text that it has embedded last.
    if tokens.document_tokens or tokens.query_tokens > max_tokens:
        tokens = replace(tokens, document_tokens=tokens.document_tokens or max_tokens)
        max_tokens = _positions(transformer.config) or max_tokens
    if tokens.query_tokens > max_tokens:
        raise ModelError(f"{folder}: queries of {tokens.query_tokens} tokens, but the model's limit is {max_tokens}")
    return transformer.card(
        sentence_bert,
        dim=token_dim,
        token_dim=token_dim,
        max_tokens=max_tokens,
        prompt="",
        capabilities=("multi-vector",),
        tokens=tokens,
    )


def _read_sparse(transformer: _Transformer, modules: SparseModules) -> ModelCard:
    sentence_bert = _read_sentence_bert(transformer.path, "fill-mask", modules.task)
    names = {name for file in transformer.weights for name in stored_tensors(file)}
    steps = steps_of_masked_words(transformer.config, names)
    head = SparseHead(steps, pooling=modules.pooling, num_logs=modules.num_logs, query_weights=modules.query_weights)
    dim = transformer.config["vocab_size"]
    return transformer.card(sentence_bert, dim=dim, capabilities=("sparse",), sparse=head)


def _read_classifier(transformer: _Transformer, kind: str) -> ModelCard | None:
    """None for a model that is not for classification."""
    config, stated = transformer.config, transformer.stated
    capabilities = score_kinds(config, stated, kind)
    if not capabilities:
        if stated.get("model_type") == "CrossEncoder" and kind != "dense":
            architecture = architecture_of(config)
            raise stated.error(f"model_type is CrossEncoder, and the weights are those of {architecture!r}")
        return None
    head = read_score_head(config, stated)
    if stated.get("default_prompt_name"):
        raise stated.error("default_prompt_name is not supported for a model that takes pairs")
    sentence_bert = _read_sentence_bert(transformer.path, "sequence-classification")
    num_labels = len(head.labels)
    inputs = read_optional(transformer.path / "tokenizer_config.json").get("model_input_names")
    if isinstance(inputs, list) and "token_type_ids" not in inputs:
        head = replace(head, has_segments=False)
    return transformer.card(sentence_bert, dim=num_labels, num_labels=num_labels, capabilities=capabilities, score=head)


def _read_llm_reranker(transformer: _Transformer, modules: list[Module], kind: str) -> ModelCard | None:
    """None for a model that is no causal language model, or gives no scores."""
    folder, config = transformer.folder, transformer.config
    if [module.kind for module in modules] == ["LogitScore"]:
        module = read_object(folder / modules[0].path / "config.json")
        head = stated_head(config, module, transformer.stated.get("activation_fn"))
    else:
        names = names_of(folder, config)
        # A known name is enough: such a model has no vectors to embed texts with.
        is_wanted = kind == "rerank" or (kind == "auto" and known_template(config, names) is not None)
        if not is_wanted or modules or not is_causal_model(config):
            return None
        head = known_head(transformer.path, config, names)
    sentence_bert = _read_sentence_bert(transformer.path, "text-generation")
    pooling = (head.pooling,)
    return transformer.card(sentence_bert, dim=1, num_labels=1, pooling=pooling, capabilities=("rerank",), score=head)


# --- the files --------------------------------------------------------------------------------------------------


def _read_config(weights_folder: Path) -> ModelSettings:
    config = read_object(weights_folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise config.error("model_type is missing")
    if config["model_type"] in _OF_IMAGES:
        raise config.error(f"a model of type {config['model_type']} has images; vecd serves text")
    if "quantization_config" in config:
        raise config.error("quantized weights (quantization_config) are not supported")
    # transformers would load any file that is named here, even a pickle.
    if config.get("transformers_weights") is not None:
        raise config.error("weights under another name (transformers_weights) are not supported")
    refuse_other_rankings(config)
    try:
        config = ModelSettings(config.path, native_config(config) or config)
    except ValueError as error:
        raise config.error(str(error)) from None
    # Models that wrap a text model keep its sizes one level down.
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        config.update(text_config)
    if type(config.get("pad_token_id")) not in (int, NoneType):
        raise config.error(f"pad_token_id is {config['pad_token_id']!r:.80}, and must be a whole number")
    return config


_OF_IMAGES = ("clip", "siglip", "siglip2", "chinese_clip", "jina_clip", "colpali", "colqwen2", "colmodernvbert")


def _check_files(weights_folder: Path) -> None:
    if not (weights_folder / "tokenizer.json").is_file() and not vocabulary_files(weights_folder):
        raise ModelError(f"{weights_folder / 'tokenizer.json'}: file missing, and nothing there to make it from")


def vocabulary_files(weights_folder: Path) -> list[Path]:
    """WordPiece, BPE, sentencepiece. The fast tokenizer's file can be made of them."""
    named = (weights_folder / name for name in ("vocab.txt", "vocab.json", "merges.txt"))
    return sorted(path for path in (*named, *weights_folder.glob("*.model")) if path.is_file())


def export_files(export: Path) -> list[Path]:
    """An ONNX file and what its weights may be in: every file of its folder but other exports and theirs."""
    files = (path for path in export.parent.rglob("*") if path.is_file())
    return sorted(path for path in files if path.name.startswith(export.name) or ".onnx" not in path.name)


def _export_of(weights_folder: Path) -> Path | None:
    export = weights_folder / EXPORT
    has_safetensors = any((weights_folder / f"model.safetensors{end}").is_file() for end in ("", ".index.json"))
    return export if export.is_file() and not has_safetensors else None


# sentence_bert_config.json and so on: where sentence-transformers looks, in this order. Since version 2 it writes the
# first.
_SENTENCE_BERT_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")


def _read_sentence_bert(
    weights_folder: Path, wanted: str = "feature-extraction", default: str = "", *, may_expand: bool = False
) -> JsonMapping:
    """May be empty. Refuses settings that would change vectors. `wanted` is the task that the model has to have,
    `default` the one where the file names none, if it is another. `may_expand`: of a multi-vector model."""
    paths = (weights_folder / f"sentence_{kind}_config.json" for kind in _SENTENCE_BERT_KINDS)
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return {}
    config = read_object(path)
    task = config.get("transformer_task", default or wanted)
    if task != wanted:
        raise config.error(f"transformer_task {task!r} is not {_WHOSE_TASK[wanted]} model's")
    plain = {"method": "forward", "method_output_name": _OUTPUT_OF_TASK[task]}
    modalities = config.get("modality_config", {"text": plain})
    # As messages, if it has them.
    setting = modalities.get("message", modalities.get("text")) if isinstance(modalities, dict) else None
    if not isinstance(setting, dict) or {**setting, "format": ""} != {**plain, "format": ""}:
        raise config.error("texts do not go through the model's plain forward pass (modality_config)")
    for name in ("config_args", "config_kwargs", *(() if may_expand else ("query_expansion",))):
        if config.get(name):
            raise config.error(f"{name} is not supported")
    objects = {name: config.inner(name) for name in ("tokenizer_args", "processor_kwargs", "processing_kwargs")}
    processing = objects["processing_kwargs"]
    processing.inner("chat_template")
    for part in ("text", "common"):
        for name, value in processing.inner(part).items():
            if name not in _WITHOUT_EFFECT and (name, value) != ("truncation", True):
                raise config.error(f"processing_kwargs.{part}.{name} is not supported")
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
    """A Transformer and a Pooling, or a StaticEmbedding, then steps. A plain transformers model has only the first; a
    multi-vector model is not pooled."""
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
    if kinds == ["Transformer"] and is_pooled and _stated(folder).get("model_type") == "CrossEncoder":
        return chain
    first = ["Transformer", "Pooling"] if is_pooled else ["Transformer"]
    if kinds[: len(first)] != first:
        raise ModelError(f"{path}: must begin with {' and '.join(first)}, begins with {kinds[:2]}")
    for kind in first:
        if kinds.count(kind) != 1:
            raise ModelError(f"{path}: must have one {kind} module, has {kinds.count(kind)}")
    return chain


def _default_pooling(config: JsonMapping) -> str:
    """sentence-transformers' pooling of a plain transformers model."""
    is_causal = is_causal_model(config) and config.get("is_causal", True)
    return "lasttoken" if is_causal else "mean"


# --- sizes and prompts ------------------------------------------------------------------------------------------


def _max_tokens(weights_folder: Path, config: JsonMapping, sentence_bert: JsonMapping) -> int:
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


def _positions(config: JsonMapping) -> int | None:
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    if not isinstance(positions, int) or positions <= 0:
        return None
    if config["model_type"] in POSITIONS_AFTER_PADDING:
        pad_token_id = config.get("pad_token_id")
        if pad_token_id is None or config["model_type"] == "mpnet":
            pad_token_id = 1  # the default of these families, and MPNet's only value
        positions -= pad_token_id + 1
    return positions


def _read_prompts(stated: ModelSettings) -> tuple[str, tuple[tuple[str, str], ...]]:
    prompts = stated.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise stated.error("prompts must be an object of strings")
    default = stated.get("default_prompt_name")
    # These two names always exist, with no text unless the file gives them one.
    if default not in (None, "query", "document", *prompts):
        raise stated.error(f"default_prompt_name {default!r} is not among its prompts")
    return prompts.get(default) or "", tuple((name, text or "") for name, text in prompts.items())


def _read_matryoshka(folder: Path, stated: ModelSettings, config: ModelSettings, dim: int) -> JsonObject:
    """The fields of a card about shorter vectors: as the files say, or else as is published about the model."""
    keys = ("matryoshka_dimensions", "matryoshka_dims")
    lists = [(content, key, content[key]) for content in (config, stated) for key in keys if content.get(key)]
    for content, key, dims in lists:
        if not isinstance(dims, list) or not all(type(number) is int and 1 <= number <= dim for number in dims):
            raise content.error(f"{key} must be a list of whole numbers from 1 to {dim}")
    truncate_dim = 0 if stated.get("truncate_dim") is None else stated.positive("truncate_dim")
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
"""Model2Vec's folders. sentence-transformers reads them almost as Model2Vec does: it keeps unknown tokens and texts of
any length. They are served as Model2Vec itself does."""

_MODEL2VEC_MAX_TOKENS = 512
"""Its default."""

_STATIC_MAX_TOKENS = 2**15
"""A mean of rows has no limit, but a batch holds all tokens of a sequence: these models get the longest text that usual
transformers with long contexts have."""


def _read_static(folder: Path, table: Module, modules: list[Module]) -> ModelCard:
    weights_folder = folder / table.path
    tokenizer_file = weights_folder / "tokenizer.json"
    weights = single_file(weights_folder)
    num_tokens, hidden_size = _table_shape(weights)
    tokenizer = read_object(tokenizer_file)
    try:
        num_ids = 1 + max(token_ids(tokenizer).values(), default=-1)
        unknown_ids = tuple(_unknown_ids(tokenizer))
        truncated_to = (tokenizer.get("truncation") or {}).get("max_length")
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise tokenizer.error(f"not a tokenizer: {error}") from None
    if num_ids > num_tokens:
        raise tokenizer.error(f"has {num_ids} tokens, and {weights.name} has rows for {num_tokens}")
    config = read_optional(weights_folder / "config.json")
    stated = _stated(folder)
    if config.get("model_type") == _MODEL2VEC:
        model_type, max_tokens = _MODEL2VEC, config.get("max_length", _MODEL2VEC_MAX_TOKENS)
        steps, dim = (Step("normalize"),) * bool(config.get("normalize")), hidden_size
        ignored_ids = unknown_ids
    else:
        model_type, max_tokens = "static", truncated_to
        steps, dim = read_steps(folder, modules, hidden_size)
        ignored_ids = ()
    return _card(
        folder,
        weights_folder,
        stated,
        [weights],
        model_type=model_type,
        hidden_size=hidden_size,
        dim=dim,
        max_tokens=max_tokens if isinstance(max_tokens, int) and max_tokens > 0 else _STATIC_MAX_TOKENS,
        vocab_size=num_tokens + 1,
        pooling=("mean",),
        steps=steps,
        lowercase=False,
        **_read_matryoshka(folder, stated, config, dim),
        tokenizer_file=str(tokenizer_file),
        ignored_ids=(*ignored_ids, num_tokens),
    )


TABLES = ("embedding.weight", "embeddings")


def _table_shape(path: Path) -> tuple[int, int]:
    shapes = {name: tensor.shape for name, tensor in stored_tensors(path).items()}
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


def _unknown_ids(tokenizer: JsonMapping) -> Iterator[int]:
    """Model2Vec drops it."""
    model = tokenizer.get("model") or {}
    unknown = model.get("unk_id")
    if (token := model.get("unk_token")) is not None:
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
        unknown = {**model.get("vocab", {}), **added}.get(token)
    if unknown is not None:
        yield unknown
