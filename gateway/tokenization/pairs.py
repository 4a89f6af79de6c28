"""Make one sequence of two texts, such as a query and a document, by the tokenizer's own template.

Owns that template (`PairFrame`), or the card's (`TemplatedPairs`), and the truncation of pairs.

    [CLS] q q q [SEP] d d d d d d [SEP]
    └ prefix    └ middle ┴ border └ suffix

A query is tokenized once, however many documents it is paired with: no tokenizer looks across the border of a pair.

Measured against the library with each pair, MiniLM, 1,000 documents with one query (AMD EPYC, 2 busy cores): as fast
for 100 words and a query of 12, 1.4 times for a query of 60; 3.2 times for 1,000 words, of which only the beginning is
tokenized.
"""

import re
from array import array
from collections.abc import Generator, Sequence
from itertools import dropwhile, groupby, takewhile
from typing import NamedTuple

import tokenizers

from vecd.gateway.errors import INPUT, BadRequest, InputTooLong
from vecd.gateway.request import ALL, MAX_PROMPT_CHARS, Overflow, Pair, TokenizedInput, Tokenizing
from vecd.gateway.tokenization.text_tokens import TextTokens, exhaust
from vecd.model.steps import PairTemplate, with_instruction


class PairFrame(NamedTuple):
    """The special tokens that a tokenizer puts before, between and behind two texts."""

    prefix: list[int]
    middle: list[int]
    suffix: list[int]
    first_of_type_one: int | None
    """Of `middle` and what follows, the index of the first token of type 1; None: all are of type 0."""
    is_document_first: bool

    @property
    def num_tokens(self) -> int:
        return len(self.prefix) + len(self.middle) + len(self.suffix)

    def fill(self, query: list[int], document: list[int]) -> tuple["array[int]", int]:
        """The sequence, and where type 1 begins; 0 where it does not."""
        first, second = (document, query) if self.is_document_first else (query, document)
        ids = array("i", [*self.prefix, *first, *self.middle, *second, *self.suffix])
        at = self.first_of_type_one
        return ids, 0 if at is None else len(self.prefix) + len(first) + at


class Opening(NamedTuple):
    """What precedes each document of a query."""

    ids: list[int]
    """Of a pair with a border: the query's own tokens."""
    rest: str = ""
    """Text that follows these tokens, and is tokenized with each document."""
    is_cut: bool = False
    """The query was longer than a limit of its own, and was cut."""
    query: str = ""
    """Of a template with the document first: what follows that."""


