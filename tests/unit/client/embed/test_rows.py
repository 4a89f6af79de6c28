import gzip
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecd.client.embed.inputs import InputSource, check_readable, check_unchanged, find_inputs, read_batches
from vecd.client.embed.options import EmbedError, EmbedOptions
from vecd.client.embed.parquet import open_parquet
from vecd.client.embed.rows import InputRow, Position, ThroughputEstimate, split_lines


def make_options(*keep: str, **fields: Any) -> EmbedOptions:
    return EmbedOptions(files=[], out=Path("v.jsonl"), keep=keep, max_row_bytes=1000, **fields)


ESTIMATE = ThroughputEstimate(1)
"""Of nothing: every limit on rows is less than its first request."""


def reader_of(data: bytes, rng: random.Random) -> Callable[[int], bytes]:
    """Gives what there is in pieces of any length, as a pipe does."""
    place = 0

    def read(num_bytes: int) -> bytes:
        nonlocal place
        piece = data[place : place + rng.randint(1, min(num_bytes, 9))]
        place += len(piece)
        return piece

    return read


@given(st.binary(max_size=60).map(lambda data: data.replace(b"a", b"\n")), st.integers(0, 12), st.randoms())
def test_lines_are_cut_as_split_does_and_know_where_they_end(data: bytes, max_bytes: int, rng: random.Random) -> None:
    expected = data.split(b"\n")
    if not expected[-1]:
        expected.pop()
    at = Position()
    lines = split_lines(reader_of(data, rng), max_bytes, at)
    offset = 0
    for number, line in enumerate(expected, 1):
        kept = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        assert next(lines) == (kept if len(line) <= max_bytes else None)
        offset = min(offset + len(line) + 1, len(data))
        assert (at.line, at.offset) == (number, offset)
    assert next(lines, "end") == "end"


def items_of(path: Path, *keep: str, **fields: Any) -> list[InputRow]:
    inputs, options = find_inputs([str(path)], None), make_options(*keep, **fields)
    check_readable(inputs, options)
    return [row for batch in read_batches(inputs, options, Position(), ESTIMATE) for row in batch.rows]


