"""`orjson.loads` for a large object, piece by piece: the same values, the same refusals, and no long hold of the GIL.
Knows no meaning of a field."""

import re
from array import array
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import orjson

from vecd.base.files import JsonObject
from vecd.gateway.errors import BadRequest, TooManyInputs

# Places at which a JSON document may be cut. The cuts of a valid document are right, and an invalid one has an invalid
# piece. All functions read only the bytes from `start` to `limit`, so that none holds the GIL for long: 0.1 to 1 ms for
# 32 KB.

_LONG_STRING_BYTES = 64
"""The overhead of a string in Python."""
_BLANKS = re.compile(rb"[ \t\n\r]*+")
_SCALAR = re.compile(rb'[^][{}",: \t\n\r]*+')
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_BRACKETS_AND_STRINGS = re.compile(_STRING.pattern + rb'|[][{}"]', re.DOTALL)
# Whole characters and escapes. A high surrogate's escape counts only together with the next.
_TEXT = re.compile(rb'(?:[^"\\]++|\\[^u]|\\u(?![dD][89abAB])....|\\u[dD][89abAB]..\\u....)*+', re.DOTALL)
_NUMBERS = re.compile(rb'[^][{}"]*+')
# Whole elements with the commas behind them: scalars, strings, and lists of scalars that are not strings.
_RUN = re.compile(rb'(?:[^][{}",]*+(?:"(?:[^"\\]++|\\.)*+"|\[[^][{}"]*+\])?+[^][{}",]*+,)*+', re.DOTALL)


def run_end(document: bytes, start: int, limit: int) -> int:
    """The end of the last comma in a run of whole elements of a list; `start` if no element ends before `limit`."""
    numbers_end = _end(_NUMBERS, document, start, limit)
    if (comma := document.rfind(b",", start, numbers_end)) >= 0:
        return comma + 1  # a fifth of the time that the other pattern takes for numbers
    return _end(_RUN, document, start, limit)


def text_end(document: bytes, start: int, limit: int) -> int:
    """The end of the last whole character of a string whose content begins at `start`; `start` if there is none."""
    end = _end(_TEXT, document, start, limit)
    for back in range(4):  # more than three bytes that continue a character are an error, wherever the cut is
        if end - back > start and (end - back == len(document) or document[end - back] & 0xC0 != 0x80):
            return end - back
    return end


def value_end(document: bytes, start: int, limit: int) -> int | None:
    """The end of the value that begins at `start`; `start` if none does; None if it continues at `limit`."""
    if document.startswith(b'"', start):
        string = _STRING.match(document, start, limit)
        return string.end() if string else None
    if document.startswith((b"[", b"{"), start):
        return _closing_end(document, start, limit)
    end = _end(_SCALAR, document, start, limit)
    return end if end < limit else None


def long_strings_bytes(document: bytes, start: int, stop: int) -> int:
    """The bytes in long strings of a value from `start` to `stop`: strings that need little more memory in Python."""
    lengths = (string.end() - string.start() for string in _STRING.finditer(document, start, stop))
    return sum(length for length in lengths if length >= _LONG_STRING_BYTES)


def _closing_end(document: bytes, start: int, limit: int) -> int | None:
    """The end of the bracket that closes the one at `start`. The parser checks its kind."""
    depth = 0
    for token in _BRACKETS_AND_STRINGS.finditer(document, start, limit):
        first = token[0][:1]
        if first in b"[{":
            depth += 1
        elif first in b"]}":
            depth -= 1
            if depth == 0:
                return token.end()
        elif len(token[0]) == 1:
            return None  # a string that continues
    return None


def _end(pattern: re.Pattern[bytes], document: bytes, start: int, limit: int) -> int:
    """The end of the match of a pattern that also matches the empty string."""
    match = pattern.match(document, start, limit)
    assert match is not None
    return match.end()


# Why bytes are not the JSON that was expected: at which byte, in which input, and what they may be instead.

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
"""A character that begins before a cut goes on for at most this many bytes."""


def invalid_json(what: str, document: bytes, start: int = 0, end: int | None = None) -> BadRequest:
    """`what`: the fault, where all bytes from `start` to `end` are UTF-8; `end` defaults to a few bytes behind
    `start`."""
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


def is_about_surrogate(error: orjson.JSONDecodeError) -> bool:
    return "surrogate in string" in error.msg


