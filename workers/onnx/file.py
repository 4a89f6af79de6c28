"""Graphs in the file format of ONNX, and their products in int8.

Owns the encoding, without the onnx package, which is larger than what it would write. Knows no model.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

# The format is protobuf. Source of the messages and the numbers of their fields: onnx.proto of ONNX 1.23
# (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto), whose own checker reads the files in the tests.

MICROSOFT = "com.microsoft"

_IR_VERSION, _OPSET, _OPSET_OF_MICROSOFT = 8, 18, 1

PLACEHOLDER = "/dev", "null"
"""A file that is always there: where the format has weights that a session gets from memory."""

Value: TypeAlias = str


class Element(IntEnum):
    FLOAT32 = 1
    UINT8 = 2
    INT8 = 3
    INT64 = 7
    BOOL = 9


_ELEMENTS = {element.name.lower(): element for element in Element}


class Graph:
    """Subgraphs may use the values of the graph around them by name, so names differ in all of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_values = 0
        self._parts: list[bytes] = []

    def input(
        self, name: str, element: Element, shape: Sequence[int | str] | None, *, is_sequence: bool = False
    ) -> Value:
        """A dimension without a fixed size has a name."""
        self._parts.append(_message(11, _value(name, element, shape, is_sequence)))
        return name

    def output(
        self, name: Value, element: Element, shape: Sequence[int | str] | None, *, is_sequence: bool = False
    ) -> None:
        self._parts.append(_message(12, _value(name, element, shape, is_sequence)))

    def weight(self, name: str, array: NDArray[Any]) -> Value:
        """A tensor like `array`, which the session gets from memory. Until then the format wants a place in a file."""
        place = _text(1, "location") + _text(2, PLACEHOLDER[1])
        return self._tensor(name, array, _message(13, place) + _number(14, 1))

    def constant(self, value: ArrayLike) -> Value:
        array = np.asarray(value)
        return self._tensor(self._new_name("constant"), array, _message(9, array.tobytes()))

    def _tensor(self, name: str, array: NDArray[Any], content: bytes) -> Value:
        fields = [*(_number(1, size) for size in array.shape), _number(2, _ELEMENTS[array.dtype.name]), _text(8, name)]
        self._parts.append(_message(5, b"".join(fields) + content))
        return name

    def node(self, operator: str, *inputs: Value, domain: str = "", **attributes: Any) -> Value:
        """Add an operator with one output. An input that an operator does not need is ""."""
        return self.nodes(operator, *inputs, num_outputs=1, domain=domain, **attributes)[0]

    def nodes(
        self, operator: str, *inputs: Value, num_outputs: int, domain: str = "", **attributes: Any
    ) -> list[Value]:
        outputs = [self._new_name(operator) for _ in range(num_outputs)]
        fields = [_text(1, name) for name in inputs] + [_text(2, name) for name in outputs]
        fields += [_text(4, operator), _text(7, domain)]
        fields += [_message(5, _attribute(name, value)) for name, value in attributes.items()]
        self._parts.append(_message(1, b"".join(fields)))
        return outputs

    def to_bytes(self) -> bytes:
        opsets = _message(8, _text(1, "") + _number(2, _OPSET))
        opsets += _message(8, _text(1, MICROSOFT) + _number(2, _OPSET_OF_MICROSOFT))
        return _number(1, _IR_VERSION) + _text(2, "vecd") + _message(7, self.encoded()) + opsets

    def encoded(self) -> bytes:
        return _text(2, self._name) + b"".join(self._parts)

    def _new_name(self, kind: str) -> Value:
        self._num_values += 1
        return f"{self._name}/{kind}_{self._num_values}"


def _value(name: str, element: Element, shape: Sequence[int | str] | None, is_sequence: bool) -> bytes:
    tensor = _number(1, element)
    if shape is not None:
        sizes = (_number(1, size) if isinstance(size, int) else _text(2, size) for size in shape)
        tensor += _message(2, b"".join(_message(1, size) for size in sizes))
    kind = _message(1, tensor)
    return _text(1, name) + _message(2, _message(4, _message(1, kind)) if is_sequence else kind)


