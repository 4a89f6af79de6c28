"""Make a text's own tokens: the first, the last or all of them, with as little work as possible.

Owns the calls of the `tokenizers` library. Knows nothing of special tokens, limits and requests.

`Tokenizer.encode` holds the GIL (2.4 s for a million CJK characters, even if it truncates); the batch calls release it.
The library tokenizes all of a text before it truncates. Where a text has split points, at which a cut does not change
its tokens (`vecd.gateway.tokenization.split_points`), it is tokenized piece by piece until there are enough tokens:

    text      │ piece │ piece │ piece │ never read …
    tokens    └ 1030 ─┴ 1100 ─┴ … ─ more than needed

and from its end towards its beginning where its last tokens are needed. Each piece is a step of a generator, so that
other requests can have a turn in between. A part without split points is one piece, and is refused above a limit.
"""

import re
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar, cast

import numpy as np
import tokenizers
from numpy.typing import NDArray

from vecd.gateway.request import ALL
from vecd.gateway.tokenization.split_points import LEAST_CHARS, LongParts, cut_pattern

# Words are remembered for all tenants: no client can tell the 5 µs that this saves from the rest of its response's
# time.
#
# Measured, MiniLM, ten words of English, interleaved: 3 µs where all are known, 37 µs by the library; ten words that
# never come again take 1.4 times as long as by the library alone.

T = TypeVar("T")

MAX_CHARS = 2000
"""Longer texts are the library's, which releases the GIL."""

_MAX_WORD_CHARS = 24
MAX_WORDS = 16 * 1024
"""Some 4 MB. When this number is reached, all are forgotten, and the usual ones are soon known again."""


class KnownWords:
    """The tokens of usual words. Used on the event loop and in threads."""

    def __init__(
        self, cuts: re.Pattern[str], tokenize: Callable[[Sequence[str]], list[list[int]]], max_words: int = MAX_WORDS
    ) -> None:
        """`cuts` matches at split points; `tokenize` returns the tokens of each of several texts."""
        self._split = re.compile(f"(?={cuts.pattern})").split
        self._tokenize = tokenize
        self._max_words = max_words
        self._ids_of: dict[str, bytes] = {"": b""}
        """int32, little-endian, shape [num_tokens]."""

    def find(self, text: str) -> bytes | None:
        """All tokens of a text of known words, as int32; None for any other, or above MAX_CHARS."""
        if len(text) > MAX_CHARS:
            return None
        try:
            return b"".join(map(self._ids_of.__getitem__, self._split(text)))
        except KeyError:
            return None

    def learn(self, text: str) -> list[int]:
        """All tokens of a text. Side effect: one of its words is known. Only one: a text of words that never come
        again, as numbers are, must not cost much more than without this."""
        new = next(
            (word for word in self._split(text) if word not in self._ids_of and len(word) <= _MAX_WORD_CHARS), None
        )
        if new is None:
            return self._tokenize([text])[0]
        ids, ids_of_new = self._tokenize([text, new])
        if len(self._ids_of) >= self._max_words:
            self._ids_of.clear()
        self._ids_of[new] = array("i", ids_of_new).tobytes()
        return ids


CHARS_PER_TEXT = 20
"""The cost of a text besides its characters, in characters."""

RUN_CHARS = 16 * 1024
"""Of what is tokenized in one call: 3 ms of English, 14 ms of CJK."""

CHARS_PER_EXPECTED_TOKEN = 4
"""Characters of a text's first piece for each token that is kept: fewer than English has, more than most other text."""

PIECE_CHARS = LEAST_CHARS
"""The longest piece that is tokenized at once, if there is a split point: 10 ms of CJK, 14 ms of random words."""

LEAST_PIECE_CHARS = 256
"""The cost of a call, in characters: 0.03 ms."""

_TOKENS_PER_STEP = 8 * 1024
"""Tokens whose offsets become objects at once: 3 ms."""

SEARCH_CHARS = 64 * 1024
"""Characters searched for a split point before other requests have a turn: 0.9 ms at worst."""


class Described(NamedTuple):
    """What the library says of a piece of a text, behind some of the piece before."""

    encoding: tokenizers.Encoding
    num_before: int
    """The number of its first tokens that are of the piece before."""
    num_chars: int
    shift: int
    """From its offsets to those in the text, in characters; below 0 for a prompt."""


