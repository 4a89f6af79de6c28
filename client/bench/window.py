"""Which requests of a run are measured, and when no more are sent.

Owns the rules of a run by time and of a run by number. Pure: it is given the time, and reads no clock. Called by
`vecd.client.bench.run`, the loops and `vecd.client.bench.stream`. Times are seconds on one monotonic clock.
"""

import math


class TimedWindow:
    """The measured part of a run of `duration_s`, after its warm-up: the requests that *end* inside it.

    Counting by end and not by start makes the rate right: the window loses the requests under way when it closes, and
    gains those that were under way when it opened. `sent_at` is always the moment at which a request should have been
    sent; in an open loop, that of its arrival.
    """

    def __init__(self, started_at: float, warmup_s: float, duration_s: float) -> None:
        self.opens_at = started_at + warmup_s
        self.closes_at = self.opens_at + duration_s
        """From here on no request starts; infinite for a run by number."""

    def may_send(self, now: float) -> bool:
        """Whether another request may start now. Side effects: a run by number counts it as started."""
        return now < self.closes_at

    def measures(self, sent_at: float, ended_at: float) -> bool:
        """Whether the latency of a request that succeeded belongs to the result."""
        return self.opens_at <= ended_at < self.closes_at

    def measures_failure(self, sent_at: float, ended_at: float) -> bool:
        """Whether a request that failed belongs to the result."""
        # One that times out after the window closed counts: a server that hangs must not look idle.
        return ended_at >= self.opens_at

    def counts(self, sent_at: float, ended_at: float) -> bool:
        """Whether a request that succeeded counts for the rates."""
        return self.opens_at <= ended_at < self.closes_at

    def elapsed_s(self, now: float) -> float:
        """Length of what was measured until `now`, the end of the run."""
        return max(0.0, min(now, self.closes_at) - self.opens_at)


class ArrivalWindow(TimedWindow):
    """A run of `duration_s` in an open loop: measures the requests that *arrive* inside it, however late they end.

    Measured by end, an overloaded server's slowest answers would be missing. Rates are still counted by end: answers
    that come after the last request say nothing about the rate of the server.
    """

    def measures(self, sent_at: float, ended_at: float) -> bool:
        return self.opens_at <= sent_at < self.closes_at

    measures_failure = measures


class CountedWindow(TimedWindow):
    """A run of `num_requests`: measures those, and none of the warm-up's, from the start of the first one."""

    def __init__(self, started_at: float, warmup_s: float, num_requests: int) -> None:
        super().__init__(started_at, warmup_s, math.inf)
        self._num_left = num_requests
        self._first_sent_at: float | None = None

    def may_send(self, now: float) -> bool:
        if now < self.opens_at:
            return True
        if self._first_sent_at is None:
            self._first_sent_at = now
        self._num_left -= 1
        return self._num_left >= 0

    def measures(self, sent_at: float, ended_at: float) -> bool:
        return sent_at >= self.opens_at

    measures_failure = counts = measures

    def elapsed_s(self, now: float) -> float:
        return 0.0 if self._first_sent_at is None else now - self._first_sent_at
