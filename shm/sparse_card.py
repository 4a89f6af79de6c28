"""What makes a folder a SPLADE model: its modules, and the head for masked words as steps.

Owns the layouts of sentence-transformers' sparse encoders, the table of heads by architecture, and the refusal of
modules and heads that are not served. Reads JSON, and no weights: the names of tensors are given. Called by
`vecd.shm.card`, which reports every ValueError as a ModelError.

    modules.json     [Transformer or MLMTransformer, SpladePooling]
                     [Router]: query → SparseStaticEmbedding, document → the two above
    none             a *ForMaskedLM, by `kind` "sparse" alone: it may as well be a plain base model

Source: sentence-transformers 6.2, `sparse_encoder` and `Router`; transformers 5, the *ForMaskedLM classes.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vecd.shm.heads import Step

_POOLING = "SpladePooling"
_TRANSFORMERS = ("Transformer", "MLMTransformer")
_STATIC = "SparseStaticEmbedding"
_SPARSE_KINDS = frozenset({_POOLING, "MLMTransformer", _STATIC, "SparseAutoEncoder"})
_NUM_LOGS = {"relu": 1, "log1p_relu": 2}
"""By SpladePooling's activation_function."""


@dataclass(frozen=True, slots=True)
class SparseModules:
    """The parts of a SPLADE model. Paths are relative to the model's folder."""

    transformer: str = ""
    task: str = "fill-mask"
    """What the transformer computes where its settings do not say so."""
    pooling: str = "max"
    num_logs: int = 1
    query_weights: str = ""
    """As in `vecd.shm.heads.SparseHead`."""


def find_sparse(folder: Path, kind: str) -> SparseModules | None:
    """The parts of the SPLADE model in `folder`; None if it holds none, or if `kind` (one of
    `vecd.shm.heads.CAPABILITIES`, or "auto") asks for another kind.

    Raises ValueError for a sparse model that is not served, and for another model where `kind` is "sparse"."""
    if kind not in ("auto", "sparse"):
        return None
    path = folder / "modules.json"
    if not path.exists():
        return _plain(folder) if kind == "sparse" else None
    modules = _module_list(path)
    kinds = [module for module, _ in modules]
    routes = _read_routes(folder / modules[0][1]) if kinds[:1] == ["Router"] else {}
    named = {*kinds, *(module for route in routes.values() for module, _ in route)}
    settings = folder / "config_sentence_transformers.json"
    is_encoder = settings.exists() and _read_object(settings).get("model_type") == "SparseEncoder"
    if not is_encoder and not named & _SPARSE_KINDS:
        if kind == "sparse":
            raise ValueError(f"{path}: is not a sparse model: its modules are {', '.join(kinds)}")
        return None
    if is_encoder and _read_object(settings).get("max_active_dims") is not None:
        raise ValueError(f"{settings}: max_active_dims is not supported; ask for top_k in requests")
    if routes:
        if len(modules) > 1:
            raise ValueError(f"{path}: module {kinds[1]} behind a Router is not supported")
        return _routed(folder, folder / modules[0][1] / "router_config.json", routes)
    return _chain(folder, path, modules)


_Module = tuple[str, str]
"""Kind and path."""


def _plain(folder: Path) -> SparseModules:
    path = folder / "config.json"
    architectures = _read_object(path).get("architectures")
    if not isinstance(architectures, list) or not any(str(name).endswith("ForMaskedLM") for name in architectures):
        raise ValueError(f"{path}: is not a sparse model: architectures is {architectures!r}, not a …ForMaskedLM")
    return SparseModules()


def _chain(folder: Path, path: Path, modules: list[_Module]) -> SparseModules:
    kinds = [kind for kind, _ in modules]
    if len(modules) != 2 or kinds[0] not in _TRANSFORMERS or kinds[1] != _POOLING:
        unknown = [kind for kind in kinds if kind not in (*_TRANSFORMERS, _POOLING)]
        fault = f"module {unknown[0]} is not supported in a sparse model" if unknown else f"they are {kinds}"
        raise ValueError(f"{path}: must be a Transformer and a {_POOLING}; {fault}")
    config = folder / modules[1][1] / "config.json"
    settings = _read_object(config)
    pooling, activation = settings.get("pooling_strategy", "max"), settings.get("activation_function", "relu")
    if pooling not in ("max", "sum"):
        raise ValueError(f"{config}: pooling_strategy {pooling!r} is unknown; known: max, sum")
    if activation not in _NUM_LOGS:
        raise ValueError(f"{config}: activation_function {activation!r} is unknown; known: {', '.join(_NUM_LOGS)}")
    task = "feature-extraction" if kinds[0] == "Transformer" else "fill-mask"
    return SparseModules(modules[0][1], task, pooling, _NUM_LOGS[activation])


