"""What the files of a multi-vector model say about its token vectors: ColBERT in three layouts, and BGE-M3.

Owns the layouts and the reading of a `TokenHead`. Reads JSON files and the headers of safetensors, no weights.

Sources: the multi-vector encoder of sentence-transformers 6.2, which reads the three layouts (its own, PyLate's and
Stanford's), and FlagEmbedding's `inference/embedder/encoder_only/m3.py` for BGE-M3.
"""

import re
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from vecd.base.files import JsonMapping, JsonObject
from vecd.model.files import ModelError, ModelSettings, read_object, read_optional, stored_tensors, token_ids
from vecd.model.steps import HeadLayers, Module, SparseHead, Step, TokenHead, check_modules, read_modules, read_steps

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
    """The steps behind the state of each token, and the number of floats behind them. `modules` are those behind the
    Transformer, `weights` the files of its weights. Raises ModelError for a module that is not supported, and for a
    projection that is missing."""
    if layout == STANFORD:
        return _linear_of_weights(weights, hidden_size)
    others = [module for module in modules if module.kind != "MultiVectorMask"]
    if layout == OWN and len(others) == len(modules):
        raise ModelError(f"{folder / 'modules.json'}: a multi-vector model must have a MultiVectorMask module")
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


def read_token_head(
    folder: Path,
    weights_folder: Path,
    layout: str,
    steps: Sequence[Step],
    masks: Sequence[Path],
    sentence_bert: JsonMapping,
    prompts: Mapping[str, str],
) -> TokenHead:
    """The head of a model in one of the layouts. `masks`: the files of its MultiVectorMask modules; `sentence_bert`:
    the settings of its Transformer. Raises ModelError when a setting is not supported, or names a token that the
    vocabulary lacks."""
    if layout == STANFORD:
        settings = _as_pylate(read_optional(folder / "artifact.metadata"))
    else:
        settings = read_optional(folder / _SETTINGS)
    vocabulary = Vocabulary(weights_folder)
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
    words = _skipped_words(layout, settings, masks)
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
    settings: JsonMapping, role: str, prompts: Mapping[str, str], vocabulary: "Vocabulary"
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


def _skipped_words(layout: str, settings: ModelSettings, masks: Sequence[Path]) -> list[str]:
    if layout != OWN:
        return list(string.punctuation) if settings.get("skiplist_words") is None else _words_in(settings)
    words: list[str] = []
    for mask in map(read_optional, masks):
        words += _words_in(mask)
        tasks = mask.get("skiplist_tasks") or ["document"]
        if mask.get("keep_only_token_ids"):
            raise mask.error("keep_only_token_ids is not supported")
        if words and tasks not in ("document", ["document"]):
            raise mask.error(f"skiplist_tasks {tasks} is not supported: words are skipped in documents")
    return words


def _words_in(settings: ModelSettings) -> list[str]:
    words = settings.get("skiplist_words") or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise settings.error("skiplist_words must be a list of strings")
    return words


# --- BGE-M3 -----------------------------------------------------------------------------------------------------

SPARSE_LINEAR, COLBERT_LINEAR = "sparse_linear.safetensors", "colbert_linear.safetensors"

_UNUSED_TOKENS = ("cls_token", "sep_token", "eos_token", "pad_token", "unk_token")


def has_bge_m3(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (SPARSE_LINEAR, COLBERT_LINEAR))


def read_bge_m3(folder: Path, weights_folder: Path, hidden_size: int) -> tuple[SparseHead, TokenHead]:
    lexical = Step("dense", file=SPARSE_LINEAR, in_dim=hidden_size, out_dim=1, activation="relu")
    projection = Step("dense", file=COLBERT_LINEAR, in_dim=hidden_size, out_dim=hidden_size)
    vocabulary = Vocabulary(weights_folder)
    ids = {token_id for name in _UNUSED_TOKENS if (token_id := vocabulary.special(name)) is not None}
    sparse = SparseHead((lexical,), is_lexical=True, ignored_ids=tuple(sorted(ids)))
    return sparse, TokenHead((projection, Step("normalize")), drops_first=True, is_mean=True)