def _attribute(name: str, value: Any) -> bytes:
    match value:
        case float():
            fields = _float(2, value) + _number(20, 1)
        case int():
            fields = _number(3, value) + _number(20, 2)
        case [*numbers]:
            fields = b"".join(_number(8, number) for number in numbers) + _number(20, 7)
        case str():
            fields = _text(4, value) + _number(20, 3)
        case Graph():
            fields = _message(6, value.encoded()) + _number(20, 5)
        case _:
            raise TypeError(f"no attribute is a {type(value).__name__}")
    return _text(1, name) + fields


# --- protobuf ---------------------------------------------------------------------------------------------------


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _float(field: int, value: float) -> bytes:
    four_bytes: NDArray[np.float32] = np.array(value, dtype="<f4")
    return _varint(field << 3 | 5) + four_bytes.tobytes()


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def fields_of(message: NDArray[np.uint8]) -> Iterator[tuple[int, Any]]:
    """The fields of a message with their numbers: whole numbers, and the bytes of what is longer. Raises IndexError or
    ValueError for what is no message."""
    place = 0
    while place < len(message):
        key, place = _read_varint(message, place)
        match key & 7:
            case 0:
                value, place = _read_varint(message, place)
                yield key >> 3, value
            case 2:
                length, place = _read_varint(message, place)
                yield key >> 3, message[place : place + length]
                place += length
            case 1 | 5 as kind:
                place += 8 if kind == 1 else 4
            case kind:
                raise ValueError(f"type {kind} of a field")


def _read_varint(message: NDArray[np.uint8], place: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = int(message[place])
        place += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number, place


def precision_of(content: NDArray[np.uint8]) -> str:
    """The least exact format of the weights in a file of ONNX: "int8", "float16" or "float32". Raises as
    `fields_of`."""
    found = {1}
    for number, graph in fields_of(content):
        for field, tensor in fields_of(graph) if number == 7 else ():
            if field == 5:
                found.update(value for name, value in fields_of(tensor) if name == 2)
    return "int8" if found & _WHOLE else "float16" if found & _HALF else "float32"


_WHOLE, _HALF = {2, 3, 21, 22}, {10, 16}
"""Types of tensors: whole numbers of 8 and 4 bits; float16 and bfloat16."""


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


# Products in int8: the quantization of weights, and the operators that quantize inputs and multiply.
#
#     weight [N, K] ≈ scales [N, 1] · whole numbers of -127 to 127: a scale for each output, set once
#     x [T, K] ≈ scales [T, 1] · whole numbers of -127 to 127: a scale for each token, set in each pass
#
# ONNX Runtime's own dynamic quantization has one scale for a whole batch, so a text's vector would depend on the other
# texts of its batch.
#
# No sum overflows. Where the processor has VNNI, weights are signed, and its instructions add in 32 bits. Elsewhere the
# fast kernel for signed weights (vpmaddubsw) adds pairs of products in 16 bits, which 2 · 255 · 127 exceeds. There
# weights are unsigned, with 128 for zero: that kernel widens both sides to 16 bits first and adds in 32 (vpmaddwd).
# Source: onnxruntime/core/mlas/lib/x86_64/QgemmU8X8KernelAvx2.S. Both give the same numbers.

_MAX = 127
_ZERO = np.uint8(128)
_TINY = np.float32(1e-20)


def quantize(weight: NDArray[np.float32], *, is_signed: bool) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Whole numbers, int8 or else uint8 [K, N], and scales [N], of a weight [N, K]."""
    scales = np.maximum(np.abs(weight).max(axis=1), _TINY) / np.float32(_MAX)
    values = np.rint(weight.T / scales)
    return (values.astype(np.int8) if is_signed else (values + _ZERO).astype(np.uint8)), scales


class Int8Products:
    """Quantizes an input once, however many products have it."""

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
        inputs, input_scales = self._quantize(x)
        # The operator takes one scale for all tokens: it gets 1.
        zeros = [self._zero] if self.is_signed else [self._zero, self._zero]
        product = self._graph.node("MatMulIntegerToFloat", inputs, values, self._one, scales, *zeros, domain=MICROSOFT)
        return self._graph.node("Mul", product, input_scales)

    def use_other_rows(self) -> None:
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
