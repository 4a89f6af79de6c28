"""The model card: the facts of a model that every process needs, and how it is read from the model's folder.

Owns the table of readers, one for each kind of model, those of dense models and of tables of static embeddings, and the
refusal of folders that cannot be served. Reads no weights and imports no torch, so the supervisor can call it first.

Sources of the formats: the files as saved by sentence-transformers 2 to 6, and for static embeddings the code of
sentence-transformers 5 (StaticEmbedding) and of Model2Vec 0.10.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from vecd.base.files import JsonMapping, JsonObject, read_json
from vecd.model.architecture import native_config, sees_later_here
from vecd.model.files import ModelError as ModelError
from vecd.model.files import ModelSettings, has_safetensors, single_file, stored_tensors, token_ids, weight_files
from vecd.model.files import export_files as export_files
from vecd.model.files import one_line as one_line
from vecd.model.folder import POSITIONS_AFTER_PADDING as POSITIONS_AFTER_PADDING
from vecd.model.folder import ModelFolder, architecture_of, is_causal_model, names_of
from vecd.model.known import published_dims
from vecd.model.multi_vector_card import MultiVector, Sparse, has_bge_m3, read_bge_m3
from vecd.model.score_card import Classifier, LlmReranker
from vecd.model.steps import (
    ScoreHead,
    SparseHead,
    Step,
    TextTemplate,
    TokenHead,
    read_pooling,
    read_steps,
)
from vecd.shm.output import Output

_SPANNED_DIM = 1024
"""Floats of a row where an output spans several: a slot of 2,048 rows holds 68 sequences with BERT's vocabulary."""


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
    """One or more of `vecd.model.steps.POOLINGS`, concatenated in that order. Empty without dense vectors."""
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
    end: str = ""
    """The token that is put behind each text in place of what the tokenizer's file says; empty: it says right."""
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
    task: str | None = None
    """Of the adapter that is merged into the weights; "": none is, of a model that has some; None: it has none."""

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
            are_states = not (self.steps and self.steps[0].tensor)  # else they are projected
            found |= {Output.TOKENS} if self.hidden_size <= self.row_dim and are_states else set()
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
    def reference_card(self) -> "ModelCard":
        """The card that the reference vectors are of: of an export the safetensors beside it, if there are any."""
        is_beside = self.export_file and has_safetensors(Path(self.weights_folder))
        return replace(self, export_file="") if is_beside else self

    @property
    def shares_beginnings(self) -> bool:
        """Whether what pairs begin with alike is computed once: of a causal reranker with a template."""
        return self.score is not None and self.score.pooling == "lasttoken" and self.score.pair_template is not None

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
        has_segments = self.score is not None and self.score.has_segments
        return has_segments and self.model_type not in POSITIONS_AFTER_PADDING

    @property
    def is_normalized(self) -> bool:
        """Whether vectors have length 1. sentence-transformers cuts them to `truncate_dim` after its last step."""
        return bool(self.steps) and self.steps[-1].kind == "normalize" and not self.truncate_dim

    @property
    def is_whole(self) -> bool:
        """Whether the elements of vectors are whole numbers from -127 to 127. The gateway rounds them, so that engines
        can be compared."""
        return bool(self.steps) and self.steps[-1].kind == "tanh_127"

    @property
    def default_dim(self) -> int:
        """Floats of a dense vector for a request that does not say how many."""
        return self.truncate_dim or self.dim

    @property
    def takes_template(self) -> bool:
        """Whether it ranks, and may get a pair as one text (`PairTemplate`)."""
        return self.score is not None and self.score.pooling == "lasttoken" and "rerank" in self.capabilities

    @property
    def pools_states(self) -> bool:
        are_final = Output.TOKENS in self.outputs and not self.is_static
        return are_final and self.pooling == ("mean",) and all(step.kind == "normalize" for step in self.steps)

    @property
    def difference_elsewhere(self) -> str:
        """Why sentence-transformers makes other vectors of the same files; empty if nothing is known."""
        if self.is_static:
            return "keeps unknown tokens; Model2Vec drops them" if self.model_type == "model2vec" else ""
        stored = read_json(Path(self.weights_folder) / "config.json")
        if sees_later_here(stored):
            return "ignores use_bidirectional_attention of config.json"
        if native_config(stored) is None or stored.get("model_type") == self.model_type:
            return ""
        # It may have a class by that name, with random numbers for the tensors that it does not find.
        return f"reads config.json as one of type {stored.get('model_type')!r}"

    @property
    def is_static(self) -> bool:
        """Whether the model is a table with a row per token, and no transformer."""
        return bool(self.ignored_ids)


# --- the readers ---


class Reader(Protocol):
    """A kind of model, or one of its layouts. Both raise ModelError for a model that cannot be served."""

    def claims(self, folder: ModelFolder) -> bool:
        """Whether the files have the signs of it, and it may be of the kind that is asked for."""

    def card(self, folder: ModelFolder) -> JsonObject:
        """Of a folder that it claims: the fields of its card that are not read alike of all models."""


