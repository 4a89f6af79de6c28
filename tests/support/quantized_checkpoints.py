"""Tiny decoders whose weights are quantized, as AutoAWQ, AutoGPTQ, transformers and compressed-tensors save them.

Packs number by number, from the public descriptions of the layouts. Imports torch.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]


class Quantized(NamedTuple):
    tensors: Tensors
    """By the last part of their names."""
    plain: Tensor
    """What they stand for, float32."""


def save_quantized(plain: Path, folder: Path, scheme: str, dtype: str = "bfloat16") -> Path:
    """Write the model in `plain` with its linear layers as `scheme` has them, one of SCHEMES, into an empty folder, and
    give `plain` the weights that these stand for, in `dtype`. Returns `folder`."""
    quantize, settings = SCHEMES[scheme]
    torch.manual_seed(0)
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    weights, kind = load_file(plain / "model.safetensors"), getattr(torch, dtype)
    kept: Tensors = {}
    rounded: Tensors = {}
    for name, tensor in weights.items():
        if name.endswith("_proj.weight"):
            made = quantize(tensor.float())
            kept |= {f"{name.removesuffix('weight')}{last}": each.contiguous() for last, each in made.tensors.items()}
            rounded[name] = made.plain.to(kind).contiguous()
        else:
            kept[name] = rounded[name] = tensor.to(kind)
    save_file(rounded, plain / "model.safetensors", {"format": "pt"})
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text()) | {"dtype": dtype}
    (plain / "config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder


def _fp8_blocks(weight: Tensor, size: int = 24) -> Quantized:
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // size), -(-columns // size))
    stored, plain = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), torch.zeros(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = (slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size))
            scales[i, j] = weight[place].abs().max() / 448
            stored[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            plain[place] = stored[place].float() * scales[i, j]
    return Quantized({"weight": stored, "weight_scale_inv": scales}, plain)


def _fp8(weight: Tensor, *, of_rows: bool) -> Quantized:
    scale = (weight.abs().amax(1, keepdim=True) if of_rows else weight.abs().max().reshape(1)) / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return Quantized({"weight": stored, "weight_scale": scale, "input_scale": torch.ones(1)}, stored.float() * scale)


def _int8(weight: Tensor) -> Quantized:
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round().to(torch.int8)
    return Quantized({"weight": stored, "weight_scale": scale}, stored.float() * scale)


def _affine(weight: Tensor, bits: int, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whole numbers [rows, columns], zeros and scales [groups, rows], and what they stand for."""
    num_groups = int(groups.max()) + 1
    zeros, scales = torch.zeros(num_groups, len(weight), dtype=torch.int64), torch.zeros(num_groups, len(weight))
    whole, plain = torch.zeros(weight.shape, dtype=torch.int64), torch.zeros(weight.shape)
    for group in range(num_groups):
        part = weight[:, groups == group]
        low, high = part.amin(1), part.amax(1)
        scales[group] = ((high - low) / (2**bits - 1)).half().float()
        zeros[group] = (-low / scales[group]).round().clamp(1, 2**bits - 1).long()
        values = (part / scales[group][:, None] + zeros[group][:, None]).round().clamp(0, 2**bits - 1).long()
        whole[:, groups == group] = values
        plain[:, groups == group] = (values - zeros[group][:, None]).float() * scales[group][:, None]
    return whole, zeros, scales, plain


def _words(values: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """Of each row, numbers in words of 32 bits: the one at `order[i]` of each word's at place i."""
    per_word = 32 // bits
    words = np.zeros((values.shape[0], values.shape[1] // per_word), dtype=np.uint32)
    for place in range(per_word):
        column = place if order is None else order[place]
        words |= values[:, column::per_word].numpy().astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32))


def _awq(weight: Tensor, size: int = 16) -> Quantized:
    whole, zeros, scales, plain = _affine(weight, 4, torch.arange(weight.shape[1]) // size)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {"qweight": _words(whole.T, 4, order), "qzeros": _words(zeros, 4, order), "scales": scales.half()}
    return Quantized(tensors, plain)


def _gptq(weight: Tensor, *, bits: int, is_ordered: bool = False, less: int = 1, size: int = 16) -> Quantized:
    groups = torch.arange(weight.shape[1]) // size
    if is_ordered:
        groups = groups[torch.randperm(len(groups))]
    whole, zeros, scales, plain = _affine(weight, bits, groups)
    tensors = {
        "qweight": _words(whole, bits).T,
        "qzeros": _words(zeros - less, bits),
        "scales": scales.half(),
        "g_idx": groups.int(),
    }
    return Quantized(tensors, plain)


def _packed(weight: Tensor, size: int = 32) -> Quantized:
    scales = weight.reshape(len(weight), -1, size).abs().amax(2) / 7.5
    wide = scales.repeat_interleave(size, 1)
    whole = (weight / wide).round().clamp(-8, 7).long()
    shape = torch.tensor(weight.shape)
    tensors = {"weight_packed": _words(whole + 8, 4), "weight_scale": scales, "weight_shape": shape}
    return Quantized(tensors, whole.float() * wide)


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


_GPTQ = {"quant_method": "gptq", "group_size": 16, "desc_act": False, "sym": False}

SCHEMES: dict[str, tuple[Callable[[Tensor], Quantized], dict[str, Any]]] = {
    "fp8": (
        _fp8_blocks,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [24, 24]},
    ),
    "fp8 of rows": (lambda weight: _fp8(weight, of_rows=True), _compressed("float-quantized", strategy="channel")),
    "fp8 of all": (lambda weight: _fp8(weight, of_rows=False), _compressed("float-quantized", strategy="tensor")),
    "int8": (_int8, _compressed("int-quantized", strategy="channel")),
    "int4": (_packed, _compressed("pack-quantized", strategy="group", group_size=32, num_bits=4)),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}),
    "gptq": (lambda weight: _gptq(weight, bits=4), {**_GPTQ, "bits": 4}),
    "gptq of 8 bits": (lambda weight: _gptq(weight, bits=8), {**_GPTQ, "bits": 8}),
    "gptq in order": (
        lambda weight: _gptq(weight, bits=4, is_ordered=True),
        {**_GPTQ, "bits": 4, "desc_act": True},
    ),
    "gptq v2": (lambda weight: _gptq(weight, bits=4, less=0), {**_GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}),
}