# --- the vocabulary ---------------------------------------------------------------------------------------------

_USUAL_MASKS = ("[MASK]", "<mask>")


class Vocabulary:
    def __init__(self, folder: Path) -> None:
        self.ids = token_ids(read_object(folder / "tokenizer.json"))
        self._special = {
            **read_optional(folder / "special_tokens_map.json"),
            **read_optional(folder / "tokenizer_config.json"),
        }

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
_SPARSE_KINDS = frozenset({_POOLING, "MLMTransformer", _STATIC, "SparseAutoEncoder"})
_NUM_LOGS = {"relu": 1, "log1p_relu": 2}


@dataclass(frozen=True, slots=True)
class SparseModules:
    transformer: str = ""
    task: str = "fill-mask"
    pooling: str = "max"
    num_logs: int = 1
    query_weights: str = ""


def find_sparse(folder: Path, kind: str) -> SparseModules | None:
    """The parts of a SPLADE model; None if the folder holds none, or if `kind` asks for another kind. Raises ModelError
    for a sparse model that is not served, and for another model where `kind` is "sparse"."""
    if kind not in ("auto", "sparse"):
        return None
    path = folder / "modules.json"
    if not path.exists():
        return _plain(folder) if kind == "sparse" else None
    modules = read_modules(path)
    kinds = [module.kind for module in modules]
    routes = _read_routes(folder / modules[0].path) if kinds[:1] == ["Router"] else {}
    config = read_optional(folder / _SETTINGS)
    named = {*kinds, *(module.kind for route in routes.values() for module in route)}
    if config.get("model_type") != "SparseEncoder" and not named & _SPARSE_KINDS:
        if kind == "sparse":
            raise ModelError(f"{path}: is not a sparse model: its modules are {', '.join(kinds)}")
        return None
    if config.get("max_active_dims") is not None:
        raise config.error("max_active_dims is not supported; ask for top_k in requests")
    check_modules(path, modules)
    if not routes:
        return _chain(folder, path, modules)
    if len(modules) > 1:
        raise ModelError(f"{path}: module {kinds[1]} behind a Router is not supported")
    path = folder / modules[0].path / "router_config.json"
    for route in routes.values():
        check_modules(path, route)
    return _routed(folder, path, routes)


def _plain(folder: Path) -> SparseModules:
    config = read_object(folder / "config.json")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not any(str(name).endswith("ForMaskedLM") for name in architectures):
        raise config.error(f"is not a sparse model: architectures is {architectures!r}, not a …ForMaskedLM")
    return SparseModules()


def _chain(folder: Path, path: Path, modules: list[Module]) -> SparseModules:
    kinds = [module.kind for module in modules]
    if len(modules) != 2 or kinds[0] not in _TRANSFORMERS or kinds[1] != _POOLING:
        unknown = [kind for kind in kinds if kind not in (*_TRANSFORMERS, _POOLING)]
        fault = f"module {unknown[0]} is not supported in a sparse model" if unknown else f"they are {kinds}"
        raise ModelError(f"{path}: must be a Transformer and a {_POOLING}; {fault}")
    settings = read_object(folder / modules[1].path / "config.json")
    pooling, activation = settings.get("pooling_strategy", "max"), settings.get("activation_function", "relu")
    if pooling not in ("max", "sum"):
        raise settings.error(f"pooling_strategy {pooling!r} is unknown; known: max, sum")
    if not isinstance(activation, str) or activation not in _NUM_LOGS:
        raise settings.error(f"activation_function {activation!r} is unknown; known: {', '.join(_NUM_LOGS)}")
    task = "feature-extraction" if kinds[0] == "Transformer" else "fill-mask"
    return SparseModules(modules[0].path, task, pooling, _NUM_LOGS[activation])


