"""Linear layers as oneDNN computes them best: weights laid out once, activation and residual in the same call.

Owns the two kinds, `PrepackedLinear` in float32 or bfloat16 and `QuantizedLinear` in int8, the decision between them,
and the replacement of `torch.nn.Linear`'s forward in a model. The loaded weight stays mapped from its file; the copy in
oneDNN's blocked layout is private memory. The calls into oneDNN are in `vecd.workers.engines.torch.onednn`. Called by
`vecd.workers.engines.torch.fused` for its layers, and by `vecd.workers.engines.torch.packed` for a whole model.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from vecd.workers.engines.torch.onednn import FloatKernels, Int8Kernels, float_kernels, int8_kernels
from vecd.workers.processor import cpu_flags, has_bfloat16

Activation: TypeAlias = tuple[str, str]
"""oneDNN's post-operation and its algorithm."""

NO_ACTIVATION: Activation = ("none", "")

ACTIVATIONS: dict[str, Activation] = {
    "gelu": ("gelu", "none"),
    "gelu_new": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
}
"""By transformers' name."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Linear(Protocol):
    """x [T, K] → [T, N], both of the type passed between layers. Owns its copy of the weight."""

    def __call__(self, x: Tensor, activation: Activation = NO_ACTIVATION) -> Tensor: ...

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The layer's output plus `residual` [T, N]."""

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """The layer's output times `factor` [T, N], element by element."""


def type_between_layers(dtype: str) -> torch.dtype | None:
    """The type of the values between layers that compute in `dtype`: for int8, bfloat16 where that is native, else
    float32. None if this processor, or this torch, has no kernels for `dtype`."""
    if dtype == "int8":
        if not has_native_int8():
            return None
        return torch.bfloat16 if has_native_bfloat16() else torch.float32
    between = DTYPES.get(dtype)
    return between if between is not None and float_kernels(between) is not None else None


def has_native_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16. oneDNN also emulates them, slower than float32."""
    return has_bfloat16() and float_kernels(torch.bfloat16) is not None


def has_native_int8() -> bool:
    """Whether the processor sums int8 multiplications in 32 bits (VNNI). Older ones use 16 bits, which overflow."""
    return "avx512_vnni" in cpu_flags() and int8_kernels() is not None


def make_linear(weight: Tensor, bias: Tensor | None, dtype: str) -> Linear:
    """Make a layer from weight [N, K] and bias [N] as stored. `type_between_layers(dtype)` must not be None."""
    between = type_between_layers(dtype)
    assert between is not None, dtype
    bias = None if bias is None else bias.to(between, copy=True)
    if dtype == "int8":
        return QuantizedLinear.of(weight.float(), torch.zeros(len(weight), dtype=between) if bias is None else bias)
    kernels = float_kernels(between)
    assert kernels is not None, dtype
    return PrepackedLinear(kernels, kernels.prepack(weight.to(between), None), bias)


@dataclass(frozen=True, slots=True)
class PrepackedLinear:
    kernels: FloatKernels
    weight: Tensor
    """In oneDNN's own layout."""
    bias: Tensor | None

    def __call__(self, x: Tensor, activation: Activation = NO_ACTIVATION) -> Tensor:
        kind, algorithm = activation
        out: Tensor = self.kernels.linear(x, self.weight, self.bias, kind, [], algorithm)
        return out

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self.kernels.linear_with(x, residual, self.weight, self.bias, "add")
        return out

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        out: Tensor = self.kernels.linear_with(x, factor, self.weight, self.bias, "mul")
        return out


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """An int8 layer: weights have one scale for each output, set once; inputs have one scale for each token.

    torch's own dynamic quantization has one scale for the whole batch, so a text's vector depends on its neighbours.
    oneDNN's kernel takes only one scale; it gets 1, and the result is multiplied by the tokens' scales afterwards.
    """

    kernels: Int8Kernels
    weight: Tensor
    scales: Tensor
    """float32 [N]"""
    zero_points: Tensor
    """int32 [N], all 0: the weights are symmetric."""
    bias: Tensor

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> "QuantizedLinear":
        scales = weight.abs().amax(dim=1).clamp(min=_TINY) / _INT8_MAX
        quantized = (weight / scales[:, None]).round().to(torch.int8)
        kernels = int8_kernels()
        assert kernels is not None, "this processor has no int8 kernels"
        zero_points = torch.zeros(len(scales), dtype=torch.int32)
        return cls(kernels, kernels.prepack(quantized, None), scales, zero_points, bias)

    def __call__(self, x: Tensor, activation: Activation = NO_ACTIVATION) -> Tensor:
        parts = [self._activated(self._scaled(part, self.bias), activation) for part in torch.split(x, _CHUNK_TOKENS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        pairs = zip(torch.split(x, _CHUNK_TOKENS), torch.split(residual, _CHUNK_TOKENS), strict=True)
        parts = [self._scaled(part, rest + self.bias) for part, rest in pairs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        return self(x).mul_(factor)

    def _scaled(self, x: Tensor, plus: Tensor) -> Tensor:
        """x [T, K] times the weight, plus a bias [N] or a matrix [T, N]."""
        scales = x.abs().amax(dim=1, keepdim=True).float().clamp_(min=_TINY) / _INT8_MAX
        signed = (x * scales.reciprocal()).round_().to(torch.int8)
        # oneDNN's fast kernel takes unsigned inputs, where 128 is zero: flip the highest bit.
        unsigned = signed.view(torch.uint8).bitwise_xor_(128)
        product = self.kernels.multiply(unsigned, self.weight, self.scales, self.zero_points, self.bias.dtype)
        return torch.addcmul(plus, product, scales.to(self.bias.dtype))

    def _activated(self, x: Tensor, activation: Activation) -> Tensor:
        match activation:
            case "gelu", algorithm:
                out: Tensor = self.kernels.gelu_(x, approximate=algorithm)
                return out
            case "relu", _:
                return x.relu_()
            case "swish", _:
                return silu(x, inplace=True)
            case _:
                return x


_INT8_MAX = 127
_TINY = 1e-20
"""Replaces the scale of a row of zeros."""

_CHUNK_TOKENS = 256
"""Tokens computed at a time, so that the data between the steps around an int8 kernel stays in a core's cache. Measured
with all-MiniLM-L6-v2 and mixed lengths: 1.12 times as fast as bfloat16 with 256, 1.08 times with 512, and slower with
all 2,048 at once."""


# --- the layers of a model --------------------------------------------------------------------------------------


def prepack_linears(model: nn.Module) -> int:
    """Replace the forward of every plain linear layer on a CPU; returns how many were replaced.

    Layers of a subclass, on another device, or of a type without oneDNN kernels stay as they are. `restore_linears`
    undoes it. Measured on all-MiniLM-L6-v2, float32, one core of an AVX-512 machine: 450 tokens of short texts 121 →
    101 ms, one text of 14 tokens 10.6 → 6.9 ms. docs/log.md has the run.
    """
    num_replaced = 0
    for layer in _linears(model):
        kernels = float_kernels(layer.weight.dtype) if layer.weight.device.type == "cpu" else None
        if kernels is not None:
            bias = None if layer.bias is None else layer.bias.detach()
            prepacked = PrepackedLinear(kernels, kernels.prepack(layer.weight.detach(), None), bias)
            layer.forward = prepacked  # type: ignore[assignment, method-assign]
            num_replaced += 1
    return num_replaced


def restore_linears(model: nn.Module) -> None:
    for layer in _linears(model):
        layer.__dict__.pop("forward", None)


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if type(module) is nn.Linear]
