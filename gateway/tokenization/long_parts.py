"""Limit the parts of a text that can be cut nowhere, and cut those of which only the beginning is needed.

Owns how long a part may be, and the proof for a cut inside a word. Called by `vecd.gateway.tokenization.text_tokens`.

The tokens ahead of a border between two tokens are those of the text that ends there: byte pairs never merged across
it, and the best path of unigrams to it knows nothing of what follows. No token has more than m letters in a row, so a
part has a border at one of any m places in a row between letters. The first tokens that the texts up to each of these
places have in common are the part's:

    part       …xxxxxxxxxxxxxxxxxxxxx… as many as there are
    places               1 2 3 4       m = 4
"""

import re
from collections.abc import Generator
from functools import cached_property

import tokenizers
from tokenizers.models import BPE, Unigram, WordPiece

from vecd.gateway.tokenization.split_points import MARKS, WORD, normalized, stages_of
from vecd.gateway.types.errors import BadRequest

LEAST_CHARS = 4 * 1024
"""So many characters are never too many."""

_PART_CHARS, _LONG_PART_CHARS = 64 * 1024, 256 * 1024
"""The longest part without split points. So many letters take 0.01 s, and U+3316, of which NFKC makes six letters, 0.3
s. The second one is for WordPiece, whose words have no tokens beyond 100 letters, and for tokenizers without any split
points, whose ordinary texts are one part."""

_LONGEST, _EXPANSION = "\ufdfa", 18
"""The character of which NFKC makes most by far, and how many: it counts as many. All others have at most eight."""

_LEAD = 4
"""Letters before the first place, so that what a pre-tokenizer takes by its end ('re) is over."""

_BLANKS, _NO_BLANKS = ({"String": " "}, "▁"), ({"String": " "}, "MergedWithPrevious")


class LongParts:
    def __init__(self, tokenizer: tokenizers.Tokenizer, *, has_cuts: bool) -> None:
        """`has_cuts`: split points are known."""
        self._tokenizer = tokenizer
        is_long = not has_cuts or isinstance(tokenizer.model, WordPiece)
        self.max_chars = _LONG_PART_CHARS if is_long else _PART_CHARS
        self._has_cuts = has_cuts
        self._expansion = _EXPANSION if len(normalized(tokenizer, _LONGEST)) > 1 else 1

    def is_too_long(self, part: str) -> bool:
        return len(part) > LEAST_CHARS and self._size(part) > self.max_chars

    def check(self, part: str) -> None:
        """Raises BadRequest for a part that is too long."""
        if self.is_too_long(part):
            raise BadRequest(
                f"A text has a part of {self._size(part)} characters that can be cut nowhere, at most {self.max_chars} "
                "are allowed: put blanks into it, or send less of it",
                param="input",
            )

    def cut_steps(self, part: str, num: int) -> Generator[None, None, int]:
        """Where the beginning of a part can be cut so that it has the first `num` tokens of the whole part, and more; 0
        if no such place is found. Yields between pieces of work."""
        stop = 2 * LEAST_CHARS
        while self._places is not None and stop <= len(part):
            found = self._places.search(part, stop - LEAST_CHARS, stop) if num < stop else None
            if found is not None and self._are_kept(found[0]):
                heads: set[tuple[int, ...]] = set()
                for place in range(found.start() + _LEAD, found.end()):
                    [encoding] = self._tokenizer.encode_batch_fast([part[:place]], add_special_tokens=False)
                    heads.add(tuple(encoding.ids[: num + 1]))
                    yield
                    if len(encoding) <= num:
                        break
                if [len(head) for head in heads] == [num + 1]:
                    return found.end() - 1
            stop *= 2
        return 0

    @cached_property
    def _letter(self) -> str:
        """Matches a letter that is one character, or byte, of the model's; a mark, too, which ends no word of unigrams,
        and a blank where it ends none."""
        if isinstance(self._tokenizer.model, Unigram):
            return f"[{WORD}{MARKS}]"
        return "[0-9A-Za-z]" if self._has_cuts else "[ -{}~▁]"

    @cached_property
    def _places(self) -> re.Pattern[str] | None:
        """Matches letters with enough places between them; None for a model of another kind."""
        model = self._tokenizer.model
        is_known = isinstance(model, Unigram) or (isinstance(model, BPE) and not model.end_of_word_suffix)
        if not is_known or not (self._has_cuts or self._is_one_word()):
            return None
        words = re.findall(f"{self._letter}+", "\n".join(self._tokenizer.get_vocab()))
        return re.compile(f"{self._letter}{{{max(map(len, words), default=0) + _LEAD}}}")

    def _is_one_word(self) -> bool:
        """Whether blanks are made letters, and nothing else is done to a text before the model, as by Gemma's."""
        stages = [*stages_of(self._tokenizer.normalizer, "normalizers")]
        stages += stages_of(self._tokenizer.pre_tokenizer, "pretokenizers")
        made = [(stage.get("pattern"), stage.get("content", stage.get("behavior"))) for stage in stages]
        return made in ([_BLANKS], [_BLANKS, _NO_BLANKS])

    def _are_kept(self, letters: str) -> bool:
        """Whether the normalizer makes one letter of each."""
        kept = normalized(self._tokenizer, "|".join(letters)).split("|")
        return len(kept) == len(letters) and all(re.fullmatch(self._letter, char) for char in kept)

    def _size(self, part: str) -> int:
        return len(part) + part.count(_LONGEST) * (self._expansion - 1)
