"""Readers of models with sparse vectors, and with vectors of tokens: SPLADE, ColBERT in three layouts, and BGE-M3.

Owns the layouts, and the reading of a `SparseHead` and a `TokenHead`.

Sources: the multi-vector encoder of sentence-transformers 6.2, which reads the three layouts (its own, PyLate's and
Stanford's), and FlagEmbedding's `inference/embedder/encoder_only/m3.py` for BGE-M3.
"""

import re
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from vecd.base.files import JsonMapping, JsonObject
from vecd.model.files import Folder, ModelError, ModelSettings, stored_tensors, token_ids, weight_files
from vecd.model.folder import ModelFolder, architecture_of
from vecd.model.steps import MODERNBERT, HeadLayers, Module, SparseHead, Step, TokenHead, check_modules, read_steps

OWN, PYLATE, STANFORD = "sentence-transformers", "PyLate", "Stanford"
"""The layouts. The first lists every step; the others leave out the mask and the norm, which they always have."""

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


class MultiVector:
    def claims(self, folder: ModelFolder) -> bool:
        return bool(_layout_of(folder))

    def card(self, folder: ModelFolder) -> JsonObject:
        modules = folder.modules_behind("Transformer")
        hidden_size = folder.config["hidden_size"]
        if folder.export:
            raise ModelError(f"{folder.export}: a multi-vector model is served from safetensors alone")
        sentence_bert = folder.sentence_bert(may_expand=True)
        max_tokens = folder.max_tokens(sentence_bert)
        steps, token_dim = _read_steps(folder, modules, hidden_size)
        tokens = _read_head(folder, steps, sentence_bert)
        # PyLate sets the tokenizer's limit to that of the text that it has embedded last.
        if tokens.document_tokens or tokens.query_tokens > max_tokens:
            tokens = replace(tokens, document_tokens=tokens.document_tokens or max_tokens)
            max_tokens = folder.num_positions or max_tokens
        if tokens.query_tokens > max_tokens:
            raise ModelError(
                f"{folder.path}: queries of {tokens.query_tokens} tokens, but the model's limit is {max_tokens}"
            )
        return {
            **folder.of_transformer(sentence_bert),
            "dim": token_dim,
            "token_dim": token_dim,
            "max_tokens": max_tokens,
            "prompt": "",
            "capabilities": ("multi-vector",),
            "tokens": tokens,
        }


def _layout_of(folder: ModelFolder) -> str:
    match folder.stated.get("model_type"):
        case "MultiVectorEncoder":
            return OWN
        case "ColBERT":
            return PYLATE
        case None:
            if architecture_of(folder.optional("config.json")) == "HF_ColBERT":
                return STANFORD
            return PYLATE if "query_prefix" in folder.stated else ""
        case _:
            return ""


def _read_steps(folder: ModelFolder, modules: Sequence[Module], hidden_size: int) -> tuple[tuple[Step, ...], int]:
    """The steps behind the state of each token, and the number of floats behind them. `modules` are those behind the
    Transformer. Raises ModelError for a module that is not supported, and for a projection that is missing."""
    layout = _layout_of(folder)
    if layout == STANFORD:
        return _linear_of_weights(folder.weights, hidden_size)
    others = [module for module in modules if module.kind != "MultiVectorMask"]
    if layout == OWN and len(others) == len(modules):
        raise ModelError(f"{folder.path / 'modules.json'}: a multi-vector model must have a MultiVectorMask module")
    return read_steps(folder, others, hidden_size, of_tokens=True)


def _linear_of_weights(weights: Sequence[Path], hidden_size: int) -> tuple[tuple[Step, ...], int]:
    for path in weights:
        tensor = stored_tensors(path).get("linear.weight")
        if tensor is not None:
            shape = tensor.shape
            if len(shape) != 2 or shape[1] != hidden_size:
                raise ModelError(f"{path}: linear.weight is {list(shape)}, but a token has {hidden_size} floats")
            step = Step("dense", tensor="linear", in_dim=hidden_size, out_dim=shape[0], bias=False)
            return (step,), shape[0]
    raise ModelError(f"{weights[0]}: linear.weight is missing (the projection of a ColBERT model)")


