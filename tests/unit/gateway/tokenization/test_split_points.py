"""Pieces of a text have the tokens of the text: compared with the library on whole texts, for every kind of tokenizer
that vecd cuts for, and for those that it must not."""

import io
import os
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as spm
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers

from tests.support import tiny_tokenizers
from tests.support.described import Collected
from tests.support.tokenizing import library_calls, tokenize
from vecd.gateway.errors import BadRequest, InputTooLong
from vecd.gateway.request import ALL, Overflow, TokenizedInput, Tokenizing
from vecd.gateway.tokenization import split_points as text_cuts
from vecd.gateway.tokenization.split_points import cut_pattern
from vecd.gateway.tokenization.text_tokens import exhaust
from vecd.gateway.tokenization.tokenizer import Tokenizer
from vecd.model.card import read_card

IS_LONG = bool(os.environ.get("VECD_SOAK"))
NUM_EXAMPLES = 2000 if IS_LONG else 40
pytestmark = pytest.mark.timeout(3600 if IS_LONG else 240)
LLAMA = text_cuts.LLAMA


def wordpiece(normalizer: Any = None, pre_tokenizer: Any = None) -> tokenizers.Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer = tiny_tokenizers.trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        normalizer or normalizers.BertNormalizer(),
        pre_tokenizer or pre_tokenizers.BertPreTokenizer(),
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def byte_pairs(normalizer: Any = None, pre_tokenizer: Any = None) -> tokenizers.Tokenizer:
    pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tiny_tokenizers.byte_pairs(["<s>", "</s>", "<mask>"], pre_tokenizer, normalizer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return tokenizer


@cache
def charsmap() -> bytes:
    """sentencepiece's NFKC, as its model files have it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(tiny_tokenizers.CORPUS * 20),
        model_writer=model,
        vocab_size=120,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    proto = spm.ModelProto.FromString(model.getvalue())  # type: ignore[attr-defined]
    return bytes(proto.normalizer_spec.precompiled_charsmap)


def unigram(normalizer: Any = None, pre_tokenizer: Any = None) -> tokenizers.Tokenizer:
    """As XLM-R's and T5's are converted."""
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>")
    pre_tokenizer = pre_tokenizer or pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    normalizer = normalizer or normalizers.Precompiled(charsmap())
    tokenizer = tiny_tokenizers.trained(models.Unigram(), trainer, normalizer, pre_tokenizer)
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


@pytest.mark.slow
def test_pieces_have_the_tokens_of_the_whole(library):
    library.no_padding()
    library.no_truncation()
    pattern = cut_pattern(library)
    assert pattern is not None

    @settings(max_examples=NUM_EXAMPLES)
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


FRAMELESS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "WordPiece, no frame": lambda: without_frame(wordpiece()),
    "byte pairs, no frame": lambda: without_frame(byte_pairs()),
    "unigram, no frame": lambda: without_frame(unigram()),
    "byte pairs, end only": lambda: with_template(byte_pairs(), "$A </s>"),
    "unigram, beginning only": lambda: with_template(unigram(), "<s> $A"),
    "two on each side": lambda: with_template(byte_pairs(), "<s> </s> $A </s> <s>"),
}


def without_frame(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.post_processor = None
    return tokenizer


def with_template(tokenizer: tokenizers.Tokenizer, template: str) -> tokenizers.Tokenizer:
    special = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


NOT_COMPARED = {"dropout", "a pattern that is removed"}
"""Tokens by chance; no tokens of words at all."""
KINDS = {**CUT, **{name: make for name, make in UNCUT.items() if name not in NOT_COMPARED}, **FRAMELESS}
DESCRIBED = list(KINDS)[1::4]
"""Of each family some."""
USUAL = {"WordPiece", "byte pairs, added blanks", "unigram", "nothing cuts", "unigram, no frame", "two on each side"}
"""The others are for a long run."""


@dataclass(frozen=True)
class Slow:
    """The plain way: the library's tokens of the whole text, and lists."""

    library: tokenizers.Tokenizer
    prefix: list[int]
    suffix: list[int]

    @classmethod
    def of(cls, library: tokenizers.Tokenizer) -> "Slow":
        library.no_padding()
        library.no_truncation()
        framed, own = library.encode("ab").ids, plain_ids(library, "ab")
        [start] = [k for k in range(len(framed)) if framed[k : k + len(own)] == own]
        return cls(library, framed[:start], framed[start + len(own) :])

    def num_tokens(self, text: str, how: Tokenizing) -> int:
        num_special = len(self.prefix) + len(self.suffix) if how.add_special_tokens else 0
        return num_special + len(plain_ids(self.library, (how.prompt or "") + text))

    def sequences(self, text: str, how: Tokenizing, most: int) -> list[list[int]] | int:
        """Token ids of each sequence; or how many tokens there are, if that is an error."""
        prefix, suffix = (self.prefix, self.suffix) if how.add_special_tokens else ([], [])
        room = min(most, how.max_tokens) - len(prefix) - len(suffix)
        prompt = how.prompt or ""
        own = plain_ids(self.library, prompt + text)
        if len(own) <= room:
            return [[*prefix, *own, *suffix]]
        if how.overflow is Overflow.ERROR:
            return self.num_tokens(text, how)
        if how.overflow is Overflow.TRUNCATE:
            return [[*prefix, *own[:room], *suffix]]
        before: list[int] = []
        for ours, theirs in zip(plain_ids(self.library, prompt), own, strict=False):
            if ours != theirs:
                break
            before.append(ours)
        rest, size = own[len(before) :], room - len(before)
        if how.overflow is Overflow.TRUNCATE_LEFT:
            return [[*prefix, *before, *rest[-size:], *suffix]]
        parts = [rest[start : start + size] for start in range(0, len(rest), size)]
        return [[*prefix, *before, *part, *suffix] for part in parts]


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(name, marks=() if name in USUAL else pytest.mark.full) for name in KINDS),
        "the bundled model's",
    ],
)
def kind(request: pytest.FixtureRequest, minilm_folder: Path) -> tokenizers.Tokenizer:
    if request.param in KINDS:
        return KINDS[request.param]()
    return tokenizers.Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))


