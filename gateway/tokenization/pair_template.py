"""Make one sequence of a query and a document by the template of an LLM reranker: as one text.

Owns how the template of the model's card (`vecd.shm.heads.PairTemplate`) is filled in and tokenized, and how what is
too long is cut. Called by `vecd.gateway.tokenization.tokenizer`, as `vecd.gateway.tokenization.pairs` is for other
models.

    <|im_start|> user\\n q q q \\nDocument :  d d d d d d <|im_end|> <|im_start|> assistant \\n
    └ head: once for each query ┴ rest ───────┘           └ end: once

The tokens are those of the whole text. Special tokens of the template are recognized even where those in texts are to
be characters. None are added: they are in the template. The text is cut at special tokens and at the last split point
before the document, and what is left of it there (`rest`) is tokenized with each document.

What is too long is cut at the end of the document, and of the query where that is too long by itself: the model reads
its score from the template's end. Source: `_restore_chat_template_suffix` of sentence-transformers 6.
"""

import re
from array import array
from collections.abc import Generator, Sequence
from itertools import groupby, takewhile
from typing import NamedTuple, TypeVar, cast

import tokenizers

from vecd.gateway.tokenization.pairs import Opening, PairLimits, beyond, check_length, checked
from vecd.gateway.tokenization.text_tokens import TextTokens
from vecd.gateway.types.errors import BadRequest
from vecd.gateway.types.request import MAX_PROMPT_CHARS, Overflow, Pair, TokenizedInput
from vecd.shm.heads import PairTemplate

T = TypeVar("T")

_INSTRUCTION = "{instruction}"
_PROBES = (("a b", "c, d"), ("", ""), (" x\n", "\n\n y "))


class _End(NamedTuple):
    """What follows the document."""

    text: str
    """Up to the first special token: the tokenizer may join it with the document."""
    ids: list[int]
    """From there on."""
    kept: list[int]
    """Of all of it, the tokens that do not depend on the document; these follow one that is cut."""


