"""What becomes of inputs by their length: tokens of a text, or ids, → the sequences that the model gets.

Owns the frame and the limit of a sequence, and how a longer input is cut or split. Pure: knows tokens alone, and no
tokenizer. Called by `vecd.gateway.tokenization.tokenizer`, which makes a `Fit` for each way of asking.

    whole         [CLS] p p  t t t t t t t t t t t t [SEP]
    truncate      [CLS] p p  t t t t [SEP]
    truncate_left [CLS] p p                  t t t t [SEP]
    chunk         [CLS] p p  t t t t [SEP]
                  [CLS] p p          t t t t [SEP]
                  [CLS] p p                  t t t t [SEP]

Whatever is left of a text, the prompt is in front of it, since the prompt tells the model what the text is for. Each
chunk is embedded as a text of its own; its weight are the tokens that it has of the text itself.
"""

from array import array
from collections.abc import Generator
from dataclasses import dataclass

from vecd.gateway.tokenization.id_policy import Frame
from vecd.gateway.types.errors import BadRequest
from vecd.gateway.types.request import Chunk, Overflow, Source, TokenIds, TokenizedInput

MAX_CHUNKS = 100_000
"""Of one request: as many as `--max-inputs` may allow inputs."""

_CHUNKS_PER_STEP = 64


@dataclass(frozen=True, slots=True)
class Fit:
    """How long a sequence may be, and what stands in it beside an input's own tokens."""

    frame: Frame
    max_tokens: int
    """Longest sequence, the frame included."""
    overflow: Overflow
    least_chunk: int
    """Fewest tokens that a chunk may have of its text: fewer would make too many chunks."""
    prompt: str = ""
    prompt_ids: tuple[int, ...] = ()
    """The tokens of the prompt alone."""

    @property
    def room(self) -> int:
        """Most tokens of an input that a sequence takes, the prompt's included."""
        return self.max_tokens - self.frame.num_tokens

    def whole(self, own: TokenIds, source: Source) -> TokenizedInput:
        """`own`: an input's tokens, the prompt's included, at most `room`."""
        prefix, suffix = self.frame
        ids = [*prefix, *own, *suffix]
        return TokenizedInput(array("i", ids).tobytes(), len(ids), False, source)

    def beginning(self, own: TokenIds, source: Source) -> TokenizedInput:
        """`own` may go on behind what is kept of it, which is `room` tokens. There is room for one at least."""
        return self.whole(own[: self.room], source)._replace(is_truncated=True)

    def framed(self, ids: TokenIds, source: Source, *, is_truncated: bool) -> TokenizedInput:
        """`ids` with a frame of their own, which is kept if it is this one; no more than `max_tokens` of them."""
        suffix = self.frame.suffix
        if len(ids) > self.max_tokens:
            is_in_frame = self.frame.is_around(ids)
            ids = [*ids[: self.max_tokens - len(suffix)], *suffix] if is_in_frame else ids[: self.max_tokens]
        return TokenizedInput(array("i", ids).tobytes(), len(ids), is_truncated, source)

    def end(self, own: TokenIds, source: Source, prompt: TokenIds | None = None) -> TokenizedInput:
        """`prompt`, and what there is room for of the end of `own`, in which the prompt may be, too. They are more
        than there is room for. Raises BadRequest when the prompt leaves none."""
        prompt = [] if prompt is None else prompt
        num_kept = self.room - len(prompt)
        if num_kept < 1:
            raise BadRequest(
                f"The prompt has {len(prompt)} tokens, and an input may have {self.max_tokens} in all, of which "
                f"{self.frame.num_tokens} are special tokens: nothing would be left of a text that is truncated on the "
                "left"
            )
        return self.whole([*prompt, *own[len(own) - num_kept :]], source)._replace(is_truncated=True)

    def prompt_of(self, own: TokenIds) -> TokenIds:
        """What of an input's first tokens is the prompt's: all of them, unless the tokenizer joins its end with the
        text's beginning, as byte pairs do with a blank."""
        pairs = enumerate(zip(self.prompt_ids, own, strict=False))
        shorter = min(len(self.prompt_ids), len(own))
        return own[: next((index for index, (a, b) in pairs if a != b), shorter)]

    def chunk_steps(self, own: TokenIds, source: Source) -> Generator[None, None, TokenizedInput]:
        """In chunks: `own` is all of an input, and more than `room`. Yields between pieces of work.

        Raises BadRequest when the prompt leaves too little room, and for more than MAX_CHUNKS.
        """
        prompt = self.prompt_of(own)
        size = self.room - len(prompt)
        if size < self.least_chunk:
            raise BadRequest(
                f"The prompt has {len(prompt)} tokens, and is in front of every chunk of an input that is split. Of "
                f"the {self.max_tokens} tokens that a chunk may have, at most {max(0, self.room - self.least_chunk)} "
                "may be the prompt's"
            )
        num_own = len(own) - len(prompt)
        check_num_chunks(-(-num_own // size))
        prefix, suffix = [*self.frame.prefix, *prompt], self.frame.suffix
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