def outcome(ours: Tokenizer, given_texts: list[str], how: Tokenizing) -> list[TokenizedInput] | BadRequest:
    try:
        tokenized: list[TokenizedInput] = exhaust(ours.take_run(given_texts, range(len(given_texts)), how))
    except BadRequest as error:
        return error
    return tokenized


def id_lists(item: TokenizedInput) -> list[list[int]]:
    return [np.frombuffer(part.token_ids, "<i4").tolist() for part in item.chunks or (item,)]


@pytest.mark.slow
@pytest.mark.usefixtures("small_pieces")
def test_what_is_too_long_becomes_what_was_asked_for(kind, card_of, make_tokenizer):
    slow = Slow.of(kind)
    with mock.patch("vecd.gateway.tokenization.tokenizer.MANY_TOKENS", 25):
        ours = make_tokenizer(card_of(kind, prompt=""), 24)

    @settings(max_examples=NUM_EXAMPLES)
    @given(
        st.lists(texts, min_size=1, max_size=3),
        st.builds(
            Tokenizing,
            prompt=st.sampled_from([None, "", "q: ", "é"]),
            overflow=st.sampled_from(Overflow),
            max_tokens=st.sampled_from([ALL, 22, 23, 24, 100]),
            add_special_tokens=st.booleans(),
            num_queries=st.just(0),  # hypothesis would choose one, too
        ),
    )
    @example(["jumps over the lazy dog and is quick " * 5], Tokenizing(prompt="the ", overflow=Overflow.CHUNK))
    @example([" ".join(PARTS), "short"], Tokenizing(prompt="q: ", overflow=Overflow.TRUNCATE_LEFT))
    @example(["jumps over the lazy dog and is quick " * 5], Tokenizing(prompt="the ", overflow=Overflow.TRUNCATE_LEFT))
    def check(given_texts: list[str], how: Tokenizing) -> None:
        expected = [slow.sequences(text, how, 24) for text in given_texts]
        run = outcome(ours, given_texts, how)
        if isinstance(run, InputTooLong):
            num_tokens = next(num for num in expected if isinstance(num, int))
            most = min(24, how.max_tokens)
            assert f"length is {most} tokens, however you requested {num_tokens} tokens" in run.message
            assert run.param == "input"
            return
        if isinstance(run, BadRequest):
            is_empty = "has no tokens" in run.message
            assert [[]] in expected if is_empty else "The prompt has" in run.message and how.prompt
            return
        assert [id_lists(item) for item in run] == expected
        for text, item, sequences in zip(given_texts, run, expected, strict=True):
            assert not isinstance(sequences, int)
            assert item.num_tokens == sum(map(len, sequences))
            is_cut = not item.chunks and slow.num_tokens(text, how) > item.num_tokens
            assert item.is_truncated == is_cut
            frame = len(slow.prefix) + len(slow.suffix) if how.add_special_tokens else 0
            if item.chunks:
                assert [chunk.num_tokens for chunk in item.chunks] == [len(ids) for ids in sequences]
                common = item.chunks[0].num_tokens - item.chunks[0].weight
                assert all(chunk.num_tokens - chunk.weight == common >= frame for chunk in item.chunks)

    check()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", DESCRIBED, indirect=True)
