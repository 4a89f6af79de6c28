"""Parts of texts that can be cut nowhere: they have a limit, and where the rest is cut off, the library's tokens."""

import json
import random
from collections.abc import Callable
from unittest import mock

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from tests.support import tiny_tokenizers, tokenizing
from tests.support.described import Collected
from tests.support.tokenizing import ids_of
from vecd.gateway.errors import BadRequest
from vecd.gateway.request import Overflow, Pair, TokenizedInput, Tokenizing
from vecd.gateway.tokenization import split_points, text_tokens
from vecd.gateway.tokenization.split_points import LongParts
from vecd.gateway.tokenization.text_tokens import exhaust
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.card import read_card

KINDS = {kind: tiny_tokenizers.KINDS[kind] for kind in ("roberta", "xlm_roberta", "qwen")}
_random = random.Random(5)
LETTERS = {
    "one letter": "x" * 80_000,
    "words": "".join(_random.choices(["quick", "brown", "fox", "hello", "world"], k=20_000)),
    "base64": "".join(_random.choices("ABCDEFGHIJabcdefghij0123456789+/", k=80_000)),
    "digits": "1234567" * 12_000,
}
CHUNK = Overflow.CHUNK
EMOJI = "😀" * 70_000
LIMIT = "characters that can be cut nowhere, at most 65536 are allowed"


@pytest.fixture(scope="module", params=KINDS)
def library(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return KINDS[request.param]()


@pytest.fixture
def make(card_of, make_tokenizer) -> Callable[..., Tokenizer]:
    return lambda library, max_tokens=300, **changes: make_tokenizer(card_of(library, **changes), max_tokens)


def tokenize(tokenizer: Tokenizer, item: str | Pair, **how: object) -> TokenizedInput:
    [tokenized] = tokenizing.tokenize(tokenizer, [item], Tokenizing()._replace(**how))  # type: ignore[arg-type]
    return tokenized


def truncated(
    library: tokenizers.Tokenizer, max_tokens: int, text: str, pair: str | None = None, direction: str = "right"
) -> list[int]:
    library.enable_truncation(max_tokens, direction=direction)
    ids: list[int] = library.encode(text, pair).ids
    library.no_truncation()
    return ids


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "letters"), [("", "words"), *(("hello world, ", name) for name in ("one letter", "base64", "digits"))]
)
def test_where_the_rest_is_cut_off_only_the_beginning_is_tokenized(library, make, before, letters):
    text = before + LETTERS[letters]
    ours = make(library, prompt="query: ")
    longest = 0
    cut_steps = ours.texts.long_parts.cut_steps

    def spy(part: str, num: int):
        nonlocal longest
        place = yield from cut_steps(part, num)
        longest = max(longest, place)
        return place

    with mock.patch.object(ours.texts.long_parts, "cut_steps", spy):
        item = tokenize(ours, text, wants_offsets=True)
    assert ids_of(item) == truncated(library, 300, "query: " + text)
    assert item.is_truncated
    assert 0 < longest <= 2 * split_points.LEAST_CHARS
    own = library.encode("query: " + text, add_special_tokens=False).offsets[:290]
    assert item.offsets is not None
    found = [pair for pair in item.offsets.tolist() if pair != [-1, -1]]
    expected = [[max(0, start - 7), stop - 7] for start, stop in own if stop > 7]
    assert found[: len(expected)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "gemma"])
def test_places_are_right_for_any_letters(kind):
    """With small sizes, so that borders are everywhere."""
    library = tiny_tokenizers.KINDS[kind]()
    blank = " the lazy dog" if kind == "gemma" else "x"
    parts = st.lists(
        st.sampled_from(["quick", "fox", "a", "b", "7", "é", "中", "，", "。?", "😀", "'re", "Ab", blank]), min_size=30
    ).map("".join)
    num_found = 0
    cutter = LongParts(library, has_cuts=kind != "gemma")

    @settings(max_examples=50)
    @given(st.one_of(parts, st.text("abxyz01", min_size=70, max_size=200)), st.integers(1, 30))
    def check(part: str, num: int) -> None:
        nonlocal num_found
        with mock.patch.multiple(split_points, LEAST_CHARS=30):
            place = exhaust(cutter.cut_steps(part, num))
        if place:
            num_found += 1
            ids = [library.encode(text, add_special_tokens=False).ids for text in (part[:place], part)]
            assert ids[0][:num] == ids[1][:num]
            assert min(map(len, ids)) > num

    check()
    assert num_found > 3  # 12 to 21 of 50 for the kind that has the fewest


def test_a_part_whose_beginning_depends_on_its_end_is_not_cut():
    """The one letter that is left of an odd number of them is the first token."""
    library = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -2.0), ("aa", -3.0)], unk_id=0))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    odd, even = (library.encode("a" * num).tokens[:3] for num in (20_001, 20_000))
    assert (odd, even) == (["▁", "a", "aa"], ["▁", "aa", "aa"])
    cutter = LongParts(library, has_cuts=True)
    for num in (20_001, 20_000):
        assert exhaust(cutter.cut_steps("a" * num, 3)) == 0


