"""Which requests of a run are measured, and when no more are sent.

Owns the rules of a run by time and of a run by number. Pure: told the time, never asks for it. Called by
`vecd.client.bench.run`, the loops and `vecd.client.bench.stream`. Times are seconds on one monotonic clock.
"""

import math
from typing import Protocol


class Window(Protocol):
    """The measured part of a run, after its warm-up.

    A request is `sent_at` the moment when it should have been: in an open loop, that of its arrival.
    """

    opens_at: float
    closes_at: float
    """When no further request starts; infinite for a run by number."""

    def may_send(self, now: float) -> bool:
        """Whether another request may start now. Side effects: a run by number counts it as started."""

    def measures(self, sent_at: float, ended_at: float) -> bool:
        """Whether the latency of a request that succeeded belongs to the result."""

    def measures_failure(self, sent_at: float, ended_at: float) -> bool:
        """Whether a request that failed does."""

    def counts(self, sent_at: float, ended_at: float) -> bool:
        """Whether a request that succeeded counts for the rates: whether it was answered while the window was open."""

    def elapsed_s(self, now: float) -> float:
        """Length of what was measured until `now`, the end of the run."""


class TimedWindow:
    """A run of `duration_s`: measures the requests that *end* inside it.

    Counting by end and not by start is what makes the rate right: the window loses the requests under way
    when it closes, and gains as many that were under way when it opened.
    """

    def __init__(self, started_at: float, warmup_s: float, duration_s: float) -> None:
        self.opens_at = started_at + warmup_s
        self.closes_at = self.opens_at + duration_s

    def may_send(self, now: float) -> bool:
        return now < self.closes_at

    def measures(self, sent_at: float, ended_at: float) -> bool:
        return self.opens_at <= ended_at < self.closes_at

    def measures_failure(self, sent_at: float, ended_at: float) -> bool:
        # One that times out after the window closed is no less a failure: a server that hangs must not look
        # idle.
        return ended_at >= self.opens_at

    def counts(self, sent_at: float, ended_at: float) -> bool:
        return self.opens_at <= ended_at < self.closes_at

    def elapsed_s(self, now: float) -> float:
        return max(0.0, min(now, self.closes_at) - self.opens_at)


class ArrivalWindow(TimedWindow):
    """A run of `duration_s` in an open loop: measures the requests that *arrive* inside it, however late they end.

    By end, the slowest answers of an overloaded server would be the ones left out. Rates are still counted by end:
    answers that come when no more requests do say nothing of how many the server can give.
    """

    def measures(self, sent_at: float, ended_at: float) -> bool:
        return self.opens_at <= sent_at < self.closes_at

    def measures_failure(self, sent_at: float, ended_at: float) -> bool:
        return self.measures(sent_at, ended_at)


class CountedWindow:
    """A run of `num_requests`: measures those, and none of the warm-up's, from the first one's start."""

    def __init__(self, started_at: float, warmup_s: float, num_requests: int) -> None:
        self.opens_at = started_at + warmup_s
        self.closes_at = math.inf
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

    def measures_failure(self, sent_at: float, ended_at: float) -> bool:
        return self.measures(sent_at, ended_at)

    def counts(self, sent_at: float, ended_at: float) -> bool:
        return self.measures(sent_at, ended_at)

    def elapsed_s(self, now: float) -> float:
        return 0.0 if self._first_sent_at is None else now - self._first_sent_at
