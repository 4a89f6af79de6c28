"""The model card: what every process must know of a model, read from its folder's JSON files.

Owns the reading of `config.json`, `modules.json` and the sentence-transformers files beside them, and the refusal
of folders that cannot be served. Reads no weights and imports no torch, so the supervisor can call it first and a
broken folder is one clear line before any process has started. Sources of the formats: the files themselves as
saved by sentence-transformers 2 to 6 (`modules.json`, `*_Pooling/config.json`, `*_Dense/config.json`).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""In the order in which sentence-transformers concatenates them where a model has several."""

_LEGACY_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

# Families whose position ids start after the padding id, so that two more positions exist than tokens fit.
# Source: create_position_ids_from_input_ids in transformers' modeling_roberta.
POSITIONS_AFTER_PADDING = frozenset(
    {"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "mpnet", "longformer", "data2vec-text", "roberta-prelayernorm"}
)


class ModelError(Exception):
    """A model that cannot be served. The message is one line: what is missing or wrong, and in which file."""


@dataclass(frozen=True, slots=True)
class Step:
    """A module behind the pooling, applied to the pooled vector [B, D]."""

    kind: str
    """"dense", "normalize" or "layer_norm"."""
    path: str = ""
    """Folder of the module's weights, relative to the model's; empty for "normalize"."""
    in_dim: int = 0
    out_dim: int = 0
    bias: bool = True
    activation: str = "identity"
    """Of "dense": a key of `workers.pooling.ACTIVATIONS`."""


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
    """D: floats per vector, after pooling and every step."""
    max_tokens: int
    """Longest sequence, special tokens included. Longer input is cut on the right."""
    vocab_size: int
    """Token ids are 0 … vocab_size - 1."""
    pooling: tuple[str, ...]
    """One or more of POOLING_MODES; several are concatenated in that order."""
    steps: tuple[Step, ...]
    lowercase: bool
    """Texts are lowercased before the tokenizer's own normalizer."""
    prompt: str
    """Put before every text; empty for most models."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ModelCard":
        steps = tuple(Step(**step) for step in fields["steps"])
        return cls(**{**fields, "pooling": tuple(fields["pooling"]), "steps": steps})


def read_card(folder: Path) -> ModelCard:
    """Read the card of the model in `folder`.

    Raises ModelError when a needed file is missing or unreadable, when the weights are not safetensors, when the
    model wants code from its repository to be run, or when it has a module that vecd does not know.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder")
    folder = folder.resolve()
    modules = _read_modules(folder)
    weights_folder = folder / _path_of(modules, "Transformer")
    config = _read_config(weights_folder)
    _check_files(weights_folder)

    hidden_size = _positive(config, ("hidden_size", "dim", "d_model", "n_embd"), weights_folder / "config.json")
    pooling = _read_pooling(folder, modules)
    dim = hidden_size * len(pooling)
    steps: list[Step] = []
    for module in modules:
        step = _read_step(folder, module, dim)
        if step is not None:
            steps.append(step)
            dim = step.out_dim or dim
    sentence_bert = _read_optional(weights_folder / "sentence_bert_config.json")
    return ModelCard(
        folder=str(folder),
        weights_folder=str(weights_folder),
        model_type=str(config["model_type"]),
        hidden_size=hidden_size,
        dim=dim,
        max_tokens=_max_tokens(weights_folder, config, sentence_bert),
        vocab_size=_positive(config, ("vocab_size",), weights_folder / "config.json"),
        pooling=pooling,
        steps=tuple(steps),
        lowercase=bool(sentence_bert.get("do_lower_case", False)),
        prompt=_default_prompt(folder),
    )


# --- the files --------------------------------------------------------------------------------------------------


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: file missing") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None


def _read_object(path: Path) -> dict[str, Any]:
    content = _read(path)
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must be a JSON object")
    return content


def _read_optional(path: Path) -> dict[str, Any]:
    return _read_object(path) if path.exists() else {}


def _read_config(weights_folder: Path) -> dict[str, Any]:
    path = weights_folder / "config.json"
    config = _read_object(path)
    if "auto_map" in config:
        raise ModelError(
            f"{path}: asks for Python code from the model's repository to be run (auto_map), which vecd refuses: "
            "whoever can change that repository could run anything here"
        )
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path}: model_type is missing")
    # Models that wrap a text model keep its sizes one level down.
    text_config = config.get("text_config")
    return {**config, **text_config} if isinstance(text_config, dict) else config


def _check_files(weights_folder: Path) -> None:
    if not (weights_folder / "tokenizer.json").is_file():
        raise ModelError(f"{weights_folder / 'tokenizer.json'}: file missing (the fast tokenizer's file is needed)")
    single, index = weights_folder / "model.safetensors", weights_folder / "model.safetensors.index.json"
    if single.is_file():
        return
    if index.is_file():
        shards = set(_read_object(index).get("weight_map", {}).values())
        for shard in sorted(shards):
            if not (weights_folder / str(shard)).is_file():
                raise ModelError(f"{weights_folder / str(shard)}: file missing (named in {index.name})")
        return
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.pkl") for path in weights_folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{weights_folder}: weights only as pickle ({pickles[0]}), which vecd refuses: loading a pickle runs "
            "code from the file; convert it to model.safetensors"
        )
    raise ModelError(f"{single}: file missing (the model's weights)")


