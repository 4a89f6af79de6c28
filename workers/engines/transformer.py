"""The engine that has a model: hidden states from a transformer, vectors from its head.

Owns the order of events in a batch. How the hidden states come about, packed or padded, is the `Forward` it is given;
everything else is the same for both. Called by `workers.loop` through `workers.engine.Engine`.

On a CUDA device the ids are copied there and the vectors back, nothing more. That path has not been run: no GPU was at
hand.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from shm.view import Rows
from workers.engine import PackedBatch
from workers.layout import Layout, arrange
from workers.pooling import Head


class Forward(Protocol):
    """A way to run a transformer. Knows the model and the device."""

    path: str
    """Its name, for the operator."""

    def __call__(self, layout: Layout) -> Tensor:
        """The last layer's hidden states, [T, H], in the layout's order."""


class TransformerEngine:
    """Runs one model in one way. The model's settings belong to the engine made last from it."""

    def __init__(self, forward: Forward, head: Head, dtype: str) -> None:
        self._forward = forward
        self._head = head
        self.facts: dict[str, Any] = {
            "dtype": dtype,
            "path": forward.path,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }
        self.warnings: list[str] = []

    def embed(self, batch: PackedBatch, rows: Rows) -> None:
        layout = arrange(batch)
        with torch.inference_mode():
            vectors = self._head(self._forward(layout), layout.runs)
        rows[layout.order] = vectors.cpu().numpy()