class PairTokens:
    """Documents and queries are read up to the `max_chars` of `texts`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, texts: TextTokens) -> None:
        """`tokenizer` neither truncates nor pads yet."""
        self._texts = texts
        self._frames = {is_special: pair_frame_of(tokenizer, is_special) for is_special in (True, False)}

    def steps(
        self, pairs: Sequence[Pair], indices: Sequence[int], how: Tokenizing, openings: dict[str, Opening]
    ) -> Generator[None, None, list[TokenizedInput]]:
        """A sequence for each pair. Yields between pieces of work. `indices`: the index in the request of each pair.
        `how`: its `max_tokens` is the longest sequence's, and its overflow is not CHUNK, because a pair has no chunks.

        Raises InputTooLong for a pair that is too long, with Overflow.ERROR; BadRequest for a limit that leaves no
        token for a text, a pair without a token, and one with too many characters to be read, unless its end is cut
        off. Side effect: `openings` has the tokens of the queries of these pairs alone: a request hands on the same
        dictionary, so that each query is tokenized once.
        """
        frame = self._frames[how.add_special_tokens]
        if frame is None:
            raise BadRequest(
                "The model's tokenizer puts more than special tokens around two texts: no pair can be made of them",
                param=INPUT,
            )
        max_own = how.max_tokens - frame.num_tokens
        if max_own < 1:
            raise BadRequest(
                f"A pair has to have room for at least {frame.num_tokens + 1} tokens, {frame.num_tokens} special "
                f"tokens among them; the limit is {how.max_tokens} (truncate_prompt_tokens)",
                param="truncate_prompt_tokens",
            )
        yield from self._read_queries(pairs, how, openings)
        num_needed = 0
        for pair in pairs:
            num_query = len(openings[pair.query].ids)
            num_needed = max(num_needed, min(max(max_own - num_query, num_query), how.max_document_tokens))
        documents = yield from self._texts.first_steps([pair.document for pair in pairs], "", num_needed)
        sequences = []
        for index, pair, first in zip(indices, pairs, documents, strict=True):
            query, document, is_query_cut = openings[pair.query].ids, first, openings[pair.query].is_cut
            num_own = min(len(document), how.max_document_tokens)
            is_beyond = (len(pair.query) > self._texts.max_chars and not is_query_cut) or (
                len(pair.document) > self._texts.max_chars and num_own == len(document)
            )
            if how.overflow is Overflow.ERROR and (is_beyond or len(query) + num_own > max_own):
                document = yield from self._texts.all_steps(pair.document, "")
                num_own = min(len(document), how.max_document_tokens)
                check_length(len(query) + num_own, max_own, how, index, is_at_least=is_beyond)
            if is_beyond and how.overflow is not Overflow.TRUNCATE:
                raise beyond(index, self._texts.max_chars)
            num_query, num_document = longest_first(len(query), num_own, max_own)
            is_document_cut = num_document < len(document)
            if how.overflow is Overflow.TRUNCATE_LEFT:
                query = query[len(query) - num_query :]
                if is_document_cut:
                    document = yield from self._texts.last_steps(pair.document, "", num_document)
                    document = document[len(document) - num_document :]
            is_truncated = is_beyond or is_query_cut or is_document_cut or num_query < len(openings[pair.query].ids)
            ids, border = frame.fill(query[:num_query], document[:num_document])
            sequences.append(checked(ids, border, index, is_truncated=is_truncated))
        return sequences

    def _read_queries(
        self, pairs: Sequence[Pair], how: Tokenizing, openings: dict[str, Opening]
    ) -> Generator[None, None, None]:
        """All tokens up to the query's own limit, because `longest_first` counts them."""
        wanted = dict.fromkeys(pair.query for pair in pairs)
        new = [query for query in wanted if query not in openings]
        for query in [query for query in openings if query not in wanted]:
            del openings[query]
        if not new:
            return
        lists = yield from self._texts.first_steps(new, "", ALL)
        for query, ids in zip(new, lists, strict=True):
            num = min(len(ids), how.max_query_tokens)
            start = len(ids) - num if how.overflow is Overflow.TRUNCATE_LEFT else 0
            openings[query] = Opening(ids[start : start + num], is_cut=num < len(ids))


def pair_frame_of(tokenizer: tokenizers.Tokenizer, add_special_tokens: bool = True) -> PairFrame | None:
    """The special ids that the tokenizer puts around two texts; None if it does more than that."""
    probe = tokenizer.encode("a1 中 !", "a1 中 !", add_special_tokens=add_special_tokens)
    places = [[at for at, number in enumerate(probe.sequence_ids) if number == part] for part in (0, 1)]
    if not all(places):
        return None
    is_document_first = places[1] < places[0]
    (start, *_, end), (start_2, *_, end_2) = ([*part, part[-1]] for part in sorted(places))
    ids, types = probe.ids, probe.type_ids
    first_of_type_one = types.index(1) - end - 1 if 1 in types else None
    if first_of_type_one is not None and first_of_type_one < 0:
        return None
    frame = PairFrame(ids[:start], ids[end + 1 : start_2], ids[end_2 + 1 :], first_of_type_one, is_document_first)
    for texts in (("", ""), ("a1", ""), ("", "a1"), ("a b", "b, c d")):
        own = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        if tokenizer.encode(*texts, add_special_tokens=add_special_tokens).ids != frame.fill(*own)[0].tolist():
            return None
    return frame


