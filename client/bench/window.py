"""Which requests of a run are measured, and when no more are sent.

Owns the rules of a run by time, closed and open, and of a run by number. Pure: reads no clock, and is given the time.
Called by `vecd.client.bench.run`, the loops and `vecd.client.bench.stream`. Times are seconds on one monotonic clock.
"""

import math


class Window:
    """The measured part of a run, after its warm-up.

    `sent_at` is always the moment at which a request should have been sent; in an open loop, that of its arrival.
    - By time, in a closed loop: the requests that *end* inside it. Counting by end and not by start makes the rate
      right: the window loses the requests under way when it closes, and gains those under way when it opened.
    - By time, in an open loop (`is_by_arrival`): the requests that *arrive* inside it, however late they end. Measured
      by end, an overloaded server's slowest answers would be missing. Rates are still counted by end: answers that come
      after the last request say nothing about the rate of the server.
    - By number: those requests, and none of the warm-up's, from the start of the first one.
    """

    def __init__(
        self,
        started_at: float,
        warmup_s: float,
        duration_s: float,
        *,
        num_requests: int | None = None,
        is_by_arrival: bool = False,
    ) -> None:
        """`duration_s` is ignored when `num_requests` is given."""
        self.started_at = started_at
        self.opens_at = started_at + warmup_s
        self.closes_at = math.inf if num_requests is not None else self.opens_at + duration_s
        """From here on no request starts; infinite for a run by number."""
        self._num_left = num_requests
        self._is_by_start = is_by_arrival or num_requests is not None
        self._first_sent_at: float | None = None

    def may_send(self, now: float) -> bool:
        """Whether another request may start now. Side effects: a run by number counts it as started."""
        if self._num_left is None or now < self.opens_at:
            return now < self.closes_at
        self._first_sent_at = self._first_sent_at or now
        self._num_left -= 1
        return self._num_left >= 0

    def measures(self, sent_at: float, ended_at: float) -> bool:
        """Whether the latency of a request that succeeded belongs to the result."""
        return self._contains(sent_at if self._is_by_start else ended_at)

    def measures_failure(self, sent_at: float, ended_at: float) -> bool:
        """Whether a request that failed belongs to the result."""
        # One that times out after a closed loop's window closed counts: a server that hangs must not look idle.
        return self._contains(sent_at) if self._is_by_start else ended_at >= self.opens_at

    def counts(self, sent_at: float, ended_at: float) -> bool:
        """Whether a request that succeeded counts for the rates."""
        return self._contains(ended_at if self._num_left is None else sent_at)

    def _contains(self, moment: float) -> bool:
        return self.opens_at <= moment < self.closes_at

    def elapsed_s(self, now: float) -> float:
        """Length of what was measured until `now`, the end of the run."""
        if self._num_left is not None:
            return 0.0 if self._first_sent_at is None else now - self._first_sent_at
        return max(0.0, min(now, self.closes_at) - self.opens_at)
