"""The vocabulary as responses need it: the strings of tokens.

Owns the type alone. Made by `vecd.gateway.tokenization.tokenizer`, read by dialects through
`vecd.gateway.api.model_info.ModelInfo`.
"""

from collections.abc import Callable
from typing import NamedTuple


class TokenVocabulary(NamedTuple):
    text_of: Callable[[int], str | None]
    """The string of a token id; None for an id that has none."""
    subword_prefix: str = ""
    """What begins the string of a token that continues a word, "##" in BERT's; empty where there is no such thing."""

    def texts_of(self, ids: list[int]) -> list[str]:
        """The strings of token ids, "" where an id has none."""
        return [self.text_of(token_id) or "" for token_id in ids]


NO_VOCABULARY = TokenVocabulary(lambda token_id: None)
