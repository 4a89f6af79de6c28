"""A text's own tokens: its first ones, its last ones, or all, with as little work as that takes.

Owns the calls of the `tokenizers` library that make tokens of texts. Knows nothing of frames, limits and requests.
Called by `vecd.gateway.tokenization.tokenizer`.

`Tokenizer.encode` holds the GIL for its whole length (2.4 s for a million CJK characters, whatever the truncation);
the batch calls release it. The library truncates what it has tokenized. Where a text may be cut without changing its
tokens (`vecd.gateway.tokenization.split_points`), it is tokenized piece by piece until there are as many as are wanted:

    text      │ piece │ piece │ piece │ never looked at …
    tokens    └ 1030 ─┴ 1100 ─┴ … ─ more than wanted

and from its end towards its beginning where the last ones are wanted. Each piece is a step of a generator, between
which others may have their turn.
"""

import re
from collections.abc import Generator, Iterator, Sequence

import tokenizers

from vecd.gateway.tokenization.split_points import cut_pattern

CHARS_PER_TEXT = 20
"""What a text costs beside its characters, in characters."""

RUN_CHARS = 16 * 1024
"""Of the texts that are tokenized in one call, or their first pieces: 3 ms of English, 14 ms of CJK. What cannot be cut
takes a turn by itself, of whatever length: a word of 2,000,000 letters 0.3 s, as many emoji 1.6 s."""

_CHARS_PER_EXPECTED_TOKEN = 4
"""A text's first piece has so many for each token that is kept: less than English, more than most other text."""

_PIECE_CHARS = 4 * 1024
"""The longest piece that is tokenized at once, if it can be cut there: 10 ms of CJK, 14 ms of words of no language."""

_LEAST_PIECE_CHARS = 256
"""A call costs as much as so many characters, 0.03 ms."""

_SEARCH_CHARS = 64 * 1024
"""So far a cut is looked for before others have their turn: 0.9 ms at worst."""


