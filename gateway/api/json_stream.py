"""`orjson.loads` for a large object, piece by piece: it returns the same values and refuses the same documents.

Owns the walk through the document, and the bounds on what is kept. Parses nothing itself: orjson gets each piece, in
brackets that make it as deeply nested as it was. Knows no meaning of a field. Called by `vecd.gateway.api.bodies`, in a
thread.

    {"model": "m", "input": ["…", "…", │ "…", "…", │ "…"], "user": "u"}
              └ whole ┘      └─── runs of elements ───┘            └ whole ┘

A list is cut at commas outside strings, a string between characters (never inside an escape, a surrogate pair or a
UTF-8 sequence). So the document is valid if and only if every piece is, and none but an empty list's is blank.
"""

import re
from array import array
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

from vecd.gateway.api.json_errors import index_in_piece, invalid_json, is_about_surrogate, lone_surrogate
from vecd.gateway.api.json_split import blanks_end, long_strings_bytes, run_end, text_end, value_end
from vecd.gateway.types.errors import BadRequest, TooManyInputs

Steps: TypeAlias = Generator[None, None, Any]
"""Yields between pieces, so that the thread can alternate between bodies."""

_NUM_LAST_IDS = 16
"""So many ids are kept at the end of a shortened list: more than any tokenizer appends to a text."""
_OTHER_VALUES = frozenset(bytes([byte]) for byte in b'["-0123456789tfn')
"""How values of JSON that are no objects begin."""
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_MAX_DEPTH = 2
"""Lists, and lists in them, are cut; deeper ones are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much of a large field is kept. Dropped values have been parsed, and cannot change a response."""

    max_items: int
    """Most elements of a list that does not hold whole numbers. One with more is refused before the rest is read."""
    max_chars: int
    """Characters of a string; of a longer one, at least one more is kept."""
    max_ids: int
    """Ids of a list of whole numbers; see `_shorten`."""
    window_bytes: int = 32 * 1024
    """The longest piece. orjson takes 0.1 ms for so many ids, 0.03 ms for texts, at worst (empty lists) 0.6 ms."""
    max_other_bytes: int = 256 * 1024
    """Bytes of all values together that are not cut. For objects in a large list: bytes of each, and of all together
    without their long strings. At worst (only brackets) 5 ms."""
    max_fields: int = 16 * 1024
    """Fields of the object, repetitions included. Clients send dozens, and a body that is parsed whole is too small for
    so many. At worst (lists in lists) 1 s of steps."""


