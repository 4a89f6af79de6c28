"""Decide to which vocabulary a list of token ids belongs, and check that all of its ids are in that vocabulary.

Owns the policy of `--token-ids`, and the refusals. Embeds nothing, and quotes no id.

- "auto": a list that begins and ends with the model's special tokens is the model's. Any other is cl100k_base's, which
  clients send that know only OpenAI's models. Both are refused where the special tokens do not distinguish the two: for
  a model without special tokens, or with ids that are common signs in cl100k_base (T5's </s> is its quotation mark,
  Gemma's <bos> its #). In APIs whose ids are always the model's, every list is the model's;
- "model", "cl100k": every list is the model's, or cl100k_base's;
- "reject": every list is refused.

The rule is to be right or to refuse: ids of one vocabulary are valid ids of the other, and mean other words there.
"""

from array import array
from typing import NamedTuple

import numpy as np

from vecd.gateway.errors import INPUT, BadRequest
from vecd.gateway.request import Source, TokenIds
from vecd.gateway.tokenization import cl100k

# The signs with which texts often begin and end, as ids of cl100k_base, whose first 94 ids are ASCII from "!" on.
_COMMON_FIRST = {ord(char) - ord("!") for char in "\"#'(*-<@[`{"}
_COMMON_LAST = {ord(char) - ord("!") for char in "\"!'()*,-./:;>?]`}"}


class SequenceTemplate(NamedTuple):
    """The special tokens that a model's tokenizer puts before and behind a text."""

    prefix: list[int]
    suffix: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prefix) + len(self.suffix)

    def matches(self, ids: TokenIds) -> bool:
        """There are special tokens, and `ids` begin and end with them."""
        prefix, suffix = self
        if not (prefix or suffix) or len(ids) < len(prefix) + len(suffix):
            return False
        return [*ids[: len(prefix)]] == prefix and [*ids[len(ids) - len(suffix) :]] == suffix

    @property
    def is_distinctive(self) -> bool:
        """Lists of cl100k_base's ids seldom match it: at one end it has an id that those seldom have there."""
        has_rare_first = bool(self.prefix) and self.prefix[0] not in _COMMON_FIRST
        return has_rare_first or (bool(self.suffix) and self.suffix[-1] not in _COMMON_LAST)


NO_SPECIAL_TOKENS = SequenceTemplate([], [])


class IdPolicy:
    def __init__(self, policy: str, vocab_size: int, template: SequenceTemplate) -> None:
        """`policy`: one of those above; `vocab_size` is the model's."""
        self._policy = policy
        self._vocab_size = vocab_size
        self._template = template

    def may_decode(self, are_ids_of_model: bool = False) -> bool:
        """Some lists may be cl100k_base's. `are_ids_of_model`: see `Tokenizing`."""
        if self._policy == "auto":
            return self._template.is_distinctive and not are_ids_of_model
        return self._policy == "cl100k"

    def source_of(self, ids: TokenIds, index: int, are_ids_of_model: bool = False) -> Source:
        """MODEL or CL100K. `ids`: at least one. Raises BadRequest for a list that the policy refuses, and for ids
        outside the vocabulary that it is assigned to. Loads cl100k_base where that is the vocabulary."""
        if self.are_model_s(ids, are_ids_of_model):
            self._check_range(ids, index, self._vocab_size, "the model's")
            if self._policy == "reject":
                raise BadRequest(
                    f"'{INPUT}[{index}]' is a list of token ids, and this server takes none (--token-ids reject): send "
                    "text",
                    param=INPUT,
                )
            return Source.MODEL
        if not self.may_decode():
            raise BadRequest(
                f"'{INPUT}[{index}]' is a list of token ids, and this model's special tokens do not tell its own ids "
                "from those of another vocabulary. Send text (LangChain: "
                "OpenAIEmbeddings(check_embedding_ctx_length=False)), or start the server with --token-ids model, "
                "which takes every list for the model's own ids, or with --token-ids cl100k, for cl100k_base's",
                param=INPUT,
            )
        self._check_range(ids, index, cl100k.NUM_IDS, "cl100k_base's", self._why_cl100k())
        if _extremes(ids)[1] >= cl100k.FIRST_UNKNOWN_ID and not cl100k.lengths_of(ids).all():
            raise BadRequest(
                f"'{INPUT}[{index}]' has a token id that is no token of cl100k_base's vocabulary: "
                f"{cl100k.FIRST_UNKNOWN_ID} and most ids up to {cl100k.NUM_IDS - 1} are not{self._why_cl100k()}",
                param=INPUT,
            )
        return Source.CL100K

    def are_model_s(self, ids: TokenIds, are_ids_of_model: bool = False) -> bool:
        """The policy takes `ids` for the model's, if it does not refuse them."""
        if self._policy == "auto":
            return are_ids_of_model or (self._template.is_distinctive and self._template.matches(ids))
        return self._policy != "cl100k"

    def _why_cl100k(self) -> str:
        if self._policy != "auto":
            return ""
        return (
            ". The list is not framed by this model's special tokens, so it is taken for cl100k_base's (--token-ids "
            "model takes every list for the model's)"
        )

    @staticmethod
    def _check_range(ids: TokenIds, index: int, num_ids: int, vocabulary: str, why: str = "") -> None:
        least, most = _extremes(ids)
        if least < 0 or most >= num_ids:
            raise BadRequest(
                f"'{INPUT}[{index}]' has a token id outside {vocabulary} vocabulary, 0 to {num_ids - 1}{why}",
                param=INPUT,
            )


def _extremes(ids: TokenIds) -> tuple[int, int]:
    if isinstance(ids, array):  # there may be hundreds of thousands
        view = np.frombuffer(ids, np.intc)
        return int(view.min()), int(view.max())
    return min(ids), max(ids)