def _routed(folder: Path, path: Path, routes: Mapping[str, list[_Module]]) -> SparseModules:
    if routes.keys() != {"query", "document"}:
        raise ValueError(f"{path}: must have the routes query and document, has {', '.join(sorted(routes))}")
    query = routes["query"]
    found = _chain(folder, path, routes["document"])
    if query == routes["document"]:
        return found
    if [kind for kind, _ in query] != [_STATIC]:
        kinds = ", ".join(kind for kind, _ in query)
        raise ValueError(f"{path}: the query's modules are {kinds}; served is a {_STATIC} alone")
    weights = _query_weights(folder, query[0][1])
    _check_tokenizer(folder / query[0][1] / "tokenizer.json", folder / found.transformer / "tokenizer.json")
    return SparseModules(found.transformer, found.task, found.pooling, found.num_logs, weights)


def _query_weights(folder: Path, module: str) -> str:
    """The file with the weights of a SparseStaticEmbedding."""
    config = folder / module / "config.json"
    named = _read_object(config).get("path") if config.exists() else None
    names = [f"{module}/model.safetensors"]
    if isinstance(named, str) and named.endswith(".json"):
        # As it was given when the model was made: a path of that machine, or a name beside the model.
        names = [f"{module}/{Path(named).name}", Path(named).name]
    for name in names:
        if (folder / name).is_file():
            return name
    raise ValueError(f"{folder / names[0]}: file missing (the weights of queries)")


def _check_tokenizer(queries: Path, documents: Path) -> None:
    """Refuse a tokenizer of queries that is not the documents', because one tokenizer is for both."""
    if not queries.exists() or not documents.exists() or queries.read_bytes() == documents.read_bytes():
        return
    theirs, ours = (_read_object(path) for path in (queries, documents))
    if any(theirs.get(name) != ours.get(name) for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")):
        raise ValueError(f"{queries}: is another tokenizer than {documents}")


def _read_routes(folder: Path) -> dict[str, list[_Module]]:
    """The modules of each route of a Router. Raises ValueError where other things than the role choose the route."""
    path = folder / "router_config.json"
    config = _read_object(path)
    types, structure = config.get("types"), config.get("structure")
    if not isinstance(types, dict) or not isinstance(structure, dict):
        raise ValueError(f"{path}: types and structure must be objects")
    if (config.get("parameters") or {}).get("route_mappings"):
        raise ValueError(f"{path}: route_mappings is not supported")
    try:
        return {route: [_module(path, types[name], name) for name in names] for route, names in structure.items()}
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path}: cannot be read: {error!r}") from None


def _module_list(path: Path) -> list[_Module]:
    modules = _read(path)
    if not isinstance(modules, list):
        raise ValueError(f"{path}: must be a list of modules")
    named = [module if isinstance(module, dict) else {} for module in modules]
    return [_module(path, module.get("type"), module.get("path")) for module in named]


