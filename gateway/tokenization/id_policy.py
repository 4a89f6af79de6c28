"""Whose vocabulary a list of token ids is of, and whether all of them are in it.

Owns the policy of `--token-ids`, and the refusals. Embeds nothing, and quotes no id. Called by
`vecd.gateway.tokenization.tokenizer`.

- "auto": a list framed by the model's special tokens, as its tokenizer makes it, is the model's. Any other is
  cl100k_base's, which is what clients send that know only OpenAI's models. Where the model's frame does not tell the
  two apart, neither is taken: of a model that frames nothing, or by ids that are common signs in cl100k_base (T5's
  </s> is its quotation mark, with which many texts end; Gemma's <bos> its #). In APIs of which callers know that ids
  are the model's (`Tokenizing.are_ids_of_model`), every list is;
- "model": every list is the model's;
- "cl100k": every list is cl100k_base's;
- "reject": none is taken.

Right or refused, that is the rule: ids of one vocabulary are valid ids of the other, and are other words there.
"""

from array import array
from typing import NamedTuple

import numpy as np

from vecd.gateway.tokenization import cl100k
from vecd.gateway.types.errors import BadRequest
from vecd.gateway.types.request import Source, TokenIds

# The signs that texts often begin and end with, as ids of cl100k_base, whose first 94 are ASCII from "!" on.
_COMMON_FIRST = {ord(char) - ord("!") for char in "\"#'(*-<@[`{"}
_COMMON_LAST = {ord(char) - ord("!") for char in "\"!'()*,-./:;>?]`}"}


class Frame(NamedTuple):
    """The special tokens that a model's tokenizer puts around a text."""

    prefix: list[int]
    suffix: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prefix) + len(self.suffix)

    def is_around(self, ids: TokenIds) -> bool:
        """Whether there is a frame, and `ids` are in it."""
        prefix, suffix = self
        if not (prefix or suffix) or len(ids) < len(prefix) + len(suffix):
            return False
        return [*ids[: len(prefix)]] == prefix and [*ids[len(ids) - len(suffix) :]] == suffix

    @property
    def is_telling(self) -> bool:
        """Whether a list of cl100k_base's ids is not in it, but for texts that hardly anybody writes: at one end at
        least is an id that such a list has not, or seldom, at that end."""
        has_rare_first = bool(self.prefix) and self.prefix[0] not in _COMMON_FIRST
        return has_rare_first or (bool(self.suffix) and self.suffix[-1] not in _COMMON_LAST)


NO_FRAME = Frame([], [])


class IdPolicy:
    def __init__(self, policy: str, vocab_size: int, frame: Frame) -> None:
        """`policy`: one of `vecd.gateway.types.config.TOKEN_ID_POLICIES`; `vocab_size` is the model's."""
        self._policy = policy
        self._vocab_size = vocab_size
        self._frame = frame

    def may_decode(self, are_ids_of_model: bool = False) -> bool:
        """Whether some lists may be cl100k_base's. `are_ids_of_model`: see `Tokenizing`."""
        return self._policy == "cl100k" or (self._policy == "auto" and self._frame.is_telling and not are_ids_of_model)

    def source_of(self, ids: TokenIds, index: int, are_ids_of_model: bool = False) -> Source:
        """MODEL or CL100K. `ids`: at least one. Raises BadRequest, naming the input by its index, for a list that is
        not taken, and for ids outside the vocabulary that it is taken to be of. Loads
        `vecd.gateway.tokenization.cl100k` if it is."""
        if self.are_model_s(ids, are_ids_of_model):
            self._check_range(ids, index, self._vocab_size, "the model's")
            if self._policy == "reject":
                raise BadRequest(
                    f"'input[{index}]' is a list of token ids, and this server takes none (--token-ids reject): send "
                    "text",
                    param="input",
                )
            return Source.MODEL
        if not self.may_decode():
            raise BadRequest(
                f"'input[{index}]' is a list of token ids, and this model's special tokens do not tell its own ids "
                "from those of another vocabulary. Send text (LangChain: "
                "OpenAIEmbeddings(check_embedding_ctx_length=False)), or start the server with --token-ids model, "
                "which takes every list for the model's own ids, or with --token-ids cl100k, for cl100k_base's",
                param="input",
            )
        self._check_range(ids, index, cl100k.NUM_IDS, "cl100k_base's", self._why_cl100k())
        if _extremes(ids)[1] >= cl100k.FIRST_UNKNOWN_ID and cl100k.is_any_unknown(ids):
            raise BadRequest(
                f"'input[{index}]' has a token id that is no token of cl100k_base's vocabulary: "
                f"{cl100k.FIRST_UNKNOWN_ID} and most ids up to {cl100k.NUM_IDS - 1} are not{self._why_cl100k()}",
                param="input",
            )
        return Source.CL100K

    def are_model_s(self, ids: TokenIds, are_ids_of_model: bool = False) -> bool:
        """Whether the policy takes `ids` for the model's, if it takes any."""
        match self._policy:
            case "model" | "reject":
                return True
            case "auto":
                return are_ids_of_model or (self._frame.is_telling and self._frame.is_around(ids))
            case _:
                return False

    def _why_cl100k(self) -> str:
        if self._policy != "auto":
            return ""
        return (
            ". The list is not framed by this model's special tokens, so it is taken for cl100k_base's (--token-ids "
            "model takes every list for the model's)"
        )

    @staticmethod
    def _check_range(ids: TokenIds, index: int, num_ids: int, whose: str, why: str = "") -> None:
        least, most = _extremes(ids)
        if least < 0 or most >= num_ids:
            raise BadRequest(
                f"'input[{index}]' has a token id outside {whose} vocabulary, 0 to {num_ids - 1}{why}", param="input"
            )


def _extremes(ids: TokenIds) -> tuple[int, int]:
    if isinstance(ids, array):  # there may be hundreds of thousands
        view = np.frombuffer(ids, np.intc)
        return int(view.min()), int(view.max())
    return min(ids), max(ids)
