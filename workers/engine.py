"""What an engine is: it turns a batch into the rows of a slot.

Owns the `Engine` protocol, the batch it is given, and the way from a worker's configuration to an engine. Imports
torch only when a configuration asks for a model. Called by `vecd.workers.process.main` (load) and
`vecd.workers.process.loop` (begin, finish).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vecd.shm.output import Output
from vecd.shm.views import Rows
from vecd.workers.config import WorkerConfig

if TYPE_CHECKING:
    from vecd.workers.engines.load import ChooseElsewhere

Report: TypeAlias = Callable[[str], None]
"""Called with the name of each stage of loading as it begins, for the operator."""


_IS_PER_TOKEN = np.array([Output(code).is_per_token for code in range(len(Output))])
"""By code."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The sequences of one forward pass, end to end. Borrows the memory of the message it came in."""

    lengths: NDArray[np.int32]
    """Tokens of each sequence, shape [B]; each at least 1."""
    token_ids: NDArray[np.int32]
    """Shape [T], T the sum of `lengths`; each 0 … vocab_size - 1."""
    outputs: NDArray[np.uint8] | None = None
    """An `Output` for each sequence, shape [B]; None: VECTORS of all."""

    @property
    def rows_of_each(self) -> NDArray[np.int64]:
        """How many rows each sequence has, shape [B]: its tokens where its output has a row for each, otherwise 1."""
        if self.outputs is None:
            return np.ones(self.lengths.size, dtype=np.int64)
        return np.where(_IS_PER_TOKEN[self.outputs], self.lengths, 1).astype(np.int64)

    @property
    def num_rows(self) -> int:
        return self.lengths.size if self.outputs is None else int(self.rows_of_each.sum())


class Finish(Protocol):
    """A batch that has been begun. Borrows its rows until it has been called, which is to be done once."""

    def is_ready(self) -> bool:
        """Whether calling it would not wait. Never raises: what went wrong, the call says."""

    def __call__(self) -> None:
        """Wait until the rows are complete. Raises what the device raises; rows may then be half written."""


class _Complete:
    def is_ready(self) -> bool:
        return True

    def __call__(self) -> None:
        pass


COMPLETE: Finish = _Complete()
"""What `Engine.begin` returns when the rows are complete already."""


class Engine(Protocol):
    """Turns batches into rows. One engine per worker, used by one thread."""

    facts: dict[str, Any]
    """JSON values about the engine, for `/info`: at least "dtype" and "path"."""
    warnings: list[str]
    """One line each, for the operator: what was asked for and could not be had."""

    @property
    def num_padding_tokens(self) -> int:
        """Computed so far besides those of batches, because a shape had to be filled. Grows while a batch is begun."""

    def adopt(self, slots: Sequence[Rows]) -> None:
        """Be told of the memory that most rows will lie in: the slots of one arena. Called once at most, before the
        worker is ready; an engine works without. May add to `warnings`."""

    def begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        """Begin to write what each sequence asks for into rows, in the order of the batch: as many
        rows as each output has, its own floats first and zeros behind them (`Output`). `rows` has at least
        `batch.num_rows` rows; those behind are left alone. On a processor the rows are complete on return; on an
        accelerator the caller may begin the next batch, in other rows, before finishing this one.

        A row depends on its own sequence alone, never on what else is in the batch, but for the rounding of
        sums. Raises what the model raises; rows may then be half written, but nothing writes to them any more.
        """

    def embed(self, batch: PackedBatch, rows: Rows) -> None:
        """Begin and finish."""


def load_engine(config: WorkerConfig, report: Report, choose_elsewhere: "ChooseElsewhere | None" = None) -> Engine:
    """Build the engine that `config` asks for, compared with the plain model and warm.

    The comparison is remembered in `config.cache_folder`; what is remembered is checked again with short probes.
    Where it is not, `choose_elsewhere` makes it; without that, this process does.

    Side effect: sets torch's number of threads. Raises ModelError when the model cannot be loaded, or cannot be run
    the way `config` insists on.
    """
    # Imported here: the weightless engine must not load torch, and the fork server imports this module.
    if config.engine == "weightless":
        from vecd.workers.engines.dummy import DummyEngine

        report("making a weightless engine")
        card = config.card
        return DummyEngine(card.dim, card.hidden_size, is_normalized=card.is_normalized)
    from vecd.workers.engines.load import load_chosen_engine

    return load_chosen_engine(config, report, choose_elsewhere)


def set_num_threads(config: WorkerConfig) -> None:
    """Threads of one forward pass, in a process that was forked after the engine had been loaded."""
    if config.engine != "weightless":
        import torch

        torch.set_num_threads(config.num_threads)
