"""Adapters: low-rank changes of a base model's weights, W + scale · left · right, as they are published.

Owns the three layouts (PEFT's folder; a model with folders of adapters by task; jina-embeddings-v3, whose one file has
those of all tasks), which settings are known, and which tensors of which files make a merged one. Reads settings and
the headers of files, and no weights.

Sources: LoraConfig and the saved files of PEFT 0.21; modeling_lora.py of jinaai/xlm-roberta-flash-implementation;
jinaai/jina-embeddings-v5-text-small and -nano.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vecd.model.files import ADAPTER, Folder, ModelError, ModelSettings, StoredTensor, source_of
from vecd.model.steps import read_modules

CONFIG, WEIGHTS = "adapter_config.json", ADAPTER
_NATIVE = {True: ("qwen3", "Qwen3Model"), False: ("eurobert", "EuroBertModel")}
"""Of jina-embeddings-v5, whose code adds nothing to these but the adapters: by its `is_decoder`."""
_V5 = "jina_embeddings_v5"


@dataclass(frozen=True, slots=True)
class Adapter:
    """What is merged into which model."""

    folder: Path | None
    """That has CONFIG and WEIGHTS; None: the adapter, or that of no task, is in the model's own file."""
    base: str = ""
    """A hub id, or a path, which may be relative to `folder`; empty: the model that the adapter was found in."""
    revision: str = ""
    """Of the base."""
    tasks: tuple[str, ...] = ()
    """Those that the model has adapters for."""


def read_adapter(path: Path, task: str = "") -> Adapter | None:
    """The adapter that the folder is, or that it has for the `task`; None: it is a model without. Raises ModelError for
    a task that it does not have, and for an adapter that is not known."""
    folder = Folder(path)
    modules = read_modules(folder)
    place = modules[0].path if modules else ""
    if folder.has(place, CONFIG) and not task:
        config = _checked(path / place)
        base, revision = config.get("base_model_name_or_path"), config.get("revision")
        if not isinstance(base, str) or not base:
            raise config.error("names no base model (base_model_name_or_path), whose weights it changes")
        return Adapter(path / place, base, revision if isinstance(revision, str) else "")
    config = folder.optional(place, "config.json")
    if config.get("lora_adaptations"):
        tasks = _names(config, "lora_adaptations")
        found = None
    else:
        found = next((each for each in (path / "adapters" / task, path / task) if (each / CONFIG).is_file()), None)
        tasks = tuple(sorted(each.parent.name for each in path.glob(f"adapters/*/{CONFIG}")))
        tasks = tasks or tuple(sorted(each.parent.name for each in path.glob(f"*/{CONFIG}")))
        if not task:
            if config.get("model_type") == _V5:
                known = ", ".join(tasks) or "it has none"
                raise config.error(f"is the base of adapters, one of which must be named behind it and /: {known}")
            return None
    if task and task not in tasks:
        raise ModelError(f"{path}: has no adapter {task!r}; it has {', '.join(tasks) or 'none'}")
    if found is not None:
        _checked(found)
    return Adapter(found, tasks=tasks)


def _names(config: ModelSettings, name: str) -> tuple[str, ...]:
    value = config.get(name)
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise config.error(f"{name} must be a list of names, is {value!r:.80}")
    return tuple(value)


# --- settings ---------------------------------------------------------------------------------------------------

_KNOWN = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "target_modules", "task_type", "use_rslora",
    # How the first values were found, or the optimizer works.
    "corda_config", "eva_config", "lora_ga_config", "loftq_config", "runtime_config", "ensure_weight_tying",
}  # fmt: skip
"""Settings that are applied, or change no merged tensor. All others must be off: `use_dora`, `modules_to_save`, …"""
_OF_NEW_PAIRS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Of `init_lora_weights`. The others change the base's weights before the training, too."""


