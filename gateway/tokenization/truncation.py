"""Make sequences of an input's tokens: add the special tokens, and truncate or split what is too long.

Owns the truncation policy. Pure: knows tokens, and no tokenizer. Called by `vecd.gateway.tokenization.tokenizer`, which
makes a `TruncationPolicy` for each combination of a request's options.

    whole         [CLS] p p  t t t t t t t t t t t t [SEP]
    truncate      [CLS] p p  t t t t [SEP]
    truncate_left [CLS] p p                  t t t t [SEP]
    chunk         [CLS] p p  t t t t [SEP]
                  [CLS] p p          t t t t [SEP]
                  [CLS] p p                  t t t t [SEP]

The prompt stays in front of the rest of a text, because it tells the model what the text is for. Each chunk is embedded
as a text of its own; its weight is the number of tokens that it has of the text itself.
"""

from array import array
from collections.abc import Generator
from dataclasses import dataclass

from vecd.gateway.tokenization.id_policy import SequenceTemplate
from vecd.gateway.types.errors import BadRequest, InputTooLong
from vecd.gateway.types.request import Chunk, Overflow, Source, TokenIds, TokenizedInput

MAX_CHUNKS = 100_000
"""Of one request: as many as `--max-inputs` can allow inputs."""

_CHUNKS_PER_STEP = 64


@dataclass(frozen=True, slots=True)
class TruncationPolicy:
    """How long a sequence may be, its special tokens and prompt, and what happens to longer inputs."""

    template: SequenceTemplate
    max_tokens: int
    """Longest sequence, special tokens included."""
    overflow: Overflow
    least_chunk: int
    """Fewest tokens of its text that a chunk may have: fewer would make too many chunks."""
    max_embed_len: int | None = None
    """Maximum tokens of an input that is split, the prompt and special tokens included, each once; None: no limit."""
    prompt: str = ""
    prompt_ids: tuple[int, ...] = ()
    """The tokens of the prompt alone."""

    @property
    def max_own_tokens(self) -> int:
        """Most tokens of an input in one sequence, the prompt's included."""
        return self.max_tokens - self.template.num_tokens

    def whole(self, own: TokenIds, source: Source) -> TokenizedInput:
        """One sequence. `own`: an input's tokens, the prompt's included, at most `max_own_tokens`."""
        prefix, suffix = self.template
        ids = [*prefix, *own, *suffix]
        return TokenizedInput(array("i", ids).tobytes(), len(ids), False, source)

    def beginning(self, own: TokenIds, source: Source) -> TokenizedInput:
        """The first `max_own_tokens` of `own`, which may have been cut before. Call only if that is at least one."""
        return self.whole(own[: self.max_own_tokens], source)._replace(is_truncated=True)

    def templated(self, ids: TokenIds, source: Source, *, is_truncated: bool) -> TokenizedInput:
        """`ids` that may have special tokens already, which are kept if they match; at most `max_tokens` of them."""
        suffix = self.template.suffix
        if len(ids) > self.max_tokens:
            has_template = self.template.matches(ids)
            ids = [*ids[: self.max_tokens - len(suffix)], *suffix] if has_template else ids[: self.max_tokens]
        return TokenizedInput(array("i", ids).tobytes(), len(ids), is_truncated, source)

    def end(self, own: TokenIds, source: Source, prompt: TokenIds | None = None) -> TokenizedInput:
        """`prompt` and as much of the end of `own` as a sequence takes; `own` may begin with the prompt, too. Together
        they are too long. Raises BadRequest when the prompt takes the whole sequence."""
        prompt = [] if prompt is None else prompt
        num_kept = self.max_own_tokens - len(prompt)
        if num_kept < 1:
            raise BadRequest(
                f"The prompt has {len(prompt)} tokens, and an input may have {self.max_tokens} in all, of which "
                f"{self.template.num_tokens} are special tokens: nothing would be left of a text that is truncated on "
                "the left"
            )
        return self.whole([*prompt, *own[len(own) - num_kept :]], source)._replace(is_truncated=True)

    def prompt_of(self, own: TokenIds) -> TokenIds:
        """The prompt's tokens at the beginning of an input: all of them, unless the tokenizer joins the prompt's end
        with the text's beginning, as byte pairs do with a blank."""
        pairs = enumerate(zip(self.prompt_ids, own, strict=False))
        shorter = min(len(self.prompt_ids), len(own))
        return own[: next((index for index, (a, b) in pairs if a != b), shorter)]

    def chunk_steps(self, own: TokenIds, source: Source) -> Generator[None, None, TokenizedInput]:
        """Split an input into chunks. `own`: all its tokens, more than `max_own_tokens`. Yields between pieces of work.

        Raises InputTooLong for more than `max_embed_len` tokens, BadRequest when the prompt leaves too few tokens for a
        chunk, and for more than MAX_CHUNKS.
        """
        num_tokens = len(own) + self.template.num_tokens
        if self.max_embed_len is not None and num_tokens > self.max_embed_len:
            raise InputTooLong(self.max_embed_len, num_tokens, param="input")
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
        chunks: list[Chunk] = []
        for start in range(len(prompt), len(own), size):
            part = own[start : start + size]
            ids = [*prefix, *part, *suffix]
            chunks.append(Chunk(array("i", ids).tobytes(), len(ids), len(part)))
            if len(chunks) % _CHUNKS_PER_STEP == 0:
                yield
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        return TokenizedInput(chunks[0].token_ids, num_tokens, False, source, tuple(chunks))


def check_num_chunks(num_chunks: int) -> None:
    """Raises BadRequest for more than MAX_CHUNKS."""
    if num_chunks > MAX_CHUNKS:
        raise BadRequest(
            f"The inputs are split into {num_chunks} chunks or more, at most {MAX_CHUNKS} in one request", param="input"
        )