# --- modules.json -----------------------------------------------------------------------------------------------


def _read_modules(folder: Path) -> list[dict[str, Any]]:
    """The chain of modules; that of a plain transformers model is a Transformer and mean pooling."""
    path = folder / "modules.json"
    if not path.exists():
        return [{"kind": "Transformer", "path": ""}, {"kind": "Pooling", "path": None}]
    modules = _read(path)
    if not isinstance(modules, list) or not all(isinstance(m, dict) and isinstance(m.get("type"), str) for m in modules):
        raise ModelError(f"{path}: must be a list of modules, each with a type")
    # Old: sentence_transformers.models.Pooling. New: sentence_transformers.….modules.pooling.Pooling.
    chain = [{"kind": module["type"].rpartition(".")[2], "path": module.get("path", "")} for module in modules]
    kinds = [module["kind"] for module in chain]
    if kinds[:1] != ["Transformer"]:
        raise ModelError(f"{path}: the first module must be a Transformer, is {kinds[0] if kinds else 'missing'}")
    if kinds.count("Pooling") != 1:
        raise ModelError(f"{path}: must have one Pooling module, has {kinds.count('Pooling')}")
    return chain


def _path_of(modules: list[dict[str, Any]], kind: str) -> str:
    return next(str(module["path"] or "") for module in modules if module["kind"] == kind)


def _read_pooling(folder: Path, modules: list[dict[str, Any]]) -> tuple[str, ...]:
    pooling_path = next(module["path"] for module in modules if module["kind"] == "Pooling")
    if pooling_path is None:
        return ("mean",)
    path = folder / str(pooling_path) / "config.json"
    config = _read_object(path)
    stated = config.get("pooling_mode")
    if stated is None:
        modes = [mode for key, mode in _LEGACY_POOLING_KEYS.items() if config.get(key)] or ["mean"]
    else:
        modes = [stated] if isinstance(stated, str) else list(stated)
    for mode in modes:
        if mode not in POOLING_MODES:
            raise ModelError(f"{path}: pooling_mode {mode!r} is unknown; known: {', '.join(POOLING_MODES)}")
    if config.get("include_prompt") is False and _default_prompt(folder):
        raise ModelError(f"{path}: include_prompt=false together with a default prompt is not supported")
    return tuple(modes)


def _read_step(folder: Path, module: dict[str, Any], in_dim: int) -> Step | None:
    match module["kind"]:
        case "Transformer" | "Pooling" | "Dropout":
            return None
        case "Normalize":
            return Step("normalize")
        case "LayerNorm":
            return Step("layer_norm", path=str(module["path"]), in_dim=in_dim, out_dim=in_dim)
        case "Dense":
            path = folder / str(module["path"]) / "config.json"
            config = _read_object(path)
            if config.get("in_features") != in_dim:
                raise ModelError(f"{path}: in_features is {config.get('in_features')}, but the vector has {in_dim}")
            return Step(
                "dense",
                path=str(module["path"]),
                in_dim=in_dim,
                out_dim=_positive(config, ("out_features",), path),
                bias=bool(config.get("bias", True)),
                activation=str(config.get("activation_function") or "Tanh").rpartition(".")[2].lower(),
            )
        case unknown:
            raise ModelError(f"{folder / 'modules.json'}: module {unknown} is not supported")


# --- sizes and prompts ------------------------------------------------------------------------------------------


def _positive(config: Mapping[str, Any], names: tuple[str, ...], path: Path) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(f"{path}: {names[0]} is missing or not a positive whole number")


def _max_tokens(weights_folder: Path, config: Mapping[str, Any], sentence_bert: Mapping[str, Any]) -> int:
    """sentence_bert_config.json's limit, else the tokenizer's, never more than there are positions."""
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    limits: list[int] = []
    if isinstance(positions, int) and positions > 0:
        if config["model_type"] in POSITIONS_AFTER_PADDING:
            positions -= int(config.get("pad_token_id") or 0) + 1
        limits.append(positions)
    stated = sentence_bert.get("max_seq_length")
    if stated is None:
        stated = _read_optional(weights_folder / "tokenizer_config.json").get("model_max_length")
    # Tokenizers without a limit say 1e30.
    if isinstance(stated, int | float) and 0 < stated < 1e9:
        limits.append(int(stated))
    if not limits:
        raise ModelError(f"{weights_folder / 'config.json'}: neither it nor the tokenizer says how long a text may be")
    return min(limits)


def _default_prompt(folder: Path) -> str:
    path = folder / "config_sentence_transformers.json"
    config = _read_optional(path)
    name = config.get("default_prompt_name")
    if name is None:
        return ""
    prompts = config.get("prompts") or {}
    if name not in prompts:
        raise ModelError(f"{path}: default_prompt_name {name!r} is not among its prompts")
    return str(prompts[name])
