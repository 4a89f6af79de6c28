"""Sequences of pairs are those of the library, which transformers and sentence-transformers call."""

import asyncio
from collections.abc import Callable
from unittest import mock

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from tests.support import tiny_tokenizers
from tests.support.tokenizing import WORDS, ids_of, library_calls, texts_of, tokenize
from vecd.gateway.errors import BadRequest, InputTooLong
from vecd.gateway.request import Overflow, Pair, TokenizedInput, Tokenizing
from vecd.gateway.tokenization import text_tokens
from vecd.gateway.tokenization.tokenizer import Tokenizer

KINDS = {**tiny_tokenizers.KINDS, "document first": tiny_tokenizers.document_first}
texts = texts_of([*WORDS, "Hello", "[SEP]", "<mask>", "</s>", " ", "!"])


@pytest.fixture(params=KINDS)
def library(request) -> tokenizers.Tokenizer:
    return KINDS[request.param]()


@pytest.fixture
def make(card_of, make_tokenizer) -> Callable[..., Tokenizer]:
    return lambda library, max_tokens=64, **options: make_tokenizer(card_of(library), max_tokens, **options)


def types(item: TokenizedInput) -> list[int]:
    border = item.border or item.num_tokens
    return [0] * border + [1] * (item.num_tokens - border)


def assert_as_library(library: tokenizers.Tokenizer, pair: Pair, item: TokenizedInput, num_all: int) -> None:
    encoding = library.encode(*pair)
    assert ids_of(item) == encoding.ids
    assert item.num_tokens == len(encoding)
    assert item.is_truncated == (num_all > len(encoding))
    if encoding.type_ids[:1] != [1]:
        assert types(item) == encoding.type_ids


@pytest.mark.parametrize("max_tokens", [5, *(pytest.param(num, marks=pytest.mark.full) for num in (8, 16)), 9, 64])
def test_a_pair_is_what_the_library_makes_of_it(library, make, max_tokens):
    whole = tokenizers.Tokenizer.from_str(library.to_str())
    ours = make(library, max_tokens)
    library.enable_truncation(max_tokens)

    @settings(max_examples=15)
    @given(texts, st.lists(texts, min_size=1, max_size=4))
    @example("a", [""])
    @example("", ["a b"])
    @example("a " * 30, ["a " * 29, "a " * 30, "a " * 31, "a"])
    @example("a " * 3, ["a " * 1000])
    def check(query: str, documents: list[str]) -> None:
        pairs = [Pair(query, document) for document in documents if query or document]
        if not pairs or (not library.num_special_tokens_to_add(True) and not all(len(whole.encode(*p)) for p in pairs)):
            return
        for pair, item in zip(pairs, tokenize(ours, pairs), strict=True):
            assert_as_library(library, pair, item, len(whole.encode(*pair)))

    check()


@pytest.mark.parametrize("max_tokens", [6, pytest.param(9, marks=pytest.mark.full), 16])
@pytest.mark.parametrize("piece_chars", [40, text_tokens.PIECE_CHARS])
def test_a_pair_cut_on_the_left_keeps_both_ends(library, make, max_tokens, piece_chars):
    sizes = {"PIECE_CHARS": piece_chars, "LEAST_PIECE_CHARS": 5, "CHARS_PER_EXPECTED_TOKEN": 2}
    ours = make(library, max_tokens)
    whole = tokenizers.Tokenizer.from_str(library.to_str())
    library.enable_truncation(max_tokens, direction="left")
    how = Tokenizing(overflow=Overflow.TRUNCATE_LEFT)
    with mock.patch.multiple(text_tokens, **sizes):
        nums = (1, 4, 7, 20)
        pairs = [Pair("a fox, " * query, "b dog. " * document) for query in nums for document in (*nums, 50)]
        for pair, item in zip(pairs, tokenize(ours, pairs, how), strict=True):
            assert_as_library(library, pair, item, len(whole.encode(*pair)))


