"""What `vecd top` remembers: the answer before, and how the rates went.

Owns the decision of what an answer is compared with, and the rows of the sparklines; a server that has been started
again begins anew. Pure. Called by `vecd.client.top.command`; read by `vecd.client.top.view`.
"""

from collections import deque
from typing import NamedTuple

from vecd.client.top.frame import Frame, is_same_life, make_frame
from vecd.client.top.stats import Stats

NUM_REMEMBERED = 600
"""Frames; more than a terminal has columns."""
_CPU_WINDOW_S = 5.0
"""A server reads its processes' times at most once a second, so that over less they would jump."""


class Trends(NamedTuple):
    """How the rates went, oldest first."""

    requests_per_s: tuple[float, ...] = ()
    inputs_per_s: tuple[float, ...] = ()
    tokens_per_s: tuple[float, ...] = ()
    num_lives: int = 1
    """Of the server, as far as was seen."""


class History:
    """Told of each answer, in order."""

    def __init__(self) -> None:
        self._requests_per_s: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._inputs_per_s: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._tokens_per_s: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._num_lives = 1
        self._before: Stats | None = None
        self._recent: deque[Stats] = deque(maxlen=NUM_REMEMBERED)

    def add(self, stats: Stats) -> Frame:
        """What has happened since the answer before."""
        if self._before is not None and not is_same_life(self._before, stats):
            self._begin_anew()
        while len(self._recent) > 1 and stats.now_s - self._recent[0].now_s > _CPU_WINDOW_S:
            self._recent.popleft()
        frame = make_frame(self._before, stats, self._recent[0] if self._recent else None)
        self._before = stats
        self._recent.append(stats)
        for row, rate in (
            (self._requests_per_s, frame.requests_per_s),
            (self._inputs_per_s, frame.inputs_per_s),
            (self._tokens_per_s, frame.tokens_per_s),
        ):
            if rate is not None:
                row.append(rate)
        return frame

    def trends(self) -> Trends:
        """Until now."""
        rows = tuple(self._requests_per_s), tuple(self._inputs_per_s), tuple(self._tokens_per_s)
        return Trends(*rows, self._num_lives)

    def _begin_anew(self) -> None:
        self._num_lives += 1
        self._before = None
        self._recent.clear()
        for row in (self._requests_per_s, self._inputs_per_s, self._tokens_per_s):
            row.clear()
