"""How fast the server embeds, as measured, and how much work it should therefore be given at a time.

Owns the estimate and the sizes that follow from it. Work is counted in characters, as tokens are not known before the
response: a text costs its characters, as far as the model reads them, and a few more for its own overhead. Pure.
Called by `vecd.client.bulk.run`, `vecd.client.bulk.inputs` and `vecd.client.bulk.service`.
"""

from collections.abc import Iterable

WORK_S = 1.0
"""Seconds of the server's work that are under way. A kill loses them. More would not help: a server that has a second
of work never waits for this program."""
_NUM_SHARES = 3
"""Requests that make up the work, unless they would be larger than a request may be. More and smaller ones would cost
the server more, and end no sooner."""
MIN_REQUESTS, MAX_REQUESTS = 2, 32
_FIRST_COST = 3072.0
"""Before anything is measured. A slow server (1,500 tokens a second) takes about a second for it."""
_OVERHEAD_CHARS = 8
_CHARS_PER_TOKEN = 5
_WEIGHT = 0.3
"""Of the newest measurement in the estimate."""
_MAX_GROWTH = 2.0
_MIN_TOOK_S = 1e-3


class ThroughputEstimate:
    def __init__(self, num_requests: int | None) -> None:
        """`num_requests`: how many should be under way, if it is given."""
        self.max_text_chars = float("inf")
        """Characters of a text that cost something: what is behind them is cut off by the server."""
        self._num_requests = num_requests
        self._work = _FIRST_COST
        self._under_way = 0.0

    @property
    def max_request_cost(self) -> float:
        """How large the next request should be. May be read by any thread."""
        return self._work / (self._num_requests or _NUM_SHARES)

    def set_max_tokens(self, max_tokens: int) -> None:
        """The server cuts texts off there."""
        self.max_text_chars = max_tokens * _CHARS_PER_TOKEN

    def cost(self, text: str) -> float:
        return min(len(text), self.max_text_chars) + _OVERHEAD_CHARS

    def has_room(self, num_running: int, costs: Iterable[float]) -> bool:
        """Whether another request may be under way. `costs`: of the requests whose vectors a kill would lose, which are
        those that run and those that wait for an earlier one."""
        found = list(costs)
        if self._num_requests is not None:
            return num_running < self._num_requests and len(found) < self._num_requests + MIN_REQUESTS
        return len(found) < MIN_REQUESTS or (num_running < MAX_REQUESTS and sum(found) < self._work)

    def begin(self, cost: float) -> float:
        """A request is sent. Returns all work that is under way, for `end`."""
        self._under_way += cost
        return self._under_way

    def end(self, cost: float, work: float, took_s: float | None) -> None:
        """It has been served in `took_s`, or not (None). The server has done the `work` that was under way when it was
        sent, as it serves first what comes first."""
        self._under_way -= cost
        if took_s is not None:
            measured = work / max(took_s, _MIN_TOOK_S) * WORK_S
            self._work = min(self._work + _WEIGHT * (measured - self._work), _MAX_GROWTH * self._work)
