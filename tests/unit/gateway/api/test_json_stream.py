"""Pieces give what the whole gives: compared with orjson on documents, and on documents with bytes changed."""

from array import array
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vecd.gateway.api import large_json as json_pieces
from vecd.gateway.api.large_json import Bounds, FieldNames, PieceReader
from vecd.gateway.errors import BadRequest

UNBOUNDED = 10**9
NAMES = FieldNames(frozenset({"input", "é"}), frozenset({"other", "b"}))


def bounds(**changed: int) -> Bounds:
    limits = {
        "max_items": UNBOUNDED,
        "max_chars": UNBOUNDED,
        "max_ids": UNBOUNDED,
        "window_bytes": 16,
        "max_other_bytes": UNBOUNDED,
    }
    return Bounds(**{**limits, **changed})


def read(document: bytes, **changed: int) -> Any:
    steps = PieceReader(document, NAMES, bounds(**changed)).read_object()
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def plain(value: Any) -> Any:
    """With lists for arrays, and types that tell True from 1 and 1 from 1.0."""
    if isinstance(value, list | array):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return type(value).__name__, value


def outcome(read_document: Callable[[bytes], Any], document: bytes) -> Any:
    try:
        value = read_document(document)
    except (BadRequest, orjson.JSONDecodeError):
        return "refused"
    return value if isinstance(value, dict) else "refused"


def outcome_at_once(document: bytes) -> Any:
    return outcome(orjson.loads, document)


def assert_same(document: bytes, window_bytes: int = 16) -> None:
    in_pieces = outcome(partial(read, window_bytes=window_bytes), document)
    assert plain(in_pieces) == plain(outcome_at_once(document))


texts = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from('"\\,[]{}\n😀漢é')), max_size=40)
numbers = st.one_of(
    st.integers(-(2**63), 2**64 - 1), st.integers(0, 3), st.floats(allow_nan=False, allow_infinity=False)
)
scalars = st.one_of(texts, numbers, st.booleans(), st.none())
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=8), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=12,
)
inputs = st.one_of(
    texts,
    st.lists(texts, max_size=12),
    st.lists(st.integers(0, 40_000), max_size=40),
    st.lists(st.lists(st.integers(0, 40_000), max_size=20), max_size=8),
    st.lists(values, max_size=8),
    values,
)
blanks = st.text(" \t\n\r", max_size=20)


@st.composite
def spaced(draw: st.DrawFn, value: Any) -> str:
    """The value as JSON, with blanks and escapes where they may be."""
    if isinstance(value, list):
        text = "[" + ",".join(draw(spaced(item)) for item in value) + (draw(blanks) if not value else "") + "]"
    elif isinstance(value, dict):
        pairs = [f"{draw(spaced(name))}:{draw(spaced(item))}" for name, item in value.items()]
        text = "{" + ",".join(pairs) + "}"
    elif isinstance(value, str) and draw(st.booleans()):
        text = '"' + "".join(draw(escaped(char)) for char in value) + '"'
    else:
        text = orjson.dumps(value).decode()
    return draw(blanks) + text + draw(blanks) if draw(st.booleans()) else text


@st.composite
def escaped(draw: st.DrawFn, char: str) -> str:
    units = char.encode("utf-16-be").hex()
    escapes = "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
    if draw(st.booleans()):
        return escapes.upper().replace("\\U", "\\u") if draw(st.booleans()) else escapes
    return orjson.dumps(char).decode()[1:-1]


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    names = st.one_of(st.just("input"), st.sampled_from(["é", "model", ""]), texts)
    members = draw(st.lists(st.tuples(names, inputs), max_size=4))
    pairs = [f"{draw(spaced(name))}:{draw(spaced(value))}" for name, value in members]
    return (draw(blanks) + "{" + ",".join(pairs) + "}" + draw(blanks)).encode()


@st.composite
def changed_documents(draw: st.DrawFn) -> bytes:
    document = bytearray(draw(documents()))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(document)))
        end = at + draw(st.integers(0, 3))
        document[at:end] = draw(st.one_of(st.binary(max_size=2), st.sampled_from(PARTS)))
    return bytes(document)


PARTS = [b",", b'"', b"\\", b"[", b"]", b"{", b"}", b":", b" ", b"\x00", b"\x0b", b"\xc3", b"\xa9", b"\xff", b"\\u",
    b"\\ud83d",
         b"\\ude00", b"NaN", b"1e999", b"-", b"0", b"/**/", b"\xed\xa0\x80"]  # fmt: skip


