"""Collects a request's rows in the form in which they will be answered.

Owns the copies: a row is borrowed from the arena for the length of a `put`, and what is kept does not refer to it.
Knows no dialect: what stands around the rows is written by whoever renders the answer. Made by the handlers in
`gateway.app`, filled by `gateway.request.Gathering` as batches finish.

Measured for 128 × 1024 floats (`benchmarks/answers.py`): raw 0.02 ms, base64 0.13 ms, float JSON 3.1 ms. That is why
base64, the default of OpenAI's SDKs, matters, and why rows are encoded a few at a time (`gateway.dispatch`).
"""

from collections.abc import Callable, Iterable
from io import BytesIO

import numpy as np
import orjson
from numpy.lib import format as npy_format
from numpy.typing import NDArray
from pybase64 import b64encode

from gateway.request import Encoding


def encode_float(rows: NDArray[np.float32]) -> Iterable[bytes]:
    """JSON arrays of numbers, each the shortest that reads back as the same float32. `rows` are [n, D]."""
    return [orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) for row in rows]


def encode_base64(rows: NDArray[np.float32]) -> Iterable[bytes]:
    """JSON strings: standard base64, padded, of each row's little-endian float32s. `rows` are [n, D]."""
    view, row_bytes = rows.data.cast("B"), rows.shape[1] * rows.itemsize
    return [b'"%b"' % b64encode(view[at : at + row_bytes]) for at in range(0, len(view), row_bytes)]


class JsonRows:
    """A fragment of JSON for each row."""

    __slots__ = ("_encode", "fragments")

    def __init__(self, num_rows: int, encode: Callable[[NDArray[np.float32]], Iterable[bytes]]) -> None:
        self.fragments: list[bytes] = [b""] * num_rows
        """In input order."""
        self._encode = encode

    def put(self, index: int, rows: NDArray[np.float32]) -> None:
        """`rows` are C-contiguous."""
        self.fragments[index : index + len(rows)] = self._encode(rows)


class Matrix:
    """The rows themselves."""

    __slots__ = ("rows",)

    def __init__(self, num_rows: int, dim: int) -> None:
        self.rows = np.empty((num_rows, dim), dtype="<f4")
        """In input order."""

    def put(self, index: int, rows: NDArray[np.float32]) -> None:
        self.rows[index : index + len(rows)] = rows

    def view(self) -> memoryview:
        """The bytes of all rows, borrowed."""
        return self.rows.data.cast("B")

    def npy_header(self) -> bytes:
        """What comes before the rows in a NumPy file, version 1.0."""
        header = BytesIO()
        npy_format.write_array_header_1_0(header, npy_format.header_data_from_array_1_0(self.rows))
        return header.getvalue()


def make_collector(encoding: Encoding, num_rows: int, dim: int) -> JsonRows | Matrix:
    """A collector for a request of so many inputs, whose rows have `dim` elements."""
    match encoding:
        case Encoding.FLOAT:
            return JsonRows(num_rows, encode_float)
        case Encoding.BASE64:
            return JsonRows(num_rows, encode_base64)
        case Encoding.BYTES | Encoding.NPY:
            return Matrix(num_rows, dim)
