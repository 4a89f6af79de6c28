"""The engine of a model: hidden states from a transformer, vectors from its head.

Owns the steps of a batch, and the second try after out of memory. A `Forward` computes the hidden states, fused, packed
or padded; the device writes the vectors into the rows. Called by `vecd.workers.process.loop` through
`vecd.workers.engine.Engine`.
"""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from vecd.shm.views import Rows
from vecd.workers.engine import Finish, PackedBatch
from vecd.workers.engines.torch.device import open_device
from vecd.workers.engines.torch.outputs import rows_of
from vecd.workers.engines.torch.pooling import Head
from vecd.workers.layout import Layout, arrange
from vecd.workers.out_of_memory import halves, means_out_of_memory

log = logging.getLogger("vecd.worker")

_CPU = torch.device("cpu")


class Forward(Protocol):
    """A way to run a transformer. Knows the model and the device."""

    path: str
    """Its name, for the operator."""
    num_padding_tokens: int
    """See `Engine.num_padding_tokens`."""

    def __call__(self, layout: Layout) -> Tensor:
        """The last layer's hidden states, [T, H], in the layout's order."""


class TransformerEngine:
    """Runs one model in one way. The model's settings belong to the last engine that was made from it."""

    def __init__(self, forward: Forward, head: Head, dtype: str, device: torch.device = _CPU) -> None:
        """`device` is where `forward` and `head` compute."""
        self._forward = forward
        self._head = head
        self._device = open_device(device)
        self.facts: dict[str, Any] = {"dtype": dtype, "path": forward.path, **self._device.facts()}
        self.warnings: list[str] = []

    @property
    def num_padding_tokens(self) -> int:
        return self._forward.num_padding_tokens

    def use_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def adopt(self, slots: Sequence[Rows]) -> None:
        warning = self._device.adopt(slots)
        if warning is not None:
            self.warnings.append(warning)

    def embed(self, batch: PackedBatch, rows: Rows) -> None:
        self.begin(batch, rows)()

    def begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        """See `Engine.begin`. After out of memory the batch is computed once more, in two halves. Raises the error if
        there is only one sequence, or if a half is too large as well."""
        try:
            return self._begin(batch, rows)
        except Exception as error:
            if batch.lengths.size == 1 or not means_out_of_memory(error):
                raise
        # Outside of `except`, because the error's traceback holds the tensors of the failed pass.
        log.warning(
            "out of memory: %d sequences of %d tokens are computed in two halves",
            batch.lengths.size,
            batch.token_ids.size,
        )
        self._device.free_memory()
        first, second = halves(batch)
        self._begin(first, rows)()  # finished, so that nothing writes to the rows if the second fails
        return self._begin(second, rows[first.num_rows :])

    def _begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        layout = arrange(batch)
        with torch.inference_mode():
            hidden = self._forward(layout)
            if batch.outputs is None:
                return self._device.write(self._head(hidden, layout.runs), layout.order, rows)
            made, order = rows_of(batch, layout, hidden, self._head, rows.shape[1])
            return self._device.write(made, order, rows)