def test_each_query_is_tokenized_once(make):
    """Though the pairs are several runs."""
    ours, query = make(tiny_tokenizers.bert(), 64), "the lazy query " * 150
    with library_calls(ours) as calls:
        tokenize(ours, [Pair(query, f"document {n} " * 20) for n in range(200)])
    assert len(calls) > 3
    assert [text for call in calls for text in call.args[0]].count(query) == 1


def test_long_queries_are_not_tokenized_all_at_once(make):
    """All tokens of the queries of a run are kept, because `longest_first` counts them."""
    ours = make(tiny_tokenizers.bert(), 64)
    long = [f"the quick brown fox {n} " * 1000 for n in range(4)]

    async def lengths(pairs: list[Pair]) -> list[int]:
        return [len(run) async for run in ours.tokenize(pairs)]

    assert asyncio.run(lengths([Pair(query, "a") for query in long])) == [1, 1, 1, 1]
    assert asyncio.run(lengths([Pair(long[0], "a")] * 40)) == [1, 39]


def test_of_a_long_document_only_the_beginning_is_tokenized(make):
    ours = make(tiny_tokenizers.bert(), 64)
    with library_calls(ours) as calls:
        [item] = tokenize(ours, [Pair("a fox", "b " * 500_000)])
    assert (item.num_tokens, item.is_truncated) == (64, True)
    assert sum(len(text) for call in calls for text in call.args[0]) < 2000


@pytest.mark.parametrize("kind", ["bert", "document first"])
def test_limits_of_the_texts_apply_before_the_sequence_s(kind, make):
    library = KINDS[kind]()
    ours = make(library, 32)
    pair = Pair("a b c d e", "f g h i j k l")
    for how, query, document in [
        (Tokenizing(max_document_tokens=3), "a b c d e", "f g h"),
        (Tokenizing(max_query_tokens=2), "a b", "f g h i j k l"),
        (Tokenizing(max_query_tokens=2, max_document_tokens=1), "a b", "f"),
        (Tokenizing(max_query_tokens=2, max_document_tokens=4, max_tokens=8), "a b", "f g h"),
        (Tokenizing(max_document_tokens=3, overflow=Overflow.ERROR), "a b c d e", "f g h"),
        (Tokenizing(max_document_tokens=3, overflow=Overflow.TRUNCATE_LEFT, max_tokens=10), "b c d e", "j k l"),
    ]:
        [item] = tokenize(ours, [pair], how)
        assert ids_of(item) == library.encode(query, document).ids
        assert item.is_truncated
    [item] = tokenize(ours, [pair], Tokenizing(max_query_tokens=5, max_document_tokens=7))
    assert not item.is_truncated
    long = Pair("a", "b " * 2000 + "c d")
    [item] = tokenize(ours, [long], Tokenizing(max_document_tokens=2, overflow=Overflow.TRUNCATE_LEFT))
    assert ids_of(item) == library.encode("a", "c d").ids


@pytest.mark.parametrize("kind", ["bert", "document first"])
def test_a_pair_that_may_not_be_cut_is_refused_by_its_index(kind, make):
    ours, how = make(KINDS[kind](), 16), Tokenizing(overflow=Overflow.ERROR)
    pairs = [Pair("a", "b"), Pair("a", "b " * 12), Pair("a", "b " * 13)]
    with pytest.raises(InputTooLong, match=r"is 16 tokens, however you requested 17 tokens.* the pair of 'input\[2\]'"):
        tokenize(ours, pairs, how)
    assert [item.num_tokens for item in tokenize(ours, pairs[:2], how)] == [5, 16]


