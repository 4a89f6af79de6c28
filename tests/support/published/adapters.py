"""Adapters beside their bases, in the files of PEFT, of sentence-transformers, and of Jina's models with tasks.

A reference is transformers' own class of the base, to whose weights W + scale · B · A is added here by hand.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    EuroBertConfig,
    EuroBertModel,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3Model,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
)

from tests.support import tiny_tokenizers
from tests.support.checkpoints import save_random
from tests.support.published import Layout, RowsOf

_SIZES: dict[str, Any] = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "max_position_embeddings": 96, "pad_token_id": 0}
V3_TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
V5_TASKS = ("classification", "clustering", "retrieval", "text-matching")
QUERY = "Represent the query for retrieving evidence documents: "
PASSAGE = "Represent the document for retrieval: "


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def change(path: Path, **changes: Any) -> None:
    write(path, {**json.loads(path.read_text()), **changes})


# --- bases ------------------------------------------------------------------------------------------------------


def _save_tokenizer(folder: Path, make: Callable[[], Any], pad: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), pad_token=pad, model_max_length=64)
    tokenizer.save_pretrained(folder)


def _save_modules(folder: Path, pooling: str, transformer: str = "sentence_transformers.models.Transformer") -> None:
    types = (transformer, "sentence_transformers.models.Pooling", "sentence_transformers.models.Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": kind}
        for index, (kind, path) in enumerate(zip(types, paths, strict=True))
    ]
    write(folder / "modules.json", modules)
    modes = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens", "lasttoken")}
    write(folder / "1_Pooling/config.json", {"word_embedding_dimension": 64, **modes})
    write(folder / "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": False})


def save_bert(folder: Path, **sizes: Any) -> Path:
    """all-MiniLM-L6-v2's layout."""
    config = BertConfig(**{**_SIZES, **_HEADS, **sizes})
    save_random(BertModel, config, folder)
    _save_tokenizer(folder, tiny_tokenizers.bert, "[PAD]")
    _save_modules(folder, "mean_tokens")
    return folder


# --- PEFT -------------------------------------------------------------------------------------------------------