def _routed(folder: Path, path: Path, routes: Mapping[str, list[Module]]) -> SparseModules:
    if routes.keys() != {"query", "document"}:
        raise ModelError(f"{path}: must have the routes query and document, has {', '.join(sorted(routes))}")
    query, found = routes["query"], _chain(folder, path, routes["document"])
    if query == routes["document"]:
        return found
    kinds = [module.kind for module in query]
    if kinds != [_STATIC]:
        raise ModelError(f"{path}: the query's modules are {', '.join(kinds)}; served is a {_STATIC} alone")
    weights = _query_weights(folder, query[0].path)
    _check_tokenizer(folder / query[0].path / "tokenizer.json", folder / found.transformer / "tokenizer.json")
    return replace(found, query_weights=weights)


def _query_weights(folder: Path, module: str) -> str:
    named = read_optional(folder / module / "config.json").get("path")
    names = [f"{module}/model.safetensors"]
    if isinstance(named, str) and named.endswith(".json"):
        # As it was given when the model was made: a path of that machine, or a name beside the model.
        names = [f"{module}/{Path(named).name}", Path(named).name]
    for name in names:
        if (folder / name).is_file():
            return name
    raise ModelError(f"{folder / names[0]}: file missing (the weights of queries)")


def _check_tokenizer(queries: Path, documents: Path) -> None:
    if not queries.exists() or not documents.exists() or queries.read_bytes() == documents.read_bytes():
        return
    theirs, ours = (read_object(path) for path in (queries, documents))
    if any(theirs.get(name) != ours.get(name) for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")):
        raise ModelError(f"{queries}: is another tokenizer than {documents}")


def _read_routes(folder: Path) -> dict[str, list[Module]]:
    config = read_object(folder / "router_config.json")
    if config.inner("parameters").get("route_mappings"):
        raise config.error("route_mappings is not supported")
    try:
        types, structure = config["types"], config["structure"]
        return {route: [Module(str(types[name]), name) for name in names] for route, names in structure.items()}
    except (TypeError, LookupError, AttributeError) as error:
        raise config.error(f"cannot be read: {error!r}") from None


# --- heads for masked words -------------------------------------------------------------------------------------


_ROBERTA = HeadLayers(dense="lm_head.dense", activation="gelu", norm="lm_head.layer_norm", last="lm_head.decoder")
_HEADS = MappingProxyType(
    {
        "bert": HeadLayers(
            dense="cls.predictions.transform.dense",
            activation="hidden_act:gelu",
            norm="cls.predictions.transform.LayerNorm",
            last="cls.predictions.decoder",
        ),
        **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet"), _ROBERTA),
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
        "modernbert": HeadLayers(
            dense="head.dense",
            activation="classifier_activation:gelu",
            norm="head.norm",
            epsilon="norm_eps:1e-5",
            last="decoder",
        ),
    }
)


def steps_of_masked_words(config: ModelSettings, names: Collection[str]) -> tuple[Step, ...]:
    """The steps from the state of a token to its logits. `names`: those of all tensors. Raises ModelError for a head
    that no table describes, or that is not among the tensors."""
    model_type = config["model_type"]
    head = _HEADS.get(model_type)
    if head is None:
        raise config.error(
            f"the head for masked words of {model_type} is not described; served are sparse models of "
            f"{', '.join(_HEADS)}"
        )
    for name in (head.dense, head.norm):
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


def _decoder(config: ModelSettings, head: HeadLayers, names: Collection[str]) -> str:
    """The decoder's own weights where the files have them, else the table of words, as transformers reads them."""
    found = [name for name in sorted(names) if re.fullmatch(r"\w+\.embeddings\.(word|tok)_embeddings\.weight", name)]
    tied: list[str] = found if config.get("tie_word_embeddings", True) else []
    for name in (f"{head.last}.weight", *tied):
        if name in names:
            return name.removesuffix(".weight")
    raise config.error(f"the weights have no head for masked words: {head.last}.weight is missing")
