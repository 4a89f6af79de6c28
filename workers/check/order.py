"""The order of `vecd check` to the process that computes with torch. Imports neither torch nor numpy."""

from collections.abc import Sequence
from dataclasses import dataclass

from vecd.workers.config import WorkerConfig

USED_MEMORY = 0.8
"""The share of the available memory; the rest is for the kernel's cache of files and for the unexpected."""


@dataclass(frozen=True, slots=True)
class Order:
    """Sent as JSON, by field."""

    config: WorkerConfig
    select_command: Sequence[str]
    """Runs `vecd.workers.process.selection_process.serve`; the descriptor is appended."""
    texts: Sequence[str]
    """Compared with other vectors; none: no comparison."""
    sequences: Sequence[list[int]]
    """The token ids of `texts`."""
    num_parameters: int
    stored_dtype: str
    max_tokens: int
    available_mb: int
    worker_counts: Sequence[int]
    """Numbers of workers to measure together, in addition to 1."""
    seconds: float
    """For each dtype and length of text, over all rounds; 0: measure nothing."""
    is_to_remember: bool = False
    """Whether to write the model's reference vectors beside it, if its vectors are right."""
