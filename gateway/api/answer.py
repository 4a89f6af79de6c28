"""What responses have in common in every dialect: headers, lists of rows, binary bodies. Pure, but for the clock."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from vecd.gateway.api.fields import (
    BINARY_MEDIA_TYPES,
    STRING,
    TIME,
    USAGE,
    Headers,
    Schema,
    described,
    list_of,
    record,
)
from vecd.gateway.encoding.forms import Matrix
from vecd.gateway.encoding.result import Pieces
from vecd.gateway.request import Embedded, Encoding, InputReport, Response


def json_response(status: int, body: Any, headers: Headers | None = None) -> Response:
    return Response(status, orjson.dumps(body), dict(headers or {}))


_HEADER_SAFE = re.compile(r"[!-~]{1,256}")


def written(items: Iterable[Any]) -> Iterator[Iterable[bytes]]:
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


def list_response(prefix: str, kind: str, items: Iterable[Iterable[bytes]], embedded: Embedded) -> Response:
    """OpenAI's shape of a list. `prefix`: of its id. `items`: of each input, in pieces."""
    before = {"id": f"{prefix}-{embedded.request_id}", "object": kind, "created": int(time.time())}
    before["model"] = embedded.model
    return Response(200, object_with_list(before, "data", items, {"usage": usage(embedded)}))


def list_schema(kind: Schema, item: Schema) -> Schema:
    """The schema of such a response. `kind`: of its `object`."""
    return record(
        id=STRING,
        object=kind,
        created=TIME,
        model=described(STRING, "the served model, whatever name was sent"),
        data=described(list_of(item, at_least=1), "in the order of the inputs"),
        usage=USAGE,
    )


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
    return {"prompt_tokens": embedded.num_tokens, "total_tokens": embedded.num_tokens}


def report_json(report: InputReport) -> bytes:
    return orjson.dumps(
        {
            "tokens": report.num_tokens,
            "truncated": report.is_truncated,
            "chunks": report.num_chunks,
            "source": report.source.value,
        }
    )


def render_rows(embedded: Embedded) -> Response:
    """A binary response, which borrows the matrix. A model's name that no header can hold is left out."""
    matrix: Matrix = embedded.made[0]
    headers = {
        "x-vecd-tokens": str(embedded.num_tokens),
        "x-vecd-dimensions": str(matrix.dim),
        "x-vecd-dtype": matrix.form.dtype.value,
    }
    if _HEADER_SAFE.fullmatch(embedded.model):
        headers["x-vecd-model"] = embedded.model
    pieces: Pieces = [matrix.view()]
    if matrix.form.encoding is Encoding.NPY:
        pieces.insert(0, matrix.npy_header())
    return Response(200, pieces, headers, BINARY_MEDIA_TYPES[matrix.form.encoding])
