"""Linear layers whose weights are laid out for the processor once, instead of at every call.

Owns the replacement of `torch.nn.Linear`'s forward by oneDNN's with a weight in oneDNN's own blocked layout. The weight
as loaded stays where it is, mapped from its file; the blocked copy is private memory. Called by
`vecd.workers.engines.torch.packed`; `vecd.workers.engines.torch.fused` does the same with whole layers.

Measured on all-MiniLM-L6-v2, float32, one core of an AVX-512 machine: 450 tokens of short texts 121 → 101 ms, one text
of 14 tokens 10.6 → 6.9 ms. docs/log.md has the run.
"""

from functools import partial

import torch
from torch import Tensor, nn


def prepack_linears(model: nn.Module) -> int:
    """Replace the forward of every plain linear layer on a CPU; returns how many were.

    Layers of a subclass, of another device, or of a type that oneDNN has no product for are left alone. Undone by
    `restore_linears`.
    """
    layers = [layer for layer in _linears(model) if can_prepack(layer)]
    for layer in layers:
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)
        bias = None if layer.bias is None else layer.bias.detach()
        layer.forward = partial(_forward, packed, bias)  # type: ignore[method-assign]
    return len(layers)


def restore_linears(model: nn.Module) -> None:
    for layer in _linears(model):
        layer.__dict__.pop("forward", None)


def _forward(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if type(module) is nn.Linear]


def can_prepack(layer: nn.Linear) -> bool:
    """Whether oneDNN has a product for this layer's device and type."""
    return has_products(layer.weight.device, layer.weight.dtype)


def has_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies by prepacked weights of this type on this device."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32
