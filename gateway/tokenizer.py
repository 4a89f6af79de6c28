"""Turns inputs into token ids, without transformers and without ever blocking the event loop for long.

Owns the `tokenizers` library. Never truncates silently: what was cut is counted. Called by `gateway.app`.

`Tokenizer.encode` holds the GIL for its whole length (2.4 s for a million CJK characters, whatever the truncation);
the batch calls release it. So texts are cut by characters first, and anything but a short request goes to a thread, run
by run: the first inputs are computed while the others are tokenized, and requests take turns at the threads.

The library truncates what it has tokenized. Where a text may be cut without changing its tokens
(`gateway.text_cuts`), it is tokenized piece by piece until there are as many as the model takes:

    text      │ piece │ piece │ piece │ never looked at …
    tokens    └ 1030 ─┴ 1100 ─┴ … ─ more than max_tokens

A model's tokenizer takes its special tokens where they stand in a text, too: "[SEP]" in a text ends it, as far as the
model knows. So whoever sends somebody else's text lets that end it, or mask it. sentence-transformers and
text-embeddings-inference do so, hence the default; `literal_special_tokens` makes plain characters of them, and gives
such texts, and no others, vectors that theirs do not have.
"""

import os
import re
from array import array
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from pathlib import Path
from typing import TypeGuard, cast

import tokenizers
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from gateway.errors import BadRequest
from gateway.request import TokenIds, TokenizedInput
from gateway.text_cuts import cut_pattern
from gateway.threads import Threads
from shm.card import ModelCard, ModelError

_INLINE_CHARS = 2000
"""Up to this many characters are tokenized on the event loop: 0.8 ms of English, at worst 4.6 ms (CJK)."""

_INLINE_IDS = 8192
"""Up to this many token ids are checked on the event loop: 0.4 ms."""

_CHARS_PER_TEXT = 20
"""What a text costs beside its characters, in characters."""

_CHARS_PER_TOKEN, _MIN_CHARS_PER_TOKEN, _MANY_CHARS = 1000, 250, 2_000_000
"""A text is cut after max_tokens times this many characters, before it is tokenized; fewer where that would be very
many in all, but never fewer than the second. Ordinary text has 2 to 6 characters a token; only long runs of blanks, and
words of thousands of letters, have hundreds. text-embeddings-inference draws the line at 250."""