@pytest.mark.slow
@settings(deadline=None, max_examples=2 * settings().max_examples)
@given(documents(), st.integers(12, 64))
def test_a_document_in_pieces_is_the_document(document, window_bytes):
    assert outcome_at_once(document) != "refused"
    assert_same(document, window_bytes)


@pytest.mark.slow
@settings(deadline=None, max_examples=3 * settings().max_examples)
@given(changed_documents(), st.integers(12, 64))
def test_a_changed_document_is_refused_or_taken_as_by_orjson(document, window_bytes):
    assert_same(document, window_bytes)


@given(st.binary(max_size=60))
@example(b"\xef\xbb\xbf{}")
def test_junk(document):
    assert_same(document)
    assert_same(b'{"input":' + document)
    assert_same(b'{"input":[' + document + b"]}")
    assert_same(b'{"input":"' + document + b'"}')


@pytest.mark.parametrize("num_tokens", range(5))
def test_whatever_follows_whatever_is_refused_or_taken_as_by_orjson(num_tokens):
    for tokens in product((b"[", b"]", b"{", b"}", b",", b":", b"1", b'"a"'), repeat=num_tokens):
        value = b" ".join(tokens)
        assert_same(b'{"input":%b}' % value)
        assert_same(b'{"input":[1%b]}' % value)
        assert_same(b'{"a":1%b}' % value)


@pytest.mark.parametrize("depth", [1018, *range(1022, 1027)])
@pytest.mark.parametrize("start", [b'{"input":', b'{"input":[1,', b'{"input":[[1,', b'{"a":'])
def test_nesting_has_the_same_limit(depth, start):
    ends = b"]" * start.count(b"[") + b"}"
    for nested in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth):
        is_refused = {outcome(parse, start + nested + ends) == "refused" for parse in (read, orjson.loads)}
        assert len(is_refused) == 1


@pytest.mark.parametrize(
    "char", ["a", "é", "漢", "😀", "\\n", "\\\\", '\\"', "\\u6f22", "\\ud83d\\ude00", "\\uD83D\\uDE00", "\\\\u12"]
)
def test_long_strings_are_cut_between_characters(char):
    for num_before in range(20):
        document = b'{"input":"%b%b"}' % (b"x" * num_before, char.encode() * 40)
        assert outcome_at_once(document) != "refused"
        assert_same(document)
        assert_same(b'{"input":[%b]}' % document[9:-1])


def test_a_longer_string_is_kept_until_it_is_too_long():
    for length in range(100):
        text = read(orjson.dumps({"input": ["x" * length]}), max_chars=50)["input"][0]
        assert text == "x" * len(text)
        assert len(text) == length if length <= 50 else 50 < len(text) <= 50 + 2 * 16


@pytest.mark.parametrize("rest", [b"\\x", b"\xff", b"\\ud800", b"\n"])
def test_what_is_dropped_of_a_string_has_to_be_valid(rest):
    with pytest.raises(BadRequest):
        read(b'{"input":"%b%b"}' % (b"x" * 200, rest), max_chars=5)


@pytest.mark.parametrize("opening", ["", "["])
@given(st.lists(st.integers(0, 9), max_size=400))
def test_a_longer_list_of_ids_is_as_good_as_the_whole(opening, ids):
    document = f'{{"input":{opening}{ids}{"]" if opening else ""}}}'.encode()
    value = read(document, max_ids=50)["input"]
    kept = list(value[0] if opening else value)
    if len(ids) <= 50 + 16:
        assert kept == ids
    else:
        assert len(kept) <= 50 + 2 + 16 + (8 + 1)
        assert (kept[:50], kept[-16:]) == (ids[:50], ids[-16:])
        assert (min(kept), max(kept)) == (min(ids), max(ids))


