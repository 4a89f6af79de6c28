"""Grants a request a permit, or refuses it now and says when to come back.

Owns the count of requests and tokens in the house. Nothing queues without a bound. Called by `gateway.app` before
a request is tokenized, so that refusing costs next to nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import TooManyRequests

_RATE_SMOOTHING = 0.2
_FIRST_GUESS_TOKENS_PER_S = 5000.0


class Admission:
    def __init__(self, max_requests: int, max_queued_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_queued_tokens = max_queued_tokens
        self._tokens_per_s = _FIRST_GUESS_TOKENS_PER_S
        self.num_requests = 0
        self.num_tokens = 0

    @contextmanager
    def permit(self, num_tokens: int) -> Iterator[None]:
        """Hold a permit for a request of about `num_tokens`.

        A request is always admitted when it is alone, however large. Raises TooManyRequests when the house is full.
        """
        self._check(num_tokens)
        self.num_requests += 1
        self.num_tokens += num_tokens
        try:
            yield
        finally:
            self.num_requests -= 1
            self.num_tokens -= num_tokens

    def observe_rate(self, tokens_per_s: float) -> None:
        """Learn how fast the workers drain the queue, from the tokens embedded in the last second."""
        self._tokens_per_s += _RATE_SMOOTHING * (tokens_per_s - self._tokens_per_s)

    def _check(self, num_tokens: int) -> None:
        if self.num_requests >= self._max_requests:
            raise TooManyRequests(
                f"{self.num_requests} requests are being served, at most {self._max_requests} are admitted at a time",
                retry_after_s=self._drain_time_s(),
            )
        if self.num_requests and self.num_tokens + num_tokens > self._max_queued_tokens:
            raise TooManyRequests(
                f"about {self.num_tokens} tokens are waiting and this request adds {num_tokens}, "
                f"at most {self._max_queued_tokens} may wait",
                retry_after_s=self._drain_time_s(),
            )

    def _drain_time_s(self) -> float:
        return self.num_tokens / max(1.0, self._tokens_per_s)
