"""A document read in pieces is orjson's document, or is refused as by orjson; nothing but BadRequest is raised."""

from array import array
from typing import Any

import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]
import orjson
from fuzzing import fuzz  # type: ignore[import-not-found, unused-ignore]

with atheris.instrument_imports(include=["gateway"]):
    from vecd.gateway.api.json_stream import Bounds, PieceReader
    from vecd.gateway.types.errors import BadRequest

_REFUSED = object()
_UNBOUNDED = 10**9


def check(data: bytes) -> None:
    """The first two bytes say how long a piece is, and how much is kept."""
    if len(data) < 2:
        return
    window_bytes, document = 12 + data[0] % 60, data[2:]
    whole = _at_once(document)
    assert _in_pieces(document, window_bytes, _UNBOUNDED) == whole
    bounded = _in_pieces(document, window_bytes, 1 + data[1] % 40)
    assert whole is not _REFUSED or bounded is _REFUSED, "bounds make an invalid document valid"


def _at_once(document: bytes) -> Any:
    try:
        value = orjson.loads(document)
    except orjson.JSONDecodeError:
        return _REFUSED
    return _plain(value) if isinstance(value, dict) else _REFUSED


def _in_pieces(document: bytes, window_bytes: int, most: int) -> Any:
    bounds = Bounds(max_items=most, max_chars=most, max_ids=most, window_bytes=window_bytes, max_other_bytes=_UNBOUNDED)
    steps = PieceReader(document, frozenset({"input"}), bounds).read_object()
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return _plain(stop.value)
        except BadRequest:
            return _REFUSED


def _plain(value: Any) -> Any:
    """With types that tell True from 1 and 1 from 1.0."""
    if isinstance(value, list | array):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return type(value).__name__, value


if __name__ == "__main__":
    fuzz(
        check,
        seeds=[
            b'\x00\xff{"input":"a","model":"m"}',
            b'\x05\x10{"input":["a","b",null,1.5,true],"user":{"a":[1,{"b":[]}]}}',
            b'\x20\x04{"input":[[101,2,102],[3,4,5,6,7,8,9]],"x":[[],{}]}',
            b'\x02\x08{"input":"\\ud83d\\ude00\\u00e9\\n\\"' + "é漢😀".encode() * 4 + b'"}',
            b'\x02\x08{"input":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27]}',
        ],
        words=[b'"input":', b"[[", b"]]", b"{}", b'","', b"\\u", b"\\ud83d", b"\\ude00", b"\xc3\xa9", b"1e999", b"NaN",
               b"null", b"true", b"-0", b'"":', b"\xed\xa0\x80", b"9999999999999999999999"],
        max_bytes=400,
    )  # fmt: skip
