"""What becomes of every request that is over: counted on the board, and told to whoever else wants to know.

Owns nothing but that: what is counted is `vecd.shm.shared_metrics`'s, what is known of a request is
`vecd.gateway.types.timeline`'s. Called by the connections through `vecd.gateway.http.server`, once for each answer that
has been handed over; each listener in `listeners` is called after it has been counted.
"""

import logging
import time
import traceback
from collections.abc import Callable
from typing import TypeAlias

from vecd.gateway.telemetry.shared_metrics import SharedMetrics
from vecd.gateway.types.messages import HttpRequest
from vecd.shm.shared_metrics import Counter, Histogram

log = logging.getLogger("vecd.gateway")

Listener: TypeAlias = Callable[[int, HttpRequest, float], None]
"""Told the status, the request and when it was over, by `time.monotonic`. Must not take long."""

# By these names, because Python 3.11 takes 0.2 µs to find a member of an enumeration.
_STAGES = slice(Histogram.PARSE, Histogram.TOTAL + 1)
_INPUTS, _INPUT_TOKENS = Counter.INPUTS, Counter.INPUT_TOKENS


class Observer:
    """The eyes of one gateway. Measured: 5 µs for an embedding request, without listeners."""

    def __init__(self, shared_metrics: SharedMetrics) -> None:
        self._board = shared_metrics
        self.listeners: list[Listener] = []

    def note_over(self, status: int, request: HttpRequest | None) -> None:
        """A request has its answer, or will have none (`vecd.gateway.telemetry.shared_metrics.GONE`). `request`: None
        where not even its head was understood."""
        shared_metrics = self._board
        if request is None:
            shared_metrics.add_answer(0, status)
            return
        timeline, now = request.timeline, time.monotonic()
        shared_metrics.add_answer(timeline.endpoint, status)
        if timeline.is_embedded and status < 300:
            shared_metrics.add(_INPUTS, timeline.num_inputs)
            shared_metrics.add(_INPUT_TOKENS, timeline.num_tokens)
            shared_metrics.observe_all(_STAGES, timeline.durations(now))
        for listener in self.listeners:
            try:
                listener(status, request, now)
            except Exception as error:  # it has its answer: whatever were raised from here, it would be given another
                where = "".join(traceback.format_tb(error.__traceback__))
                log.error("an answered request cannot be told of: %s\n%s", type(error).__name__, where)