class TemplatedPairs:
    """Sequences of pairs. Documents and queries are read up to about the `max_chars` of `texts`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, texts: TextTokens, template: PairTemplate) -> None:
        """`tokenizer` neither truncates nor pads yet."""
        self._tokenizer = tokenizer
        self._texts = texts
        self._template = template
        self._special = {
            token.content: token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        }
        if not self._agrees() and not tokenizer.encode_special_tokens:
            self._special = {}

    def num_estimated(self, instruction: str | None) -> int:
        """An estimate of the template's own tokens."""
        before, between, after, default = self._fields()
        return sum(map(len, (before, between, after, default if instruction is None else instruction))) // 3

    def steps(
        self, pairs: Sequence[Pair], indices: Sequence[int], limits: PairLimits, openings: dict[str, Opening]
    ) -> Generator[None, None, list[TokenizedInput]]:
        """As `PairTokens.steps`. Raises BadRequest for an instruction that is too long, too."""
        instruction = self._template.instruction if limits.instruction is None else limits.instruction
        if len(instruction) > MAX_PROMPT_CHARS:
            raise BadRequest(
                f"The instruction has {len(instruction)} characters, at most {MAX_PROMPT_CHARS} are allowed"
            )
        end = self._end(instruction)
        if len(end.kept) >= limits.max_tokens:
            raise BadRequest(
                f"A pair has to have room for the {len(end.kept)} tokens at the end of the model's template, and at "
                f"least one more; the limit is {limits.max_tokens} (truncate_prompt_tokens)",
                param="truncate_prompt_tokens",
            )
        sequences: list[TokenizedInput] = []
        for query, group in groupby(zip(pairs, indices, strict=True), lambda item: item[0].query):
            documents = [(pair.document, index) for pair, index in group]
            if query not in openings:
                openings.clear()
                openings[query] = yield from self._open(query, documents[0][1], instruction, limits)
            sequences += yield from self._sequences(openings[query], documents, end, limits)
            yield
        return sequences

    def _open(self, query: str, index: int, instruction: str, limits: PairLimits) -> Generator[None, None, Opening]:
        """What precedes the documents of a query."""
        before, between, *_ = self._fields()
        num_chars = sum(len(text.replace(_INSTRUCTION, instruction)) for text in (before, between))
        read = query[: max(0, self._texts.max_chars - num_chars)]
        if limits.max_query_tokens is not None:
            read = yield from self._first_tokens(read, limits.max_query_tokens)
        elif len(read) < len(query) and limits.overflow is not Overflow.TRUNCATE:
            raise beyond(index, self._texts.max_chars)
        parts = [*self._parts(before, instruction), read, *self._parts(between, instruction)]
        ids, rest = yield from self._read(parts)
        cuts = self._texts.cuts
        cut = 0 if cuts is None else max((found.start() for found in cuts.finditer(rest)), default=0)
        self._texts.check_parts([rest[cut:]])
        if cut:
            ids += yield from self._texts.all_steps(rest[:cut], "")
        return Opening(ids, rest[cut:], is_cut=len(read) < len(query))

    def _sequences(
        self, opening: Opening, documents: Sequence[tuple[str, int]], end: _End, limits: PairLimits
    ) -> Generator[None, None, list[TokenizedInput]]:
        """`documents`: with the index of each pair."""
        head, rest, is_query_cut = opening
        max_chars = self._texts.max_chars - len(end.text)
        max_own = limits.max_tokens - len(head) - len(end.ids)
        num_rest, num_end = (len(self._texts.all_ids(text)) if text else 0 for text in (rest, end.text))
        if max_own <= num_rest + num_end:
            # All documents would get the same score.
            num_tokens = len(head) + num_rest + num_end + len(end.ids)
            raise BadRequest(
                f"'query': it has {num_tokens} tokens with the model's template and the instruction, and a pair may "
                f"have {limits.max_tokens}: no room is left for a document (max_tokens_per_query cuts the query)",
                param="query",
            )
        most = None if limits.max_document_tokens is None else num_rest + limits.max_document_tokens + num_end
        num_needed = max(0, max_own) if most is None else min(max(0, max_own), most)
        texts = [document[:max_chars] + end.text for document, _ in documents]
        lists = yield from self._texts.first_steps(texts, rest, num_needed)
        sequences = []
        for (document, index), text, own in zip(documents, texts, lists, strict=True):
            is_cut = most is not None and len(own) > most
            is_beyond = len(document) > max_chars and not is_cut
            is_long = is_beyond or (len(own) if most is None else min(len(own), most)) > max_own
            if is_long and limits.overflow is Overflow.ERROR:
                num_own = len((yield from self._texts.all_steps(text, rest)))
                num_own = num_own if most is None else min(num_own, most)
                check_length(num_own, max_own, limits, index, is_at_least=is_beyond)
            if is_beyond and limits.overflow is not Overflow.TRUNCATE:
                raise beyond(index, max_chars)
            if not (is_long or is_cut):
                ids = [*head, *own, *end.ids]
            elif limits.overflow is Overflow.TRUNCATE_LEFT and max_own > num_rest + num_end:
                num_kept = (max_own if most is None else min(max_own, most)) - num_rest
                last = yield from self._texts.last_steps(text, rest, num_kept)
                ids = [*head, *self._texts.all_ids(rest), *last[len(last) - num_kept :], *end.ids]
            else:
                kept = own if most is None else own[: most - num_end]
                ids = [*head, *kept][: limits.max_tokens - len(end.kept)] + end.kept
            is_truncated = is_long or is_cut or is_query_cut
            sequences.append(checked(array("i", ids), 0, index, is_truncated=is_truncated))
        return sequences

    def _end(self, instruction: str) -> _End:
        parts = self._parts(self._fields()[2], instruction)
        text, ids = "", []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                text, parts = "".join(map(str, parts[:index])), parts[index:]
                break
        else:
            text, parts = "".join(map(str, parts)), []
        ids = [token_id for part in parts for token_id in ([part] if isinstance(part, int) else self._ids(part))]
        pair = zip(reversed(self._ids("0" + text)), reversed(self._ids("1 2 3 4" + text)), strict=False)
        common = [first for first, _ in takewhile(lambda both: both[0] == both[1], pair)] if text else []
        return _End(text, ids, [*reversed(common), *ids])

    def _parts(self, template: str, instruction: str) -> list[str | int]:
        """A part of the template as texts and special tokens."""
        if not self._special:
            return [template.replace(_INSTRUCTION, instruction)]
        names = "|".join(map(re.escape, sorted(self._special, key=len, reverse=True)))
        found = re.split(f"({names})", template)
        return [self._special.get(part, part.replace(_INSTRUCTION, instruction)) for part in found if part]

    def _read(self, parts: Sequence[str | int]) -> Generator[None, None, tuple[list[int], str]]:
        """The tokens up to the last special token, and the text behind it."""
        ids: list[int] = []
        text = ""
        for part in parts:
            if isinstance(part, str):
                text += part
                continue
            if text:
                ids += yield from self._texts.all_steps(text, "")
            ids.append(part)
            text = ""
        return ids, text

    def _first_tokens(self, text: str, num: int) -> Generator[None, None, str]:
        """The beginning of a text that has its first tokens."""
        ids, offsets = yield from self._texts.offset_steps(text, "", num)
        if len(ids) <= num:
            return text
        return text[: offsets[num - 1, 1]] if num else ""

    def _ids(self, text: str) -> list[int]:
        return self._texts.all_ids(text) if text else []

    def _fields(self) -> tuple[str, str, str, str]:
        return self._template.before, self._template.between, self._template.after, self._template.instruction

    def _agrees(self) -> bool:
        """Whether the special tokens of the template cut it, for any texts in it."""
        before, between, after, _ = self._fields()
        is_literal = self._tokenizer.encode_special_tokens
        self._tokenizer.encode_special_tokens = False
        try:
            for query, document in _PROBES:
                parts = (before, query, between, document, after)
                whole = self._ids("".join(part.replace(_INSTRUCTION, "") for part in parts))
                texts = [[part] if at in (1, 3) else self._parts(part, "") for at, part in enumerate(parts)]
                ids, rest = _exhaust(self._read([part for some in texts for part in some]))
                if ids + self._ids(rest) != whole:
                    return False
        finally:
            self._tokenizer.encode_special_tokens = is_literal
        return True


def _exhaust(steps: Generator[None, None, T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return cast(T, stop.value)
