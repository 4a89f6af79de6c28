"""Loads a transformer's weights, all of them and nothing else.

Safetensors only, local files only, no code from the model's folder, nothing on stderr. Refuses a tensor that is
missing, misshapen or left over; transformers would fill the gap with random numbers.
"""

import inspect
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from vecd.base.files import JsonObject
from vecd.model.architecture import native_config
from vecd.model.card import ModelCard, ModelError, one_line
from vecd.model.files import stored_tensors
from vecd.workers.families import WITHOUT_CLASS
from vecd.workers.torch.described import load_described

_GEMMA_2 = "embedding_gemma2"

# Their tokenizers give the tokens of one text different type ids, which the gateway does not send.
_FAMILIES_WITH_TOKEN_TYPES = frozenset({"xlnet", "funnel"})


def load_model(
    card: ModelCard, dtype: str, device: torch.device, classes: Mapping[Any, Any] | None = None
) -> PreTrainedModel:
    """The model of `card`, in evaluation mode, its weights in `dtype`, a name of torch's, on `device`. `classes`: one
    of transformers' mappings from the class of a configuration to that of a model with a head; None: with the head of a
    model for classification, and without that of any other. Where transformers has no class, vecd's own, without a
    head. On a CPU the weights are copies, which no change of a file
    reaches. Raises ModelError, in one line, when the model cannot be loaded exactly as stored."""
    folder = card.weights_folder
    if card.model_type in WITHOUT_CLASS:
        return cast(PreTrainedModel, load_described(card, dtype, device))
    if card.model_type in _FAMILIES_WITH_TOKEN_TYPES:
        raise ModelError(f"{folder}: {card.model_type} models are not supported: their texts have several token types")
    with _silence():
        try:
            config = _config_of(folder)
            classes = _heads_of(card) if classes is None else classes
            model, loaded = _load(folder, _class_of(folder, config, classes), config, dtype)
        except ModelError:
            raise
        except Exception as error:  # transformers and its quantizers raise everything from KeyError to ImportError
            for path in sorted(Path(folder).glob("*.safetensors")):
                stored_tensors(path)  # names the file, if one is not whole
            raise ModelError(f"{folder}: cannot be loaded: {one_line(error)}") from error
    _refuse_partial(folder, model, loaded, has_head=_heads_of(card) is not None)
    _refuse_length_dependent_positions(folder, config, card.max_tokens)
    model.config.use_cache = False
    model.requires_grad_(False)
    model.train(False)
    if device.type == "cpu":  # tensors that are stored in `dtype` are mapped from the file
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    if placeholders := getattr(config, "placeholder_ids", None):
        # Where a text has one without an image or a sound, the whole model has padding.
        words = cast(Any, model).get_input_embeddings().weight
        words[placeholders] = words[config.pad_token_id].clone()
    return cast(PreTrainedModel, cast(torch.nn.Module, model).to(device))


def _config_of(folder: str) -> PretrainedConfig:
    stored = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    native = native_config(stored)
    if native is not None:
        return AutoConfig.for_model(**native)
    config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if config.model_type != _GEMMA_2:
        return config
    # Of the whole model, which has towers for images and sounds, the part for text alone is loaded.
    text: PretrainedConfig = config.text_config
    text.placeholder_ids = [getattr(config, f"{kind}_token_id") for kind in ("image", "video", "audio")]
    return text


def _load(folder: str, model_class: Any, config: PretrainedConfig, dtype: str) -> tuple[PreTrainedModel, JsonObject]:
    arguments: JsonObject = {}
    if "add_pooling_layer" in inspect.signature(model_class.__init__).parameters:
        arguments["add_pooling_layer"] = False
    if config.model_type == f"{_GEMMA_2}_text":
        arguments["key_mapping"] = {r"^language_model\.": ""}
    model, loaded = model_class.from_pretrained(
        folder,
        config=config,
        dtype=getattr(torch, dtype),
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        # Reported instead of raised, so that the ModelError can name the tensor.
        ignore_mismatched_sizes=True,
        **arguments,
    )
    return model, loaded


def _class_of(folder: str, config: PretrainedConfig, classes: Mapping[Any, Any] | None = None) -> type[PreTrainedModel]:
    """The class in `classes`, or the one that gives hidden states: of a family with encoder and decoder, the
    encoder's."""
    found: Any = (MODEL_FOR_TEXT_ENCODING_MAPPING if classes is None else classes).get(type(config), None)
    if found is None and classes is None and not getattr(config, "is_encoder_decoder", False):
        found = MODEL_MAPPING.get(type(config), None)
    # A few families have variants, the usual one first.
    model_class = found[0] if isinstance(found, tuple) else found
    if model_class is None:
        part = "encoder" if classes is None else "such head for a model"
        raise ModelError(f"{folder}: transformers {transformers.__version__} has no {part} of type {config.model_type}")
    return cast(type[PreTrainedModel], model_class)


_WITH_HEAD: JsonObject = {
    "ForSequenceClassification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "ForTokenClassification": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
}


def _heads_of(card: ModelCard) -> Any:
    architecture = "" if card.score is None else card.score.architecture
    return next((classes for end, classes in _WITH_HEAD.items() if architecture.endswith(end)), None)


def _refuse_partial(folder: str, model: PreTrainedModel, loaded: JsonObject, *, has_head: bool) -> None:
    """Refuse missing tensors, except those of a pooler that is not used, and left-over ones, except training heads. A
    head is a part that the architecture does not have ("cls", "lm_head"). A left-over inside a part that it has means
    that the configuration describes another model."""
    missing = sorted(name for name in loaded["missing_keys"] if has_head or _part(name, model) != "pooler")
    if missing:
        raise ModelError(f"{folder}: the weights lack {_some(missing)}, which config.json calls for")
    if loaded["mismatched_keys"]:
        name, stored, expected = min(loaded["mismatched_keys"])
        raise ModelError(f"{folder}: {name} is {list(stored)} in the weights and {list(expected)} in config.json")
    bodies = (model, model.base_model) if has_head else (model,)
    parts = {name for body in bodies for name, _ in body.named_children()}
    left_over = sorted(name for name in loaded["unexpected_keys"] if _part(name, model) in parts)
    if left_over:
        raise ModelError(f"{folder}: the weights have {_some(left_over)}, which config.json has no place for")


def _part(name: str, model: PreTrainedModel) -> str:
    """ "encoder" of "bert.encoder.layer.0.output.dense.weight"."""
    return name.removeprefix(f"{model.base_model_prefix}.").partition(".")[0]


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _refuse_length_dependent_positions(folder: str, config: PretrainedConfig, max_tokens: int) -> None:
    """Refuse rotary positions that stretch with the longest text of a batch, if texts can be that long."""
    parameters = getattr(config, "rope_parameters", None) or {}
    # One set of parameters, or one for each kind of layer.
    entries: list[Any] = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for entry in entries:
        kind = entry.get("rope_type")
        natural = entry.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", 0)
        if kind in ("dynamic", "longrope") and max_tokens > natural:
            raise ModelError(
                f"{folder}: texts of more than {natural} tokens would change the vectors of other texts "
                f"(rope_type {kind}); set max_seq_length to {natural}"
            )


@contextmanager
def _silence() -> Iterator[None]:
    """Keep transformers from writing to stderr. Errors become a ModelError."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