class LoneSurrogate(BadRequest):
    """For a string with an escape such as `\\ud83d` alone, which is valid JSON and not text."""

    def __init__(self, field: str | None, index: int | None) -> None:
        """`field`: None if its name must not be quoted; `index`: of the string in the field's list, if it has one."""
        where = "a field" if field is None else f"'{field}'" if index is None else f"'{field}[{index}]'"
        super().__init__(
            f"{where} is not text: half of a surrogate pair (\\ud800 to \\udfff) is in it without the other half",
            param=field,
        )


#     {"model": "m", "input": ["…", "…", │ "…", "…", │ "…"], "user": "u"}
#               └ whole ┘      └─── runs of elements ───┘            └ whole ┘
#
# A list is cut at commas outside strings, a string between characters (never inside an escape, a surrogate pair or a
# UTF-8 sequence). So the document is valid if and only if every piece is, and none but an empty list's is blank.

Steps: TypeAlias = Generator[None, None, Any]
"""Yields between pieces, so that the thread can alternate between bodies."""

_NUM_LAST_IDS = 16
"""The number of ids that are kept at the end of a shortened list: more than any tokenizer appends to a text."""
_OTHER_VALUES = frozenset(bytes([byte]) for byte in b'["-0123456789tfn')
"""How values of JSON that are no objects begin."""
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_MAX_DEPTH = 2
"""Lists, and lists in them, are cut; deeper ones are not."""


class FieldNames(NamedTuple):
    """The fields that a body may have. Errors name these; any other name may be a text that was sent."""

    large: frozenset[str]
    """Those that may hold megabytes: a string, a list of strings, of numbers or of lists of numbers, which are cut."""
    small: frozenset[str] = frozenset()
    bare_list: str = ""
    """The one of `large` that a list in place of the object is taken for; "" if such a body is an error."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much of a large field is kept. Dropped values have been parsed, and cannot change a response."""

    max_items: int
    """Most elements of a list that does not hold token ids. One with more is refused before the rest is read."""
    max_chars: int
    """Characters of a string; of a longer one, at least one more is kept."""
    max_ids: int
    """Ids of a list of whole numbers; see `_shorten`."""
    window_bytes: int = 32 * 1024
    """The longest piece. orjson takes 0.1 ms for this many ids, 0.03 ms for texts, at worst (empty lists) 0.6 ms."""
    max_other_bytes: int = 256 * 1024
    """Bytes of all values together that are not cut. For objects in a large list: bytes of each, and of all together
    without their long strings. At worst (only brackets) 5 ms."""
    max_fields: int = 16 * 1024
    """Fields of the object, repetitions included. Clients send dozens, and a body that is parsed whole is too small for
    this number. At worst (lists in lists) 1 s of steps."""


