"""The tokens of remembered words are those of the library."""

import re
from array import array
from collections.abc import Sequence

import pytest
import tokenizers

from vecd.gateway.tokenization.split_points import cut_pattern
from vecd.gateway.tokenization.text_tokens import KnownWords

TEXTS = (
    "",
    " ",
    "the quick brown fox jumps over the lazy dog",
    "Hello, world!  It's 1234.5 o'clock;\ttokenization e\u0301te\u0301 [SEP] x",
    "\u4e2d\u6587\uff0c\u6f22\u5b57\u3002 the fox, the dog",
    "a-word-of-many-parts " + "x" * 30 + " y",
)


class Library:
    """Counts the texts that are tokenized."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokenizer, self.seen = tokenizer, list[str]()

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        self.seen += texts
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


@pytest.fixture(scope="module")
def tokenizer(minilm_folder):
    tokenizer = tokenizers.Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def make(tokenizer: tokenizers.Tokenizer) -> tuple[KnownWords, Library]:
    cuts, library = cut_pattern(tokenizer), Library(tokenizer)
    assert cuts is not None
    return KnownWords(cuts, library.ids), library


def ids_of(words: KnownWords, text: str) -> list[int]:
    found = words.find(text)
    return words.learn(text) if found is None else array("i", found).tolist()


def test_the_tokens_are_the_library_s_however_much_is_known(tokenizer):
    words, library = make(tokenizer)
    expected = [ids for [ids] in map(library.ids, ([text] for text in TEXTS))]
    for _ in range(40):
        assert [ids_of(words, text) for text in TEXTS] == expected


def test_known_words_need_no_library(tokenizer):
    words, library = make(tokenizer)
    for _ in range(5):
        ids_of(words, "the quick brown fox")
    library.seen.clear()
    assert (
        ids_of(words, "the brown fox quick fox")
        == library.tokenizer.encode("the brown fox quick fox", add_special_tokens=False).ids
    )
    assert library.seen == []


def test_one_new_word_is_learned_from_a_text(tokenizer):
    words, library = make(tokenizer)
    ids_of(words, "one two three four")
    assert library.seen == ["one two three four", "one"]
    assert words.find("one") == array("i", library.ids(["one"])[0]).tobytes()
    assert words.find(" two") is None


def test_a_long_word_is_not_remembered(tokenizer):
    words, library = make(tokenizer)
    for _ in range(3):
        ids_of(words, "x" * 25)
    assert library.seen == ["x" * 25] * 3


def test_so_many_are_remembered_and_no_more():
    words = KnownWords(re.compile(" "), lambda texts: [[len(text)] for text in texts], max_words=3)
    for number in range(20):
        assert ids_of(words, f"w{number}") == [len(f"w{number}")]
        assert sum(words.find(f"w{each}") is not None for each in range(20)) <= 3
