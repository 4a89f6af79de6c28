"""The parts of responses with rows that are the same in every dialect. Pure, but for the clock.

Owns the JSON list of rows, and the binary responses: the bytes of the rows end to end, or a NumPy file. What JSON would
hold beside the rows is in headers there. Called by the dialects.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from vecd.gateway.api.dialects.headers import BINARY_MEDIA_TYPES, response_headers
from vecd.gateway.encoding.fragments import JsonRows, Matrix
from vecd.gateway.types.messages import Response
from vecd.gateway.types.request import Embedded, Encoding, InputReport

_HEADER_SAFE = re.compile(r"[!-~]{1,256}")


def fragments_of(embedded: Embedded, form: int = 0) -> list[bytes | memoryview]:
    """The rows as JSON, in one of the forms that the request has."""
    collector = embedded.collectors[form]
    assert isinstance(collector, JsonRows)
    return collector.fragments


def json_list(fragments: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Fragments of JSON as one list, in pieces, so that megabytes are never copied."""
    pieces: list[bytes | memoryview] = []
    before = b"["
    for fragment in fragments:
        pieces += (before, fragment)
        before = b","
    return [*pieces, b"]"] if pieces else [b"[]"]


def written(items: Iterable[Any]) -> Iterator[Iterable[bytes]]:
    """The JSON of each item, in one piece."""
    return zip(map(orjson.dumps, items))


def list_of_pieces(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """A JSON list of items that are in pieces. They are written one by one, because other threads wait while JSON is
    written."""
    before = b"["
    for item in items:
        yield before
        yield from item
        before = b","
    yield b"]" if before == b"," else b"[]"


def object_with_list(
    before: Mapping[str, Any], name: str, items: Iterable[Iterable[bytes]], after: Mapping[str, Any]
) -> Iterator[bytes]:
    """The JSON of an object with the list `name` between other fields, at least one before it and one behind it."""
    yield b'%b,"%b":' % (orjson.dumps(before)[:-1], name.encode())
    yield from list_of_pieces(items)
    yield b"," + orjson.dumps(after)[1:]


def list_response(
    prefix: str, kind: str, model: str, request_id: str, items: Iterable[Iterable[bytes]], embedded: Embedded
) -> Response:
    """OpenAI's shape of a list. `prefix`: of its id. `items`: of each input, in pieces."""
    before = {"id": f"{prefix}-{request_id}", "object": kind, "created": int(time.time()), "model": model}
    body = object_with_list(before, "data", items, {"usage": usage(embedded)})
    return Response(200, body, response_headers(embedded))


def item_pieces(
    kind: bytes, index: int, vectors: Iterable[tuple[bytes, Iterable[bytes]]], embedded: Embedded
) -> Iterator[bytes]:
    """An item of such a list. `vectors`: the key and the JSON of each, in pieces."""
    yield b'{"object":"%b","index":%d' % (kind, index)
    for key, pieces in vectors:
        yield b',"%b":' % key
        yield from pieces
    yield b',"report":%b}' % report_json(embedded.reports[index]) if embedded.reports else b"}"


def usage(embedded: Embedded) -> Mapping[str, int]:
    """The field `usage` of OpenAI's shape and those after it."""
    return {"prompt_tokens": embedded.num_tokens, "total_tokens": embedded.num_tokens}


def report_json(report: InputReport) -> bytes:
    """What became of an input."""
    return orjson.dumps(
        {
            "tokens": report.num_tokens,
            "truncated": report.is_truncated,
            "chunks": report.num_chunks,
            "source": report.source.value,
        }
    )


def render_rows(matrix: Matrix, *, model: str, num_tokens: int) -> Response:
    """A binary response, which borrows the matrix. A model's name that no header can hold is left out."""
    headers = {
        "x-vecd-tokens": str(num_tokens),
        "x-vecd-dimensions": str(matrix.dim),
        "x-vecd-dtype": matrix.form.dtype.value,
    }
    if _HEADER_SAFE.fullmatch(model):
        headers["x-vecd-model"] = model
    pieces: list[bytes | memoryview] = [matrix.view()]
    if matrix.form.encoding is Encoding.NPY:
        pieces.insert(0, matrix.npy_header())
    return Response(200, pieces, headers, BINARY_MEDIA_TYPES[matrix.form.encoding])