def _read_head(folder: ModelFolder, steps: Sequence[Step], sentence_bert: JsonMapping) -> TokenHead:
    """`sentence_bert`: the settings of the Transformer. Raises ModelError when a setting is not supported, or names a
    token that the vocabulary lacks."""
    layout, prompts = _layout_of(folder), dict(folder.prompts[1])
    settings = folder.stated
    if layout == STANFORD:
        settings, prompts = _as_pylate(folder.optional("artifact.metadata")), {}
    vocabulary = _Vocabulary(folder)
    for name in ("query_prefix", "document_prefix"):
        if not isinstance(settings.get(name), str | None):
            raise settings.error(f"{name} must be a string")
    query_marker, query_prompt = _marker(settings, "query", prompts, vocabulary)
    document_marker, document_prompt = _marker(settings, "document", prompts, vocabulary)
    stated = {key: value for key, value in sentence_bert.items() if value is not None}
    lengths = ModelSettings(settings.path, {**settings, **stated})
    expansion = _expansion(settings, sentence_bert)
    query_tokens, max_query_tokens = _length(lengths, "query_length"), None
    if expansion is not None:
        if expansion.get("strategy") == "min":
            max_query_tokens = query_tokens
        query_tokens = expansion.positive("length")
    words = _skipped_words(folder) if layout == OWN else _words_in(settings, list(string.punctuation))
    return TokenHead(
        steps=tuple(steps) if layout == OWN else (*steps, Step("normalize")),
        query_marker=query_marker,
        document_marker=document_marker,
        query_prompt=query_prompt,
        document_prompt=document_prompt,
        query_tokens=query_tokens,
        max_query_tokens=max_query_tokens,
        expansion_id=None if expansion is None else vocabulary.expansion_id(expansion),
        attends_to_expansion=expansion is not None and bool(expansion.get("attend")),
        document_tokens=_length(lengths, "document_length"),
        ignored_ids=tuple(sorted({vocabulary.ids[word] for word in words if word in vocabulary.ids})),
        is_mean=settings.get("similarity_fn_name") == "meanmaxsim",
    )


def _as_pylate(metadata: ModelSettings) -> ModelSettings:
    """Stanford's settings under PyLate's names. Queries are always expanded."""
    named = {
        "query_prefix": metadata.get("query_token_id") or "[unused0]",
        "document_prefix": metadata.get("doc_token_id") or "[unused1]",
        "query_length": metadata.get("query_maxlen"),
        "document_length": metadata.get("doc_maxlen"),
        "attend_to_expansion_tokens": bool(metadata.get("attend_to_mask_tokens")),
        "skiplist_words": list(string.punctuation) if metadata.get("mask_punctuation", True) else [],
    }
    return ModelSettings(metadata.path, named)


