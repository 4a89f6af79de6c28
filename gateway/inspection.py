"""What a caller may ask of the tokenizer itself: the tokens of a text, the text of tokens.

Owns the bounds of such a question, and the offsets of tokens. Knows no request. Called by `gateway.tokenizer`, in its
threads.
"""

from collections.abc import Generator, Sequence

import numpy as np
import tokenizers

from gateway.errors import BadRequest
from gateway.request import Token, TokenIds
from gateway.text_tokens import TextTokens
from gateway.token_ids import NO_FRAME, Frame

_MAX_CHARS = 1_000_000
"""Of all texts of one request: a `Token` takes 200 bytes, and its line in an answer as many."""

_MAX_IDS = 250_000
"""Of all lists of one request."""


class Inspector:
    def __init__(self, tokenizer: tokenizers.Tokenizer, texts: TextTokens, frame: Frame, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._frame = frame
        self._vocab_size = vocab_size

    def describe_steps(
        self, texts: Sequence[str], prompt: str, add_special_tokens: bool
    ) -> Generator[None, None, list[list[Token]]]:
        """The tokens of each text with the prompt before it. Yields between pieces of work. Raises BadRequest."""
        self._check_texts(texts, prompt)
        frame = self._frame if add_special_tokens else NO_FRAME
        before, behind = self._special(frame.prefix), self._special(frame.suffix)
        described = []
        for text in texts:
            tokens = list(before)
            num_bytes = 0
            context = ""
            for piece in (yield from self._texts.piece_steps(text, prompt)):
                tokens += self._tokens_of(piece, context, num_bytes)
                num_bytes += len(piece.encode())
                context = self._texts.last_part(piece)
                yield
            described.append([*tokens, *behind])
        return described

    def decode_steps(self, lists: Sequence[TokenIds], skip_special_tokens: bool) -> Generator[None, None, list[str]]:
        """The text of each list. Yields between pieces of work. Raises BadRequest."""
        num_ids = sum(map(len, lists))
        if num_ids > _MAX_IDS:
            raise BadRequest(f"The lists have {num_ids} token ids, at most {_MAX_IDS} in one request")
        texts = []
        for index, ids in enumerate(lists):
            if len(ids) and (min(ids) < 0 or max(ids) >= self._vocab_size):
                raise BadRequest(
                    f"List {index} has a token id outside the model's vocabulary, 0 to {self._vocab_size - 1}"
                )
            texts += self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
            yield
        return texts

    def _check_texts(self, texts: Sequence[str], prompt: str) -> None:
        for index, text in enumerate(texts):
            if len(text) > self._texts.max_chars:
                raise BadRequest(
                    f"Text {index} has more than {self._texts.max_chars} characters, the most that are looked at"
                )
        num_chars = sum(map(len, texts)) + len(texts) * len(prompt)
        if num_chars > _MAX_CHARS:
            raise BadRequest(
                f"The texts have {num_chars} characters, prompts included, at most {_MAX_CHARS} in one request"
            )

    def _special(self, ids: Sequence[int]) -> list[Token]:
        return [Token(token_id, self._tokenizer.id_to_token(token_id) or "", True, None, None) for token_id in ids]

    def _tokens_of(self, piece: str, context: str, start: int) -> list[Token]:
        """`start`: of the piece in its text, in bytes. `context`: what is before it, from some place on where the text
        may be cut, too: the library's offsets are others for what a text begins with."""
        [first] = self._tokenizer.encode_batch([context + piece], add_special_tokens=False)
        at = _byte_offsets(context + piece, start - len(context.encode()))
        if first.overflowing:
            raise BadRequest(
                f"A text has a part of {len(piece)} characters that can be cut nowhere, and has more than {len(first)} "
                "tokens, the most of one part"
            )
        tokens = [
            Token(token_id, token, False, at[begin], at[end])
            for token_id, token, (begin, end) in zip(first.ids, first.tokens, first.offsets, strict=True)
        ]
        return tokens[len(self._texts.all_ids(context)) :] if context else tokens


def _byte_offsets(text: str, start: int) -> Sequence[int]:
    """Of each character, and of the end."""
    if text.isascii():
        return range(start, start + len(text) + 1)
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    offsets: list[int] = np.concatenate(([start], start + np.cumsum(widths))).tolist()
    return offsets
