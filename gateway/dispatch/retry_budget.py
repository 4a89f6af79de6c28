"""How much lost work may be computed again.

Owns a budget in tokens. Work that a dead worker leaves is computed again by another, which nobody notices while it is
rare. When workers die one after the other, it would become a second load on top of the first, and be lost again: so it
is paid for, from what has been done. Pure. Called by `vecd.gateway.dispatch.dispatcher`.
"""

_EARNED_PART = 0.5
"""Of each token done: a server in trouble spends at most a third of its time on what it had begun before."""

_BATCHES_PER_WORKER = 16
"""What may be lost at once without a request noticing. A dying worker loses two batches at most."""


class RetryBudget:
    def __init__(self, max_batch_tokens: int) -> None:
        """Full, and for one worker."""
        self._tokens_per_worker = float(_BATCHES_PER_WORKER * max_batch_tokens)
        self._max_tokens = self.num_tokens = self._tokens_per_worker
        """What can be paid for now."""

    def make_room_for(self, num_workers: int) -> None:
        """So many workers are up at a time. Only ever grows: what a worker leaves is paid for after its death."""
        more_tokens = max(0.0, num_workers * self._tokens_per_worker - self._max_tokens)
        self._max_tokens += more_tokens
        self.num_tokens += more_tokens

    def earn(self, num_tokens: int) -> None:
        """So many tokens have been embedded."""
        self.num_tokens = min(self._max_tokens, self.num_tokens + _EARNED_PART * num_tokens)

    def pay(self, num_tokens: int) -> bool:
        """Whether so many tokens may be computed again. Side effect: then they are paid for."""
        if num_tokens > self.num_tokens:
            return False
        self.num_tokens -= num_tokens
        return True
