"""Turns inputs into token ids, without transformers and without ever blocking the event loop for long.

Owns the `tokenizers` library. Never truncates silently: what was cut is counted. Called by `gateway.app`.

`Tokenizer.encode` holds the GIL for its whole length (2.4 s for a million CJK characters, whatever the truncation);
the batch calls release it. So texts are cut by characters first, and anything but a short request goes to a thread, run
by run: the first inputs are computed while the others are tokenized, and requests take turns at the threads.
"""

import os
from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeGuard, cast

import tokenizers
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from gateway.errors import BadRequest
from gateway.request import TokenIds, TokenizedInput
from gateway.threads import Threads
from shm.card import ModelCard, ModelError

_INLINE_CHARS = 2000
"""Up to this many characters are tokenized on the event loop: 0.8 ms of English, at worst 4.6 ms (CJK)."""

_INLINE_IDS = 8192
"""Up to this many token ids are checked on the event loop: 0.4 ms."""

_CHARS_PER_TEXT = 20
"""What a text costs beside its characters, in characters."""

_CHARS_PER_TOKEN = 250
"""A text is cut after max_tokens times this many characters, before it is tokenized. No tokenizer makes fewer than
one token of that much real text; text-embeddings-inference draws the same line."""

_RUN_CHARS = 16 * 1024
"""Of the texts that are tokenized in one call, unless it is one text: 3 ms of English, 14 ms of CJK."""

_RUN_IDS = 32 * 1024
"""Of the id lists that are checked in one call: 1.6 ms."""


