"""Find split points: places where a text can be cut so that the pieces' tokens in a row are those of the whole text.

Owns what must be known of normalizers, pre-tokenizers and added tokens for that. Tokenizes nothing but its own probes,
and keeps no text.

A cut before character c is right if every stage of the tokenizer does the same on both sides as on the whole:

    text ─► added tokens ─► normalizer ─► added tokens ─► pre-tokenizer ─► model
            none has c       c begins anew  again           it cuts, too     sees the pre-tokenizer's
            but at its start                                                 pieces, one by one

This is known for the kinds of stages listed here. With any other kind, or settings that look further, there are no
split points. As a check, probes are cut at all their split points and tokenized.
"""

import itertools
import json
import re
import unicodedata
from collections.abc import Generator, Iterable
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordPiece

from vecd.base.files import JsonMapping
from vecd.gateway.errors import INPUT, BadRequest

SPACES = " \t\n\r\u3000"
IDEOGRAPHS = "\u4e00-\u9fff"
# BERT's pre-tokenizer and the patterns below cut before these, if a letter or digit precedes.
MARKS = ",.!?;:\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
# BERT's pre-tokenizer cuts before these, whatever precedes: they are words of their own. Not before <, = and >: a
# normalizer that composes joins them with a following mark to one character, which is part of a word.
ASCII_PUNCTUATION = "!\"#$%&'()*+,-./:;?@[\\]^_`{|}~"

WORD = (
    "0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u011f\u0121-\u012f\u0131-\u013e\u0141-\u024f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u03ff"
    "\u0400-\u0481\u048a-\u052f\u05d0-\u05ea\u0620-\u063f\u0641-\u064a\u0905-\u0939\u0e01-\u0e30"
    "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3"
)
"""Letters and digits that normalizers treat alone: none combines with the character before, takes the next into its
grapheme cluster, or ends with anything but a letter or digit when it is decomposed."""

_LOCAL_NORMALIZERS = {
    "BertNormalizer", "Lowercase", "StripAccents", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "ByteLevel",
    "Replace",
}  # fmt: skip
"""They process a character, a base with its marks, or a grapheme cluster; a space begins a new one of each."""
_LOCAL_PATTERNS = {" {2,}"}
"""Regular expressions of Replace; no match begins with a letter."""

# Source: the patterns in tokenizer.json of GPT-2, Llama 3 and Qwen 2.
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_WORD_PATTERNS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    LLAMA,
    LLAMA.replace("{1,3}", ""),
}
"""In all of these, a match that begins with letters or digits ends with them; none looks back."""

_PROBES = (
    "Hello, wörld! It's 1234.5 o'clock;  two  spaces\tand\nlines\r\n\r\nof text: e\u0301te\u0301 (x) [y] <z> .. !? ,",
    "中文，漢字。日本語のテキスト、한국어 텍스트! привет мир? שלום עולם हिन्दी पाठ ไทย คำ 😀 x😀 y\u200d z\u00a0w",
    "a b c  d   e\x00 f\x7f g\ufffd h\u00ad i \u0301j k\u0301 \u0338l = \u0338m # \u20e3 ▁n ▁ o Ġp ﬁ ＡＢ，Ｃ ｡ ﾊﾞ İ ς",
)


def cut_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """A pattern that matches one character if there is a split point before it; None when none is known. It looks back
    at most one character. `tokenizer` must neither truncate nor pad."""
    normalizers = stages_of(tokenizer.normalizer, "normalizers")
    pre_tokenizers = stages_of(tokenizer.pre_tokenizer, "pretokenizers")
    # With dropout, the same piece has not always the same tokens.
    if not _is_local(normalizers) or getattr(tokenizer.model, "dropout", None):
        return None
    # Where the file itself defines replacements, a character can become anything.
    replaces = any(stage["type"] in {"Replace", "Precompiled", "ByteLevel"} for stage in normalizers)
    if [part["type"] for part in pre_tokenizers] == ["BertPreTokenizer"] and not replaces:
        pattern = _words_pattern(tokenizer, normalizers)
    else:
        pattern = _spaces_pattern(tokenizer, pre_tokenizers)
    return pattern if pattern is not None and _agrees(tokenizer, pattern) else None


