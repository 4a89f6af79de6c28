"""The activations of heads and of layers, once, with what each backend calls them."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]


class Activation(NamedTuple):
    torch: str = ""
    """The class in torch.nn, with its default arguments. Empty, as `numpy`: not in heads."""
    numpy: Callable[[Floats], Floats] | None = None
    onnx: tuple[str, Mapping[str, Any]] | None = None
    """Operator and its attributes. None: not in layers."""
    onnx_with_bias: str = ""
    """Microsoft's operator that adds a bias first; empty for none."""
    onednn: tuple[str, str] = "none", ""
    """Name and algorithm."""


def _softplus(x: Floats) -> Floats:
    return np.logaddexp(0, x)


def _sigmoid(x: Floats) -> Floats:
    return np.exp(-_softplus(-x))


def _elu(x: Floats) -> Floats:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _gelu(x: Floats) -> Floats:
    return x * (np.float32(0.5) + np.float32(0.5) * _erf(x * np.float32(0.5**0.5)))


def _erf(x: Floats) -> Floats:
    """Within 5e-7. numpy has none, and calling math.erf takes 40 times as long. Source: Eigen's generic_fast_erf_float,
    a quotient of polynomials between -4 and 4."""
    x = np.clip(x, -4, 4)
    square = x * x
    numerator, denominator = (_polynomial(coefficients, square) for coefficients in (_NUMERATOR, _DENOMINATOR))
    numerator *= x
    numerator /= denominator
    return numerator


def _polynomial(coefficients: Sequence[float], x: Floats) -> Floats:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= x
        total += np.float32(coefficient)
    return total


_NUMERATOR = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_DENOMINATOR = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)

_MICROSOFT = {"domain": "com.microsoft"}
_GELU_NEW = Activation(onnx=("FastGelu", _MICROSOFT), onnx_with_bias="FastGelu", onednn=("gelu", "tanh"))

ACTIVATIONS = MappingProxyType(
    {
        "identity": Activation("Identity", lambda x: x),
        "tanh": Activation("Tanh", np.tanh),
        "relu": Activation("ReLU", lambda x: np.maximum(x, 0), ("Relu", {}), onednn=("relu", "")),
        "relu6": Activation("ReLU6", lambda x: np.clip(x, 0, 6)),
        "leakyrelu": Activation("LeakyReLU", lambda x: np.where(x > 0, x, np.float32(0.01) * x)),
        "elu": Activation("ELU", _elu),
        "selu": Activation(
            "SELU",
            lambda x: np.float32(1.0507009873554805) * np.where(x > 0, x, np.float32(1.6732632423543772) * _elu(x)),
        ),
        "gelu": Activation("GELU", _gelu, ("Gelu", _MICROSOFT), "BiasGelu", ("gelu", "none")),
        "gelu_new": _GELU_NEW,  # the approximation with tanh
        "gelu_pytorch_tanh": _GELU_NEW,
        "silu": Activation(
            "SiLU", lambda x: x * _sigmoid(x), ("QuickGelu", {**_MICROSOFT, "alpha": 1.0}), onednn=("swish", "")
        ),
        "mish": Activation("Mish", lambda x: x * np.tanh(_softplus(x))),
        "sigmoid": Activation("Sigmoid", _sigmoid),
        "softplus": Activation("Softplus", _softplus),
        "softsign": Activation("Softsign", lambda x: x / (1 + np.abs(x))),
        "hardtanh": Activation("Hardtanh", lambda x: np.clip(x, -1, 1)),
    }
)
"""By the lower-case name of the class in torch.nn, or by transformers' name."""