def write(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def test_every_line_of_a_text_file_is_a_row(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", b"\xef\xbb\xbfone\r\n\n \t\nbad \xff\ntwo\x00\x85three\n" + b"x" * 1001 + b"\nlast")
    assert items_of(path) == [
        InputRow(1, ("one",)),
        InputRow(2, (), "the line is empty"),
        InputRow(3, (), "the line is empty"),
        InputRow(4, (), "not UTF-8: byte 4 of the line"),
        InputRow(5, (), "not UTF-8: byte 4 of the line"),
        InputRow(6, (), "the line is too long (--max-row-bytes)"),
        InputRow(7, ("last",)),
    ]


def test_json_lines(tmp_path: Path) -> None:
    content = (
        '{"id": 7, "text": "one"}\n\n"two"\n{"id": [1], "body": "x"}\n{"text": 3}\n{"text": null}\n'
        '{"text": " "}\n{"text": "cut\n[1]\n{"text": "\\ud800"}\n{"text": "a\\nb", "id": "z"}'
    )
    path = write(tmp_path, "a.jsonl", content)
    items = items_of(path, "id")
    assert [(item.line, *(item.texts or [None]), item.kept) for item in items] == [
        (1, "one", (7,)),
        (3, "two", ()),
        (4, None, ([1],)),
        (5, None, (None,)),
        (6, None, (None,)),
        (7, None, (None,)),
        (8, None, ()),
        (9, None, ()),
        (10, None, ()),
        (11, "a\nb", ("z",)),
    ]
    reasons = [item.reason for item in items]
    assert reasons[2:6] == ['no field "text"', '"text" is a number, not a text', '"text" is null, not a text',
                            '"text" is empty']  # fmt: skip
    assert reasons[6].startswith("not JSON: ")
    assert reasons[7] == "the line is a list, not a text"
    assert not any("cut" in reason for reason in reasons)


def test_csv(tmp_path: Path) -> None:
    content = 'id,text,n\n1,one,x\n\n2,"two\nlines, ""quoted""",y\n\xff,short\n4,,z\n5,\xff,w\n\xff,six,last'
    path = write(tmp_path, "a.csv", content.encode("latin-1"))
    assert items_of(path, "id") == [
        InputRow(2, ("one",), "", ("1",)),
        InputRow(4, ('two\nlines, "quoted"',), "", ("2",)),
        InputRow(6, (), "2 fields, the header has 3", (None,)),  # what is not UTF-8 is not kept
        InputRow(7, (), '"text" is empty', ("4",)),
        InputRow(8, (), '"text" is not UTF-8', ("5",)),
        InputRow(9, ("six",), "", (None,)),
    ]


def test_a_quote_that_is_never_closed_takes_no_more_than_a_row(tmp_path: Path) -> None:
    content = "text\nfirst\n" + '"open\n' + "more\n" * 300 + "last\n"
    items = items_of(write(tmp_path, "a.csv", content))
    assert items[0].texts == ("first",)
    assert "never closed" in items[1].reason
    assert items[-1].texts == ("last",)


def test_a_quote_that_is_open_at_the_end_is_no_text(tmp_path: Path) -> None:
    """Nor are the rows that it has swallowed."""
    items = items_of(write(tmp_path, "a.csv", 'text,id\nfirst,1\n"open,2\nthird,3\n'), "id")
    assert items == [InputRow(2, ("first",), "", ("1",)), InputRow(3, (), "not CSV: a quote is never closed", (None,))]


def test_pairs(tmp_path: Path) -> None:
    lines = ['{"text": "a", "b": "c"}', '{"text": "a"}', '{"text": "a", "b": ""}', '{"text": "", "b": "c"}', '"one"']
    rows = items_of(write(tmp_path, "a.jsonl", "\n".join(lines)), pair_with="b")
    object_ = "the line is no object with the two texts of a pair"
    assert [(row.texts, row.reason) for row in rows] == [
        (("a", "c"), ""), ((), 'no field "b"'), ((), '"b" is empty'), ((), '"text" is empty'), ((), object_)
    ]  # fmt: skip
    [row] = items_of(write(tmp_path, "a.tsv.gz", "text\tb\none, two\t1\n"), pair_with="b")
    assert row == InputRow(2, ("one, two", "1"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "id;text\n1;one\n", "its header has no field 'text', it has: id;text"),
        ("a.doc", "x", "no format has this suffix"),
        ("a.txt", b"\xff\xfeh\0i\0", "is UTF-16, make it UTF-8"),
        ("a.jsonl", '\n{"body": "one"}\n{"Text": "two"}\n', "no row has a field 'text' .* line 2: no field \"text\""),
        ("a.ndjson", "one\ntwo\n", "no row has a field 'text' .* line 1: not JSON"),
    ],
)
def test_inputs_that_are_refused(tmp_path: Path, name: str, content: bytes | str, message: str) -> None:
    with pytest.raises(EmbedError, match=rf"{name}: {message}"):
        items_of(write(tmp_path, name, content))


def test_inputs_that_are_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(EmbedError, match=r"folder\.txt: is a folder, name the files in it"):
        items_of(tmp_path / "folder.txt")
    (tmp_path / "a.txt.gz").write_text("one\n")
    with pytest.raises(EmbedError, match="cannot be read: Not a gzipped file"):
        items_of(tmp_path / "a.txt.gz")
    with pytest.raises(EmbedError, match="--pair-with names a field, and lines of text have none"):
        items_of(write(tmp_path, "a.txt", "one\n"), pair_with="second")
    pyarrow.parquet.write_table(pyarrow.table({"text": [["one"], None]}), tmp_path / "a.parquet")
    with pytest.raises(EmbedError, match=r"its column 'text' holds list<.*>, not texts"):
        items_of(tmp_path / "a.parquet")


@pytest.mark.parametrize("keep", [20, 40, -5])
def test_a_gzip_file_that_is_cut_off_is_an_error(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path, "a.txt.gz", "".join(f"line {n}\n" for n in range(100)))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(EmbedError, match="cannot be read"):
        items_of(path)


def test_inputs_that_do_not_go_together(tmp_path: Path) -> None:
    path = str(write(tmp_path, "a.txt", "x"))
    with pytest.raises(EmbedError, match="only one"):
        find_inputs([path, "-"], None)
    with pytest.raises(EmbedError, match="twice"):
        find_inputs(["-", "-"], None)


def test_a_file_that_is_written_to_meanwhile_is_found_out(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "x\n")
    inputs = find_inputs([str(path)], None)
    check_unchanged(inputs)
    path.write_bytes(b"x\ny\n")
    with pytest.raises(EmbedError, match="has been changed"):
        check_unchanged(inputs)


FILES = {
    "a.txt": "one\n\ntwo\r\nthree",
    "b.jsonl": '{"text": "four"}\n\n"five"\nbroken\n',
    "c.csv": 'id,text\n1,six\n2,"sev\nen"\n\n3,eight\n',
    "d.txt.gz": "nine\nten\n",
    "e.csv.gz": "text\neleven\ntwelve",
}


@pytest.mark.parametrize("max_texts", [1, 2, 3, 100])
def test_reading_goes_on_at_the_end_of_any_batch(tmp_path: Path, max_texts: int) -> None:
    inputs = find_inputs([str(write(tmp_path, name, content)) for name, content in FILES.items()], None)
    options = make_options(batch_texts=max_texts, batch_chars=1000)
    batches = list(read_batches(inputs, options, Position(), ESTIMATE))
    rows = [row for batch in batches for row in batch.rows]
    numbers = [batch.first_row + index for batch in batches for index in range(len(batch.rows))]
    assert numbers == list(range(len(rows)))
    assert len(rows) == 14
    num_bytes = [batch.end.num_bytes for batch in batches]
    assert num_bytes == sorted(num_bytes)
    assert num_bytes[-1] == sum(each.num_bytes for each in inputs)
    for batch in batches:
        rest = [row for later in read_batches(inputs, options, batch.end, ESTIMATE) for row in later.rows]
        assert rest == rows[batch.end.row :]


def test_a_batch_ends_with_the_row_that_fills_it(tmp_path: Path) -> None:
    inputs = find_inputs([str(write(tmp_path, "a.txt", "12345\n12345\n1\n1\n"))], None)
    batches = read_batches(inputs, make_options(batch_texts=3, batch_chars=10), Position(), ESTIMATE)
    assert [len(batch.rows) for batch in batches] == [2, 2]


def test_a_batch_is_as_large_as_the_estimate_says_when_it_is_read(tmp_path: Path) -> None:
    inputs = find_inputs([str(write(tmp_path, "a.txt", ("x" * 500 + "\n") * 40))], None)
    estimate = ThroughputEstimate(None)
    batches = read_batches(inputs, make_options(), Position(), estimate)
    small = next(batches)
    assert small.cost >= estimate.max_request_cost > small.cost - estimate.cost("x" * 500)
    estimate.end(small.cost, 100 * estimate.begin(small.cost), 1.0)
    large = next(batches)
    assert large.cost >= estimate.max_request_cost > large.cost - estimate.cost("x" * 500)
    assert len(large.rows) > len(small.rows)


def test_a_stream_is_known_by_its_first_rows(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "one\ntwo\nthree\nfour\n")
    stream = InputSource(str(path), "txt", is_stream=True, is_gzip=False)
    options = make_options(batch_texts=2)
    first, second = read_batches([stream], options, Position(), ESTIMATE)
    assert list(read_batches([stream], options, first.end, ESTIMATE)) == [second]
    path.write_text("one\nother\nthree\nfour\n")
    with pytest.raises(EmbedError, match="first 2 rows are not those"):
        list(read_batches([stream], options, first.end, ESTIMATE))


def read_parquet(path: Path, offset: int) -> list[tuple[int, str | None, tuple[object, ...]]]:
    at = Position(offset=offset, line=offset)
    with open_parquet(str(path), make_options("id"), at) as (rows, num_rows):
        found = [(row.line, *(row.texts or [None]), row.kept) for row in rows]
    assert at.offset == at.line == num_rows
    return found


@pytest.mark.slow
@pytest.mark.parametrize("group_rows", [1, 2000, 5000])
def test_reading_parquet_goes_on_behind_any_row(tmp_path: Path, group_rows: int) -> None:
    path = tmp_path / "a.parquet"
    texts = [None if n % 7 == 3 else f"text {n}" for n in range(3000)]
    pyarrow.parquet.write_table(pyarrow.table({"id": range(3000), "text": texts}), path, row_group_size=group_rows)
    rows = [(n + 1, text, (n,)) for n, text in enumerate(texts)]
    for offset in (0, 1, 1023, 1024, 1999, 2000, 2001, 3000):
        assert read_parquet(path, offset) == rows[offset:]
