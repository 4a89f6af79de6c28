"""Remember the tokens of words, so that a short text of usual words costs a look-up for each instead of the tokenizer.

Owns the remembered words: pieces of texts between neighbouring split points (`vecd.gateway.tokenization.split_points`),
whose tokens in a row are those of the text. Called by `vecd.gateway.tokenization.text_tokens`, on the event loop and in
threads.

Words are remembered for all tenants. That a word is known saves 5 µs once, which no client can tell from the rest of
its response's time; the library's own cache for byte pairs does the same.

Measured, MiniLM, ten words of English, interleaved: 3 µs where all are known, 37 µs by the library; ten words that
never come again take 1.4 times as long as by the library alone.
"""

import re
from array import array
from collections.abc import Callable, Sequence

MAX_CHARS = 2000
"""Longer texts are the library's, which releases the GIL."""

_MAX_WORD_CHARS = 24
_MAX_WORDS = 16 * 1024
"""Some 4 MB. When there are so many, all are forgotten, and the usual ones are soon known again."""


class KnownWords:
    def __init__(self, cuts: re.Pattern[str], tokenize: Callable[[Sequence[str]], list[list[int]]]) -> None:
        """`cuts` matches at split points; `tokenize` returns the tokens of each of several texts."""
        self._split = re.compile(f"(?={cuts.pattern})").split
        self._tokenize = tokenize
        self._ids_of: dict[str, bytes] = {"": b""}
        """int32, little-endian, shape [num_tokens]."""

    def find(self, text: str) -> bytes | None:
        """All tokens of a text of at most MAX_CHARS, as int32; None if the text is longer, or has a word that is not
        known."""
        if len(text) > MAX_CHARS:
            return None
        try:
            return b"".join(map(self._ids_of.__getitem__, self._split(text)))
        except KeyError:
            return None

    def learn(self, text: str) -> list[int]:
        """All tokens of a text, and one of its words again, to remember it. Only one: a text of words that never
        come again, as numbers are, must not cost much more than without this. Side effect: that word is known."""
        new = next(
            (word for word in self._split(text) if word not in self._ids_of and len(word) <= _MAX_WORD_CHARS), None
        )
        if new is None:
            return self._tokenize([text])[0]
        ids, ids_of_new = self._tokenize([text, new])
        if len(self._ids_of) >= _MAX_WORDS:
            self._ids_of.clear()
        self._ids_of[new] = array("i", ids_of_new).tobytes()
        return ids