def read_card(path: Path, kind: str = "auto", pooling: str = "auto") -> ModelCard:
    """Read the card of the model in the folder `path`; see `card_of`. `kind`: "auto", or the capability that the model
    is to have where its files allow several. `pooling`: "auto", or the one that a dense model has, whatever its files
    say."""
    return card_of(ModelFolder(path, kind, pooling))


def card_of(folder: ModelFolder) -> ModelCard:
    """By the first reader that claims the folder. Raises ModelError for a model that cannot be served: a file is
    missing or unreadable, the weights are neither safetensors nor an ONNX export, its code has no equal in
    transformers, it has an unknown module, or it is not of the kind that is asked for, or has no such pooling."""
    _refuse_formats(folder)
    reader = next(reader for reader in READERS if reader.claims(folder))
    fields, (prompt, prompts) = reader.card(folder), folder.prompts
    common = {
        "folder": str(folder.path),
        "weights_folder": str(folder.weights_folder),
        "tokenizer_file": str(folder.tokenizer) if folder.tokenizer.is_file() else "",
        "export_file": str(folder.export or ""),
        "prompt": prompt,
        "prompts": prompts,
        "pooling": (),
        "steps": (),
    }
    card = ModelCard(**{**common, **fields})
    card = replace(card, weights_bytes=sum(path.stat().st_size for path in (*folder.weights, *card.step_files)))
    if folder.kind not in ("auto", *card.capabilities):
        has = "vectors" if "dense" in card.capabilities else f"the head for {' and '.join(card.capabilities)}"
        raise ModelError(f"{folder.path}: --kind {folder.kind} given, and the model has {has} only")
    if folder.pooling != "auto" and ("dense" not in card.capabilities or card.is_static):
        what = "is a table of static embeddings" if card.is_static else f"is for {' and '.join(card.capabilities)}"
        raise ModelError(
            f"{folder.path}: --pooling {folder.pooling} given, and the model {what}: it is for dense transformers"
        )
    given = next((name for name in ("yes", "no", "template") if getattr(folder, name)), None)
    if given == "no" or (
        given and not (card.takes_template and (given == "template" or is_causal_model(folder.config)))
    ):
        why = "yes is not" if given == "no" else f"the model is for {' and '.join(card.capabilities)}"
        raise ModelError(f"{folder.path}: {given} given, and {why}: it is for causal language models that rank")
    return card


def _refuse_formats(folder: ModelFolder) -> None:
    """Raises ModelError."""
    path = folder.path
    suffixes = {each.suffix for each in (path, *path.glob("*"))}
    # The fetch of a hub id takes none in another format.
    is_gguf = ".gguf" in suffixes or any("gguf" in part.lower() for part in path.parts if part.startswith("models--"))
    if is_gguf and not suffixes & {".safetensors", ".bin"}:
        raise ModelError(f"{path}: is in the GGUF format, and has no file in F32, F16, BF16 or Q8_0")
    if not path.is_dir():
        raise ModelError(f"{path}: {'is a file, and a model is a folder' if path.exists() else 'no such folder'}")


# --- dense vectors ----------------------------------------------------------------------------------------------


class Dense:
    """A transformer with a pooling; BGE-M3 has sparse and token vectors as well."""

    def claims(self, folder: ModelFolder) -> bool:
        return True

    def card(self, folder: ModelFolder) -> JsonObject:
        modules = folder.modules_behind("Transformer", "Pooling")
        config = folder.config
        assumes_pooling = folder.is_plain and folder.pooling == "auto"
        if assumes_pooling and folder.kind == "auto":
            _refuse_guess(folder)
        sentence_bert = folder.sentence_bert()
        pooling: tuple[str, ...] = (_default_pooling(config),)
        pools_prompt = True
        if not folder.is_plain:
            settings = folder.settings(folder.modules[1].path, "config.json")
            pooling, pools_prompt = read_pooling(settings, folder.prompts[0])
        if folder.pooling != "auto":
            pooling = (folder.pooling,)
        own = _own_projection(config, pooling)
        width = own[-1].out_dim if own else config["hidden_size"] * len(pooling)
        steps, dim = read_steps(folder, modules, width)
        steps = (*own, *steps)
        if any(step.kind == "tanh_127" for step in steps[:-1]):
            raise ModelError(f"{folder.path / 'modules.json'}: a module behind FlexibleQuantizer is not supported")
        fields = {
            **folder.of_transformer(sentence_bert),
            "steps": steps,
            "dim": dim,
            "pooling": pooling,
            "pools_prompt": pools_prompt,
            "assumes_pooling": assumes_pooling,
            **_read_matryoshka(folder, config, dim),
        }
        if not (folder.is_plain or folder.export) and folder.kind != "dense" and has_bge_m3(folder):
            sparse, tokens = read_bge_m3(folder)
            fields |= {"token_dim": config["hidden_size"], "sparse": sparse, "tokens": tokens}
            fields["capabilities"] = "dense", "sparse", "multi-vector"
        return fields


