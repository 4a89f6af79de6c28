"""The rows of a batch whose sequences do not all ask for the model's vector.

Owns the order of such rows, and the zeros behind the floats of an output. What an output means is the engine's. Called
by engines for such a batch alone: the usual one has nothing to choose.

Each output that a batch asks for is computed for all of its sequences: pooling costs next to nothing beside the layers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vecd.shm.output import Output
from vecd.shm.views import Rows


def outputs_in(outputs: NDArray[np.uint8]) -> list[Output]:
    """Each output that a sequence asks for, once."""
    return [Output(code) for code in np.unique(outputs)]


def places_of(
    output: Output,
    outputs: NDArray[np.uint8],
    lengths: NDArray[np.integer[Any]],
    first_rows: NDArray[np.int64],
    span: int = 1,
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which rows are wanted of those that `output` has for all sequences, bool [B, T or B · span], and in which row of
    the batch each wanted one belongs.

    For each sequence, in the order of the made rows: the output it asks for, its tokens, its first row in the batch.
    `span`: rows of each sequence, if the output spans several.
    """
    is_wanted = outputs == output
    if output.spans_rows:
        places = (first_rows[is_wanted, None] + np.arange(span)).reshape(-1)
        return np.repeat(is_wanted, span), places
    if not output.is_per_token:
        return is_wanted, first_rows[is_wanted]
    first_tokens = np.cumsum(lengths) - lengths
    places = np.arange(lengths.sum()) + np.repeat(first_rows - first_tokens, lengths)
    is_wanted = np.repeat(is_wanted, lengths)
    return is_wanted, places[is_wanted]


def write_outputs(
    rows: Rows,
    outputs: NDArray[np.uint8],
    lengths: NDArray[np.integer[Any]],
    first_rows: NDArray[np.int64],
    make: Callable[[Output], NDArray[np.float32]],
    span: int = 1,
) -> None:
    """Write into `rows` what each sequence asks for; see `places_of`. `make` gives the rows of an output for all
    sequences, float32 [B or T, width]."""
    for output in outputs_in(outputs):
        made = make(output)
        if output.spans_rows:
            made = np.pad(made, ((0, 0), (0, span * rows.shape[1] - made.shape[1]))).reshape(-1, rows.shape[1])
        is_wanted, places = places_of(output, outputs, lengths, first_rows, span)
        rows[places, : made.shape[1]] = made[is_wanted]
        rows[places, made.shape[1] :] = 0
