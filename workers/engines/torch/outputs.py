"""The rows of a batch whose sequences do not all ask for the model's vector.

Owns what an `Output` means in terms of hidden states and a head, and the order of rows. Knows no model. Called by
`vecd.workers.engines.torch.transformer` for such a batch alone: the usual one has nothing to choose.

Every sequence is pooled, whatever it asks for, as long as one of the batch needs it: pooling costs next to nothing
beside the layers.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vecd.shm.wire import Output
from vecd.workers.engine import PackedBatch
from vecd.workers.engines.torch.device import to_device
from vecd.workers.engines.torch.pooling import Head
from vecd.workers.layout import Layout


def rows_of(
    batch: PackedBatch, layout: Layout, hidden: Tensor, head: Head, dim: int
) -> tuple[Tensor, NDArray[np.int64]]:
    """The rows, float32 [R, dim] on the device of `hidden`, and in which row of the batch each belongs, shape [R].

    `hidden` are the last hidden states, [T, H] in the layout's order; of tokens H ≤ `dim`, and zeros fill the row.
    """
    assert batch.outputs is not None
    num_rows = batch.rows_of_each
    first_rows = (np.cumsum(num_rows) - num_rows)[layout.order]
    outputs = batch.outputs[layout.order]
    is_tokens = outputs == Output.TOKENS
    if not is_tokens.any():
        return _vectors(outputs, layout, hidden, head), first_rows
    states, places = _states(is_tokens, layout, hidden, dim)
    places += np.repeat(first_rows[is_tokens], layout.lengths[is_tokens])
    if is_tokens.all():
        return states, places
    others = np.flatnonzero(~is_tokens)
    vectors = _vectors(outputs, layout, hidden, head).index_select(0, to_device(others, hidden.device))
    return torch.cat([vectors, states]), np.concatenate([first_rows[others], places])


def _vectors(outputs: NDArray[np.uint8], layout: Layout, hidden: Tensor, head: Head) -> Tensor:
    """float32 [B, D]: of each sequence its vector, normalized if that was asked for."""
    vectors = head.unnormalized(hidden, layout.runs)
    is_raw = to_device((outputs == Output.UNNORMALIZED)[:, None], hidden.device)
    return torch.where(is_raw, vectors, head.normalized(vectors))


def _states(is_tokens: NDArray[np.bool_], layout: Layout, hidden: Tensor, dim: int) -> tuple[Tensor, NDArray[np.int64]]:
    """The hidden states of the sequences for which that is asked, float32 [their tokens, dim], and the place of each
    in its sequence."""
    tokens = np.flatnonzero(np.repeat(is_tokens, layout.lengths))
    states = hidden.index_select(0, to_device(tokens, hidden.device)).float()
    return functional.pad(states, (0, dim - states.shape[1])), layout.offsets()[tokens]
