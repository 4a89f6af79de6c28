"""The tokenizer as an API: the tokens of texts, and the texts of tokens.

Owns the limits of such a request, and of all of them together, and the offsets of tokens. Knows no HTTP.

Only the tokens of one piece of a text exist as Python objects at a time, because an object takes three times as much
memory as in a response: they are written as they are made.
"""

from array import array
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import tokenizers

from vecd.gateway.errors import INPUT, BadRequest
from vecd.gateway.request import ALL, Collect, Token, TokenIds
from vecd.gateway.tokenization.frames import TextFrame
from vecd.gateway.tokenization.text_tokens import Described, TextTokens

MAX_CHARS = 2**18
"""Of all texts of one request, prompts included. A character may be a token, which takes 70 bytes of a response. This
number of CJK characters takes 1.3 s, 29 MB and turns of up to 9 ms; twice as many take 51 MB, and one turn of 30 to 66
ms (2 cores)."""

MAX_IDS = 250_000
"""Of all lists of one request."""

MAX_SIZE = 2**20
"""Characters and ids of all such requests at a time; one caller gets half."""

_SHORT_SIZE = 8 * 1024
"""A request up to this size is short, and need not wait for a long one of the same tenant."""

_SIZE_PER_ITEM = 64
"""What a text or a list counts besides its length."""

_TOKENS_PER_STEP = 1000
"""Tokens written at once: 1.5 ms."""


def most_of_one_caller(size: int) -> int:
    """What a caller's requests may hold together once one of this size is among them: less with a long one."""
    return MAX_SIZE // 2 if size <= _SHORT_SIZE else MAX_SIZE // 4


def size_of(items: Sequence[str] | Sequence[TokenIds], prompt: str = "") -> int:
    """The size of a request, in characters or ids. Above 0."""
    return 1 + sum(map(len, items)) + len(items) * (_SIZE_PER_ITEM + len(prompt))


class TokenizeApi:
    def __init__(
        self, tokenizer: tokenizers.Tokenizer, texts: TextTokens, frames: Mapping[bool, TextFrame], vocab_size: int
    ) -> None:
        """`frames`: with special tokens, and without."""
        self._tokenizer = tokenizer
        self._texts = texts
        self._frames = frames
        self._vocab_size = vocab_size

    def describe_steps(
        self, texts: Sequence[str], prompt: str, add_special_tokens: bool, collect: Collect
    ) -> Generator[None, None, int]:
        """Collect the tokens of each text with the prompt before it; returns their number. The first step
        raises BadRequest for too much at once."""
        self._check_texts(texts, prompt)
        yield
        frame = self._frames[add_special_tokens]
        template, prompt = frame.around(prompt)
        before, behind = self._special(template.prefix), self._special(template.suffix)
        num_tokens = 0
        for index, given in enumerate(texts):
            text = given.strip() if frame.strips else given
            at = _byte_offsets(prompt + text)
            collect(index, before)
            for piece in self._texts.described_steps(text, prompt, ALL):
                for tokens in () if piece is None else _tokens_of(piece, at, len(prompt)):
                    collect(index, tokens)
                    num_tokens += len(tokens)
                    yield
                yield
            collect(index, behind)
            num_tokens += len(before) + len(behind)
        return num_tokens

    def decode_steps(self, lists: Sequence[TokenIds], skip_special_tokens: bool) -> Generator[None, None, list[str]]:
        """The text of each list. The first step raises BadRequest for too much at once."""
        num_ids = sum(map(len, lists))
        if num_ids > MAX_IDS:
            raise BadRequest(f"The lists have {num_ids} token ids, at most {MAX_IDS} in one request", param=INPUT)
        yield
        texts = []
        for index, ids in enumerate(lists):
            if len(ids) and (min(ids) < 0 or max(ids) >= self._vocab_size):
                raise BadRequest(
                    f"List {index} has a token id outside the model's vocabulary, 0 to {self._vocab_size - 1}",
                    param=INPUT,
                )
            texts += self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
            yield
        return texts

    def _check_texts(self, texts: Sequence[str], prompt: str) -> None:
        for index, text in enumerate(texts):
            if len(text) > self._texts.max_chars:
                raise BadRequest(
                    f"Text {index} has more than {self._texts.max_chars} characters, the most that are looked at",
                    param=INPUT,
                )
        num_chars = sum(map(len, texts)) + len(texts) * len(prompt)
        if num_chars > MAX_CHARS:
            raise BadRequest(
                f"The texts have {num_chars} characters, prompts included, at most {MAX_CHARS} in one request",
                param=INPUT,
            )

    def _special(self, ids: Sequence[int]) -> list[Token]:
        return [Token(token_id, self._tokenizer.id_to_token(token_id) or "", True, None, None) for token_id in ids]


def _tokens_of(piece: Described, at: Sequence[int], num_prompt: int) -> Iterator[list[Token]]:
    """The tokens of a piece, some at a time. `at`: the byte offset of each character of the prompt and the text."""
    encoding, num_before, num_chars, shift = piece
    shift += num_prompt
    if encoding.overflowing:
        raise BadRequest(
            f"A text has a part of {num_chars} characters that can be cut nowhere, and has more than "
            f"{len(encoding)} tokens, the most of one part",
            param=INPUT,
        )
    described = zip(encoding.ids, encoding.tokens, encoding.offsets, strict=True)
    own = islice(described, num_before, None)
    while some := list(islice(own, _TOKENS_PER_STEP)):
        yield [
            Token(token_id, token, False, at[begin + shift], at[end + shift]) for token_id, token, (begin, end) in some
        ]


def _byte_offsets(text: str) -> Sequence[int]:
    """The byte offset of each character, and of the end."""
    if text.isascii():
        return range(len(text) + 1)
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (codes >= 0x80).astype(np.int32) + (codes >= 0x800) + (codes >= 0x10000)
    return array("i", np.concatenate(([0], np.cumsum(widths)), dtype=np.int32).tobytes())
