"""Turns inputs into token ids, without transformers and without ever blocking the event loop for long.

Owns the `tokenizers` library and its threads. Never truncates silently: what was cut is counted. Called by
`gateway.app`.

`Tokenizer.encode` holds the GIL for its whole length (2.4 s for a million CJK characters, whatever the truncation);
the batch calls release it. So texts are cut by characters first, and anything but a short input goes to a thread.
"""

import asyncio
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tokenizers
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from gateway.errors import BadRequest
from gateway.request import TokenizedInput
from shm.card import ModelCard, ModelError

_INLINE_CHARS = 2000
"""Up to this many characters are tokenized on the event loop: 0.8 ms of English, at worst 4.6 ms (CJK)."""

_CHARS_PER_TEXT = 20
"""What a text costs beside its characters, in characters."""

_CHARS_PER_TOKEN = 250
"""A text is cut after max_tokens times this many characters, before it is tokenized. No tokenizer makes fewer than
one token of that much real text; text-embeddings-inference draws the same line."""

_NUM_THREADS = 2


class Tokenizer:
    """The model's tokenizer. `tokenize_texts` and `check_token_ids` are what the gateway calls."""

    def __init__(self, card: ModelCard, max_tokens: int, token_id_policy: str) -> None:
        """Read the model's tokenizer.json. Raises ModelError when it is no tokenizer."""
        path = Path(card.tokenizer_file)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"{path}: not a tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens)
        if card.lowercase:
            _lowercase_first(self._tokenizer)
        self._prompt = card.prompt
        self._max_tokens = max_tokens
        self._max_chars = max_tokens * _CHARS_PER_TOKEN
        self._vocab_size = card.vocab_size
        self._policy = token_id_policy
        self._prefix, self._suffix = _frame_of(self._tokenizer)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")

    def estimate_tokens(self, inputs: Sequence[str | list[int]]) -> int:
        """A guess from lengths alone, for admission: 3 characters a token, or the ids themselves."""
        most = self._max_tokens
        return sum(min(most, len(x) // 3 + 2 if isinstance(x, str) else len(x)) for x in inputs)

    async def tokenize_texts(self, texts: list[str]) -> list[TokenizedInput]:
        """Tokenize, with special tokens, cut on the right to max_tokens."""
        if sum(map(len, texts)) + len(texts) * (_CHARS_PER_TEXT + len(self._prompt)) <= _INLINE_CHARS:
            return self._encode(texts)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._encode, texts)

    def check_token_ids(self, id_lists: list[list[int]]) -> list[TokenizedInput]:
        """Take token ids as they are, by the policy:

        - "model": every list is taken as the model's own ids;
        - "auto": only lists framed by the model's special tokens, as its tokenizer makes them. Others are most often
          ids of another vocabulary (LangChain sends cl100k's by default) and would be embedded as unrelated text;
        - "reject": none.

        Raises BadRequest, naming `input`, for a list that the policy refuses and for ids outside the vocabulary.
        """
        return [self._check_one(index, ids) for index, ids in enumerate(id_lists)]

    def _check_one(self, index: int, ids: list[int]) -> TokenizedInput:
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise BadRequest(
                f"'input[{index}]' has a token id outside the model's vocabulary, 0 to {self._vocab_size - 1}",
                param="input",
            )
        if self._policy == "reject" or (self._policy == "auto" and not self._is_framed(ids)):
            raise BadRequest(self._refusal(index), param="input")
        kept = ids if len(ids) <= self._max_tokens else self._truncate(ids)
        return TokenizedInput(array("i", kept).tobytes(), len(kept), len(kept) < len(ids))

    def _is_framed(self, ids: list[int]) -> bool:
        prefix, suffix = self._prefix, self._suffix
        if not prefix and not suffix:
            return False
        long_enough = len(ids) >= len(prefix) + len(suffix)
        return long_enough and ids[: len(prefix)] == prefix and ids[len(ids) - len(suffix) :] == suffix

    def _truncate(self, ids: list[int]) -> list[int]:
        if not self._is_framed(ids):
            return ids[: self._max_tokens]
        return ids[: self._max_tokens - len(self._suffix)] + self._suffix

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
        prepared = [self._prompt + text[: self._max_chars] for text in texts]
        tokenized = []
        for text, encoding in zip(texts, self._tokenizer.encode_batch_fast(prepared), strict=True):
            ids = encoding.ids
            is_truncated = bool(encoding.overflowing) or len(text) > self._max_chars
            tokenized.append(TokenizedInput(array("i", ids).tobytes(), len(ids), is_truncated))
        return tokenized


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
