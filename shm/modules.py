"""The modules of a model in sentence-transformers' layouts: their list, and what Pooling and the steps behind it do.

Owns the reading of `modules.json`, of `*_Pooling/config.json` and of the folders of steps, and the refusal of modules
that are code of the model's repository. Called by `vecd.shm.card` and by the readers of single kinds of models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vecd.shm.heads import Step
from vecd.shm.model_files import ModelError, positive, read_json, read_object, read_optional, single_file

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""In the order in which sentence-transformers concatenates them if a model has several."""

_LEGACY_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

_PYLATE_DENSE = "pylate.models.Dense.Dense"
"""Equal to sentence-transformers' own."""


@dataclass(frozen=True, slots=True)
class Module:
    type: str
    """The whole name of its class. Old: sentence_transformers.models.Pooling. New:
    sentence_transformers.….modules.pooling.Pooling."""
    path: str
    """Relative to the model's folder."""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]

    @property
    def leads_out(self) -> bool:
        """Whether its path is not within the model's folder."""
        return Path(self.path).is_absolute() or ".." in Path(self.path).parts


def read_modules(path: Path) -> list[Module]:
    """Those of a modules.json. Raises ModelError when it is something else."""
    entries = read_json(path)
    if not isinstance(entries, list):
        raise ModelError(f"{path}: must be a list of modules")
    for entry in entries:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in ("type", "path")):
            raise ModelError(f"{path}: each module must have a type and a path")
    return [Module(entry["type"], entry["path"]) for entry in entries]


def folders_without_safetensors(folder: Path) -> list[Path]:
    """Of the model in `folder` and its modules, those that may have weights, and have none as safetensors."""
    path = folder / "modules.json"
    modules = read_modules(path) if path.exists() else [Module("Transformer", "")]
    paths = {module.path for module in modules if module.kind not in _WITHOUT_WEIGHTS and not module.leads_out}
    files = ("model.safetensors", "model.safetensors.index.json")
    folders = (folder / each for each in sorted(paths))
    return [each for each in folders if not any((each / name).is_file() for name in files)]


_WITHOUT_WEIGHTS = ("Pooling", "Normalize", "MultiVectorMask", "SpladePooling", "LogitScore", "Router")


def check_modules(path: Path, modules: Sequence[Module]) -> None:
    """Raises ModelError for a module of the file at `path` that is code of the model's repository, or that leads out of
    the model's folder."""
    for module in modules:
        if module.kind == "CLIPModel":
            raise ModelError(f"{path}: module CLIPModel has images; vecd serves text")
        if module.type.partition(".")[0] != "sentence_transformers" and module.type != _PYLATE_DENSE:
            raise ModelError(f"{path}: module {module.type} is not sentence-transformers' own, which vecd refuses")
        if module.leads_out:
            raise ModelError(f"{path}: module path {module.path!r} leads out of the model's folder")


def read_pooling(path: Path, default_prompt: str) -> tuple[tuple[str, ...], bool]:
    """The modes, and whether a prompt is pooled with its text."""
    config = read_object(path)
    stated = config.get("pooling_mode")
    if stated is None:
        modes = [mode for key, mode in _LEGACY_POOLING_KEYS.items() if config.get(key)] or ["mean"]
    else:
        modes = stated if isinstance(stated, list) and stated else [stated]
    for mode in modes:
        if mode not in POOLING_MODES:
            raise ModelError(f"{path}: pooling_mode {mode!r} is unknown; known: {', '.join(POOLING_MODES)}")
    pools_prompt = config.get("include_prompt") is not False
    if not pools_prompt and default_prompt:
        raise ModelError(f"{path}: include_prompt=false together with a default prompt is not supported")
    return tuple(modes), pools_prompt


def read_steps(
    folder: Path, modules: Sequence[Module], dim: int, *, of_tokens: bool = False
) -> tuple[tuple[Step, ...], int]:
    """The steps behind a pooled vector of `dim` floats, or behind the state of each token, and the number of floats
    behind them."""
    steps: list[Step] = []
    for module in modules:
        step = _read_step(folder, module, dim, of_tokens=of_tokens)
        if step is not None:
            steps.append(step)
            dim = step.out_dim or dim
    return tuple(steps), dim


def _read_step(folder: Path, module: Module, in_dim: int, *, of_tokens: bool) -> Step | None:
    path = folder / module.path / "config.json"
    match module.kind:
        case "Dropout":
            return None
        case "Normalize":
            # Without a statement it normalizes pooled vectors, which a multi-vector model has none of.
            config = {"module_input_name": "sentence_embedding", **read_optional(path)}
            _check_input_and_output(path, config, of_tokens=of_tokens)
            return Step("normalize")
        case "LayerNorm" if not of_tokens:
            single_file(path.parent)
            return Step("layer_norm", path=module.path, in_dim=in_dim, out_dim=in_dim)
        case "Dense":
            return _read_dense(path, module.path, in_dim, of_tokens=of_tokens)
        case unknown:
            raise ModelError(f"{folder / 'modules.json'}: module {unknown} is not supported")


def _read_dense(path: Path, module_path: str, in_dim: int, *, of_tokens: bool) -> Step:
    config = read_object(path)
    _check_input_and_output(path, config, of_tokens=of_tokens)
    if config.get("in_features") != in_dim:
        raise ModelError(f"{path}: in_features is {config.get('in_features')}, but the vector has {in_dim}")
    has_residual = bool(config.get("use_residual"))
    if has_residual and not of_tokens:
        raise ModelError(f"{path}: use_residual is not supported")
    activation = config.get("activation_function", "torch.nn.Tanh")
    # sentence-transformers accepts no other either, but uses Tanh instead.
    if not isinstance(activation, str) or not activation.startswith("torch.nn."):
        raise ModelError(f"{path}: activation_function {activation!r} is not one of torch.nn's")
    single_file(path.parent)
    return Step(
        "dense",
        path=module_path,
        in_dim=in_dim,
        out_dim=positive(config, ("out_features",), path),
        bias=bool(config.get("bias", True)),
        activation=activation.rpartition(".")[2].lower(),
        has_residual=has_residual,
    )


def _check_input_and_output(path: Path, config: Mapping[str, Any], *, of_tokens: bool) -> None:
    expected, where = ("token_embeddings", "tokens") if of_tokens else ("sentence_embedding", "the pooled vector")
    for name in ("module_input_name", "module_output_name"):
        value = config.get(name)
        if value not in (None, expected):
            raise ModelError(f"{path}: {name} {value!r} is not supported: steps work on {where}")
