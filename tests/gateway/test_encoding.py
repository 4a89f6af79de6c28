import base64

import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gateway.encoding import encode_base64, encode_float

rows = arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


@given(rows)
def test_base64_is_the_floats_to_the_bit(row):
    assert base64.b64decode(orjson.loads(encode_base64(row)), validate=True) == row.astype("<f4").tobytes()


@given(rows)
def test_float_reads_back_as_the_same_float32(row):
    assert np.array(orjson.loads(encode_float(row)), dtype=np.float32).tobytes() == row.tobytes()


def test_float_is_the_shortest_form():
    assert encode_float(np.array([0.1, 1.0], dtype=np.float32)) == b"[0.1,1.0]"


def test_a_fragment_does_not_borrow_the_row():
    row = np.ones(8, dtype=np.float32)
    fragments = [encode_float(row), encode_base64(row)]
    row[:] = 2
    assert fragments == [encode_float(np.ones(8, np.float32)), encode_base64(np.ones(8, np.float32))]
