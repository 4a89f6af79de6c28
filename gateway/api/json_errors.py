"""Says why bytes are not the JSON that was expected: at which byte, in which input, and what they may be instead.

Owns the messages for documents that orjson refuses, and the guesses of their encoding. No message quotes a text. Pure.
Called by `vecd.gateway.api.bodies` for small documents and by `vecd.gateway.api.json_stream` for pieces of large ones.
"""

import json
import re
from collections.abc import Collection
from typing import Any

import orjson

from vecd.gateway.types.errors import BadRequest

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_COMPRESSED = "it begins like {}: name that in the header Content-Encoding"
_ENCODED = "it begins like {}: send UTF-8"
_BEGINNINGS: dict[bytes, str] = {
    b"\x1f\x8b": _COMPRESSED.format("gzip"),
    b"\x28\xb5\x2f\xfd": _COMPRESSED.format("zstd"),
    **dict.fromkeys((b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"), _COMPRESSED.format("deflate")),
    b"\xef\xbb\xbf": "it begins with a byte order mark: leave that out",
    # UTF-32 first: it begins like UTF-16.
    **dict.fromkeys((b"\xff\xfe\0\0", b"\0\0\xfe\xff", b"{\0\0\0", b"\0\0\0{"), _ENCODED.format("UTF-32")),
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{"), _ENCODED.format("UTF-16")),
}
"""The first bytes of what clients send instead of JSON in UTF-8, and the advice."""
_NEAR_BYTES = 64
_MORE_BYTES = 3
"""A character that begins before a cut goes on for at most so many bytes."""


def invalid_json(what: str, document: bytes, start: int = 0, end: int | None = None) -> BadRequest:
    """The error for a document that is not JSON. `what`: the fault, where all bytes from `start` to `end` are UTF-8.
    `end` defaults to a few bytes behind `start`."""
    end = start + _NEAR_BYTES if end is None else end
    advice = next((advice for bytes_, advice in _BEGINNINGS.items() if document.startswith(bytes_)), "")
    try:
        document[start : end + _MORE_BYTES].decode()
    except UnicodeDecodeError as error:
        if (at := start + error.start) < end:
            what = f"byte 0x{document[at]:02x} at offset {at} is not UTF-8"
            advice = advice or _advice_at(document, at)
    return BadRequest(f"The body is not valid JSON: {what}{advice and '; '}{advice}")


def _advice_at(document: bytes, at: int) -> str:
    first, second = document[at], document[at + 1 : at + 2]
    if first == 0xED and second >= b"\xa0":
        return "a surrogate is written there, which UTF-8 does not have"
    is_single = all(byte < 0x80 for byte in document[at - 1 : at] + second)
    return "the text may be Latin-1 or Windows-1252: send UTF-8" if is_single else ""


# --- surrogates -------------------------------------------------------------------------------------------------


def is_about_surrogate(error: orjson.JSONDecodeError) -> bool:
    return "surrogate in string" in error.msg


def lone_surrogate(field: str | None, index: int | None = None) -> BadRequest:
    """The error for a string with an escape such as `\\ud83d` alone, which is valid JSON and not text. `field`: None if
    its name must not be quoted; `index`: of the string in the field's list, if it has one."""
    where = "a field" if field is None else f"'{field}'" if index is None else f"'{field}[{index}]'"
    return BadRequest(
        f"{where} is not text: half of a surrogate pair (\\ud800 to \\udfff) is in it without the other half",
        param=field,
    )


def find_surrogate(document: bytes, known_fields: Collection[str], bare_list: str = "") -> BadRequest:
    """The error for a lone surrogate somewhere in an object. `known_fields`: the names that may be quoted. `bare_list`:
    the field that a list in place of the object is taken for."""
    for name, value in _loads(document, bare_list).items():
        if _has_surrogate([name, value]):
            index = _index_of_surrogate(value) if isinstance(value, list) else None
            return lone_surrogate(name if name in known_fields else None, index)
    return lone_surrogate(None)


def index_in_piece(piece: bytes) -> int:
    """The index of the first element with a lone surrogate in it, in the list of `{"":[…]}`; 0 for any other JSON."""
    values = _loads(piece).get("")
    return _index_of_surrogate(values) if isinstance(values, list) else 0


def _index_of_surrogate(values: list[Any]) -> int:
    """By halves: to write each value by itself takes 50 ms for 64 KB."""
    start, stop = 0, len(values) if _has_surrogate(values) else 1
    while stop - start > 1:
        middle = (start + stop) // 2
        start, stop = (start, middle) if _has_surrogate(values[start:middle]) else (middle, stop)
    return start


def _loads(document: bytes, bare_list: str = "") -> dict[str, Any]:
    """The object as `json` reads it, which accepts lone surrogates; empty if it is none, or has another fault."""
    try:
        value = json.loads(document)
    except (ValueError, RecursionError):
        return {}
    if bare_list and isinstance(value, list):
        return {bare_list: value}
    return value if isinstance(value, dict) else {}


def _has_surrogate(value: Any) -> bool:
    try:
        return _LONE_SURROGATE.search(json.dumps(value, ensure_ascii=False)) is not None
    except RecursionError:
        return False