_RUN_CHARS = 16 * 1024
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

    def __init__(
        self, card: ModelCard, max_tokens: int, token_id_policy: str, *, literal_special_tokens: bool = False
    ) -> None:
        """Read the model's tokenizer.json. `literal_special_tokens`: those in a text are taken for characters.

        Raises ModelError when it is no tokenizer.
        """
        path = Path(card.tokenizer_file)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"{_original(path)}: not a tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = literal_special_tokens
        if card.lowercase:
            _lowercase_first(self._tokenizer)
        # The library's own threads take the workers' cores and gain nothing: 2,048 texts of 200 words take as long
        # with them (2 cores).
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.threads = Threads()
        self.max_tokens = max_tokens
        self.max_chars = max_tokens * max(_MIN_CHARS_PER_TOKEN, min(_CHARS_PER_TOKEN, _MANY_CHARS // max_tokens))
        """What is looked at of a text."""
        self._prompt = card.prompt
        self._vocab_size = card.vocab_size
        self._policy = token_id_policy
        self._prefix, self._suffix = _frame_of(self._tokenizer)
        self._room = max_tokens - len(self._prefix) - len(self._suffix)
        """Tokens of a text that are kept."""
        is_framed_plainly = self._room > 0 and _is_framed_plainly(self._tokenizer, self._prefix, self._suffix)
        self._cuts = cut_pattern(self._tokenizer) if is_framed_plainly else None
        self._first_chars = min(_PIECE_CHARS, max(_LEAST_PIECE_CHARS, (self._room + 1) * _CHARS_PER_EXPECTED_TOKEN))
        # One more than is kept tells what is too long. The library's own `overflowing` copies what was cut, under the
        # GIL: 15 ms for two million characters.
        self._tokenizer.enable_truncation(max_tokens + 1)

    def estimate_tokens(self, inputs: list[str] | list[TokenIds]) -> int:
        """A guess from lengths alone, for admission: 3 characters a token, or the ids themselves."""
        most = self.max_tokens
        return sum(min(most, len(x) // 3 + 2 if isinstance(x, str) else len(x)) for x in inputs)

    def tokenize_now(self, inputs: list[str] | list[TokenIds]) -> list[TokenizedInput] | None:
        """Tokenize at once, on the event loop; None when that would hold it up. Raises BadRequest as `tokenize`."""
        is_short = self._cost(inputs) <= (_INLINE_CHARS if _are_texts(inputs) else _INLINE_IDS)
        return _exhaust(self._take_run(inputs, range(len(inputs)))) if is_short else None

    async def tokenize(
        self, inputs: list[str] | list[TokenIds], tenant: str = ""
    ) -> AsyncGenerator[list[TokenizedInput], None]:
        """Tokenize in the threads; yields runs of consecutive inputs, in order. `tenant`: see `Threads`.

        Raises BadRequest, naming `input`, for a list of ids that the policy refuses and for ids outside the
        vocabulary, when it comes to them.
        """
        for run in self._runs(inputs):
            yield await self.threads.run(self._take_run(inputs, run), tenant)

    def _cost(self, inputs: Sequence[str | TokenIds]) -> int:
        """In characters, or ids: at least what `_CHARS_PER_TEXT` says for each, so there is no need to count many."""
        per_input = _CHARS_PER_TEXT + len(self._prompt)
        most = _INLINE_IDS
        if len(inputs) * per_input > most:
            return most + 1
        return sum(map(len, inputs)) + len(inputs) * per_input

    def _runs(self, inputs: Sequence[str | TokenIds]) -> Iterator[range]:
        """Cuts the inputs into runs of at most `_RUN_CHARS` or `_RUN_IDS`, or one input each."""
        if _are_texts(inputs):
            most, longest = _RUN_CHARS, self.max_chars if self._cuts is None else self._first_chars
        else:
            most, longest = _RUN_IDS, _RUN_IDS
        return _runs_of(inputs, most, longest)

    def _take_run(self, inputs: list[str] | list[TokenIds], run: range) -> Generator[None, None, list[TokenizedInput]]:
        """Yields between pieces of work."""
        if not _are_texts(inputs):
            yield from ()
            return [self._check_one(index, cast(TokenIds, inputs[index])) for index in run]
        texts = inputs[run.start : run.stop]
        return self._encode(texts) if self._cuts is None else (yield from self._encode_pieces(texts, self._cuts))

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
        """Each text as a whole, as far as it is looked at."""
        prepared = [self._prompt + text[: self.max_chars] for text in texts]
        tokenized = []
        for text, encoding in zip(texts, self._tokenizer.encode_batch_fast(prepared), strict=True):
            ids = encoding.ids
            kept = self._truncated(ids)
            is_truncated = len(kept) < len(ids) or len(text) > self.max_chars
            tokenized.append(TokenizedInput(array("i", kept).tobytes(), len(kept), is_truncated))
        return tokenized

    # --- piece by piece -------------------------------------------------------------------------------------

    def _encode_pieces(self, texts: list[str], cuts: re.Pattern[str]) -> Generator[None, None, list[TokenizedInput]]:
        """The same as `_encode`, but of each text only as much as it takes to know what is kept of it."""
        ends = []
        for text in texts:
            end = yield from self._piece_end(text, self._first_chars, cuts)
            ends.append(end)
        firsts = [self._prompt + text[:end] for text, end in zip(texts, ends, strict=True)]
        ids_of_firsts: list[list[int]] = []
        for part in _runs_of(firsts, _RUN_CHARS, self.max_chars):  # some could be cut nowhere
            ids_of_firsts += self._plain_ids(firsts[part.start : part.stop])
            yield
        tokenized = []
        for text, end, ids in zip(texts, ends, ids_of_firsts, strict=True):
            yield from self._extend(ids, text, end, cuts)
            kept = [*self._prefix, *ids[: self._room], *self._suffix]
            is_truncated = len(ids) > self._room or len(text) > self.max_chars
            tokenized.append(TokenizedInput(array("i", kept).tobytes(), len(kept), is_truncated))
        return tokenized

    def _extend(self, ids: list[int], text: str, start: int, cuts: re.Pattern[str]) -> Generator[None, None, None]:
        """Add a text's tokens from `start` on to those before it, until there is one more than is kept."""
        stop = min(len(text), self.max_chars)
        while len(ids) <= self._room and start < stop:
            yield
            chars_per_token = (start + 1) / (len(ids) + 1)
            num_chars = int((self._room + 1 - len(ids)) * chars_per_token * 1.1)
            num_chars = min(_PIECE_CHARS, max(_LEAST_PIECE_CHARS, num_chars))
            end = yield from self._piece_end(text, start + num_chars, cuts)
            ids += self._plain_ids([text[start:end]])[0]
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

    def _plain_ids(self, texts: list[str]) -> list[list[int]]:
        """Without the special tokens of the model's frame."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _exhaust(steps: Generator[None, None, list[TokenizedInput]]) -> list[TokenizedInput]:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return cast(list[TokenizedInput], stop.value)


def _runs_of(inputs: Sequence[str | TokenIds], most: int, longest: int) -> Iterator[range]:
    """Runs of at most `most` characters or ids, or one input each, of which at most `longest` count."""
    start = cost = 0
    for index, item in enumerate(inputs):
        cost_of_item = min(len(item), longest) + _CHARS_PER_TEXT
        if cost + cost_of_item > most and index > start:
            yield range(start, index)
            start, cost = index, 0
        cost += cost_of_item
    yield range(start, len(inputs))


def _are_texts(inputs: Sequence[str | TokenIds]) -> TypeGuard[list[str]]:
    """An `EmbedRequest` has inputs of one kind."""
    return isinstance(inputs[0], str)


def _original(path: Path) -> Path:
    """The file behind a descriptor that another process holds open."""
    try:
        return Path(os.readlink(path))
    except OSError:
        return path


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


def _is_framed_plainly(tokenizer: tokenizers.Tokenizer, prefix: list[int], suffix: list[int]) -> bool:
    """Whether a text's tokens are its own between the same few before and behind it, and no more."""
    return all(
        tokenizer.encode(text).ids == [*prefix, *tokenizer.encode(text, add_special_tokens=False).ids, *suffix]
        for text in ("", "a", "a b")
    )
