"""The order of `vecd check` to the process that computes with torch. Imports neither torch nor numpy."""

from collections.abc import Sequence
from dataclasses import dataclass

from vecd.workers.config import WorkerConfig

USED_MEMORY = 0.8
"""The share of the available memory; the rest is for the kernel's cache of files."""

_EVERY = 4


def is_query(index: int) -> bool:
    return index % _EVERY == _EVERY - 1


def pairs_of(texts: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs for a reranker: the first text is the query of all."""
    return [(texts[0], text) for text in texts]


@dataclass(frozen=True, slots=True)
class Order:
    config: WorkerConfig
    texts: Sequence[str]
    sequences: Sequence[list[int]]
    num_parameters: int
    stored_dtype: str
    max_tokens: int
    available_mb: int
    seconds: float
    borders: Sequence[int] = ()
    kept: Sequence[list[int]] = ()
    """Of a multi-vector model: the places of the tokens of each sequence that have a vector."""
    is_to_remember: bool = False
