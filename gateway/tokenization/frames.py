"""What stands around an input's tokens: special tokens, prompts, templates; and what is cut when it is too long.

Owns the truncation policy, the templates of roles and texts, and how offsets move with them. Pure: knows tokens, and no
tokenizer.
"""

from array import array
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import tokenizers
from numpy.typing import NDArray

from vecd.gateway.errors import INPUT, BadRequest, InputTooLong
from vecd.gateway.request import ALL, Overflow, Role, Source, TokenIds, TokenizedInput
from vecd.gateway.tokenization.id_policy import NO_SPECIAL_TOKENS, SequenceTemplate
from vecd.model.card import ModelError
from vecd.model.steps import TextTemplate, TokenHead

#     whole         [CLS] p p  t t t t t t t t t t t t [SEP]
#     truncate      [CLS] p p  t t t t [SEP]
#     truncate_left [CLS] p p                  t t t t [SEP]
#     chunk         [CLS] p p  t t t t [SEP]
#                   [CLS] p p          t t t t [SEP]
#                   [CLS] p p                  t t t t [SEP]
#
# The prompt stays in front of the rest of a text, because it tells the model what the text is for. Each chunk is
# embedded as a text of its own; its weight is the number of tokens that it has of the text itself.

MAX_CHUNKS = 100_000
"""The most chunks of one request: the number of inputs that `--max-inputs` can allow."""

_CHUNKS_PER_STEP = 64
BYTES_PER_ID = 4