def test_ids_come_as_arrays_if_they_can_be_any():
    fields = read(b'{"input":[[1,2],[3.5],[2147483648],[],[true]],"a":[1]}', window_bytes=1000)
    assert fields == {"input": [array("i", [1, 2]), [3.5], [2147483648], [], [True]], "a": [1]}
    assert read(b'{"input":[1,2,3]}')["input"] == array("i", [1, 2, 3])


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (b'{"input":["a","b","c","d"]}', r"'\$.input' is invalid: at least 4 inputs, at most 3 in one request"),
        (b'{"input":[[1],[1],[1],[1],5', "at least 4 inputs, at most 3 "),
        (b'{"input":[1,2,3,"a",', "at least 4 inputs, at most 3 "),
        (b'{"input":[%b no JSON' % (b'{"a":1},' * 500), "at least 4 inputs, at most 3 "),
        (b'{"input":[["x"]%b]}' % (b',["a",1],7, 8,9,"b", [[]]' * 50), "at least 4 inputs, at most 3 "),
        (b'{"input":[["a",' + b'"a",' * 200, r"'input\[0\]' has at least 4 values that are not all token ids"),
        (b'{"input":[[1],[%b7]]}' % (b'"a",' * 200), r"'input\[1\]' has at least 4 values .*, at most 3 in one list"),
        (b'{"other":"%b"}' % (b"x" * 100), "'other': .* 50 bytes"),
        (b'{"other":[%b]}' % (b"1," * 100), "'other': .* 50 bytes"),
        (b'{"a":"%b","b":"%b"}' % (b"x" * 30, b"x" * 30), "'b': .* 50 bytes"),
        (b'{"input":[{"a":"%b"}]}' % (b"x" * 100), "'input': .* 50 bytes"),
        (b'{"s3cret":"%b"}' % (b"x" * 100), "^other fields and the names of fields: .* 50 bytes"),
        (b'{"a":1,"%b":1}' % (b"x" * 100), "the names of fields: .* 50 bytes"),
    ],
)
def test_what_is_too_large_is_refused_and_not_kept(document, says):
    with pytest.raises(BadRequest, match=says):
        read(document, max_items=3, max_ids=20, max_other_bytes=50)


def test_long_strings_in_objects_of_a_large_list_are_texts():
    """Of which there may be megabytes; an object by itself, and all that is not such a string, stay bounded."""
    items = [{"a": "x" * 100}] * 30
    assert read(orjson.dumps({"input": items}), max_other_bytes=400) == {"input": items}
    refused: list[list[dict[str, Any]]] = [[{"a": "x"}] * 50, [{"a": "x" * 400}], [{"x" * 10: {}}] * 30]
    for too_much in refused:
        with pytest.raises(BadRequest, match=r"'input': .* 400 bytes"):
            read(orjson.dumps({"input": too_much}), max_other_bytes=400)
    with pytest.raises(BadRequest, match=r"'other': .* 400 bytes"):
        read(orjson.dumps({"other": items}), max_other_bytes=400)


def test_what_is_wrong_behind_ids_that_were_dropped_is_named_by_its_own_index():
    ids = b",".join([b"7"] * 500)
    with pytest.raises(BadRequest, match="number 500 is not a whole number"):
        read(b'{"input":[%b,"x",%b]}' % (ids, ids), max_items=3, max_ids=20)
    with pytest.raises(BadRequest, match="number 500 is not a whole number"):
        read(b'{"input":[[1],[%b,"x"]]}' % ids, max_items=3, max_ids=20)


def test_an_id_that_fits_no_vocabulary_is_refused_before_many_are_kept():
    """An array cannot hold it, and a list of as many would be looked through again and again."""
    with pytest.raises(BadRequest, match="'input' has a token id outside any vocabulary"):
        read(b'{"input":[4294967296%b]}' % (b",7" * 500), max_items=3, max_ids=20)
    with pytest.raises(BadRequest, match="'input' has a token id outside any vocabulary"):
        read(b'{"input":[[7%b,4294967296]]}' % (b",7" * 500), max_items=3, max_ids=20)
    assert read(b'{"input":[7,4294967296]}', max_items=3, max_ids=20) == {"input": [7, 4294967296]}


def test_what_a_run_of_a_long_list_costs_does_not_grow_with_the_list():
    """Each id is looked at once: counted by what is handed to the check of types, whatever the machine."""
    seen: list[int] = []
    check = json_pieces.are_ids

    def counted(values: list[Any]) -> bool:
        seen.append(len(values))
        return check(values)

    with mock.patch.object(json_pieces, "are_ids", counted):
        for opening in (b"[7", b"[[7", b"[4294967296", b'["x"'):
            seen.clear()
            tail = b"]]" if opening.startswith(b"[[") else b"]"
            read(b'{"input":%b%b%b}' % (opening, b",7" * 5000, tail), max_items=UNBOUNDED)
            assert sum(seen) < 5001 * 3
