"""Write rows that were collected as arrays: a matrix with a row for each token, or one vector.

Owns nothing but the way from such rows to the encodings and types of `vecd.gateway.encoding.fragments`, and the bound
on what is written at once: what a text has for each of its tokens is written piece by piece, so that a thread can
alternate between responses. Called by dialects, for outputs whose rows are not encoded as they come. Pure.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from vecd.gateway.encoding.entities import TOKENS_PER_STEP
from vecd.gateway.encoding.fragments import Convert, JsonRows, conversion
from vecd.gateway.types.request import Encoding, Form

_FLOATS_PER_PIECE = 32 * 1024
"""Of rows, 0.7 ms as JSON numbers."""


def runs_of(values: Any, most: int = TOKENS_PER_STEP) -> Iterator[Any]:
    """The values of a list or an array, at most so many at a time."""
    return (values[at : at + most] for at in range(0, len(values), most))


def list_pieces(runs: Iterable[Any], empty: bytes = b"[]") -> Iterator[bytes]:
    """The JSON list of the elements of all runs, a piece for each run; with `empty` b"{}" an object of all entries. A
    run may be empty."""
    before = empty[:1]
    for run in runs:
        yield before + orjson.dumps(run, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1] if len(run) else b""
        before = b"," if len(run) else before
    yield empty[1:] if before == b"," else empty


def vector_json(vector: NDArray[np.float32], form: Form, steps: Sequence[Convert] = ()) -> bytes:
    """The JSON of a vector, float32 [D]: a list of numbers, or base64. `steps`: what is done to it before that, as one
    row."""
    rows = JsonRows(1, form.encoding, (*steps, *conversion(form, len(vector))))
    rows.put(0, np.ascontiguousarray(vector[None]))
    return bytes(rows.fragments[0])


def matrix_pieces(matrix: NDArray[np.float32], form: Form, steps: Sequence[Convert] = ()) -> Iterator[bytes]:
    """The JSON of a matrix, float32 [n, D], some rows at a time: a list of lists, or base64 of the rows end to end.
    `steps`: as in `vector_json`, for all rows."""
    before, between, end = (b"[", b",", b"]") if form.encoding is Encoding.FLOAT else (b'"', b"", b'"')
    width = matrix.shape[1]
    most = min(TOKENS_PER_STEP, _FLOATS_PER_PIECE // width)
    for some in runs_of(matrix, most // 3 * 3 or 3):  # base64 has no padding behind a multiple of 3 bytes
        rows = JsonRows(1, form.encoding, (*steps, *conversion(form, width)))
        rows.put_tokens(0, np.ascontiguousarray(some), 0)
        yield before + bytes(rows.fragments[0][1:-1])
        before = between
    yield end if len(matrix) else before + end
