"""The engine without torch: hidden states from ONNX Runtime, vectors from numpy.

Owns the steps of a batch, and the second try after out of memory. Called by `vecd.workers.process.loop` through
`vecd.workers.engine.Engine`.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecd.shm.card import ModelCard
from vecd.shm.output import Output
from vecd.shm.views import Rows
from vecd.workers.engine import COMPLETE, Finish, PackedBatch
from vecd.workers.engines.lean.forward import LeanForward
from vecd.workers.engines.lean.head import Floats, LeanHead, load_head
from vecd.workers.layout import Layout, arrange, passes
from vecd.workers.out_of_memory import halves, means_out_of_memory

log = logging.getLogger("vecd.worker")

TOKENS_OF_A_PASS = 512
"""A larger batch is computed in several passes: the values between layers then stay in the core's cache. Measured with
all-MiniLM-L6-v2 on a core with AVX-512: 1,526 tokens of mixed lengths take 0.87 of the time if cut so."""

_COMPUTE: dict[Output, Callable[[LeanHead, Floats, Layout], Floats]] = {
    Output.VECTORS: lambda head, hidden, layout: head(hidden, layout.runs),
    Output.UNNORMALIZED: lambda head, hidden, layout: head.unnormalized(hidden, layout.runs),
    Output.TOKENS: lambda head, hidden, layout: hidden,
}
"""From hidden states, [T, H] in the layout's order, to rows of all sequences, [B or T, width]."""


class LeanEngine:
    """Runs one model on a processor, in float32 or with products in int8."""

    def __init__(self, card: ModelCard, num_threads: int = 1, *, dtype: str = "float32") -> None:
        """Load the model of `card`; `dtype` is "float32" or "int8". Raises NotDescribed when no table describes its
        layers, ModelError for files of its steps that cannot be used."""
        self._card = card
        self._is_int8 = dtype == "int8"
        self._forward = LeanForward(card, num_threads, is_int8=self._is_int8)
        self._head = load_head(card)
        self.facts: dict[str, Any] = {
            "dtype": dtype,
            "path": "lean",
            "converted_bytes": self._forward.converted_bytes,
        }
        self.warnings: list[str] = []
        self.num_padding_tokens = 0

    def use_threads(self, num_threads: int) -> None:
        if num_threads > 1:
            self._forward = LeanForward(self._card, num_threads, is_int8=self._is_int8)

    def adopt(self, slots: Sequence[Rows]) -> None:
        pass

    def begin(self, batch: PackedBatch, rows: Rows) -> Finish:
        """See `Engine.begin`. After out of memory the batch is computed once more, in two halves. Raises the error if
        there is only one sequence, or if a half is too large as well."""
        try:
            self._compute(batch, rows)
            return COMPLETE
        except Exception as error:
            if batch.lengths.size == 1 or not means_out_of_memory(error):
                raise
        # Outside of `except`, because the error's traceback holds the arrays of the failed pass.
        log.warning(
            "out of memory: %d sequences of %d tokens are computed in two halves",
            batch.lengths.size,
            batch.token_ids.size,
        )
        first, second = halves(batch)
        self._compute(first, rows)
        self._compute(second, rows[first.num_rows :])
        return COMPLETE

    def embed(self, batch: PackedBatch, rows: Rows) -> None:
        self.begin(batch, rows)()

    def _compute(self, batch: PackedBatch, rows: Rows) -> None:
        first_rows = np.cumsum(batch.rows_of_each) - batch.rows_of_each
        for layout in passes(arrange(batch), TOKENS_OF_A_PASS):
            hidden = self._forward(layout)
            if batch.outputs is None:
                rows[layout.order] = self._head(hidden, layout.runs)
            else:
                self._write_outputs(batch.outputs[layout.order], first_rows[layout.order], layout, hidden, rows)

    def _write_outputs(
        self,
        outputs: NDArray[np.uint8],
        places: NDArray[np.int64],
        layout: Layout,
        hidden: Floats,
        rows: Rows,
    ) -> None:
        """`outputs` and `places` say for each sequence what it asks for, and its first row."""
        for output in map(Output, np.unique(outputs)):
            made = _COMPUTE[output](self._head, hidden, layout)
            is_wanted, at = outputs == output, places
            if output.is_per_token:
                is_wanted = np.repeat(is_wanted, layout.lengths)
                at = np.repeat(places, layout.lengths) + layout.offsets()
            rows[at[is_wanted], : made.shape[1]] = made[is_wanted]
            rows[at[is_wanted], made.shape[1] :] = 0
