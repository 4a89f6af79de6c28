"""How fast a worker is, learned from the times of its batches; how large its next one should be, and how long it may
take at most.

Owns one worker's estimate. Pure. `vecd.gateway.dispatch.dispatcher` tells it of each batch; its answers size batches,
say when a worker counts as stuck, and tell `vecd.gateway.admission.admission` how soon work is done.

A batch takes `overhead + tokens × per_token`: a line through the batches of late, weighted by how late (exponentially
weighted least squares). Many small batches alone say little of what large ones would do; so, where the sizes seen do
not differ, the line goes through the origin, which makes the worker look slower than it is.
"""

import copy

from vecd.shm.batch_limits import FULL_BATCH_S

_MEMORY = 0.95
"""Weight of everything before, at each batch: the last twenty count for two thirds."""

_MIN_SPREAD = 0.05
"""Relative variance of the sizes from which on a slope can be told from noise."""

_MAX_SURPRISE = 8.0
"""A batch counts for at most so many times what was expected: a worker may have been stopped for a while. One that
stays slow is believed after a few batches."""

_FIRST_GUESS_TOKENS_PER_S = 5000.0
_MIN_PER_TOKEN_S = 1e-9

_MIN_BUDGET_TOKENS = 128

_PATIENCE = 20.0
"""A batch may take so many times what is expected: a machine may be shared, a page of the weights be on a slow disk."""

_LEAST_PATIENCE_S = 2.0
"""And so much longer. Whatever stops a process for a moment, stops it for less."""

_FIRST_BATCH_S = 10.0
"""And so much longer still, where it is the worker's first."""


class CostModel:
    __slots__ = (
        "_largest_tokens",
        "_max_batch_tokens",
        "_overhead_s",
        "_per_token_s",
        "_w",
        "_x",
        "_xx",
        "_xy",
        "_y",
        "tokens_per_s",
    )

    def __init__(self, max_batch_tokens: int) -> None:
        """No budget is ever above `max_batch_tokens`."""
        self._max_batch_tokens = max_batch_tokens
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        self._largest_tokens = 0
        self._overhead_s = 0.0
        self._per_token_s = 1 / _FIRST_GUESS_TOKENS_PER_S
        self.tokens_per_s = self._full_speed()
        """With full batches."""

    def copy(self) -> "CostModel":
        return copy.copy(self)

    @property
    def is_learned(self) -> bool:
        """Whether it says anything that has been measured, on this worker or on the one that it was copied from."""
        return self._w > 0

    def observe(self, num_tokens: int, compute_s: float) -> None:
        """A batch of `num_tokens` took so long on the worker."""
        self._largest_tokens = max(self._largest_tokens, num_tokens)
        compute_s = min(compute_s, _MAX_SURPRISE * self.batch_s(num_tokens))
        self._w = self._w * _MEMORY + 1
        self._x = self._x * _MEMORY + num_tokens
        self._y = self._y * _MEMORY + compute_s
        self._xx = self._xx * _MEMORY + num_tokens * num_tokens
        self._xy = self._xy * _MEMORY + num_tokens * compute_s
        mean_x, mean_y = self._x / self._w, self._y / self._w
        variance = self._xx / self._w - mean_x * mean_x
        slope = 0.0
        if variance > _MIN_SPREAD * mean_x * mean_x:
            slope = (self._xy / self._w - mean_x * mean_y) / variance
        overhead = mean_y - slope * mean_x
        if slope <= 0 or overhead < 0:
            slope, overhead = mean_y / mean_x, 0.0
        self._per_token_s, self._overhead_s = max(slope, _MIN_PER_TOKEN_S), overhead
        self.tokens_per_s = self._full_speed()

    def batch_s(self, num_tokens: int) -> float:
        """How long a batch of `num_tokens` is expected to take."""
        return self._overhead_s + num_tokens * self._per_token_s

    def deadline_s(
        self,
        num_tokens: int,
        *,
        limit_s: float,
        has_answered: bool = True,
        num_gateways: int = 1,
        max_sequence_tokens: int = 0,
    ) -> float:
        """How long a batch of `num_tokens` may take before its worker counts as stuck; never above `limit_s`.

        `has_answered`: this very worker has done a batch. The first one touches every page of the weights. With several
        gateways, a batch of each other may come first: a full one, or a sequence of `max_sequence_tokens`.
        """
        if not self.is_learned:
            return limit_s
        longest_tokens = max(self.budget_tokens(FULL_BATCH_S), max_sequence_tokens)
        deadline_s = self._patience_s(num_tokens) + (num_gateways - 1) * self._patience_s(longest_tokens)
        return min(limit_s, deadline_s + (0.0 if has_answered else _FIRST_BATCH_S))

    def _patience_s(self, num_tokens: int) -> float:
        """For one batch.

        One larger than any seen is taken to be no cheaper by the token than the largest: what small batches say of how
        much more a large one takes is mostly noise, and too little patience kills a worker that did nothing wrong.
        """
        expected_s = self.batch_s(num_tokens)
        if num_tokens > self._largest_tokens:
            expected_s = max(expected_s, self.batch_s(self._largest_tokens) * num_tokens / self._largest_tokens)
        return _LEAST_PATIENCE_S + _PATIENCE * expected_s

    def budget_tokens(self, batch_s: float) -> int:
        """Tokens of a batch that takes about `batch_s`, within bounds."""
        fitting = int((batch_s - self._overhead_s) / self._per_token_s)
        return min(self._max_batch_tokens, max(_MIN_BUDGET_TOKENS, fitting))

    def _full_speed(self) -> float:
        budget = self.budget_tokens(FULL_BATCH_S)
        return budget / self.batch_s(budget)