@pytest.mark.parametrize("how", [{"overflow": Overflow.ERROR}, {"overflow": Overflow.CHUNK}, {"wants_offsets": True}])
def test_a_part_that_is_too_long_is_refused_where_all_of_it_is_needed(make, how):
    ours = make(tiny_tokenizers.xlm_roberta(), 4000)
    text = LETTERS["one letter"] if "overflow" in how else EMOJI
    with pytest.raises(BadRequest, match=f"{len(text)} {LIMIT}") as error:
        tokenize(ours, text, **how)
    assert error.value.param == "input"
    with pytest.raises(BadRequest, match=LIMIT):
        list(ours.api.describe_steps([text], "", True, Collected()))
    if how.get("overflow") is not Overflow.ERROR:
        tokenize(ours, text[:65_000] + "x " + text[:65_000], **how)


def test_a_character_counts_as_many_as_it_becomes(make):
    ours = make(tiny_tokenizers.xlm_roberta())
    with pytest.raises(BadRequest, match=f"{250_000 * 18} {LIMIT}"):
        tokenize(ours, "\ufdfa" * 250_000)


def test_a_part_that_is_cut_off_may_be_as_long_as_it_likes(make):
    library = tiny_tokenizers.roberta()
    few = "hello world, the quick brown fox " * 2
    assert ids_of(tokenize(make(library, 30), few + EMOJI)) == truncated(library, 30, few + EMOJI)
    ours, left = make(library, 100), {"overflow": Overflow.TRUNCATE_LEFT}
    for text in (EMOJI + " the quick brown fox" * 20, "the fox " * 600 + "x" * 65_000):
        assert ids_of(tokenize(ours, text, **left)) == truncated(library, 100, text, direction="left")
    assert ids_of(tokenize(ours, Pair("fox?", LETTERS["words"]))) == truncated(library, 100, "fox?", LETTERS["words"])
    refused: list[tuple[str | Pair, dict[str, Overflow]]] = [
        (few + EMOJI, left), (few + EMOJI, {}), (Pair("fox?", EMOJI), {}), (Pair(EMOJI, "fox"), {}),
    ]  # fmt: skip
    for item, how in refused:
        with pytest.raises(BadRequest, match=LIMIT):
            tokenize(ours, item, **how)


def test_the_limit_of_word_pieces_and_of_texts_without_split_points(minilm_folder, make_tokenizer, make):
    ours = make_tokenizer(read_card(minilm_folder), 512)
    assert ids_of(tokenize(ours, "\ufdfa" * 250_000)) == [101, 100, 102]
    with pytest.raises(BadRequest, match="262145 characters that can be cut nowhere, at most 262144"):
        tokenize(ours, "x" * 262_145)
    gemma = make(tiny_tokenizers.gemma(), 400)
    assert tokenize(gemma, "a b " * 60_000).num_tokens == 400
    for text, how in ((EMOJI * 4, {}), (EMOJI * 4, {"wants_offsets": True}), ("a b " * 70_000, {"overflow": CHUNK})):
        with pytest.raises(BadRequest, match="280000 characters that can be cut nowhere, at most 262144"):
            tokenize(gemma, text, **how)


def test_the_beginning_of_prose_whose_blanks_are_letters(make):
    library = tiny_tokenizers.gemma()
    ours = make(library, 400, prompt="query: ")
    for text, wants_offsets in (("hello world, the quick brown fox jumps. " * 7000, True), ("x" * 300_000, False)):
        item = tokenize(ours, text, wants_offsets=wants_offsets)
        assert ids_of(item) == truncated(library, 400, "query: " + text)
        assert item.is_truncated


def test_the_beginning_of_chinese_prose(make):
    """It has marks, which end no word of unigrams, and words of the model are longer than its sentences."""
    described = json.loads(tiny_tokenizers.xlm_roberta().to_str())
    described["model"]["vocab"].append(["internationally", -20.0])
    library = tokenizers.Tokenizer.from_str(json.dumps(described))
    text = "\uff0c".join("".join(_random.choices("中文漢字日本語", k=9)) for _ in range(8000))
    assert ids_of(tokenize(make(library), text)) == truncated(library, 300, text)


def test_offsets_are_converted_in_steps(minilm_folder, make_tokenizer):
    """Each conversion holds the GIL."""
    ours = make_tokenizer(read_card(minilm_folder), 512)
    sizes = []
    plain = text_tokens.shifted

    def spy(offsets: list[tuple[int, int]], shift: int) -> object:
        sizes.append(len(offsets))
        return plain(offsets, shift)

    with mock.patch.object(text_tokens, "shifted", spy):
        tokenize(ours, "…" * 20_000, wants_offsets=True)
        assert sizes == [8192]
        sizes.clear()
        tokenize(ours, "…" * 20_000, wants_offsets=True, overflow=Overflow.CHUNK)
        assert sizes == [8192, 8192, 20_000 - 2 * 8192]
