"""Answers that are the rows and nothing else, the same in every dialect. Pure.

Owns their shapes: raw little-endian float32, rows one after the other, or the same as a NumPy file. What JSON would say
beside the rows is in headers. Called by the dialects.
"""

import re

from gateway.encoding import Matrix
from gateway.http1 import Response
from gateway.request import Encoding

_HEADER_SAFE = re.compile(r"[!-~]{1,256}")


def render_rows(matrix: Matrix, encoding: Encoding, *, model: str, num_tokens: int) -> Response:
    """The answer borrows the matrix. `encoding` is BYTES or NPY; a model's name that no header can hold is left out."""
    headers = {"x-vecd-tokens": str(num_tokens), "x-vecd-dimensions": str(matrix.rows.shape[1])}
    if _HEADER_SAFE.fullmatch(model):
        headers["x-vecd-model"] = model
    if encoding is Encoding.NPY:
        return Response(200, [matrix.npy_header(), matrix.view()], headers, "application/x-npy")
    return Response(200, [matrix.view()], headers, "application/octet-stream")
