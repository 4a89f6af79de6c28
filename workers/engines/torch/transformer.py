"""The engine of a model: hidden states from a transformer, vectors from its head.

Owns the steps of a batch. A `Forward` computes the hidden states, fused, packed or padded; the device writes the
vectors into the rows. Called by `vecd.workers.process.loop` through `vecd.workers.engine.Engine`.
"""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from vecd.shm.card import one_line
from vecd.shm.output import Output
from vecd.shm.views import Rows
from vecd.workers.engine import Finish, PackedBatch, largest_within
from vecd.workers.engines.parity import compare
from vecd.workers.engines.torch.device import open_device
from vecd.workers.engines.torch.outputs import Heads, rows_of
from vecd.workers.layout import Layout, arrange
from vecd.workers.out_of_memory import begin_or_halve
from vecd.workers.prefix import share_prefix

log = logging.getLogger("vecd.selection")

_CPU = torch.device("cpu")


class Forward(Protocol):
    """A way to run a transformer. Knows the model and the device."""

    path: str
    """Its name, for the operator."""
    num_padding_tokens: int
    """See `Engine.num_padding_tokens`."""
    can_share: bool
    """Whether it takes a layout with a prefix."""

    def __call__(self, layout: Layout) -> Tensor:
        """The last layer's hidden states, [T, H], in the layout's order, without those of a prefix."""


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4 … below `limit`, and `limit`. Not every number, because oneDNN compiles its kernels for each."""
    return [*(1 << power for power in range((limit - 1).bit_length())), limit]


class TransformerEngine:
    """Runs one model in one way. The model's settings belong to the last engine that was made from it."""

    def __init__(self, forward: Forward, heads: Heads, dtype: str, device: torch.device = _CPU) -> None:
        """`device` is where `forward` and `heads` compute."""
        self._forward = forward
        self._heads = heads
        self._device = open_device(device)
        self.facts: dict[str, Any] = {"dtype": dtype, "path": forward.path, **self._device.facts()}
        self.warnings: list[str] = []
        self._thread_choices: Sequence[int] = (1,)
        self._num_threads = 1
        self._shares_prefixes = False

    def share_prefixes(self, batch: PackedBatch) -> None:
        """From now on, compute the tokens that all sequences of a batch begin with once, if the hidden states of
        `batch`, whose sequences share some, are the same so. Its outputs must need the last tokens alone.

        Raises what the model raises without a shared prefix."""
        layout = arrange(batch)
        if not self._forward.can_share:
            return
        shared = share_prefix(layout)
        assert shared.prefix.size, "the batch shares no tokens"
        with torch.inference_mode():
            expected = self._forward(layout)[torch.from_numpy(layout.offsets() >= shared.prefix.size)]
            try:
                found = self._forward(shared)
            except Exception as error:  # a model may raise anything in a pass that it was not written for
                log.info("prefixes are not shared: %s", one_line(error))
                return
        parity = compare(found.float().cpu().numpy(), expected.float().cpu().numpy())
        self._shares_prefixes = parity.is_within_bounds(self.facts["dtype"])
        log.info("prefixes are %sshared: %s", "" if self._shares_prefixes else "not ", parity)

    @property
    def num_padding_tokens(self) -> int:
        return self._forward.num_padding_tokens

    def use_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._thread_choices, self._num_threads = (num_threads,), num_threads

    def allow_leases(self, max_threads: int, *, may_copy_weights: bool) -> Sequence[int]:
        self._thread_choices = powers_of_two(max_threads)
        return self._thread_choices

    def lease(self, num_threads: int) -> int:
        num_threads = largest_within(self._thread_choices, num_threads)
        if num_threads != self._num_threads:
            torch.set_num_threads(num_threads)
            self._num_threads = num_threads
        return num_threads

    def adopt(self, slots: Sequence[Rows]) -> None:
        warning = self._device.adopt(slots)
        if warning is not None:
            self.warnings.append(warning)

    def embed(self, batch: PackedBatch, rows: Rows) -> None:
        self.begin(batch, rows)()

    def begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        return begin_or_halve(self._begin, batch, rows, self._device.free_memory)

    def _begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        layout = arrange(batch)
        if self._shares_prefixes:
            layout = share_prefix(layout)
        with torch.inference_mode():
            hidden = self._forward(layout)
            if batch.outputs is None:
                return self._device.write(self._heads[Output.VECTORS](hidden, layout), layout.order, rows)
            made, order = rows_of(batch, layout, hidden, self._heads, rows.shape[1])
            return self._device.write(made, order, rows)
