"""Turn inputs into token ids, without transformers and without blocking the event loop for long.

Owns the model's tokenizer, and decides which work is done on the event loop and which in a thread. Truncated inputs are
counted.

    texts ── text_template ─ text_tokens ─┐
    ids of cl100k_base ─ cl100k ──────────┤
    ids of the model ─── id_policy ───────┴─ truncation ─ TokenizedInput
    pairs of texts ───── pairs, pair_template ───────────┘

Requests that are not short go to a thread, run by run: the first inputs are computed while the others are tokenized,
and requests take turns in the threads.

A model's tokenizer also recognizes its special tokens inside a text, so a text can end or mask itself.
sentence-transformers and text-embeddings-inference do the same, hence the default; `literal_special_tokens` makes plain
characters of them, and gives such texts other vectors than theirs.
"""

import os
from array import array
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, repeat
from typing import NamedTuple, TypeGuard, cast

import numpy as np
import tokenizers
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence
from tokenizers.processors import TemplateProcessing

from vecd.gateway.errors import INPUT, BadRequest, InputTooLong
from vecd.gateway.request import (
    ALL,
    MAX_PROMPT_CHARS,
    Inputs,
    Overflow,
    Pair,
    Role,
    Source,
    TokenIds,
    TokenizedInput,
    Tokenizing,
)
from vecd.gateway.tokenization import cl100k
from vecd.gateway.tokenization.fair_pool import Threads
from vecd.gateway.tokenization.frames import (
    BYTES_PER_ID,
    NO_ROLE,
    RoleTemplate,
    TextFrame,
    TruncationPolicy,
    check_num_chunks,
    role_templates,
    with_offsets,
)
from vecd.gateway.tokenization.id_policy import NO_SPECIAL_TOKENS, IdPolicy, SequenceTemplate
from vecd.gateway.tokenization.pairs import Opening, PairTokens, TemplatedPairs
from vecd.gateway.tokenization.text_tokens import CHARS_PER_TEXT, MAX_CHARS, RUN_CHARS, TextTokens, exhaust, runs_of
from vecd.gateway.tokenization.tokenize_api import TokenizeApi
from vecd.model.card import ModelCard, ModelError
from vecd.shm.arena import original_of


class TokenVocabulary(NamedTuple):
    """The vocabulary as responses need it."""

    text_of: Callable[[int], str | None]
    subword_prefix: str = ""
    """What begins the string of a token that continues a word, "##" in BERT's."""

    def texts_of(self, ids: list[int]) -> list[str]:
        """The strings of token ids, "" where an id has none."""
        return [self.text_of(token_id) or "" for token_id in ids]


NO_VOCABULARY = TokenVocabulary(lambda token_id: None)

_INLINE_CHARS = 2000
"""Up to this many characters are tokenized on the event loop: 0.8 ms of English, at worst 4.6 ms (CJK)."""

_INLINE_IDS = 8192
"""Up to this many token ids are checked on the event loop: 0.4 ms."""

_CHARS_PER_TOKEN, _MIN_CHARS_PER_TOKEN, _MANY_CHARS = 1000, 250, 2_000_000
"""A text is cut after max_tokens times the first number of characters, or after fewer where that would be very many,
but never below the second number, which is text-embeddings-inference's limit. Ordinary text has 2 to 6 characters a
token; long runs of blanks have hundreds."""

MANY_TOKENS = 64 * 1024
"""Tokens of a text that become ids at once, more only where they are needed: this holds the GIL for 2 ms. Only texts
without split points have more in a piece."""

_RUN_IDS = 32 * 1024
"""Token ids checked in one call: 1.6 ms."""

_RUN_DECODED_IDS = 4 * 1024
"""Token ids in one call that may have to be decoded and tokenized: about `RUN_CHARS` of English."""

_LEAST_CHUNK_TOKENS = 32
"""Fewest tokens of its text that a chunk has, for models that take twice as many."""

_NUM_REMEMBERED = 64

PLAIN = Tokenizing()
_CHUNK, _TEXT = Overflow.CHUNK, Source.TEXT  # Python 3.11 takes 0.1 µs to find a member of an enumeration


