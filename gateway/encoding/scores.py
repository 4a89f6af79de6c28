"""Collect the logits of a request's sequences.

Owns the copies: rows are borrowed during a `put`. Applies no activation: that is a dialect's, because a request may ask
for another one than the model's. Made by `vecd.gateway.encoding.fragments`.
"""

import numpy as np
from numpy.typing import NDArray


class ScoreRows:
    """The logits of each input, as the model gave them."""

    __slots__ = ("logits",)

    def __init__(self, num_inputs: int, num_labels: int) -> None:
        self.logits: NDArray[np.float32] = np.empty((num_inputs, num_labels), dtype=np.float32)
        """Shape [num_inputs, num_labels], in input order."""

    def put(self, index: int, rows: NDArray[np.float32]) -> None:
        self.logits[index : index + len(rows)] = rows

    def put_tokens(self, index: int, rows: NDArray[np.float32], num_left: int) -> None:
        raise ValueError("a sequence has one row of scores")