class Tokenizer:
    """The model's tokenizer. `tokenize_now` is what the gateway tries first, `tokenize` what always works.

    Texts are tokenized with the model's special tokens and its prompt. Token ids are taken as they are, by the policy:

    - "model": every list is taken as the model's own ids;
    - "auto": only lists framed by the model's special tokens, as its tokenizer makes them. Others are most often
      ids of another vocabulary (LangChain sends cl100k's by default) and would be embedded as unrelated text;
    - "reject": none.

    Both are cut on the right to `max_tokens`, special tokens kept.
    """

    def __init__(self, card: ModelCard, max_tokens: int, token_id_policy: str) -> None:
        """Read the model's tokenizer.json. Raises ModelError when it is no tokenizer."""
        path = Path(card.tokenizer_file)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"{path}: not a tokenizer: {error}") from error
        self._tokenizer.no_padding()
        # One more than is kept tells what is too long. The library's own `overflowing` copies what was cut, under the
        # GIL: 15 ms for two million characters.
        self._tokenizer.enable_truncation(max_tokens + 1)
        if card.lowercase:
            _lowercase_first(self._tokenizer)
        # The library's own threads take the workers' cores and gain nothing: 2,048 texts of 200 words take as long
        # with them (2 cores).
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.threads = Threads()
        self.max_tokens = max_tokens
        self.max_chars = max_tokens * _CHARS_PER_TOKEN
        """What is looked at of a text."""
        self._prompt = card.prompt
        self._vocab_size = card.vocab_size
        self._policy = token_id_policy
        self._prefix, self._suffix = _frame_of(self._tokenizer)

    def estimate_tokens(self, inputs: list[str] | list[TokenIds]) -> int:
        """A guess from lengths alone, for admission: 3 characters a token, or the ids themselves."""
        most = self.max_tokens
        return sum(min(most, len(x) // 3 + 2 if isinstance(x, str) else len(x)) for x in inputs)

    def tokenize_now(self, inputs: list[str] | list[TokenIds]) -> list[TokenizedInput] | None:
        """Tokenize at once, on the event loop; None when that would hold it up. Raises BadRequest as `tokenize`."""
        is_short = self._cost(inputs) <= (_INLINE_CHARS if _are_texts(inputs) else _INLINE_IDS)
        return self._take_run(inputs, range(len(inputs))) if is_short else None

    async def tokenize(self, inputs: list[str] | list[TokenIds]) -> AsyncGenerator[list[TokenizedInput], None]:
        """Tokenize in the threads; yields runs of consecutive inputs, in order.

        Raises BadRequest, naming `input`, for a list of ids that the policy refuses and for ids outside the
        vocabulary, when it comes to them.
        """
        for run in self._runs(inputs):
            yield await self.threads.call(partial(self._take_run, inputs, run))

    def _cost(self, inputs: Sequence[str | TokenIds]) -> int:
        """In characters, or ids: at least what `_CHARS_PER_TEXT` says for each, so there is no need to count many."""
        per_input = _CHARS_PER_TEXT + len(self._prompt)
        most = _INLINE_IDS
        if len(inputs) * per_input > most:
            return most + 1
        return sum(map(len, inputs)) + len(inputs) * per_input

    def _runs(self, inputs: Sequence[str | TokenIds]) -> Iterator[range]:
        """Cuts the inputs into runs of at most `_RUN_CHARS` or `_RUN_IDS`, or one input each."""
        most, longest = (_RUN_CHARS, self.max_chars) if _are_texts(inputs) else (_RUN_IDS, _RUN_IDS)
        start = cost = 0
        for index, item in enumerate(inputs):
            cost_of_item = min(len(item), longest) + _CHARS_PER_TEXT
            if cost + cost_of_item > most and index > start:
                yield range(start, index)
                start, cost = index, 0
            cost += cost_of_item
        yield range(start, len(inputs))

    def _take_run(self, inputs: list[str] | list[TokenIds], run: range) -> list[TokenizedInput]:
        if _are_texts(inputs):
            return self._encode(inputs[run.start : run.stop])
        return [self._check_one(index, cast(TokenIds, inputs[index])) for index in run]

    def _check_one(self, index: int, ids: TokenIds) -> TokenizedInput:
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise BadRequest(
                f"'input[{index}]' has a token id outside the model's vocabulary, 0 to {self._vocab_size - 1}",
                param="input",
            )
        if self._policy == "reject" or (self._policy == "auto" and not self._is_framed(ids)):
            raise BadRequest(self._refusal(index), param="input")
        kept = self._truncated(ids)
        return TokenizedInput(array("i", kept).tobytes(), len(kept), len(kept) < len(ids))

    def _is_framed(self, ids: TokenIds) -> bool:
        prefix, suffix = self._prefix, self._suffix
        if not prefix and not suffix:
            return False
        long_enough = len(ids) >= len(prefix) + len(suffix)
        return long_enough and [*ids[: len(prefix)]] == prefix and [*ids[len(ids) - len(suffix) :]] == suffix

    def _truncated(self, ids: TokenIds) -> TokenIds:
        if len(ids) <= self.max_tokens:
            return ids
        if not self._is_framed(ids):
            return ids[: self.max_tokens]
        return [*ids[: self.max_tokens - len(self._suffix)], *self._suffix]

    def _refusal(self, index: int) -> str:
        if self._policy == "reject":
            return (
                f"'input[{index}]' is a list of token ids, and this server takes none (--token-ids reject): send text"
            )
        return (
            f"'input[{index}]' is a list of token ids that this model's tokenizer did not make: it is not framed by "
            "its special tokens. Send text (LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False)), or start "
            "the server with --token-ids model to have every list taken as the model's own ids"
        )

    def _encode(self, texts: list[str]) -> list[TokenizedInput]:
        prepared = [self._prompt + text[: self.max_chars] for text in texts]
        tokenized = []
        for text, encoding in zip(texts, self._tokenizer.encode_batch_fast(prepared), strict=True):
            ids = encoding.ids
            kept = self._truncated(ids)
            is_truncated = len(kept) < len(ids) or len(text) > self.max_chars
            tokenized.append(TokenizedInput(array("i", kept).tobytes(), len(kept), is_truncated))
        return tokenized


def _are_texts(inputs: Sequence[str | TokenIds]) -> TypeGuard[list[str]]:
    """An `EmbedRequest` has inputs of one kind."""
    return isinstance(inputs[0], str)


def _lowercase_first(tokenizer: tokenizers.Tokenizer) -> None:
    others = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = NormalizerSequence([Lowercase(), *others])


def _frame_of(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The special ids that the tokenizer puts before and behind a text."""
    encoding = tokenizer.encode("a")
    mask = encoding.special_tokens_mask
    start = next((i for i, special in enumerate(mask) if not special), len(mask))
    end = len(mask) - next((i for i, special in enumerate(reversed(mask)) if not special), 0)
    return encoding.ids[:start], encoding.ids[max(start, end) :]
