import base64
from io import BytesIO

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.lib import format as npy_format

from gateway.encoding import JsonRows, Matrix, encode_base64, encode_float, make_collector
from gateway.request import Encoding

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
matrices = arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=floats)


@given(matrices)
def test_base64_is_the_floats_to_the_bit(rows):
    decoded = [base64.b64decode(orjson.loads(fragment), validate=True) for fragment in encode_base64(rows)]
    assert decoded == [row.astype("<f4").tobytes() for row in rows]


@given(matrices)
def test_float_reads_back_as_the_same_float32(rows):
    read = [np.array(orjson.loads(fragment), dtype=np.float32).tobytes() for fragment in encode_float(rows)]
    assert read == [row.tobytes() for row in rows]


def test_float_is_the_shortest_form():
    assert encode_float(np.array([[0.1, 1.0]], dtype=np.float32)) == [b"[0.1,1.0]"]


@pytest.mark.parametrize("encoding", Encoding)
def test_rows_may_come_in_any_order_and_are_not_borrowed(encoding):
    rows = np.random.default_rng(0).standard_normal((5, 3), dtype=np.float32)
    in_order, in_parts = make_collector(encoding, 5, 3), make_collector(encoding, 5, 3)
    in_order.put(0, rows)
    for start, end in ((4, 5), (1, 4), (0, 1)):
        slot = rows[start:end].copy()
        in_parts.put(start, slot)
        slot[:] = np.nan
    assert kept(in_parts) == kept(in_order)


def kept(collector: JsonRows | Matrix) -> list[bytes]:
    return collector.fragments if isinstance(collector, JsonRows) else [row.tobytes() for row in collector.rows]


@given(st.integers(1, 3000), st.integers(1, 5000))
def test_numpy_reads_its_header(num_rows, dim):
    header = BytesIO(Matrix(num_rows, dim).npy_header())
    assert npy_format.read_magic(header) == (1, 0)
    assert npy_format.read_array_header_1_0(header) == ((num_rows, dim), False, np.dtype("<f4"))
    assert header.read() == b""


def test_the_view_is_bytes():
    view = Matrix(3, 2).view()
    assert (len(view), view.ndim, view.format, view.itemsize) == (24, 1, "B", 1)