def test_described_tokens_are_the_library_s(kind, card_of, make_tokenizer):
    """Ids, words of the vocabulary, and offsets, of a text tokenized whole."""
    slow, ours = Slow.of(kind), make_tokenizer(card_of(kind, prompt="not this one"), 24)

    @settings(max_examples=NUM_EXAMPLES // 2)
    @given(texts, st.sampled_from(["", "é: "]), st.booleans())
    def check(text: str, prompt: str, add_special_tokens: bool) -> None:
        collected = Collected()
        exhaust(ours.api.describe_steps([text], prompt, add_special_tokens, collected))
        [described] = collected.lists
        num_before, num_behind = (len(slow.prefix), len(slow.suffix)) if add_special_tokens else (0, 0)
        own = described[num_before : len(described) - num_behind]
        if add_special_tokens:
            special = [token for token in described if token.is_special]
            assert [token.id for token in special] == slow.prefix + slow.suffix
            assert all(token.start is token.stop is None for token in special)
            assert [slow.library.token_to_id(token.text) for token in special] == slow.prefix + slow.suffix
        whole = slow.library.encode(prompt + text, add_special_tokens=False)
        assert [token.id for token in own] == whole.ids
        assert [token.text for token in own] == whole.tokens
        encoded = (prompt + text).encode()
        for token, (start, stop) in zip(own, whole.offsets, strict=True):
            assert encoded[token.start : token.stop].decode() == (prompt + text)[start:stop]
            assert token.start == len((prompt + text)[:start].encode())

    check()


@pytest.mark.parametrize("name", UNCUT)
def test_where_no_cut_is_known_there_is_none(name):
    assert cut_pattern(UNCUT[name]()) is None


@pytest.mark.parametrize(
    ("name", "before", "never"),
    [
        ("WordPiece", " \n!，中", "a"),
        ("WordPiece, words added", " ,(中", "-)!a"),
        ("WordPiece, added words with blanks", "!,", " \t中a"),
        ("byte pairs", " ,。", "\n中a-"),
        ("byte pairs, added blanks", " ,", "!\n"),
        ("byte pairs, an added word with a blank", ",", " "),
        ("byte pairs, spaces replaced before they are looked for", ",。", " "),
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
    monkeypatch.setattr(text_cuts, "cut_before", lambda stages: {" ", "\n", ","})
    assert cut_pattern(unigram()) is None


@pytest.mark.slow
def test_letters_and_digits_are_that_and_nothing_more():
    found = re.findall(f"[{text_cuts.WORD}]", "".join(map(chr, range(0x110000))))
    assert {unicodedata.category(char)[0] for char in found} == {"L", "N"}
    assert not any(map(unicodedata.combining, found))


def test_no_character_that_is_cut_before_becomes_another_with_what_is_behind_it():
    """Then it might no longer be what a tokenizer cuts at."""
    decomposed = (unicodedata.decomposition(char).split() for char in map(chr, range(0x110000)))
    firsts = {chr(int(parts[0], 16)) for parts in decomposed if len(parts) == 2 and not parts[0].startswith("<")}
    assert {"<", "=", ">", "e"} <= firsts
    assert not firsts.intersection(text_cuts.SPACES + text_cuts.MARKS + text_cuts.ASCII_PUNCTUATION)
    assert not [char for char in firsts if re.match(f"[{text_cuts.IDEOGRAPHS}]", char)]


@pytest.mark.parametrize("text", ["漢字" * 30_000, "the quick brown fox " * 3000, "?!" * 30_000])
def test_of_a_long_text_no_more_is_tokenized_than_it_takes(text, minilm_folder, make_tokenizer):
    tokenizer = make_tokenizer(read_card(minilm_folder), 256)
    with library_calls(tokenizer) as calls:
        [item] = tokenize(tokenizer, [text])
    assert (item.num_tokens, item.is_truncated) == (256, True)
    assert sum(len(part) for call in calls for part in call.args[0]) <= 256 * 8
