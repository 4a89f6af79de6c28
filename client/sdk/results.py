"""What calls return beside arrays.

Owns the types alone. Called by `vecd.client.sdk.calls`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RankedDocument:
    index: int
    """Of the document, as passed."""
    score: float


class Label(NamedTuple):
    label: str
    score: float


class Entity(NamedTuple):
    """A labelled part of a text."""

    label: str
    score: float
    text: str
    start: int
    """In characters of the text."""
    end: int


class SparseVector(NamedTuple):
    indices: "NDArray[np.int32]"
    """Ids of the vocabulary, ascending: int32 [k]."""
    values: "NDArray[np.float32]"
    """Their weights: float32 [k]."""


class Token(NamedTuple):
    id: int
    text: str
    is_special: bool
    start: int | None
    """In characters of the text; None for special tokens."""
    end: int | None


Info = dict[str, Any]
"""As GET /info has it: docs/api.md."""