@pytest.mark.parametrize("kind", ["bert", "document first"])
def test_texts_beyond_all_reading_are_cut_or_refused(kind, make):
    ours = make(KINDS[kind](), 8)
    blanks = " " * (ours.max_chars + 1)
    for pair in (Pair("a", "b" + blanks), Pair("a" + blanks, "b")):
        [item] = tokenize(ours, [pair])
        assert (item.num_tokens, item.is_truncated) == (5, True)
        for overflow in (Overflow.ERROR, Overflow.TRUNCATE_LEFT):
            with pytest.raises(BadRequest, match=r"pair of 'input\[0\]' has a text of more than"):
                tokenize(ours, [pair], Tokenizing(overflow=overflow))
    [item] = tokenize(ours, [Pair("a", "b c " + blanks)], Tokenizing(overflow=Overflow.ERROR, max_document_tokens=1))
    assert (item.num_tokens, item.is_truncated) == (5, True)


def test_a_template_that_has_a_text_twice_makes_no_pairs(make):
    library = tiny_tokenizers.bert()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    for pair in ("[CLS] $A [SEP] $B:1 [SEP] $A", "$A $A $B", "$A:1 [SEP] $B", "$A $B [SEP] $B"):
        library.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair=pair, special_tokens=special
        )
        ours = make(library)
        assert tokenize(ours, ["a"]) == tokenize(make(tiny_tokenizers.bert()), ["a"])
        with pytest.raises(BadRequest, match="more than special tokens around two texts"):
            tokenize(ours, [Pair("a", "b")])


def test_limits_that_leave_no_room_are_refused(make):
    ours = make(tiny_tokenizers.bert(), 64)
    with pytest.raises(BadRequest, match="at least 4 tokens, 3 special tokens among them; the limit is 3"):
        tokenize(ours, [Pair("a", "b")], Tokenizing(max_tokens=3))
    [item] = tokenize(ours, [Pair("a", "b")], Tokenizing(max_tokens=4))
    assert item.num_tokens == 4


def test_chunks_are_not_for_pairs(make):
    ours = make(tiny_tokenizers.bert(), 16)
    pair = Pair("a", "b " * 100)
    assert tokenize(ours, [pair], Tokenizing(overflow=Overflow.CHUNK)) == tokenize(ours, [pair])


def test_a_pair_without_tokens_is_refused_by_its_index(make):
    with pytest.raises(BadRequest, match=r"pair of 'input\[1\]' has no tokens"):
        tokenize(make(tiny_tokenizers.qwen(), 16), [Pair("a", ""), Pair("", "")])


def test_special_tokens_in_texts_are_characters_where_they_are_to_be(make):
    library = tiny_tokenizers.bert()
    literal = tokenizers.Tokenizer.from_str(library.to_str())
    literal.encode_special_tokens = True
    pair = Pair("a [SEP] b", "c [CLS]")
    [as_special] = tokenize(make(library, 64), [pair])
    [as_text] = tokenize(make(library, 64, literal_special_tokens=True), [pair])
    assert ids_of(as_special) == library.encode(*pair).ids
    assert ids_of(as_text) == literal.encode(*pair).ids != ids_of(as_special)


def test_without_special_tokens_a_pair_is_its_texts_and_a_prompt_is_put_before_the_query(make):
    library = tiny_tokenizers.bert()
    [item] = tokenize(make(library, 64), [Pair("a", "b")], Tokenizing(prompt="fox: "))
    assert ids_of(item) == library.encode("fox: a", "b").ids
    [item] = tokenize(make(library, 64), [Pair("a b", "c")], Tokenizing(add_special_tokens=False))
    assert ids_of(item) == library.encode("a b", "c", add_special_tokens=False).ids
    assert item.border == 2


def test_estimates_count_the_query_with_every_document(make):
    ours = make(tiny_tokenizers.bert(), 64)
    one = ours.estimate_tokens([Pair("a" * 30, "b" * 60)])
    assert one == 32
    assert ours.estimate_tokens([Pair("a" * 30, "b" * 60)] * 10) == 10 * one
    assert ours.estimate_tokens([Pair("a" * 30, "b" * 60_000)]) == 64
    limits = Tokenizing(max_query_tokens=5, max_document_tokens=10)
    assert ours.estimate_tokens([Pair("a" * 30, "b" * 60_000)], limits) == 5 + 10 + 2
