"""Find the late chunks of a tokenized text: which characters and which tokens belong to each.

Owns the borders of chunks, and what becomes of tokens that are not of the text. Pure.

    rows        [CLS] p p  t t t t t │ t t t t │ t t t [SEP]
    chunks      ╰──1──╯    ╰───1───╯ ╰───2───╯ ╰─────3─────╯

A token belongs to the chunk that has its last character, because the tokens of some tokenizers begin with the blank
before a word. Special tokens before the text belong to the chunk that has its first token, those behind it to the chunk
that has its last one, so a chunk of all of the text has the text's own vector. The tokens of a prompt (p) belong to
none. Source of the former: the late-chunking paper's evaluation (jina-ai/late-chunking, `_extend_special_tokens`).
"""

from itertools import chain
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from vecd.gateway.errors import INPUT, BadRequest
from vecd.gateway.request import LateChunking, TokenizedInput

_LOOKED_AT = 12
"""Characters before a border that show whether a sentence ends there."""
_CLOSING = "\"'”’»)]」』）"
_ENDS = frozenset(".!?…")
"""Of sentences, where a blank follows."""
_ENDS_WITHOUT_BLANK = frozenset("。！？")


class LateChunks(NamedTuple):
    ranges: NDArray[np.int32]
    """[n, 2]: where each begins and ends, in characters of the text."""
    rows: NDArray[np.int32]
    """[n, 2]: its first row of the sequence's tokens, and the one behind its last; equal if all were cut off."""
    prompt: tuple[int, int]
    """The rows from and to which no chunk has any, though a chunk may span them."""
    num_rows: int
    is_truncated: NDArray[np.bool_]
    """[n]: some of its tokens were cut off."""

    @property
    def borders(self) -> NDArray[np.int32]:
        """The rows at which chunks or the prompt begin or end, ascending, with 0 and `num_rows`."""
        return np.unique(np.concatenate((self.rows.ravel(), self.prompt, (0, self.num_rows)), dtype=np.int32))


class _Own(NamedTuple):
    """Where the text's own tokens are, in characters; ascending."""

    starts: list[int]
    last_chars: list[int]


def find_chunks(
    text: str, item: TokenizedInput, late: LateChunking, index: int, num_prefix: int, *, is_whole: bool = True
) -> LateChunks:
    """The chunks of input `index`, whose tokens have offsets: 1 ms for 8,192 tokens, at worst 5 ms. `num_prefix`:
    special tokens before its prompt. `is_whole` False: the text was longer than is read of one. Raises BadRequest for a
    text without tokens, for a range that ends behind the text, and for a chunk without tokens, unless they were cut
    off."""
    offsets = item.offsets
    assert offsets is not None
    of_text = np.flatnonzero(offsets[:, 0] >= 0)
    if not len(of_text):
        raise BadRequest(f"'{INPUT}[{index}]' has no tokens of its own, so it has no late chunks", param=INPUT)
    first, stop = int(of_text[0]), int(of_text[-1]) + 1
    starts, ends = offsets[first:stop].T
    starts = np.minimum(starts, len(text) - 1)  # byte pairs of blanks may be said to be behind them
    last_chars = np.maximum.accumulate(np.maximum(starts, ends - 1))
    if late.ranges is not None:
        ranges = np.array(late.ranges[index], np.int32).reshape(-1, 2)
        is_outside = ranges[:, 1] > len(text)
        if is_whole and is_outside.any():
            _refuse(ranges, is_outside, index, f"ends behind the text, which has {len(text)} characters")
    else:
        assert late.max_tokens is not None
        ranges = _split(text, _Own(starts.tolist(), last_chars.tolist()), late.max_tokens)
    rows = (first + np.searchsorted(last_chars, ranges)).astype(np.int32)
    num_kept_chars = int(last_chars[-1]) + 1
    is_truncated = np.zeros(len(ranges), np.bool_)
    if item.is_truncated:
        is_truncated = ranges[:, 1] > len(text) - len(text[num_kept_chars:].lstrip())
    is_empty = rows[:, 0] == rows[:, 1]
    is_wrong = is_empty & ~is_truncated
    if is_wrong.any():
        if late.are_inputs:
            raise BadRequest(
                f"'{INPUT}[{np.argmax(is_wrong)}]' has no token of its own in the text that all inputs make together, "
                "so it has no vector",
                param=INPUT,
            )
        _refuse(ranges, is_wrong, index, "has no token of the text")
    if late.ranges is None:
        ranges = np.minimum(ranges, num_kept_chars) if item.is_truncated else ranges
    rows[rows[:, 0] == first, 0] = 0
    rows[rows[:, 1] == stop, 1] = item.num_tokens
    rows[is_empty] = 0
    return LateChunks(ranges, rows, (min(num_prefix, first), first), item.num_tokens, is_truncated)


def _refuse(ranges: NDArray[np.int32], are_wrong: NDArray[np.bool_], index: int, why: str) -> NoReturn:
    number = int(np.argmax(are_wrong))
    start, end = ranges[number].tolist()
    raise BadRequest(
        f"'late_chunking': range {number} of '{INPUT}[{index}]', [{start}, {end}], {why}", param="late_chunking"
    )


# --- borders ----------------------------------------------------------------------------------------------------


def _split(text: str, own: _Own, max_tokens: int) -> NDArray[np.int32]:
    """Ranges of at most `max_tokens` tokens that have all of the text, more only for a character that has more."""
    borders, first, num_tokens = [0], 0, len(own.starts)
    while num_tokens - first > max_tokens:
        first = _next_border(text, own, first, max_tokens)
        if first < num_tokens:
            borders.append(own.starts[first])
    borders.append(len(text))
    return np.array([borders[:-1], borders[1:]], np.int32).T


def _next_border(text: str, own: _Own, first: int, max_tokens: int) -> int:
    """The token that begins the chunk behind that of token `first`: as late as possible in the second half of what may
    be, where a sentence ends; else where a word does; else anywhere."""
    most, least = first + max_tokens, first + max_tokens // 2
    for test in (_is_behind_sentence, _is_behind_word):
        for token in range(most, least, -1):
            if _may_begin(own, token) and test(text, own.starts[token]):
                return token
    others = chain(range(most, first, -1), range(most + 1, len(own.starts)))
    return next((token for token in others if _may_begin(own, token)), len(own.starts))


def _may_begin(own: _Own, token: int) -> bool:
    """No character has parts in this token and in one before."""
    return own.last_chars[token - 1] < own.starts[token]


def _is_behind_sentence(text: str, char: int) -> bool:
    """A sentence or a line ends before a character, or before the blanks that it begins with."""
    before = text[max(0, char - _LOOKED_AT) : char + text[char].isspace()]
    stripped = before.rstrip()
    end, blanks = stripped.rstrip(_CLOSING)[-1:], before[len(stripped) :]
    return end in _ENDS_WITHOUT_BLANK or (end in _ENDS and blanks != "") or "\n" in blanks


def _is_behind_word(text: str, char: int) -> bool:
    return text[char].isspace() or text[char - 1].isspace()