class TextTokens:
    """Tokens of texts without special tokens. Texts are read up to `max_chars`; the rest is ignored."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, max_chars: int) -> None:
        """`tokenizer` neither truncates nor pads yet."""
        self._tokenizer = tokenizer
        self.max_chars = max_chars
        self.cuts = cut_pattern(tokenizer)
        self.long_parts = LongParts(tokenizer, has_cuts=self.cuts is not None)
        self._words = None if self.cuts is None else KnownWords(self.cuts, self.ids)
        self.known: Callable[[str], bytes | None] = (lambda text: None) if self._words is None else self._words.find
        """As `KnownWords.find`."""

    def first_chars(self, num: int) -> int:
        """How much of a text is tokenized first, where `num` tokens are needed."""
        if self.cuts is None:
            return self.max_chars
        return min(PIECE_CHARS, max(LEAST_PIECE_CHARS, (num + 1) * CHARS_PER_EXPECTED_TOKEN))

    def first_steps(self, texts: Sequence[str], prompt: str, num: int) -> Generator[None, None, list[list[int]]]:
        """For each text, with the prompt before it: all tokens, or, if there are more than `num`, the first of them,
        more than `num`."""
        # The search for split points would take a tenth of the tokenizing of short texts, as most are.
        most = min(self.first_chars(num), LEAST_CHARS, self.max_chars)
        short = [prompt + text for text in texts if len(text) <= most]
        if self._words is not None and num < ALL and len(texts) == len(short) == 1 and len(short[0]) <= MAX_CHARS:
            return [self._words.learn(short[0])]
        lists = self.ids(short, num)
        for index, text in enumerate(texts if len(short) < len(texts) else ()):
            if len(text) > most:
                yield
                own = yield from self._first_of_long(text, prompt, num)
                lists.insert(index, own)
        return lists

    def all_steps(self, text: str, prompt: str) -> Generator[None, None, list[int]]:
        """All tokens of the text, with the prompt before it."""
        [ids] = yield from self.first_steps([text], prompt, ALL)
        return ids

    def _first_of_long(self, text: str, prompt: str, num: int) -> Generator[None, None, list[int]]:
        """Piece by piece."""
        ids: list[int] = []
        stop, start, num_chars = min(len(text), self.max_chars), 0, self.first_chars(num)
        while True:
            end = yield from self._piece_end(text, start, num_chars, num - len(ids), "" if start else prompt)
            ids += self.ids([text[start:end] if start else prompt + text[:end]], num)[0]
            start = end
            if start >= stop or len(ids) > num:
                return ids
            num_chars = int((num + 1 - len(ids)) * (start + 1) / (len(ids) + 1) * 1.1)
            num_chars = min(PIECE_CHARS, max(LEAST_PIECE_CHARS, num_chars))
            yield

    def described_steps(self, text: str, prompt: str, num: int) -> Generator[Described | None, None, None]:
        """The pieces of the text, with the prompt before it, that have all its tokens or more than `num`, and None
        where others may have a turn."""
        stop, start, num_chars = min(len(text), self.max_chars), 0, self.first_chars(num)
        context = ""
        while True:
            end = yield from self._piece_end(text, start, num_chars, num, "" if start else prompt)
            piece = text[start:end] if start else prompt + text[:end]
            # The text before it, because the library's offsets differ at the beginning of a text.
            [encoding] = self._tokenizer.encode_batch([context + piece], add_special_tokens=False)
            num_before = len(self.ids([context], ALL)[0]) if context else 0
            yield Described(encoding, num_before, len(piece), start - len(context) if start else -len(prompt))
            num -= len(encoding) - num_before
            if end >= stop or num < 0:
                return
            context = self._last_part(piece)
            start = end

    def offset_steps(
        self, text: str, prompt: str, num: int
    ) -> Generator[None, None, tuple[list[int], NDArray[np.int32]]]:
        """As `first_steps` for one text, and where each token begins and ends, in characters of the text, shape
        [num_tokens, 2]. Tokens of the prompt are at (-1, -1)."""
        ids: list[int] = []
        offsets = [np.empty((0, 2), np.int32)]
        for piece in self.described_steps(text, prompt, num):
            if piece is None:
                yield
                continue
            encoding, num_before, _, shift = piece
            rest = [] if len(ids) + len(encoding) - num_before > num else encoding.overflowing
            for large in (encoding, *rest):
                large.truncate(_TOKENS_PER_STEP)
                for part in (large, *large.overflowing):
                    if len(ids) > num:
                        break
                    ids += part.ids[num_before:]
                    offsets.append(shifted(part.offsets[num_before:], shift))
                    num_before = max(0, num_before - len(part))
                    yield
        return ids, np.concatenate(offsets)

    def last_steps(self, text: str, prompt: str, num: int) -> Generator[None, None, list[int]]:
        """The tokens of the text, with the prompt before it: all, or the last of them, at least `num`."""
        end = min(len(text), self.max_chars)
        parts: list[list[int]] = []
        num_ids, num_chars = 0, self.first_chars(num)
        while True:
            start = yield from self._piece_start(text, end - num_chars, end)
            parts.append(self.ids([text[start:end] if start else prompt + text[:end]], ALL)[0])
            num_ids += len(parts[-1])
            end = start
            if not end or num_ids >= num:
                return [token_id for part in reversed(parts) for token_id in part]
            num_chars = PIECE_CHARS
            yield

    def ids(self, texts: Sequence[str], num: int = 0) -> list[list[int]]:
        """The tokens of each text; those that the library truncates only where ALL are needed."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        if num < ALL:
            return [encoding.ids for encoding in encodings]
        return [
            [token_id for part in (encoding, *encoding.overflowing) for token_id in part.ids] for encoding in encodings
        ]

    def _piece_end(
        self, text: str, start: int, num_chars: int, num: int, prompt: str = ""
    ) -> Generator[None, None, int]:
        """The first split point at least `num_chars` behind `start`, or the end of the text. Where that is too far, the
        last one before; or else, where only `num` tokens and one more are needed, a place up to which the text has
        these. Raises BadRequest if there is none, either."""
        stop = min(len(text), self.max_chars)
        least, end = start + num_chars, stop
        while self.cuts is not None and least < stop:
            cut = self.cuts.search(text, least, min(stop, least + SEARCH_CHARS))
            if cut is not None:
                end = cut.start()
                break
            least += SEARCH_CHARS
            yield
        if not self.long_parts.is_too_long(text[start:end]):
            return end
        nearer = self._last_cut(text, start, min(start + num_chars, end))
        if nearer == start:
            part = prompt + text[start : min(stop, start + self.long_parts.max_chars)]
            nearer += max(0, (yield from self.long_parts.cut_steps(part, num)) - len(prompt))
        if nearer == start:
            self.long_parts.check(text[start:end])
        return nearer

    def _piece_start(self, text: str, most: int, end: int) -> Generator[None, None, int]:
        """A split point before `end`, at about `most`, or nearer where that is too far; 0 if there is none. Raises
        BadRequest where that is too far."""
        start, found_to = 0, end
        while self.cuts is not None and most > 0:
            cut = self.cuts.search(text, most, found_to)
            if cut is not None:
                start = cut.start()
                break
            most, found_to = most - PIECE_CHARS, most
            yield
        if self.long_parts.is_too_long(text[start:end]):
            start = self._last_cut(text, start, found_to)
            self.long_parts.check(text[start:end])
        return start

    def _last_part(self, piece: str) -> str:
        """The end of a piece, from a split point on."""
        start = max(0, len(piece) - LEAST_PIECE_CHARS - 1)
        cut = self._last_cut(piece, start, len(piece))
        return piece[cut:] if cut > start else piece

    def _last_cut(self, text: str, start: int, end: int) -> int:
        """The last split point between `start` and `end`; `start` if there is none."""
        found = () if self.cuts is None else self.cuts.finditer(text, start + 1, end)
        return max((cut.start() for cut in found), default=start)


def exhaust(steps: Generator[None, None, T]) -> T:
    """What the steps return, without a turn for others in between."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return cast(T, stop.value)


def shifted(offsets: Sequence[tuple[int, int]], shift: int) -> NDArray[np.int32]:
    """Offsets of the library in characters of the text, shape [num_tokens, 2]; -1 for what is before it. `shift` is
    below 0 for a prompt."""
    rows = np.array(offsets, np.int32).reshape(-1, 2) + np.int32(shift)
    if shift:
        rows[rows[:, 1] <= 0] = -1
        rows[rows[:, 1] > 0, 0] = np.maximum(rows[rows[:, 1] > 0, 0], 0)
    return rows


def runs_of(lengths: Iterable[int], most: int, cost_per_input: int = CHARS_PER_TEXT) -> Iterator[range]:
    """Runs of at most `most` characters or ids, or of one input each. `lengths` are those of the inputs."""
    start = cost = stop = 0
    for index, length in enumerate(lengths):
        if cost + length + cost_per_input > most and index > start:
            yield range(start, index)
            start, cost = index, 0
        cost += length + cost_per_input
        stop = index + 1
    yield range(start, stop)
