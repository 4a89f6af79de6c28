"""What a sequence may ask of a worker: each output described once, as data.

Owns the list of outputs, and what scheduling, the wire, workers, delivery and encoding need to know of each: how many
rows it has, how many floats of a row are its own, and whether its vectors have length 1. Computes nothing: an engine
has one function for each output (`vecd.workers.engines.dummy`, `vecd.workers.engines.torch.outputs`).

A new output is a member here, a function in each engine, and whatever dialect asks for it.
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
    def is_normalized(self) -> bool: ...


class Output(IntEnum):
    """One output. The value is its code in a batch message.

    A row of a slot has `dim` floats. The first `width_of` floats of a row are the output's own; zeros fill the rest.
    """

    is_per_token: bool
    """A sequence has a row for each of its tokens; otherwise it has one row."""
    may_be_normalized: bool
    """Its vectors have length 1 if those of the model have."""
    _width: str

    VECTORS = 0, False, True, "dim"
    """The model's vector."""
    UNNORMALIZED = 1, False, False, "dim"
    """The same without the model's last step, where that brings it to length 1."""
    TOKENS = 2, True, False, "hidden_size"
    """The last hidden state of each token, before pooling and any step."""

    def __new__(
        cls, code: int, is_per_token: bool = False, may_be_normalized: bool = False, width: str = "dim"
    ) -> "Output":
        output = int.__new__(cls, code)
        output._value_ = code
        output.is_per_token = is_per_token
        output.may_be_normalized = may_be_normalized
        output._width = width
        return output

    @property
    def is_plain(self) -> bool:
        """A sequence has one row, and all of it: delivered without a look at each sequence."""
        return not self.is_per_token and self._width == "dim"

    def num_rows(self, num_tokens: int) -> int:
        """Rows of a sequence of `num_tokens` tokens."""
        return num_tokens if self.is_per_token else 1

    def width_of(self, model: ModelSizes) -> int:
        """Floats of a row that are the output's own. More than `model.dim` means that the model cannot give it."""
        width: int = getattr(model, self._width)
        return width

    def is_normalized_by(self, model: ModelSizes) -> bool:
        """Whether its vectors have length 1."""
        return self.may_be_normalized and model.is_normalized


NOT_PLAIN = bytes(output for output in Output if not output.is_plain)
"""The codes of outputs whose rows have to be looked at one sequence at a time."""
