"""The rows of a batch whose sequences do not all ask for the model's vector.

Owns what each `Output` means in terms of hidden states and a head, and the order of rows. Knows no model. Called by
`vecd.workers.engines.torch.transformer` for such a batch alone: the usual one has nothing to choose.

Each output that a batch asks for is computed for all of its sequences: pooling costs next to nothing beside the layers.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vecd.shm.output import Output
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.torch.device import to_device
from vecd.workers.engines.torch.pooling import Head
from vecd.workers.layout import Layout

_COMPUTE: dict[Output, Callable[[Head, Tensor, Layout], Tensor]] = {
    Output.VECTORS: lambda head, hidden, layout: head(hidden, layout.runs),
    Output.UNNORMALIZED: lambda head, hidden, layout: head.unnormalized(hidden, layout.runs),
    Output.TOKENS: lambda head, hidden, layout: hidden.float(),
}
"""From a head and hidden states, [T, H] in the layout's order, to float32 rows of all sequences, [B or T, width]."""


def rows_of(
    batch: PackedBatch, layout: Layout, hidden: Tensor, head: Head, dim: int
) -> tuple[Tensor, NDArray[np.int64]]:
    """The rows, float32 [R, dim] on the device of `hidden`, and in which row of the batch each belongs, shape [R].

    `hidden` are the last hidden states, [T, H] in the layout's order. Zeros fill a row that an output does not.
    """
    assert batch.outputs is not None
    num_rows = batch.rows_of_each
    first_rows = (np.cumsum(num_rows) - num_rows)[layout.order]
    outputs = batch.outputs[layout.order]
    made, places = [], []
    for output in map(Output, np.unique(outputs)):
        rows = _COMPUTE[output](head, hidden, layout)
        is_wanted, place = outputs == output, first_rows
        if output.is_per_token:
            is_wanted = np.repeat(is_wanted, layout.lengths)
            place = np.repeat(first_rows, layout.lengths) + layout.offsets()
        if not is_wanted.all():
            rows = rows.index_select(0, to_device(np.flatnonzero(is_wanted), hidden.device))
        made.append(functional.pad(rows, (0, dim - rows.shape[1])))
        places.append(place[is_wanted])
    return torch.cat(made), np.concatenate(places)