class PieceReader:
    """Reads one document, once."""

    def __init__(
        self,
        document: bytes,
        large_fields: frozenset[str],
        bounds: Bounds,
        small_fields: frozenset[str] = frozenset(),
        bare_list: str = "",
    ) -> None:
        """`large_fields`: the top-level fields whose strings and lists are cut. Errors name them and `small_fields`;
        any other name may be a text that was sent. `bare_list`: the one of `large_fields` that a list in place of the
        object is taken for; "" if there is none."""
        self._document = document
        self._large_fields = large_fields
        self._known_fields = large_fields | small_fields
        self._bounds = bounds
        self._bare_list = bare_list
        self._at = 0
        self._num_other_bytes = 0
        self._num_fields = 0
        self._field = ""
        self._index: int | None = None
        """In the list of a large field, the index of the element at which the present piece begins."""

    def read_object(self) -> Generator[None, None, dict[str, Any]]:
        """The object's fields. Lists of int32 in large fields come as `array("i")`. Raises BadRequest."""
        fields: dict[str, Any] = {}
        yield from self._skip_blanks()
        if self._bare_list and self._document.startswith(b"[", self._at):
            self._field = self._bare_list
            fields[self._field] = yield from self._read_large(depth=0)
            yield from self._end()
            return fields
        if not self._document.startswith(b"{", self._at):
            if self._document[self._at : self._at + 1] in _OTHER_VALUES:
                raise BadRequest("The body must be a JSON object")
            raise self._invalid("unexpected character")
        self._at += 1
        yield from self._skip_blanks()
        is_over, paused_at = self._take(b"}"), self._at
        while not is_over:
            self._field = self._read_name()
            yield from self._skip_blanks()
            self._expect(b":")
            yield from self._skip_blanks()
            # Of fields of the same name the last counts, as with orjson.
            is_large = self._field in self._large_fields
            fields[self._field] = (yield from self._read_large(depth=0)) if is_large else self._read_other(depth=0)
            self._index = None
            if self._at - paused_at >= self._bounds.window_bytes:
                paused_at = self._at
                yield
            yield from self._skip_blanks()
            is_over = self._take(b"}")
            if not is_over:
                self._expect(b",")
                yield from self._skip_blanks()
        yield from self._end()
        return fields

    def _end(self) -> Generator[None]:
        yield from self._skip_blanks()
        if self._at < len(self._document):
            raise self._invalid("unexpected content after document")

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
        elements = _Elements(self._bounds.max_ids)
        self._at += 1
        yield from self._skip_blanks()
        is_over = self._take(b"]")
        while not is_over:
            if depth == 1:
                self._index = elements.num
            end = run_end(self._document, self._at, self._at + self._bounds.window_bytes)
            if end > self._at:
                run = self._take_run(end, depth)
            else:
                yield from self._skip_blanks()
                run = [(yield from self._read_large(depth))]
                yield from self._skip_blanks()
                is_over = self._take(b"]")
                if not is_over:
                    self._expect(b",")
            self._add(elements, run, depth)
            yield
        return elements.kept

    def _take_run(self, end: int, depth: int) -> list[Any]:
        start, self._at = self._at, end
        run = self._document[start : end - 1]
        if not run.strip():
            raise self._invalid("an element is missing before a comma")
        elements = self._loads_nested(run, depth, start)
        return list(map(_as_ids, elements)) if type(elements[0]) is list else elements

    def _add(self, elements: "_Elements", run: list[Any], depth: int) -> None:
        """Raises BadRequest as soon as there are too many elements."""
        if elements.add_ids(run):
            return
        if elements.num_dropped:
            raise self._not_an_id(run, elements.num)
        num, max_items = elements.add_values(run), self._bounds.max_items
        if num <= max_items or (elements.are_whole_numbers and num <= self._bounds.max_ids):
            return
        if elements.are_whole_numbers:
            raise BadRequest(f"'{self._field}' has a token id outside any vocabulary", param=self._field)
        raise self._too_many(depth)

    def _read_text(self) -> Steps:
        """Read a string, cut into windows."""
        document, bounds = self._document, self._bounds
        parts: list[str] = []
        num_chars = 0
        self._at += 1
        while not self._take(b'"'):
            end = text_end(document, self._at, self._at + bounds.window_bytes)
            if end == self._at:
                if _HALF_PAIR.match(document, end):
                    raise self._lone_surrogate(b"")
                raise self._invalid("a string does not end, or has an invalid escape")
            text = self._loads(b'"%b"' % document[self._at : end], self._at, end)
            self._at = end
            if num_chars <= bounds.max_chars:
                parts.append(text)
                num_chars += len(text)
            yield
        return "".join(parts)

    def _read_other(self, depth: int) -> Any:
        """Read a value that is not cut. Long strings in an element of a large list are texts, as in `{"text": "…"}`."""
        most, is_element = self._bounds.max_other_bytes, depth > 0
        start, limit = self._at, self._at + most - (0 if is_element else self._num_other_bytes)
        end = value_end(self._document, start, limit)
        if end is None and limit <= len(self._document):
            raise self._too_much()
        if end is None:
            raise self._invalid_at("unexpected end of data", len(self._document))
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
                raise self._lone_surrogate(piece) from None
            raise self._invalid_at(error.msg, start, end) from None  # what orjson says quotes nothing

    def _loads_nested(self, piece: bytes, depth: int, start: int) -> Any:
        """A field's value, or a list of elements `depth` lists deep; orjson, which limits depth, sees all of it."""
        nested = b'{"":%b%b%b}' % (b"[" * depth, piece, b"]" * depth)
        value = self._loads(nested, start, start + len(piece))[""]
        for _ in range(1, depth):
            value = value[0]
        return value

    # --- between values -----------------------------------------------------------------------------------------

    def _skip_blanks(self) -> Generator[None, None, None]:
        window = self._bounds.window_bytes
        while True:
            start, self._at = self._at, blanks_end(self._document, self._at, self._at + window)
            if self._at - start < window:
                return
            yield

    def _take(self, byte: bytes) -> bool:
        is_there = self._document.startswith(byte, self._at)
        self._at += is_there
        return is_there

    def _expect(self, byte: bytes) -> None:
        if not self._take(byte):
            raise self._invalid("unexpected character")

    # --- errors -------------------------------------------------------------------------------------------------

    def _invalid(self, what: str) -> BadRequest:
        return self._invalid_at(what if self._at < len(self._document) else "unexpected end of data", self._at)

    def _invalid_at(self, what: str, start: int, end: int | None = None) -> BadRequest:
        return invalid_json(f"{what}: near byte {start}", self._document, start, end)

    def _lone_surrogate(self, piece: bytes) -> BadRequest:
        index = None if self._index is None else self._index + index_in_piece(piece)
        return lone_surrogate(self._field if self._field in self._known_fields else None, index)

    def _not_an_id(self, run: list[Any], num_before: int) -> BadRequest:
        """Of a list, too long for anything but token ids, that goes on with something else."""
        index = next((index for index, value in enumerate(run) if type(value) is not int), None)
        if index is None:
            return BadRequest(f"'{self._field}' has a token id outside any vocabulary", param=self._field)
        return BadRequest(
            f"'{self._field}' has a list of token ids in which number {num_before + index} is not a whole number",
            param=self._field,
        )

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
        name = self._field if self._field in self._known_fields else None
        return BadRequest(
            f"{repr(name) if name else 'other fields and the names of fields'}: what is neither text nor token ids may "
            f"take {self._bounds.max_other_bytes} bytes in all, and takes more",
            param=name,
        )


