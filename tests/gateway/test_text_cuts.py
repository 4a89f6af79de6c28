"""Pieces of a text have the tokens of the text: compared with the library on whole texts, for every kind of tokenizer
that vecd cuts for, and for those that it must not."""

import asyncio
import io
import os
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as spm
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers

from gateway import text_cuts
from gateway import tokenizer as tokenizer_module
from gateway.text_cuts import cut_pattern
from gateway.tokenizer import Tokenizer
from shm.card import read_card

IS_LONG = bool(os.environ.get("VECD_SOAK"))
NUM_EXAMPLES = 2000 if IS_LONG else 40
pytestmark = pytest.mark.timeout(3600 if IS_LONG else 240)
LLAMA = text_cuts._LLAMA
CORPUS = [
    "Hello world, the quick brown fox jumps over the lazy dog. It's 1234.5 o'clock; isn't it?",
    "中文漢字，日本語のテキスト、한국어 텍스트! привет мир? naïve café ½ ＡＢＣ foo bar foo-bar",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7 8 9 [ ] < > ( ) / + = . , ! ? ' \" \n \t",
]


def trained(model: Any, trainer: Any, normalizer: Any, pre_tokenizer: Any) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def wordpiece(normalizer: Any = None, pre_tokenizer: Any = None) -> tokenizers.Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer = trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        normalizer or normalizers.BertNormalizer(),
        pre_tokenizer or pre_tokenizers.BertPreTokenizer(),
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def byte_pairs(normalizer: Any = None, pre_tokenizer: Any = None) -> tokenizers.Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>", "<mask>"], initial_alphabet=alphabet, show_progress=False
    )
    pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = trained(models.BPE(), trainer, normalizer, pre_tokenizer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return tokenizer


@cache
def charsmap() -> bytes:
    """sentencepiece's NFKC, as its model files have it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20), model_writer=model, vocab_size=120, hard_vocab_limit=False, minloglevel=2
    )
    proto = spm.ModelProto.FromString(model.getvalue())  # type: ignore[attr-defined]
    return bytes(proto.normalizer_spec.precompiled_charsmap)


def unigram(normalizer: Any = None, pre_tokenizer: Any = None) -> tokenizers.Tokenizer:
    """As XLM-R's and T5's are converted."""
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>")
    pre_tokenizer = pre_tokenizer or pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer = trained(models.Unigram(), trainer, normalizer or normalizers.Precompiled(charsmap()), pre_tokenizer)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


def with_added(tokenizer: tokenizers.Tokenizer, *tokens: AddedToken) -> tokenizers.Tokenizer:
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def first(*stages: Any) -> Any:
    return normalizers.Sequence(list(stages))


def split(pattern: Any, behavior: str = "isolated") -> Any:
    return pre_tokenizers.Split(pattern, behavior)


def byte_level(*stages: Any) -> Any:
    return pre_tokenizers.Sequence([*stages, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


CUT: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "WordPiece": wordpiece,
    "WordPiece, cased": lambda: wordpiece(normalizers.BertNormalizer(lowercase=False)),
    "WordPiece, lowercased first": lambda: wordpiece(first(normalizers.Lowercase(), normalizers.BertNormalizer())),
    "WordPiece, ideographs in words": lambda: wordpiece(normalizers.BertNormalizer(handle_chinese_chars=False)),
    "WordPiece, NFKC": lambda: wordpiece(first(normalizers.NFKC(), normalizers.StripAccents())),
    "WordPiece, words added": lambda: with_added(
        wordpiece(),
        AddedToken("foo-bar", normalized=True),
        AddedToken("(x)", normalized=False, lstrip=True),
        AddedToken("É!", normalized=True),
    ),
    "WordPiece, added words with blanks": lambda: with_added(
        wordpiece(), AddedToken("foo bar", normalized=True), AddedToken("中文", normalized=False)
    ),
    "WordPiece, mask that takes blanks": lambda: with_added(wordpiece(), AddedToken("[X]", lstrip=True)),
    "WordPiece behind blanks": lambda: wordpiece(
        normalizers.BertNormalizer(handle_chinese_chars=False), pre_tokenizers.WhitespaceSplit()
    ),
    "byte pairs": byte_pairs,
    "byte pairs, NFC": lambda: byte_pairs(normalizers.NFC()),
    "byte pairs, a space first": lambda: byte_pairs(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "byte pairs, Llama's pattern": lambda: byte_pairs(pre_tokenizer=byte_level(split(Regex(LLAMA)))),
    "byte pairs, digits, GPT-2's": lambda: byte_pairs(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    "byte pairs, added blanks": lambda: with_added(
        byte_pairs(),
        *(AddedToken(" " * n, normalized=True) for n in (2, 3, 4)),
        AddedToken("\n\n", normalized=False),
        AddedToken("w!x", normalized=True),
        AddedToken("<m>", lstrip=True),
    ),
    "byte pairs, an added word with a blank": lambda: with_added(byte_pairs(), AddedToken("o w", normalized=False)),
    "unigram": unigram,
    "unigram, Metaspace alone": lambda: unigram(pre_tokenizer=pre_tokenizers.Metaspace()),
    "unigram, Metaspace at the first": lambda: unigram(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")),
    "unigram, Metaspace nowhere": lambda: unigram(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never")),
    "unigram, blanks in a row": lambda: unigram(
        first(normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Lowercase())
    ),
    "unigram, spaces replaced": lambda: unigram(
        normalizers.Replace(" ", "▁"), pre_tokenizers.Metaspace(prepend_scheme="first")
    ),
    "byte pairs, spaces replaced before they are looked for": lambda: byte_pairs(
        normalizers.Replace(" ", "▁"), split(Regex(LLAMA))
    ),
}

UNCUT: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "nothing cuts": lambda: byte_pairs(pre_tokenizer=pre_tokenizers.ByteLevel(use_regex=False)),
    "Metaspace that does not split": lambda: unigram(pre_tokenizer=pre_tokenizers.Metaspace(split=False)),
    "blanks stripped at the start": lambda: unigram(first(normalizers.Strip(), normalizers.NFKC())),
    "something put first": lambda: unigram(normalizers.Prepend("▁")),
    "a pattern of its own": lambda: byte_pairs(pre_tokenizer=byte_level(split(Regex(r"\w+ \w+|\s|\S")))),
    "a pattern that is removed": lambda: byte_pairs(pre_tokenizer=byte_level(split(Regex(LLAMA), "removed"))),
    "words replaced": lambda: wordpiece(first(normalizers.Replace("a b", "c"), normalizers.BertNormalizer())),
    "a letter replaced by a blank": lambda: unigram(normalizers.Replace("x", " ")),
    "an added word that takes what is behind": lambda: with_added(wordpiece(), AddedToken("[X]", rstrip=True)),
    "an added word by itself": lambda: with_added(wordpiece(), AddedToken("foo", single_word=True)),
    "dropout": lambda: with_dropout(byte_pairs()),
    "marks apart from their letters": lambda: byte_pairs(normalizers.NFD()),
}


def with_dropout(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.model.dropout = 0.5
    return tokenizer


PARTS = [
    *("hello", "world", "isn't", "o w", "Foo", "bar", "É", "e\u0301", "1234", "½", "ﬁ", "ς", "İ", "x" * 30),
    *("中", "文字", "ひら", "한국", "ไทย", "हिन्दी", "שלום", "привет", "😀", "👨\u200d👩", "🇩🇪", "▁", "Ġ"),
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u3000", "\u2028", "\u200d", "\u00ad", "\x00", "\ufffd"),
    *("!", ",", "...", "，", "。", "-", "=", "'s", "'", "\u0301", "\u0338", "\u0600"),
    *("(x)", "[SEP]", "[MASK]", "<mask>", "<m>", "</s>", "[X]", "foo-bar", "foo bar", "w!x", "É!", "中文"),
]
texts = st.lists(
    st.one_of(st.sampled_from(PARTS), st.text(st.characters(exclude_categories=["Cs"]), max_size=4)), max_size=30
).map("".join)


@pytest.fixture(scope="module", params=[*CUT, "the bundled model's"])
def library(request: pytest.FixtureRequest, minilm_folder: Path) -> tokenizers.Tokenizer:
    if request.param in CUT:
        return CUT[request.param]()
    return tokenizers.Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))


def plain_ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    return list(library.encode(text, add_special_tokens=False).ids)


def test_pieces_have_the_tokens_of_the_whole(library):
    library.no_padding()
    library.no_truncation()
    pattern = cut_pattern(library)
    assert pattern is not None

    @settings(deadline=None, max_examples=NUM_EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
    @given(texts)
    @example(" ".join(PARTS))
    @example("hello=\u0338")
    def check(text: str) -> None:
        whole = plain_ids(library, text)
        cuts = [match.start() for match in pattern.finditer(text)]
        for cut in cuts:
            assert plain_ids(library, text[:cut]) + plain_ids(library, text[cut:]) == whole
        bounds = [0, *cuts, len(text)]
        pieces = [text[start:end] for start, end in pairwise(bounds)]
        assert [token_id for piece in pieces for token_id in plain_ids(library, piece)] == whole

    check()


@pytest.fixture(scope="module")
def small_pieces() -> Iterator[None]:
    with mock.patch.multiple(
        tokenizer_module, _PIECE_CHARS=40, _LEAST_PIECE_CHARS=5, _SEARCH_CHARS=20, _CHARS_PER_EXPECTED_TOKEN=2
    ):
        yield


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("max_tokens", "prompt"), [(3, "query: "), (8, ""), (30, "query: ")])
def test_truncated_texts_are_what_the_library_truncates(library, minilm_folder, tmp_path, max_tokens, prompt):
    library.no_padding()
    library.no_truncation()
    library.save(str(tmp_path / "tokenizer.json"))
    card = replace(read_card(minilm_folder), tokenizer_file=str(tmp_path / "tokenizer.json"), prompt=prompt)
    ours = Tokenizer(card, max_tokens, "auto")
    assert ours._cuts is not None
    truncating = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    truncating.enable_truncation(max_tokens)

    @settings(deadline=None, max_examples=max(15, NUM_EXAMPLES // 4), suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(texts, min_size=1, max_size=4))
    def check(given_texts: list[str]) -> None:
        run = tokenizer_module._exhaust(ours._take_run(given_texts, range(len(given_texts))))
        for text, item in zip(given_texts, run, strict=True):
            seen = text[: ours.max_chars]
            assert np.frombuffer(item.token_ids, "<i4").tolist() == truncating.encode(prompt + seen).ids
            num_all = len(library.encode(prompt + seen).ids)
            assert (item.num_tokens, item.is_truncated) == (
                min(num_all, max_tokens),
                num_all > max_tokens or seen != text,
            )

    try:
        check()
    finally:
        ours.threads.close()


@pytest.mark.parametrize("name", UNCUT)
def test_where_no_cut_is_known_there_is_none(name):
    assert cut_pattern(UNCUT[name]()) is None


@pytest.mark.parametrize(
    ("name", "before", "never"),
    [
        ("WordPiece", " \n!，中", "a"),
        ("WordPiece, ideographs in words", " \n!，", "中a"),
        ("WordPiece, words added", " ,(中", "-)!a"),
        ("WordPiece, added words with blanks", "!,", " \t中a"),
        ("byte pairs", " ,。", "\n中a-"),
        ("byte pairs, a space first", " ", ",。\n"),
        ("byte pairs, added blanks", " ,", "!\n"),
        ("byte pairs, an added word with a blank", ",", " "),
        ("byte pairs, spaces replaced before they are looked for", ",。", " "),
        ("unigram", " \n", ",。中"),
        ("unigram, Metaspace alone", " ", "\n,"),
    ],
)
def test_it_is_cut_before(name, before, never):
    pattern = cut_pattern(CUT[name]())
    assert pattern is not None
    assert [char for char in before if not pattern.search(f"a{char}b", 1, 2)] == []
    assert [char for char in never if pattern.search(f"a{char}b", 1, 2)] == []


def test_a_tokenizer_that_is_not_what_it_seems_is_not_cut(monkeypatch):
    """The probes find out: here, that a mark does not end a word."""
    monkeypatch.setattr(text_cuts, "_cut_before", lambda stages: {" ", "\n", ","})
    assert cut_pattern(unigram()) is None


def test_letters_and_digits_are_that_and_nothing_more():
    for char in map(chr, range(0x110000)):
        if re.match(f"[{text_cuts._WORD}]", char):
            assert unicodedata.category(char)[0] in "LN"
            assert not unicodedata.combining(char)


def test_no_character_that_is_cut_before_becomes_another_with_what_is_behind_it():
    """Then it might no longer be what a tokenizer cuts at."""
    decomposed = (unicodedata.decomposition(char).split() for char in map(chr, range(0x110000)))
    firsts = {chr(int(parts[0], 16)) for parts in decomposed if len(parts) == 2 and not parts[0].startswith("<")}
    assert {"<", "=", ">", "e"} <= firsts
    assert not firsts.intersection(text_cuts._SPACES + text_cuts._MARKS + text_cuts._ASCII_PUNCTUATION)
    assert not [char for char in firsts if re.match(f"[{text_cuts._IDEOGRAPHS}]", char)]


def test_of_a_long_text_no_more_is_tokenized_than_it_takes(minilm_folder):
    tokenizer = Tokenizer(read_card(minilm_folder), 256, "auto")
    seen: list[int] = []
    plain = tokenizer._plain_ids

    def counted(texts: list[str]) -> list[list[int]]:
        seen.extend(map(len, texts))
        return plain(texts)

    async def tokenize(text: str) -> list[Any]:
        return [item async for run in tokenizer.tokenize([text]) for item in run]

    try:
        with mock.patch.object(tokenizer, "_plain_ids", counted):
            for text in ("漢字" * 30_000, "the quick brown fox " * 3000, "?!" * 30_000, "word, " * 10_000):
                seen.clear()
                [item] = asyncio.run(tokenize(text))
                assert (item.num_tokens, item.is_truncated) == (256, True)
                assert sum(seen) <= 256 * 8
    finally:
        tokenizer.threads.close()