class PieceReader:
    def __init__(self, document: bytes, names: FieldNames, bounds: Bounds) -> None:
        self._document = document
        self._names = names
        self._bounds = bounds
        self._at = 0
        self._run_bytes = bounds.window_bytes
        """The longest run of elements. Halved again and again where a run has a lone surrogate, until that stands in an
        element by itself, whose index is known."""
        self._num_other_bytes = 0
        self._num_fields = 0
        self._field = ""
        self._index: int | None = None
        """In the list of a large field, the index of the element at which the present piece begins."""

    def read_object(self) -> Generator[None, None, JsonObject]:
        """The object's fields. Lists of int32 in large fields come as `array("i")`. Raises BadRequest."""
        fields: JsonObject = {}
        first = yield from self._next()
        if first == b"{":
            yield from self._read_fields(fields)
        elif first == b"[" and self._names.bare_list:
            self._field = self._names.bare_list
            fields[self._field] = yield from self._read_large(depth=0)
        elif first in _OTHER_VALUES:
            raise BadRequest("The body must be a JSON object")
        else:
            raise self._invalid("unexpected character")
        if (yield from self._next()):
            raise self._invalid("unexpected content after document")
        return fields

    def _read_fields(self, fields: JsonObject) -> Steps:
        paused_at = self._at
        is_over = yield from self._is_empty(b"}")
        while not is_over:
            yield from self._next()
            self._field = self._read_name()
            if (yield from self._next()) != b":":
                raise self._invalid("unexpected character")
            self._at += 1
            yield from self._next()
            # Of fields of the same name the last counts, as with orjson.
            is_large = self._field in self._names.large
            fields[self._field] = (yield from self._read_large(depth=0)) if is_large else self._read_other(depth=0)
            self._index = None
            if self._at - paused_at >= self._bounds.window_bytes:
                paused_at = self._at
                yield
            is_over = yield from self._is_last(b"}")

    def _read_name(self) -> str:
        self._field = ""
        self._num_fields += 1
        if self._num_fields > self._bounds.max_fields:
            raise BadRequest(f"The body has more than {self._bounds.max_fields} fields, the most in one request")
        if not self._document.startswith(b'"', self._at):
            raise self._invalid("a field's name was expected")
        name = self._read_other(depth=0)
        assert isinstance(name, str)
        return name

    def _read_large(self, depth: int) -> Steps:
        """Read a value of a large field, `depth` lists deep."""
        if self._document.startswith(b'"', self._at):
            return (yield from self._read_text())
        if depth < _MAX_DEPTH and self._document.startswith(b"[", self._at):
            return (yield from self._read_list(depth + 1))
        return self._read_other(depth)

    def _read_list(self, depth: int) -> Steps:
        """An array while all elements are int32, shortened if it is long, or else a list."""
        kept: array[int] | list[Any] = []
        num = 0
        is_over = yield from self._is_empty(b"]")
        while not is_over:
            if depth == 1:
                self._index = num
            end = run_end(self._document, self._at, self._at + self._run_bytes)
            if end > self._at:
                run = self._take_run(end, depth)
            else:
                yield from self._next()
                run = [(yield from self._read_large(depth))]
                is_over = yield from self._is_last(b"]")
            if run:
                kept = self._join(kept, num, run, depth)
                num += len(run)
            yield
        return kept

    def _take_run(self, end: int, depth: int) -> list[Any]:
        """Empty where shorter runs are to be taken."""
        start, self._at = self._at, end
        run = self._document[start : end - 1]
        if not run.strip():
            raise self._invalid("an element is missing before a comma")
        try:
            elements = self._loads_nested(run, depth, start)
        except LoneSurrogate:
            self._at, self._run_bytes = start, self._run_bytes // 2
            return []
        return list(map(_as_ids, elements)) if type(elements[0]) is list else elements

    def _join(self, kept: "array[int] | list[Any]", num: int, run: list[Any], depth: int) -> "array[int] | list[Any]":
        """What is kept of a list's first `num` elements, with a run of more. Its cost does not depend on how many came
        before. Raises BadRequest as soon as there are too many elements."""
        new = _as_ids(run)
        if isinstance(new, array) and (isinstance(kept, array) or not kept):
            if isinstance(kept, array):
                kept += new
            else:
                kept = new
            _shorten(kept, self._bounds.max_ids)
            return kept
        if len(kept) < num:
            raise self._not_an_id(run, num)
        values = kept.tolist() if isinstance(kept, array) else kept
        values += run
        if len(values) > self._bounds.max_items:
            raise self._not_an_id(values, 0) if are_ids(values) else self._too_many(depth)
        return values

    def _read_text(self) -> Steps:
        """Read a string, cut into windows."""
        document, bounds = self._document, self._bounds
        parts: list[str] = []
        num_chars = 0
        self._at += 1
        while not document.startswith(b'"', self._at):
            end = text_end(document, self._at, self._at + bounds.window_bytes)
            if end == self._at:
                if _HALF_PAIR.match(document, end):
                    raise self._lone_surrogate()
                raise self._invalid("a string does not end, or has an invalid escape")
            text = self._loads(b'"%b"' % document[self._at : end], self._at, end)
            self._at = end
            if num_chars <= bounds.max_chars:
                parts.append(text)
                num_chars += len(text)
            yield
        self._at += 1
        return "".join(parts)

    def _read_other(self, depth: int) -> Any:
        """Read a value that is not cut. Long strings in an element of a large list are texts, as in `{"text": "…"}`."""
        most, is_element = self._bounds.max_other_bytes, depth > 0
        start, limit = self._at, self._at + most - (0 if is_element else self._num_other_bytes)
        end = value_end(self._document, start, limit)
        if end is None and limit <= len(self._document):
            raise self._too_much()
        if end is None:
            raise self._invalid("", len(self._document))
        if end == start:
            raise self._invalid("a value was expected")
        num_text_bytes = long_strings_bytes(self._document, start, end) if is_element else 0
        self._num_other_bytes += end - start - num_text_bytes
        if self._num_other_bytes > most:
            raise self._too_much()
        self._at = end
        value = self._loads_nested(self._document[start:end], depth, start)
        return value[0] if depth else value

    def _loads(self, piece: bytes, start: int, end: int) -> Any:
        """`piece`: the document from `start` to `end`, in quotes or brackets."""
        try:
            return orjson.loads(piece)
        except orjson.JSONDecodeError as error:
            if is_about_surrogate(error):
                raise self._lone_surrogate() from None
            raise self._invalid(error.msg, start, end) from None  # what orjson says quotes nothing

    def _loads_nested(self, piece: bytes, depth: int, start: int) -> Any:
        """A field's value, or a list of elements `depth` lists deep; orjson, which limits depth, sees all of it."""
        nested = b'{"":%b%b%b}' % (b"[" * depth, piece, b"]" * depth)
        value = self._loads(nested, start, start + len(piece))[""]
        for _ in range(1, depth):
            value = value[0]
        return value

    # --- between values -----------------------------------------------------------------------------------------

    def _next(self) -> Generator[None, None, bytes]:
        """The next byte that is no blank, which is not taken; b"" at the end."""
        window = self._bounds.window_bytes
        while True:
            start, self._at = self._at, _end(_BLANKS, self._document, self._at, self._at + window)
            if self._at - start < window:
                return self._document[self._at : self._at + 1]
            yield

    def _is_empty(self, closing: bytes) -> Generator[None, None, bool]:
        """Take the bracket here, and the closing one where that is next."""
        self._at += 1
        is_empty = (yield from self._next()) == closing
        self._at += is_empty
        return is_empty

    def _is_last(self, closing: bytes) -> Generator[None, None, bool]:
        """Take the closing bracket or the comma behind an element."""
        byte = yield from self._next()
        if byte not in (closing, b","):
            raise self._invalid("unexpected character")
        self._at += 1
        return byte == closing

    # --- errors -------------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str | None:
        """The field's, if it may be quoted."""
        return self._field if self._field in self._names.large or self._field in self._names.small else None

    def _invalid(self, what: str, start: int | None = None, end: int | None = None) -> BadRequest:
        start = self._at if start is None else start
        what = what if start < len(self._document) else "unexpected end of data"
        return invalid_json(f"{what}: near byte {start}", self._document, start, end)

    def _lone_surrogate(self) -> BadRequest:
        return LoneSurrogate(self._name, self._index)

    def _not_an_id(self, values: list[Any], num_before: int) -> BadRequest:
        """Of a list, too long for anything but token ids, that has something else."""
        index = next((index for index, value in enumerate(values) if type(value) is not int), None)
        what = (
            "a token id outside any vocabulary"
            if index is None
            else f"a list of token ids in which number {num_before + index} is not a whole number"
        )
        return BadRequest(f"'{self._field}' has {what}", param=self._field)

    def _too_many(self, depth: int) -> BadRequest:
        most, field = self._bounds.max_items, self._field
        num = f"at least {most + 1}"
        if depth == 1:
            return TooManyInputs(
                f"'$.{field}' is invalid: {num} inputs, at most {most} in one request (--max-inputs)", param=field
            )
        return BadRequest(
            f"'{field}[{self._index}]' has {num} values that are not all token ids, at most {most} in one list",
            param=field,
        )

    def _too_much(self) -> BadRequest:
        name = self._name
        return BadRequest(
            f"{repr(name) if name else 'other fields and the names of fields'}: what is neither text nor token ids may "
            f"take {self._bounds.max_other_bytes} bytes in all, and takes more",
            param=name,
        )


def are_ids(values: list[Any]) -> bool:
    return type(values[0]) is int and set(map(type, values)) == {int}


def _as_ids(value: Any) -> Any:
    """A list of whole numbers as an array: a ninth of the memory, and freed at once. Anything else as it is."""
    if type(value) is list and value and are_ids(value):
        try:
            return array("i", value)
        except OverflowError:
            return value  # too large for the token ids of any model
    return value


def _shorten(ids: "array[int]", max_ids: int) -> None:
    """Remove the ids between the first `max_ids` and the last few, except the least and the greatest.

    Code that uses at most `max_ids` of them, the end of the list, and whether all are in a vocabulary, gets the same
    result as for the whole list, which is still too long. More ids can be appended, and it be shortened again.
    """
    dropped = ids[max_ids:-_NUM_LAST_IDS]
    if len(dropped) > 2:
        ids[max_ids:-_NUM_LAST_IDS] = array("i", [min(dropped), max(dropped)])
