"""The order of `vecd check` to the process that computes with torch. Imports neither torch nor numpy."""

from collections.abc import Sequence
from dataclasses import dataclass

from vecd.workers.config import WorkerConfig

USED_MEMORY = 0.8
"""The share of the available memory; the rest is for the kernel's cache of files and for the unexpected."""


_EVERY = 4


def is_query(index: int) -> bool:
    """Whether that text is a query to a multi-vector model; the others are documents."""
    return index % _EVERY == _EVERY - 1


def pairs_of(texts: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of a query and a document that a reranker is compared with: the first text is the query of all."""
    return [(texts[0], text) for text in texts]


@dataclass(frozen=True, slots=True)
class Order:
    """Sent as JSON, by field."""

    config: WorkerConfig
    select_command: Sequence[str]
    """Runs `vecd.workers.process.selection_process.serve`; the descriptor is appended."""
    texts: Sequence[str]
    """Compared with other vectors; none: no comparison."""
    sequences: Sequence[list[int]]
    """The token ids of `texts`, or of pairs of them (`pairs_of`)."""
    num_parameters: int
    stored_dtype: str
    max_tokens: int
    available_mb: int
    worker_counts: Sequence[int]
    """Numbers of workers to measure together, in addition to 1."""
    seconds: float
    """For each dtype and length of text, over all rounds; 0: measure nothing."""
    borders: Sequence[int] = ()
    """Where the second part of each sequence begins; 0: it has none."""
    kept: Sequence[list[int]] = ()
    """Of a multi-vector model: the places of the tokens of each sequence that have a vector."""
    is_to_remember: bool = False
    """Whether to write the model's reference vectors beside it, if its vectors are right."""
