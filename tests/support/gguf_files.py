"""Tiny models in files of GGUF, as llama.cpp converts them, by the gguf package and its own table of names.

Imports torch, transformers and gguf.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import MODEL_MAPPING, AutoConfig

from tests.support import tiny_tokenizers
from tests.support.checkpoints import save_random, tiny_config

_ARCHITECTURES = {
    "bert": gguf.MODEL_ARCH.BERT,
    "xlm-roberta": gguf.MODEL_ARCH.BERT,
    "nomic_bert": gguf.MODEL_ARCH.NOMIC_BERT,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_POOLINGS = {
    "mean": gguf.PoolingType.MEAN,
    "cls": gguf.PoolingType.CLS,
    "lasttoken": gguf.PoolingType.LAST,
    "rank": gguf.PoolingType.RANK,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
_CONFIGS: dict[str, dict[str, Any]] = {
    "nomic_bert": {"hidden_act": "silu"},
    **dict.fromkeys(("qwen2", "qwen3"), _GROUPED),
}
_TOKENIZERS = {
    "bert": tiny_tokenizers.bert,
    "nomic_bert": tiny_tokenizers.bert,
    "xlm-roberta": tiny_tokenizers.xlm_roberta,
}


def save_plain(folder: Path, family: str, **settings: Any) -> Path:
    """The model that is converted: transformers' files and a tokenizer of its kind. Returns `folder`."""
    tokenizer = _TOKENIZERS.get(family, tiny_tokenizers.qwen)()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 3}
    rows = tokenizer.get_vocab_size() + 2
    config = tiny_config(family, **{**sizes, "vocab_size": rows, **_CONFIGS.get(family, {}), **settings})
    save_random(MODEL_MAPPING[type(config)], config, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def save_gguf(
    plain: Path,
    path: Path,
    form: str = "F32",
    *,
    pooling: str | None = "mean",
    adds_end: bool | None = False,
    **values: Any,
) -> Path:
    """The model in `plain` with its matrices in `form`. `adds_end`: None to leave it unsaid. `values`: metadata in the
    place of what there is, by name. Returns `path`."""
    config = AutoConfig.from_pretrained(plain)
    architecture = _ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if pooling is not None:
        writer.add_pooling_type(_POOLINGS[pooling])
    _add_settings(writer, config)
    _add_tokenizer(writer, Tokenizer.from_file(str(plain / "tokenizer.json")), config, adds_end)
    for name, value in values.items():
        writer.kv_data[0][name.replace("__", ".")] = gguf.GGUFValue(value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in load_file(plain / "model.safetensors").items():
        named = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if named is not None and "pooler" not in name:
            array, kind = _stored(_converted(name, tensor, config).numpy(), form)
            writer.add_tensor(named, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_settings(writer: gguf.GGUFWriter, config: Any) -> None:
    if (heads := getattr(config, "num_key_value_heads", None)) is not None:
        writer.add_head_count_kv(heads)
        writer.add_key_length(config.head_dim if config.model_type != "qwen2" else 16)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_causal_attention(False)
        writer.add_token_type_count(config.type_vocab_size)
    rope = getattr(config, "rope_parameters", None)
    if rope:
        writer.add_rope_freq_base(rope["rope_theta"])


def tokens_of(tokenizer: Tokenizer, rows: int) -> tuple[list[str], list[int]]:
    """The tokens as a file has them, and their types: normal 1, control 3, user-defined 4, unused 5. `rows`: of the
    table of embeddings, for each of which there is a token."""
    content = json.loads(tokenizer.to_str())
    added = {each["id"]: 3 if each["special"] else 4 for each in content["added_tokens"]}
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    types = [added.get(index, 1) if index in by_id else 5 for index in range(rows)]
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(rows)]
    if content["model"]["type"] == "WordPiece":
        tokens = [
            token if kind == 3 else token[2:] if token.startswith("##") else f"\u2581{token}"
            for token, kind in zip(tokens, types, strict=True)
        ]
    return tokens, types


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, config: Any, adds_end: bool | None) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    tokens, types = tokens_of(tokenizer, config.vocab_size)
    writer.add_tokenizer_model({"WordPiece": "bert", "BPE": "gpt2", "Unigram": "t5"}[model["type"]])
    writer.add_tokenizer_pre({"WordPiece": "jina-v2-en", "BPE": "qwen2", "Unigram": "default"}[model["type"]])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if model["type"] == "BPE":
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
        writer.add_eos_token_id(0)
        if adds_end is not None:
            writer.add_add_eos_token(adds_end)


def _converted(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """What llama.cpp changes on the way."""
    if config.model_type == "xlm-roberta" and "position_embeddings" in name:
        return tensor[config.pad_token_id + 1 :]
    return tensor


def _stored(array: NDArray[np.float32], form: str) -> tuple[NDArray[Any], gguf.GGMLQuantizationType]:
    kind = gguf.GGMLQuantizationType[form if array.ndim > 1 else "F32"]
    return gguf.quants.quantize(np.ascontiguousarray(array), kind), kind


def as_stored(plain: Path, form: str) -> Path:
    """Write the weights in `plain` anew, as a file in `form` has them. Q8_0: of 32 numbers the largest becomes 127, by
    a factor in float16; what is read of it is rounded to float16. Returns `plain`."""

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim < 2 or form == "F32":
            return tensor
        if form != "Q8_0":
            return tensor.to({"F16": torch.float16, "BF16": torch.bfloat16}[form]).float()
        blocks = tensor.reshape(-1, 32)
        factors = blocks.abs().amax(1, keepdim=True) / 127
        whole = torch.where(factors > 0, blocks / factors, torch.zeros_like(blocks))
        whole = torch.sign(whole) * torch.floor(whole.abs() + 0.5)
        return (whole * factors.half().float()).half().float().reshape(tensor.shape)

    path = plain / "model.safetensors"
    save_file({name: rounded(each).contiguous() for name, each in load_file(path).items()}, path, {"format": "pt"})
    return plain