BERT_TARGETS = ("query", "value", "output.dense")
QWEN_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def pairs_of(model: nn.Module, targets: Sequence[str], rank: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """A [rank, in] and B [out, rank] of each linear layer whose name ends with one of the targets."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and any(f".{name}".endswith(f".{target}") for target in targets):
            out, width = module.weight.shape
            shapes = (rank, width), (out, rank)
            a, b = (torch.randn(shape, generator=generator) * 0.3 for shape in shapes)
            found[name] = (a, b)
    return found


def save_adapter(
    folder: Path, pairs: Mapping[str, tuple[Tensor, Tensor]], base: str, targets: Sequence[str], **settings: Any
) -> Path:
    """As PEFT 0.21 saves it."""
    rank = min(next(iter(pairs.values()))[0].shape)
    config = {
        "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": base, "bias": "none",
        "corda_config": None, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False,
        "inference_mode": True, "init_lora_weights": True,
        "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
        "loftq_config": {}, "lora_alpha": 2 * rank, "lora_bias": False, "lora_dropout": 0.1, "megatron_config": None,
        "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "qalora_group_size": 16,
        "r": rank, "rank_pattern": {}, "revision": None, "target_modules": list(targets), "target_parameters": None,
        "task_type": "FEATURE_EXTRACTION", "trainable_token_indices": None, "use_dora": False, "use_qalora": False,
        "use_rslora": False, **settings,
    }  # fmt: skip
    write(folder / "adapter_config.json", config)
    named = {f"base_model.model.{name}.lora_{side}.weight": each for name, pair in pairs.items()
             for side, each in zip("AB", pair, strict=True)}  # fmt: skip
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def add(model: nn.Module, pairs: Mapping[str, tuple[Tensor, Tensor]], scale: float) -> None:
    with torch.no_grad():
        for name, (a, b) in pairs.items():
            model.get_submodule(name).weight += b @ a * scale  # type: ignore[operator]


def save_bert_adapter(folder: Path) -> Path:
    """A fine-tune of a model of sentence-transformers, whose modules are the base's."""
    base = BertModel.from_pretrained(save_bert(folder / "base"))
    return save_adapter(folder, pairs_of(base, BERT_TARGETS, 4, 1), "base", BERT_TARGETS)


def save_sentence_adapter(folder: Path) -> Path:
    """As sentence-transformers saves an adapter: with its tokenizer and modules, which are not the base's."""
    save_bert_adapter(folder)
    _save_tokenizer(folder, tiny_tokenizers.bert, "[PAD]")
    _save_modules(folder, "cls_token")
    prompts = {"query": "query: ", "document": ""}
    write(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    return folder


def bert_of(base: Path) -> Any:
    """With the adapter of `save_bert_adapter`."""
    model = BertModel.from_pretrained(base, dtype=torch.float32).eval()
    add(model, pairs_of(model, BERT_TARGETS, 4, 1), 2.0)
    return model


def rows_of(model: Any, pooling: Callable[[Tensor], Tensor]) -> RowsOf:
    """Vectors of length 1."""

    def rows(ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
        tokens = torch.from_numpy(np.asarray(ids, np.int64))[None]
        with torch.inference_mode():
            states = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state[0]
            return np.asarray(nn.functional.normalize(pooling(states), dim=0).numpy())

    return rows


# --- Jina's tasks -----------------------------------------------------------------------------------------------


SMALL: dict[str, Any] = {
    "config": Qwen3Config,
    "model": Qwen3Model,
    "heads": {"num_key_value_heads": 2, "head_dim": 16},
}
NANO: dict[str, Any] = {"config": EuroBertConfig, "model": EuroBertModel, "heads": {"is_decoder": False}, "seed": 2}
"""With some seeds, 0 among them, bfloat16 changes the vector of one sequence much, in every path."""


def save_v5(folder: Path, base: Mapping[str, Any] = SMALL) -> Path:
    """jina-embeddings-v5-text-small: Qwen3, its tensors without `model.` before them, and an adapter a task; -nano:
    the same of EuroBERT."""
    config = base["config"](**{**_SIZES, **_HEADS, **base["heads"]})
    save_random(base["model"], config, folder, "bfloat16", base.get("seed", 0))
    code = "modeling_jina_embeddings_v5.JinaEmbeddingsV5Model"
    change(
        folder / "config.json", model_type="jina_embeddings_v5", architectures=["JinaEmbeddingsV5Model"],
        auto_map={"AutoModel": code}, task_names=list(V5_TASKS), **({} if base is SMALL else {"is_decoder": False}),
    )  # fmt: skip
    _save_tokenizer(folder, tiny_tokenizers.qwen, "<|endoftext|>")
    _save_modules(folder, "lasttoken", "custom_st.Transformer")
    prompts = {"query": "Query: ", "document": "Document: "}
    write(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    model = _v5(folder)
    for seed, task in enumerate(V5_TASKS):
        pairs = pairs_of(model, QWEN_TARGETS, 8, seed)
        repository = "jinaai/jina-embeddings-v5-text-small"
        save_adapter(folder / "adapters" / task, pairs, repository, QWEN_TARGETS, lora_alpha=8)
    return folder


def save_v5_nano(folder: Path) -> Path:
    return save_v5(folder, NANO)


def _v5(folder: Path) -> Any:
    stated = json.loads((folder / "config.json").read_text())
    base = SMALL if stated.get("is_decoder") is not False else NANO
    model = base["model"](base["config"](**{**stated, "model_type": base["config"].model_type})).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


def v5_reference(folder: Path, task: str) -> RowsOf:
    model = _v5(folder)
    add(model, pairs_of(model, QWEN_TARGETS, 8, V5_TASKS.index(task)), 1.0)
    return rows_of(model, lambda states: states[-1])


def save_v3(folder: Path) -> Path:
    """jina-embeddings-v3: XLM-R with rotary positions in the flash layout, with the adapters of five tasks in its one
    file, of embeddings, too."""
    config = JinaEmbeddingsV3Config(**{**_SIZES, **_HEADS, "rope_theta": 20000.0, "type_vocab_size": 1})
    save_random(JinaEmbeddingsV3Model, config, folder)
    plain = load_file(folder / "model.safetensors")  # transformers saves it by the flash layout's names
    generator, tensors = torch.Generator().manual_seed(0), {}
    for own, tensor in plain.items():
        name = f"roberta.{own}"
        if tensor.ndim != 2 or not name.endswith(".weight"):
            tensors[name] = tensor
            continue
        layer, (out, width) = name.removesuffix(".weight"), tensor.shape
        is_table = "embeddings" in layer
        shapes = ((5, out, 4), (5, 4, width)) if is_table else ((5, 4, width), (5, out, 4))
        a, b = (torch.randn(shape, generator=generator) * 0.3 for shape in shapes)
        before = f"{layer}.parametrizations.weight"
        tensors |= {f"{before}.original": tensor, f"{before}.0.lora_A": a, f"{before}.0.lora_B": b}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    rest = ("bos_token_id", "eos_token_id", "hidden_act", "layer_norm_eps", "type_vocab_size", "pad_token_id")
    code = "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"
    settings = {
        **{name: getattr(config, name) for name in (*_SIZES, "num_attention_heads", "max_position_embeddings", *rest)},
        "model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "position_embedding_type": "rotary",
        "auto_map": {"AutoConfig": f"{code[:-29]}configuration_xlm_roberta.XLMRobertaFlashConfig", "AutoModel": code},
        "rotary_emb_base": 20000.0, "use_flash_attn": True, "torch_dtype": "float32", "emb_pooler": None,
        "matryoshka_dimensions": [32, 64], "truncate_dim": None, "load_trained_adapters": True,
        "lora_adaptations": list(V3_TASKS), "lora_alpha": 2, "lora_dropout_p": 0.0, "lora_rank": 4,
        "lora_main_params_trainable": False,
        "task_instructions": {**dict.fromkeys(V3_TASKS, ""), "retrieval.query": QUERY, "retrieval.passage": PASSAGE},
    }  # fmt: skip
    write(folder / "config.json", settings)
    _save_tokenizer(folder, tiny_tokenizers.xlm_roberta, "<pad>")
    _save_modules(folder, "mean_tokens", "custom_st.Transformer")
    stated = {"prompts": settings["task_instructions"], "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write(folder / "config_sentence_transformers.json", stated)
    return folder


def v3_tensors(folder: Path, task: str) -> dict[str, Tensor]:
    """By hand, as the published code has it: A · B for tables of embeddings, B · A for layers."""
    stored, plain, index = load_file(folder / "model.safetensors"), {}, V3_TASKS.index(task) if task else None
    for name, tensor in stored.items():
        layer, _, what = name.removeprefix("roberta.").partition(".parametrizations.weight.")
        if not what:
            plain[layer] = tensor
        elif what == "original":
            plain[f"{layer}.weight"] = tensor
            if index is not None:
                a, b = (stored[name.replace("original", f"0.lora_{side}")][index] for side in "AB")
                plain[f"{layer}.weight"] = tensor + (a @ b if "embeddings" in name else b @ a) * (2 / 4)
    return plain


def v3_reference(folder: Path, task: str) -> RowsOf:
    with tempfile.TemporaryDirectory() as place:
        config = JinaEmbeddingsV3Config(**{**_SIZES, **_HEADS, "rope_theta": 20000.0, "type_vocab_size": 1})
        config.save_pretrained(place)
        save_file(v3_tensors(folder, task), Path(place, "model.safetensors"), {"format": "pt"})
        model = JinaEmbeddingsV3Model.from_pretrained(place, dtype=torch.float32).eval()
    return rows_of(model, lambda states: states.mean(0))


def _mean(folder: Path) -> RowsOf:
    return rows_of(bert_of(folder / "base"), lambda states: states.mean(0))


def _cls(folder: Path) -> RowsOf:
    return rows_of(bert_of(folder / "base"), lambda states: states[0])


def of_task(
    hub_id: str,
    task: str,
    save: Callable[[Path], object],
    reference: Callable[[Path, str], RowsOf],
    prompt: str | None = None,
) -> Layout:
    """`prompt`: of the task, where each has one; None: those that the folder's files state."""
    prompts = None if prompt is None else {"": prompt, task: prompt}
    return Layout(f"{hub_id}/{task}", save, lambda folder: reference(folder, task), "adapters", prompts=prompts)


LAYOUTS = (
    Layout("org/all-MiniLM-L6-v2-lora", save_bert_adapter, _mean, "adapters"),
    Layout("org/all-MiniLM-L6-v2-lora-cls", save_sentence_adapter, _cls, "adapters"),
    of_task("jinaai/jina-embeddings-v5-text-small", "retrieval", save_v5, v5_reference),
    of_task("jinaai/jina-embeddings-v5-text-small", "text-matching", save_v5, v5_reference),
    of_task("jinaai/jina-embeddings-v5-text-nano", "retrieval", save_v5_nano, v5_reference),
    of_task("jinaai/jina-embeddings-v3", "retrieval.query", save_v3, v3_reference, QUERY),
    of_task("jinaai/jina-embeddings-v3", "separation", save_v3, v3_reference, ""),
)