@dataclass(frozen=True)
class TruncationPolicy:
    """How long a sequence may be, its special tokens and prompt, and what happens to longer inputs."""

    template: SequenceTemplate
    max_tokens: int
    """Longest sequence, special tokens included."""
    overflow: Overflow
    least_chunk: int
    """Fewest tokens of its text that a chunk may have: fewer would make too many chunks."""
    role: "RoleTemplate"
    """Its special tokens and limit are in the above."""
    max_embed_len: int | None = None
    """Of an input that is split, the prompt and special tokens included, each once."""
    prompt: str = ""
    prompt_ids: tuple[int, ...] = ()
    strips: bool = False
    """A text is taken without the blanks around it."""

    @property
    def max_own_tokens(self) -> int:
        """Most tokens of an input in one sequence, the prompt's included."""
        return self.max_tokens - self.template.num_tokens

    @cached_property
    def frame(self) -> tuple[bytes, bytes, int]:
        """The special ids around an input's own as bytes, and the most bytes of these."""
        prefix, suffix = (array("i", ids).tobytes() for ids in self.template)
        return prefix, suffix, self.max_own_tokens * BYTES_PER_ID

    def whole(self, own: TokenIds, source: Source) -> TokenizedInput:
        """One sequence. `own`: an input's tokens, the prompt's included, at most `max_own_tokens`."""
        prefix, suffix = self.template
        ids = [*prefix, *own, *suffix]
        return TokenizedInput(array("i", ids).tobytes(), len(ids), False, source)

    def beginning(self, own: TokenIds, source: Source) -> TokenizedInput:
        """The first of `own`, more than `max_own_tokens`; where special tokens alone are too many, the first of these
        and the suffix."""
        prefix, suffix = self.template
        ids = [*prefix, *own[: self.max_tokens]][: self.max_tokens - len(suffix)] + suffix
        return TokenizedInput(array("i", ids).tobytes(), len(ids), True, source)

    def end(self, own: TokenIds, source: Source, prompt: TokenIds) -> TokenizedInput:
        """`prompt` and as much of the end of `own` as a sequence takes; `own` may begin with the prompt, too. Raises
        BadRequest when the prompt takes the whole sequence."""
        num_kept = self.max_own_tokens - len(prompt)
        if num_kept < 1:
            raise BadRequest(
                f"The prompt has {len(prompt)} tokens, and an input may have {self.max_tokens} in all, of which "
                f"{self.template.num_tokens} are special tokens: nothing would be left of a text that is truncated on "
                "the left"
            )
        return self.whole([*prompt, *own[len(own) - num_kept :]], source)._replace(is_truncated=True)

    def prompt_of(self, own: TokenIds) -> TokenIds:
        """The prompt's tokens at the beginning of an input: all, unless the tokenizer joins the prompt's end with the
        text's beginning, as byte pairs do with a blank."""
        pairs = enumerate(zip(self.prompt_ids, own, strict=False))
        shorter = min(len(self.prompt_ids), len(own))
        return own[: next((index for index, (a, b) in pairs if a != b), shorter)]

    def chunk_steps(self, own: TokenIds, source: Source) -> Generator[None, None, TokenizedInput]:
        """Split an input into chunks. `own`: all its tokens, more than `max_own_tokens`. Raises InputTooLong for more
        than `max_embed_len` tokens, BadRequest when the prompt leaves too few tokens for a chunk, and for more than
        MAX_CHUNKS."""
        num_tokens = len(own) + self.template.num_tokens
        if self.max_embed_len is not None and num_tokens > self.max_embed_len:
            raise InputTooLong(self.max_embed_len, num_tokens, param=INPUT)
        prompt = self.prompt_of(own)
        size = self.max_own_tokens - len(prompt)
        if size < self.least_chunk:
            most = self.max_own_tokens - self.least_chunk
            raise BadRequest(
                f"The prompt has {len(prompt)} tokens, and is in front of every chunk of an input that is split. Of "
                f"the {self.max_tokens} tokens that a chunk may have, at most {max(0, most)} may be the prompt's"
            )
        num_own = len(own) - len(prompt)
        check_num_chunks(-(-num_own // size))
        prefix, suffix = [*self.template.prefix, *prompt], self.template.suffix
        chunks: list[TokenizedInput] = []
        for start in range(len(prompt), len(own), size):
            part = own[start : start + size]
            ids = [*prefix, *part, *suffix]
            chunks.append(TokenizedInput(array("i", ids).tobytes(), len(ids), False, weight=len(part)))
            if len(chunks) % _CHUNKS_PER_STEP == 0:
                yield
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        return TokenizedInput(chunks[0].token_ids, num_tokens, False, source, tuple(chunks))


def check_num_chunks(num_chunks: int) -> None:
    if num_chunks > MAX_CHUNKS:
        raise BadRequest(
            f"The inputs are split into {num_chunks} chunks or more, at most {MAX_CHUNKS} in one request", param=INPUT
        )


def no_offsets(num: int) -> NDArray[np.int32]:
    """[num, 2] of tokens that are nowhere in the text."""
    return np.full((num, 2), -1, np.int32)


def with_offsets(
    item: TokenizedInput, offsets: NDArray[np.int32], own_ids: list[int], truncation: TruncationPolicy
) -> TokenizedInput:
    """`offsets`, [n, 2]: of the input's tokens, the prompt's included, as far as they are kept."""
    prefix, suffix = (no_offsets(len(ids)) for ids in truncation.template)
    before = num_prompt = len(truncation.prompt_of(own_ids))
    parts = [chunk.weight for chunk in item.chunks]
    if not parts:
        parts = [item.num_tokens - truncation.template.num_tokens - num_prompt]
        if item.is_truncated and truncation.overflow is Overflow.TRUNCATE_LEFT:
            before = len(own_ids) - parts[0]
    rows = []
    for num in parts:
        rows += [prefix, no_offsets(num_prompt), offsets[before : before + num], suffix]
        before += num
    return item._replace(offsets=np.concatenate(rows))


# A model for late interaction puts around queries and documents:
#
#     query     [CLS] [Q] q q q [SEP] [MASK] [MASK] [MASK]     filled up to `query_tokens`, if it has an expansion
#     document  [CLS] [D] d d d d d d d [SEP]                  at most `document_tokens` long
#
# Sources: PyLate's `insert_prefix_token` and `tokenize`, which puts the marker behind the first token; Stanford
# ColBERT's QueryTokenizer and DocTokenizer; `query_expansion` of sentence-transformers 6.


class RoleTemplate(NamedTuple):
    """What is put around the texts of one role."""

    prompt: str | None = None
    """None: the model's default."""
    marker: tuple[int, ...] = ()
    """None or one, behind the first special token."""
    max_tokens: int = ALL
    """Longest sequence."""
    num_filled: int = 0
    """A shorter sequence is filled up to this number of tokens."""
    expansion_id: int = 0
    is_expansion_attended: bool = False

    def around(self, template: SequenceTemplate) -> SequenceTemplate:
        prefix = [*template.prefix[:1], *self.marker, *template.prefix[1:]]
        return SequenceTemplate(prefix, template.suffix)

    def filled(self, item: TokenizedInput) -> TokenizedInput:
        """The sequence with its expansion."""
        num_added = self.num_filled - item.num_tokens
        if num_added <= 0:
            return item
        offsets = item.offsets
        return item._replace(
            token_ids=item.token_ids + array("i", [self.expansion_id] * num_added).tobytes(),
            num_tokens=item.num_tokens + num_added,
            border=0 if self.is_expansion_attended else item.num_tokens,
            offsets=None if offsets is None else np.concatenate((offsets, no_offsets(num_added))),
        )


NO_ROLE = RoleTemplate()


def role_templates(head: TokenHead | None, max_tokens: int) -> dict[Role, RoleTemplate]:
    """Those of a multi-vector model. `max_tokens`: the model's."""
    if head is None:
        return {}
    limit, expansion_id = head.query_tokens, head.expansion_id
    if head.max_query_tokens is not None:
        limit = head.max_query_tokens and max(head.max_query_tokens, head.query_tokens)
    query = RoleTemplate(head.query_prompt or None, _marker(head.query_marker), limit or ALL)
    if expansion_id is not None:
        query = query._replace(
            num_filled=min(max_tokens, head.query_tokens),
            expansion_id=expansion_id,
            is_expansion_attended=head.attends_to_expansion,
        )
    document = RoleTemplate(head.document_prompt or None, _marker(head.document_marker), head.document_tokens or ALL)
    return {Role.QUERY: query, Role.DOCUMENT: document}


def _marker(token_id: int | None) -> tuple[int, ...]:
    return () if token_id is None else (token_id,)


# What stands around a text: a prompt, the tokenizer's special tokens, and the chat template of some models.
#
#     <|im_start|>system\\n p p <|im_end|>\\n<|im_start|>user\\n t t t <|im_end|> \\n
#     └ tokenized with the text ────────────────────────────┘       └ suffix ───┘
#
# What is too long is cut at the end of the text, and the suffix is kept. Source: `_restore_chat_template_suffix` of
# sentence-transformers 6.

_INSTRUCTION = "{instruction}"
_PLAIN_TEXT = TextTemplate((("", ""), (_INSTRUCTION, "")), adds_special_tokens=True)


class TextFrame:
    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        own: SequenceTemplate,
        template: TextTemplate | None = None,
        folder: str = "",
    ) -> None:
        """`tokenizer` neither truncates nor pads yet. `own`: the special tokens that it adds. Raises ModelError for a
        template whose end may become one token with the end of a text."""
        self._tokenizer = tokenizer
        self._template = template or _PLAIN_TEXT
        self._own = own if self._template.adds_special_tokens else NO_SPECIAL_TOKENS
        self.strips = self._template.strips
        if template is not None and (why := self._why_not()):
            raise ModelError(
                f"{folder}/sentence_bert_config.json: modality_config has 'message', by which texts are rendered by "
                f"the chat template: it {why}"
            )

    def _why_not(self) -> str:
        if self._tokenizer.encode_special_tokens:
            return "has special tokens, and --literal-special-tokens recognizes none"
        tokens = self._tokenizer.get_added_tokens_decoder().items()
        borders = {token_id for token_id, token in tokens if token.special and not token.lstrip}
        for _, after in self._template.variants:
            if after and self._ids(after)[0] not in borders:
                return f"has {after[:40]!r} behind a text, which does not begin with a special token"
        return ""

    def around(self, prompt: str) -> tuple[SequenceTemplate, str]:
        """The special tokens around a text with this prompt, and what is tokenized before the text. Raises BadRequest
        for a prompt if there is no place for one."""
        variants = self._template.variants
        if prompt and len(variants) == 1:
            raise BadRequest(
                "The model's chat template has no place for a prompt: it renders no message with the role 'system'"
            )
        prompt = prompt.strip() if self._template.strips_prompt else prompt
        before, after = (part.replace(_INSTRUCTION, prompt) for part in variants[bool(prompt)])
        return SequenceTemplate(self._own.prefix, [*self._ids(after), *self._own.suffix]), before

    def whole(self, prompt: str) -> SequenceTemplate:
        """All tokens around an empty text."""
        (prefix, suffix), before = self.around(prompt)
        return SequenceTemplate([*prefix, *self._ids(before)], suffix)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
