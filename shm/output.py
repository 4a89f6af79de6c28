"""What a sequence may ask of a worker: each output described once, as data.

Owns the list of outputs, and what scheduling, the wire, workers, delivery and encoding need to know of each: how many
rows it has, how many floats of a row are its own, and whether its vectors have length 1. Computes nothing: an engine
has one function for each output (`vecd.workers.engines.dummy`, `vecd.workers.engines.torch.outputs`).

A new output is a member here, a function in each engine, and whatever dialect asks for it. Which outputs a model has
follows from its capabilities (`vecd.shm.card.ModelCard`).
"""

from enum import IntEnum
from typing import Protocol


class ModelSizes(Protocol):
    """What the widths of rows depend on. `vecd.shm.card.ModelCard` has it."""

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
    """Its vectors have length 1 if those of the model have."""
    _width: str
    _extra: int

    VECTORS = 0, False, True, "dim"
    """The model's vector."""
    UNNORMALIZED = 1, False, False, "dim"
    """The same without the model's last step, where that brings it to length 1."""
    TOKENS = 2, True, False, "hidden_size"
    """The last hidden state of each token, before pooling and any step."""
    SCORES = 3, False, False, "num_labels"
    """The logits of a sequence, or of a pair: one for each label, before any activation."""
    TOKEN_SCORES = 4, True, False, "num_labels"
    """The logits of each token."""
    SPARSE = 5, False, False, "vocab_size"
    """The weight of each token of the vocabulary, most of them 0. Spans several rows."""
    TOKEN_VECTORS = 6, True, False, "token_dim"
    """The vector of each token of a multi-vector model, projected, and of length 1 where the model says so."""
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
        """A sequence has one row, and it is the model's vector: delivered without a look at each sequence."""
        return not self.is_per_token and self._width == "dim"

    @property
    def spans_rows(self) -> bool:
        """A sequence may have more floats than a row."""
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
        """Whether its vectors have length 1."""
        return self.may_be_normalized and model.is_normalized


def span_of(model: ModelSizes) -> int:
    """Rows of an output that `spans_rows`."""
    return -(-model.vocab_size // model.row_dim)


NOT_PLAIN = bytes(output for output in Output if not output.is_plain)
"""The codes of outputs whose rows have to be looked at one sequence at a time."""