def stages_of(component: Any, name: str) -> list[JsonMapping]:
    if component is None:
        return []
    stages = [json.loads(component.__getstate__())]
    while any(stage["type"] == "Sequence" for stage in stages):
        stages = [inner for stage in stages for inner in (stage[name] if stage["type"] == "Sequence" else [stage])]
    return stages


def _is_local(normalizers: list[JsonMapping]) -> bool:
    patterns = [stage["pattern"] for stage in normalizers if stage["type"] == "Replace"]
    return {stage["type"] for stage in normalizers} <= _LOCAL_NORMALIZERS and all(
        len(pattern.get("String", "")) == 1 or pattern.get("Regex") in _LOCAL_PATTERNS for pattern in patterns
    )


# --- before which characters ------------------------------------------------------------------------------------


def _words_pattern(tokenizer: Tokenizer, normalizers: Iterable[JsonMapping]) -> re.Pattern[str] | None:
    """For BERT's: blanks are dropped, and ideographs and punctuation are words of their own in any context."""
    words = _added(tokenizer)
    if words is None:
        return None
    inner = {char for word in words for char in word[1:]}
    # The normalizer puts blanks before and behind an ideograph.
    is_free = not any(_is_blank(char) or char >= "\u3400" for char in inner)
    has_ideographs = is_free and any(stage.get("handle_chinese_chars") for stage in normalizers)
    before = _without(tokenizer, set(SPACES + ASCII_PUNCTUATION + MARKS), inner)
    return _one_of(before, ranges=IDEOGRAPHS if has_ideographs else "")


def _spaces_pattern(tokenizer: Tokenizer, pre_tokenizers: list[JsonMapping]) -> re.Pattern[str] | None:
    """For byte pairs and unigrams: a blank, sometimes a punctuation mark, behind a letter or digit."""
    before, words = cut_before(pre_tokenizers), _added(tokenizer)
    if not before or words is None or not _keeps_words(tokenizer):
        return None
    spaces = {" ", "▁"} if pre_tokenizers[0]["type"] == "Metaspace" else set(SPACES)
    before = {char for char in before if _keeps_kind(normalized(tokenizer, char), char, spaces)}
    # A token of blanks only can begin at a split point before a blank, or behind it.
    pairs = [pair for word in words for pair in itertools.pairwise(word)]
    return _one_of(_without(tokenizer, before, {b for a, b in pairs if not _is_blank(a)}), behind=WORD)


def _without(tokenizer: Tokenizer, before: set[str], inner: set[str]) -> set[str]:
    """Those of `before` that no added token has inside. `inner`: of added tokens, all but the first character."""
    has_blank = any(map(_is_blank, inner))
    return {
        char
        for char in before
        if char not in inner
        and not inner.intersection(normalized(tokenizer, char))
        and not (has_blank and _is_blank(char))
    }


def _keeps_kind(normalized: str, char: str, spaces: set[str]) -> bool:
    if char in SPACES:
        return normalized in spaces
    return len(normalized) == 1 and unicodedata.category(normalized).startswith("P")


def cut_before(pre_tokenizers: list[JsonMapping]) -> set[str]:
    """Before which characters a chain of pre-tokenizers cuts, if a letter or digit is ahead of them. Once one of them
    has cut there, the others see both sides apart; but what they put before a piece must not depend on where it
    begins."""
    before: set[str] = set()
    allowed = {*SPACES, *MARKS}
    for stage in pre_tokenizers:
        match stage["type"]:
            case "WhitespaceSplit" | "Whitespace" | "BertPreTokenizer":
                before = before or set(" \t\n")
            case "Metaspace" if before or stage.get("split", True):
                before = before or {" "}
                allowed &= set(SPACES)
            case "ByteLevel" if before or stage.get("use_regex", True):
                before = before or {" ", *MARKS}
                if stage.get("add_prefix_space", True):
                    allowed &= set(SPACES)
            case "Split" if before or _is_word_pattern(stage):
                before = before or {" ", *MARKS}
            case "Digits" | "Punctuation":
                allowed &= set(SPACES)  # blanks are neither, and a letter or digit ahead of one is no matter
            case _:
                return set()
    return before & allowed