def _are_ids(values: list[Any]) -> bool:
    return type(values[0]) is int and set(map(type, values)) == {int}


def _as_ids(value: Any) -> Any:
    """A list of whole numbers as an array: a ninth of the memory, and freed at once. Anything else as it is."""
    if type(value) is list and value and _are_ids(value):
        try:
            return array("i", value)
        except OverflowError:
            return value  # too large for the token ids of any model
    return value


def _shorten(ids: "array[int]", max_ids: int) -> int:
    """Remove the ids between the first `max_ids` and the last few, except the least and the greatest. Returns how many.

    Code that uses at most `max_ids` of them, the end of the list, and whether all are in a vocabulary, gets the same
    result as for the whole list; and the list is still too long. More ids can be appended, and it be shortened again.
    """
    dropped = ids[max_ids:-_NUM_LAST_IDS]
    if len(dropped) <= 2:
        return 0
    ids[max_ids:-_NUM_LAST_IDS] = array("i", [min(dropped), max(dropped)])
    return len(dropped) - 2


class _Elements:
    """The elements of a list that is read run by run: an array while all are int32, shortened if long; then a list.

    The cost of a run does not depend on how many came before it.
    """

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self._ids = array("i")
        self._values: list[Any] | None = []
        self.num = 0
        """Elements that were added."""
        self.num_dropped = 0
        self.are_whole_numbers = True

    @property
    def kept(self) -> Any:
        return self._ids if self._values is None else self._values

    def add_ids(self, run: list[Any]) -> bool:
        """Add a run if all elements so far are int32, and return True; otherwise change nothing."""
        if (self._values is not None and self.num) or not _are_ids(run):
            return False
        try:
            new = array("i", run)
        except OverflowError:
            return False
        self._values = None
        self._ids += new
        self.num += len(run)
        self.num_dropped += _shorten(self._ids, self._max_ids)
        return True

    def add_values(self, run: list[Any]) -> int:
        """Add a run of anything. Nothing may have been dropped. Returns the number of elements."""
        if self._values is None:
            self._values = self._ids.tolist()
        self._values += run
        self.num += len(run)
        self.are_whole_numbers = self.are_whole_numbers and _are_ids(run)
        return self.num
