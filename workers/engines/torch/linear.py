"""Linear layers as oneDNN computes them best: weights laid out once, activation and residual in the same call.

Owns the two kinds, `PrepackedLinear` in float32 or bfloat16 and `QuantizedLinear` in int8, and the choice between them.
Knows no model. Called by `vecd.workers.engines.torch.fused`.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from vecd.workers.engines.torch.prepack import has_products

Activation: TypeAlias = tuple[str, str]
"""oneDNN's post-operation and its algorithm."""

NO_ACTIVATION: Activation = ("none", "")

ACTIVATIONS: dict[str, Activation] = {"gelu": ("gelu", "none"), "gelu_new": ("gelu", "tanh"), "relu": ("relu", "")}
"""By transformers' name."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Linear(Protocol):
    """x [T, K] → [T, N], both of the type that is passed between layers. Owns its copy of the weight."""

    def __call__(self, x: Tensor, activation: Activation = NO_ACTIVATION) -> Tensor: ...

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The product plus `residual` [T, N]."""


def type_between_layers(dtype: str) -> torch.dtype | None:
    """What layers that compute in `dtype` pass on: for int8, bfloat16 where it is native. None: there is no such layer
    on this processor."""
    if dtype == "int8":
        if not has_native_int8():
            return None
        return torch.bfloat16 if has_native_bfloat16() else torch.float32
    between = DTYPES.get(dtype)
    return between if between is not None and has_products(torch.device("cpu"), between) else None


def has_native_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself. oneDNN also emulates it, slower than float32."""
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(has_instructions and has_products(torch.device("cpu"), torch.bfloat16))


def has_native_int8() -> bool:
    """Whether the processor adds up products of int8 in 32 bits. Older ones do it in 16, which overflow."""
    return bool(torch.cpu._is_vnni_supported() and has_products(torch.device("cpu"), torch.float32))


def make_linear(weight: Tensor, bias: Tensor, dtype: str) -> Linear:
    """From weight [N, K] and bias [N] as stored, in a `dtype` that `type_between_layers` has a type for."""
    between = type_between_layers(dtype)
    assert between is not None, dtype
    bias = bias.to(between, copy=True)
    if dtype == "int8":
        return QuantizedLinear.of(weight.float(), bias)
    return PrepackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight.to(between), None), bias)


if torch._C._has_mkldnn:
    # Resolved once: looking an operation up costs microseconds at every call.
    _product = torch.ops.mkldnn._linear_pointwise.default
    _product_plus = torch.ops.mkldnn._linear_pointwise.binary
    _quantized_product = torch.ops.onednn.qlinear_pointwise.default
_gelu_ = torch.ops.aten.gelu_.default


@dataclass(frozen=True, slots=True)
class PrepackedLinear:
    weight: Tensor
    """In oneDNN's own layout."""
    bias: Tensor

    def __call__(self, x: Tensor, activation: Activation = NO_ACTIVATION) -> Tensor:
        kind, algorithm = activation
        out: Tensor = _product(x, self.weight, self.bias, kind, [], algorithm)
        return out

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = _product_plus(x, residual, self.weight, self.bias, "add")
        return out


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """int8 products: weights with a scale for each output, set once, and inputs with a scale for each token.

    A scale for each token, where torch's own dynamic quantization has one for the whole batch, is what keeps a text's
    vector from depending on its neighbours. oneDNN's product takes one scale, so it is given 1, and the tokens' scales
    are multiplied in afterwards.
    """

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
        packed = torch.ops.onednn.qlinear_prepack(quantized, None)
        return cls(packed, scales, torch.zeros(len(scales), dtype=torch.int32), bias)

    def __call__(self, x: Tensor, activation: Activation = NO_ACTIVATION) -> Tensor:
        parts = [_activated(self._scaled(part, self.bias), activation) for part in torch.split(x, _TOKENS_AT_A_TIME)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        pairs = zip(torch.split(x, _TOKENS_AT_A_TIME), torch.split(residual, _TOKENS_AT_A_TIME), strict=True)
        parts = [self._scaled(part, rest + self.bias) for part, rest in pairs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _scaled(self, x: Tensor, plus: Tensor) -> Tensor:
        """The product of x [T, K], plus a bias [N] or a matrix [T, N]."""
        scales = x.abs().amax(dim=1, keepdim=True).float().clamp_(min=_TINY) / _INT8_MAX
        signed = (x * scales.reciprocal()).round_().to(torch.int8)
        # oneDNN's fast product takes unsigned inputs, 128 being zero: the uppermost bit turned.
        unsigned = signed.view(torch.uint8).bitwise_xor_(128)
        product = _quantized_product(
            unsigned,
            1.0,
            128,
            self.weight,
            self.scales,
            self.zero_points,
            None,
            1.0,
            0,
            self.bias.dtype,
            "none",
            [],
            "",
        )
        return torch.addcmul(plus, product, scales.to(self.bias.dtype))


def _activated(x: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "gelu", algorithm:
            out: Tensor = _gelu_(x, approximate=algorithm)
            return out
        case "relu", _:
            return x.relu_()
        case _:
            return x


_INT8_MAX = 127
_TINY = 1e-20
"""In place of the scale of a row of zeros."""

_TOKENS_AT_A_TIME = 256
"""What the steps around a quantized product pass on then stays in a core's cache: all-MiniLM-L6-v2, mixed lengths, is
1.12 times as fast as bfloat16 with 256, 1.08 times with 512, and slower with all 2,048 at once."""
