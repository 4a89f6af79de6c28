"""How fast a worker is, learned from the times of its batches, and what follows for the next one.

Owns the throughput estimate of one worker. Pure. `vecd.gateway.dispatch.dispatcher` reports each batch and asks how
long one may take; `vecd.gateway.scheduling.policy` sizes batches by it.

A batch takes `overhead + tokens × per_token`: a line through the latest batches (least squares with exponential
weights). Small batches alone say little about large ones; where the sizes do not differ, the line goes through the
origin, which makes the worker look slower than it is.
"""

from vecd.shm.batch_limits import FULL_BATCH_S

_MEMORY = 0.95
"""Weight of all batches before, at each batch: the last twenty count for two thirds."""

_MIN_SPREAD = 0.05
"""Relative variance of the sizes, above which a slope can be told from noise."""

_MAX_TIMES_EXPECTED = 8.0
"""A batch counts for at most this many times the expected time, because a worker may have been stopped for a while. One
that stays slow is believed after a few batches."""

_FIRST_GUESS_TOKENS_PER_S = 5000.0
_MIN_PER_TOKEN_S = 1e-9

_MIN_BUDGET_TOKENS = 128

_TIMEOUT_FACTOR = 20.0
"""A batch may take this many times the expected time: the machine may be shared, the weights on a slow disk."""

_MIN_TIMEOUT_S = 2.0
"""Added to that: what stops a process for a moment stops it for less."""

_FIRST_BATCH_S = 10.0
"""Added for the first batch of a worker."""


class CostModel:
    def __init__(self, max_batch_tokens: int, first_tokens_per_s: float = _FIRST_GUESS_TOKENS_PER_S) -> None:
        """`max_batch_tokens`: no budget is above this. `first_tokens_per_s`: the speed, above 0, until a batch has been
        measured."""
        self._max_batch_tokens = max_batch_tokens
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        self._largest_tokens = 0
        self._overhead_s = 0.0
        self._per_token_s = 1 / first_tokens_per_s
        self.tokens_per_s = self._full_speed()
        """Speed with full batches."""

    @property
    def is_learned(self) -> bool:
        """Whether anything has been measured, on this worker or on the one that it was copied from."""
        return self._w > 0

    def observe(self, num_tokens: int, compute_s: float) -> None:
        """Learn that a batch of `num_tokens` took `compute_s` on the worker."""
        self._largest_tokens = max(self._largest_tokens, num_tokens)
        compute_s = min(compute_s, _MAX_TIMES_EXPECTED * self.batch_s(num_tokens))
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
        """Expected seconds of a batch of `num_tokens`."""
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
        """Seconds that a batch of `num_tokens` may take before its worker counts as stuck; never above `limit_s`.

        `has_answered`: this worker itself has done a batch; the first one touches every page of the weights. With
        several gateways, a batch of each other one may come first: a full one, or a sequence of `max_sequence_tokens`.
        """
        if not self.is_learned:
            return limit_s
        longest_tokens = max(self.budget_tokens(FULL_BATCH_S), max_sequence_tokens)
        deadline_s = self._timeout_s(num_tokens) + (num_gateways - 1) * self._timeout_s(longest_tokens)
        return min(limit_s, deadline_s + (0.0 if has_answered else _FIRST_BATCH_S))

    def _timeout_s(self, num_tokens: int) -> float:
        """The deadline of one batch.

        A batch larger than any seen is taken to be no cheaper by the token than the largest: the slope of small batches
        is mostly noise, and too short a deadline kills a healthy worker.
        """
        expected_s = self.batch_s(num_tokens)
        if num_tokens > self._largest_tokens:
            expected_s = max(expected_s, self.batch_s(self._largest_tokens) * num_tokens / self._largest_tokens)
        return _MIN_TIMEOUT_S + _TIMEOUT_FACTOR * expected_s

    def budget_tokens(self, batch_s: float) -> int:
        """Tokens of a batch that takes about `batch_s` seconds, at least _MIN_BUDGET_TOKENS unless a batch may have
        fewer."""
        fitting = int((batch_s - self._overhead_s) / self._per_token_s)
        return min(self._max_batch_tokens, max(_MIN_BUDGET_TOKENS, fitting))

    def _full_speed(self) -> float:
        budget = self.budget_tokens(FULL_BATCH_S)
        return budget / self.batch_s(budget)