def _module(path: Path, kind: Any, name: Any) -> _Module:
    if not isinstance(kind, str) or not isinstance(name, str):
        raise ValueError(f"{path}: each module must have a type and a path")
    if kind.partition(".")[0] != "sentence_transformers":
        raise ValueError(f"{path}: module {kind} is not sentence-transformers' own, which vecd refuses")
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{path}: module path {name!r} leads out of the model's folder")
    return kind.rpartition(".")[2], name


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: file missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def _read_object(path: Path) -> dict[str, Any]:
    content = _read(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a JSON object")
    return content


# --- heads for masked words -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _MaskedWords:
    """A head from the state of a token to a logit for each token of the vocabulary: dense, activation, norm, decoder.

    Names of tensors are without ".weight" and ".bias"."""

    dense: str
    norm: str
    decoder: str
    biases: tuple[str, ...]
    """Whole names of the decoder's bias; the first that is there counts."""
    words: tuple[str, ...]
    """The embeddings, which are the decoder's weights where it has none of its own."""
    activation: str = "=gelu"
    """The setting in config.json, or "=" and the activation itself."""
    epsilon: str = "layer_norm_eps"
    """The setting, or "=" and the number itself."""
    width: str = "hidden_size"
    """The setting with the floats between dense and decoder."""


_BERT = _MaskedWords(
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    decoder="cls.predictions.decoder",
    biases=("cls.predictions.decoder.bias", "cls.predictions.bias"),
    words=("bert.embeddings.word_embeddings",),
    activation="hidden_act",
)
_ROBERTA = _MaskedWords(
    dense="lm_head.dense",
    norm="lm_head.layer_norm",
    decoder="lm_head.decoder",
    biases=("lm_head.decoder.bias", "lm_head.bias"),
    words=("roberta.embeddings.word_embeddings", "mpnet.embeddings.word_embeddings"),
)
_HEADS = MappingProxyType(
    {
        "bert": _BERT,
        "roberta": _ROBERTA,
        "xlm-roberta": _ROBERTA,
        "camembert": _ROBERTA,
        "mpnet": _ROBERTA,
        "distilbert": _MaskedWords(
            dense="vocab_transform",
            norm="vocab_layer_norm",
            decoder="vocab_projector",
            biases=("vocab_projector.bias",),
            words=("distilbert.embeddings.word_embeddings",),
            activation="activation",
            epsilon="=1e-12",
        ),
        "electra": _MaskedWords(
            dense="generator_predictions.dense",
            norm="generator_predictions.LayerNorm",
            decoder="generator_lm_head",
            biases=("generator_lm_head.bias",),
            words=("electra.embeddings.word_embeddings",),
            width="embedding_size",
        ),
        "modernbert": _MaskedWords(
            dense="head.dense",
            norm="head.norm",
            decoder="decoder",
            biases=("decoder.bias",),
            words=("model.embeddings.tok_embeddings",),
            activation="classifier_activation",
            epsilon="norm_eps",
        ),
    }
)
"""By transformers' name of the architecture."""

_ACTIVATIONS = MappingProxyType({"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu", "tanh": "tanh"})
"""transformers' names → those of `vecd.shm.heads.Step`."""

_DEFAULTS = MappingProxyType(
    {
        "hidden_act": "gelu",
        "activation": "gelu",
        "classifier_activation": "gelu",
        "layer_norm_eps": 1e-12,
        "norm_eps": 1e-5,
        "embedding_size": 128,
    }
)
"""transformers' values of settings that config.json may leave out."""


def steps_of_masked_words(config: Mapping[str, Any], hidden_size: int, names: Collection[str]) -> tuple[Step, ...]:
    """The steps from the state of a token to its logits, of the model with this config.json and these tensors.

    Raises ValueError for an architecture whose head no table describes, for a setting that it does not have, and for a
    head that is not among the tensors."""
    model_type = config["model_type"]
    head = _HEADS.get(model_type)
    if head is None:
        raise ValueError(
            f"the head for masked words of {model_type} is not described; served are sparse models of "
            f"{', '.join(_HEADS)}"
        )
    settings = {**_DEFAULTS, **config, "hidden_size": hidden_size}
    activation = str(_setting(settings, head.activation))
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation {activation} in the head for masked words is not supported")
    width, vocab_size = int(settings[head.width]), int(config["vocab_size"])
    decoder = _decoder(head, names, is_tied=bool(config.get("tie_word_embeddings", True)))
    for name in (head.dense, head.norm):
        if not {f"{name}.weight", f"{name}.gamma"} & set(names):
            raise ValueError(f"the weights have no head for masked words: {name}.weight is missing")
    bias = next((name for name in head.biases if name in names), "")
    return (
        Step(
            "dense",
            in_dim=hidden_size,
            out_dim=width,
            bias=f"{head.dense}.bias" in names,
            activation=_ACTIVATIONS[activation],
            tensor=head.dense,
        ),
        Step(
            "layer_norm",
            in_dim=width,
            out_dim=width,
            bias=bool({f"{head.norm}.bias", f"{head.norm}.beta"} & set(names)),
            tensor=head.norm,
            epsilon=float(_setting(settings, head.epsilon)),
        ),
        Step("dense", in_dim=width, out_dim=vocab_size, bias=bool(bias), tensor=decoder, bias_tensor=bias),
    )


def _setting(settings: Mapping[str, Any], name: str) -> Any:
    return name[1:] if name.startswith("=") else settings[name]


def _decoder(head: _MaskedWords, names: Collection[str], *, is_tied: bool) -> str:
    """The decoder's own weights where the files have them, as transformers reads them; else the embeddings."""
    for name in (head.decoder, *(head.words if is_tied else ())):
        if f"{name}.weight" in names:
            return name
    raise ValueError(f"the weights have no head for masked words: {head.decoder}.weight is missing")
