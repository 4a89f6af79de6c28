"""Writes a graph in the file format of ONNX, without the onnx package, which is larger than what it would write.

Owns the encoding. Knows no model. Called by `vecd.workers.engines.lean.graph`.

The format is protobuf. Source of the messages and the numbers of their fields: onnx.proto of ONNX 1.23
(https://github.com/onnx/onnx/blob/main/onnx/onnx.proto), whose own checker reads the files in the tests.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

MICROSOFT = "com.microsoft"
"""The domain of the operators that ONNX Runtime adds to ONNX's own."""

_IR_VERSION, _OPSET, _OPSET_OF_MICROSOFT = 8, 18, 1

PLACEHOLDER = "/dev", "null"
"""A folder and a file of it that is always there: where the format has weights that a session gets from memory."""

Value: TypeAlias = str
"""The name of a tensor in a graph."""


class Element(IntEnum):
    """Types of a tensor's elements, TensorProto.DataType."""

    FLOAT32 = 1
    UINT8 = 2
    INT8 = 3
    INT64 = 7
    BOOL = 9


_ELEMENTS = {element.name.lower(): element for element in Element}
"""By numpy's name."""


class Graph:
    """A graph under construction. Subgraphs (the body of a loop, the branches of a condition) may use the values of the
    graph around them by name, so names differ in all of them."""

    def __init__(self, name: str) -> None:
        """`name` begins the names of its values."""
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
        fields = [*(_number(1, size) for size in array.shape), _number(2, _ELEMENTS[array.dtype.name]), _text(8, name)]
        self._parts.append(_message(5, b"".join(fields) + _message(13, place) + _number(14, 1)))
        return name

    def constant(self, value: ArrayLike) -> Value:
        """Of the type that numpy gives `value`: int64 for whole numbers, bool for truth values."""
        array = np.asarray(value)
        name = self._new_name("constant")
        fields = [*(_number(1, size) for size in array.shape), _number(2, _ELEMENTS[array.dtype.name]), _text(8, name)]
        self._parts.append(_message(5, b"".join(fields) + _message(9, array.tobytes())))
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
        """The content of a file with this graph."""
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


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; all but the last byte have the highest bit set. `number` is at least 0."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
