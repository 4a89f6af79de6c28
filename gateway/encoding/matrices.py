"""Write rows that were collected as arrays: a matrix with a row for each token, or one vector.

Owns nothing but the way from such rows to the encodings and types of `vecd.gateway.encoding.fragments`. Called by
dialects, for outputs whose rows are not encoded as they come. Pure.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vecd.gateway.encoding.fragments import Convert, JsonRows, conversion
from vecd.gateway.types.request import Encoding, Form


def vector_json(vector: NDArray[np.float32], form: Form, steps: Sequence[Convert] = ()) -> bytes:
    """The JSON of a vector, float32 [D]: a list of numbers, or base64. `steps`: what is done to it before that, as one
    row."""
    rows = JsonRows(1, form.encoding, (*steps, *conversion(form, len(vector))))
    rows.put(0, np.ascontiguousarray(vector[None]))
    return rows.fragments[0]


def matrix_json(matrix: NDArray[np.float32], form: Form, steps: Sequence[Convert] = ()) -> bytes:
    """The JSON of a matrix, float32 [n, D]: a list of lists, or base64 of the rows end to end. `steps`: as in
    `vector_json`, for all rows."""
    if not len(matrix):
        return b"[]" if form.encoding is Encoding.FLOAT else b'""'
    rows = JsonRows(1, form.encoding, (*steps, *conversion(form, matrix.shape[1])))
    rows.put_tokens(0, np.ascontiguousarray(matrix), 0)
    return rows.fragments[0]
