"""Turns the hidden states of tokens into the vectors of sequences, in numpy.

Owns the pooling modes for the engine without torch, in float32; the steps behind them are in
`vecd.workers.engines.lean.steps`. Knows no model and no batch, only runs of equal-length sequences. Called by
`vecd.workers.engines.lean.heads` and `vecd.workers.engines.static`.
`vecd.workers.engines.torch.pooling` has the same for every device of torch; the tests compare both with
sentence-transformers, whose modules Pooling, Dense, LayerNorm and Normalize are the source.
"""

from collections.abc import Callable, Sequence

import numpy as np

from vecd.shm.card import ModelCard
from vecd.workers.engines.lean.arrays import Arrays
from vecd.workers.engines.lean.steps import Apply, Floats, apply_all, load_steps, normalize
from vecd.workers.layout import Run


def _mean_weighted_by_position(hidden: Floats) -> Floats:
    weights = np.arange(1, hidden.shape[1] + 1, dtype=np.float32)
    pooled: Floats = np.einsum("blh,l->bh", hidden, weights / weights.sum())
    return pooled


# Each takes the hidden states of a run, [B, L, H], and gives [B, H].
_POOLINGS: dict[str, Callable[[Floats], Floats]] = {
    "cls": lambda hidden: hidden[:, 0],
    "max": lambda hidden: hidden.max(axis=1),
    "mean": lambda hidden: np.add.reduce(hidden, axis=1) / np.float32(hidden.shape[1]),
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(axis=1) / np.float32(hidden.shape[1] ** 0.5),
    "weightedmean": _mean_weighted_by_position,
    "lasttoken": lambda hidden: hidden[:, -1],
}


class LeanHead:
    """The part of a model behind the transformer: pooling, then the card's steps."""

    def __init__(self, modes: Sequence[str], steps: Sequence[Apply]) -> None:
        self._modes = modes
        self.is_normalized = bool(steps) and steps[-1] is normalize
        self._steps = steps[:-1] if self.is_normalized else steps

    def __call__(self, hidden: Floats, runs: Sequence[Run]) -> Floats:
        """Hidden states [T, H] → vectors [B, D], in the order of the runs."""
        vectors = self.unnormalized(hidden, runs)
        return normalize(vectors) if self.is_normalized else vectors

    def unnormalized(self, hidden: Floats, runs: Sequence[Run]) -> Floats:
        """Like the call, without the last step if that is to normalize."""
        return self.after_pooling(pool(hidden, runs, self._modes))

    def after_pooling(self, vectors: Floats) -> Floats:
        """Apply the steps to pooled vectors [B, …], without the last one if that is to normalize."""
        return apply_all(self._steps, vectors)


def load_head(card: ModelCard, own: Arrays) -> LeanHead:
    """Read the weights of the card's steps. `own`: the model's tensors. Raises ModelError when a file or a tensor is
    missing or misshapen."""
    return LeanHead(card.pooling, load_steps(card, card.steps, own))


def pool(hidden: Floats, runs: Sequence[Run], modes: Sequence[str]) -> Floats:
    """Hidden states [T, H] → [B, H · number of modes], the modes side by side in their order."""
    return _joined([_pool(hidden, run, modes) for run in runs], axis=0)


def _pool(hidden: Floats, run: Run, modes: Sequence[str]) -> Floats:
    sequences = hidden[run.start : run.stop].reshape(run.count, run.length, -1)
    return _joined([_POOLINGS[mode](sequences) for mode in modes], axis=1)


def _joined(parts: list[Floats], axis: int) -> Floats:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)
