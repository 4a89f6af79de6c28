"""What an engine is: it turns a batch into the rows of a slot.

Owns the `Engine` protocol, the batch it is given, and the way from a worker's configuration to an engine. Imports
torch only when a configuration asks for a model. Called by `workers.main` (load) and `workers.loop` (embed).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shm.view import Rows
from workers.config import WorkerConfig

Report: TypeAlias = Callable[[str], None]
"""Called with the name of each stage of loading as it begins, for the operator."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The sequences of one forward pass, end to end. Borrows the memory of the message it came in."""

    lengths: NDArray[np.int32]
    """Tokens of each sequence, shape [B]; each at least 1."""
    token_ids: NDArray[np.int32]
    """Shape [T], T the sum of `lengths`; each 0 … vocab_size - 1."""


class Engine(Protocol):
    """Turns batches into rows. One engine per worker, used by one thread."""

    facts: dict[str, Any]
    """JSON values about the engine, for `/info`: at least "dtype" and "path"."""
    warnings: list[str]
    """One line each, for the operator: what was asked for and could not be had."""

    def embed(self, batch: PackedBatch, rows: Rows) -> None:
        """Write the vector of sequence i into row i. `rows` has at least B rows; those behind B are left alone.

        A vector depends on its own sequence alone, never on what else is in the batch, but for the rounding of
        sums. Raises what the model raises; rows may then be half written.
        """


def load_engine(config: WorkerConfig, report: Report) -> Engine:
    """Build the engine that `config` asks for, compared with the plain model and warm.

    Raises ModelError when the model cannot be loaded, or cannot be run the way `config` insists on.
    """
    # Imported here: the weightless engine must not load torch, and the fork server imports this module.
    if config.engine == "weightless":
        from workers.engines.weightless import WeightlessEngine

        report("making a weightless engine")
        return WeightlessEngine(config.card.dim)
    from workers.engines.choice import choose_engine

    return choose_engine(config, report)
