"""Late chunks: every token of the text is in one chunk, or in each that the client's ranges say; none is too long."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support import tiny_tokenizers
from tests.support.tokenizing import texts_of
from vecd.gateway.errors import BadRequest
from vecd.gateway.request import LateChunking, Overflow, TokenizedInput, Tokenizing
from vecd.gateway.tokenization.late_chunks import LateChunks, find_chunks
from vecd.gateway.tokenization.tokenizer import Tokenizer

KINDS = tiny_tokenizers.KINDS
WORDS = ["a", "Fox.", "1234.5", "中文。", "NAÏVE!", "İx", "😀", "ﬁ", "e\u0301", "\ufdfa", "[SEP]", "\n", ",", 'said."']
texts = texts_of(WORDS, min_size=1)
checked = settings(max_examples=60, suppress_health_check=list(HealthCheck))
WHOLE = Tokenizing(wants_offsets=True, overflow=Overflow.ERROR)
CUT = WHOLE._replace(overflow=Overflow.TRUNCATE)


@pytest.fixture
def make(card_of, make_tokenizer) -> Callable[..., Tokenizer]:
    return lambda library, max_tokens=3000: make_tokenizer(card_of(library), max_tokens)


def tokenized(tokenizer: Tokenizer, text: str, how: Tokenizing) -> TokenizedInput:
    items = tokenizer.tokenize_now([text], how)
    assert items is not None
    return items[0]


def chunks_of(
    tokenizer: Tokenizer, text: str, late: LateChunking, how: Tokenizing = WHOLE
) -> tuple[LateChunks, TokenizedInput]:
    item = tokenized(tokenizer, text, how)
    num_prefix, _ = tokenizer.num_added(np.frombuffer(item.token_ids, "<i4").tolist())
    return find_chunks(text, item, late, 0, num_prefix), item


def parts(tokenizer: Tokenizer, text: str, max_tokens: int, how: Tokenizing = WHOLE) -> list[str]:
    chunks, _ = chunks_of(tokenizer, text, LateChunking(max_tokens=max_tokens), how)
    return [text[start:end] for start, end in chunks.ranges.tolist()]


def positions(text: str, item: TokenizedInput) -> list[int]:
    """By token of the text: the place of its last character; of one behind the text, the last one."""
    assert item.offsets is not None
    found: list[int] = []
    for start, end in item.offsets.tolist():
        if start >= 0:
            found.append(max(min(start, len(text) - 1), end - 1, *found[-1:]))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_by_tokens_have_all_of_the_text_once(kind, make):
    tokenizer = make(KINDS[kind]())

    @checked
    @given(texts, st.integers(1, 12))
    @example(" ".join(WORDS) * 10, 7)
    @example("a  ", 1)
    @example("\x00 \x00  ", 1)
    def check(text: str, max_tokens: int) -> None:
        if not positions(text, tokenized(tokenizer, text, WHOLE)):
            with pytest.raises(BadRequest, match="has no tokens"):
                chunks_of(tokenizer, text, LateChunking(max_tokens=max_tokens))
            return
        chunks, item = chunks_of(tokenizer, text, LateChunking(max_tokens=max_tokens))
        ranges, rows = chunks.ranges.tolist(), chunks.rows.tolist()
        assert (ranges[0][0], ranges[-1][1]) == (0, len(text))
        assert (rows[0][0], rows[-1][1]) == (0, item.num_tokens)
        for one, next_one in ((ranges, ranges[1:]), (rows, rows[1:])):
            assert all(left[1] == right[0] for left, right in zip(one, next_one, strict=False))
            assert all(start < end for start, end in one)
        assert not chunks.is_truncated.any()
        places = np.array(positions(text, item))
        for start, end in ranges:
            own = places[(places >= start) & (places < end)]
            assert len(own) > 0
            if len(own) > max_tokens:  # there is no place between two characters' tokens
                assert item.offsets is not None
                starts = np.minimum(item.offsets[item.offsets[:, 0] >= 0, 0], len(text) - 1)
                inner = np.flatnonzero((places >= start) & (places < end))[1:]
                assert all(starts[token] <= places[token - 1] for token in inner)
        again, _ = chunks_of(tokenizer, text, LateChunking(([tuple(pair) for pair in ranges],)))
        assert np.array_equal(again.rows, chunks.rows)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_has_the_tokens_that_end_in_it(kind, make):
    tokenizer = make(KINDS[kind]())

    @checked
    @given(st.data(), texts)
    def check(data: st.DataObject, text: str) -> None:
        start = data.draw(st.integers(0, len(text) - 1))
        end = data.draw(st.integers(start + 1, len(text)))
        places = np.array(positions(text, tokenized(tokenizer, text, WHOLE)))
        if not ((places >= start) & (places < end)).any():
            with pytest.raises(BadRequest, match="has no token"):
                chunks_of(tokenizer, text, LateChunking(([(start, end)],)))
            return
        chunks, item = chunks_of(tokenizer, text, LateChunking(([(start, end)],)))
        assert item.offsets is not None
        of_text = np.flatnonzero(item.offsets[:, 0] >= 0)
        expected = of_text[(places >= start) & (places < end)].tolist()
        first, stop = chunks.rows[0].tolist()
        special = set(range(of_text[0])) if expected[0] == of_text[0] else set()
        special |= set(range(of_text[-1] + 1, item.num_tokens)) if expected[-1] == of_text[-1] else set()
        assert set(range(first, stop)) == {*expected, *special}

    check()


@pytest.mark.parametrize(
    ("text", "max_tokens", "expected"),
    [
        ("a b c d. e f g h i", 8, ["a b c d. ", "e f g h i"]),
        ("a b c d e f g h i", 8, ["a b c d e f g h ", "i"]),
        ("a b.\nc d e f g h", 5, ["a b.\n", "c d e f g ", "h"]),
        ("a b c 1.5 d e f", 7, ["a b c 1.5 d ", "e f"]),
        ("a b c\nd e f g h", 4, ["a b c\n", "d e f g ", "h"]),
        ("a. b c d e f g h", 6, ["a. b c d e ", "f g h"]),
        ("a b c.] d e f", 6, ["a b c.] ", "d e f"]),
        ("a b c", 3, ["a b c"]),
        ("  a b  ", 1, ["  a ", "b  "]),
        ("中文漢字。日本語の。中文", 6, ["中文漢字。", "日本語の。", "中文"]),
    ],
)
def test_chunks_end_with_sentences_in_their_second_half_or_with_words(make, text, max_tokens, expected):
    assert parts(make(tiny_tokenizers.bert()), text, max_tokens) == expected


def test_tokens_of_a_prompt_belong_to_no_chunk(make):
    tokenizer = make(tiny_tokenizers.bert())
    how = WHOLE._replace(prompt="fox: ")
    chunks, item = chunks_of(tokenizer, "a b c d", LateChunking(max_tokens=2), how)
    num_prompt = item.num_tokens - 2 - 4
    assert num_prompt >= 2
    assert chunks.prompt == (1, 1 + num_prompt)
    assert chunks.rows.tolist() == [[0, 3 + num_prompt], [3 + num_prompt, item.num_tokens]]
    chunks, item = chunks_of(tokenizer, "a b", LateChunking(max_tokens=9), WHOLE._replace(add_special_tokens=False))
    assert (chunks.prompt, chunks.rows.tolist()) == ((0, 0), [[0, 2]])


def test_what_is_cut_off_is_said(make):
    tokenizer = make(tiny_tokenizers.bert(), 6)
    text = "a b c d e f  "
    ranges = [(0, 4), (6, 9), (8, 10), (9, 12)]
    chunks, item = chunks_of(tokenizer, text, LateChunking((ranges,)), CUT)
    assert item.is_truncated
    assert chunks.rows.tolist() == [[0, 3], [4, 6], [0, 0], [0, 0]]
    assert chunks.is_truncated.tolist() == [False, True, True, True]
    chunks, _ = chunks_of(tokenizer, text, LateChunking(max_tokens=3), CUT)
    assert chunks.ranges.tolist() == [[0, 6], [6, 7]]
    assert chunks.is_truncated.tolist() == [False, True]
    item = tokenized(tokenizer, text, CUT)
    chunks = find_chunks(text, item, LateChunking(([(0, 99), (90, 99)],)), 0, 1, is_whole=False)
    assert chunks.rows.tolist() == [[0, 6], [0, 0]]
    assert chunks.is_truncated.tolist() == [True, True]
    chunks, _ = chunks_of(tokenizer, "a b c d  ", LateChunking(([(0, 9)],)), CUT)
    assert not chunks.is_truncated.any()


@pytest.mark.parametrize(
    ("text", "late", "says"),
    [
        ("", LateChunking(max_tokens=3), "'input[0]' has no tokens of its own"),
        (" ", LateChunking(([(0, 1)],)), "'input[0]' has no tokens of its own"),
        ("a b", LateChunking(([(0, 3), (1, 4)],)), "range 1 of 'input[0]', [1, 4], ends behind the text, which has 3"),
        ("a b", LateChunking(([(0, 3), (1, 2)],)), "range 1 of 'input[0]', [1, 2], has no token"),
        ("a b", LateChunking(([(0, 1), (1, 2), (2, 3)],), are_inputs=True), "'input[1]' has no token of its own"),
    ],
)
def test_a_chunk_without_tokens_is_refused(make, text, late, says):
    with pytest.raises(BadRequest) as caught:
        chunks_of(make(tiny_tokenizers.bert()), text, late)
    assert says in caught.value.message