def _checked(folder: Path) -> ModelSettings:
    config = Folder(folder).settings(CONFIG)
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{folder / WEIGHTS}: file missing (the adapter's weights; a pickle of them is not read)")
    if config.get("peft_type") != "LORA":
        raise config.error(f"peft_type is {config.get('peft_type')!r:.80}, and only LORA is merged")
    for name, value in sorted(config.items()):
        if value and name not in _KNOWN:
            raise config.error(f"{name} is {value!r:.80}: such an adapter is more than a product of two matrices")
    if config.get("bias") not in (None, "none"):
        raise config.error(f"bias is {config['bias']!r:.80}, and only 'none' is merged")
    if config.get("init_lora_weights") not in _OF_NEW_PAIRS:
        changed = config["init_lora_weights"]
        raise config.error(f"init_lora_weights is {changed!r:.80}, which changes the base before the training")
    return config


def merged_settings(folder: Folder, task: str) -> dict[str, Any]:
    """Settings of a model with adapters by task, once that of the `task` is merged, or none is. They name no code of
    the model's repository that only chooses adapters, and the prompts are the task's."""
    config = folder.settings("config.json")
    files: dict[str, Any] = {"config.json": config}
    if config.get("model_type") == _V5:
        model_type, architecture = _NATIVE[config.get("is_decoder") is not False]
        kept = {key: value for key, value in config.items() if key not in ("auto_map", "task_names")}
        files["config.json"] = {**kept, "model_type": model_type, "architectures": [architecture]}
    if folder.has("modules.json"):
        own = {"custom_st.Transformer": "sentence_transformers.models.Transformer"}
        files["modules.json"] = [
            {"type": own.get(each.type, each.type), "path": each.path, "idx": index, "name": str(index)}
            for index, each in enumerate(read_modules(folder))
        ]
    if config.get("lora_adaptations"):
        prompt = config.inner("task_instructions").get(task, "")
        stated = folder.optional("config_sentence_transformers.json")
        prompts = {"prompts": {task: prompt} if task else {}, "default_prompt_name": task or None}
        files["config_sentence_transformers.json"] = {**stated, **prompts}
    return files


# --- what a merged tensor is made of ----------------------------------------------------------------------------


class Merge(NamedTuple):
    """A tensor of the merged model."""

    weight: str
    """The base's tensor."""
    left: str = ""
    """With `right`: [out, r] and [r, in], or of all tasks at once [tasks, …]; empty: `weight` stays as it is."""
    right: str = ""
    at: int | None = None
    """Of the task."""
    scale: float = 0.0
    is_transposed: bool = False
    """The product is, because `weight` is [in, out]."""


_FLOATS = ("F32", "F16", "BF16")
_PAIRED = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_ORIGINAL, _PARAMETRIZED = ".parametrizations.weight.original", ".parametrizations."
_MAX_WRAPPERS = 2
"""Names before a layer's, of the class that was trained: `model.`, `bert.encoder` has `encoder` in the base."""


def merges(config: ModelSettings, tensors: Mapping[str, StoredTensor], base: Mapping[str, StoredTensor],
           base_folder: Path) -> dict[str, Merge]:  # fmt: skip
    """What PEFT's adapter makes of the base's `base`: all its tensors. Raises ModelError for an adapter that has not
    both matrices of each layer, of the shapes that its settings and the base say, for what else it holds, and where it
    lacks layers that the base has."""
    path = config.path.with_name(WEIGHTS)
    pairs: dict[str, dict[str, str]] = {}
    for name in tensors:
        match = _PAIRED.fullmatch(name)
        if match is None:
            raise ModelError(f"{path}: {name} is neither lora_A nor lora_B of a linear layer")
        pairs.setdefault(match["module"], {})[match["side"]] = name
    found: dict[str, Merge] = {}
    for module, sides in pairs.items():
        if len(sides) < 2:
            raise ModelError(f"{path}: {next(iter(sides.values()))} is there without the other matrix of its layer")
        weight = _weight_of(module, base)
        if weight is None:
            raise ModelError(
                f"{path}: changes {module}.weight, which the base in {source_of(str(base_folder))} does not have"
            )
        rank, alpha = _rank(config, module), _by_pattern(config, "alpha_pattern", module, "lora_alpha")
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        merge = Merge(weight, sides["B"], sides["A"], None, scale, config.get("fan_in_fan_out") is True)
        _check_shapes(path, merge, tensors, base, rank)
        found[weight] = merge
    _check_targets(config, found, base)
    return {name: found.get(name) or Merge(name) for name in base}


def _weight_of(module: str, base: Mapping[str, StoredTensor]) -> str | None:
    """Classes with a head have the layers one level down; the file may be that of another class than was trained."""
    name = f"{module}.weight"
    parts = name.split(".")
    for num in range(min(_MAX_WRAPPERS, len(parts) - 2) + 1):
        if (shorter := ".".join(parts[num:])) in base:
            return shorter
    longer = [each for each in base if each.endswith(f".{name}")]
    return longer[0] if len(longer) == 1 else None


def _rank(config: ModelSettings, module: str) -> int:
    rank = _by_pattern(config, "rank_pattern", module, "r")
    if rank < 1 or rank != int(rank):
        raise config.error(f"the rank of {module} is {rank:g}, and must be a positive whole number")
    return int(rank)


def _by_pattern(config: ModelSettings, patterns: str, module: str, default: str) -> float:
    """As PEFT finds it: of the first pattern that matches the end of the layer's name."""
    found = config.inner(patterns)
    try:
        key = next((key for key in found if re.fullmatch(rf"(?:.*\.)?(?:{key})", module)), None)
    except re.error as error:
        raise config.error(f"{patterns} has a pattern that cannot be read: {error}") from None
    return config.number(default, 8) if key is None else found.number(key, 0)


def _check_shapes(path: Path, merge: Merge, tensors: Mapping[str, StoredTensor], base: Mapping[str, StoredTensor],
                  rank: int) -> None:  # fmt: skip
    weight, left, right = base[merge.weight], tensors[merge.left], tensors[merge.right]
    shape = weight.shape[::-1] if merge.is_transposed else weight.shape
    for name, tensor, expected in ((merge.right, right, (rank, *shape[1:])), (merge.left, left, (*shape[:1], rank))):
        if len(shape) != 2 or tensor.shape != expected:
            raise ModelError(
                f"{path}: {name} is {list(tensor.shape)}, and rank {rank} with the base's {merge.weight} "
                f"{list(weight.shape)} needs {list(expected)}"
            )
    _check_types(path, {merge.left: left, merge.right: right, merge.weight: weight})


def _check_types(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.kind not in _FLOATS:
            raise ModelError(f"{path}: {name} is {tensor.kind}, and of {', '.join(_FLOATS)} alone a sum is made")


def _check_targets(config: ModelSettings, found: Mapping[str, Merge], base: Mapping[str, StoredTensor]) -> None:
    """What is there of one layer must be there of all, unless the settings choose layers. Raises ModelError."""

    def kind_of(name: str) -> str:
        return re.sub(r"\d+", "N", name)

    kinds, path = {kind_of(name) for name in found}, config.path.with_name(WEIGHTS)
    missing = [name for name in base if kind_of(name) in kinds and name not in found]
    if missing and not (config.get("layers_to_transform") or config.get("exclude_modules")):
        raise ModelError(f"{path}: has nothing for {missing[0]} of the base, as for its other layers")
    targets = config.get("target_modules")
    for target in targets if isinstance(targets, list) else []:
        ending = f".{target}.weight"
        if any(f".{name}".endswith(ending) for name in base) and not any(f".{name}".endswith(ending) for name in found):
            raise ModelError(f"{path}: has nothing for {target!r}, which target_modules names")


def merges_of_task(config: ModelSettings, base: Mapping[str, StoredTensor], task: str, path: Path) -> dict[str, Merge]:
    """What jina-embeddings-v3's file, at `path`, has for a task, or for none, by the names of plain layers. Raises
    ModelError for matrices of other shapes than the settings and the layer's say."""
    tasks = _names(config, "lora_adaptations")
    rank = config.positive("lora_rank")
    index = tasks.index(task) if task else None
    found: dict[str, Merge] = {name: Merge(name) for name in base if _PARAMETRIZED not in name}
    for name in base:
        if not name.endswith(_ORIGINAL):
            continue
        layer = name.removesuffix(_ORIGINAL)
        a, b = (f"{layer}{_PARAMETRIZED}weight.0.lora_{side}" for side in "AB")
        missing = [each for each in (a, b) if each not in base]
        if missing:
            raise ModelError(f"{path}: {missing[0]} is missing")
        shapes = [base[each].shape for each in (name, a, b)]
        out, width = shapes[0] if len(shapes[0]) == 2 else (0, 0)
        # A table of embeddings is [in, out], and the product is of A and B, not of B and A.
        is_table = shapes[1:] == [(len(tasks), out, rank), (len(tasks), rank, width)]
        if not is_table and shapes[1:] != [(len(tasks), rank, width), (len(tasks), out, rank)]:
            raise ModelError(
                f"{path}: {a} and lora_B are {list(shapes[1])} and {list(shapes[2])}, which lora_rank {rank}, "
                f"{len(tasks)} tasks and {list(shapes[0])} of the layer do not make"
            )
        _check_types(path, {each: base[each] for each in (name, a, b)})
        pair = (a, b) if is_table else (b, a)
        scale = config.number("lora_alpha", 1.0) / rank
        found[f"{layer}.weight"] = Merge(name) if index is None else Merge(name, *pair, index, scale)
    return found