def longest_first(num_query: int, num_document: int, most: int) -> tuple[int, int]:
    """How many tokens are kept of each text of a pair, together at most `most`: the longer one is cut to the length of
    the shorter, then both are; of an odd number the longer one has one more, and the document where they are equally
    long. Source: `truncate_encodings` of the `tokenizers` library."""
    if num_query + num_document <= most:
        return num_query, num_document
    shorter = min(num_query, num_document, most // 2)
    if num_query > num_document:
        return most - shorter, shorter
    return shorter, most - shorter


def check_length(num_own: int, max_own: int, how: Tokenizing, index: int, *, is_at_least: bool) -> None:
    """Raises InputTooLong for more than `max_own` tokens without the special ones."""
    if num_own > max_own:
        num_tokens = num_own + how.max_tokens - max_own
        where = f" It is the pair of '{INPUT}[{index}]'."
        raise InputTooLong(how.max_tokens, num_tokens, is_at_least=is_at_least, param=INPUT, where=where)


def beyond(index: int, max_chars: int) -> BadRequest:
    return BadRequest(
        f"The pair of '{INPUT}[{index}]' has a text of more than {max_chars} characters, the most that is looked at of "
        "one text, and may not be truncated there",
        param=INPUT,
    )


def checked(ids: "array[int]", border: int, index: int, *, is_truncated: bool) -> TokenizedInput:
    if not ids:
        raise BadRequest(f"The pair of '{INPUT}[{index}]' has no tokens, at least 1 is needed", param=INPUT)
    return TokenizedInput(ids.tobytes(), len(ids), is_truncated, border=border if border < len(ids) else 0)


# The template of an LLM reranker makes one text of a query and a document:
#
#     <|im_start|> user\\n q q q \\nDocument :  d d d d d d <|im_end|> <|im_start|> assistant \\n
#     └ head: once for each query ┴ rest ───────┘           └ end: once
#
# The tokens are those of the whole text. Special tokens of the template are recognized even where those in texts are to
# be characters. The text is cut at special tokens and at the last split point before the document, and what is left of
# it there (`rest`) is tokenized with each document.
#
# Where the document is first, the query is a part of the end.
#
# What is too long is cut at the end of the document, and of the query where that is too long by itself: the model reads
# its score from the template's end. Source: `_restore_chat_template_suffix` of sentence-transformers 6.

_PROBES = (("a b", "c, d"), ("", ""), (" x\n", "\n\n y "))


class _End(NamedTuple):
    """What follows the document."""

    text: str
    """Up to the first special token: the tokenizer may join it with the document."""
    ids: list[int]
    """From there on."""
    kept: list[int]
    """Of all of it, the tokens that do not depend on the document; these follow one that is cut."""


def _no_room(num_tokens: str, how: Tokenizing) -> BadRequest:
    return BadRequest(
        f"'query': it has {num_tokens} tokens with the model's template and the instruction, and a pair may have "
        f"{how.max_tokens}: no room is left for a document (max_tokens_per_query cuts the query)",
        param="query",
    )


class TemplatedPairs:
    """Documents and queries are read up to about the `max_chars` of `texts`."""

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
        template = self._template
        instruction = template.instruction if instruction is None else instruction
        return len(template.before + template.between + template.after + instruction) // 3

    def steps(
        self, pairs: Sequence[Pair], indices: Sequence[int], how: Tokenizing, openings: dict[str, Opening]
    ) -> Generator[None, None, list[TokenizedInput]]:
        """As `PairTokens.steps`. Raises BadRequest, too, for an instruction that is too long."""
        instruction = self._template.instruction if how.instruction is None else how.instruction
        if len(instruction) > MAX_PROMPT_CHARS:
            raise BadRequest(
                f"The instruction has {len(instruction)} characters, at most {MAX_PROMPT_CHARS} are allowed"
            )
        is_query_behind = self._template.is_document_first
        end = self._end(instruction, "")
        if len(end.kept) >= how.max_tokens:
            raise BadRequest(
                f"A pair has to have room for the {len(end.kept)} tokens at the end of the model's template, and at "
                f"least one more; the limit is {how.max_tokens} (truncate_prompt_tokens)",
                param="truncate_prompt_tokens",
            )
        sequences: list[TokenizedInput] = []
        for query, group in groupby(zip(pairs, indices, strict=True), lambda item: item[0].query):
            documents = [(pair.document, index) for pair, index in group]
            if query not in openings:
                openings.clear()
                openings[query] = yield from self._open(query, documents[0][1], instruction, how)
            if is_query_behind:
                end = self._end(instruction, openings[query].query)
            sequences += yield from self._sequences(openings[query], documents, end, how)
            yield
        return sequences

    def _open(self, query: str, index: int, instruction: str, how: Tokenizing) -> Generator[None, None, Opening]:
        before, between = self._template.before, self._template.between
        num_chars = len(with_instruction(before + between, instruction))
        read = query[: max(0, self._texts.max_chars - num_chars)]
        if how.max_query_tokens < ALL:
            read = yield from self._first_tokens(read, how.max_query_tokens)
        elif len(read) < len(query) and how.overflow is not Overflow.TRUNCATE:
            raise beyond(index, self._texts.max_chars)
        parts = self._parts(before, instruction)
        if not self._template.is_document_first:
            parts += [read, *self._parts(between, instruction)]
        elif len((yield from self._first_tokens(read, how.max_tokens))) < len(read):  # the end is tokenized in one step
            raise _no_room(f"more than {how.max_tokens}", how)
        ids, rest = yield from self._read(parts)
        cuts = self._texts.cuts
        cut = 0 if cuts is None else max((found.start() for found in cuts.finditer(rest)), default=0)
        self._texts.long_parts.check(rest[cut:])
        if cut:
            ids += yield from self._texts.all_steps(rest[:cut], "")
        return Opening(ids, rest[cut:], is_cut=len(read) < len(query), query=read)

    def _sequences(
        self, opening: Opening, documents: Sequence[tuple[str, int]], end: _End, how: Tokenizing
    ) -> Generator[None, None, list[TokenizedInput]]:
        """`documents`: with the index of each pair."""
        head, rest, is_query_cut, _ = opening
        max_chars = max(0, self._texts.max_chars - len(end.text))
        max_own = how.max_tokens - len(head) - len(end.ids)
        num_rest, num_end = (len(self._ids(text)) for text in (rest, end.text))
        if max_own <= num_rest + num_end:
            # All documents would get the same score.
            raise _no_room(str(len(head) + num_rest + num_end + len(end.ids)), how)
        most = num_rest + how.max_document_tokens + num_end
        num_needed = min(max_own, most)
        texts = [document[:max_chars] + end.text for document, _ in documents]
        lists = yield from self._texts.first_steps(texts, rest, num_needed)
        sequences = []
        for (document, index), text, own in zip(documents, texts, lists, strict=True):
            is_cut = len(own) > most
            is_beyond = len(document) > max_chars and not is_cut
            is_long = is_beyond or min(len(own), most) > max_own
            if is_long and how.overflow is Overflow.ERROR:
                num_own = len((yield from self._texts.all_steps(text, rest)))
                check_length(min(num_own, most), max_own, how, index, is_at_least=is_beyond)
            if is_beyond and how.overflow is not Overflow.TRUNCATE:
                raise beyond(index, max_chars)
            if not (is_long or is_cut):
                ids = [*head, *own, *end.ids]
            elif how.overflow is Overflow.TRUNCATE_LEFT:
                num_kept = num_needed - num_rest
                last = yield from self._texts.last_steps(text, rest, num_kept)
                ids = [*head, *self._ids(rest), *last[len(last) - num_kept :], *end.ids]
            else:
                ids = [*head, *own[: most - num_end]][: how.max_tokens - len(end.kept)] + end.kept
            is_truncated = is_long or is_cut or is_query_cut
            sequences.append(checked(array("i", ids), 0, index, is_truncated=is_truncated))
        return sequences

    def _end(self, instruction: str, query: str) -> _End:
        parts = self._parts(self._template.after, instruction)
        if self._template.is_document_first:
            parts = [*self._parts(self._template.between, instruction), query, *parts]
        text = "".join(map(str, takewhile(lambda part: isinstance(part, str), parts)))
        rest = groupby(dropwhile(lambda part: isinstance(part, str), parts), lambda part: isinstance(part, str))
        ids = [
            token_id
            for is_text, group in rest
            for token_id in (self._ids("".join(map(str, group))) if is_text else map(int, group))
        ]
        pair = zip(reversed(self._ids("0" + text)), reversed(self._ids("1 2 3 4" + text)), strict=False)
        common = [first for first, _ in takewhile(lambda both: both[0] == both[1], pair)] if text else []
        return _End(text, ids, [*reversed(common), *ids])

    def _parts(self, template: str, instruction: str) -> list[str | int]:
        """A part of the template as texts and special tokens."""
        if not self._special:
            return [with_instruction(template, instruction)]
        names = "|".join(map(re.escape, sorted(self._special, key=len, reverse=True)))
        found = re.split(f"({names})", template)
        return [self._special.get(part, with_instruction(part, instruction)) for part in found if part]

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
        return self._texts.ids([text], ALL)[0] if text else []

    def _agrees(self) -> bool:
        """The special tokens of the template cut it, for any texts in it."""
        template, is_literal = self._template, self._tokenizer.encode_special_tokens
        self._tokenizer.encode_special_tokens = False
        try:
            for query, document in _PROBES:
                parts = (template.before, query, template.between, document, template.after)
                whole = self._ids("".join(with_instruction(part, "") for part in parts))
                texts = [[part] if at in (1, 3) else self._parts(part, "") for at, part in enumerate(parts)]
                ids, rest = exhaust(self._read([part for some in texts for part in some]))
                if ids + self._ids(rest) != whole:
                    return False
        finally:
            self._tokenizer.encode_special_tokens = is_literal
        return True