class Tokenizer:
    """The model's tokenizer. The gateway tries `tokenize_now` first; `tokenize` always works.

    At most `max_chars` characters of a text are read, and `max_ids` ids of a list. Longer inputs are truncated there if
    the overflow is TRUNCATE, and refused otherwise.
    """

    def __init__(
        self,
        card: ModelCard,
        max_tokens: int,
        token_id_policy: str,
        *,
        max_embed_len: int | None = None,
        literal_special_tokens: bool = False,
    ) -> None:
        """Read the model's tokenizer.json. `max_embed_len`: maximum tokens of an input that is split.
        `literal_special_tokens`: special tokens in a text are read as characters.

        Raises ModelError when the file is no tokenizer, and NoTasks.
        """
        self._tokenizer = _read_tokenizer(card, literal_special_tokens=literal_special_tokens)
        self.id_of: Callable[[str], int | None] = self._tokenizer.token_to_id
        # The library's own threads gain nothing: 2,048 texts of 200 words take as long with them (2 cores).
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.max_tokens = max_tokens
        self.max_chars = max_tokens * max(_MIN_CHARS_PER_TOKEN, min(_CHARS_PER_TOKEN, _MANY_CHARS // max_tokens))
        self.max_ids = self.max_chars
        """Of a longer list a caller keeps the first `max_ids`, at least one more, and the last few."""
        self._prompt = card.prompt
        self._roles = role_templates(card.tokens, max_tokens)
        self._no_tokens = [card.vocab_size - 1] if card.is_static else []
        """The sequence of a text without tokens, if the model has a vector for it."""
        self._max_embed_len = max_embed_len
        self.vocabulary = TokenVocabulary(
            self._tokenizer.id_to_token, getattr(self._tokenizer.model, "continuing_subword_prefix", None) or ""
        )
        own = self._template = _template_of(self._tokenizer)
        self._frames = {
            True: TextFrame(self._tokenizer, own, card.text_template, card.weights_folder),
            False: TextFrame(self._tokenizer, NO_SPECIAL_TOKENS),
        }
        """By `Tokenizing.add_special_tokens`."""
        self._is_templated = card.text_template is not None
        if self._is_templated:
            self._template = self._frames[True].whole("")
            own = SequenceTemplate(self._template.prefix[:1], self._template.suffix[-1:])  # a prompt may be between
        self.least_tokens = min(max_tokens, self._template.num_tokens + 1)
        """The smallest limit on the tokens of an input."""
        self._policy = IdPolicy(token_id_policy, card.vocab_size, own)
        max_own_tokens = max_tokens - self._template.num_tokens
        self._least_chunk = max(1, min(_LEAST_CHUNK_TOKENS, max_own_tokens // 2))
        if not self._is_templated and not _is_plain(self._tokenizer, own):
            raise ModelError(
                f"{original_of(card.tokenizer_file)}: its post_processor does more than putting special tokens before "
                "and behind a text"
            )
        self.texts = TextTokens(self._tokenizer, self.max_chars)
        template = None if card.score is None else card.score.pair_template
        self._pair_template = None if template is None else TemplatedPairs(self._tokenizer, self.texts, template)
        self._pairs = PairTokens(self._tokenizer, self.texts)
        self.api = TokenizeApi(self._tokenizer, self.texts, self._frames, card.vocab_size)
        self._estimate = lru_cache(_NUM_REMEMBERED)(self._make_estimate)
        self._truncation = lru_cache(_NUM_REMEMBERED)(self._make_truncation)
        self._truncation_of_ids = lru_cache(_NUM_REMEMBERED)(self._limits)
        self._most_known_chars = min(MAX_CHARS, self.max_chars)
        self._tokenizer.enable_truncation(max(max_tokens + 1, MANY_TOKENS))
        self.threads = Threads()

    def estimate_tokens(self, inputs: Inputs, how: Tokenizing = PLAIN) -> int:
        """An estimate from lengths alone: 3 characters a token, or the number of ids."""
        most, extra, is_filled = self._estimate(how)
        if is_filled:
            return len(inputs) * most
        if how.overflow is not _CHUNK and _are_texts(inputs):  # most requests
            return sum([min(most, len(text) // 3 + extra) for text in inputs])
        if _are_pairs(inputs):
            if self._pair_template is not None:
                extra = self._pair_template.num_estimated(how.instruction)
            most_query, most_document = how.max_query_tokens, how.max_document_tokens
            return sum(
                [
                    min(most, min(most_query, len(query) // 3) + min(most_document, len(document) // 3) + extra)
                    for query, document in inputs
                ]
            )
        if how.overflow is not _CHUNK:
            return sum([min(most, len(ids)) for ids in inputs])
        num_own = sum(len(x) // 3 + 2 if isinstance(x, str) else len(x) for x in inputs)
        num_chunks = len(inputs) + num_own // max(self._least_chunk, most - extra)
        return num_own + num_chunks * min(most, extra)

    def _make_estimate(self, how: Tokenizing) -> tuple[int, int, bool]:
        """The most tokens of a sequence, those around the input's own, and whether each sequence is filled up."""
        role = self._role_of(how)
        most = max(1, self._most_tokens(how, role))
        extra = max(2, self._template.num_tokens) + len(self._prompt_of(how)) // 3
        return most, extra, role.num_filled > 0

    def num_added(self, token_ids: TokenIds) -> tuple[int, int]:
        """How many special tokens a sequence has before and behind the tokens of its input."""
        if self._is_templated:
            return len(token_ids), 0
        prefix, suffix = self._template
        return (len(prefix), len(suffix)) if self._template.matches(token_ids) else (0, 0)

    def tokenize_now(self, inputs: Inputs, how: Tokenizing = PLAIN) -> list[TokenizedInput] | None:
        """Tokenize at once, on the event loop; None when that would block it. Raises as `tokenize`."""
        if len(inputs) == 1 and isinstance(inputs[0], str) and (item := self._take_known(inputs[0], how)) is not None:
            return [item]
        if not self._is_short(inputs, how):
            return None
        return exhaust(self.take_run(inputs, range(len(inputs)), how))

    async def tokenize(
        self, inputs: Inputs, how: Tokenizing = PLAIN, tenant: str = ""
    ) -> AsyncGenerator[list[TokenizedInput], None]:
        """Tokenize in the threads; yields runs of consecutive inputs, in order. `tenant`: see `Threads`.

        Raises BadRequest when it reaches the input in question: a list of ids that the policy refuses, ids outside the
        vocabulary, an input without a token, one that is too long to be read and may not be truncated, one with too
        long a part that can be cut nowhere, too many chunks, a prompt or a limit that leaves no token for a text.
        InputTooLong for an input that is too long for the model, with Overflow.ERROR, or longer than `max_embed_len`,
        with Overflow.CHUNK.
        """
        num_chunks = 0
        openings: dict[str, Opening] = {}
        for run in self._runs(inputs, how):
            tokenized = await self.threads.run(self.take_run(inputs, run, how, openings), tenant)
            num_chunks += sum([len(item.chunks) for item in tokenized])
            check_num_chunks(num_chunks)
            yield tokenized

    # --- on the event loop, or in a thread --------------------------------------------------------------------

    def _is_short(self, inputs: Inputs, how: Tokenizing) -> bool:
        lengths, cost = self._lengths(inputs, how)
        are_ids = not isinstance(inputs[0], (str, Pair))
        most = _INLINE_IDS if are_ids else _INLINE_CHARS
        cost *= len(inputs)
        if cost > most or cost + sum(lengths) > most:  # a long list is not added up
            return False
        may_decode = are_ids and self._policy.may_decode(how.are_ids_of_model)
        return not may_decode or self._is_decoded_soon(cast(list[TokenIds], inputs), self._prompt_of(how))

    def _is_decoded_soon(self, lists: list[TokenIds], prompt: str) -> bool:
        decoded = [(ids, index) for index, ids in enumerate(lists) if not self._policy.are_model_s(ids)]
        if not decoded:
            return True
        if not cl100k.is_loaded() or sum(len(ids) for ids, _ in decoded) > _INLINE_CHARS:
            return False
        for ids, index in decoded:
            self._policy.source_of(ids, index)  # refuses unknown ids, which have no length
        num_bytes = sum(int(cl100k.lengths_of(ids).sum(dtype=np.int64)) for ids, _ in decoded)
        return num_bytes + len(decoded) * (CHARS_PER_TEXT + len(prompt)) <= _INLINE_CHARS

    def _lengths(self, inputs: Inputs, how: Tokenizing, longest: int = ALL) -> tuple[Iterator[int], int]:
        """The size of each input in characters or ids, and what each counts besides. `longest`: what a text counts at
        most, but for queries."""
        if _are_pairs(inputs):
            return _lengths_of_pairs(inputs, longest), CHARS_PER_TEXT + len(how.instruction or "")
        if _are_texts(inputs):
            lengths = map(len, inputs)
            return map(min, lengths, repeat(longest)), CHARS_PER_TEXT + len(self._prompt_of(how))
        return map(len, inputs), CHARS_PER_TEXT

    def _runs(self, inputs: Inputs, how: Tokenizing) -> Iterator[range]:
        longest = self.texts.first_chars(self.max_tokens - self._template.num_tokens)
        lengths, cost = self._lengths(inputs, how, longest)
        if isinstance(inputs[0], (str, Pair)):
            return runs_of(lengths, RUN_CHARS, cost)
        most = _RUN_DECODED_IDS if self._policy.may_decode(how.are_ids_of_model) else _RUN_IDS
        return runs_of(lengths, most, cost)

    # --- limits -----------------------------------------------------------------------------------------------

    def _make_truncation(self, how: Tokenizing) -> TruncationPolicy:
        """The policy for texts. Raises BadRequest for a limit or a prompt that leaves no token for a text."""
        prompt = self._prompt_of(how)
        truncation = self._limits(how, how.add_special_tokens, self._role_of(how))
        if how.prompt is not None and len(prompt) > MAX_PROMPT_CHARS:
            raise BadRequest(f"The prompt has {len(prompt)} characters, at most {MAX_PROMPT_CHARS} are allowed")
        what = "prompt"
        if self._is_templated and how.add_special_tokens:
            template, prompt = self._frames[True].around(prompt)
            truncation = replace(truncation, template=template, strips=self._frames[True].strips)
            what = "prompt in the chat template"
        if not prompt:
            return truncation
        prompt_ids = tuple(self.texts.ids([prompt], ALL)[0])
        if (how.prompt is not None or self._is_templated) and len(prompt_ids) >= truncation.max_own_tokens:
            raise BadRequest(
                f"The {what} has {len(prompt_ids)} tokens, and an input may have {truncation.max_tokens} in all, of "
                f"which {truncation.template.num_tokens} are special tokens: nothing would be left for a text"
            )
        return replace(truncation, prompt=prompt, prompt_ids=prompt_ids)

    def _role_of(self, how: Tokenizing) -> RoleTemplate:
        return self._roles.get(how.role or Role.DOCUMENT, NO_ROLE)

    def _prompt_of(self, how: Tokenizing) -> str:
        if how.prompt is not None:
            return how.prompt
        of_role = self._role_of(how).prompt
        return self._prompt if of_role is None else of_role

    def _most_tokens(self, how: Tokenizing, role: RoleTemplate = NO_ROLE) -> int:
        return min(self.max_tokens, how.max_tokens, role.max_tokens)

    def _limits(self, how: Tokenizing, has_special_tokens: bool, role: RoleTemplate = NO_ROLE) -> TruncationPolicy:
        """The policy for lists of the model's own ids, with its special tokens or without; or for texts in a role."""
        template = role.around(self._template if has_special_tokens else NO_SPECIAL_TOKENS)
        overflow, max_tokens = how.overflow, self._most_tokens(how, role)
        if role.num_filled and overflow is Overflow.CHUNK:
            overflow = Overflow.TRUNCATE  # a query is one sequence
        truncation = TruncationPolicy(template, max_tokens, overflow, self._least_chunk, role, self._max_embed_len)
        least = template.num_tokens + (self._least_chunk if overflow is Overflow.CHUNK else 1)
        is_asked_for = how.max_tokens < ALL or overflow is not Overflow.TRUNCATE
        if max_tokens < least and is_asked_for:
            what = "has to have room for" if overflow is not Overflow.CHUNK else "that is split has to have room for"
            raise BadRequest(
                f"An input {what} at least {least} tokens, {template.num_tokens} special tokens among them; the limit "
                f"is {max_tokens}"
            )
        return truncation

    # --- a run of inputs --------------------------------------------------------------------------------------

    def _take_known(self, text: str, how: Tokenizing) -> TokenizedInput | None:
        """A short text of known words: 5 µs sooner than by the steps for any text."""
        if len(text) > self._most_known_chars or how.wants_offsets:
            return None
        truncation = self._truncation(how)
        own = self.texts.known(truncation.prompt + (text.strip() if truncation.strips else text))
        prefix, suffix, max_own_bytes = truncation.frame
        if not own or len(own) > max_own_bytes:
            return None
        token_ids = prefix + own + suffix
        item = TokenizedInput(token_ids, len(token_ids) // BYTES_PER_ID, False, _TEXT)
        return truncation.role.filled(item) if truncation.role.num_filled else item

    def take_run(
        self, inputs: Inputs, run: range, how: Tokenizing, openings: dict[str, Opening] | None = None
    ) -> Generator[None, None, list[TokenizedInput]]:
        """Tokenize some of the inputs. Yields between pieces of work. `openings`: see `PairTokens.steps`."""
        if _are_pairs(inputs):
            return self._take_pairs(inputs[run.start : run.stop], run, how, {} if openings is None else openings)
        if _are_texts(inputs):
            return self._take_texts(inputs[run.start : run.stop], run, how, _TEXT)
        return self._take_lists(cast(list[TokenIds], inputs), run, how)

    def _take_pairs(
        self, pairs: list[Pair], indices: Sequence[int], how: Tokenizing, openings: dict[str, Opening]
    ) -> Generator[None, None, list[TokenizedInput]]:
        how = how._replace(max_tokens=self._most_tokens(how))
        if self._pair_template is not None:
            return self._pair_template.steps(pairs, indices, how, openings)
        prompt = self._prompt if how.prompt is None else how.prompt
        if prompt:
            prompted = {query: prompt + query for query in {pair.query for pair in pairs}}
            pairs = [Pair(prompted[query], document) for query, document in pairs]
        return self._pairs.steps(pairs, indices, how, openings)

    def _take_texts(
        self, texts: list[str], indices: Sequence[int], how: Tokenizing, source: Source
    ) -> Generator[None, None, list[TokenizedInput]]:
        """`indices`: the index in the request of each text's input."""
        if how.num_queries:
            return (yield from self._take_queries_first(texts, indices, how, source))
        truncation = self._truncation(how)
        max_own_tokens, max_chars = truncation.max_own_tokens, self.max_chars
        kept = [text.strip() for text in texts] if truncation.strips else texts
        lists = []
        if truncation.overflow is Overflow.TRUNCATE_LEFT and max(map(len, kept)) > self.texts.long_parts.max_chars:
            for text in kept:  # whose beginning may have a part that is too long, and is not needed
                last = yield from self.texts.last_steps(text, truncation.prompt, max_own_tokens + 1)
                lists.append(last)
        else:
            lists = yield from self.texts.first_steps(kept, truncation.prompt, max_own_tokens)
        tokenized = []
        for index, given, text, own in zip(indices, texts, kept, lists, strict=True):
            if len(own) <= max_own_tokens and len(text) <= max_chars:
                item = truncation.whole(own, source)
            elif truncation.overflow is Overflow.TRUNCATE:
                item = truncation.beginning(own, source)
            else:
                item = yield from self._take_long_text(text, index, truncation, source)
            if how.wants_offsets:
                is_beginning = not item.chunks and truncation.overflow is not Overflow.TRUNCATE_LEFT
                num = max_own_tokens if is_beginning else ALL
                all_own, offsets = yield from self.texts.offset_steps(text, truncation.prompt, num)
                if text != given:
                    offsets[offsets[:, 0] >= 0] += len(given) - len(given.lstrip())
                item = with_offsets(item, offsets, all_own, truncation)
            item = truncation.role.filled(item)
            if not item.num_tokens and self._no_tokens:
                item = truncation.whole(self._no_tokens, source)
            if not item.num_tokens:
                raise BadRequest(f"'{INPUT}[{index}]' has no tokens, at least 1 is needed", param=INPUT)
            tokenized.append(item)
        return tokenized

    def _take_queries_first(
        self, texts: list[str], indices: Sequence[int], how: Tokenizing, source: Source
    ) -> Generator[None, None, list[TokenizedInput]]:
        """The index of a document in an error counts from the first document."""
        num_queries = sum(index < how.num_queries for index in indices)
        of_documents = [index - how.num_queries for index in indices[num_queries:]]
        parts = (
            (texts[:num_queries], indices[:num_queries], Role.QUERY, how.max_query_tokens),
            (texts[num_queries:], of_documents, how.role or Role.DOCUMENT, how.max_document_tokens),
        )
        tokenized: list[TokenizedInput] = []
        for part, its_indices, role, most_own in parts:
            if part:
                in_role = self._in_role(how, role, most_own)
                try:
                    tokenized += yield from self._take_texts(part, its_indices, in_role, source)
                except InputTooLong as error:
                    if role is Role.QUERY:
                        error.param = "query"
                    error.add(" It is the query." if role is Role.QUERY else f" It is '{INPUT}[{error.index}]'.")
                    raise
        return tokenized

    def _in_role(self, how: Tokenizing, role: Role, most_own: int) -> Tokenizing:
        """`how` for texts of one role, which are cut to `most_own` tokens, without special tokens, even with
        Overflow.ERROR, which is about longer limits."""
        limits = self._limits(how, how.add_special_tokens, self._roles.get(role, NO_ROLE))
        template = limits.template
        if self._is_templated:
            template = self._frames[True].whole(self._prompt_of(how._replace(role=role)))
        cut = most_own + template.num_tokens
        is_cut = cut < limits.max_tokens and limits.overflow is Overflow.ERROR
        overflow = Overflow.TRUNCATE if is_cut else how.overflow
        return how._replace(role=role, num_queries=0, overflow=overflow, max_tokens=min(how.max_tokens, cut))

    def _take_long_text(
        self, text: str, index: int, truncation: TruncationPolicy, source: Source
    ) -> Generator[None, None, TokenizedInput]:
        """A text with too many tokens or characters, which may not be truncated on the right."""
        is_beyond, prompt = len(text) > self.max_chars, truncation.prompt
        if truncation.overflow is Overflow.TRUNCATE_LEFT and not is_beyond:
            prompt_ids: TokenIds = []
            if prompt:
                [first] = yield from self.texts.first_steps([text], prompt, len(truncation.prompt_ids))
                prompt_ids = truncation.prompt_of(first)
            last = yield from self.texts.last_steps(text, prompt, truncation.max_own_tokens - len(prompt_ids))
            return truncation.end(last, source, prompt_ids)
        own: TokenIds = []
        if truncation.overflow is Overflow.ERROR or not is_beyond:
            own = yield from self.texts.all_steps(text, prompt)
        self._check_long(len(own), index, truncation, f"{self.max_chars} characters" if is_beyond else "")
        return (yield from truncation.chunk_steps(own, source))

    def _check_long(self, num_own: int, index: int, truncation: TruncationPolicy, beyond: str) -> None:
        """Raises InputTooLong for an input that has too many tokens with Overflow.ERROR, and BadRequest for one that
        goes on behind what is looked at of it, which `beyond` names."""
        num_tokens = num_own + truncation.template.num_tokens
        if truncation.overflow is Overflow.ERROR and num_tokens > truncation.max_tokens:
            raise InputTooLong(truncation.max_tokens, num_tokens, is_at_least=beyond != "", param=INPUT, index=index)
        if beyond:
            raise _beyond(index, beyond)

    def _take_lists(
        self, lists: list[TokenIds], run: range, how: Tokenizing
    ) -> Generator[None, None, list[TokenizedInput]]:
        tokenized: dict[int, TokenizedInput] = {}
        texts: dict[int, str] = {}
        for index in run:
            ids = lists[index]
            if self._policy.source_of(ids, index, how.are_ids_of_model) is Source.MODEL:
                tokenized[index] = yield from self._take_ids(ids, index, how)
            else:
                texts[index] = yield from self._decode(ids, index, how)
        if texts:
            items = yield from self._take_texts(list(texts.values()), list(texts), how, Source.CL100K)
            for index, item in zip(texts, items, strict=True):
                is_cut = item.is_truncated or len(lists[index]) > self.max_ids
                tokenized[index] = item._replace(is_truncated=is_cut)
        return [tokenized[index] for index in run]

    def _decode(self, ids: TokenIds, index: int, how: Tokenizing) -> Generator[None, None, str]:
        """The text of ids of cl100k_base, of the first `max_ids`."""
        if len(ids) > self.max_ids and how.overflow is not Overflow.TRUNCATE:
            raise _beyond(index, f"{self.max_ids} token ids")
        try:
            return (yield from cl100k.decode_steps(ids[: self.max_ids], self.max_chars))
        except cl100k.NotText:
            raise BadRequest(
                f"'{INPUT}[{index}]' is a list of token ids that are no text in cl100k_base's vocabulary, nor framed "
                "by this model's special tokens. Send text (LangChain: "
                "OpenAIEmbeddings(check_embedding_ctx_length=False)); see --token-ids",
                param=INPUT,
            ) from None

    def _take_ids(self, ids: TokenIds, index: int, how: Tokenizing) -> Generator[None, None, TokenizedInput]:
        """A list of the model's own ids, with its special tokens or without."""
        if how.prompt:
            raise BadRequest(
                f"'{INPUT}[{index}]' is a list of the model's own token ids, which are taken as they are: no prompt "
                "can be put before it. Send text",
                param=INPUT,
            )
        (prefix, suffix), has_template = self._template, self._template.matches(ids)
        truncation = self._truncation_of_ids(how, has_template)
        if len(ids) <= truncation.max_tokens:
            return TokenizedInput(array("i", ids).tobytes(), len(ids), False, Source.MODEL)
        own = ids[len(prefix) : len(ids) - len(suffix)] if has_template else ids
        if truncation.overflow is Overflow.TRUNCATE:
            return truncation.beginning(own, Source.MODEL)
        is_beyond = len(ids) > self.max_ids
        num_own = self.max_ids + 1 - truncation.template.num_tokens if is_beyond else len(own)
        self._check_long(num_own, index, truncation, f"{self.max_ids} token ids" if is_beyond else "")
        if truncation.overflow is Overflow.TRUNCATE_LEFT:
            return truncation.end(own, Source.MODEL, [])
        return (yield from truncation.chunk_steps(own, Source.MODEL))


def _beyond(index: int, limit: str) -> BadRequest:
    return BadRequest(
        f"'{INPUT}[{index}]' has more than {limit}, the most that is looked at of one input, and may not be truncated "
        "there",
        param=INPUT,
    )


def _are_texts(inputs: Sequence[str | TokenIds] | list[Pair]) -> TypeGuard[list[str]]:
    """An `EmbedRequest` has inputs of one kind."""
    return isinstance(inputs[0], str)


def _are_pairs(inputs: Sequence[str | TokenIds] | list[Pair]) -> TypeGuard[list[Pair]]:
    return isinstance(inputs[0], Pair)


def _lengths_of_pairs(pairs: list[Pair], longest: int) -> Iterator[int]:
    """A pair counts at most `longest` of its document, and its query where that is not the one before."""
    known: str | None = None
    for query, document in pairs:
        yield min(len(document), longest) + (0 if query == known else len(query))
        known = query


def _read_tokenizer(card: ModelCard, *, literal_special_tokens: bool) -> tokenizers.Tokenizer:
    """A tokenizer that neither truncates nor pads, and for static embeddings adds no special tokens. Raises
    ModelError."""
    try:
        tokenizer = tokenizers.Tokenizer.from_file(card.tokenizer_file)
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"{original_of(card.tokenizer_file)}: not a tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = literal_special_tokens
    if card.end:
        if (end_id := tokenizer.token_to_id(card.end)) is None:
            raise ModelError(
                f"{card.weights_folder}: the tokenizer's eos_token {card.end!r:.80} is no token of its file"
            )
        pair = ["$A", card.end, "$B:1", f"{card.end}:1"]
        tokenizer.post_processor = TemplateProcessing(pair[:2], pair, [(card.end, end_id)])
    if card.is_static:
        # Their tokens are taken without special ones, which the file may still name.
        tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B")
    if card.lowercase:
        others = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = NormalizerSequence([Lowercase(), *others])
    return tokenizer


def _template_of(tokenizer: tokenizers.Tokenizer) -> SequenceTemplate:
    """The special ids that the tokenizer puts before and behind a text."""
    probes = chain("a1中!", tokenizer.get_vocab())
    encoding = next((found for found in map(tokenizer.encode, probes) if 0 in found.special_tokens_mask), None)
    if encoding is None:
        return NO_SPECIAL_TOKENS
    mask = encoding.special_tokens_mask
    start = next((i for i, special in enumerate(mask) if not special), len(mask))
    end = len(mask) - next((i for i, special in enumerate(reversed(mask)) if not special), 0)
    return SequenceTemplate(encoding.ids[:start], encoding.ids[max(start, end) :])


def _is_plain(tokenizer: tokenizers.Tokenizer, template: SequenceTemplate) -> bool:
    """Whether a sequence is always the prefix, the text's own tokens, and the suffix."""
    return all(
        tokenizer.encode(text).ids
        == [*template.prefix, *tokenizer.encode(text, add_special_tokens=False).ids, *template.suffix]
        for text in ("", "a", "a b")
    )