def _is_word_pattern(stage: JsonMapping) -> bool:
    pattern = stage["pattern"].get("Regex")
    return pattern in _WORD_PATTERNS and stage["behavior"] == "Isolated" and not stage["invert"]


def _one_of(chars: Iterable[str], ranges: str = "", behind: str = "") -> re.Pattern[str] | None:
    escaped = "".join(map(re.escape, sorted(chars))) + ranges
    if not escaped:
        return None
    return re.compile(f"(?<=[{behind}])[{escaped}]" if behind else f"[{escaped}]")


# --- what the tokenizer itself says -----------------------------------------------------------------------------


def _added(tokenizer: Tokenizer) -> list[str] | None:
    """As they are found in a text and in a normalized one; None when some look at what is behind them."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.rstrip or token.single_word for token in added):
        return None
    words = [token.content for token in added]
    return words + [normalized(tokenizer, token.content) for token in added if token.normalized]


def _keeps_words(tokenizer: Tokenizer) -> bool:
    """Each letter or digit is still one, at its end, once it is normalized, and nothing blank is in it."""
    if tokenizer.normalizer is None:
        return True
    first_to_last = re.findall("(.)-(.)", WORD)
    words = (chr(code) for first, last in first_to_last for code in range(ord(first), ord(last) + 1))
    kept = normalized(tokenizer, "|".join(words)).split("|")
    return len(kept) == sum(ord(last) - ord(first) + 1 for first, last in first_to_last) and all(
        part[-1:].isalnum() and not any(map(_is_blank, part)) for part in kept
    )


def normalized(tokenizer: Tokenizer, text: str) -> str:
    return text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)


def _is_blank(char: str) -> bool:
    return char.isspace() or char in "▁Ġ"


def _agrees(tokenizer: Tokenizer, pattern: re.Pattern[str]) -> bool:
    """The pieces of each probe have its tokens: cut at all split points at once, and in two at each."""
    for probe in _PROBES:
        cuts = [match.start() for match in pattern.finditer(probe) if match.start() > 0]
        whole = _ids(tokenizer, [probe])
        parts = [probe[start:end] for start, end in zip([0, *cuts], [*cuts, len(probe)], strict=True)]
        if _ids(tokenizer, parts) != whole:
            return False
        if any(_ids(tokenizer, [probe[:cut], probe[cut:]]) != whole for cut in cuts):
            return False
    return True


def _ids(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [token_id for encoding in encodings for token_id in encoding.ids]


# The tokens ahead of a border between two tokens are those of the text that ends there: byte pairs never merged across
# it, and the best path of unigrams to it knows nothing of what follows. No token has more than m letters in a row, so a
# part has a border at one of any m places in a row between letters. The first tokens that the texts up to each of these
# places have in common are the part's:
#
#     part       …xxxxxxxxxxxxxxxxxxxxx… any number of them
#     places               1 2 3 4       m = 4

LEAST_CHARS = 4 * 1024
"""A part of this length is never too long."""

_PART_CHARS, _LONG_PART_CHARS = 64 * 1024, 256 * 1024
"""The longest part without split points. The first number of letters takes 0.01 s, and of U+3316, of which NFKC makes
six letters, 0.3 s. The second number is for WordPiece, whose words have no tokens beyond 100 letters, and for
tokenizers without split points."""

_LONGEST, _EXPANSION = "\ufdfa", 18
"""The character of which NFKC makes most by far, and how many: it counts as many. All others have at most eight."""

_LEAD = 4
"""Letters before the first place, so that what a pre-tokenizer takes by its end ('re) is over."""

_BLANKS, _NO_BLANKS = ({"String": " "}, "▁"), ({"String": " "}, "MergedWithPrevious")


class LongParts:
    def __init__(self, tokenizer: tokenizers.Tokenizer, *, has_cuts: bool) -> None:
        """`has_cuts`: split points are known."""
        self._tokenizer = tokenizer
        is_long = not has_cuts or isinstance(tokenizer.model, WordPiece)
        self.max_chars = _LONG_PART_CHARS if is_long else _PART_CHARS
        self._has_cuts = has_cuts
        self._expansion = _EXPANSION if len(normalized(tokenizer, _LONGEST)) > 1 else 1

    def is_too_long(self, part: str) -> bool:
        return len(part) > LEAST_CHARS and self._size(part) > self.max_chars

    def check(self, part: str) -> None:
        """Raises BadRequest for a part that is too long."""
        if self.is_too_long(part):
            raise BadRequest(
                f"A text has a part of {self._size(part)} characters that can be cut nowhere, at most {self.max_chars} "
                "are allowed: put blanks into it, or send less of it",
                param=INPUT,
            )

    def cut_steps(self, part: str, num: int) -> Generator[None, None, int]:
        """Where the beginning of a part can be cut so that it has the first `num` tokens of the part, and more; 0 if no
        such place is found."""
        stop = 2 * LEAST_CHARS
        while self._places is not None and stop <= len(part):
            found = self._places.search(part, stop - LEAST_CHARS, stop) if num < stop else None
            if found is not None and self._are_kept(found[0]):
                heads: set[tuple[int, ...]] = set()
                for place in range(found.start() + _LEAD, found.end()):
                    [encoding] = self._tokenizer.encode_batch_fast([part[:place]], add_special_tokens=False)
                    heads.add(tuple(encoding.ids[: num + 1]))
                    yield
                    if len(encoding) <= num:
                        break
                if [len(head) for head in heads] == [num + 1]:
                    return found.end() - 1
            stop *= 2
        return 0

    @cached_property
    def _letter(self) -> str:
        """Matches a letter that is one character, or byte, of the model's; also marks and blanks that end no word."""
        if isinstance(self._tokenizer.model, Unigram):
            return f"[{WORD}{MARKS}]"
        return "[0-9A-Za-z]" if self._has_cuts else "[ -{}~▁]"

    @cached_property
    def _places(self) -> re.Pattern[str] | None:
        """Matches letters with enough places between them; None for a model of another kind."""
        model = self._tokenizer.model
        is_known = isinstance(model, Unigram) or (isinstance(model, BPE) and not model.end_of_word_suffix)
        if not is_known or not (self._has_cuts or self._is_one_word()):
            return None
        words = re.findall(f"{self._letter}+", "\n".join(self._tokenizer.get_vocab()))
        return re.compile(f"{self._letter}{{{max(map(len, words), default=0) + _LEAD}}}")

    def _is_one_word(self) -> bool:
        """Blanks are made letters, and nothing else is done to a text before the model, as by Gemma's."""
        stages = [*stages_of(self._tokenizer.normalizer, "normalizers")]
        stages += stages_of(self._tokenizer.pre_tokenizer, "pretokenizers")
        made = [(stage.get("pattern"), stage.get("content", stage.get("behavior"))) for stage in stages]
        return made in ([_BLANKS], [_BLANKS, _NO_BLANKS])

    def _are_kept(self, letters: str) -> bool:
        """The normalizer makes one letter of each."""
        kept = normalized(self._tokenizer, "|".join(letters)).split("|")
        return len(kept) == len(letters) and all(re.fullmatch(self._letter, char) for char in kept)

    def _size(self, part: str) -> int:
        return len(part) + part.count(_LONGEST) * (self._expansion - 1)