def _marker(
    settings: JsonMapping, role: str, prompts: Mapping[str, str], vocabulary: "_Vocabulary"
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


def _expansion(settings: ModelSettings, sentence_bert: JsonMapping) -> ModelSettings | None:
    """As the newest layout writes it: strategy, length, token, attend. None: a query stays as it is."""
    default: JsonObject | None = None
    if any(key in settings for key in _PYLATE_KEYS):
        attends = settings.get("attend_to_expansion_tokens", settings.get("attend_to_mask_tokens"))
        length = settings.get("query_length") or _DEFAULT_QUERY_TOKENS
        stated = {"strategy": "fixed", "attend": bool(attends), "length": length}
        default = settings.get("query_expansion", None if settings.get("do_query_expansion") is False else stated)
    expansion = sentence_bert.get("query_expansion", default)
    if expansion is None:
        return None
    if not isinstance(expansion, dict) or expansion.get("strategy") not in ("fixed", "min"):
        raise settings.error(f"query_expansion {expansion!r} is not supported")
    return ModelSettings(settings.path, expansion)


def _length(lengths: ModelSettings, name: str) -> int:
    return 0 if lengths.get(name) is None else lengths.positive(name)


def _skipped_words(folder: ModelFolder) -> list[str]:
    words: list[str] = []
    for module in folder.modules:
        if module.kind != "MultiVectorMask":
            continue
        mask = folder.optional(module.path, "config.json")
        words += _words_in(mask, [])
        tasks = mask.get("skiplist_tasks") or ["document"]
        if mask.get("keep_only_token_ids"):
            raise mask.error("keep_only_token_ids is not supported")
        if words and tasks not in ("document", ["document"]):
            raise mask.error(f"skiplist_tasks {tasks} is not supported: words are skipped in documents")
    return words


def _words_in(settings: ModelSettings, default: list[str]) -> list[str]:
    words = default if settings.get("skiplist_words") is None else settings["skiplist_words"] or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise settings.error("skiplist_words must be a list of strings")
    return words


# --- BGE-M3 -----------------------------------------------------------------------------------------------------

SPARSE_LINEAR, COLBERT_LINEAR = "sparse_linear.safetensors", "colbert_linear.safetensors"

_UNUSED_TOKENS = ("cls_token", "sep_token", "eos_token", "pad_token", "unk_token")


def has_bge_m3(folder: ModelFolder) -> bool:
    return folder.has(SPARSE_LINEAR) and folder.has(COLBERT_LINEAR)


def read_bge_m3(folder: ModelFolder) -> tuple[SparseHead, TokenHead]:
    hidden_size = folder.config["hidden_size"]
    lexical = Step("dense", file=SPARSE_LINEAR, in_dim=hidden_size, out_dim=1, activation="relu")
    projection = Step("dense", file=COLBERT_LINEAR, in_dim=hidden_size, out_dim=hidden_size)
    vocabulary = _Vocabulary(folder)
    ids = {token_id for name in _UNUSED_TOKENS if (token_id := vocabulary.special(name)) is not None}
    sparse = SparseHead((lexical,), is_lexical=True, ignored_ids=tuple(sorted(ids)))
    return sparse, TokenHead((projection, Step("normalize")), drops_first=True, is_mean=True)


# --- the vocabulary ---------------------------------------------------------------------------------------------

_USUAL_MASKS = ("[MASK]", "<mask>")


class _Vocabulary:
    def __init__(self, folder: ModelFolder) -> None:
        self.ids = token_ids(folder.settings(folder.place, "tokenizer.json"))
        files = ("special_tokens_map.json", "tokenizer_config.json")
        self._special = {name: value for file in files for name, value in folder.optional(folder.place, file).items()}

    def special(self, name: str) -> int | None:
        token = self._special.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        return self.ids.get(token) if isinstance(token, str) else None

    def expansion_id(self, expansion: ModelSettings) -> int:
        """The id of the token that a query is filled up with: the stated one, or the mask, or that of the end. Raises
        ModelError when the vocabulary has none of them."""
        token = expansion.get("token")
        choices = [self.ids.get(token) if isinstance(token, str) else None]
        if token is None:
            choices = [self.special("mask_token"), *map(self.ids.get, _USUAL_MASKS), self.special("eos_token")]
        for choice in choices:
            if choice is not None:
                return choice
        wanted = f"{token or 'mask or eos'!s:.80}"
        raise expansion.error(f"the vocabulary has no token to expand queries with ({wanted})")


# What makes a folder a SPLADE model: its modules, and the head for masked words as steps.
#
# Reads JSON, and no weights: the names of tensors are given.
#
#     modules.json     [Transformer or MLMTransformer, SpladePooling]
#                      [Router]: query → SparseStaticEmbedding, document → the two above
#     none             a *ForMaskedLM, by `kind` "sparse" alone: it may as well be a plain base model
#
# Source: sentence-transformers 6.2, `sparse_encoder` and `Router`; transformers 5, the *ForMaskedLM classes.

_POOLING = "SpladePooling"
_TRANSFORMERS = ("Transformer", "MLMTransformer")
_STATIC = "SparseStaticEmbedding"
_SPLADE_CODE = "splade.Qwen3ForCausalLM"
"""The code of splade-code-06B: transformers' class, whose tokens see later ones by `is_causal: false` alone."""
_SPARSE_KINDS = frozenset({_POOLING, "MLMTransformer", _STATIC, "SparseAutoEncoder"})
_NUM_LOGS = {"relu": 1, "log1p_relu": 2}


class Sparse:
    def claims(self, folder: ModelFolder) -> bool:
        """Raises ModelError for another model where the kind is "sparse"."""
        if folder.kind not in ("auto", "sparse") or has_bge_m3(folder):
            return False
        if not folder.listed:
            return folder.kind == "sparse"
        listed = [module.kind for module in folder.listed]
        named = {*listed, *(module.kind for route in folder.routes.values() for module in route)}
        is_sparse = folder.stated.get("model_type") == "SparseEncoder" or bool(named & _SPARSE_KINDS)
        if folder.kind == "sparse" and not is_sparse:
            path = folder.path / "modules.json"
            raise ModelError(f"{path}: is not a sparse model: its modules are {', '.join(listed)}")
        return is_sparse

    def card(self, folder: ModelFolder) -> JsonObject:
        if folder.stated.get("max_active_dims") is not None:
            raise folder.stated.error("max_active_dims is not supported; ask for top_k in requests")
        if routes := folder.routes:
            task, head = _routed(folder, routes)
        elif folder.listed:
            task, head = _chain(folder, folder.path / "modules.json", folder.listed)
        else:
            task, head = _plain(folder)
        config, weights = folder.config, weight_files(folder.weights_folder)
        code = str(config.inner("auto_map").get("AutoModelForMaskedLM", ""))
        is_own = code.rpartition("--")[2] == _SPLADE_CODE and config.get("is_causal") is False
        if config["model_type"] in CAUSAL_SPARSE and code and not is_own:
            raise config.error(f"asks for Python code from the model's repository to be run (auto_map: {code})")
        sentence_bert = folder.sentence_bert("fill-mask", task)
        names = {name for file in weights for name in stored_tensors(file)}
        head = replace(head, steps=_steps_of_masked_words(config, names))
        own = {"dim": config["vocab_size"], "capabilities": ("sparse",), "sparse": head}
        return {**folder.of_transformer(sentence_bert), **own}


def _plain(folder: ModelFolder) -> tuple[str, SparseHead]:
    config = folder.settings("config.json")
    if not architecture_of(config).endswith("ForMaskedLM"):
        raise config.error(
            f"is not a sparse model: architectures is {config.get('architectures')!r}, not a …ForMaskedLM"
        )
    return "fill-mask", SparseHead(())


def _chain(folder: ModelFolder, path: Path, modules: list[Module]) -> tuple[str, SparseHead]:
    """The task of the transformer, and the head without its steps. Side effect: the folder's place."""
    kinds = [module.kind for module in modules]
    if len(modules) != 2 or kinds[0] not in _TRANSFORMERS or kinds[1] != _POOLING:
        unknown = [kind for kind in kinds if kind not in (*_TRANSFORMERS, _POOLING)]
        fault = f"module {unknown[0]} is not supported in a sparse model" if unknown else f"they are {kinds}"
        raise ModelError(f"{path}: must be a Transformer and a {_POOLING}; {fault}")
    settings = folder.settings(modules[1].path, "config.json")
    pooling, activation = settings.get("pooling_strategy", "max"), settings.get("activation_function", "relu")
    if pooling not in ("max", "sum"):
        raise settings.error(f"pooling_strategy {pooling!r} is unknown; known: max, sum")
    if not isinstance(activation, str) or activation not in _NUM_LOGS:
        raise settings.error(f"activation_function {activation!r} is unknown; known: {', '.join(_NUM_LOGS)}")
    folder.place = modules[0].path
    head = SparseHead((), pooling=pooling, num_logs=_NUM_LOGS[activation])
    return "feature-extraction" if kinds[0] == "Transformer" else "fill-mask", head


def _routed(folder: ModelFolder, routes: Mapping[str, list[Module]]) -> tuple[str, SparseHead]:
    if len(folder.listed) > 1:
        path = folder.path / "modules.json"
        raise ModelError(f"{path}: module {folder.listed[1].kind} behind a Router is not supported")
    path = folder.router.path
    if folder.router.inner("parameters").get("route_mappings"):
        raise folder.router.error("route_mappings is not supported")
    for route in routes.values():
        check_modules(path, route)
    if routes.keys() != {"query", "document"}:
        raise ModelError(f"{path}: must have the routes query and document, has {', '.join(sorted(routes))}")
    query, (task, head) = routes["query"], _chain(folder, path, routes["document"])
    if query == routes["document"]:
        return task, head
    kinds = [module.kind for module in query]
    if kinds != [_STATIC]:
        raise ModelError(f"{path}: the query's modules are {', '.join(kinds)}; served is a {_STATIC} alone")
    weights = _query_weights(folder, query[0].path)
    _check_tokenizer(folder, query[0].path)
    return task, replace(head, query_weights=weights)


def _query_weights(folder: Folder, module: str) -> str:
    named = folder.optional(module, "config.json").get("path")
    names = [f"{module}/model.safetensors"]
    if isinstance(named, str) and named.endswith(".json"):
        # As it was given when the model was made: a path of that machine, or a name beside the model.
        names = [f"{module}/{Path(named).name}", Path(named).name]
    for name in names:
        if folder.has(name):
            return name
    raise ModelError(f"{folder.path / names[0]}: file missing (the weights of queries)")


def _check_tokenizer(folder: ModelFolder, of_queries: str) -> None:
    """Raises ModelError where queries have another tokenizer than documents."""
    queries, documents = (folder.optional(place, "tokenizer.json") for place in (of_queries, folder.place))
    names = ("normalizer", "pre_tokenizer", "model", "added_tokens")
    if queries and documents and any(queries.get(name) != documents.get(name) for name in names):
        raise ModelError(f"{queries.path}: is another tokenizer than {documents.path}")


# --- heads for masked words -------------------------------------------------------------------------------------


CAUSAL_SPARSE = ("qwen3",)
"""Families of causal language models, whose head is the output layer alone: for splade-code."""

_ROBERTA = HeadLayers(dense="lm_head.dense", activation="gelu", norm="lm_head.layer_norm", last="lm_head.decoder")
_HEADS = MappingProxyType(
    {
        "bert": HeadLayers(
            dense="cls.predictions.transform.dense",
            activation="hidden_act:gelu",
            norm="cls.predictions.transform.LayerNorm",
            last="cls.predictions.decoder",
        ),
        **dict.fromkeys(("roberta", "xlm-roberta", "jina_embeddings_v3", "camembert", "mpnet"), _ROBERTA),
        "gte": replace(_ROBERTA, norm="lm_head.norm"),
        "distilbert": HeadLayers(
            dense="vocab_transform",
            activation="activation:gelu",
            norm="vocab_layer_norm",
            epsilon="1e-12",
            last="vocab_projector",
        ),
        "electra": HeadLayers(
            dense="generator_predictions.dense",
            activation="gelu",
            norm="generator_predictions.LayerNorm",
            last="generator_lm_head",
        ),
        "modernbert": replace(MODERNBERT, last="decoder"),
        **dict.fromkeys(CAUSAL_SPARSE, HeadLayers(last="lm_head")),
    }
)


def _steps_of_masked_words(config: ModelSettings, names: Collection[str]) -> tuple[Step, ...]:
    """The steps from the state of a token to its logits. `names`: those of all tensors. Raises ModelError for a head
    that no table describes, or that is not among the tensors."""
    model_type = config["model_type"]
    head = _HEADS.get(model_type)
    if head is None:
        raise config.error(
            f"the head for masked words of {model_type} is not described; served are sparse models of "
            f"{', '.join(_HEADS)}"
        )
    for name in filter(None, (head.dense, head.norm)):
        if not {f"{name}.weight", f"{name}.gamma"} & set(names):
            raise config.error(f"the weights have no head for masked words: {name}.weight is missing")
    # Between dense and decoder ELECTRA has as many floats as its tables.
    widths = ModelSettings(config.path, {"embedding_size": 128, **config})
    width = widths.positive("embedding_size" if model_type == "electra" else "hidden_size")
    steps = head.steps_before_last(
        config, config["hidden_size"], width, lambda name: bool({f"{name}.bias", f"{name}.beta"} & set(names))
    )
    biases = (f"{head.last}.bias", f"{head.last.rpartition('.')[0]}.bias")
    bias = next((name for name in biases if name in names), "")
    decoder, vocab_size = _decoder(config, head, names), config["vocab_size"]
    last = Step("dense", in_dim=width, out_dim=vocab_size, bias=bool(bias), tensor=decoder, bias_tensor=bias)
    return (*steps, last)


_WORDS = r"\w+\.embeddings\.(word|tok)_embeddings\.weight|(model\.)?embed_tokens\.weight"
"""The name of a table of words."""


def _decoder(config: ModelSettings, head: HeadLayers, names: Collection[str]) -> str:
    """The decoder's own weights where the files have them, else the table of words, as transformers reads them."""
    found = [name for name in sorted(names) if re.fullmatch(_WORDS, name)]
    tied: list[str] = found if config.get("tie_word_embeddings", True) else []
    for name in (f"{head.last}.weight", *tied):
        if name in names:
            return name.removesuffix(".weight")
    raise config.error(f"the weights have no head for masked words: {head.last}.weight is missing")