class TextTokens:
    """Tokens of texts without the model's frame. Texts are looked at up to `max_chars`; what is behind is not there."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, max_chars: int, *, may_cut: bool) -> None:
        """`tokenizer` neither truncates nor pads yet. `may_cut`: pieces may be cut where `text_cuts` knows a place."""
        self._tokenizer = tokenizer
        self.max_chars = max_chars
        self.cuts = cut_pattern(tokenizer) if may_cut else None

    def first_chars(self, num: int) -> int:
        """How much of a text is tokenized to begin with, where `num` tokens are wanted."""
        if self.cuts is None:
            return self.max_chars
        return min(_PIECE_CHARS, max(_LEAST_PIECE_CHARS, (num + 1) * _CHARS_PER_EXPECTED_TOKEN))

    def first_steps(self, texts: Sequence[str], prompt: str, num: int) -> Generator[None, None, list[list[int]]]:
        """Of each text, with the prompt before it: all tokens, or, if they are more than `num`, the first of them and
        at least one more than `num`. What the library truncates is not among them, and is behind those."""
        if self.cuts is None:
            return self.ids([prompt + text[: self.max_chars] for text in texts])
        if self._is_one_call(texts, prompt, num):
            return self.ids([prompt + text for text in texts] if prompt else texts)
        ends = []
        for text in texts:
            end = yield from self._piece_end(text, self.first_chars(num), self.cuts)
            ends.append(end)
        firsts = [prompt + text[:end] for text, end in zip(texts, ends, strict=True)]
        lists: list[list[int]] = []
        for part in runs_of(firsts, RUN_CHARS, self.max_chars):  # some could be cut nowhere
            lists += self.ids(firsts[part.start : part.stop])
            yield
        for text, end, ids in zip(texts, ends, lists, strict=True):
            yield from self._extend(ids, text, end, num, self.cuts)
        return lists

    def _is_one_call(self, texts: Sequence[str], prompt: str, num: int) -> bool:
        """Whether each text is a first piece by itself, and all are one run, as of most requests: looking for places
        to cut them would take as long as a tenth of the tokenizing."""
        longest = max(map(len, texts))
        if longest > self.first_chars(num) or longest > self.max_chars:
            return False
        return len(texts) == 1 or sum(map(len, texts)) + len(texts) * (CHARS_PER_TEXT + len(prompt)) <= RUN_CHARS

    def all_steps(self, text: str, prompt: str) -> Generator[None, None, list[int]]:
        """All tokens of the text, with the prompt before it."""
        ids: list[int] = []
        for piece in (yield from self.piece_steps(text, prompt)):
            ids += self.all_ids(piece)
            yield
        return ids

    def piece_steps(self, text: str, prompt: str) -> Generator[None, None, list[str]]:
        """What may be tokenized apart of the text, with the prompt before it: one piece or more."""
        start, stop = 0, min(len(text), self.max_chars)
        pieces: list[str] = []
        while not pieces or start < stop:
            end = stop if self.cuts is None else (yield from self._piece_end(text, start + _PIECE_CHARS, self.cuts))
            pieces.append(text[start:end] if start else prompt + text[:end])
            start = end
        return pieces

    def last_steps(self, text: str, prompt: str, num: int) -> Generator[None, None, list[int]]:
        """Of the text, with the prompt before it: all tokens, or the last of them and at least `num`."""
        end = min(len(text), self.max_chars)
        parts: list[list[int]] = []
        num_ids, num_chars = 0, self.first_chars(num)
        while True:
            start = 0 if self.cuts is None else (yield from self._piece_start(text, end - num_chars, end, self.cuts))
            parts.append(self.all_ids(text[start:end] if start else prompt + text[:end]))
            num_ids += len(parts[-1])
            end = start
            if not end or num_ids >= num:
                return [token_id for part in reversed(parts) for token_id in part]
            num_chars = _PIECE_CHARS
            yield

    def last_part(self, piece: str) -> str:
        """What of a piece is behind the last place where it may be cut; not always, but always from such a place on."""
        if self.cuts is None:
            return piece
        cuts = [cut.start() for cut in self.cuts.finditer(piece, max(1, len(piece) - _LEAST_PIECE_CHARS))]
        return piece[cuts[-1] :] if cuts else piece

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Of each text, as far as the library does not truncate it."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def all_ids(self, text: str) -> list[int]:
        """Of one text, what the library truncates as well."""
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return [token_id for part in (encoding, *encoding.overflowing) for token_id in part.ids]

    def _extend(
        self, ids: list[int], text: str, start: int, num: int, cuts: re.Pattern[str]
    ) -> Generator[None, None, None]:
        """Add a text's tokens from `start` on to those before it, until there is one more than `num`."""
        stop = min(len(text), self.max_chars)
        while len(ids) <= num and start < stop:
            yield
            chars_per_token = (start + 1) / (len(ids) + 1)
            num_chars = int((num + 1 - len(ids)) * chars_per_token * 1.1)
            num_chars = min(_PIECE_CHARS, max(_LEAST_PIECE_CHARS, num_chars))
            end = yield from self._piece_end(text, start + num_chars, cuts)
            ids += self.ids([text[start:end]])[0]
            start = end

    def _piece_end(self, text: str, least: int, cuts: re.Pattern[str]) -> Generator[None, None, int]:
        """The first place from `least` on where a text may be cut; if there is none, where it ends."""
        stop = min(len(text), self.max_chars)
        while least < stop:
            cut = cuts.search(text, least, min(stop, least + _SEARCH_CHARS))
            if cut is not None:
                return cut.start()
            least += _SEARCH_CHARS
            yield
        return stop

    def _piece_start(self, text: str, most: int, end: int, cuts: re.Pattern[str]) -> Generator[None, None, int]:
        """A place before `end`, at about `most`, where a text may be cut; if there is none, 0."""
        while most > 0:
            cut = cuts.search(text, most, end)
            if cut is not None:
                return cut.start()
            most, end = most - _PIECE_CHARS, most
            yield
        return 0


def runs_of(inputs: Sequence[Sequence[object]], most: int, longest: int, cost_per_input: int = 0) -> Iterator[range]:
    """Runs of at most `most` characters or ids, or one input each, of which at most `longest` count."""
    start = cost = 0
    for index, item in enumerate(inputs):
        cost_of_item = min(len(item), longest) + CHARS_PER_TEXT + cost_per_input
        if cost + cost_of_item > most and index > start:
            yield range(start, index)
            start, cost = index, 0
        cost += cost_of_item
    yield range(start, len(inputs))