def _own_projection(config: ModelSettings, pooling: Sequence[str]) -> tuple[Step, ...]:
    """Voyage's, of the state of each token. It has no bias, so that it may come behind the mean as well."""
    if (width := config.get("embedding_projection")) is None:
        return ()
    if pooling != ("mean",):
        raise config.error(f"its projection (num_labels) is served with mean pooling, and the pooling is {pooling}")
    return (Step("dense", tensor="linear", in_dim=config["hidden_size"], out_dim=width, bias=False),)


def _default_pooling(config: JsonMapping) -> str:
    """sentence-transformers' pooling of a plain transformers model."""
    is_causal = is_causal_model(config) and config.get("is_causal", True)
    return "lasttoken" if is_causal else "mean"


def _refuse_guess(folder: ModelFolder) -> None:
    """Raises ModelError for a model without modules.json whose class or name tells that it may be something else than
    dense."""
    config = folder.config
    architecture = architecture_of(config)
    if architecture.endswith("ForMaskedLM"):
        raise config.error(
            f"{architecture} without modules.json may be a base model, a dense or a sparse one: --kind dense "
            f"serves it with {_default_pooling(config)} pooling, --kind sparse as SPLADE"
        )
    if is_causal_model(config) and _is_named_reranker(folder):
        raise config.error(
            f"{architecture} without modules.json, and its name or tags say that it is a reranker that is not known: "
            "yes, no and template in a table [models.NAME] say how it scores a pair, --kind dense makes vectors of its "
            "hidden states"
        )


def _is_named_reranker(folder: ModelFolder) -> bool:
    """By the model's names, and by the tags at the beginning of its README.md."""
    words = f"{folder.names} {folder.stated_in_front('tags|pipeline_tag')}"
    return re.search("rerank|zerank|text-ranking|cross-encoder", words, re.IGNORECASE) is not None


def _read_matryoshka(folder: ModelFolder, config: ModelSettings, dim: int) -> JsonObject:
    """The fields of a card about shorter vectors: as the files say, or else as is published about the model."""
    stated, keys = folder.stated, ("matryoshka_dimensions", "matryoshka_dims")
    lists = [(content, key, content[key]) for content in (config, stated) for key in keys if content.get(key)]
    for content, key, dims in lists:
        if not isinstance(dims, list) or not all(type(number) is int and 1 <= number <= dim for number in dims):
            raise content.error(f"{key} must be a list of whole numbers from 1 to {dim}")
    truncate_dim = 0 if stated.get("truncate_dim") is None else stated.positive("truncate_dim")
    known = published_dims(names_of(folder.path, config))
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


class Static:
    """A table with a row per token."""

    def claims(self, folder: ModelFolder) -> bool:
        return _is_model2vec(folder) or folder.kinds[:1] == ["StaticEmbedding"]

    def card(self, folder: ModelFolder) -> JsonObject:
        if is_model2vec := _is_model2vec(folder):
            folder.place = ""
        weights = single_file(folder.weights_folder)
        num_tokens, hidden_size = _table_shape(weights)
        tokenizer = folder.settings(folder.place, "tokenizer.json")
        try:
            num_ids = 1 + max(token_ids(tokenizer).values(), default=-1)
            unknown_ids = tuple(_unknown_ids(tokenizer))
            max_tokens = (tokenizer.get("truncation") or {}).get("max_length")
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise tokenizer.error(f"not a tokenizer: {error}") from None
        if num_ids > num_tokens:
            raise tokenizer.error(f"has {num_ids} tokens, and {weights.name} has rows for {num_tokens}")
        config = folder.optional(folder.place, "config.json")
        if is_model2vec:
            model_type, max_tokens = _MODEL2VEC, config.get("max_length", _MODEL2VEC_MAX_TOKENS)
            steps, dim = (Step("normalize"),) * bool(config.get("normalize")), hidden_size
        else:
            model_type, unknown_ids = "static", ()
            steps, dim = read_steps(folder, folder.modules[1:], hidden_size)
        return {
            "model_type": model_type,
            "hidden_size": hidden_size,
            "dim": dim,
            "max_tokens": max_tokens if isinstance(max_tokens, int) and max_tokens > 0 else _STATIC_MAX_TOKENS,
            "vocab_size": num_tokens + 1,
            "lowercase": False,
            "pooling": ("mean",),
            "steps": steps,
            **_read_matryoshka(folder, config, dim),
            "ignored_ids": (*unknown_ids, num_tokens),
        }


def _is_model2vec(folder: ModelFolder) -> bool:
    return folder.optional("config.json").get("model_type") == _MODEL2VEC


TABLES = ("embedding.weight", "embeddings")
"""The names of a table: StaticEmbedding's, Model2Vec's."""


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


READERS: tuple[Reader, ...] = (Sparse(), Static(), MultiVector(), LlmReranker(), Classifier(), Dense())
