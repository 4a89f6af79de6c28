"""Products in int8: the quantization of weights, and the operators that quantize inputs and multiply.

Owns both scales. Knows no model. Called by `vecd.workers.engines.lean.graph`.

    weight [N, K] ≈ scales [N, 1] · whole numbers of -127 to 127: a scale for each output, set once
    x [T, K] ≈ scales [T, 1] · whole numbers of -127 to 127: a scale for each token, set in each pass

ONNX Runtime's own dynamic quantization has one scale for a whole batch, so a text's vector would depend on the other
texts of its batch.

No sum overflows. Where the processor has VNNI, weights are signed, and its instructions add in 32 bits. Elsewhere the
fast kernel for signed weights (vpmaddubsw) adds pairs of products in 16 bits, which 2 · 255 · 127 exceeds. There
weights are unsigned, with 128 for zero: that kernel widens both sides to 16 bits first and adds in 32 (vpmaddwd).
Source: onnxruntime/core/mlas/lib/x86_64/QgemmU8X8KernelAvx2.S. Both give the same numbers.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecd.workers.engines.lean.onnx_file import MICROSOFT, Graph, Value

_MAX = 127
_ZERO = np.uint8(128)
"""Zero of the unsigned numbers."""
_TINY = np.float32(1e-20)
"""Replaces the largest element of a row of zeros."""


def quantize(weight: NDArray[np.float32], *, is_signed: bool) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Whole numbers [K, N], int8 or else uint8, and scales [N], of a weight [N, K]."""
    scales = np.maximum(np.abs(weight).max(axis=1), _TINY) / np.float32(_MAX)
    values = np.rint(weight.T / scales)
    return (values.astype(np.int8) if is_signed else (values + _ZERO).astype(np.uint8)), scales


class Int8Products:
    """The products of one graph. Quantizes an input once, however many products have it."""

    def __init__(self, graph: Graph, *, is_signed: bool) -> None:
        self._graph = graph
        self.is_signed = is_signed
        self._axis, self._flat = graph.constant([1]), graph.constant([-1])
        self._tiny, self._max = graph.constant(_TINY), graph.constant(np.float32(_MAX))
        self._one, self._zero = graph.constant(np.float32(1)), graph.constant(_ZERO)
        self._zero_as_list = graph.constant(np.array([_ZERO]))
        self._zeros: Value = ""
        """[T]: the zero of each token."""
        self._quantized: dict[Value, tuple[Value, Value]] = {}

    def __call__(self, x: Value, values: Value, scales: Value) -> Value:
        """x [T, K] times a weight from `quantize` → [T, N]."""
        inputs, input_scales = self._quantize(x)
        # The operator takes one scale for all tokens: it gets 1.
        zeros = [self._zero] if self.is_signed else [self._zero, self._zero]
        product = self._graph.node("MatMulIntegerToFloat", inputs, values, self._one, scales, *zeros, domain=MICROSOFT)
        return self._graph.node("Mul", product, input_scales)

    def use_fewer_rows(self) -> None:
        """The inputs that follow have another number of rows, [T', K]."""
        self._zeros = ""

    def _quantize(self, x: Value) -> tuple[Value, Value]:
        """uint8 [T, K] and scales [T, 1]."""
        if x not in self._quantized:
            node = self._graph.node
            largest = node("ReduceMax", node("Abs", x), self._axis, keepdims=1)
            scales = node("Div", node("Max", largest, self._tiny), self._max)
            flat = node("Reshape", scales, self._flat)
            if not self._zeros:
                self._zeros = node("Expand", self._zero_as_list, node("Shape", flat))
            self._quantized[x] = node("QuantizeLinear", x, flat, self._zeros, axis=0), scales
        return self._quantized[x]
