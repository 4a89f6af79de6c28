"""The rows of a batch whose sequences do not all ask for the model's vector, on torch's devices.

Owns the gathering of such rows. What each `Output` means in terms of hidden states is in
`vecd.workers.engines.torch.heads`. Knows no model. Called by `vecd.workers.engines.torch.transformer` for such a batch
alone; `vecd.workers.outputs` knows where the rows belong.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vecd.shm.output import Output
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.torch.device import to_device
from vecd.workers.layout import Layout
from vecd.workers.outputs import outputs_in, places_of

Heads: TypeAlias = dict[Output, Callable[[Tensor, Layout], Tensor]]
"""By output: from hidden states, [T, H] in the layout's order, to float32 rows of all sequences, [B or T, width]."""


def rows_of(
    batch: PackedBatch, layout: Layout, hidden: Tensor, heads: Heads, row_dim: int
) -> tuple[Tensor, NDArray[np.int64]]:
    """The rows, float32 [R, row_dim] on the device of `hidden`, and in which row of the batch each belongs, shape [R].

    `hidden` are the last hidden states, [T, H] in the layout's order. Zeros fill a row that an output does not.
    """
    assert batch.outputs is not None
    outputs = batch.outputs[layout.order]
    made, places = [], []
    for output in outputs_in(outputs):
        rows = heads[output](hidden, layout)
        if output.spans_rows:
            rows = functional.pad(rows, (0, batch.span * row_dim - rows.shape[1])).reshape(-1, row_dim)
        is_wanted, place = places_of(output, outputs, layout.lengths, batch.first_rows[layout.order], batch.span)
        if not is_wanted.all():
            rows = rows.index_select(0, to_device(np.flatnonzero(is_wanted), hidden.device))
        made.append(functional.pad(rows, (0, row_dim - rows.shape[1])))
        places.append(place)
    return torch.cat(made), np.concatenate(places)
