"""The engine without torch: hidden states from ONNX Runtime, vectors from numpy.

Owns the steps of a batch. Called by `vecd.workers.process.loop` through `vecd.workers.engine.Engine`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from vecd.shm.card import ModelCard
from vecd.shm.output import Output
from vecd.shm.views import Rows
from vecd.workers.engine import COMPLETE, Finish, PackedBatch
from vecd.workers.engines.lean.export import ExportForward
from vecd.workers.engines.lean.forward import LeanForward
from vecd.workers.engines.lean.heads import LeanHeads, load_heads, with_threads
from vecd.workers.engines.lean.sparse_head import LeanSpladeHead
from vecd.workers.engines.lean.steps import Floats
from vecd.workers.engines.lean.wide import Forward, WideForward
from vecd.workers.layout import Layout, arrange, passes
from vecd.workers.out_of_memory import begin_or_halve
from vecd.workers.outputs import write_outputs

TOKENS_OF_A_PASS = 512
"""A larger batch is computed in several passes: the values between layers then stay in the core's cache. Measured with
all-MiniLM-L6-v2 on a core with AVX-512: 1,526 tokens of mixed lengths take 0.87 of the time if cut so."""


class LeanEngine:
    """Runs one model on a processor: in float32, with products in int8, or in an export's own type."""

    def __init__(self, card: ModelCard, *, dtype: str = "float32", keeps_files: bool = False) -> None:
        """Load the model of `card` for one thread; `dtype`, for a model that is no export, is "float32" or "int8".
        `keeps_files`: keep their content in memory, so that `use_threads` reads no file. Raises NotDescribed when no
        table describes its layers, ModelError for an export or files of its steps that cannot be used."""
        self._card = card
        self._dtype = dtype
        self._num_threads = 1
        self._forward: Forward = (
            ExportForward(card, keeps_files=keeps_files)
            if card.export_file
            else LeanForward(card, is_int8=dtype == "int8", keeps_files=keeps_files)
        )
        self._wide: WideForward | None = None
        """For leased cores."""
        self._leased: Forward | None = None
        """The wide one, if the next batch is computed with it."""
        self._heads = self._wide_heads = load_heads(card, self._forward.arrays)
        self._num_private_bytes = self._forward.num_private_bytes + _bytes_of(self._heads)
        self.facts: dict[str, Any] = dict(self._forward.facts)
        if not card.export_file:
            self.facts["converted_bytes"] = self._num_private_bytes
        self.warnings: list[str] = []
        self.num_padding_tokens = 0

    def use_threads(self, num_threads: int) -> None:
        if num_threads != self._num_threads:
            self._num_threads = num_threads
            if num_threads == 0:
                self._forward.close()
                return
            self._forward = self._with_threads(num_threads)
            self._heads = with_threads(self._heads, num_threads)

    def allow_leases(self, max_threads: int, *, may_copy_weights: bool) -> Sequence[int]:
        num_bytes = self._num_private_bytes if may_copy_weights else 0
        self.facts["wide_session_bytes"] = num_bytes
        if not may_copy_weights:
            return (1,)
        self._wide = WideForward(partial(self._make_wide, max_threads), max_threads, num_bytes)
        return (1, max_threads)

    def _make_wide(self, num_threads: int) -> Forward:
        self._wide_heads = with_threads(self._heads, num_threads)
        return self._with_threads(num_threads)

    def _with_threads(self, num_threads: int) -> Forward:
        """A forward pass of the same files. Raises ModelError if one has been written to and is read again."""
        if isinstance(self._forward, ExportForward):
            return ExportForward(self._card, num_threads, like=self._forward)
        return LeanForward(self._card, num_threads, is_int8=self._dtype == "int8", like=self._forward)

    def lease(self, num_threads: int) -> int:
        self._leased = None
        if self._wide is None or num_threads < self._wide.num_threads or (wide := self._wide.get()) is None:
            return self._num_threads
        self._leased = wide
        return self._wide.num_threads

    def adopt(self, slots: Sequence[Rows]) -> None:
        pass

    def begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        return begin_or_halve(self._compute, batch, rows)

    def embed(self, batch: PackedBatch, rows: Rows) -> None:
        self.begin(batch, rows)()

    def _compute(self, batch: PackedBatch, rows: Rows) -> Finish:
        forward, first_rows = self._leased or self._forward, batch.first_rows
        heads = self._heads if self._leased is None else self._wide_heads
        for layout in passes(arrange(batch), TOKENS_OF_A_PASS):
            hidden = forward(layout)
            if batch.outputs is None:
                rows[layout.order] = heads[Output.VECTORS](hidden, layout)
            else:
                make = partial(_rows_of, heads, hidden, layout)
                write_outputs(
                    rows, batch.outputs[layout.order], layout.lengths, first_rows[layout.order], make, batch.span
                )
        return COMPLETE


def _rows_of(heads: LeanHeads, hidden: Floats, layout: Layout, output: Output) -> Floats:
    return heads[output](hidden, layout)


def _bytes_of(heads: LeanHeads) -> int:
    """Memory for weights that further heads of a model need for themselves."""
    return sum(head.num_private_bytes for head in heads.values() if isinstance(head, LeanSpladeHead))
