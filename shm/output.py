"""What a sequence may ask of a worker: each output described once, as data.

Owns the list of outputs, and how many rows each has, how many floats of a row are its own, and whether its vectors have
length 1. Computes nothing: what an output is made of is in `vecd.workers.heads`. Which outputs a model has follows from
its capabilities (`vecd.model.card.ModelCard`).
"""

from enum import IntEnum
from typing import Protocol


class ModelSizes(Protocol):
    @property
    def dim(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_labels(self) -> int: ...

    @property
    def token_dim(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def row_dim(self) -> int: ...

    @property
    def is_normalized(self) -> bool: ...


class Output(IntEnum):
    """One output. The value is its code in a batch message.

    A row of a slot has `row_dim` floats. The first `width_of` floats of a row are the output's own; zeros fill the
    rest. An output that is wider than a row has several rows, end to end, and zeros behind its floats in the last one.
    """

    is_per_token: bool
    """A sequence has a row for each of its tokens; otherwise it has one row, or one that spans several."""
    may_be_normalized: bool
    _width: str
    _extra: int

    VECTORS = 0, False, True, "dim"
    UNNORMALIZED = 1, False, False, "dim"
    """The same without the model's last step, where that brings it to length 1."""
    TOKENS = 2, True, False, "hidden_size"
    """The last hidden state of each token, before pooling and any step."""
    SCORES = 3, False, False, "num_labels"
    """The logits of a sequence, or of a pair: one for each label, before any activation."""
    TOKEN_SCORES = 4, True, False, "num_labels"
    SPARSE = 5, False, False, "vocab_size"
    """The weight of each token of the vocabulary, most of them 0. Spans several rows."""
    TOKEN_VECTORS = 6, True, False, "token_dim"
    LEXICAL = 7, True, False, "", 1
    """One weight, at least 0, for each token of the sequence: BGE-M3's sparse vector."""
    HYBRID = 8, True, False, "token_dim", 1
    """Of BGE-M3, in one pass: the row of a token has its vector, and behind that its lexical weight. The first row has
    the model's vector in place of its token's, which has none; `dim` is `token_dim`."""

    def __new__(
        cls, code: int, is_per_token: bool = False, may_be_normalized: bool = False, width: str = "dim", extra: int = 0
    ) -> "Output":
        output = int.__new__(cls, code)
        output._value_ = code
        output.is_per_token = is_per_token
        output.may_be_normalized = may_be_normalized
        output._width = width
        output._extra = extra
        return output

    @property
    def is_plain(self) -> bool:
        return not self.is_per_token and self._width == "dim"

    @property
    def spans_rows(self) -> bool:
        return self._width == "vocab_size"

    def num_rows(self, num_tokens: int, span: int = 1) -> int:
        """Rows of a sequence of `num_tokens` tokens. `span`: those of an output that `spans_rows`, by `span_of`."""
        if self.is_per_token:
            return num_tokens
        return span if self.spans_rows else 1

    def width_of(self, model: ModelSizes) -> int:
        """Floats of a row that are the output's own; of all its rows if it `spans_rows`. Otherwise more than
        `model.row_dim` means that the model cannot give it."""
        return self._extra + (int(getattr(model, self._width)) if self._width else 0)

    def is_normalized_by(self, model: ModelSizes) -> bool:
        return self.may_be_normalized and model.is_normalized


def span_of(model: ModelSizes) -> int:
    return -(-model.vocab_size // model.row_dim)


NOT_PLAIN = bytes(output for output in Output if not output.is_plain)


# How large a batch is at most: in tokens where nothing else is configured, and in seconds once a worker is known.
#
# It is here because gateways size batches by it, and workers and `vecd check` measure with batches of the same size.

MAX_BATCH_TOKENS = 2048
"""On a processor."""

MAX_BATCH_TOKENS_ON_GPU = 32_768
"""A guess: not measured on any GPU yet."""

FULL_BATCH_S = 0.25
"""Of a worker's own speed: nothing is gained by larger batches."""
