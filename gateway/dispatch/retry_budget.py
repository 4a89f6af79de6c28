"""Limits how much lost work is computed again.

Owns a budget in tokens. Another worker computes the work that a dead worker leaves, and while deaths are rare, no
client notices. When workers die one after the other, that work would become a second load on top of the first, and
would be lost again; so it is paid for by work that has been done. Pure. Called by
`vecd.gateway.dispatch.dispatcher`.
"""

_EARNED_PART = 0.5
"""Of each token done: a server in trouble spends at most a third of its time on work that it had begun before."""

_BATCHES_PER_WORKER = 16
"""May be lost at once without the failure of a request. A dying worker loses two batches at most."""


class RetryBudget:
    def __init__(self, max_batch_tokens: int) -> None:
        """Full, and for one worker."""
        self._tokens_per_worker = float(_BATCHES_PER_WORKER * max_batch_tokens)
        self._max_tokens = self.num_tokens = self._tokens_per_worker
        """Tokens that can be paid for now."""

    def make_room_for(self, num_workers: int) -> None:
        """Fit the budget to `num_workers` that are up at a time. It only ever grows, because a worker's work is paid
        for after its death."""
        more_tokens = max(0.0, num_workers * self._tokens_per_worker - self._max_tokens)
        self._max_tokens += more_tokens
        self.num_tokens += more_tokens

    def earn(self, num_tokens: int) -> None:
        """Count tokens that have been embedded."""
        self.num_tokens = min(self._max_tokens, self.num_tokens + _EARNED_PART * num_tokens)

    def pay(self, num_tokens: int) -> bool:
        """Pay for tokens that are to be computed again; returns False, and pays nothing, when the budget is too small
        for all of them."""
        if num_tokens > self.num_tokens:
            return False
        self.num_tokens -= num_tokens
        return True
