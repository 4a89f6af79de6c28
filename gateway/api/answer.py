"""What responses have in common in every dialect: headers, lists of rows, binary bodies. Pure, but for the clock."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import orjson

from vecd.gateway.api.fields import STRING, TIME, USAGE, Schema, described, list_of, record
from vecd.gateway.encoding.fragments import JsonRows, Matrix, Pieces
from vecd.gateway.errors import BadRequest, quoted
from vecd.gateway.request import Embedded, Encoding, InputReport, Priority, Response, Source

Headers: TypeAlias = Mapping[str, str]
"""Names in lower case."""
MAX_TIMEOUT_MS = 24 * 60 * 60 * 1000

_PRIORITIES = {priority.name.lower(): priority for priority in Priority}
_WHOLE_NUMBER = re.compile(r"[0-9]{1,8}")
_QUALITY = re.compile(r"\s*q\s*=\s*(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)\s*", re.IGNORECASE)
_MAX_MEDIA_RANGES = 32
BINARY_MEDIA_TYPES = {Encoding.BYTES: "application/octet-stream", Encoding.NPY: "application/x-npy"}
_MAY_BE_BINARY = re.compile("|".join(map(re.escape, BINARY_MEDIA_TYPES.values())), re.IGNORECASE)
_ANY_OR_JSON = ("*/*", "application/json")
"""What most clients accept."""
_TEXTS = frozenset((Source.TEXT,))


def parse_priority(headers: Headers) -> Priority | None:
    """Raises BadRequest."""
    name = headers.get("x-vecd-priority")
    return None if name is None else priority_named(name, "header x-vecd-priority:")


def priority_named(name: str, where: str, param: str | None = None) -> Priority:
    """Raises BadRequest with a message that begins with `where`."""
    if name not in _PRIORITIES:
        raise BadRequest(f"{where} must be 'interactive', 'normal' or 'bulk', is {quoted(name)}", param=param)
    return _PRIORITIES[name]


def priority_numbered(number: int) -> Priority:
    """The priority of a number of vLLM's and Cohere's: lower goes first, 0 is normal."""
    return Priority.NORMAL if number == 0 else Priority.INTERACTIVE if number < 0 else Priority.BULK


def parse_timeout_s(headers: Headers) -> float | None:
    """Raises BadRequest."""
    value = headers.get("x-vecd-timeout-ms")
    if value is None:
        return None
    if not _WHOLE_NUMBER.fullmatch(value) or not 1 <= int(value) <= MAX_TIMEOUT_MS:
        raise BadRequest(
            f"header x-vecd-timeout-ms: must be a whole number from 1 to {MAX_TIMEOUT_MS}, is {quoted(value)}"
        )
    return int(value) / 1000


def parse_accept(headers: Headers) -> Encoding | None:
    """The binary encoding that `Accept` prefers to JSON; None if there is none.

    The response is JSON if the client likes it as much, or accepts none of the types, instead of a 406.
    Source: RFC 9110, section 12.5.1; only the parameter q counts.
    """
    accept = headers.get("accept")
    if accept is None or accept in _ANY_OR_JSON or not _MAY_BE_BINARY.search(accept):
        return None
    accept = accept.lower()
    qualities = dict(map(_media_range, accept.split(",", _MAX_MEDIA_RANGES)[:_MAX_MEDIA_RANGES]))
    preferred, highest = None, _quality_of("application/json", qualities)
    for encoding, media_type in BINARY_MEDIA_TYPES.items():
        if (quality := _quality_of(media_type, qualities)) > highest:
            preferred, highest = encoding, quality
    return preferred


def _media_range(text: str) -> tuple[str, float]:
    """A media range and its quality: 1 if there is none, 0 if it cannot be parsed."""
    media_range, *parameters = map(str.strip, text.split(";"))
    match = _QUALITY.fullmatch(next((each for each in parameters if each.startswith("q")), "q=1"))
    return media_range, float(match[1]) if match else 0.0


def _quality_of(media_type: str, qualities: Mapping[str, float]) -> float:
    """That of the most specific range that includes the type."""
    ranges = (media_type, "application/*", "*/*")
    return next((qualities[each] for each in ranges if each in qualities), 0.0)


def json_response(status: int, body: Any, headers: Headers | None = None) -> Response:
    return Response(status, orjson.dumps(body), dict(headers or {}))


def add_headers(headers: dict[str, str], embedded: Embedded) -> None:
    """Add those for inputs that were cut, split or token ids; none if all were texts and embedded whole."""
    if embedded.num_truncated:
        headers["x-vecd-truncated"] = str(embedded.num_truncated)
    if embedded.num_chunked:
        headers["x-vecd-chunked"] = str(embedded.num_chunked)
    if embedded.sources != _TEXTS and (vocabularies := sorted(x.value for x in embedded.sources - _TEXTS)):
        headers["x-vecd-token-ids"] = ", ".join(vocabularies)


_HEADER_SAFE = re.compile(r"[!-~]{1,256}")


def fragments_of(embedded: Embedded, form: int = 0) -> Pieces:
    """The rows as JSON, in one of the forms that the request has."""
    collector = embedded.collectors[form]
    assert isinstance(collector, JsonRows)
    return collector.fragments


def json_list(fragments: Sequence[bytes | memoryview]) -> Pieces:
    """Fragments of JSON as one list, in pieces, so that megabytes are never copied."""
    pieces: Pieces = []
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
    """The field `usage` of OpenAI's shape and those after it."""
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


def render_rows(matrix: Matrix, embedded: Embedded) -> Response:
    """A binary response, which borrows the matrix. A model's name that no header can hold is left out."""
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
