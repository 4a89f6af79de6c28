"""Offsets of tokens are the library's for the whole text, also where the text is tokenized in pieces."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings

from tests.support import tiny_tokenizers
from tests.support.tokenizing import texts_of
from vecd.gateway.request import Overflow, Role, TokenizedInput, Tokenizing
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.steps import TokenHead

KINDS = tiny_tokenizers.KINDS
WORDS = ["a", "Fox", "1234.5", "中文", "NAÏVE", "İx", "😀", "ﬁ", "e\u0301", "[SEP]", "<mask>", "\n", ","]
texts = texts_of(WORDS, min_size=1)
WANTED = Tokenizing(wants_offsets=True)


@pytest.fixture
def make(card_of, make_tokenizer) -> Callable[..., Tokenizer]:
    return lambda library, max_tokens=16, **changes: make_tokenizer(card_of(library, **changes), max_tokens)


def tokenize(tokenizer: Tokenizer, text: str, how: Tokenizing = WANTED) -> TokenizedInput:
    async def main() -> list[TokenizedInput]:
        return [item async for run in tokenizer.tokenize([text], how) for item in run]

    [item] = asyncio.run(main())
    [plain] = list(tokenizer.tokenize_now([text], how._replace(wants_offsets=False)) or [item])
    assert item[:6] == plain[:6]
    assert not how.wants_offsets or plain is item or plain.offsets is None
    return item


def rows(item: TokenizedInput) -> list[tuple[int, int]]:
    assert item.offsets is not None
    assert item.offsets.dtype == np.int32
    assert item.offsets.shape == (item.num_tokens, 2)
    return [(start, end) for start, end in item.offsets.tolist()]


def expected_rows(library: tokenizers.Tokenizer, text: str) -> list[tuple[int, int]]:
    encoding = library.encode(text)
    own = library.encode(text, add_special_tokens=False)
    num_before = next((n for n, seq in enumerate(encoding.sequence_ids) if seq == 0), 0)
    num_behind = len(encoding) - len(own) - num_before
    return [(-1, -1)] * num_before + [*own.offsets] + [(-1, -1)] * num_behind


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_the_library_s(kind, make):
    library = KINDS[kind]()
    ours = make(library, 3000)
    short = make(library, 12)
    num_special = library.num_special_tokens_to_add(False)

    @settings(max_examples=40)
    @given(texts)
    @example(" ".join(WORDS) * 10)
    def check(text: str) -> None:
        if not library.encode(text).ids:
            return
        expected = expected_rows(library, text)
        assert rows(tokenize(ours, text)) == expected
        found = rows(tokenize(short, text))
        if len(expected) > 12:
            num_behind = 0 if expected[-1] != (-1, -1) or not num_special else 1
            assert found == expected[: 12 - num_behind] + [(-1, -1)] * num_behind
        else:
            assert found == expected

    check()


def test_offsets_are_characters_of_the_text_as_sent(make):
    text = "😀 İstanbul, NAÏVE 😀fox"
    for lowercase in (False, True):
        item = tokenize(make(tiny_tokenizers.bert(), 64, lowercase=lowercase), text)
        found = rows(item)
        assert found[0] == found[-1] == (-1, -1)
        words = [text[start:end] for start, end in found[1:-1]]
        assert "".join(words) == text.replace(" ", "")


def test_tokens_of_a_prompt_are_nowhere(make):
    library = tiny_tokenizers.bert()
    item = tokenize(make(library, 64), "fox jumps", WANTED._replace(prompt="query: "))
    num_prompt = len(library.encode("query: ", add_special_tokens=False))
    alone = expected_rows(library, "fox jumps")
    assert rows(item) == [(-1, -1)] * num_prompt + alone


def test_a_token_that_joins_prompt_and_text_begins_at_0(make):
    item = tokenize(make(tiny_tokenizers.roberta(), 64), "fox", WANTED._replace(prompt="do"))
    found = rows(item)
    assert next(start for start, _ in found[1:-1] if start >= 0) == 0
    assert found[-2][1] == 3


def test_offsets_of_the_end_and_of_chunks(make):
    library = tiny_tokenizers.bert()
    ours = make(library, 16)
    text = " ".join(f"{chr(97 + n % 26)}" for n in range(40))
    own = [(2 * n, 2 * n + 1) for n in range(40)]
    none = [(-1, -1)]
    assert rows(tokenize(ours, text, WANTED._replace(overflow=Overflow.TRUNCATE_LEFT))) == none + own[-14:] + none
    item = tokenize(ours, text, WANTED._replace(overflow=Overflow.CHUNK))
    assert [chunk.weight for chunk in item.chunks] == [14, 14, 12]
    parts = [none + own[start : start + 14] + none for start in (0, 14, 28)]
    assert rows(item) == parts[0] + parts[1] + parts[2]


def test_markers_and_expansions_are_nowhere(make):
    head = TokenHead((), query_marker=100, query_tokens=8, expansion_id=4)
    ours = make(tiny_tokenizers.bert(), 16, tokens=head)
    how = WANTED._replace(role=Role.QUERY)
    assert rows(tokenize(ours, "a b", how)) == [(-1, -1)] * 2 + [(0, 1), (2, 3)] + [(-1, -1)] * 4
    assert rows(tokenize(ours, "a " * 20, how)) == [(-1, -1)] * 2 + [(2 * n, 2 * n + 1) for n in range(5)] + [(-1, -1)]
