"""What makes a folder a SPLADE model: its modules, and the head for masked words as steps.

Owns the layouts of sentence-transformers' sparse encoders, the table of heads by architecture, and the refusal of
modules and heads that are not served. Reads JSON, and no weights: the names of tensors are given. Called by
`vecd.shm.card`.

    modules.json     [Transformer or MLMTransformer, SpladePooling]
                     [Router]: query → SparseStaticEmbedding, document → the two above
    none             a *ForMaskedLM, by `kind` "sparse" alone: it may as well be a plain base model

Source: sentence-transformers 6.2, `sparse_encoder` and `Router`; transformers 5, the *ForMaskedLM classes.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vecd.shm.heads import Step
from vecd.shm.model_files import ModelError, inner, number, positive, read_object, read_optional
from vecd.shm.modules import Module, check_modules, read_modules

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

    Raises ModelError for a sparse model that is not served, and for another model where `kind` is "sparse"."""
    if kind not in ("auto", "sparse"):
        return None
    path = folder / "modules.json"
    if not path.exists():
        return _plain(folder) if kind == "sparse" else None
    modules = read_modules(path)
    kinds = [module.kind for module in modules]
    routes = _read_routes(folder / modules[0].path) if kinds[:1] == ["Router"] else {}
    settings = folder / "config_sentence_transformers.json"
    config = read_optional(settings)
    named = {*kinds, *(module.kind for route in routes.values() for module in route)}
    if config.get("model_type") != "SparseEncoder" and not named & _SPARSE_KINDS:
        if kind == "sparse":
            raise ModelError(f"{path}: is not a sparse model: its modules are {', '.join(kinds)}")
        return None
    if config.get("max_active_dims") is not None:
        raise ModelError(f"{settings}: max_active_dims is not supported; ask for top_k in requests")
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
    path = folder / "config.json"
    architectures = read_object(path).get("architectures")
    if not isinstance(architectures, list) or not any(str(name).endswith("ForMaskedLM") for name in architectures):
        raise ModelError(f"{path}: is not a sparse model: architectures is {architectures!r}, not a …ForMaskedLM")
    return SparseModules()


def _chain(folder: Path, path: Path, modules: list[Module]) -> SparseModules:
    kinds = [module.kind for module in modules]
    if len(modules) != 2 or kinds[0] not in _TRANSFORMERS or kinds[1] != _POOLING:
        unknown = [kind for kind in kinds if kind not in (*_TRANSFORMERS, _POOLING)]
        fault = f"module {unknown[0]} is not supported in a sparse model" if unknown else f"they are {kinds}"
        raise ModelError(f"{path}: must be a Transformer and a {_POOLING}; {fault}")
    config = folder / modules[1].path / "config.json"
    settings = read_object(config)
    pooling, activation = settings.get("pooling_strategy", "max"), settings.get("activation_function", "relu")
    if pooling not in ("max", "sum"):
        raise ModelError(f"{config}: pooling_strategy {pooling!r} is unknown; known: max, sum")
    if not isinstance(activation, str) or activation not in _NUM_LOGS:
        raise ModelError(f"{config}: activation_function {activation!r} is unknown; known: {', '.join(_NUM_LOGS)}")
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
    """The file with the weights of a SparseStaticEmbedding."""
    config = folder / module / "config.json"
    named = read_object(config).get("path") if config.exists() else None
    names = [f"{module}/model.safetensors"]
    if isinstance(named, str) and named.endswith(".json"):
        # As it was given when the model was made: a path of that machine, or a name beside the model.
        names = [f"{module}/{Path(named).name}", Path(named).name]
    for name in names:
        if (folder / name).is_file():
            return name
    raise ModelError(f"{folder / names[0]}: file missing (the weights of queries)")


def _check_tokenizer(queries: Path, documents: Path) -> None:
    """Refuse a tokenizer of queries that is not the documents', because one tokenizer is for both."""
    if not queries.exists() or not documents.exists() or queries.read_bytes() == documents.read_bytes():
        return
    theirs, ours = (read_object(path) for path in (queries, documents))
    if any(theirs.get(name) != ours.get(name) for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")):
        raise ModelError(f"{queries}: is another tokenizer than {documents}")


def _read_routes(folder: Path) -> dict[str, list[Module]]:
    """The modules of each route of a Router. Raises ModelError where other things than the role choose the route."""
    path = folder / "router_config.json"
    config = read_object(path)
    try:
        if inner(config, "parameters").get("route_mappings"):
            raise ModelError(f"{path}: route_mappings is not supported")
        types, structure = config["types"], config["structure"]
        return {route: [Module(str(types[name]), name) for name in names] for route, names in structure.items()}
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ModelError(f"{path}: cannot be read: {error!r}") from None


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


def steps_of_masked_words(path: Path, config: Mapping[str, Any], names: Collection[str]) -> tuple[Step, ...]:
    """The steps from the state of a token to its logits. `path` is the config.json, `config` its content, with
    `hidden_size` and `vocab_size`; `names` those of all tensors.

    Raises ModelError for an architecture whose head no table describes, for a setting that it does not have, and for a
    head that is not among the tensors."""
    model_type = config["model_type"]
    head = _HEADS.get(model_type)
    if head is None:
        raise ModelError(
            f"{path}: the head for masked words of {model_type} is not described; served are sparse models of "
            f"{', '.join(_HEADS)}"
        )
    settings = {**_DEFAULTS, **config}
    activation = head.activation[1:] if head.activation.startswith("=") else str(settings[head.activation])
    if activation not in _ACTIVATIONS:
        raise ModelError(f"{path}: activation {activation} in the head for masked words is not supported")
    width = positive(settings, (head.width,), path)
    try:
        epsilon = float(head.epsilon[1:]) if head.epsilon.startswith("=") else number(settings, head.epsilon, 0.0)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None
    decoder = _decoder(path, head, names, is_tied=bool(config.get("tie_word_embeddings", True)))
    for name in (head.dense, head.norm):
        if not {f"{name}.weight", f"{name}.gamma"} & set(names):
            raise ModelError(f"{path}: the weights have no head for masked words: {name}.weight is missing")
    bias = next((name for name in head.biases if name in names), "")
    return (
        Step(
            "dense",
            in_dim=config["hidden_size"],
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
            epsilon=epsilon,
        ),
        Step("dense", in_dim=width, out_dim=config["vocab_size"], bias=bool(bias), tensor=decoder, bias_tensor=bias),
    )


def _decoder(path: Path, head: _MaskedWords, names: Collection[str], *, is_tied: bool) -> str:
    """The decoder's own weights where the files have them, as transformers reads them; else the embeddings."""
    for name in (head.decoder, *(head.words if is_tied else ())):
        if f"{name}.weight" in names:
            return name
    raise ModelError(f"{path}: the weights have no head for masked words: {head.decoder}.weight is missing")
