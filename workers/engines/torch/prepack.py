"""Linear layers whose weights are laid out for the processor once, instead of at every call.

Owns the replacement of `torch.nn.Linear`'s forward by oneDNN's with a weight in oneDNN's own blocked layout. The loaded
weight stays mapped from its file; the blocked copy is private memory. Called by `vecd.workers.engines.torch.packed`;
`vecd.workers.engines.torch.fused` does the same with whole layers.

Measured on all-MiniLM-L6-v2, float32, one core of an AVX-512 machine: 450 tokens of short texts 121 → 101 ms, one text
of 14 tokens 10.6 → 6.9 ms. docs/log.md has the run.
"""

from functools import partial

from torch import Tensor, nn

from vecd.workers.engines.torch.onednn import FloatKernels, float_kernels


def prepack_linears(model: nn.Module) -> int:
    """Replace the forward of every plain linear layer on a CPU; returns how many were replaced.

    Layers of a subclass, on another device, or of a type without oneDNN kernels stay as they are. `restore_linears`
    undoes it.
    """
    num_replaced = 0
    for layer in _linears(model):
        kernels = float_kernels(layer.weight.dtype) if layer.weight.device.type == "cpu" else None
        if kernels is None:
            continue
        packed = kernels.prepack(layer.weight.detach(), None)
        bias = None if layer.bias is None else layer.bias.detach()
        layer.forward = partial(_forward, kernels, packed, bias)  # type: ignore[method-assign]
        num_replaced += 1
    return num_replaced


def restore_linears(model: nn.Module) -> None:
    for layer in _linears(model):
        layer.__dict__.pop("forward", None)


def _forward(kernels: FloatKernels, packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    out: Tensor = kernels.linear(x, packed, bias, "none", [], "")
    return out


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if type(module) is nn.Linear]
