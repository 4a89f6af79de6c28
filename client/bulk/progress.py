"""How far a run is, how fast it goes, how long it will take, and what it waits for, in words.

Pure. Called by `vecd.client.bulk.run` and `vecd.client.bulk.command`.
"""

import math
from collections import deque
from typing import NamedTuple

_WINDOW_S = 30.0
"""Rates are of the last seconds: an earlier restart of the server says nothing about the time left."""
_BAR_WIDTH = 24
AGAIN_S = 10.0
"""From the first line about a server that does not serve to the second."""


class Moment(NamedTuple):
    """The state of a run at one time."""

    at_s: float
    """On any monotonic clock."""
    num_rows: int
    """Rows of the input that are done, also by earlier runs."""
    num_tokens: int
    num_bytes: int
    """Bytes of the inputs up to the last row that is done."""


class Course:
    """The moments of a run within the window of its rates."""

    def __init__(self, total_bytes: int, first: Moment) -> None:
        """`total_bytes` of the inputs; 0 if it is not known. Rates count from `first`."""
        self._total_bytes = total_bytes
        self._moments = deque([first])

    def add(self, moment: Moment) -> None:
        moments = self._moments
        moments.append(moment)
        while len(moments) > 2 and moments[1].at_s <= moment.at_s - _WINDOW_S:
            moments.popleft()

    def describe(self, now_s: float, num_in_flight: int = 0) -> str:
        """A bar, rows, rates and time left, as far as they are known. `num_in_flight`: rows that are requested."""
        first, last, total = self._moments[0], self._moments[-1], self._total_bytes
        elapsed_s = max(now_s - first.at_s, 1e-3)
        parts = [f"{last.num_rows:,} rows", *([f"{num_in_flight:,} in flight"] if num_in_flight else [])]
        if last is not first:
            parts.append(f"{(last.num_rows - first.num_rows) / elapsed_s:,.0f} rows/s")
            parts.append(f"{(last.num_tokens - first.num_tokens) / elapsed_s:,.0f} tokens/s")
            bytes_per_s = (last.num_bytes - first.num_bytes) / elapsed_s
            if total and bytes_per_s > 0:
                parts.append(f"{in_words((total - last.num_bytes) / bytes_per_s)} left")
        return (_bar(min(1.0, last.num_bytes / total)) if total else "") + ", ".join(parts)


class WaitMessages:
    """What to say, and when, while a server refuses or does not respond: at once, and later each time from then on."""

    def __init__(self, server: str, retry_for_s: float) -> None:
        """`server`: what is waited for. `retry_for_s`: how long it may serve nothing before the run ends."""
        self._server = server
        self._retry_for_s = retry_for_s
        self._began_at: float | None = None
        self._due_at = -math.inf
        self._interval_s = AGAIN_S

    def next(self, now_s: float, trouble: str) -> str | None:
        """The line to write now, if there is one. `trouble`: why requests wait, or ""."""
        if not trouble:
            self._began_at = None
            return None
        if self._began_at is None:  # a server that is busy now and then is not worth a line each time
            self._began_at, self._interval_s = now_s, AGAIN_S
        if now_s < self._due_at:
            return None
        waited_s = now_s - self._began_at
        self._due_at, self._interval_s = now_s + self._interval_s, 2 * self._interval_s
        if waited_s < AGAIN_S:
            return f"{self._server}: {trouble}. Trying again for up to {self._retry_for_s:g} s (--retry-for)"
        left_s = max(0.0, self._retry_for_s - waited_s)
        return f"still waiting for {self._server} after {waited_s:.0f} s: {trouble}. Giving up in {left_s:.0f} s"


def _bar(share: float) -> str:
    num_full = int(share * _BAR_WIDTH)
    return f"{share:4.0%} {'━' * num_full}{'╌' * (_BAR_WIDTH - num_full)} "


def in_words(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes."""
    whole = max(0, round(seconds))
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
